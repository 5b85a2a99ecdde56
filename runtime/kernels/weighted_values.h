// The second product of attention: weights times values, begun while weights are still being made.

// c[width/32][kRowsBest][32] = weights . values, for attention. `weights` are operands in the place
// of scores: block b's row i starts at weights + b * block_stride + i * 32 (floats). values[b] is
// block b's panel32; `weigh(b, first, last)` is called once for every block and row, in ascending
// order of blocks, and makes these weights. `values` is used up.
template <class T, class Weigh>
static void weighted_values_after(TileUnit& tiles, float* weights, int64_t block_stride,
                                  int64_t rows, const T** values, int64_t blocks, int64_t width,
                                  float* c, Weigh weigh) {
    constexpr int64_t kOperands = sizeof(float) / sizeof(operand<T>);  // in the place of a score
    for (int64_t b = 0; b < blocks; b++) weigh(b, 0, rows);
    for (int64_t d = 0; d < width; d += kPanel) {
        const Segments<T> panels = {values, blocks, kBlockTokens,
                                    block_stride * kOperands - kBlockTokens};
        panel_product<T>(tiles, (const operand<T>*)weights, kPanel * kOperands, rows, panels,
                         c + d * kRowsBest);
        for (int64_t b = 0; b < blocks; b++) values[b] += kPanel * kBlockTokens;
    }
}

#if defined(RW_AMX)
// Rows to ask for so that one configuration serves every product of a task: past 16 rows, all 32.
// What lies in the rows past the true ones is never looked at.
RW_INLINE int64_t whole_tiles(int64_t rows) { return rows > 16 ? kRowsBest : rows; }

// Up to 16 rows by two panels of values at a time: four accumulators, each tile of weights is
// loaded once, right after it was made.
template <class T, class Weigh>
RW_INLINE void weighted_values(TileUnit& tiles, float* weights, int64_t block_stride, int64_t rows,
                               const T** values, int64_t blocks, int64_t width, float* c,
                               Weigh weigh) {
    if constexpr (sizeof(T) == 4) {
        weighted_values_after<T>(tiles, weights, block_stride, rows, values, blocks, width, c,
                                 weigh);
    } else {
        tiles.configure(whole_tiles(rows));
        const int64_t c_stride = kTileStride * 4, a_stride = kPanel * 4;
        for (int64_t d = 0; d < width; d += 2 * kPanel) {
            const bool two = d + kPanel < width;
            for (int64_t first = 0; first < rows; first += 16) {
                const int64_t last = smaller<int64_t>(first + 16, rows);
                const auto multiply = [&](int64_t b) {
                    const T* v = values[b] + d * kBlockTokens;
                    RW_TILE_LOAD(4, weights + b * block_stride + first * kPanel, a_stride);
                    RW_TILE_LOAD(5, v, 128);
                    RW_TILE_DOT(0, 4, 5);
                    RW_TILE_LOAD(6, v + 32, 128);
                    RW_TILE_DOT(1, 4, 6);
                    if (!two) return;
                    RW_TILE_LOAD(7, v + kPanel * kBlockTokens, 128);
                    RW_TILE_DOT(2, 4, 7);
                    RW_TILE_LOAD(5, v + kPanel * kBlockTokens + 32, 128);
                    RW_TILE_DOT(3, 4, 5);
                };
                RW_TILE_ZERO(0);
                RW_TILE_ZERO(1);
                if (two) {
                    RW_TILE_ZERO(2);
                    RW_TILE_ZERO(3);
                }
                for (int64_t b = 0; b < blocks; b++) {
                    if (d == 0) weigh(b, first, last);
                    multiply(b);
                }
                float* to = c + d * kRowsBest + first * kPanel;
                RW_TILE_STORE(0, to, c_stride);
                RW_TILE_STORE(1, to + 16, c_stride);
                if (!two) continue;
                to += kPanel * kRowsBest;
                RW_TILE_STORE(2, to, c_stride);
                RW_TILE_STORE(3, to + 16, c_stride);
            }
        }
    }
}
#else
// Rows to ask for so that no set-up changes with them.
RW_INLINE int64_t whole_tiles(int64_t rows) { return rows; }

template <class T, class Weigh>
RW_INLINE void weighted_values(TileUnit& tiles, float* weights, int64_t block_stride, int64_t rows,
                               const T** values, int64_t blocks, int64_t width, float* c,
                               Weigh weigh) {
    weighted_values_after<T>(tiles, weights, block_stride, rows, values, blocks, width, c, weigh);
}
#endif
