#include "sampling_loops.h"

#include <cstring>
#include <limits>

// Vectors are GCC's own, eight doubles wide whatever the machine: a narrower instruction set gets
// several instructions, the same lanes and so the same bits. The build turns contraction off.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wpsabi"
#pragma GCC diagnostic ignored "-Wattributes"
#endif

namespace ropeway {
namespace {

#define INLINE static inline __attribute__((always_inline))

typedef float F8 __attribute__((vector_size(32)));
typedef int32_t I8 __attribute__((vector_size(32)));
typedef double D8 __attribute__((vector_size(64)));
typedef uint64_t L8 __attribute__((vector_size(64)));

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr double kLog2E = 1.4426950408889634074;
constexpr double kLn2High = 6.93147180369123816490e-01;
constexpr double kLn2Low = 1.90821492927058770002e-10;
constexpr double kRound = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
constexpr double kSmallest = -708.0;           // exp below it is taken as 0

INLINE void load(F8& v, const float* p) { std::memcpy(&v, p, sizeof v); }

INLINE void load_tail(F8& v, const float* p, int64_t count, float fill) {
    float lanes[8];
    for (int i = 0; i < 8; ++i) lanes[i] = i < count ? p[i] : fill;
    std::memcpy(&v, lanes, sizeof v);
}

// exp(x) for x <= 0: x = n ln2 + r, a Taylor polynomial of degree 13 in r (error 4e-18), then 2^n
// put into the exponent. One text for eight lanes and for one, so that both round alike; what it
// gives below kSmallest is for the caller to drop.
template <typename Real, typename Bits>
INLINE void exp_any(Real& result, const Real& x) {
    const Real shifted = x * kLog2E + kRound;
    const Real n = shifted - kRound;
    const Real r = (x - n * kLn2High) - n * kLn2Low;
    Real p = r * (1.0 / 6227020800.0) + 1.0 / 479001600.0;
    p = p * r + 1.0 / 39916800.0;
    p = p * r + 1.0 / 3628800.0;
    p = p * r + 1.0 / 362880.0;
    p = p * r + 1.0 / 40320.0;
    p = p * r + 1.0 / 5040.0;
    p = p * r + 1.0 / 720.0;
    p = p * r + 1.0 / 120.0;
    p = p * r + 1.0 / 24.0;
    p = p * r + 1.0 / 6.0;
    p = p * r + 0.5;
    p = p * r + 1.0;
    p = p * r + 1.0;
    Bits bits;
    std::memcpy(&bits, &shifted, sizeof bits);
    bits = (bits + 1023) << 52;
    Real power;
    std::memcpy(&power, &bits, sizeof power);
    result = p * power;
}

INLINE double add_lanes(const D8& v) {
    return ((v[0] + v[4]) + (v[2] + v[6])) + ((v[1] + v[5]) + (v[3] + v[7]));
}

INLINE void weigh8(D8& sum, const F8& x, double shift, double scale, double floor) {
    const D8 z = (__builtin_convertvector(x, D8) - shift) * scale;
    D8 w;
    exp_any<D8, L8>(w, z);
    const D8 zero = {};
    w = z > kSmallest ? w : zero;
    w = w >= floor ? w : zero;
    sum += w;
}

INLINE double weigh_body(const float* x, int64_t n, double shift, double scale, double floor,
                         double* blocks) {
    double total = 0.0;
    for (int64_t begin = 0; begin < n; begin += kSumBlock) {
        const int64_t end = begin + kSumBlock < n ? begin + kSumBlock : n;
        D8 sum = {};
        int64_t i = begin;
        F8 v;
        for (; i + 8 <= end; i += 8) {
            load(v, x + i);
            weigh8(sum, v, shift, scale, floor);
        }
        if (i < end) {
            load_tail(v, x + i, end - i, -kInfinity);
            weigh8(sum, v, shift, scale, floor);
        }
        const double block = add_lanes(sum);
        blocks[begin / kSumBlock] = block;
        total += block;
    }
    return total;
}

INLINE void peak8(F8& best, I8& where, I8& bad, const F8& v, const I8& ids) {
    const I8 better = v > best;
    best = better ? v : best;
    where = better ? ids : where;
    bad |= ~(v < kInfinity);  // also true for NaN
}

// Four chains: one would wait six cycles for each eight numbers.
INLINE Peak peak_body(const float* x, int64_t n) {
    constexpr int kChains = 4;
    F8 best[kChains] = {};
    I8 where[kChains] = {}, ids[kChains] = {}, bad = {};
    for (int c = 0; c < kChains; ++c) {
        best[c] -= kInfinity;
        where[c] += std::numeric_limits<int32_t>::max();
        ids[c] += I8{0, 1, 2, 3, 4, 5, 6, 7} + 8 * c;
    }
    int64_t i = 0;
    F8 v;
    for (; i + 8 * kChains <= n; i += 8 * kChains) {
        for (int c = 0; c < kChains; ++c) {
            load(v, x + i + 8 * c);
            peak8(best[c], where[c], bad, v, ids[c]);
            ids[c] += 8 * kChains;
        }
    }
    for (int c = 0; i < n; ++c, i += 8) {
        load_tail(v, x + i, n - i, -kInfinity);
        peak8(best[c], where[c], bad, v, ids[c]);
    }
    Peak peak{-kInfinity, 0, false};
    bool first = true;
    for (int c = 0; c < kChains; ++c) {
        for (int lane = 0; lane < 8; ++lane) {
            peak.bad |= bad[lane] != 0;
            if (where[c][lane] == std::numeric_limits<int32_t>::max()) continue;
            const bool better = first || best[c][lane] > peak.value ||
                                (best[c][lane] == peak.value && where[c][lane] < peak.index);
            if (!better) continue;
            peak.value = best[c][lane];
            peak.index = where[c][lane];
            first = false;
        }
    }
    return peak;
}

INLINE int64_t count_before_body(const float* x, int64_t n, float value, int64_t index) {
    int64_t count = 0;
    for (int64_t i = 0; i < index; ++i) count += x[i] >= value;
    for (int64_t i = index + 1; i < n; ++i) count += x[i] > value;
    return count;
}

INLINE int64_t next_above_body(const float* x, int64_t n, int64_t start, float threshold) {
    int64_t i = start;
    F8 v;
    for (; i + 8 <= n; i += 8) {
        load(v, x + i);
        const I8 above = v > threshold;
        int64_t any[4];
        std::memcpy(any, &above, sizeof any);
        if ((any[0] | any[1]) | (any[2] | any[3])) break;
    }
    for (; i < n; ++i) {
        if (x[i] > threshold) return i;
    }
    return n;
}

INLINE void masked_body(const float* x, int64_t n, const int32_t* mask, float* y) {
    const I8 bits = {1, 2, 4, 8, 16, 32, 64, 128};
    F8 none = {};
    none -= kInfinity;
    int64_t i = 0;
    F8 v;
    for (; i + 8 <= n; i += 8) {
        load(v, x + i);
        const int32_t byte = (mask[i / 32] >> (i % 32)) & 255;
        const I8 kept = (bits & byte) != 0;
        v = kept ? v : none;
        std::memcpy(y + i, &v, sizeof v);
    }
    for (; i < n; ++i) y[i] = (mask[i / 32] >> (i % 32)) & 1 ? x[i] : -kInfinity;
}

#define DEFINE_LOOPS(NAME, TARGET)                                                               \
    TARGET Peak peak_##NAME(const float* x, int64_t n) { return peak_body(x, n); }               \
    TARGET double weigh_##NAME(const float* x, int64_t n, double shift, double scale,            \
                               double floor, double* blocks) {                                   \
        return weigh_body(x, n, shift, scale, floor, blocks);                                    \
    }                                                                                            \
    TARGET int64_t count_##NAME(const float* x, int64_t n, float value, int64_t index) {         \
        return count_before_body(x, n, value, index);                                            \
    }                                                                                            \
    TARGET int64_t next_##NAME(const float* x, int64_t n, int64_t start, float threshold) {      \
        return next_above_body(x, n, start, threshold);                                          \
    }                                                                                            \
    TARGET void masked_##NAME(const float* x, int64_t n, const int32_t* mask, float* y) {        \
        masked_body(x, n, mask, y);                                                              \
    }                                                                                            \
    const SamplingLoops loops_##NAME = {peak_##NAME, weigh_##NAME, count_##NAME, next_##NAME,    \
                                        masked_##NAME};

DEFINE_LOOPS(plain, )

#if defined(__x86_64__)
// No "fma" here: with contraction off it would go unused, and leaving it out makes sure of that.
DEFINE_LOOPS(avx2, __attribute__((target("avx2"))))
DEFINE_LOOPS(avx512, __attribute__((target("avx512f,avx512dq,avx512vl"))))

int best_isa() {
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
        __builtin_cpu_supports("avx512vl")) {
        return 2;
    }
    return __builtin_cpu_supports("avx2") ? 1 : 0;
}
#endif

}  // namespace

const SamplingLoops& sampling_loops(int isa) {
#if defined(__x86_64__)
    const int best = best_isa();
    const int level = isa < 0 || isa > best ? best : isa;
    if (level == 2) return loops_avx512;
    if (level == 1) return loops_avx2;
#else
    (void)isa;
#endif
    return loops_plain;
}

double exp_weight(double x) {
    double result;
    exp_any<double, uint64_t>(result, x);
    return x > kSmallest ? result : 0.0;
}

// x = 2^e m with m in [sqrt(1/2), sqrt(2)); log m = 2 atanh((m - 1) / (m + 1)) as a series.
double log_positive(double x) {
    int64_t exponent = 0;
    if (x < 2.2250738585072014e-308) {  // subnormal
        x *= 18014398509481984.0;       // 2^54
        exponent = -54;
    }
    int64_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    exponent += (bits >> 52) - 1023;
    bits = (bits & 0x000FFFFFFFFFFFFF) | 0x3FF0000000000000;
    double m;
    std::memcpy(&m, &bits, sizeof m);
    if (m > 1.4142135623730951) {
        m *= 0.5;
        exponent += 1;
    }
    const double s = (m - 1.0) / (m + 1.0);
    const double q = s * s;
    double series = 0.0;
    for (int k = 23; k >= 1; k -= 2) series = series * q + 1.0 / k;
    const double e = static_cast<double>(exponent);
    return e * kLn2High + (2.0 * s * series + e * kLn2Low);
}

}  // namespace ropeway
