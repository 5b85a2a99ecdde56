#include "sampling.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <new>
#include <vector>

#include "sampling_loops.h"

namespace ropeway {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kLargest = std::numeric_limits<float>::max();
constexpr double kGreedyBelow = 1e-5;
constexpr int kMaxRanks = 256;
constexpr int32_t kInPrompt = 1 << 30;  // beside the output count of a token
constexpr uint32_t kDrawPurpose = 0;    // random numbers for other uses get other numbers

// A candidate as one number: the larger, the earlier. High half: the logit in an order-preserving
// code; low half: the id, flipped so that the lower id comes first.
using Key = uint64_t;

Key key_of(float value, int64_t id) {
    value += 0.0f;  // -0 and +0 are one value
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    bits = (bits & 0x80000000u) ? ~bits : bits | 0x80000000u;
    return (static_cast<Key>(bits) << 32) | (0xFFFFFFFFu - static_cast<uint32_t>(id));
}

int32_t id_of(Key key) { return static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(key)); }

struct Candidate {
    Key key;
    double weight;
};

struct Workspace {
    std::vector<float> adjusted;
    std::vector<double> blocks;
    std::vector<Key> keys;
    std::vector<Candidate> candidates, order;
};

// What a sequence holds: the tokens of its prompt, and how often it drew each token.
struct PenaltySlot {
    std::vector<int32_t> state;  // per token: count | kInPrompt
    std::vector<int32_t> seen;   // tokens whose state isn't 0

    explicit PenaltySlot(int32_t vocab_size) : state(static_cast<size_t>(vocab_size), 0) {}

    void clear() {
        for (int32_t id : seen) state[static_cast<size_t>(id)] = 0;
        seen.clear();
    }
    void add(int32_t id, bool prompt) {
        int32_t& s = state[static_cast<size_t>(id)];
        if (s == 0) seen.push_back(id);
        if (prompt) {
            s |= kInPrompt;
        } else {
            s += 1;
        }
    }
};

void philox(const uint32_t counter[4], const uint32_t key[2], uint32_t out[4]) {
    uint32_t c[4] = {counter[0], counter[1], counter[2], counter[3]};
    uint32_t k[2] = {key[0], key[1]};
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = static_cast<uint64_t>(0xD2511F53u) * c[0];
        const uint64_t b = static_cast<uint64_t>(0xCD9E8D57u) * c[2];
        const uint32_t next[4] = {static_cast<uint32_t>(b >> 32) ^ c[1] ^ k[0],
                                  static_cast<uint32_t>(b),
                                  static_cast<uint32_t>(a >> 32) ^ c[3] ^ k[1],
                                  static_cast<uint32_t>(a)};
        std::memcpy(c, next, sizeof c);
        k[0] += 0x9E3779B9u;
        k[1] += 0xBB67AE85u;
    }
    std::memcpy(out, c, sizeof c);
}

// Uniform in [0, 1) with 53 random bits, a function of the row's keys alone.
double uniform(const SampleRow& row) {
    const uint32_t counter[4] = {static_cast<uint32_t>(row.position),
                                 static_cast<uint32_t>(row.choice), kDrawPurpose, 0};
    const uint32_t key[2] = {static_cast<uint32_t>(row.seed),
                             static_cast<uint32_t>(row.seed >> 32)};
    uint32_t word[4];
    philox(counter, key, word);
    const double high = static_cast<double>(word[0] >> 5);
    const double low = static_cast<double>(word[1] >> 6);
    return (high * 67108864.0 + low) / 9007199254740992.0;
}

}  // namespace

class Sampler {
public:
    Sampler(int32_t vocab_size, int isa) : vocab(vocab_size), loops(sampling_loops(isa)) {}

    Workspace& workspace(int rank) {
        auto& space = spaces_[static_cast<size_t>(rank)];
        if (!space) space = std::make_unique<Workspace>();
        return *space;
    }
    PenaltySlot* slot(int32_t index) const {
        const auto i = static_cast<size_t>(index);
        return index >= 0 && i < slots_.size() ? slots_[i].get() : nullptr;
    }
    void reset_slot(int32_t index, const int32_t* prompt, int64_t prompt_count,
                    const int32_t* output, int64_t output_count) {
        const auto i = static_cast<size_t>(index);
        if (prompt_count + output_count == 0) {
            if (i < slots_.size()) slots_[i].reset();
            return;
        }
        if (i >= slots_.size()) slots_.resize(i + 1);
        if (!slots_[i]) slots_[i] = std::make_unique<PenaltySlot>(vocab);
        slots_[i]->clear();
        for (int64_t k = 0; k < prompt_count; ++k) slots_[i]->add(prompt[k], true);
        for (int64_t k = 0; k < output_count; ++k) slots_[i]->add(output[k], false);
    }

    const int32_t vocab;
    const SamplingLoops& loops;

private:
    std::array<std::unique_ptr<Workspace>, kMaxRanks> spaces_;
    std::vector<std::unique_ptr<PenaltySlot>> slots_;
};

namespace {

// One row on its way through the pipeline.
struct RowSampler {
    const SampleArgs& args;
    const SampleRow& row;
    const Sampler& sampler;
    Workspace& space;
    const float* x;  // the raw logits
    int64_t n;

    int32_t run(int64_t index) {
        args.tokens[index] = -1;
        if (args.peak_only != nullptr && args.peak_only[row.row] && !only_peak()) return kNoLogits;
        const Peak raw = raw_peak();
        if (raw.bad) return kNotFinite;
        if (raw.value == -kInfinity) return kAllMasked;
        int32_t token = row.target;
        if (token < 0) {
            const int32_t status = draw(raw, token);
            if (status != kSampled) return status;
        }
        args.tokens[index] = token;
        if (row.want_logprob) report(index, raw, token);
        return kSampled;
    }

    // Whether the answer follows from the peak alone.
    bool only_peak() const {
        return row.target < 0 && row.temperature < kGreedyBelow && !row.want_logprob &&
               row.mask_begin < 0 && row.bias_count == 0 && row.ban_count == 0 &&
               sampler.slot(row.slot) == nullptr;
    }

    Peak raw_peak() const {
        if (args.peaks == nullptr) return sampler.loops.peak(x, n);
        Peak peak = args.peaks[row.row];
        for (int64_t p = 1; p < args.peak_parts; ++p)
            peak.merge(args.peaks[p * args.peak_rows + row.row]);
        return peak;
    }

    int32_t draw(const Peak& raw, int32_t& token) {
        PenaltySlot* slot = sampler.slot(row.slot);
        const float* y = x;
        Peak peak = raw;
        if (row.mask_begin >= 0 || row.bias_count > 0 || row.ban_count > 0 || slot != nullptr) {
            y = adjust(slot);
            peak = sampler.loops.peak(y, n);
            if (peak.value == -kInfinity) return kAllMasked;
        }
        token = row.temperature < kGreedyBelow ? peak.index : pick(y, peak.value);
        if (slot != nullptr) slot->add(token, false);
        return kSampled;
    }

    const float* adjust(const PenaltySlot* slot) {
        if (row.mask_begin >= 0) {
            space.adjusted.resize(static_cast<size_t>(n));
            sampler.loops.masked(x, n, args.masks + row.mask_begin, space.adjusted.data());
        } else {
            space.adjusted.assign(x, x + n);
        }
        float* y = space.adjusted.data();
        for (int32_t k = 0; k < row.bias_count; ++k) {
            const int32_t id = args.bias_ids[row.bias_begin + k];
            if (id < 0 || id >= n) continue;
            y[id] = bounded(y[id] + args.bias_values[row.bias_begin + k]);
        }
        for (int32_t k = 0; k < row.ban_count; ++k) {
            const int32_t id = args.banned[row.ban_begin + k];
            if (id >= 0 && id < n) y[id] = -kInfinity;
        }
        if (slot != nullptr) penalize(y, *slot);
        return y;
    }

    void penalize(float* y, const PenaltySlot& slot) const {
        for (int32_t id : slot.seen) {
            const int32_t state = slot.state[static_cast<size_t>(id)];
            const int32_t count = state & (kInPrompt - 1);
            double value = y[id];
            if (value == -kInfinity) continue;
            value = value > 0.0 ? value / row.repetition_penalty : value * row.repetition_penalty;
            value -= row.frequency_penalty * count;
            if (count > 0) value -= row.presence_penalty;
            y[id] = bounded(value);
        }
    }

    // A finite logit stays finite: an adjustment can't ban a token or break the sums.
    static float bounded(double value) {
        if (value == -std::numeric_limits<double>::infinity()) return -kInfinity;
        return static_cast<float>(std::min<double>(std::max<double>(value, -kLargest), kLargest));
    }

    int32_t pick(const float* y, float peak) {
        const double scale = 1.0 / row.temperature;
        const bool by_count = row.top_k > 0 && row.top_k < n;
        const bool by_mass = row.top_p < 1.0;
        if (by_count) return pick_from_best(y, peak, scale);
        space.blocks.resize(static_cast<size_t>((n + kSumBlock - 1) / kSumBlock));
        const double total =
            sampler.loops.weigh(y, n, peak, scale, row.min_p, space.blocks.data());
        return by_mass ? pick_from_nucleus(y, peak, scale, total)
                       : pick_from_all(y, peak, scale, total);
    }

    double weight(const float* y, int64_t id, double peak, double scale) const {
        const double w = exp_weight((y[id] - peak) * scale);
        return w >= row.min_p ? w : 0.0;
    }

    // Ids in order: the first whose running sum passes u * total (which is below the total, so the
    // block found has weight). Rounding may put the goal a hair past the end of the block's ids:
    // then it is the last of them that has weight.
    int32_t pick_from_all(const float* y, double peak, double scale, double total) const {
        const double goal = uniform(row) * total;
        double before = 0.0;
        size_t block = 0;
        while (block + 1 < space.blocks.size() && before + space.blocks[block] <= goal) {
            before += space.blocks[block];
            ++block;
        }
        const int64_t begin = static_cast<int64_t>(block) * kSumBlock;
        int64_t token = begin;
        for (int64_t id = begin; id < std::min(begin + kSumBlock, n); ++id) {
            const double w = weight(y, id, peak, scale);
            if (w <= 0.0) continue;
            token = id;
            before += w;
            if (before > goal) break;
        }
        return static_cast<int32_t>(token);
    }

    int32_t pick_from_best(const float* y, double peak, double scale) {
        best(y, row.top_k);
        return pick_sorted(y, peak, scale);
    }

    // The shortest head of the order whose mass reaches top_p of the total, drawn from by id. What
    // lies further than `reach` below the peak weighs less than 1 - top_p of the total together,
    // so the head is within it.
    int32_t pick_from_nucleus(const float* y, double peak, double scale, double total) {
        const double rest = (1.0 - row.top_p) * total;
        const double reach = log_positive(static_cast<double>(n) / rest) + 0.01;
        gather(y, peak, scale, static_cast<float>(peak - reach / scale));
        const Key last = nucleus_end(row.top_p * total);
        double mass = 0.0;
        for (const Candidate& one : space.candidates) mass += one.key >= last ? one.weight : 0.0;
        const double goal = uniform(row) * mass;
        double before = 0.0;
        Key chosen = 0;
        for (const Candidate& one : space.candidates) {
            if (one.key < last) continue;
            chosen = one.key;
            before += one.weight;
            if (before > goal) break;
        }
        return id_of(chosen);
    }

    // The last key of the nucleus: halves the candidates around their median until few are left.
    Key nucleus_end(double wanted) {
        auto& order = space.order;
        order = space.candidates;
        const auto first = [](const Candidate& a, const Candidate& b) { return a.key > b.key; };
        auto begin = order.begin();
        auto end = order.end();
        double before = 0.0;
        while (end - begin > 16) {
            const auto middle = begin + (end - begin) / 2;
            std::nth_element(begin, middle, end, first);
            double mass = before;
            for (auto it = begin; it != middle; ++it) mass += it->weight;
            if (mass >= wanted) {
                end = middle;
            } else {
                before = mass;
                begin = middle;
            }
        }
        std::sort(begin, end, first);
        for (auto it = begin; it != end; ++it) {
            before += it->weight;
            if (before >= wanted) return it->key;
        }
        // Rounding left the mass a hair short: everything up to here.
        return end == order.end() ? 0 : (end - 1)->key;
    }

    // Draws from the sorted keys: those with weight, and by top_p the shortest head whose mass
    // reaches top_p of theirs.
    int32_t pick_sorted(const float* y, double peak, double scale) const {
        const auto& keys = space.keys;
        double total = 0.0;
        for (Key key : keys) total += weight(y, id_of(key), peak, scale);
        const double wanted = row.top_p < 1.0 ? row.top_p * total : total;
        size_t count = 0;
        double mass = 0.0;
        while (count < keys.size() && (count == 0 || mass < wanted)) {
            const double w = weight(y, id_of(keys[count]), peak, scale);
            if (w <= 0.0) break;
            mass += w;
            ++count;
        }
        const double goal = uniform(row) * mass;
        double before = 0.0;
        for (size_t k = 0; k < count; ++k) {
            before += weight(y, id_of(keys[k]), peak, scale);
            if (before > goal) return id_of(keys[k]);
        }
        return id_of(keys[count - 1]);
    }

    // The tokens above `cut` that have weight, by id.
    void gather(const float* y, double peak, double scale, float cut) {
        space.candidates.clear();
        for (int64_t id = 0;; ++id) {
            id = sampler.loops.next_above(y, n, id, cut);
            if (id >= n) return;
            const double w = weight(y, id, peak, scale);
            if (w > 0.0) space.candidates.push_back({key_of(y[id], id), w});
        }
    }

    // The `count` first tokens of y in order: larger logit first, then lower id.
    void best(const float* y, int64_t count) {
        auto& keys = space.keys;
        keys.clear();
        const auto wanted = static_cast<size_t>(count);
        const size_t capacity = std::min<size_t>(2 * wanted + 64, static_cast<size_t>(n));
        keys.reserve(capacity);
        int64_t id = 0;
        for (; id < static_cast<int64_t>(capacity); ++id) keys.push_back(key_of(y[id], id));
        while (id < n) {
            std::nth_element(keys.begin(), keys.begin() + static_cast<int64_t>(wanted) - 1,
                             keys.end(), std::greater<Key>());
            keys.resize(wanted);
            const float threshold = y[id_of(keys[wanted - 1])];
            // A later id with an equal logit comes after, so only larger ones matter.
            while (keys.size() < capacity) {
                id = sampler.loops.next_above(y, n, id, threshold);
                if (id >= n) break;
                keys.push_back(key_of(y[id], id));
                ++id;
            }
        }
        std::partial_sort(keys.begin(), keys.begin() + static_cast<int64_t>(wanted), keys.end(),
                          std::greater<Key>());
        keys.resize(wanted);
    }

    void report(int64_t index, const Peak& raw, int32_t token) {
        space.blocks.resize(static_cast<size_t>((n + kSumBlock - 1) / kSumBlock));
        const double sum = sampler.loops.weigh(x, n, raw.value, 1.0, 0.0, space.blocks.data());
        const double log_sum = log_positive(sum);
        const double peak = raw.value;
        args.logprobs[index] = static_cast<float>((x[token] - peak) - log_sum);
        args.ranks[index] =
            static_cast<int32_t>(1 + sampler.loops.count_before(x, n, x[token], token));
        if (row.top_count == 0) return;
        best(x, row.top_count);
        for (int32_t k = 0; k < row.top_count; ++k) {
            const int32_t id = id_of(space.keys[static_cast<size_t>(k)]);
            args.top_ids[row.top_begin + k] = id;
            args.top_logprobs[row.top_begin + k] = static_cast<float>((x[id] - peak) - log_sum);
        }
    }
};

}  // namespace

void sample_rows(const SampleArgs& args, int rank, int size) {
    const int ranks = std::min(size, kMaxRanks);
    if (rank >= ranks) return;
    Sampler& sampler = *args.sampler;
    for (int64_t i = rank; i < args.count; i += ranks) {
        const SampleRow& row = args.rows[i];
        try {
            RowSampler one{args,
                           row,
                           sampler,
                           sampler.workspace(rank),
                           args.logits + row.row * args.logits_stride,
                           sampler.vocab};
            args.status[i] = one.run(i);
        } catch (const std::bad_alloc&) {
            args.tokens[i] = -1;
            args.status[i] = kNoMemory;
        }
    }
}

}  // namespace ropeway

ropeway::Sampler* ropeway_sampler_create(int32_t vocab_size, int32_t isa) {
    return new (std::nothrow) ropeway::Sampler(vocab_size, isa);
}

void ropeway_sampler_destroy(ropeway::Sampler* sampler) { delete sampler; }

int32_t ropeway_sampler_reset_slot(ropeway::Sampler* sampler, int32_t slot, const int32_t* prompt,
                                   int64_t prompt_count, const int32_t* output,
                                   int64_t output_count) {
    try {
        sampler->reset_slot(slot, prompt, prompt_count, output, output_count);
    } catch (const std::bad_alloc&) {
        return ropeway::kNoMemory;
    }
    return 0;
}

void ropeway_sample_rows(const ropeway::SampleArgs* args, int32_t rank, int32_t size) {
    ropeway::sample_rows(*args, rank, size);
}

void ropeway_philox(const uint32_t* counter, const uint32_t* key, uint32_t* out) {
    ropeway::philox(counter, key, out);
}
