// y = act(x) W^T: packs rows of x (normalising them on the way when asked), shares panels of W (or,
// of many rows, the rows) over the team, and runs panel_product on tiles of rows. Who packs and who
// computes what never changes a bit of the result.

// Few rows are packed by every thread for itself: cheaper than a barrier (0.3 us) up to here.
constexpr int64_t kPrivateRows = 8;

// Rows that are multiplied with a panel before the next one is fetched: as many as keep the packed
// rows within half of a 2 MiB L2, evened out, and at least 192 so that weights from memory are used
// often enough to hide their transfer.
static int64_t chunk_rows(int64_t rows, int64_t kp, int64_t item) {
    const int64_t most = larger<int64_t>(kGemmChunkBytes / (kp * item) / 96 * 96, 192);
    const int64_t chunks = (rows + most - 1) / most;
    return chunks <= 1 ? rows : round_up((rows + chunks - 1) / chunks, 96);
}

// Distance between packed rows: an odd number of cache lines, so that the 16 rows of a tile fall
// into different sets of the L1 cache (worth 5 to 10% at k = 576, 40% at powers of two).
static int64_t packed_stride(int64_t kp, int64_t item) {
    return kp * item / 64 % 2 ? kp : kp + 64 / item;
}

// One row of x as the micro-kernel wants it: normalised, in the operand's type, zero from k to kp.
template <class T>
static void pack_row(const GemmArgs& a, int64_t r, int64_t kp, bool write_sum, operand<T>* out) {
    if (a.norm) {
        const RmsNormArgs& n = *a.norm;
        const RmsRow norm = {n.gain, n.eps, n.offset};
        const T* residual = n.residual.data ? row<T>(n.residual, r) : nullptr;
        T* sum = n.sum.data && write_sum ? row<T>(n.sum, r) : nullptr;
        rms_vector<T, operand<T>>(row<T>(n.x, r), residual, sum, out, a.k, norm);
    } else {
        const T* x = row<T>(a.x, r);
        if constexpr (sizeof(T) == sizeof(operand<T>)) {
            memcpy(out, x, (size_t)a.k * sizeof(T));
        } else {
            for (int64_t i = 0; i < a.k; i += W)
                store_some(out + i, load_some(x + i, a.k - i), a.k - i);
        }
    }
    if (kp > a.k) memset(out + a.k, 0, (size_t)(kp - a.k) * sizeof(operand<T>));
}

// A product that waits in c to be written: columns [from, to) of the 32 from `column` of y, rows
// first.. of y. Peaks, where wanted, are this thread's own, by row of y.
struct Pending {
    const float* c = nullptr;
    int64_t first = 0, rows = 0, column = 0, from = 0, to = 0;
    Peak* peaks = nullptr;
};

// run() finishes rows [begin, end) of one. kColumns: of y that a panel makes. Where they aren't the
// panel's own, a panel can't be halved.
template <class T, class Out>
struct PlainFinish {
    static constexpr int64_t kColumns = kPanel;
    RW_INLINE_MEMBER static void run(const GemmArgs& a, const Pending& t, int64_t begin,
                                     int64_t end) {
        const float* c = t.c + begin * kTileStride;
        for (int64_t r = begin; r < end; r++, c += kTileStride) {
            Out* y = row<Out>(a.y, t.first + r) + t.column;
            if (!a.bias && !a.add.data && t.to - t.from == kPanel) {
                for (int64_t i = 0; i < kPanel; i += 2 * W)
                    store_two(y + i, load(c + i), load(c + i + W));
                continue;
            }
            const Out* add = a.add.data ? row<Out>(a.add, t.first + r) + t.column : nullptr;
            for (int64_t i = t.from; i < t.to; i += W) {
                F v = load(c + i);
                if (a.bias) v = v + load_some((const T*)a.bias + t.column + i, t.to - i);
                if (add) v = round_to<Out>(v) + load_some(add + i, t.to - i);
                store_some(y + i, v, t.to - i);
            }
        }
    }
};

// 16 gates beside their 16 ups become 16 columns of y.
template <class T, Activation act>
struct GluFinish {
    static constexpr int64_t kColumns = kPanel / 2;
    RW_INLINE_MEMBER static void run(const GemmArgs& a, const Pending& t, int64_t begin,
                                     int64_t end) {
        const float* c = t.c + begin * kTileStride;
        const int64_t column = t.column / 2;
        for (int64_t r = begin; r < end; r++, c += kTileStride) {
            T* y = row<T>(a.y, t.first + r) + column;
            for (int64_t i = 0; i < kPanel / 2; i += W) {
                F gate = load(c + i), up = load(c + kPanel / 2 + i);
                if (a.bias) {
                    gate = gate + load((const T*)a.bias + column + i);
                    up = up + load((const T*)a.bias + a.n / 2 + column + i);
                }
                store(y + i, gated<T, act>(round_to<T>(gate), round_to<T>(up)));
            }
        }
    }
};

// f32 with the largest of each row. A row that nobody reads isn't written: the logits of a greedy
// step of 32 rows are 6 MB.
template <class T>
struct PeakFinish {
    static constexpr int64_t kColumns = kPanel;
    RW_INLINE_MEMBER static void run(const GemmArgs& a, const Pending& t, int64_t begin,
                                     int64_t end) {
        const float* c = t.c + begin * kTileStride;
        for (int64_t r = t.first + begin; r < t.first + end; r++, c += kTileStride) {
            const float* values = c;
            alignas(64) float biased[kPanel];
            if (a.bias) {
                for (int64_t i = t.from; i < t.to; i += W)
                    store(biased + i,
                          load(c + i) + load_some((const T*)a.bias + t.column + i, t.to - i));
                values = biased;
            }
            // Few panels hold a new peak; columns from `to` on may hold anything, which only costs
            // a look.
            bool below = true;
            for (int64_t i = t.from; i < t.to; i += W)
                below &= all_at_most(load(values + i), t.peaks[r].value);
            if (!below) raise(values, t, t.peaks[r]);
            if (a.peak_only && a.peak_only[r]) continue;
            float* y = row<float>(a.y, r) + t.column;
            for (int64_t i = t.from; i < t.to; i += W)
                store_some(y + i, load(values + i), t.to - i);
        }
    }
    static void raise(const float* values, const Pending& t, Peak& peak) {
        for (int64_t i = t.from; i < t.to; i++) {
            peak.bad |= !(values[i] < kInf);  // also true for NaN
            if (values[i] > peak.value) peak.value = values[i], peak.index = (int32_t)(t.column + i);
        }
    }
};

// The panels that this thread multiplies with, in halves where the finish allows, so that an odd
// number of them still splits evenly.
template <class Finish>
static Span my_halves(const Context& ctx, const GemmArgs& a, bool own_rows) {
    const int64_t panels = (a.n + kPanel - 1) / kPanel;
    if (own_rows) return {0, 2 * panels};
    if (Finish::kColumns == kPanel) return my_part(ctx, 2 * panels);
    const Span whole = my_part(ctx, panels);
    return {2 * whole.begin, 2 * whole.end};
}

// A tile is finished while the next is multiplied, and the next panel comes from memory meanwhile:
// fetched on its first use it would hold that use up three times as long as the product takes.
template <class T, class Out, class Finish>
static void multiply_share(const Context& ctx, const GemmArgs& a, const operand<T>* x, int64_t lda,
                           int64_t first, int64_t rows, Span halves) {
    constexpr int64_t kHalf = kPanel / 2, kTile = kRowsBest * kTileStride;
    const int64_t kp = round_up(a.k, kPanel);
    const int64_t item = sizeof(T), row_tiles = (rows + kRowsBest - 1) / kRowsBest;
    // Of the next panel, each tile of rows asks for its share: so many lines at a step of 32 of k.
    const int64_t lines = (kPanel * kPanel * item / 64 + row_tiles - 1) / row_tiles;
    const int64_t share = lines * 64 * (kp / 32);
    alignas(64) float buffers[2][kTile];
    int which = 0;
    Pending last;
    Peak* peaks = a.peaks ? a.peaks + ctx.rank * a.rows : nullptr;
    TileUnit tiles;
    for (int64_t h = halves.begin; h < halves.end;) {
        const int64_t p = h / 2;
        const bool ahead = fetches_ahead<T>() && rows >= 2 * kRowsBest;
        const bool fetched = ahead && h > halves.begin;
        const Columns columns = h % 2                 ? Columns::high
                                : h + 1 == halves.end ? Columns::low
                                                      : Columns::all;
        h += columns == Columns::all ? 2 : 1;
        const int64_t from = columns == Columns::high ? kHalf : 0;
        const int64_t to =
            smaller<int64_t>(columns == Columns::low ? kHalf : kPanel, a.n - p * kPanel);
        for (int64_t r = 0; r < rows; r += kRowsBest) {
            const int64_t n = smaller<int64_t>(rows - r, kRowsBest);
            float* c = buffers[which];
            // Not for few rows: their part of y is small, and memory has enough to do.
            for (int64_t i = 0; i < n && rows > kRowsBest; i++)
                __builtin_prefetch(row<Out>(a.y, first + r + i) + p * Finish::kColumns, 1, 3);
            const T* panel = (const T*)a.weight + p * kp * kPanel;
            const Segments<T> b = {&panel, 1, kp};
            // One tile of rows stays in L1 from panel to panel; of many, the panel stays.
            Access access = {r == 0 && !fetched, rows > kRowsBest};
            if (ahead && h < halves.end) {
                access.ahead = (const char*)(panel + kp * kPanel) + r / kRowsBest * share;
                access.lines = lines;
            }
            const auto finish = [&](int64_t begin, int64_t end) {
                Finish::run(a, last, begin, end);
            };
            panel_product<T>(tiles, x + r * lda, lda, n, b, columns, access, c,
                             Beside{last.rows, finish});
            last = {c, first + r, n, p * kPanel, from, to, peaks};
            which ^= 1;
        }
    }
    Finish::run(a, last, 0, last.rows);
}

// Of many rows each thread packs and multiplies its own, with every panel: both cores' copies of a
// weight come from memory once, what a row needs was written by its own core (its norm doesn't wait
// for lines of another), and nobody waits at a barrier. Peaks are parted by columns.
static bool owns_rows(const Context& ctx, const GemmArgs& a) {
    return a.rows >= kGemmOwnRows * ctx.size && !a.peaks;
}

template <class T, class Out, class Finish = PlainFinish<T, Out>>
static void gemm_chunks(const Context& ctx, const GemmArgs& a) {
    const int64_t kp = round_up(a.k, kPanel), item = sizeof(operand<T>);
    const bool as_it_is = !a.norm && a.k == kp && sizeof(T) == sizeof(operand<T>);
    const bool own = owns_rows(ctx, a), few = a.rows <= kPrivateRows;
    const bool alone = own || few || ctx.size == 1;
    const Span all = own ? my_part(ctx, a.rows) : Span{0, a.rows};
    const Span halves = my_halves<Finish>(ctx, a, own);
    const int64_t chunk = chunk_rows(all.end - all.begin, kp, item);
    const int64_t stride = packed_stride(kp, item);
    operand<T>* packed = (operand<T>*)(own || few ? ctx.scratch : ctx.shared);
    for (int64_t r = 0; a.peaks && r < a.rows; r++) a.peaks[ctx.rank * a.rows + r] = Peak();
    for (int64_t first = all.begin; first < all.end; first += chunk) {
        const int64_t rows = smaller(chunk, all.end - first);
        if (as_it_is) {
            multiply_share<T, Out, Finish>(ctx, a, (const operand<T>*)row<T>(a.x, first),
                                           a.x.stride, first, rows, halves);
            continue;
        }
        const Span mine = alone ? Span{0, rows} : my_part(ctx, rows);
        if (!alone && first > 0)
            ctx.barrier(ctx.team, ctx.rank);  // everybody has read the last chunk
        for (int64_t r = mine.begin; r < mine.end; r++)
            pack_row<T>(a, first + r, kp, own || !alone || ctx.rank == 0, packed + r * stride);
        if (!alone) ctx.barrier(ctx.team, ctx.rank);
        multiply_share<T, Out, Finish>(ctx, a, packed, stride, first, rows, halves);
    }
}

template <class T>
static void gemm_typed(const Context& ctx, const GemmArgs& a) {
    switch (a.epilogue) {
        case Epilogue::silu: return gemm_chunks<T, T, GluFinish<T, Activation::silu>>(ctx, a);
        case Epilogue::gelu: return gemm_chunks<T, T, GluFinish<T, Activation::gelu>>(ctx, a);
        case Epilogue::gelu_tanh:
            return gemm_chunks<T, T, GluFinish<T, Activation::gelu_tanh>>(ctx, a);
        case Epilogue::none: break;
    }
    if (a.peaks) return gemm_chunks<T, float, PeakFinish<T>>(ctx, a);
    if constexpr (sizeof(T) == 4)
        gemm_chunks<T, T>(ctx, a);
    else
        a.y.dtype == DType::f32 ? gemm_chunks<T, float>(ctx, a) : gemm_chunks<T, T>(ctx, a);
}

static void gemm(const Context& ctx, const GemmArgs& a) {
    const DType in = a.norm ? a.norm->x.dtype : a.x.dtype;
    in == DType::f32 ? gemm_typed<float>(ctx, a) : gemm_typed<bf16>(ctx, a);
}
