// The vector abstraction that every kernel is written against, once per instruction set.
//
// Included by kernels_<isa>.cpp inside its own namespace and after its `#pragma GCC target`, so
// that no function here can be shared between levels. Vectors are GCC's: arithmetic is written with
// operators and lowered by the compiler; only what it can't be trusted with (fused multiply-add,
// bf16 rounding, dot products) is spelt per level. No include guard: each level includes it exactly
// once, from kernel_set.h.

#define RW_INLINE static inline __attribute__((always_inline))
#define RW_INLINE_MEMBER inline __attribute__((always_inline))

#if defined(RW_AVX512)
constexpr int W = 16;  // lanes of a float vector
#elif defined(RW_AVX2)
constexpr int W = 8;
#else
constexpr int W = 4;  // SSE2 and NEON
#endif

typedef float F __attribute__((vector_size(W * 4)));
typedef int32_t I __attribute__((vector_size(W * 4)));
typedef uint32_t U __attribute__((vector_size(W * 4)));
typedef uint16_t H __attribute__((vector_size(W * 2)));
typedef uint64_t Q __attribute__((vector_size(W * 4)));  // half as many 64-bit lanes

struct bf16 {
    uint16_t bits;
};

constexpr float kInf = __builtin_inff();

template <class T>
RW_INLINE T smaller(T a, T b) {
    return b < a ? b : a;
}
template <class T>
RW_INLINE T larger(T a, T b) {
    return a < b ? b : a;
}

RW_INLINE F splat(float x) {
    return x - F{};
}  // minus: 0 + -0 would be +0, and x - 0 is folded away
RW_INLINE F as_f(U x) {
    F f;
    __builtin_memcpy(&f, &x, sizeof f);
    return f;
}
RW_INLINE U as_u(F x) {
    U u;
    __builtin_memcpy(&u, &x, sizeof u);
    return u;
}
RW_INLINE I as_i(F x) {
    I u;
    __builtin_memcpy(&u, &x, sizeof u);
    return u;
}
RW_INLINE float as_float(uint32_t x) {
    float f;
    __builtin_memcpy(&f, &x, sizeof f);
    return f;
}

// One rounding where the machine has it; else product and sum round apart. Never mixed within a
// level.
RW_INLINE F fma(F a, F b, F c) {
#if defined(RW_AVX512)
    return (F)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(RW_AVX2)
    return (F)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
    return (F)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
    return a * b + c;
#endif
}

RW_INLINE F vmax(F a, F b) {  // b where either is NaN
#if defined(RW_AVX512)
    return (F)_mm512_max_ps((__m512)a, (__m512)b);
#elif defined(RW_AVX2)
    return (F)_mm256_max_ps((__m256)a, (__m256)b);
#else
    return a > b ? a : b;
#endif
}
RW_INLINE F vmin(F a, F b) {
#if defined(RW_AVX512)
    return (F)_mm512_min_ps((__m512)a, (__m512)b);
#elif defined(RW_AVX2)
    return (F)_mm256_min_ps((__m256)a, (__m256)b);
#else
    return a < b ? a : b;
#endif
}
// Whether every lane of v is at most x; never where a lane is NaN.
RW_INLINE bool all_at_most(F v, float x) {
#if defined(RW_AVX512)
    return _mm512_cmp_ps_mask((__m512)v, _mm512_set1_ps(x), _CMP_LE_OQ) == 0xffff;
#elif defined(RW_AVX2)
    return _mm256_movemask_ps(_mm256_cmp_ps((__m256)v, _mm256_set1_ps(x), _CMP_LE_OQ)) == 0xff;
#else
    bool all = true;
    for (int i = 0; i < W; i++) all &= v[i] <= x;
    return all;
#endif
}
RW_INLINE F vabs(F a) { return as_f(as_u(a) & 0x7fffffffu); }

// --- loads and stores ---
RW_INLINE F load(const float* p) {
    F f;
    __builtin_memcpy(&f, p, sizeof f);
    return f;
}
RW_INLINE void store(float* p, F f) { __builtin_memcpy(p, &f, sizeof f); }

RW_INLINE F load(const bf16* p) {
#if defined(RW_AVX512)
    __m256i h;
    __builtin_memcpy(&h, p, sizeof h);
    return (F)_mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(h), 16));
#else
    H h;
    __builtin_memcpy(&h, p, sizeof h);
    return as_f(__builtin_convertvector(h, U) << 16);
#endif
}

RW_INLINE H round_bits(F f) {
#if defined(RW_BF16_DOT)
    __m256bh h = _mm512_cvtneps_pbh((__m512)f);
    H out;
    __builtin_memcpy(&out, &h, sizeof out);
    return out;
#else
    U u = as_u(f);
    U rounded = (u + 0x7fffu + ((u >> 16) & 1u)) >> 16;
    U quiet = (u >> 16) | 0x40u;  // a NaN must not be rounded to infinity
    rounded = (u & 0x7fffffffu) > 0x7f800000u ? quiet : rounded;
#if defined(RW_AVX512)
    __m256i h = _mm512_cvtepi32_epi16((__m512i)rounded);
    H out;
    __builtin_memcpy(&out, &h, sizeof out);
    return out;
#else
    return __builtin_convertvector(rounded, H);
#endif
#endif
}
RW_INLINE void store(bf16* p, F f) {
    H h = round_bits(f);
    __builtin_memcpy(p, &h, sizeof h);
}

// 2 W lanes at once, which the conversion instruction packs into one store.
RW_INLINE void store_two(float* p, F low, F high) { store(p, low), store(p + W, high); }
RW_INLINE void store_two(bf16* p, F low, F high) {
#if defined(RW_BF16_DOT)
    __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    __builtin_memcpy(p, &both, sizeof both);
#else
    store(p, low), store(p + W, high);
#endif
}

// store_two, and the sum of both as they were stored added to `sum`: lane by lane, or in pairs of
// lanes where the machine adds up bf16 pairs.
RW_INLINE void store_two(float* p, F low, F high, F& sum) {
    store_two(p, low, high);
    sum += low, sum += high;
}
RW_INLINE void store_two(bf16* p, F low, F high, F& sum) {
#if defined(RW_BF16_DOT)
    const __m512bh both = _mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
    __builtin_memcpy(p, &both, sizeof both);
    sum = (F)_mm512_dpbf16_ps((__m512)sum, both, (__m512bh)_mm512_set1_epi32(0x3f803f80));
#else
    store_two(p, low, high);
    sum += load(p), sum += load(p + W);
#endif
}

RW_INLINE F rounded(F f, const float*) { return f; }
RW_INLINE F rounded(F f, const bf16*) {
    return as_f(__builtin_convertvector(round_bits(f), U) << 16);
}
template <class T>
RW_INLINE F round_to(F f) {  // as it reads back after a store to T
    return rounded(f, (const T*)nullptr);
}

// The first n (< W) lanes; the others load as zero and aren't stored.
template <class T>
RW_INLINE F load_part(const T* p, int64_t n) {
    T buffer[W] = {};
    __builtin_memcpy(buffer, p, (size_t)n * sizeof(T));
    return load(buffer);
}
template <class T>
RW_INLINE void store_part(T* p, F f, int64_t n) {
    T buffer[W];
    store(buffer, f);
    __builtin_memcpy(p, buffer, (size_t)n * sizeof(T));
}
template <class T>
RW_INLINE F load_some(const T* p, int64_t n) {
    return n >= W ? load(p) : load_part(p, n);
}
template <class T>
RW_INLINE void store_some(T* p, F f, int64_t n) {
    if (n >= W)
        store(p, f);
    else
        store_part(p, f, n);
}

// --- reductions: a fixed tree over the lanes ---
RW_INLINE float sum_lanes(F f) {
#if defined(RW_AVX512)
    return _mm512_reduce_add_ps((__m512)f);
#endif
    float v[W];
    store(v, f);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) v[i] += v[i + half];
    return v[0];
}
RW_INLINE float max_lanes(F f) {
#if defined(RW_AVX512)
    return _mm512_reduce_max_ps((__m512)f);
#endif
    float v[W];
    store(v, f);
    for (int half = W / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) v[i] = v[i] < v[i + half] ? v[i + half] : v[i];
    return v[0];
}
RW_INLINE F lane_numbers() {
    F f = {};
    for (int i = 0; i < W; i++) f[i] = (float)i;
    return f;
}

// --- functions ---
#if defined(RW_AVX512)
// 2^x with p(f) near 2^f for f in [0, 1]: the machine splits the exponent off and puts it back.
RW_INLINE F fraction_of(F x) { return (F)_mm512_reduce_ps((__m512)x, 0x09); }  // x - floor(x)
RW_INLINE F scaled_by(F p, F x) {  // p * 2^floor(x)
    return (F)_mm512_scalef_ps((__m512)p, (__m512)x);
}
#endif

// 2^x for x <= 127, exactly 1 at 0; below -125 anything from 0 to 2^-125. Minimax polynomials with
// the constant term fixed at 1: relative error 9e-8 for float, 3.4e-6 for bf16, whose own rounding
// is 2e-3.
template <class T>
RW_INLINE F exp2_clamped(F x) {
#if defined(RW_AVX512)
    if (sizeof(T) == 2) {
        const F f = fraction_of(x);
        F p = fma(splat(1.355575e-2f), f, splat(5.203237e-2f));
        p = fma(p, f, splat(2.4137976e-1f));
        p = fma(p, f, splat(6.9303212e-1f));
        p = fma(p, f, splat(1.0f));
        return scaled_by(p, x);
    }
#endif
    F clamped = vmax(splat(-125.0f), x);  // NaN stays NaN
    F shifted = clamped + 12582912.0f;  // 1.5 * 2^23: the nearest integer lands in the low bits
    F f = clamped - (shifted - 12582912.0f);  // exact, in [-1/2, 1/2]
    F p;
    if (sizeof(T) == 2) {
        p = splat(9.582852688e-3f);
        p = fma(p, f, splat(5.590642518e-2f));
        p = fma(p, f, splat(2.402409862e-1f));
        p = fma(p, f, splat(6.931241933e-1f));
    } else {
        p = splat(1.326472668e-3f);
        p = fma(p, f, splat(9.671512677e-3f));
        p = fma(p, f, splat(5.550733745e-2f));
        p = fma(p, f, splat(2.402224208e-1f));
        p = fma(p, f, splat(6.931469776e-1f));
    }
    p = fma(p, f, splat(1.0f));
    return as_f(as_u(p) + (U)(as_u(shifted) << 23));
}
constexpr float kLog2e = 1.44269504088896341f;

// The same for a weight that is rounded to T at once: for bf16 an error of 1.0e-4 will do.
template <class T>
RW_INLINE F exp2_weight(F x) {
#if defined(RW_AVX512)
    if (sizeof(T) == 2) {
        const F f = fraction_of(x);
        F p = fma(splat(7.8267945e-2f), f, splat(2.26307680e-1f));
        p = fma(p, f, splat(6.95424375e-1f));
        p = fma(p, f, splat(1.0f));
        return scaled_by(p, x);
    }
#endif
    return exp2_clamped<T>(x);
}

// e^x over the whole range: the argument is reduced with ln 2 in two parts, so that 80 keeps full
// precision.
RW_INLINE F vexp(F x) {
    F clamped = vmin(vmax(x, splat(-104.0f)), splat(89.0f));
    F n = fma(clamped, splat(kLog2e), splat(12582912.0f)) - 12582912.0f;
    F r = fma(n, splat(-0.693359375f), clamped);
    r = fma(n, splat(2.12194440e-4f), r);
    F p = splat(1.9875691500e-4f);
    p = fma(p, r, splat(1.3981999507e-3f));
    p = fma(p, r, splat(8.3334519073e-3f));
    p = fma(p, r, splat(4.1665795894e-2f));
    p = fma(p, r, splat(1.6666665459e-1f));
    p = fma(p, r, splat(5.0000001201e-1f));
    p = fma(p, r * r, r) + 1.0f;
    I half = __builtin_convertvector(n, I) >> 1;  // two steps reach 2^128 and the denormals
    I rest = __builtin_convertvector(n, I) - half;
    p = p * as_f((U)((half + 127) << 23)) * as_f((U)((rest + 127) << 23));
    return x != x ? x : p;
}

RW_INLINE F vsigmoid(F x) { return 1.0f / (1.0f + vexp(-x)); }

RW_INLINE F vtanh(F x) {
    F a = vabs(x);
    F big = 1.0f - 2.0f / (vexp(a + a) + 1.0f);
    F s = a * a;  // below 0.3 the subtraction above would lose digits
    F p = fma(s, splat(-0.0088632355f), splat(0.0218694885f));
    p = fma(p, s, splat(-0.0539682540f));
    p = fma(p, s, splat(0.1333333333f));
    p = fma(p, s, splat(-0.3333333333f));
    F small = fma(p * s, a, a);
    F t = a < 0.3f ? small : big;
    return x != x ? x : as_f(as_u(t) | (as_u(x) & 0x80000000u));
}

// erf by Abramowitz and Stegun 7.1.26, absolute error 1.5e-7: under two units in the last place of
// 1 + erf.
RW_INLINE F verf(F x) {
    F a = vabs(x);
    F t = 1.0f / fma(a, splat(0.3275911f), splat(1.0f));
    F p = fma(t, splat(1.061405429f), splat(-1.453152027f));
    p = fma(p, t, splat(1.421413741f));
    p = fma(p, t, splat(-0.284496736f));
    p = fma(p, t, splat(0.254829592f));
    F e = 1.0f - p * t * vexp(-a * a);
    return x != x ? x : as_f(as_u(e) | (as_u(x) & 0x80000000u));
}

// To bf16's precision where T is bf16: a short exponential, and an estimated reciprocal refined
// once (2^-27) instead of a division, which alone would take as long as all the rest.
template <class T>
RW_INLINE F vsilu(F x) {
    if (sizeof(T) == 4) return x / (1.0f + vexp(-x));
    const F e = exp2_clamped<T>(vmin(x * -kLog2e, splat(126.0f)));
#if defined(RW_AVX512)
    const F d = 1.0f + e;
    const F guess = (F)_mm512_rcp14_ps((__m512)d);
    return x * (guess * (2.0f - d * guess));
#else
    return x / (1.0f + e);
#endif
}
RW_INLINE F vgelu(F x) { return 0.5f * x * (1.0f + verf(x * 0.70710678118654752f)); }
RW_INLINE F vgelu_tanh(F x) {
    F inner = 0.79788456080286536f * fma(0.044715f * x * x, x, x);
    return 0.5f * x * (1.0f + vtanh(inner));
}
