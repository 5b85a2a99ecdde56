// Row-wise kernels: norms, gated units, rotary embedding, table look-ups. Rows are split evenly
// over the team.

struct Span {
    int64_t begin, end;
};
RW_INLINE Span my_part(const Context& ctx, int64_t count) {
    return {count * ctx.rank / ctx.size, count * (ctx.rank + 1) / ctx.size};
}

template <class T>
RW_INLINE T* row(const View& view, int64_t i) {
    return (T*)view.data + i * view.stride;
}

// --- norms ---
struct RmsRow {  // gain of the activation dtype or null; y may be x
    const void* gain;
    float eps, offset;
};

// One vector: s = round(x + residual), stored to `sum` unless null; y = round(s / rms(s) * (gain +
// offset)). Two accumulators of fixed order, so the statistics depend on nothing but the row.
// WHOLE: the width is a multiple of 2 W, and no lane needs a test.
template <class T, class Out, bool WHOLE>
RW_INLINE void rms_vector_of(const T* x, const T* residual, T* sum, Out* y, int64_t width,
                             const RmsRow& norm) {
    const auto at = [&](const T* p, int64_t i) {
        return WHOLE ? load(p + i) : i < width ? load_some(p + i, width - i) : F{};
    };
    const auto put = [&](auto* p, int64_t i, F v) {
        if (WHOLE)
            store(p + i, v);
        else if (i < width)
            store_some(p + i, v, width - i);
    };
    F squares0 = {}, squares1 = {};
    for (int64_t i = 0; i < width; i += 2 * W) {
        F s0 = at(x, i), s1 = at(x, i + W);
        if (residual) {
            s0 = round_to<T>(s0 + at(residual, i));
            s1 = round_to<T>(s1 + at(residual, i + W));
            if (sum) put(sum, i, s0), put(sum, i + W, s1);
        }
        squares0 = fma(s0, s0, squares0);
        squares1 = fma(s1, s1, squares1);
    }
    const float mean = sum_lanes(squares0 + squares1) / (float)width;
    const F scale = splat(1.0f / sqrtf(mean + norm.eps));
    const bool from_sum = residual && sum;  // the first loop may have overwritten x or residual
    const T* in = from_sum ? sum : x;
    for (int64_t i = 0; i < width; i += W) {
        F s = at(in, i);
        if (residual && !from_sum) s = round_to<T>(s + at(residual, i));
        const F g = norm.gain ? at((const T*)norm.gain, i) + norm.offset : splat(1.0f);
        const F v = s * scale * g;
        put(y, i, sizeof(Out) == sizeof(T) ? v : round_to<T>(v));
    }
}
template <class T, class Out>
static void rms_vector(const T* x, const T* residual, T* sum, Out* y, int64_t width,
                       const RmsRow& norm) {
    width % (2 * W) ? rms_vector_of<T, Out, false>(x, residual, sum, y, width, norm)
                    : rms_vector_of<T, Out, true>(x, residual, sum, y, width, norm);
}

template <class T>
static void rms_norm_rows(const Context& ctx, const RmsNormArgs& a) {
    const RmsRow norm = {a.gain, a.eps, a.offset};
    const Span part = my_part(ctx, a.rows);
    for (int64_t r = part.begin; r < part.end; r++)
        for (int64_t h = 0; h < a.heads; h++) {
            const int64_t at = h * a.width;
            const T* residual = a.residual.data ? row<T>(a.residual, r) + at : nullptr;
            T* sum = a.sum.data ? row<T>(a.sum, r) + at : nullptr;
            rms_vector<T, T>(row<T>(a.x, r) + at, residual, sum, row<T>(a.y, r) + at, a.width,
                             norm);
        }
}
static void rms_norm(const Context& ctx, const RmsNormArgs& a) {
    a.x.dtype == DType::bf16 ? rms_norm_rows<bf16>(ctx, a) : rms_norm_rows<float>(ctx, a);
}

template <class T>
static void layer_vector(const T* x, T* y, const LayerNormArgs& a) {
    F total = {};
    for (int64_t i = 0; i < a.width; i += W) total += load_some(x + i, a.width - i);
    const F mean = splat(sum_lanes(total) / (float)a.width);
    F squares = {};  // of the deviations: a mean far from zero costs no digits
    for (int64_t i = 0; i < a.width; i += W) {
        F d = load_some(x + i, a.width - i) - mean;
        if (a.width - i < W) d = lane_numbers() < (float)(a.width - i) ? d : F{};
        squares = fma(d, d, squares);
    }
    const F scale = splat(1.0f / sqrtf(sum_lanes(squares) / (float)a.width + a.eps));
    for (int64_t i = 0; i < a.width; i += W) {
        const int64_t n = a.width - i;
        F v = (load_some(x + i, n) - mean) * scale;
        if (a.gain) v = v * load_some((const T*)a.gain + i, n);
        if (a.bias) v = v + load_some((const T*)a.bias + i, n);
        store_some(y + i, v, n);
    }
}

template <class T>
static void layer_norm_rows(const Context& ctx, const LayerNormArgs& a) {
    const Span part = my_part(ctx, a.rows);
    for (int64_t r = part.begin; r < part.end; r++)
        for (int64_t h = 0; h < a.heads; h++)
            layer_vector(row<T>(a.x, r) + h * a.width, row<T>(a.y, r) + h * a.width, a);
}
static void layer_norm(const Context& ctx, const LayerNormArgs& a) {
    a.x.dtype == DType::bf16 ? layer_norm_rows<bf16>(ctx, a) : layer_norm_rows<float>(ctx, a);
}

// --- gated linear units ---
template <class T, Activation act>
RW_INLINE F gated(F gate, F up) {
    const F g = act == Activation::silu   ? vsilu<T>(gate)
                : act == Activation::gelu ? vgelu(gate)
                                          : vgelu_tanh(gate);
    return round_to<T>(g) * up;
}

template <class T, Activation act>
static void glu_rows(const Context& ctx, const GluArgs& a) {
    // Columns are split, not rows, when there are too few rows to share.
    const bool by_column = a.rows < 4 * ctx.size;
    const int64_t chunk = 4 * W;
    const Span part = my_part(ctx, by_column ? (a.width + chunk - 1) / chunk : a.rows);
    const int64_t first_row = by_column ? 0 : part.begin, last_row = by_column ? a.rows : part.end;
    const int64_t first = by_column ? part.begin * chunk : 0;
    const int64_t last = by_column ? smaller(part.end * chunk, a.width) : a.width;
    for (int64_t r = first_row; r < last_row; r++) {
        const T* gate = row<T>(a.x, r);
        const T* up = gate + a.width;
        T* y = row<T>(a.y, r);
        for (int64_t i = first; i < last; i += W) {
            store_some(y + i,
                       gated<T, act>(load_some(gate + i, last - i), load_some(up + i, last - i)),
                       last - i);
        }
    }
}
template <class T>
static void glu_typed(const Context& ctx, const GluArgs& a) {
    switch (a.act) {
        case Activation::silu: return glu_rows<T, Activation::silu>(ctx, a);
        case Activation::gelu: return glu_rows<T, Activation::gelu>(ctx, a);
        case Activation::gelu_tanh: return glu_rows<T, Activation::gelu_tanh>(ctx, a);
    }
}
static void glu(const Context& ctx, const GluArgs& a) {
    a.x.dtype == DType::bf16 ? glu_typed<bf16>(ctx, a) : glu_typed<float>(ctx, a);
}

// --- rotary embedding ---
template <class T>
static void rotate_half_split(const T* x, T* y, const float* cosines, int64_t half) {
    const float* sines = cosines + half;
    for (int64_t i = 0; i < half; i += W) {
        const int64_t n = half - i;
        F c = load_some(cosines + i, n), s = load_some(sines + i, n);
        F a = load_some(x + i, n), b = load_some(x + half + i, n);
        F first = a * c - b * s, second = b * c + a * s;
        store_some(y + i, first, n);
        store_some(y + half + i, second, n);
    }
}
template <class T>
RW_INLINE float scalar(const T* p) {
    return load_part(p, 1)[0];
}
template <class T>
static void rotate_interleaved(const T* x, T* y, const float* cosines, int64_t half) {
    const float* sines = cosines + half;
    for (int64_t i = 0; i < half; i++) {
        const float a = scalar(x + 2 * i), b = scalar(x + 2 * i + 1);
        store_part(y + 2 * i, splat(a * cosines[i] - b * sines[i]), 1);
        store_part(y + 2 * i + 1, splat(b * cosines[i] + a * sines[i]), 1);
    }
}
template <class T>
static void rotate_heads(const RopeArgs& a, const T* x, T* y, int64_t heads, const float* table) {
    for (int64_t h = 0; h < heads; h++, x += a.head_dim, y += a.head_dim) {
        if (a.interleaved)
            rotate_interleaved(x, y, table, a.rotary_dim / 2);
        else
            rotate_half_split(x, y, table, a.rotary_dim / 2);
        if (x != y && a.rotary_dim < a.head_dim)
            memcpy(y + a.rotary_dim, x + a.rotary_dim,
                   (size_t)(a.head_dim - a.rotary_dim) * sizeof(T));
    }
}
template <class T>
static void rope_rows(const Context& ctx, const RopeArgs& a) {
    const Span part = my_part(ctx, a.rows);
    for (int64_t r = part.begin; r < part.end; r++) {
        const float* table = a.table + a.positions[r] * a.table_stride;
        rotate_heads(a, row<const T>(a.q, r), row<T>(a.q_out, r), a.q_heads, table);
        if (a.k_heads) rotate_heads(a, row<const T>(a.k, r), row<T>(a.k_out, r), a.k_heads, table);
    }
}
static void rope(const Context& ctx, const RopeArgs& a) {
    a.q.dtype == DType::bf16 ? rope_rows<bf16>(ctx, a) : rope_rows<float>(ctx, a);
}

// --- look-ups ---
static void embedding(const Context& ctx, const EmbeddingArgs& a) {
    const Span part = my_part(ctx, a.rows);
    const int64_t item = item_size(a.table.dtype);
    const int64_t kp = round_up(a.width, kPanel);
    for (int64_t r = part.begin; r < part.end; r++) {
        const int64_t id = a.ids[r];
        char* out = (char*)a.y.data + r * a.y.stride * item;
        if (!a.packed) {
            memcpy(out, (const char*)a.table.data + id * a.table.stride * item,
                   (size_t)(a.width * item));
            continue;
        }
        // One 32-bit word per k (f32) or per pair of k (bf16), 32 words from one to the next.
        const uint32_t* panel =
            (const uint32_t*)((const char*)a.table.data + id / kPanel * kp * kPanel * item) +
            id % kPanel;
        const int64_t words = a.width * item / 4;
        for (int64_t w = 0; w < words; w++) memcpy(out + 4 * w, panel + w * kPanel, 4);
        if (a.width * item % 4)
            memcpy(out + 4 * words, panel + words * kPanel, 2);  // an odd width in bf16
    }
}

static void gather_rows(const Context& ctx, const GatherRowsArgs& a) {
    const Span part = my_part(ctx, a.rows);
    const int64_t item = item_size(a.x.dtype);
    for (int64_t r = part.begin; r < part.end; r++)
        memcpy((char*)a.y.data + r * a.y.stride * item,
               (const char*)a.x.data + a.index[r] * a.x.stride * item, (size_t)(a.width * item));
}
