// Vocabulary-wide loops of the sampler, one table per instruction set with identical bits.
#pragma once

#include <cstdint>

#include "peak.h"

namespace ropeway {

constexpr int64_t kSumBlock = 512;

struct SamplingLoops {
    Peak (*peak)(const float* x, int64_t n);
    // Weights w = exp((x - shift) * scale), those below `floor` counted as 0. x <= shift. Writes
    // the sum of every kSumBlock weights to `blocks`, returns the sum of the blocks in order.
    double (*weigh)(const float* x, int64_t n, double shift, double scale, double floor,
                    double* blocks);
    // How many logits come before (value, index): larger, or equal with a lower id.
    int64_t (*count_before)(const float* x, int64_t n, float value, int64_t index);
    // The first id at or after `start` whose logit is above `threshold`, or n.
    int64_t (*next_above)(const float* x, int64_t n, int64_t start, float threshold);
    // y = x where the mask's bit is set (bit i of word w for 32 w + i), else -inf.
    void (*masked)(const float* x, int64_t n, const int32_t* mask, float* y);
};

const SamplingLoops& sampling_loops(int isa);

// The same exp as in `weigh`, for x <= 0; and log for finite x > 0.
double exp_weight(double x);
double log_positive(double x);

}  // namespace ropeway
