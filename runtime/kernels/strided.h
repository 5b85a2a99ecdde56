// Ops over arbitrary strides, for what no fused kernel covers. The last dim is the inner loop: it
// runs on vectors where it is contiguous (or broadcast) and element by element otherwise, with the
// same arithmetic per element.

// --- one element of any type ---
static float half_to_float(uint16_t h) {
    const uint32_t sign = (uint32_t)(h & 0x8000) << 16, exponent = h >> 10 & 0x1f,
                   mantissa = h & 0x3ff;
    if (exponent == 0) {
        const float value = (float)mantissa * 5.9604644775390625e-8f;  // 2^-24
        return sign ? -value : value;
    }
    return as_float(sign | (exponent == 31 ? 0x7f800000u : (exponent + 112) << 23) |
                    mantissa << 13);
}
static uint16_t float_to_half(float f) {
    uint32_t u;
    memcpy(&u, &f, 4);
    const uint16_t sign = (uint16_t)(u >> 16 & 0x8000);
    u &= 0x7fffffffu;
    if (u > 0x7f800000u) return sign | 0x7e00;
    if (u >= 0x477ff000u) return sign | 0x7c00;  // 65520 rounds to infinity
    if (u < 0x38800000u) {  // below 2^-14: the sum aligns the mantissa and rounds it
        float magnitude = as_float(u) + 0.5f;
        memcpy(&u, &magnitude, 4);
        return (uint16_t)(sign | (u - 0x3f000000u));
    }
    return (uint16_t)(sign | (u - 0x38000000u + 0xfff + (u >> 13 & 1)) >> 13);
}
static float read_float(const char* p, DType t) {
    switch (t) {
        case DType::f32: {
            float v;
            memcpy(&v, p, 4);
            return v;
        }
        case DType::bf16: {
            uint16_t v;
            memcpy(&v, p, 2);
            return as_float((uint32_t)v << 16);
        }
        case DType::f16: {
            uint16_t v;
            memcpy(&v, p, 2);
            return half_to_float(v);
        }
        case DType::i32: {
            int32_t v;
            memcpy(&v, p, 4);
            return (float)v;
        }
        case DType::i64: {
            int64_t v;
            memcpy(&v, p, 8);
            return (float)v;
        }
        case DType::boolean: return *p ? 1.0f : 0.0f;
    }
    return 0.0f;
}
static void write_float(char* p, DType t, float f) {
    switch (t) {
        case DType::f32: memcpy(p, &f, 4); return;
        case DType::bf16: store_part((bf16*)p, splat(f), 1); return;
        case DType::f16: {
            const uint16_t v = float_to_half(f);
            memcpy(p, &v, 2);
            return;
        }
        case DType::i32: {
            const int32_t v = (int32_t)f;
            memcpy(p, &v, 4);
            return;
        }
        case DType::i64: {
            const int64_t v = (int64_t)f;
            memcpy(p, &v, 8);
            return;
        }
        case DType::boolean: *p = f != 0.0f; return;
    }
}
static bool integral(DType t) { return t == DType::i32 || t == DType::i64 || t == DType::boolean; }
static int64_t read_int(const char* p, DType t) {
    if (t == DType::i64) {
        int64_t v;
        memcpy(&v, p, 8);
        return v;
    }
    if (t == DType::i32) {
        int32_t v;
        memcpy(&v, p, 4);
        return v;
    }
    return *p != 0;
}
static void write_int(char* p, DType t, int64_t v) {
    if (t == DType::i64) {
        memcpy(p, &v, 8);
        return;
    }
    if (t == DType::i32) {
        const int32_t narrow = (int32_t)v;
        memcpy(p, &narrow, 4);
        return;
    }
    *p = v != 0;
}

// --- up to W elements of a strided row ---
static F read_lanes(const char* p, DType t, int64_t stride, int64_t n) {
    if (stride == 1 && n >= W && t == DType::f32) return load((const float*)p);
    if (stride == 1 && n >= W && t == DType::bf16) return load((const bf16*)p);
    if (stride == 0) return splat(read_float(p, t));
    float v[W] = {};
    const int64_t step = stride * item_size(t);
    for (int64_t i = 0; i < smaller<int64_t>(n, W); i++) v[i] = read_float(p + i * step, t);
    return load(v);
}
static void write_lanes(char* p, DType t, int64_t stride, int64_t n, F f) {
    if (stride == 1 && n >= W && t == DType::f32) return store((float*)p, f);
    if (stride == 1 && n >= W && t == DType::bf16) return store((bf16*)p, f);
    float v[W];
    store(v, f);
    const int64_t step = stride * item_size(t);
    for (int64_t i = 0; i < smaller<int64_t>(n, W); i++) write_float(p + i * step, t, v[i]);
}

// --- walking the outer dims ---
static int64_t product(const int64_t* shape, int32_t dims) {
    int64_t n = 1;
    for (int32_t d = 0; d < dims; d++) n *= shape[d];
    return n;
}
static char* at(const Strided& s, const int64_t* shape, int32_t dims,
                int64_t flat) {  // row-major number -> address
    int64_t offset = 0;
    for (int32_t d = dims - 1; d >= 0; d--) {
        offset += flat % shape[d] * s.stride[d];
        flat /= shape[d];
    }
    return (char*)s.data + offset * item_size(s.dtype);
}

// Calls piece(first element of the inner dim, how many, outer number) so that one long row is
// shared as well.
template <class Piece>
RW_INLINE void over_rows(const Context& ctx, const int64_t* shape, int32_t dims, Piece piece) {
    const int64_t inner = shape[dims - 1], outer = product(shape, dims - 1);
    if (outer >= 2 * ctx.size || inner < 64 * ctx.size) {
        const Span part = my_part(ctx, outer);
        for (int64_t r = part.begin; r < part.end; r++) piece(0, inner, r);
        return;
    }
    const Span part = my_part(ctx, (inner + 63) / 64);
    const int64_t first = part.begin * 64, last = smaller(part.end * 64, inner);
    if (first >= last) return;
    for (int64_t r = 0; r < outer; r++) piece(first, last - first, r);
}

// --- unary ---
static F apply(UnaryOp op, F x) {
    float v[W];
    switch (op) {
        case UnaryOp::copy: return x;
        case UnaryOp::neg: return -x;
        case UnaryOp::exp: return vexp(x);
        case UnaryOp::abs: return vabs(x);
        case UnaryOp::silu: return vsilu<float>(x);
        case UnaryOp::gelu: return vgelu(x);
        case UnaryOp::gelu_tanh: return vgelu_tanh(x);
        case UnaryOp::relu: return x < 0.0f ? F{} : x;
        case UnaryOp::tanh: return vtanh(x);
        case UnaryOp::sigmoid: return vsigmoid(x);
        default: break;
    }
    store(v, x);
    for (int i = 0; i < W; i++)
        v[i] = op == UnaryOp::rsqrt  ? 1.0f / sqrtf(v[i])
               : op == UnaryOp::sqrt ? sqrtf(v[i])
               : op == UnaryOp::cos  ? cosf(v[i])
                                     : sinf(v[i]);
    return load(v);
}
static void copy_bits(const char* x, int64_t x_step, char* y, int64_t y_step, int64_t n,
                      int64_t item) {
    if (x_step == item && y_step == item) {
        if (x != y) memcpy(y, x, (size_t)(n * item));
        return;
    }
    for (int64_t i = 0; i < n; i++) memcpy(y + i * y_step, x + i * x_step, (size_t)item);
}
static void unary(const Context& ctx, const UnaryArgs& a) {
    const int64_t xs = a.x.stride[a.dims - 1], ys = a.y.stride[a.dims - 1];
    const int64_t x_step = xs * item_size(a.x.dtype), y_step = ys * item_size(a.y.dtype);
    over_rows(ctx, a.shape, a.dims, [&](int64_t first, int64_t count, int64_t r) {
        const char* x = at(a.x, a.shape, a.dims - 1, r) + first * x_step;
        char* y = at(a.y, a.shape, a.dims - 1, r) + first * y_step;
        if (a.op == UnaryOp::copy && a.x.dtype == a.y.dtype)
            return copy_bits(x, x_step, y, y_step, count, item_size(a.x.dtype));
        if (a.op == UnaryOp::copy && integral(a.x.dtype) && integral(a.y.dtype)) {
            for (int64_t i = 0; i < count; i++)
                write_int(y + i * y_step, a.y.dtype, read_int(x + i * x_step, a.x.dtype));
            return;
        }
        for (int64_t i = 0; i < count; i += W)
            write_lanes(y + i * y_step, a.y.dtype, ys, count - i,
                        apply(a.op, read_lanes(x + i * x_step, a.x.dtype, xs, count - i)));
    });
}

// --- binary ---
static F apply(BinaryOp op, F a, F b) {
    switch (op) {
        case BinaryOp::add: return a + b;
        case BinaryOp::sub: return a - b;
        case BinaryOp::mul: return a * b;
        case BinaryOp::div: return a / b;
        case BinaryOp::max: return a != a ? a : b != b ? b : vmax(a, b);
        case BinaryOp::min: return a != a ? a : b != b ? b : vmin(a, b);
        case BinaryOp::pow: break;
    }
    float u[W], v[W];
    store(u, a);
    store(v, b);
    for (int i = 0; i < W; i++) u[i] = v[i] == 2.0f ? u[i] * u[i] : powf(u[i], v[i]);
    return load(u);
}
static void binary(const Context& ctx, const BinaryArgs& a) {
    const int32_t inner = a.dims - 1;
    const int64_t as = a.a.stride[inner], bs = a.b.data ? a.b.stride[inner] : 0,
                  ys = a.y.stride[inner];
    const int64_t a_step = as * item_size(a.a.dtype), b_step = bs * item_size(a.b.dtype),
                  y_step = ys * item_size(a.y.dtype);
    over_rows(ctx, a.shape, a.dims, [&](int64_t first, int64_t count, int64_t r) {
        const char* p = at(a.a, a.shape, inner, r) + first * a_step;
        const char* q = a.b.data ? at(a.b, a.shape, inner, r) + first * b_step : nullptr;
        char* y = at(a.y, a.shape, inner, r) + first * y_step;
        for (int64_t i = 0; i < count; i += W) {
            const F right =
                q ? read_lanes(q + i * b_step, a.b.dtype, bs, count - i) : splat(a.scalar);
            write_lanes(y + i * y_step, a.y.dtype, ys, count - i,
                        apply(a.op, read_lanes(p + i * a_step, a.a.dtype, as, count - i), right));
        }
    });
}

// --- reductions ---
static void reduce(const Context& ctx, const ReduceArgs& a) {
    const int64_t kept = product(a.shape, a.dims), inner = a.shape[a.dims + a.reduced - 1];
    const int64_t outer = product(a.shape + a.dims, a.reduced - 1);
    const int64_t stride = a.x.stride[a.dims + a.reduced - 1], step = stride * item_size(a.x.dtype);
    Strided within = a.x;  // the reduced dims alone
    for (int32_t d = 0; d < a.reduced; d++) within.stride[d] = a.x.stride[a.dims + d];
    const Span part = my_part(ctx, kept);
    for (int64_t r = part.begin; r < part.end; r++) {
        within.data = at(a.x, a.shape, a.dims, r);
        F total = {};
        for (int64_t o = 0; o < outer; o++) {
            const char* p = at(within, a.shape + a.dims, a.reduced - 1, o);
            for (int64_t i = 0; i < inner; i += W) {
                F v = read_lanes(p + i * step, a.x.dtype, stride, inner - i);
                total += inner - i < W ? (lane_numbers() < (float)(inner - i) ? v : F{}) : v;
            }
        }
        float sum = sum_lanes(total);
        if (a.op == ReduceOp::mean) sum /= (float)(inner * outer);
        write_float(at(a.y, a.shape, a.dims, r), a.y.dtype, sum);
    }
}

static void softmax(const Context& ctx, const SoftmaxArgs& a) {
    const int32_t inner = a.dims - 1;
    const int64_t width = a.shape[inner], xs = a.x.stride[inner], ys = a.y.stride[inner];
    const int64_t x_step = xs * item_size(a.x.dtype), y_step = ys * item_size(a.y.dtype);
    const Span part = my_part(ctx, product(a.shape, inner));
    for (int64_t r = part.begin; r < part.end; r++) {
        const char* x = at(a.x, a.shape, inner, r);
        char* y = at(a.y, a.shape, inner, r);
        auto read = [&](int64_t i, float fill) {
            F v = read_lanes(x + i * x_step, a.x.dtype, xs, width - i);
            return width - i < W ? (lane_numbers() < (float)(width - i) ? v : splat(fill)) : v;
        };
        F top = splat(-kInf), total = {};
        for (int64_t i = 0; i < width; i += W) top = vmax(read(i, -kInf), top);
        const F most = splat(max_lanes(top));
        // Exponentials are taken twice: in place and in bf16 there is no room to keep them.
        for (int64_t i = 0; i < width; i += W) total += vexp(read(i, -kInf) - most);
        const F scale = splat(1.0f / sum_lanes(total));
        for (int64_t i = 0; i < width; i += W)
            write_lanes(y + i * y_step, a.y.dtype, ys, width - i,
                        vexp(read(i, -kInf) - most) * scale);
    }
}
