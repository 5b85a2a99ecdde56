// The seam between the step executor and the compute kernels.
//
// Every kernel is called by all threads of a team at once with the same arguments (SPMD) and splits
// its own work by (rank, size). The executor puts a barrier after each call; a kernel may use the
// team's barrier inside. Nothing here checks sizes: whoever builds the arguments has proved the
// bounds (the plan reader does it once, at load).
//
// Conventions
//  * A View is a matrix of rows: `stride` is the distance between rows in elements, the columns of
//  a row are adjacent.
//  * Row counts are true counts. Rows past them are neither read nor written.
//  * Outputs don't overlap inputs unless the struct says that they may.
//  * Results of a row don't depend on the other rows, on the number of rows, or on (rank, size):
//  bit for bit.
//  * Every rounding to bf16 is to nearest even.
#pragma once
#include <cstddef>
#include <cstdint>

#include "peak.h"

namespace ropeway {

enum class DType : int32_t { f32 = 0, bf16 = 1, f16 = 2, i32 = 3, i64 = 4, boolean = 5 };

constexpr int kPanel = 32;        // columns of a weight panel, tokens of a cache block
constexpr int kBlockTokens = 32;  // = kPanel: QK^T and PV run on the weight GEMM's tiles
constexpr int kTileTokens = 256;  // attention's unit of online softmax, from position 0
constexpr int kMaxDims = 6;
constexpr int kMaxHeadDim = 256;
constexpr int64_t kGemmChunkBytes = 1 << 20;  // packed rows in flight: half of a 2 MiB L2
constexpr int64_t kGemmOwnRows = 192;         // a thread multiplies rows of its own from here on
constexpr int64_t kAttentionSplitBytes =
    4 << 20;  // partial results of a context that is split over threads

constexpr int64_t round_up(int64_t n, int64_t unit) { return (n + unit - 1) / unit * unit; }
constexpr int64_t item_size(DType t) {
    return t == DType::i64                         ? 8
           : t == DType::boolean                   ? 1
           : (t == DType::bf16 || t == DType::f16) ? 2
                                                   : 4;
}

struct View {
    void* data = nullptr;
    int64_t stride = 0;  // elements between rows
    DType dtype = DType::f32;
};

// One thread's part in a call. Scratch is 64-byte aligned, holds anything on entry and nothing
// afterwards.
struct Context {
    int rank = 0;
    int size = 1;
    void* scratch = nullptr;                          // this thread's own
    void* shared = nullptr;                           // one for the whole team
    void (*barrier)(void* team, int rank) = nullptr;  // may be null when size == 1
    void* team = nullptr;
};
struct ScratchNeed {
    size_t per_thread = 0;
    size_t shared = 0;
};

// --- norms ---
// sum = round(x + residual) when residual.data is set, written to `sum` unless sum.data is null
// (sum may be the very buffer of x or of residual in rms_norm, not in a GEMM's prologue).
// y = round(sum * rsqrt(mean(sum^2) + eps) * (gain + offset)), statistics and product in f32, from
// the rounded sum. gain: [width] of the activation dtype (x.dtype), or null for 1.
// A row holds `heads` vectors of `width`, adjacent: x row = [heads * width]. y may be x.
struct RmsNormArgs {
    int64_t rows = 0, heads = 1, width = 0;
    View x, residual, sum, y;  // bf16 or f32, all the same dtype
    const void* gain = nullptr;
    float eps = 1e-5f, offset = 0.0f;
};
// Rows hold `heads` vectors of `width` as in rms_norm; gain and bias are [width], the same for every head.
struct LayerNormArgs {  // y = round((x - mean) * rsqrt(var + eps) * gain + bias)
    int64_t rows = 0, heads = 1, width = 0;
    View x, y;
    const void* gain = nullptr;
    const void* bias = nullptr;
    float eps = 1e-5f;
};

// --- linear ---
// y[rows, n] = act(x)[rows, k] . W^T + bias, then + residual. W is panel32 (zero padded):
//   bf16 [ceil(n/32)][kp/2][32][2], f32 [ceil(n/32)][kp][32], kp = k rounded up to 32. Panels are
//   64-byte aligned.
// x and W have one dtype; y has that dtype or f32. bias: [n] of x.dtype or null.
// With `add` set: y = round(round(x W^T + bias) + add), add of y's dtype (it may be y's buffer).
// With `norm` set the input is normalised while it is packed: its fields rows, width and y are
// ignored (rows of this call, width k, the result rounded to x.dtype); norm->x is the input and `x`
// above is ignored. `norm->residual`/`norm->sum` work as in rms_norm, except that sum may not
// overlap x or residual. With a glu epilogue panel p of W holds gates 16p.. in its first 16 columns
// and their ups in the others (n a multiple of 32), bias is [gates | ups], y is [rows, n/2] of
// x.dtype, and y = round(round(act(gate)) * up) with gate and up = round(x W^T + bias): bit for bit
// what gemm and then glu give, without the matrix between them. `add` must be null.
// With `peaks` set (y f32, no `add`, no glu) thread t writes the peak of row r over its own columns,
// which lie before those of thread t + 1, to peaks[t * rows + r]; row r of y is then written unless
// peak_only[r] isn't 0.
enum class Epilogue : int32_t { none = 0, silu = 1, gelu = 2, gelu_tanh = 3 };
struct GemmArgs {
    int64_t rows = 0, n = 0, k = 0;
    View x, y, add;
    const void* weight = nullptr;
    const void* bias = nullptr;
    const RmsNormArgs* norm = nullptr;
    Epilogue epilogue = Epilogue::none;
    Peak* peaks = nullptr;               // [team size][rows]
    const uint8_t* peak_only = nullptr;  // [rows], or null for none
};
// `rows` at its largest (the bucket's); need is monotone in rows.
ScratchNeed gemm_scratch(const GemmArgs& args);

// --- row-wise pieces ---
enum class Activation : int32_t { silu = 0, gelu = 1, gelu_tanh = 2 };
struct GluArgs {  // y[rows, width] = round(round(act(x[:, :width])) * x[:, width:]); x is [rows, 2
                  // * width]
    int64_t rows = 0, width = 0;
    View x, y;
    Activation act = Activation::silu;
};
// out = x with its first rotary_dim rotated by row `position` of table: f32 [.., rotary_dim] =
// cos(half) | sin(half). q and k as [rows, heads, head_dim]; outputs may be the inputs. k_heads 0:
// only q.
struct RopeArgs {
    int64_t rows = 0;
    int32_t q_heads = 0, k_heads = 0, head_dim = 0, rotary_dim = 0;
    bool interleaved = false;
    View q, k, q_out, k_out;
    const int32_t* positions = nullptr;
    const float* table = nullptr;
    int64_t table_stride = 0;  // elements between table rows
};
struct EmbeddingArgs {  // y[i] = table[ids[i]]
    int64_t rows = 0, width = 0, vocab = 0;
    bool packed = false;  // table is a panel32 weight with n = vocab, k = width; else row-major
                          // with `table.stride`
    View table, y;        // same dtype
    const int32_t* ids = nullptr;
};
struct GatherRowsArgs {  // y[i] = x[index[i]], any dtype
    int64_t rows = 0, width = 0;
    View x, y;
    const int32_t* index = nullptr;
};

// --- general strided ops (unfused graphs) ---
enum class UnaryOp : int32_t {
    copy = 0,
    neg,
    exp,
    rsqrt,
    sqrt,
    cos,
    sin,
    abs,
    silu,
    gelu,
    gelu_tanh,
    relu,
    tanh,
    sigmoid  // copy also casts
};
enum class BinaryOp : int32_t { add = 0, sub, mul, div, pow, max, min };
struct Strided {  // strides in elements, 0 for a broadcast dim; may be of any sign and order
    void* data = nullptr;
    DType dtype = DType::f32;
    int64_t stride[kMaxDims] = {};
};
// Shapes are the output's. Arithmetic is in f32 and rounded to y.dtype; copy between equal dtypes
// moves bits, copy between integers is exact. y may be x (or a, or b) with equal strides. dims
// >= 1.
struct UnaryArgs {
    int32_t dims = 1;
    int64_t shape[kMaxDims] = {};
    Strided x, y;
    UnaryOp op = UnaryOp::copy;
};
struct BinaryArgs {  // b.data null: `scalar` is the second operand
    int32_t dims = 1;
    int64_t shape[kMaxDims] = {};
    Strided a, b, y;
    float scalar = 0.0f;
    BinaryOp op = BinaryOp::add;
};
enum class ReduceOp : int32_t { sum = 0, mean };
struct ReduceArgs {  // y over the kept dims; x strides: kept dims first, then the reduced ones
    int32_t dims = 1, reduced = 1;  // dims kept (shape of y; may be 0), dims reduced (>= 1)
    int64_t shape[kMaxDims] = {};   // kept sizes, then reduced sizes
    Strided x, y;
    ReduceOp op = ReduceOp::sum;
};
struct SoftmaxArgs {  // along the last of `dims` (put the axis there by strides)
    int32_t dims = 1;
    int64_t shape[kMaxDims] = {};
    Strided x, y;
};

// --- attention ---
// Cache planes of one layer, by blocks of 32 tokens; dp = head dim rounded up to 32 (k and v have
// their own):
//   bf16 k [kv_heads][dp/2][32 tokens][2]  v [kv_heads][dp/32][16][32][2] (pairs of tokens)
//   f32  k [kv_heads][dp][32 tokens]       v [kv_heads][dp/32][32 tokens][32]
struct CachePlane {
    void* data = nullptr;
    int64_t block_stride =
        0;  // bytes from block to block (>= kv_heads * dp * 32 * item size), a multiple of 64
};
constexpr int64_t cache_block_bytes(int64_t kv_heads, int64_t head_dim, DType t) {
    return kv_heads * round_up(head_dim, kPanel) * kBlockTokens * item_size(t);
}
// Writes token t's k and v at slots[t] = block * 32 + offset. Offset 0 zeroes the block first. A
// negative slot is skipped. Tokens of one block must be adjacent in the step and in the order of
// their offsets.
struct KvWriteArgs {
    int64_t tokens = 0;
    int32_t kv_heads = 0, head_dim = 0, v_head_dim = 0;
    DType dtype = DType::bf16;
    View k, v;  // [tokens, kv_heads * head_dim]
    CachePlane k_cache, v_cache;
    const int32_t* slots = nullptr;
};
// Request r owns tokens query_start[r] .. query_start[r+1]; its token j sits at position
// lengths[r] - (query_start[r+1] - query_start[r]) + j and sees positions p with pos - window < p
// <= pos (window 0: all). Block b of request r is block_table[r * table_stride + b]. score =
// softcap(q.k * scale); y = softmax(score) v. Run kv_write first (with a barrier between).
struct AttentionArgs {
    int64_t tokens = 0, requests = 0;
    int32_t heads = 0, kv_heads = 0, head_dim = 0, v_head_dim = 0;
    DType dtype = DType::bf16;
    float scale = 1.0f, softcap = 0.0f;
    int32_t window = 0;
    View q, y;  // [tokens, heads * head_dim], [tokens, heads * v_head_dim]
    CachePlane k_cache, v_cache;
    const int32_t* block_table = nullptr;
    int64_t table_stride = 0;
    const int32_t* query_start = nullptr;
    const int32_t* lengths = nullptr;
};
// tokens and requests at their largest; max_length: the longest context a request can have.
ScratchNeed attention_scratch(const AttentionArgs& args, int64_t max_length, int threads);

// --- the table ---
struct KernelTable {
    const char* isa = "";
    void (*gemm)(const Context&, const GemmArgs&) = nullptr;
    void (*rms_norm)(const Context&, const RmsNormArgs&) = nullptr;
    void (*layer_norm)(const Context&, const LayerNormArgs&) = nullptr;
    void (*glu)(const Context&, const GluArgs&) = nullptr;
    void (*rope)(const Context&, const RopeArgs&) = nullptr;
    void (*embedding)(const Context&, const EmbeddingArgs&) = nullptr;
    void (*gather_rows)(const Context&, const GatherRowsArgs&) = nullptr;
    void (*unary)(const Context&, const UnaryArgs&) = nullptr;
    void (*binary)(const Context&, const BinaryArgs&) = nullptr;
    void (*reduce)(const Context&, const ReduceArgs&) = nullptr;
    void (*softmax)(const Context&, const SoftmaxArgs&) = nullptr;
    void (*kv_write)(const Context&, const KvWriteArgs&) = nullptr;
    void (*attention)(const Context&, const AttentionArgs&) = nullptr;
    // Sum over the buffer's 64-bit words (`bytes` a multiple of 64), as fast as memory gives it:
    // the bandwidth probe.
    uint64_t (*read_sum)(const void* data, size_t bytes) = nullptr;
    // sum_i h(w_i) * (1 + (first + i) * 0x3C6EF372FE94F82A) mod 2^64 over the little-endian 64-bit
    // words of data, the last one zero padded; h(w) = w ^ (w >> 32). Multipliers are odd, so a
    // change inside one word always changes the sum. Pieces cut at multiples of 8 bytes add up.
    // compiler/artifact/checksum.py is its twin.
    uint64_t (*checksum_words)(const void* data, size_t bytes, uint64_t first) = nullptr;
};

// The best level this machine runs, or the one named (amx, avx512_bf16, avx512, avx2, generic).
// Null when the name is unknown or the machine lacks it. A null or empty name reads ROPEWAY_ISA.
// Asks the kernel for AMX once; thread safe.
const KernelTable* select_kernels(const char* name);
// Names of the levels this machine runs, best first, separated by commas.
const char* available_kernels();

}  // namespace ropeway
