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

// Where a tile's result goes: maximum and sum per row (-inf and 0 where a row sees nothing of the
// tile), and the weighted values [dvp/32][kQueryRows][32].
struct Partial {
    float *top, *total, *values;
};

// Everything a thread needs for one task. Rows of `scores` and of values are 32 floats, grouped by
// block of keys or by panel of values: the shape in which products leave them. Weights (operands of
// the second product) replace the scores they come from, row by row, which keeps a tile within the
// L1 cache.
template <class T>
struct AttentionScratch {
    operand<T>* query;        // [kQueryRows][query_stride]
    float* scores;            // [kTileBlocks][kQueryRows][32]
    float* lanes;             // [kQueryRows][W]: maxima, then sums, lane by lane
    Partial partial, result;  // of a tile, of the tiles so far
    int32_t *low, *high;      // [kQueryRows]: the columns of a tile that a row sees
    float *old_scale, *new_scale;
};

// Up to so many query rows the time goes into fetching keys and values: a tile's values are then
// asked for while its keys are worked on, and the next tile's keys while the values are.
constexpr int64_t kFetchRows = 4;

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
    out.lanes = (float*)take(kQueryRows * W, 4);
    out.partial.values = (float*)take(kQueryRows * s.dvp, 4);
    out.result.values = (float*)take(kQueryRows * s.dvp, 4);
    float** vectors[] = {&out.partial.top,  &out.partial.total, &out.result.top,
                         &out.result.total, &out.old_scale,     &out.new_scale};
    for (float** v : vectors) *v = (float*)take(round_up(kQueryRows, 16), 4);
    out.low = (int32_t*)take(kQueryRows, 4);
    out.high = (int32_t*)take(kQueryRows, 4);
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

// Rows of a task with the step's token and the head that each stands for: no division per row.
template <class Each>
RW_INLINE void each_row(const AttentionShape& s, const AttentionTask& t, Each each) {
    int64_t token = t.first_row / s.group, head = t.first_row % s.group;
    for (int64_t i = 0; i < t.rows; i++) {
        each(i, t.first_token + token, t.head * s.group + head);
        if (++head == s.group) head = 0, token++;
    }
}

// --- one tile of keys ---
template <class T>
static void load_queries(const AttentionArgs& a, const AttentionShape& s, const AttentionTask& t,
                         operand<T>* query) {
    const F sign = splat(a.scale < 0.0f ? -1.0f : 1.0f);  // scores are scaled by a positive number
    each_row(s, t, [&](int64_t i, int64_t token, int64_t head) {
        const T* q = row<T>(a.q, token) + head * a.head_dim;
        operand<T>* to = query + i * s.query_stride;
        for (int64_t d = 0; d < a.head_dim; d += W)
            store_some(to + d, load_some(q + d, a.head_dim - d) * sign, a.head_dim - d);
        if (s.dp > a.head_dim)
            memset(to + a.head_dim, 0, (size_t)(s.dp - a.head_dim) * sizeof(operand<T>));
    });
}

struct ScoreScale {
    float scale;         // of the capped score if there is a cap; not negative
    float inner, outer;  // score -> outer * tanh(score * inner), with softcap
};
RW_INLINE F only_between(F value, int64_t column, int64_t low, int64_t high, float other) {
    const F number = lane_numbers() + (float)column;
    F v = number < (float)low ? splat(other) : value;
    return number < (float)high ? v : splat(other);
}

// One tile's scores on their way to weights, block of keys by block: so the maxima of one block are
// taken while the products of the next are under way, and weights are multiplied with values as
// soon as they are there. What a row doesn't see gets weight 0 by selection, whatever its score;
// blocks that all rows see whole (most) carry no test.
template <class T, bool SOFTCAP>
struct TileSoftmax {
    static constexpr int64_t kBlock =
        kQueryRows * kPanel;  // floats from a block's row to the next block's
    static constexpr int kVectors = kPanel / W;
    const ScoreScale& scale;
    AttentionScratch<T>& m;
    int64_t rows, whole_from, whole_to;  // blocks [whole_from, whole_to) are seen whole by all rows

    RW_INLINE_MEMBER void start() {
        for (int64_t i = 0; i < rows; i++) store(m.lanes + i * W, splat(-kInf));
    }
    template <bool PARTLY>
    RW_INLINE_MEMBER void take_maxima(int64_t b, int64_t first, int64_t last) {
        float* row = m.scores + b * kBlock + first * kPanel;
        for (int64_t i = first; i < last; i++, row += kPanel) {
            F most = load(m.lanes + i * W);
            for (int v = 0; v < kVectors; v++) {
                F x = load(row + v * W);
                if (SOFTCAP) store(row + v * W, x = scale.outer * vtanh(x * scale.inner));
                if (PARTLY)
                    x = only_between(x, b * kPanel + v * W, m.low[i], m.high[i], -kInf);
                most = vmax(x, most);
            }
            store(m.lanes + i * W, most);
        }
    }
    RW_INLINE_MEMBER void maxima(int64_t b, int64_t first, int64_t last) {
        whole_from <= b && b < whole_to ? take_maxima<false>(b, first, last)
                                        : take_maxima<true>(b, first, last);
    }
    RW_INLINE_MEMBER void finish_maxima(float* top) {
        for (int64_t i = 0; i < rows; i++) {
            top[i] = max_lanes(load(m.lanes + i * W)) * scale.scale;  // a positive factor
            store(m.lanes + i * W, F{});                             // from now on sums
        }
    }
    template <bool PARTLY>
    RW_INLINE_MEMBER void weigh_rows(int64_t b, int64_t first, int64_t last, const float* top) {
        float* row = m.scores + b * kBlock + first * kPanel;
        for (int64_t i = first; i < last; i++, row += kPanel) {
            const F minus_top = splat(-top[i]);
            F x[kVectors], sum = load(m.lanes + i * W);
            for (int v = 0; v < kVectors; v++) {
                x[v] = exp2_weight<T>(fma(load(row + v * W), splat(scale.scale), minus_top));
                if (PARTLY)
                    x[v] = only_between(x[v], b * kPanel + v * W, m.low[i], m.high[i], 0.0f);
            }
            for (int v = 0; v < kVectors; v += 2)
                store_two((operand<T>*)row + v * W, x[v], x[v + 1], sum);
            store(m.lanes + i * W, sum);
        }
    }
    RW_INLINE_MEMBER void weigh(int64_t b, int64_t first, int64_t last, const float* top) {
        whole_from <= b && b < whole_to ? weigh_rows<false>(b, first, last, top)
                                        : weigh_rows<true>(b, first, last, top);
    }
    RW_INLINE_MEMBER void finish_sums(float* total) {
        for (int64_t i = 0; i < rows; i++) total[i] = sum_lanes(load(m.lanes + i * W));
    }
};

// Which columns of the tile at `base` each row sees, and the blocks that all see whole.
template <class T>
static void find_limits(const AttentionArgs& a, const AttentionShape& s, const AttentionTask& t,
                        int64_t base, AttentionScratch<T>& m, int64_t& whole_from,
                        int64_t& whole_to) {
    each_row(s, t, [&](int64_t i, int64_t token, int64_t) {
        const int64_t position = t.positions + token - t.first_token;
        m.high[i] = (int32_t)larger<int64_t>(smaller<int64_t>(position + 1 - base, kTileTokens), 0);
        m.low[i] = (int32_t)larger<int64_t>(a.window > 0 ? position + 1 - a.window - base : 0, 0);
    });
    whole_from = (m.low[t.rows - 1] + kBlockTokens - 1) / kBlockTokens;
    whole_to = m.high[0] / kBlockTokens;
}

RW_INLINE void fetch_plane(const char* plane, int64_t bytes) {
    for (int64_t at = 0; at < bytes; at += 64) __builtin_prefetch(plane + at, 0, 2);
}

// The tile of keys that this thread takes next, if any.
struct NextTile {
    const AttentionTask* task = nullptr;
    int64_t tile = 0;

    void fetch_block(const AttentionArgs& a, int64_t number) const {
        if (!task || task->rows > kFetchRows) return;
        const int64_t from = larger(task->begin, tile * kTileTokens) / kBlockTokens + number;
        const int64_t end = smaller(task->end, (tile + 1) * kTileTokens);
        if (from * kBlockTokens >= end) return;
        const int64_t k_head = cache_block_bytes(1, a.head_dim, a.dtype);
        const int64_t block = a.block_table[task->request * a.table_stride + from];
        fetch_plane((const char*)a.k_cache.data + block * a.k_cache.block_stride +
                        task->head * k_head,
                    k_head);
    }
};

template <class T, bool SOFTCAP>
static void attend_blocks(TileUnit& tiles, const AttentionArgs& a, const AttentionShape& s,
                          const AttentionTask& t, int64_t tile, const ScoreScale& scale,
                          AttentionScratch<T>& m, const Partial& out, const NextTile& next) {
    typedef TileSoftmax<T, SOFTCAP> Softmax;
    const int64_t base = tile * kTileTokens, first_block = base / kBlockTokens;
    const int64_t from = larger(t.begin - base, (int64_t)0) / kBlockTokens;
    const int64_t to =
        (smaller<int64_t>(t.end - base, kTileTokens) + kBlockTokens - 1) / kBlockTokens;
    const int32_t* blocks = a.block_table + t.request * a.table_stride + first_block;
    const int64_t k_head = cache_block_bytes(1, a.head_dim, a.dtype),
                  v_head = cache_block_bytes(1, a.v_head_dim, a.dtype);
    const char* k_plane = (const char*)a.k_cache.data + t.head * k_head;
    const char* v_plane = (const char*)a.v_cache.data + t.head * v_head;
    Softmax softmax = {scale, m, t.rows, 0, 0};
    find_limits(a, s, t, base, m, softmax.whole_from, softmax.whole_to);
    softmax.start();
    const T* values[kTileBlocks];
    const bool fetch = t.rows <= kFetchRows;
    for (int64_t b = from; b < to; b++) {
        const T* keys = (const T*)(k_plane + blocks[b] * a.k_cache.block_stride);
        values[b - from] = (const T*)(v_plane + blocks[b] * a.v_cache.block_stride);
        if (fetch) fetch_plane((const char*)values[b - from], v_head);
        panel_product<T>(tiles, m.query, s.query_stride, whole_tiles(t.rows),
                         Segments<T>{&keys, 1, s.dp}, Columns::all, {},
                         m.scores + b * Softmax::kBlock,
                         Beside{b > from ? t.rows : 0, [&](int64_t first, int64_t last) {
                                    softmax.maxima(b - 1, first, last);
                                }});
    }
    softmax.maxima(to - 1, 0, t.rows);
    softmax.finish_maxima(out.top);
    weighted_values<T>(tiles, m.scores + from * Softmax::kBlock, Softmax::kBlock, t.rows, values,
                       to - from, s.dvp, out.values, [&](int64_t b, int64_t first, int64_t last) {
                           if (first == 0) next.fetch_block(a, b);
                           softmax.weigh(from + b, first, last, out.top);
                       });
    softmax.finish_sums(out.total);
}

// Partial result of tile `tile`. Blocks that no row of the task sees aren't read.
template <class T>
static void attend_tile(TileUnit& tiles, const AttentionArgs& a, const AttentionShape& s,
                        const AttentionTask& t, int64_t tile, const ScoreScale& scale,
                        AttentionScratch<T>& m, const Partial& out, const NextTile& next) {
    scale.outer != 0.0f ? attend_blocks<T, true>(tiles, a, s, t, tile, scale, m, out, next)
                        : attend_blocks<T, false>(tiles, a, s, t, tile, scale, m, out, next);
}

// --- merging partials, in ascending order of tiles ---
template <class T>
static void merge_partial(const AttentionShape& s, int64_t rows, const Partial& tile,
                          AttentionScratch<T>& m) {
    const Partial& all = m.result;
    for (int64_t i = 0; i < rows; i += W) {  // vectors are padded to 16 rows
        const F old = load(all.top + i), added = load(tile.top + i);
        const F top = vmax(added, old);
        const F keep = top == old ? splat(1.0f) : exp2_clamped<T>(old - top);
        const F take = added == -kInf ? F{} : exp2_clamped<T>(added - top);
        store(m.old_scale + i, keep);
        store(m.new_scale + i, take);
        store(all.total + i, fma(load(tile.total + i), take, load(all.total + i) * keep));
        store(all.top + i, top);
    }
    for (int64_t d = 0; d < s.dvp; d += kPanel)
        for (int64_t i = 0; i < rows; i++) {
            if (tile.top[i] == -kInf) continue;
            const int64_t from = d * kQueryRows + i * kPanel;
            const F keep = splat(m.old_scale[i]), take = splat(m.new_scale[i]);
            for (int64_t c = from; c < from + kPanel; c += W)
                store(all.values + c,
                      fma(load(tile.values + c), take, load(all.values + c) * keep));
        }
}

template <class T>
static void finish_rows(const AttentionArgs& a, const AttentionShape& s, const AttentionTask& t,
                        const AttentionScratch<T>& m) {
    each_row(s, t, [&](int64_t i, int64_t token, int64_t head) {
        T* y = row<T>(a.y, token) + head * a.v_head_dim;
        const F scale = splat(1.0f / m.result.total[i]);
        for (int64_t d = 0; d < a.v_head_dim; d += W) {
            const float* from =
                m.result.values + d / kPanel * kPanel * kQueryRows + i * kPanel + d % kPanel;
            store_some(y + d, load(from) * scale, a.v_head_dim - d);
        }
    });
}

// --- two ways to share the work ---
// Tasks whole: contiguous by cost.
template <class T>
static void share_tasks(const Context& ctx, const AttentionArgs& a, const AttentionShape& s,
                        const ScoreScale& scale, AttentionScratch<T>& m, int64_t cost) {
    TileUnit tiles;
    const auto attend = [&](const AttentionTask& t, const AttentionTask* after) {
        load_queries<T>(a, s, t, m.query);
        const int64_t first = first_tile(t), last = last_tile(t);
        for (int64_t tile = first; tile < last; tile++) {
            const NextTile next = tile + 1 < last ? NextTile{&t, tile + 1}
                                  : after         ? NextTile{after, first_tile(*after)}
                                                  : NextTile{};
            attend_tile<T>(tiles, a, s, t, tile, scale, m, tile == first ? m.result : m.partial,
                           next);
            if (tile > first) merge_partial(s, t.rows, m.partial, m);
        }
        finish_rows(a, s, t, m);
    };
    int64_t before = 0;
    AttentionTask held;  // each task waits until the one after it is known
    bool holds = false;
    each_task(a, s.group, [&](const AttentionTask& t) {
        const int64_t middle = before + task_cost(t) / 2;
        before += task_cost(t);
        if (middle * ctx.size / cost != ctx.rank) return;
        if (holds) attend(held, &t);
        held = t;
        holds = true;
    });
    if (holds) attend(held, nullptr);
}

// Too few tasks for the team: tiles of keys are shared, partials meet in the shared scratch.
template <class T>
static void share_tiles(const Context& ctx, const AttentionArgs& a, const AttentionShape& s,
                        const ScoreScale& scale, AttentionScratch<T>& m, int64_t items) {
    const int64_t vectors = round_up(kQueryRows, 16), record = 2 * vectors + kQueryRows * s.dvp;
    const auto record_of = [&](int64_t item) {
        float* at = (float*)ctx.shared + item * record;
        return Partial{at, at + vectors, at + 2 * vectors};
    };
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
                const NextTile next =
                    tile + 1 < last_tile(t) ? NextTile{&t, tile + 1} : NextTile{};
                attend_tile<T>(tiles, a, s, t, tile, scale, m, record_of(item), next);
            }
        });
    }
    ctx.barrier(ctx.team, ctx.rank);
    int64_t task = 0;
    item = 0;
    each_task(a, s.group, [&](const AttentionTask& t) {
        const int64_t first = item;
        item += last_tile(t) - first_tile(t);
        if (task++ % ctx.size != ctx.rank) return;
        m.result = record_of(first);
        for (int64_t i = first + 1; i < item; i++) merge_partial(s, t.rows, record_of(i), m);
        finish_rows(a, s, t, m);
    });
}

template <class T>
static void attention_typed(const Context& ctx, const AttentionArgs& a) {
    const int64_t dp = round_up(a.head_dim, kPanel);
    const AttentionShape s = {a.heads / a.kv_heads, dp, round_up(a.v_head_dim, kPanel),
                              packed_stride(dp, sizeof(operand<T>))};
    AttentionScratch<T> m = carve_attention<T>(ctx.scratch, s);
    const float size = fabsf(a.scale);  // its sign went into the queries
    ScoreScale scale = {size * kLog2e, 0.0f, 0.0f};
    if (a.softcap > 0.0f) scale = {1.0f, size / a.softcap, a.softcap * kLog2e};
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
