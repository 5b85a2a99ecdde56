// All kernels of one level, in dependency order. Included once by each kernels_<isa>.cpp inside its
// namespace.
#include "simd.h"
// clang-format off
#include "rows.h"
#include "strided.h"
#include "panel_product.h"
#include "gemm.h"
#include "kv_write.h"
#include "weighted_values.h"
#include "attention.h"
#include "memory.h"
// clang-format on

static KernelTable make_table(const char* isa) {
    KernelTable t;
    t.isa = isa;
    t.gemm = gemm;
    t.rms_norm = rms_norm;
    t.layer_norm = layer_norm;
    t.glu = glu;
    t.rope = rope;
    t.embedding = embedding;
    t.gather_rows = gather_rows;
    t.unary = unary;
    t.binary = binary;
    t.reduce = reduce;
    t.softmax = softmax;
    t.kv_write = kv_write;
    t.attention = attention;
    t.read_sum = read_sum;
    t.checksum_words = checksum_words;
    return t;
}
