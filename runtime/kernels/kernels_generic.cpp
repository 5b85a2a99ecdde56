// Plain C++ on 128-bit vectors: whatever the compiler's baseline is (SSE2, NEON).
#include "level_includes.h"

namespace ropeway {
namespace generic {
#include "kernel_set.h"
}  // namespace generic

const KernelTable* table_generic() {
    static const KernelTable table = generic::make_table("generic");
    return &table;
}
}  // namespace ropeway
