/* Products in the tiles of AMX. Shape legend as in numbers.h. */

#define FILLED 16 /* rows of x are a multiple of this */

typedef struct {
    uint8_t palette, start, reserved[14];
    uint16_t bytes[16];
    uint8_t rows[16];
} ALIGNED Tiles;

/* oneDNN may take the tiles to be as it left them: they are put back afterwards. */
static void take_tiles(Tiles *before) {
    __asm__ volatile("sttilecfg %0" : "=m"(*before));
    Tiles all = {.palette = 1};
    for (int i = 0; i < 8; i++) all.bytes[i] = 64, all.rows[i] = TILE;
    _tile_loadconfig(&all);
}

static void give_tiles(const Tiles *before) { __asm__ volatile("ldtilecfg %0" : : "m"(*before)); }

#define AHEAD 8192 /* bytes of a weight that are fetched before they are needed */
#define MULTIPLY(sum, a, b) _tile_dpbf16ps(sum, a, b)
#define ROWS(tile, number) _tile_loadd(tile, x + (number) * TILE * inputs + i, inputs * 2)
#define COLUMNS(tile, number)                                                                                          \
    do {                                                                                                               \
        const bf16 *at = weights[number] + i * width;                                                                  \
        for (int line = 0; line < 16; line++)                                                                          \
            _mm_prefetch((const char *)(at + line * width * 2) + AHEAD, _MM_HINT_T0);                                  \
        _tile_loadd(tile, at, width * 4);                                                                              \
    } while (0)

/* Sums over inputs [from, to) of rows x columns tiles, (16, 16) each: four where there are as many, since a product
 * waits for the one before it into the same tile. 4 columns are of one row, 2 of up to two. */
static void tile_sums(const bf16 *x, const bf16 **weights, int64_t width, int64_t inputs, int64_t from, int64_t to,
                      int rows, int columns, float *sums) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    if (columns == 4)
        for (int64_t i = from; i < to; i += 32) {
            ROWS(4, 0);
            COLUMNS(5, 0);
            MULTIPLY(0, 4, 5);
            COLUMNS(6, 1);
            MULTIPLY(1, 4, 6);
            COLUMNS(7, 2);
            MULTIPLY(2, 4, 7);
            COLUMNS(5, 3);
            MULTIPLY(3, 4, 5);
        }
    else if (columns == 2)
        for (int64_t i = from; i < to; i += 32) {
            ROWS(4, 0);
            COLUMNS(6, 0);
            MULTIPLY(0, 4, 6);
            COLUMNS(7, 1);
            MULTIPLY(1, 4, 7);
            if (rows > 1) {
                ROWS(5, 1);
                MULTIPLY(2, 5, 6);
                MULTIPLY(3, 5, 7);
            }
        }
    else
        for (int64_t i = from; i < to; i += 32) {
            COLUMNS(7, 0);
            ROWS(4, 0);
            MULTIPLY(0, 4, 7);
            if (rows > 1) {
                ROWS(5, 1);
                MULTIPLY(1, 5, 7);
            }
            if (rows > 2) {
                ROWS(6, 2);
                MULTIPLY(2, 6, 7);
            }
            if (rows > 3) {
                ROWS(4, 3);
                MULTIPLY(3, 4, 7);
            }
        }
    _tile_stored(0, sums, 64);
    _tile_stored(1, sums + 256, 64);
    _tile_stored(2, sums + 512, 64);
    _tile_stored(3, sums + 768, 64);
}

/* Sixteen keys (16, D) times sixteen queries, pair after pair of their D numbers (D / 2, 16, 2): found (16, 16). */
static void key_products(const bf16 *keys, const bf16 *queries, int64_t D, float *found) {
    _tile_zero(0);
    for (int64_t d = 0; d < D; d += 32) {
        _tile_loadd(4, keys + d, D * 2);
        _tile_loadd(5, queries + d * 16, 64);
        MULTIPLY(0, 4, 5);
    }
    _tile_stored(0, found, 64);
}

/* Rows of 16 weights, `stride` apart, times two lots of 16 columns of values, as pairs of keys: found (2, 16, 16). */
static void value_products(const bf16 *weights, int64_t stride, const bf16 (*pairs)[2][32], int64_t keys, int64_t G,
                           float (*found)[256]) {
    _tile_zero(0);
    _tile_zero(1);
    for (int64_t i = 0; i < keys; i += 32) {
        _tile_loadd(4, weights + i, stride * 2);
        _tile_loadd(5, pairs[i / 2][0], 128);
        _tile_loadd(6, pairs[i / 2][1], 128);
        MULTIPLY(0, 4, 5);
        MULTIPLY(1, 4, 6);
    }
    _tile_stored(0, found[0], 64);
    _tile_stored(1, found[1], 64);
}

/* out (R, outputs) = x (R, inputs) weight' + bias, of outputs [first, last), multiples of 32. Sums of each chunk of
 * inputs are taken apart and then added, as oneDNN does it to share a product among cores. */
static void linear(const bf16 *x, const bf16 *weight, const bf16 *bias, bf16 *out, int64_t R, int64_t inputs,
                   int64_t outputs, Product how, int64_t first, int64_t last) {
    float sums[4 * 256] ALIGNED, total[4 * 256] ALIGNED;
    const bf16 *weights[4];
    int columns;
    for (int64_t column = first; column < last; column += columns * TILE) {
        columns = R > 32 ? 1 : R > 16 || last - column < 64 ? 2 : 4;
        for (int64_t i = 0, at = column; i < columns; i++, at += TILE)
            weights[i] = weight + at / how.width * how.width * inputs + at % how.width * 2;
        for (int64_t row = 0; row < R; row += 4 * TILE) {
            int rows = R - row > 48 ? 4 : (int)(R - row) / TILE;
            for (int64_t from = 0; from < inputs; from += how.chunk) {
                int64_t to = from + how.chunk < inputs ? from + how.chunk : inputs;
                float *into = from ? sums : total;
                tile_sums(x + row * inputs, weights, how.width, inputs, from, to, rows, columns, into);
                for (int i = 0; from && i < 4 * 256; i += TILE)
                    _mm512_store_ps(total + i, _mm512_add_ps(_mm512_load_ps(total + i), _mm512_load_ps(sums + i)));
            }
            for (int tile = 0; tile < rows * columns; tile++) {
                int64_t place = column + tile % columns * TILE;
                bf16 *to = out + (row + tile / columns * TILE) * outputs + place;
                __m512 constant = bias ? load(bias + place) : _mm512_setzero_ps();
                for (int line = 0; line < TILE; line++, to += outputs) {
                    __m512 value = _mm512_load_ps(total + tile * 256 + line * TILE);
                    store(to, bias ? _mm512_add_ps(value, constant) : value);
                }
            }
        }
    }
}
