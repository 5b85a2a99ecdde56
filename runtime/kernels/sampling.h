// The sampler: adjusts a row of logits as its request asks, draws a token, reports raw logprobs.
//
// Order of the pipeline (vLLM's): mask -> logit bias and banned ids -> repetition, presence, frequency
// penalties -> temperature -> min_p -> top_k -> top_p -> draw. Logprobs, ranks and alternatives are
// of the raw logits. Ties go to the lower id everywhere.
//
// A row's answer depends on its own logits, parameters, penalty slot and (seed, choice, position)
// only, bit for bit: not on its neighbours, on the number of ranks or on the instruction set.
// Arithmetic is IEEE double without contraction, sums run in one fixed order, and exp and log are
// this library's own polynomials.
#pragma once

#include <cstdint>

#include "peak.h"

#if defined(_WIN32)
#define ROPEWAY_API extern "C" __declspec(dllexport)
#else
#define ROPEWAY_API extern "C" __attribute__((visibility("default")))
#endif

namespace ropeway {

// Mirrors ROW in runtime/sampling/batch.py, field by field.
struct SampleRow {
    uint64_t seed;
    double temperature;  // below 1e-5: greedy
    double top_p;        // 1: off
    double min_p;        // 0: off
    double repetition_penalty;
    double presence_penalty;
    double frequency_penalty;
    int64_t top_begin;  // offset of this row's alternatives in the outputs
    int64_t mask_begin; // word of `masks` at which this row's mask starts; -1: none
    int32_t top_count;
    int32_t want_logprob;
    int32_t top_k;  // 0: off
    int32_t row;    // row of the logits matrix
    int32_t target; // -1: draw; else score this token
    int32_t position;
    int32_t choice;
    int32_t slot;  // penalty state; -1: none
    int32_t bias_begin, bias_count;
    int32_t ban_begin, ban_count;
};
static_assert(sizeof(SampleRow) == 120, "ROW in batch.py has the same layout");

enum SampleStatus : int32_t {
    kSampled = 0,
    kNotFinite = 1,  // NaN or +inf among the logits
    kAllMasked = 2,  // nothing left to draw
    kNoMemory = 3,
    kNoLogits = 4,  // the row's logits weren't kept, but more than their peak is asked for
};

class Sampler;

struct SampleArgs {
    Sampler* sampler;
    const float* logits;
    int64_t logits_stride;  // elements between rows
    // Peaks of the logits, when whoever made them found these: that of row r is the merger of
    // peaks[p * peak_rows + r]. Null: the sampler looks for itself.
    const Peak* peaks;
    int64_t peak_parts, peak_rows;
    const uint8_t* peak_only;  // [peak_rows]: not 0 where there are no logits, only the peak; or null
    const SampleRow* rows;
    int64_t count;
    const int32_t* bias_ids;
    const double* bias_values;
    const int32_t* banned;
    const int32_t* masks;   // bit i of a row's word w: whether token 32 w + i can be drawn
    int32_t* tokens;        // [count]
    float* logprobs;        // [count], written when wanted
    int32_t* ranks;         // [count], written when wanted
    int32_t* top_ids;       // flat
    float* top_logprobs;    // flat
    int32_t* status;        // [count]
};

// One rank's share of the rows; every rank of a team calls it once with the same arguments. No
// barrier is needed inside. A penalty slot may be named by one row of a call only.
void sample_rows(const SampleArgs& args, int rank, int size);

}  // namespace ropeway

// isa: -1 the best this machine has, 0 plain, 1 AVX2, 2 AVX-512 (a level it lacks is lowered).
// Null when out of memory.
ROPEWAY_API ropeway::Sampler* ropeway_sampler_create(int32_t vocab_size, int32_t isa);
ROPEWAY_API void ropeway_sampler_destroy(ropeway::Sampler* sampler);
// Refills a penalty slot; empty arrays free it. Ids must lie in the vocabulary. 0, or kNoMemory.
ROPEWAY_API int32_t ropeway_sampler_reset_slot(ropeway::Sampler* sampler, int32_t slot,
                                               const int32_t* prompt, int64_t prompt_count,
                                               const int32_t* output, int64_t output_count);
// sample_rows for callers of the C ABI; rank 0 of size 1 does all rows.
ROPEWAY_API void ropeway_sample_rows(const ropeway::SampleArgs* args, int32_t rank, int32_t size);
// Philox4x32-10, for the known-answer test: counter[4], key[2] -> out[4].
ROPEWAY_API void ropeway_philox(const uint32_t* counter, const uint32_t* key, uint32_t* out);
