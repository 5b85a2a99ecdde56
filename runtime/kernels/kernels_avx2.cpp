// AVX2 with fused multiply-add.
#include "level_includes.h"

// The pragma doesn't define __AVX512F__ and the like in g++ before 13, so the features are named
// again for simd.h.
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define RW_AVX2 1

namespace ropeway {
namespace avx2 {
#include "kernel_set.h"
}  // namespace avx2

const KernelTable* table_avx2() {
    static const KernelTable table = avx2::make_table("avx2");
    return &table;
}
}  // namespace ropeway
#else
namespace ropeway {
const KernelTable* table_avx2() { return nullptr; }
}  // namespace ropeway
#endif
