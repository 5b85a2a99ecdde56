// Stores new keys and values into the paged cache, in the panel layout that attention multiplies
// with.
//
// Tokens come in runs: neighbours of the step that fall into one block. A run belongs to one
// thread, so that zeroing a fresh block and filling it need no barrier.

RW_INLINE int64_t block_of(int32_t slot) { return slot < 0 ? -1 : slot / kBlockTokens; }

static int64_t run_start(const int32_t* slots, int64_t t, int64_t tokens) {
    while (t > 0 && t < tokens && block_of(slots[t]) == block_of(slots[t - 1])) t++;
    return t;
}

// k plane of one head: words [dp/2][32 tokens] (bf16 pairs) or [dp][32 tokens] (f32); a word per
// (k, token).
static void write_keys(const char* x, int64_t row_bytes, int64_t rows, int64_t offset,
                       int64_t bytes, uint32_t* plane) {
    const int64_t words = bytes / 4;
    for (int64_t w = 0; w < words; w++)
        for (int64_t r = 0; r < rows; r++)
            memcpy(plane + w * kBlockTokens + offset + r, x + r * row_bytes + 4 * w, 4);
    if (bytes % 4)
        for (int64_t r = 0; r < rows; r++)
            memcpy(plane + words * kBlockTokens + offset + r, x + r * row_bytes + 4 * words, 2);
}

// v plane of one head, bf16: [dp/32][16 pairs of tokens][32][2].
static void write_values(const bf16* x, int64_t stride, int64_t rows, int64_t offset, int64_t width,
                         bf16* plane) {
    for (int64_t r = 0; r < rows;) {
        const int64_t token = offset + r;
        const bf16* a = x + r * stride;
        const bool pair = token % 2 == 0 && r + 1 < rows;
        for (int64_t p = 0; p < width; p += kPanel) {
            bf16* to = plane + p * kBlockTokens + token / 2 * 2 * kPanel;
            const int64_t n = smaller<int64_t>(width - p, kPanel);
            if (pair) {
                for (int64_t i = 0; i < n; i++) {
                    const uint32_t both = a[p + i].bits | (uint32_t)a[stride + p + i].bits << 16;
                    memcpy(to + 2 * i, &both, 4);
                }
            } else {
                for (int64_t i = 0; i < n; i++) to[2 * i + token % 2] = a[p + i];
            }
        }
        r += pair ? 2 : 1;
    }
}
// f32: [dp/32][32 tokens][32]
static void write_values(const float* x, int64_t stride, int64_t rows, int64_t offset,
                         int64_t width, float* plane) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t p = 0; p < width; p += kPanel)
            memcpy(plane + p * kBlockTokens + (offset + r) * kPanel, x + r * stride + p,
                   (size_t)smaller<int64_t>(width - p, kPanel) * sizeof(float));
}

// A token's keys lie in as many cache lines as a head has words, all of them from memory: asked for
// together they come three times as fast as one by one.
static void fetch_run(char* k_block, char* v_block, const KvWriteArgs& a, int64_t offset,
                      int64_t k_head, int64_t v_head) {
    const int64_t lane = offset * 4, pair = offset / 2 * 2 * kPanel * item_size(a.dtype);
    for (int64_t h = 0; h < a.kv_heads; h++) {
        for (int64_t at = lane; at < k_head; at += kBlockTokens * 4)
            __builtin_prefetch(k_block + h * k_head + at, 1, 2);
        const int64_t panel = kBlockTokens * kPanel * item_size(a.dtype);
        for (int64_t at = pair; at < v_head; at += panel) {
            __builtin_prefetch(v_block + h * v_head + at, 1, 2);
            __builtin_prefetch(v_block + h * v_head + at + 64, 1, 2);
        }
    }
}

template <class T>
static void write_run(const KvWriteArgs& a, int64_t first, int64_t rows) {
    const int64_t block = block_of(a.slots[first]), offset = a.slots[first] % kBlockTokens;
    const int64_t k_head = cache_block_bytes(1, a.head_dim, a.dtype),
                  v_head = cache_block_bytes(1, a.v_head_dim, a.dtype);
    char* k_block = (char*)a.k_cache.data + block * a.k_cache.block_stride;
    char* v_block = (char*)a.v_cache.data + block * a.v_cache.block_stride;
    // A block that is filled whole has nothing left to zero.
    if (offset == 0 && (rows < kBlockTokens || a.head_dim % kPanel || a.v_head_dim % kPanel)) {
        memset(k_block, 0, (size_t)(a.kv_heads * k_head));
        memset(v_block, 0, (size_t)(a.kv_heads * v_head));
    }
    if (rows == 1) fetch_run(k_block, v_block, a, offset, k_head, v_head);
    for (int64_t h = 0; h < a.kv_heads; h++) {
        const T* k = row<T>(a.k, first) + h * a.head_dim;
        const T* v = row<T>(a.v, first) + h * a.v_head_dim;
        write_keys((const char*)k, a.k.stride * (int64_t)sizeof(T), rows, offset,
                   a.head_dim * (int64_t)sizeof(T), (uint32_t*)(k_block + h * k_head));
        write_values(v, a.v.stride, rows, offset, a.v_head_dim, (T*)(v_block + h * v_head));
    }
}

static void kv_write(const Context& ctx, const KvWriteArgs& a) {
    const Span part = my_part(ctx, a.tokens);
    const int64_t end = run_start(a.slots, part.end, a.tokens);
    for (int64_t t = run_start(a.slots, part.begin, a.tokens); t < end;) {
        int64_t rows = 1;
        while (t + rows < end && block_of(a.slots[t]) >= 0 &&
               a.slots[t + rows] == a.slots[t] + rows &&
               block_of(a.slots[t + rows]) == block_of(a.slots[t]))
            rows++;
        if (a.slots[t] >= 0)
            a.dtype == DType::bf16 ? write_run<bf16>(a, t, rows) : write_run<float>(a, t, rows);
        t += rows;
    }
}
