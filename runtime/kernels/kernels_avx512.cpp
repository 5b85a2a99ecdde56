// AVX-512 without bf16: weights are widened to f32 in registers.
#include "level_includes.h"

// The pragma doesn't define __AVX512F__ and the like in g++ before 13, so the features are named
// again for simd.h.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,fma,avx2,prefer-vector-width=512")
#define RW_AVX512 1

namespace ropeway {
namespace avx512 {
#include "kernel_set.h"
}  // namespace avx512

const KernelTable* table_avx512() {
    static const KernelTable table = avx512::make_table("avx512");
    return &table;
}
}  // namespace ropeway
#else
namespace ropeway {
const KernelTable* table_avx512() { return nullptr; }
}  // namespace ropeway
#endif
