// Replays a plan: an array of kernel calls bound once per bucket, run by one native call per step.
//
// Contract: the records were bounds-checked by whoever made them (compiler/targets/cpu/plan_checks.py,
// on load). run() checks the step's own numbers (ids, positions, slots, block tables, rows), so no
// input can make a kernel leave its operands. No allocation, no lock and no Python inside a step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <variant>
#include <vector>

#include "kernels.h"
#include "threads.h"

namespace ropeway {

constexpr int kMaxOperands = 8;
constexpr int kMaxInts = 4;
constexpr int kMaxFloats = 2;

enum class Space : int32_t { absent = -1, arena = 0, weights = 1, input = 2, cache = 3 };
enum class RowKind : int32_t { tokens = 0, requests = 1, rows = 2 };
enum class Role : int32_t { ids = 0, positions, rows, query_start, lengths, slots, block_table };

// The records mirror ctypes structures in runtime/devices/cpu/native.py.
struct RefRecord {
    int32_t space, index, dtype, dims;  // index: buffer, weight, cache, or Role
    int64_t offset;                     // bytes; for an input the cache group
    int64_t shape[kMaxDims - 1];        // of one row
    int64_t stride[kMaxDims - 1];       // elements
};
struct StepRecord {
    int32_t kernel, rows;
    RefRecord refs[kMaxOperands];
    int64_t ints[kMaxInts];
    double floats[kMaxFloats];
};
struct WeightRecord {
    const void* data;
    int64_t rows, width;  // logical [rows, width]; a vector has rows 1
    int32_t dtype, packed;
};
struct CacheRecord {
    int32_t group, heads, key_dim, value_dim, dtype, padding;
};

// True sizes and host arrays of one step.
struct StepData {
    int64_t tokens, requests, rows;
    const int32_t *ids, *positions, *row_index, *query_start, *lengths;
    const int32_t* const* slots;         // one per cache group
    const int32_t* const* block_tables;  // one per cache group: [requests, table_widths[g]]
    const int64_t* table_widths;
    int64_t groups;
    const uint8_t* peak_only;  // [rows]: not 0 where only the largest logit is read; or null
};

// The largest logit of each row, found in parts: that of row r is the merger of
// parts[p * rows + r], p ascending. No parts: the program doesn't find peaks.
struct Peaks {
    const Peak* parts;
    int64_t count, rows;
};

enum class Fault : int32_t {
    none = 0, counts, ids, positions, rows, query_start, lengths, slots, block_table, groups, bucket, no_cache,
    feed, stopped, no_memory  // of a StepQueue
};
struct RunReport {
    int32_t fault;   // Fault
    int32_t group;   // cache group, where there is one
    int64_t where;   // index in the faulty array
    int64_t value, limit;
};

struct NormGemm {
    GemmArgs gemm;
    RmsNormArgs norm;
    bool normed = false;
};
using Arguments = std::variant<EmbeddingArgs, RmsNormArgs, LayerNormArgs, NormGemm, GluArgs, RopeArgs,
                               KvWriteArgs, AttentionArgs, GatherRowsArgs, UnaryArgs, BinaryArgs,
                               ReduceArgs, SoftmaxArgs>;

struct BoundStep {
    Arguments arguments;
    RowKind rows;
    int32_t group = 0;            // of the cache it uses
    Role index = Role::ids;       // of an embedding: by ids or by positions
    int32_t cache = -1;
};

struct BucketRecord {
    int64_t tokens, requests, rows;
    std::vector<BoundStep> steps;
    int64_t counts[3] = {0, 0, 0};  // true sizes of the step being run
};

// 64-byte aligned memory that holds anything.
class Workspace {
public:
    ~Workspace();
    void reserve(size_t bytes);  // throws std::bad_alloc
    void* data() const { return data_; }

private:
    void* data_ = nullptr;
    size_t bytes_ = 0;
};

class Program {
public:
    Program(Team* team, const KernelTable* table, std::vector<StepRecord> steps,
            std::vector<WeightRecord> weights, std::vector<CacheRecord> caches,
            std::vector<int64_t> row_bytes, int64_t max_length, int64_t groups, int64_t head,
            void* arena);

    // Binds the steps for one bucket and reserves its scratch; returns the bucket's number.
    int add_bucket(int64_t tokens, int64_t requests, int64_t rows, const int64_t* offsets);
    // `blocks` blocks of `block_bytes`, each of which holds every cache's key and value plane, at
    // key_offsets and value_offsets.
    void set_caches(void* data, const int64_t* key_offsets, const int64_t* value_offsets,
                    int64_t blocks, int64_t block_bytes);
    void copy_blocks(const int64_t* pairs, int64_t count);
    // Runs the first `limit` steps (all when negative). `stamps`, when given, receives limit + 1
    // times in nanoseconds: the start, and the end of each step.
    RunReport run(int bucket, const StepData& data, int64_t limit, int64_t* stamps);
    // Runs several buckets' steps together, each plan step for all of them before the next, so that
    // the weights come from memory once. For the self-check: the buckets mustn't share buffers.
    RunReport run_together(const int32_t* buckets, const StepData* data, int64_t count,
                           int64_t limit);

    int64_t blocks() const { return blocks_; }
    // Of the last step that ran alone; valid until the next.
    Peaks peaks() const { return peaks_found_; }

private:
    BoundStep bind(const StepRecord& record, const int64_t* offsets) const;
    NormGemm product(const StepRecord& record, const int64_t* offsets, int rest) const;
    View view(const RefRecord& ref, const int64_t* offsets) const;
    Strided strided(const RefRecord& ref, const int64_t* offsets) const;
    void fill_shape(const RefRecord& ref, int64_t* shape, int32_t* dims) const;
    const void* weight(const RefRecord& ref) const;
    ScratchNeed scratch_need(BoundStep& step, const BucketRecord& bucket) const;
    RunReport check(const BucketRecord& bucket, const StepData& data) const;
    RunReport check_requests(const StepData& data) const;
    // Checks the data and fills the true sizes and host arrays in.
    RunReport prepare(int bucket, const StepData& data);
    // Has the step that makes the logits find their peaks.
    void want_peaks(BucketRecord& bucket, const StepData& data);
    void patch(BoundStep& step, const StepData& data) const;
    void replay(const int32_t* buckets, int64_t count, int64_t limit, int64_t* stamps);
    // A thread's part of one plan step for each of the buckets.
    void replay_step(const Context& context, const int32_t* buckets, int64_t count,
                     size_t number) const;
    void execute(const Context& context, const BoundStep& step) const;

    Team* team_;
    const KernelTable* table_;
    std::vector<StepRecord> records_;
    std::vector<WeightRecord> weights_;
    std::vector<CacheRecord> caches_;
    std::vector<int64_t> row_bytes_;
    int64_t max_length_, groups_;
    int64_t head_;  // the GEMM that makes the logits, or -1
    int64_t id_limit_ = INT64_MAX, position_limit_ = INT64_MAX;
    char* arena_;
    char* cache_ = nullptr;
    std::vector<CachePlane> keys_, values_;
    int64_t blocks_ = 0, block_bytes_ = 0;
    std::vector<std::unique_ptr<BucketRecord>> buckets_;
    std::vector<Workspace> scratch_;
    Workspace shared_;
    std::vector<Peak> peaks_;
    Peaks peaks_found_ = {nullptr, 0, 0};
};

// One line per kernel, as compiler/targets/cpu/kernel_table.py states it.
const char* plan_signatures();

}  // namespace ropeway
