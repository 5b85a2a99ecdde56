// Whole-buffer reads at memory speed: the bandwidth probe and the artifact's checksum.

static uint64_t read_sum(const void* data, size_t bytes) {
    const char* p = (const char*)data;
    Q sums[4] = {};
    constexpr size_t kStep = 4 * sizeof(Q);
    size_t i = 0;
    for (; i + kStep <= bytes; i += kStep) {
        __builtin_prefetch(p + i + 4096, 0, 2);
        if (kStep > 64) {
            __builtin_prefetch(p + i + 4096 + 64, 0, 2);
            __builtin_prefetch(p + i + 4096 + 128, 0, 2);
            __builtin_prefetch(p + i + 4096 + 192, 0, 2);
        }
        for (int j = 0; j < 4; j++) {
            Q v;
            __builtin_memcpy(&v, p + i + j * sizeof(Q), sizeof v);
            sums[j] += v;
        }
    }
    uint64_t total = 0;
    for (; i < bytes; i += 8) {
        uint64_t v;
        __builtin_memcpy(&v, p + i, 8);
        total += v;
    }
    const Q all = (sums[0] + sums[1]) + (sums[2] + sums[3]);
    for (int lane = 0; lane < W / 2; lane++) total += all[lane];
    return total;
}

// sum h(w_i) (1 + (first + i) C) = (1 + first C) S + C sum i h(w_i), and the last sum needs no
// multiplication: with s = the running sum of h, adding s after every step gives sum (n - i) h.
// Lanes run apart and are put together.
static uint64_t checksum_words(const void* data, size_t bytes, uint64_t first) {
    constexpr uint64_t kStep = 0x3C6EF372FE94F82Aull;
    constexpr uint64_t kLanes = W / 2;
    const char* p = (const char*)data;
    const uint64_t words = bytes / 8, steps = words / kLanes;
    Q sum = {}, sum_of_sums = {};
    for (uint64_t i = 0; i < steps; i++) {
        Q w;
        __builtin_prefetch(p + i * sizeof(Q) + 4096, 0, 2);
        __builtin_memcpy(&w, p + i * sizeof(Q), sizeof w);
        sum += w ^ (w >> 32);
        sum_of_sums += sum;
    }
    uint64_t plain = 0, weighted = 0;  // sum h, sum i h
    for (uint64_t lane = 0; lane < kLanes; lane++) {
        // sum_of_sums = sum over steps (steps - step) h; the word's number is step * kLanes + lane
        plain += sum[lane];
        weighted += kLanes * (steps * sum[lane] - sum_of_sums[lane]) + lane * sum[lane];
    }
    for (uint64_t i = steps * kLanes; i * 8 < bytes; i++) {
        uint64_t w = 0;
        __builtin_memcpy(&w, p + i * 8, bytes - i * 8 < 8 ? bytes - i * 8 : 8);
        const uint64_t h = w ^ (w >> 32);
        plain += h;
        weighted += i * h;
    }
    return (1 + first * kStep) * plain + kStep * weighted;
}
