// Tile multiplication (AMX bf16) with AVX-512 BF16 around it: Intel Xeon since Sapphire Rapids.
#include "level_includes.h"

// The pragma doesn't define __AVX512F__ and the like in g++ before 13, so the features are named
// again for simd.h.
#if defined(__x86_64__)
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,fma,avx2,prefer-vector-width=512")
#define RW_AVX512 1
#define RW_BF16_DOT 1
#define RW_AMX 1

namespace ropeway {
namespace amx {
#include "kernel_set.h"
}  // namespace amx

const KernelTable* table_amx() {
    static const KernelTable table = amx::make_table("amx");
    return &table;
}
}  // namespace ropeway
#else
namespace ropeway {
const KernelTable* table_amx() { return nullptr; }
}  // namespace ropeway
#endif
