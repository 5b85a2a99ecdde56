// The one matrix micro-kernel: c[rows, 32] = a[rows, k] . B, with B in panel32. Weight GEMM, QK^T
// and PV all run on it.
//
// B comes in segments of `k_segment` (a multiple of 32) that follow each other in k: one for a
// weight panel, one per cache block for PV. Per element of c there is one fp32 accumulator that
// starts at zero and takes k in ascending order, in steps that don't depend on rows, columns or
// segments: that is what makes results bit-equal for every batch size and thread count.
//
// `half` selects columns 0..15 or 16..31 alone, so that an odd number of panels still splits evenly
// over two threads.

// What a level multiplies bf16 weights with: itself where it has a dot product, f32 otherwise
// (widened when packed).
template <class T>
struct OperandOf {
    typedef T type;
};
#if !defined(RW_BF16_DOT)
template <>
struct OperandOf<bf16> {
    typedef float type;
};
#endif
template <class T>
using operand = typename OperandOf<T>::type;

enum class Columns { all, low, high };

// How the caches should take it: B comes from memory for the first time; the rows of `a` won't be
// read again before many others were; at each step of 32 of k, `lines` cache lines from `ahead` on
// are asked for, where the level does that at all (fetches_ahead).
struct Access {
    bool b_streams = false, a_once = false;
    const char* ahead = nullptr;
    int64_t lines = 0;
};

// Work to do beside a product: items [0, count), in ascending order, all before c is written.
template <class Run>
struct Beside {
    int64_t count;
    Run run;  // (first, last)
};
template <class Run>
Beside(int64_t, Run) -> Beside<Run>;

template <class T>
struct Segments {
    const T* const* data;
    int64_t count;
    int64_t k;          // of each
    int64_t a_gap = 0;  // operands of `a` to skip from the end of a segment to the next
};

// Rows of c are kPanel floats apart, whichever columns are asked for.
constexpr int64_t kTileStride = kPanel;

// Distance in bytes of the software prefetch of B when it streams from memory; see
// tests/benchmarks/NOTES.md.
constexpr int64_t kStreamAhead = 8192;

#if defined(RW_AVX512)
constexpr int kRowsAtOnce = 12;  // 12 x 2 accumulators of 32 registers
#elif defined(RW_AVX2)
constexpr int kRowsAtOnce = 3;  // 3 x 4 of 16
#elif defined(__aarch64__)
constexpr int kRowsAtOnce = 3;  // 3 x 8 of 32
#else
constexpr int kRowsAtOnce = 1;  // 1 x 8 of 16
#endif

// One step of k on one vector of columns: f32 one k, bf16 a pair.
RW_INLINE void load_operand(const float* a, F& v) { v = splat(*a); }

template <int ROWS, int VECTORS, bool STREAM>
static void product_rows(const float* a, int64_t lda, Segments<float> b, int64_t column, float* c) {
    F sums[ROWS][VECTORS] = {};
    for (int64_t s = 0; s < b.count; s++, a += b.a_gap) {
        const float* p = b.data[s] + column;
        for (int64_t k = 0; k < b.k; k++, p += kPanel, a++) {
            if (STREAM) {
                __builtin_prefetch((const char*)p + kStreamAhead, 0, 2);
                if (VECTORS * W > 16) __builtin_prefetch((const char*)p + kStreamAhead + 64, 0, 2);
            }
            F right[VECTORS];
            for (int v = 0; v < VECTORS; v++) right[v] = load(p + v * W);
            for (int r = 0; r < ROWS; r++) {
                const F left = splat(a[r * lda]);
                for (int v = 0; v < VECTORS; v++) sums[r][v] = fma(left, right[v], sums[r][v]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(c + r * kTileStride + v * W, sums[r][v]);
}

#if defined(RW_BF16_DOT)
template <int ROWS, int VECTORS, bool STREAM>
static void product_rows(const bf16* a, int64_t lda, Segments<bf16> b, int64_t column, float* c) {
    F sums[ROWS][VECTORS] = {};
    for (int64_t s = 0; s < b.count; s++, a += b.a_gap) {
        const bf16* p = b.data[s] + 2 * column;
        for (int64_t k = 0; k < b.k; k += 2, p += 2 * kPanel, a += 2) {
            if (STREAM) {
                __builtin_prefetch((const char*)p + kStreamAhead, 0, 2);
                if (VECTORS > 1) __builtin_prefetch((const char*)p + kStreamAhead + 64, 0, 2);
            }
            __m512bh right[VECTORS];
            for (int v = 0; v < VECTORS; v++)
                right[v] = (__m512bh)_mm512_loadu_si512(p + 2 * v * W);
            for (int r = 0; r < ROWS; r++) {
                int32_t pair;
                __builtin_memcpy(&pair, a + r * lda, 4);
                const __m512bh left = (__m512bh)_mm512_set1_epi32(pair);
                for (int v = 0; v < VECTORS; v++)
                    sums[r][v] = (F)_mm512_dpbf16_ps((__m512)sums[r][v], left, right[v]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(c + r * kTileStride + v * W, sums[r][v]);
}
#else
template <int ROWS, int VECTORS, bool STREAM>
static void product_rows(const float* a, int64_t lda, Segments<bf16> b, int64_t column, float* c) {
    F sums[ROWS][VECTORS] = {};
    for (int64_t s = 0; s < b.count; s++, a += b.a_gap) {
        const bf16* p = b.data[s] + 2 * column;
        for (int64_t k = 0; k < b.k; k += 2, p += 2 * kPanel, a += 2) {
            if (STREAM) {
                __builtin_prefetch((const char*)p + kStreamAhead, 0, 2);
                if (VECTORS * W > 16) __builtin_prefetch((const char*)p + kStreamAhead + 64, 0, 2);
            }
            for (int v = 0; v < VECTORS; v++) {
                U pair;  // even k in the low half, odd k in the high half
                __builtin_memcpy(&pair, p + 2 * v * W, sizeof pair);
                const F even = as_f(pair << 16), odd = as_f(pair & 0xffff0000u);
                for (int r = 0; r < ROWS; r++)
                    sums[r][v] = fma(splat(a[r * lda]), even, sums[r][v]);
                for (int r = 0; r < ROWS; r++)
                    sums[r][v] = fma(splat(a[r * lda + 1]), odd, sums[r][v]);
            }
        }
    }
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(c + r * kTileStride + v * W, sums[r][v]);
}
#endif

// Row counts are template arguments of product_rows; this picks one for `rows` <= N.
template <int N, int VECTORS, bool STREAM, class T>
RW_INLINE void product_few(const operand<T>* a, int64_t lda, int64_t rows, Segments<T> b,
                           int64_t column, float* c) {
    if constexpr (N > 1) {
        if (rows < N) return product_few<N - 1, VECTORS, STREAM, T>(a, lda, rows, b, column, c);
    }
    product_rows<N, VECTORS, STREAM>(a, lda, b, column, c);
}

template <class T>
static void vector_product(const operand<T>* a, int64_t lda, int64_t rows, Segments<T> b,
                           Columns columns, bool stream, float* c) {
    for (int64_t r = 0; r < rows; r += kRowsAtOnce, stream = false) {
        const operand<T>* from = a + r * lda;
        const int64_t n = smaller<int64_t>(rows - r, kRowsAtOnce);
        float* to = c + r * kTileStride;
        if (columns == Columns::all) {
            if (stream)
                product_few<kRowsAtOnce, kPanel / W, true, T>(from, lda, n, b, 0, to);
            else
                product_few<kRowsAtOnce, kPanel / W, false, T>(from, lda, n, b, 0, to);
        } else {
            const int64_t column = columns == Columns::low ? 0 : kPanel / 2;
            product_few<kRowsAtOnce, kPanel / 2 / W, false, T>(from, lda, n, b, column,
                                                               to + column);
        }
    }
}

#if defined(RW_AMX)
#include "panel_product_amx.h"
#else
struct TileUnit {};  // nothing to set up
constexpr int64_t kRowsBest =
    kRowsAtOnce * (kRowsAtOnce < 8 ? 8 : 4);  // rows of a product that use a panel in L1 well
template <class T>
constexpr bool fetches_ahead() {
    return false;
}
// At most kRowsBest rows. There is nothing to gain from work beside it.
template <class T, class Run>
RW_INLINE void panel_product(TileUnit&, const operand<T>* a, int64_t lda, int64_t rows,
                             Segments<T> b, Columns columns, Access access, float* c,
                             Beside<Run> beside) {
    beside.run(0, beside.count);
    vector_product<T>(a, lda, rows, b, columns, access.b_streams, c);
}
#endif

template <class T>
static void panel_product(TileUnit& tiles, const operand<T>* a, int64_t lda, int64_t rows,
                          Segments<T> b, float* c) {
    panel_product<T>(tiles, a, lda, rows, b, Columns::all, {}, c,
                     Beside{0, [](int64_t, int64_t) {}});
}
