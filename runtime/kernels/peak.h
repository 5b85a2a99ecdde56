// The largest element of a row of logits: what a greedy draw needs of them.
#pragma once

#include <cstdint>
#include <limits>

namespace ropeway {

struct Peak {
    float value = -std::numeric_limits<float>::infinity();
    int32_t index = 0;  // the lowest that has the value
    int32_t bad = 0;    // NaN or +inf seen

    // Takes in what was found at higher indices.
    void merge(const Peak& later) {
        bad |= later.bad;
        if (later.value > value) value = later.value, index = later.index;
    }
};

}  // namespace ropeway
