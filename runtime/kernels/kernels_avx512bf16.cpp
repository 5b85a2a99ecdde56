// AVX-512 with bf16 dot products: AMD Zen 4 and later.
#include "level_includes.h"

// The pragma doesn't define __AVX512F__ and the like in g++ before 13, so the features are named
// again for simd.h.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2,prefer-vector-width=512")
#define RW_AVX512 1
#define RW_BF16_DOT 1

namespace ropeway {
namespace avx512bf16 {
#include "kernel_set.h"
}  // namespace avx512bf16

const KernelTable* table_avx512bf16() {
    static const KernelTable table = avx512bf16::make_table("avx512_bf16");
    return &table;
}
}  // namespace ropeway
#else
namespace ropeway {
const KernelTable* table_avx512bf16() { return nullptr; }
}  // namespace ropeway
#endif
