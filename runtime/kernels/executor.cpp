#include "executor.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>

namespace ropeway {
namespace {

template <class... Handlers>
struct Overloaded : Handlers... {
    using Handlers::operator()...;
};
template <class... Handlers>
Overloaded(Handlers...) -> Overloaded<Handlers...>;

int64_t now() {
    using namespace std::chrono;
    return duration_cast<nanoseconds>(steady_clock::now().time_since_epoch()).count();
}

RunReport fault(Fault kind, int64_t where, int64_t value, int64_t limit, int64_t group = 0) {
    return {static_cast<int32_t>(kind), static_cast<int32_t>(group), where, value, limit};
}

// The first value outside low..limit (limit excluded).
RunReport check_range(Fault kind, const int32_t* values, int64_t count, int64_t low, int64_t limit,
                      int64_t group = 0) {
    for (int64_t i = 0; i < count; ++i) {
        if (values[i] < low || values[i] >= limit) return fault(kind, i, values[i], limit, group);
    }
    return {};
}

// Weights that a thread's share of a product may have to be found in its L2 cache by the next bucket.
constexpr int64_t kPieceBytes = 1 << 20;

// Several buckets run a product whose weights don't fit the team's L2 caches in pieces of this many
// columns, each piece for all buckets before the next; 0: whole. Every piece writes the same `sum`.
// The bias of gates and ups lies in another order than their panels.
int64_t piece_columns(const BoundStep& step, int64_t buckets, int64_t threads) {
    const auto* product = std::get_if<NormGemm>(&step.arguments);
    if (buckets == 1 || product == nullptr) return 0;
    const GemmArgs& gemm = product->gemm;
    const bool glu = gemm.epilogue != Epilogue::none;
    if (gemm.peaks != nullptr || (glu && gemm.bias != nullptr)) return 0;
    const int64_t panel = kPanel * round_up(gemm.k, kPanel) * item_size(gemm.x.dtype);
    const int64_t columns = std::max<int64_t>(threads * kPieceBytes / panel, threads) * kPanel;
    return columns < gemm.n ? columns : 0;
}

// Columns [first, first + count) of a product; first is a multiple of kPanel.
GemmArgs columns_of(const GemmArgs& whole, int64_t first, int64_t count) {
    const auto skip = [](const void* data, int64_t items, DType type) {
        char* from = static_cast<char*>(const_cast<void*>(data));
        return from == nullptr ? nullptr : from + items * item_size(type);
    };
    GemmArgs part = whole;
    part.n = std::min(count, whole.n - first);
    part.weight = skip(whole.weight, first * round_up(whole.k, kPanel), whole.x.dtype);
    part.bias = skip(whole.bias, first, whole.x.dtype);
    const bool glu = whole.epilogue != Epilogue::none;
    part.y.data = skip(whole.y.data, glu ? first / 2 : first, whole.y.dtype);
    part.add.data = skip(whole.add.data, first, whole.add.dtype);
    return part;
}

}  // namespace

Workspace::~Workspace() { std::free(data_); }

void Workspace::reserve(size_t bytes) {
    if (bytes <= bytes_) return;
    std::free(data_);
    data_ = nullptr;
    bytes_ = 0;
    void* data = std::aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (data == nullptr) throw std::bad_alloc();
    data_ = data;
    bytes_ = bytes;
}

Program::Program(Team* team, const KernelTable* table, std::vector<StepRecord> steps,
                 std::vector<WeightRecord> weights, std::vector<CacheRecord> caches,
                 std::vector<int64_t> row_bytes, int64_t max_length, int64_t groups, int64_t head,
                 void* arena)
    : team_(team), table_(table), records_(std::move(steps)), weights_(std::move(weights)),
      caches_(std::move(caches)), row_bytes_(std::move(row_bytes)), max_length_(max_length),
      groups_(groups), head_(head), arena_(static_cast<char*>(arena)), keys_(caches_.size()),
      values_(caches_.size()), scratch_(static_cast<size_t>(team->size())) {
    const std::vector<int64_t> nowhere(row_bytes_.size(), 0);
    for (const StepRecord& record : records_) {
        const BoundStep step = bind(record, nowhere.data());
        if (const auto* args = std::get_if<EmbeddingArgs>(&step.arguments)) {
            int64_t& limit = step.index == Role::ids ? id_limit_ : position_limit_;
            limit = std::min(limit, args->vocab);
        } else if (std::holds_alternative<RopeArgs>(step.arguments)) {
            const int64_t rows = weights_[static_cast<size_t>(record.refs[3].index)].rows;
            position_limit_ = std::min(position_limit_, rows);
        }
    }
}

int Program::add_bucket(int64_t tokens, int64_t requests, int64_t rows, const int64_t* offsets) {
    auto bucket = std::make_unique<BucketRecord>();
    bucket->tokens = tokens;
    bucket->requests = requests;
    bucket->rows = rows;
    bucket->steps.reserve(records_.size());
    ScratchNeed need;
    for (const StepRecord& record : records_) {
        bucket->steps.push_back(bind(record, offsets));
        const ScratchNeed own = scratch_need(bucket->steps.back(), *bucket);
        need.per_thread = std::max(need.per_thread, own.per_thread);
        need.shared = std::max(need.shared, own.shared);
    }
    if (head_ >= 0) {
        const auto most = static_cast<size_t>(rows * team_->size());
        if (most > peaks_.size()) peaks_.resize(most);
    }
    for (Workspace& scratch : scratch_) scratch.reserve(need.per_thread);
    shared_.reserve(need.shared);
    buckets_.push_back(std::move(bucket));
    return static_cast<int>(buckets_.size()) - 1;
}

ScratchNeed Program::scratch_need(BoundStep& step, const BucketRecord& bucket) const {
    const int64_t counts[] = {bucket.tokens, bucket.requests, bucket.rows};
    if (auto* args = std::get_if<NormGemm>(&step.arguments)) {
        args->gemm.rows = counts[static_cast<int>(step.rows)];
        args->norm.rows = args->gemm.rows;
        args->gemm.norm = args->normed ? &args->norm : nullptr;
        return gemm_scratch(args->gemm);
    }
    if (auto* args = std::get_if<AttentionArgs>(&step.arguments)) {
        args->tokens = bucket.tokens;
        args->requests = bucket.requests;
        return attention_scratch(*args, max_length_, team_->size());
    }
    return {};
}

void Program::set_caches(void* data, const int64_t* key_offsets, const int64_t* value_offsets,
                         int64_t blocks, int64_t block_bytes) {
    cache_ = static_cast<char*>(data);
    blocks_ = blocks;
    block_bytes_ = block_bytes;
    for (size_t i = 0; i < caches_.size() && blocks > 0; ++i) {
        keys_[i] = {cache_ + key_offsets[i], block_bytes};
        values_[i] = {cache_ + value_offsets[i], block_bytes};
    }
}

void Program::copy_blocks(const int64_t* pairs, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        std::memmove(cache_ + pairs[2 * i + 1] * block_bytes_, cache_ + pairs[2 * i] * block_bytes_,
                     static_cast<size_t>(block_bytes_));
    }
}

RunReport Program::check(const BucketRecord& bucket, const StepData& data) const {
    if (data.tokens < 1 || data.tokens > bucket.tokens) {
        return fault(Fault::counts, 0, data.tokens, bucket.tokens);
    }
    if (data.requests < 1 || data.requests > bucket.requests) {
        return fault(Fault::counts, 1, data.requests, bucket.requests);
    }
    if (data.rows < 0 || data.rows > bucket.rows) {
        return fault(Fault::counts, 2, data.rows, bucket.rows);
    }
    if (data.groups < groups_) return fault(Fault::groups, 0, data.groups, groups_);
    if (!caches_.empty() && blocks_ < 1) return fault(Fault::no_cache, 0, 0, 0);
    RunReport report = check_range(Fault::ids, data.ids, data.tokens, 0, id_limit_);
    if (report.fault == 0) {
        report = check_range(Fault::positions, data.positions, data.tokens, 0, position_limit_);
    }
    if (report.fault == 0) {
        report = check_range(Fault::rows, data.row_index, data.rows, 0, data.tokens);
    }
    for (int64_t group = 0; group < groups_ && report.fault == 0; ++group) {
        // -1 marks a token that isn't kept.
        report = check_range(Fault::slots, data.slots[group], data.tokens, -1,
                             blocks_ * kBlockTokens, group);
    }
    return report.fault == 0 ? check_requests(data) : report;
}

RunReport Program::check_requests(const StepData& data) const {
    if (data.query_start[0] != 0) return fault(Fault::query_start, 0, data.query_start[0], 0);
    for (int64_t r = 0; r < data.requests; ++r) {
        const int64_t queries = data.query_start[r + 1] - int64_t{data.query_start[r]};
        if (queries < 0 || data.query_start[r + 1] > data.tokens) {
            return fault(Fault::query_start, r + 1, data.query_start[r + 1], data.tokens);
        }
        const int64_t length = data.lengths[r];
        if (length < queries || length > max_length_) {
            return fault(Fault::lengths, r, length, max_length_);
        }
        const int64_t blocks = (length + kBlockTokens - 1) / kBlockTokens;
        for (int64_t group = 0; group < groups_; ++group) {
            const int64_t width = data.table_widths[group];
            if (blocks > width) return fault(Fault::lengths, r, length, width * kBlockTokens, group);
            const RunReport report =
                check_range(Fault::block_table, data.block_tables[group] + r * width, blocks, 0,
                            blocks_, group);
            if (report.fault != 0) return fault(Fault::block_table, r, report.value, blocks_, group);
        }
    }
    if (data.query_start[data.requests] != data.tokens) {
        return fault(Fault::query_start, data.requests, data.query_start[data.requests], data.tokens);
    }
    return {};
}

void Program::patch(BoundStep& step, const StepData& data) const {
    const int64_t counts[] = {data.tokens, data.requests, data.rows};
    const int64_t rows = counts[static_cast<int>(step.rows)];
    std::visit(
        Overloaded{
            [&](NormGemm& args) {
                args.gemm.rows = rows;
                args.norm.rows = rows;
                args.gemm.norm = args.normed ? &args.norm : nullptr;
                args.gemm.peaks = nullptr;
            },
            [&](EmbeddingArgs& args) {
                args.rows = rows;
                args.ids = step.index == Role::ids ? data.ids : data.positions;
            },
            [&](RopeArgs& args) {
                args.rows = rows;
                args.positions = data.positions;
            },
            [&](KvWriteArgs& args) {
                args.tokens = data.tokens;
                args.slots = data.slots[step.group];
                args.k_cache = keys_[static_cast<size_t>(step.cache)];
                args.v_cache = values_[static_cast<size_t>(step.cache)];
            },
            [&](AttentionArgs& args) {
                args.tokens = data.tokens;
                args.requests = data.requests;
                args.block_table = data.block_tables[step.group];
                args.table_stride = data.table_widths[step.group];
                args.query_start = data.query_start;
                args.lengths = data.lengths;
                args.k_cache = keys_[static_cast<size_t>(step.cache)];
                args.v_cache = values_[static_cast<size_t>(step.cache)];
            },
            [&](GatherRowsArgs& args) {
                args.rows = rows;
                args.index = data.row_index;
            },
            [&](UnaryArgs& args) { args.shape[0] = rows; },
            [&](BinaryArgs& args) { args.shape[0] = rows; },
            [&](ReduceArgs& args) { args.shape[0] = rows; },
            [&](SoftmaxArgs& args) { args.shape[0] = rows; },
            [&](auto& args) { args.rows = rows; },
        },
        step.arguments);
}

void Program::execute(const Context& context, const BoundStep& step) const {
    const KernelTable& table = *table_;
    std::visit(
        Overloaded{
            [&](const EmbeddingArgs& args) { table.embedding(context, args); },
            [&](const RmsNormArgs& args) { table.rms_norm(context, args); },
            [&](const LayerNormArgs& args) { table.layer_norm(context, args); },
            [&](const NormGemm& args) { table.gemm(context, args.gemm); },
            [&](const GluArgs& args) { table.glu(context, args); },
            [&](const RopeArgs& args) { table.rope(context, args); },
            [&](const KvWriteArgs& args) { table.kv_write(context, args); },
            [&](const AttentionArgs& args) { table.attention(context, args); },
            [&](const GatherRowsArgs& args) { table.gather_rows(context, args); },
            [&](const UnaryArgs& args) { table.unary(context, args); },
            [&](const BinaryArgs& args) { table.binary(context, args); },
            [&](const ReduceArgs& args) { table.reduce(context, args); },
            [&](const SoftmaxArgs& args) { table.softmax(context, args); },
        },
        step.arguments);
}

RunReport Program::prepare(int number, const StepData& data) {
    if (number < 0 || static_cast<size_t>(number) >= buckets_.size()) {
        return fault(Fault::bucket, 0, number, static_cast<int64_t>(buckets_.size()));
    }
    BucketRecord& bucket = *buckets_[static_cast<size_t>(number)];
    const RunReport report = check(bucket, data);
    if (report.fault != 0) return report;
    bucket.counts[0] = data.tokens;
    bucket.counts[1] = data.requests;
    bucket.counts[2] = data.rows;
    for (BoundStep& step : bucket.steps) patch(step, data);
    return {};
}

void Program::want_peaks(BucketRecord& bucket, const StepData& data) {
    peaks_found_ = {nullptr, 0, 0};
    if (head_ < 0) return;
    GemmArgs& head = std::get<NormGemm>(bucket.steps[static_cast<size_t>(head_)].arguments).gemm;
    head.peaks = peaks_.data();
    head.peak_only = data.peak_only;
    peaks_found_ = {peaks_.data(), team_->size(), data.rows};
}

void Program::replay(const int32_t* buckets, int64_t count, int64_t limit, int64_t* stamps) {
    const auto total = static_cast<int64_t>(records_.size());
    struct Job {
        Program* program;
        const int32_t* buckets;
        int64_t count, steps;
        int64_t* stamps;
    } job{this, buckets, count, limit < 0 ? total : std::min(limit, total), stamps};
    if (stamps != nullptr) stamps[0] = now();
    team_->run(
        [](void* argument, int rank) {
            const Job& job = *static_cast<Job*>(argument);
            Program& program = *job.program;
            Context context;
            context.rank = rank;
            context.size = program.team_->size();
            context.scratch = program.scratch_[static_cast<size_t>(rank)].data();
            context.shared = program.shared_.data();
            context.team = program.team_;
            context.barrier = [](void* team, int) { static_cast<Team*>(team)->barrier(); };
            for (int64_t i = 0; i < job.steps; ++i) {
                program.replay_step(context, job.buckets, job.count, static_cast<size_t>(i));
                if (rank == 0 && job.stamps != nullptr) job.stamps[i + 1] = now();
            }
        },
        &job);
}

void Program::replay_step(const Context& context, const int32_t* buckets, int64_t count,
                          size_t number) const {
    const auto step_of = [&](int64_t j) -> const BoundStep* {
        const BucketRecord& bucket = *buckets_[static_cast<size_t>(buckets[j])];
        const BoundStep& step = bucket.steps[number];
        return bucket.counts[static_cast<int>(step.rows)] == 0 ? nullptr : &step;
    };
    const BoundStep& any = buckets_[static_cast<size_t>(buckets[0])]->steps[number];
    const int64_t columns = piece_columns(any, count, context.size);
    const int64_t end = columns == 0 ? 1 : std::get<NormGemm>(any.arguments).gemm.n;
    for (int64_t first = 0; first < end; first += std::max<int64_t>(columns, 1)) {
        for (int64_t j = 0; j < count; ++j) {
            const BoundStep* step = step_of(j);
            if (step == nullptr) continue;
            if (columns == 0) {
                execute(context, *step);
            } else {
                const GemmArgs& whole = std::get<NormGemm>(step->arguments).gemm;
                table_->gemm(context, columns_of(whole, first, columns));
            }
            team_->barrier();
        }
    }
}

RunReport Program::run(int bucket, const StepData& data, int64_t limit, int64_t* stamps) {
    const RunReport report = prepare(bucket, data);
    if (report.fault != 0) return report;
    want_peaks(*buckets_[static_cast<size_t>(bucket)], data);
    replay(&bucket, 1, limit, stamps);
    return report;
}

RunReport Program::run_together(const int32_t* buckets, const StepData* data, int64_t count,
                                int64_t limit) {
    for (int64_t i = 0; i < count; ++i) {
        const RunReport report = prepare(buckets[i], data[i]);
        if (report.fault != 0) return report;
    }
    replay(buckets, count, limit, nullptr);
    return {};
}

}  // namespace ropeway
