// The micro-kernel on AMX tiles: two by two accumulators of 16 x 16, so each loaded tile is used
// twice. f32 has no tiles and stays on vectors.

// The tile registers of this thread while a kernel runs. Configured for a number of rows of `a`,
// released at the end: a thread whose tiles are in use costs the system 8 KiB more per context
// switch.
struct TileUnit {
    int64_t rows = 0;

    RW_INLINE_MEMBER void configure(int64_t wanted) {  // 1..32
        if (wanted == rows) return;
        rows = wanted;
        const int upper = (int)smaller<int64_t>(wanted, 16), lower = (int)(wanted - upper);
        struct __attribute__((aligned(64))) Config {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t bytes[16] = {};
            uint8_t rows[16] = {};
        } config;
        // 0..3: c (upper left, upper right, lower left, lower right); 4, 5: a; 6, 7: B
        // With up to 16 rows of `a`, 2 and 3 are upper tiles and 5 is B: see weighted_values.
        const int c2 = lower ? lower : upper, t5 = lower ? lower : 16;
        const int counts[8] = {upper, upper, c2, c2, upper, t5, 16, 16};
        for (int t = 0; t < 8; t++) {
            config.rows[t] = (uint8_t)counts[t];
            config.bytes[t] = counts[t] ? 64 : 0;
        }
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    ~TileUnit() {
        if (rows) asm volatile("tilerelease" ::);
    }
};

// With memory clobbers: the compiler must have finished its stores to what a tile reads.
#define RW_TILE_LOAD(tile, base, stride) \
    asm volatile("tileloadd (%0,%1,1), %%tmm" #tile::"r"(base), "r"((int64_t)(stride)) : "memory")
// The same for what isn't read again soon: it passes the L1 cache by.
#define RW_TILE_LOAD_ONCE(tile, base, stride) \
    asm volatile("tileloaddt1 (%0,%1,1), %%tmm" #tile::"r"(base), "r"((int64_t)(stride)) : "memory")
#define RW_TILE_STORE(tile, base, stride)                                                   \
    asm volatile("tilestored %%tmm" #tile ", (%0,%1,1)" ::"r"(base), "r"((int64_t)(stride)) \
                 : "memory")
#define RW_TILE_ZERO(tile) asm volatile("tilezero %%tmm" #tile::)
#define RW_TILE_DOT(c, a, b) asm volatile("tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c::)

// A quarter of the lines that one step of k takes from B. A macro: g++ 12 takes a function (or a
// lambda) of nothing but prefetches for one without effect, and drops the call.
#define RW_STREAM_QUARTER(quarter)                                      \
    if (STREAM)                                                         \
        for (int line = 8 * (quarter); line < 8 * (quarter) + 8; line++) \
    __builtin_prefetch((const char*)p + kStreamAhead + 64 * line, 0, 2)

// A dot product holds one of the two vector ports for 16 cycles and leaves the other free: 64
// vector instructions beside four of them cost nothing, if they are spread so finely that both are
// in the window of instructions under way. Hence the work beside is done in portions, one at each
// step of k.
template <bool LOWER, bool LEFT, bool RIGHT, bool STREAM, bool ONCE, class Run>
RW_INLINE void tile_product(const bf16* a, int64_t lda, Segments<bf16> b, Access access, float* c,
                            Beside<Run> beside) {
    // All rows there are: no panel is read again, and the rows should stay in the L1 cache.
    constexpr bool B_ONCE = STREAM && !ONCE;
    const int64_t a_stride = lda * 2, lower = 16 * lda;
    if (LEFT) RW_TILE_ZERO(0);
    if (RIGHT) RW_TILE_ZERO(1);
    if (LOWER && LEFT) RW_TILE_ZERO(2);
    if (LOWER && RIGHT) RW_TILE_ZERO(3);
    const int64_t steps = b.count * b.k / 32, portion = (beside.count + steps - 1) / steps;
    int64_t done = 0;
    for (int64_t s = 0; s < b.count; s++, a += b.a_gap) {
        const bf16* p = b.data[s];
        for (int64_t k = 0; k < b.k; k += 32, a += 32, p += 32 * kPanel) {
            // Prefetches between the loads: tile loads from L2 and prefetches share the few fill
            // buffers of L1, and a burst of either makes the other wait.
            if (LEFT && B_ONCE) RW_TILE_LOAD_ONCE(6, p, 128);
            if (LEFT && !B_ONCE) RW_TILE_LOAD(6, p, 128);
            RW_STREAM_QUARTER(0);
            if (ONCE)
                RW_TILE_LOAD_ONCE(4, a, a_stride);
            else
                RW_TILE_LOAD(4, a, a_stride);
            RW_STREAM_QUARTER(1);
            for (int64_t line = 0; line < access.lines; line++)
                __builtin_prefetch(access.ahead + 64 * line, 0, 2);
            access.ahead += 64 * access.lines;
            if (LEFT) RW_TILE_DOT(0, 4, 6);
            if (RIGHT && B_ONCE) RW_TILE_LOAD_ONCE(7, p + 32, 128);
            if (RIGHT && !B_ONCE) RW_TILE_LOAD(7, p + 32, 128);
            RW_STREAM_QUARTER(2);
            if (RIGHT) RW_TILE_DOT(1, 4, 7);
            if (LOWER && ONCE) RW_TILE_LOAD_ONCE(5, a + lower, a_stride);
            if (LOWER && !ONCE) RW_TILE_LOAD(5, a + lower, a_stride);
            RW_STREAM_QUARTER(3);
            if (LOWER && LEFT) RW_TILE_DOT(2, 5, 6);
            if (LOWER && RIGHT) RW_TILE_DOT(3, 5, 7);
            const int64_t first = done;
            done = smaller(first + portion, beside.count);
            beside.run(first, done);
        }
    }
    const int64_t c_stride = kTileStride * 4;
    if (LEFT) RW_TILE_STORE(0, c, c_stride);
    if (RIGHT) RW_TILE_STORE(1, c + 16, c_stride);
    if (LOWER && LEFT) RW_TILE_STORE(2, c + 16 * kTileStride, c_stride);
    if (LOWER && RIGHT) RW_TILE_STORE(3, c + 16 * kTileStride + 16, c_stride);
}

template <bool LOWER, bool STREAM, bool ONCE, class Run>
RW_INLINE void tile_columns(const bf16* a, int64_t lda, Segments<bf16> b, Columns columns,
                            Access access, float* c, Beside<Run> beside) {
    if (columns == Columns::all)
        return tile_product<LOWER, true, true, STREAM, ONCE>(a, lda, b, access, c, beside);
    if (columns == Columns::low)
        return tile_product<LOWER, true, false, false, ONCE>(a, lda, b, access, c, beside);
    tile_product<LOWER, false, true, false, ONCE>(a, lda, b, access, c, beside);
}

constexpr int64_t kRowsBest = 32;

template <class T>
constexpr bool fetches_ahead() {
    return sizeof(T) == 2;
}

// At most kRowsBest rows.
template <class T, class Run>
RW_INLINE void panel_product(TileUnit& tiles, const operand<T>* a, int64_t lda, int64_t rows,
                             Segments<T> b, Columns columns, Access access, float* c,
                             Beside<Run> beside) {
    if constexpr (sizeof(T) == 4) {
        beside.run(0, beside.count);
        vector_product<T>(a, lda, rows, b, columns, access.b_streams, c);
    } else {
        tiles.configure(rows);
        const bool lower = rows > 16, stream = access.b_streams;
        if (lower && access.a_once)
            stream ? tile_columns<true, true, true>(a, lda, b, columns, access, c, beside)
                   : tile_columns<true, false, true>(a, lda, b, columns, access, c, beside);
        else if (lower)
            stream ? tile_columns<true, true, false>(a, lda, b, columns, access, c, beside)
                   : tile_columns<true, false, false>(a, lda, b, columns, access, c, beside);
        else
            stream ? tile_columns<false, true, false>(a, lda, b, columns, access, c, beside)
                   : tile_columns<false, false, false>(a, lda, b, columns, access, c, beside);
    }
}
