// Paged attention over panel32 cache blocks, prefill and decode alike.
//
// A task is (request, kv head, tile of query rows); a query row is a (token, head of the group)
// pair, so the heads that share keys also share their loads. Keys are taken in tiles of 256 tokens
// that start at multiples of 256. Each tile gives a partial result of its own (maximum, sum,
// weighted values); partials are then merged in ascending order. Since the partial of a tile
// depends on nothing but the row and the tile, a row's bits are the same in decode and in prefill,
// and a long context may be split over threads at tile boundaries.
//
// Exponents are base 2: log2(e) goes into the scale.

constexpr int64_t kQueryRows = kRowsBest;
constexpr int64_t kTileBlocks = kTileTokens / kBlockTokens;

// Everything a thread needs for one task. Rows of `scores`, `partial` and `result` are 32 floats,
// grouped by block of keys or by panel of values: the shape in which panel_product leaves them.
// Weights (operands of the second product) replace the scores they come from, row by row, which
// keeps a tile within the L1 cache.
template <class T>
struct AttentionScratch {
    operand<T>* query;  // [kQueryRows][query_stride]
    float* scores;      // [kTileBlocks][kQueryRows][32]
    float* partial;     // [dvp/32][kQueryRows][32]
    float* result;      // [dvp/32][kQueryRows][32]
    float* top;         // [kQueryRows] of the result, and so on
    float* total;
    float* tile_top;
    float* tile_total;
    float* old_scale;
    float* new_scale;
};

struct AttentionTask {
    int64_t request, head;    // head: of the kv heads
    int64_t first_row, rows;  // of the request's tokens * group rows
    int64_t first_token,
        positions;       // the step's first token of the request; position of that token
    int64_t begin, end;  // keys that some row sees
};

struct AttentionShape {
    int64_t group, dp, dvp;
    int64_t query_stride;  // an odd number of cache lines, as in gemm.h: QK^T runs 18% faster than
                           // at dp = 64
};

template <class T>
static AttentionScratch<T> carve_attention(void* memory, const AttentionShape& s) {
    char* p = (char*)memory;
    auto take = [&p](int64_t count, int64_t item) {
        char* from = p;
        p += round_up(count * item, 64);
        return from;
    };
    AttentionScratch<T> out;
    out.query = (operand<T>*)take(kQueryRows * s.query_stride, sizeof(operand<T>));
    out.scores = (float*)take(kQueryRows * kTileTokens, 4);
    out.partial = (float*)take(kQueryRows * s.dvp, 4);
    out.result = (float*)take(kQueryRows * s.dvp, 4);
    float** vectors[] = {&out.top,        &out.total,     &out.tile_top,
                         &out.tile_total, &out.old_scale, &out.new_scale};
    for (float** v : vectors) *v = (float*)take(round_up(kQueryRows, 16), 4);
    return out;
}

// --- which rows, which keys ---
static AttentionTask make_task(const AttentionArgs& a, int64_t group, int64_t request, int64_t head,
                               int64_t tile) {
    AttentionTask t;
    const int64_t tokens = a.query_start[request + 1] - a.query_start[request];
    t.request = request;
    t.head = head;
    t.first_row = tile * kQueryRows;
    t.rows = smaller(kQueryRows, tokens * group - t.first_row);
    t.first_token = a.query_start[request];
    t.positions = a.lengths[request] - tokens;
    const int64_t first = t.positions + t.first_row / group;
    t.end = t.positions + (t.first_row + t.rows - 1) / group + 1;
    t.begin = a.window > 0 ? larger<int64_t>(first + 1 - a.window, 0) : 0;
    return t;
}
RW_INLINE int64_t first_tile(const AttentionTask& t) { return t.begin / kTileTokens; }
RW_INLINE int64_t last_tile(const AttentionTask& t) {
    return (t.end + kTileTokens - 1) / kTileTokens;
}
// Work of a task: loads of its key blocks, and rows that go through the exponential.
RW_INLINE int64_t task_cost(const AttentionTask& t) {
    return ((t.end - t.begin) / kBlockTokens + 4) * (t.rows + 8);
}

template <class Each>
static void each_task(const AttentionArgs& a, int64_t group, Each each) {
    for (int64_t r = 0; r < a.requests; r++) {
        const int64_t rows = (a.query_start[r + 1] - a.query_start[r]) * group;
        for (int64_t h = 0; h < a.kv_heads; h++)
            for (int64_t tile = 0; tile * kQueryRows < rows; tile++)
                each(make_task(a, group, r, h, tile));
    }
}

// --- one tile of keys ---
template <class T>
static void load_queries(const AttentionArgs& a, const AttentionShape& s, const AttentionTask& t,
                         operand<T>* query) {
    for (int64_t i = 0; i < t.rows; i++) {
        const int64_t token = (t.first_row + i) / s.group,
                      head = t.head * s.group + (t.first_row + i) % s.group;
        const T* q = row<T>(a.q, t.first_token + token) + head * a.head_dim;
        operand<T>* to = query + i * s.query_stride;
        for (int64_t d = 0; d < a.head_dim; d += W)
            store_some(to + d, load_some(q + d, a.head_dim - d), a.head_dim - d);
        if (s.dp > a.head_dim)
            memset(to + a.head_dim, 0, (size_t)(s.dp - a.head_dim) * sizeof(operand<T>));
    }
}

struct ScoreScale {
    float scale;         // to base 2, without softcap
    float inner, outer;  // score -> outer * tanh(score * inner), with softcap
};
RW_INLINE F only_between(F value, int64_t column, int64_t low, int64_t high, float other) {
    const F number = lane_numbers() + (float)column;
    F v = number < (float)low ? splat(other) : value;
    return number < (float)high ? v : splat(other);
}

// One row of one tile: its columns [low, high) are visible, blocks [from, to) were computed. Blocks
// at the ends may be visible in part; those between them are the hot loop and carry no test.
template <class T, bool SOFTCAP>
struct SoftmaxRow {
    static constexpr int64_t kBlock =
        kQueryRows * kPanel;  // floats from a block's row to the next block's
    static constexpr int kVectors = kPanel / W;
    float* scores;
    int64_t from, to, low, high;
    const ScoreScale& s;
    F most[kVectors], sums[kVectors];
    F minus_top;

    template <bool PARTLY>
    RW_INLINE_MEMBER void find_top(int64_t b) {
        float* row = scores + b * kBlock;
        for (int v = 0; v < kVectors; v++) {
            F x = load(row + v * W);
            x = SOFTCAP ? s.outer * vtanh(x * s.inner) : x * s.scale;
            if (SOFTCAP) store(row + v * W, x);
            if (PARTLY) x = only_between(x, b * kPanel + v * W, low, high, -kInf);
            most[v] = vmax(x, most[v]);
        }
    }
    template <bool PARTLY>
    RW_INLINE_MEMBER void weigh(int64_t b) {
        float* row = scores + b * kBlock;
        F x[kVectors];
        for (int v = 0; v < kVectors; v++) {
            x[v] = load(row + v * W);
            x[v] =
                exp2_clamped<T>(SOFTCAP ? x[v] + minus_top : fma(x[v], splat(s.scale), minus_top));
            if (PARTLY) x[v] = only_between(x[v], b * kPanel + v * W, low, high, 0.0f);
            sums[v] += x[v];
        }
        for (int v = 0; v < kVectors; v += 2) store_two((operand<T>*)row + v * W, x[v], x[v + 1]);
    }
    RW_INLINE_MEMBER void clear(int64_t b) {
        memset(scores + b * kBlock, 0, kPanel * sizeof(operand<T>));
    }

    // Scores become weights, and give their maximum and sum. What isn't visible gets weight 0 by
    // selection, whatever its score.
    RW_INLINE_MEMBER void run(float& top, float& total) {
        const int64_t first = low / kPanel,
                      last = (high + kPanel - 1) / kPanel;  // blocks with something visible
        const bool cut_first = low % kPanel != 0 || high < (first + 1) * kPanel;
        const bool cut_last = high % kPanel != 0 && (last - 1 > first || !cut_first);
        const int64_t whole = first + cut_first, whole_end = last - cut_last;
        for (int v = 0; v < kVectors; v++) most[v] = splat(-kInf), sums[v] = F{};
        if (cut_first) find_top<true>(first);
        for (int64_t b = whole; b < whole_end; b++) find_top<false>(b);
        if (cut_last) find_top<true>(last - 1);
        for (int v = 1; v < kVectors; v++) most[0] = vmax(most[v], most[0]);
        top = max_lanes(most[0]);
        minus_top = splat(-top);
        for (int64_t b = from; b < first; b++) clear(b);
        if (cut_first) weigh<true>(first);
        for (int64_t b = whole; b < whole_end; b++) weigh<false>(b);
        if (cut_last) weigh<true>(last - 1);
        for (int64_t b = last; b < to; b++) clear(b);
        for (int v = 1; v < kVectors; v++) sums[0] += sums[v];
        total = sum_lanes(sums[0]);
    }
};

template <class T>
RW_INLINE void softmax_row(float* scores, int64_t from, int64_t to, int64_t low, int64_t high,
                           const ScoreScale& s, float& top, float& total) {
    if (s.outer != 0.0f)
        SoftmaxRow<T, true>{scores, from, to, low, high, s, {}, {}, {}}.run(top, total);
    else
        SoftmaxRow<T, false>{scores, from, to, low, high, s, {}, {}, {}}.run(top, total);
}

// Partial result of tile `tile`: tile_top and tile_total per row (-inf and 0 where a row sees none
// of it), and the weighted values in `partial`. Blocks that no row of the task sees aren't read.
template <class T>
static void attend_tile(TileUnit& tiles, const AttentionArgs& a, const AttentionShape& s,
                        const AttentionTask& t, int64_t tile, const ScoreScale& scale,
                        AttentionScratch<T>& m, float* partial) {
    constexpr int64_t kBlock = kQueryRows * kPanel;
    const int64_t base = tile * kTileTokens;
    const int64_t from = larger(t.begin - base, (int64_t)0) / kBlockTokens;
    const int64_t to =
        (smaller<int64_t>(t.end - base, kTileTokens) + kBlockTokens - 1) / kBlockTokens;
    const int32_t* blocks = a.block_table + t.request * a.table_stride + base / kBlockTokens;
    const int64_t k_head = t.head * cache_block_bytes(1, a.head_dim, a.dtype),
                  v_head = t.head * cache_block_bytes(1, a.v_head_dim, a.dtype);
    const T* values[kTileBlocks];
    for (int64_t b = from; b < to; b++) {
        const T* keys =
            (const T*)((const char*)a.k_cache.data + blocks[b] * a.k_cache.block_stride + k_head);
        values[b - from] =
            (const T*)((const char*)a.v_cache.data + blocks[b] * a.v_cache.block_stride + v_head);
        panel_product<T>(tiles, m.query, s.query_stride, t.rows, Segments<T>{&keys, 1, s.dp},
                         m.scores + b * kBlock);
    }
    for (int64_t i = 0; i < t.rows; i++) {
        const int64_t position = t.positions + (t.first_row + i) / s.group;
        const int64_t high = smaller<int64_t>(position + 1 - base, kTileTokens);
        const int64_t low =
            larger<int64_t>(a.window > 0 ? position + 1 - a.window - base : 0, from * kBlockTokens);
        float* scores = m.scores + i * kPanel;
        if (low < high) {
            softmax_row<T>(scores, from, to, low, high, scale, m.tile_top[i], m.tile_total[i]);
            continue;
        }
        m.tile_top[i] = -kInf;
        m.tile_total[i] = 0.0f;
        for (int64_t b = from; b < to; b++)
            memset(scores + b * kBlock, 0, kPanel * sizeof(operand<T>));
    }
    constexpr int64_t kOperands =
        sizeof(float) / sizeof(operand<T>);  // of a weight in the place of a score
    const operand<T>* weights = (const operand<T>*)(m.scores + from * kBlock);
    for (int64_t d = 0; d < s.dvp; d += kPanel) {
        const Segments<T> panels = {values, to - from, kBlockTokens,
                                    kBlock * kOperands - kBlockTokens};
        panel_product<T>(tiles, weights, kPanel * kOperands, t.rows, panels,
                         partial + d * kQueryRows);
        for (int64_t b = from; b < to; b++) values[b - from] += kPanel * kBlockTokens;
    }
}

// --- merging partials, in ascending order of tiles ---
template <class T>
static void start_result(const AttentionShape& s, AttentionScratch<T>& m) {
    for (int64_t i = 0; i < kQueryRows; i++) m.top[i] = -kInf, m.total[i] = 0.0f;
    memset(m.result, 0, (size_t)(kQueryRows * s.dvp) * sizeof(float));
}

template <class T>
static void merge_partial(const AttentionShape& s, int64_t rows, const float* tile_top,
                          const float* tile_total, const float* partial, AttentionScratch<T>& m) {
    for (int64_t i = 0; i < rows; i += W) {  // vectors are padded to 16 rows
        const F old = load(m.top + i), tile = load(tile_top + i);
        const F top = vmax(tile, old);
        const F keep = top == old ? splat(1.0f) : exp2_clamped<T>(old - top);
        const F take = tile == -kInf ? F{} : exp2_clamped<T>(tile - top);
        store(m.old_scale + i, keep);
        store(m.new_scale + i, take);
        store(m.total + i, fma(load(tile_total + i), take, load(m.total + i) * keep));
        store(m.top + i, top);
    }
    for (int64_t d = 0; d < s.dvp; d += kPanel)
        for (int64_t i = 0; i < rows; i++) {
            if (tile_top[i] == -kInf) continue;
            const int64_t from = d * kQueryRows + i * kPanel;
            const F keep = splat(m.old_scale[i]), take = splat(m.new_scale[i]);
            for (int64_t c = from; c < from + kPanel; c += W)
                store(m.result + c, fma(load(partial + c), take, load(m.result + c) * keep));
        }
}

template <class T>
static void finish_rows(const AttentionArgs& a, const AttentionShape& s, const AttentionTask& t,
                        const AttentionScratch<T>& m) {
    for (int64_t i = 0; i < t.rows; i++) {
        const int64_t token = (t.first_row + i) / s.group,
                      head = t.head * s.group + (t.first_row + i) % s.group;
        T* y = row<T>(a.y, t.first_token + token) + head * a.v_head_dim;
        const F scale = splat(1.0f / m.total[i]);
        for (int64_t d = 0; d < a.v_head_dim; d += W) {
            const float* from =
                m.result + d / kPanel * kPanel * kQueryRows + i * kPanel + d % kPanel;
            store_some(y + d, load(from) * scale, a.v_head_dim - d);
        }
    }
}

// --- two ways to share the work ---
// Tasks whole: contiguous by cost.
template <class T>
static void share_tasks(const Context& ctx, const AttentionArgs& a, const AttentionShape& s,
                        const ScoreScale& scale, AttentionScratch<T>& m, int64_t cost) {
    TileUnit tiles;
    int64_t before = 0;
    each_task(a, s.group, [&](const AttentionTask& t) {
        const int64_t middle = before + task_cost(t) / 2;
        before += task_cost(t);
        if (middle * ctx.size / cost != ctx.rank) return;
        load_queries<T>(a, s, t, m.query);
        start_result(s, m);
        for (int64_t tile = first_tile(t); tile < last_tile(t); tile++) {
            attend_tile<T>(tiles, a, s, t, tile, scale, m, m.partial);
            merge_partial(s, t.rows, m.tile_top, m.tile_total, m.partial, m);
        }
        finish_rows(a, s, t, m);
    });
}

// Too few tasks for the team: tiles of keys are shared, partials meet in the shared scratch.
template <class T>
static void share_tiles(const Context& ctx, const AttentionArgs& a, const AttentionShape& s,
                        const ScoreScale& scale, AttentionScratch<T>& m, int64_t items) {
    const int64_t vectors = round_up(kQueryRows, 16), record = 2 * vectors + kQueryRows * s.dvp;
    float* records = (float*)ctx.shared;
    const Span mine = my_part(ctx, items);
    int64_t item = 0;
    {
        TileUnit tiles;
        each_task(a, s.group, [&](const AttentionTask& t) {
            bool loaded = false;
            for (int64_t tile = first_tile(t); tile < last_tile(t); tile++, item++) {
                if (item < mine.begin || item >= mine.end) continue;
                if (!loaded) load_queries<T>(a, s, t, m.query);
                loaded = true;
                float* to = records + item * record;
                attend_tile<T>(tiles, a, s, t, tile, scale, m, to + 2 * vectors);
                memcpy(to, m.tile_top, (size_t)t.rows * 4);
                memcpy(to + vectors, m.tile_total, (size_t)t.rows * 4);
            }
        });
    }
    ctx.barrier(ctx.team, ctx.rank);
    int64_t task = 0;
    item = 0;
    each_task(a, s.group, [&](const AttentionTask& t) {
        const float* from = records + item * record;
        item += last_tile(t) - first_tile(t);
        if (task++ % ctx.size != ctx.rank) return;
        start_result(s, m);
        for (int64_t tile = first_tile(t); tile < last_tile(t); tile++, from += record)
            merge_partial(s, t.rows, from, from + vectors, from + 2 * vectors, m);
        finish_rows(a, s, t, m);
    });
}

template <class T>
static void attention_typed(const Context& ctx, const AttentionArgs& a) {
    const int64_t dp = round_up(a.head_dim, kPanel);
    const AttentionShape s = {a.heads / a.kv_heads, dp, round_up(a.v_head_dim, kPanel),
                              packed_stride(dp, sizeof(operand<T>))};
    AttentionScratch<T> m = carve_attention<T>(ctx.scratch, s);
    ScoreScale scale = {a.scale * kLog2e, 0.0f, 0.0f};
    if (a.softcap > 0.0f) scale.inner = a.scale / a.softcap, scale.outer = a.softcap * kLog2e;
    int64_t cost = 0, tasks = 0, items = 0;
    each_task(a, s.group, [&](const AttentionTask& t) {
        cost += task_cost(t);
        items += last_tile(t) - first_tile(t);
        tasks++;
    });
    const int64_t record = (2 * round_up(kQueryRows, 16) + kQueryRows * s.dvp) * 4;
    const bool few = ctx.size > 1 && tasks < 4 * ctx.size && items >= 2 * tasks &&
                     items * record <= kAttentionSplitBytes;
    few ? share_tiles<T>(ctx, a, s, scale, m, items) : share_tasks<T>(ctx, a, s, scale, m, cost);
}
static void attention(const Context& ctx, const AttentionArgs& a) {
    a.dtype == DType::bf16 ? attention_typed<bf16>(ctx, a) : attention_typed<float>(ctx, a);
}
