/* Products in AVX-512's instructions for bfloat16, of CPUs without tiles. Shape legend as in numbers.h.
 *
 * A sum is taken as oneDNN takes it there: pair after pair of inputs, one accumulator for each output.
 */

#define FILLED 1 /* rows of x are a multiple of this */
#define MOST_ROWS 6
#define AHEAD 4096 /* bytes of a weight that are fetched before they are needed */

typedef int Tiles;

static void take_tiles(Tiles *before) { *before = 0; }
static void give_tiles(const Tiles *before) { (void)before; }

static inline __m512bh pair_of(const bf16 *at) { /* in all lanes */
    int both;
    memcpy(&both, at, sizeof both);
    return (__m512bh)_mm512_set1_epi32(both);
}

static inline __m512bh pairs_at(const bf16 *at) { return (__m512bh)_mm512_loadu_si512(at); }

/* Sums over inputs [from, to) of some rows and of columns times 16 outputs, onto what is there or from nothing. */
static inline __attribute__((always_inline)) void vector_sums(const bf16 *x, const bf16 **weights, int64_t width,
                                                              int64_t inputs, int64_t from, int64_t to, const int rows,
                                                              const int columns, __m512 sums[MOST_ROWS][4]) {
    __m512 found[MOST_ROWS][4];
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++) found[row][column] = _mm512_setzero_ps();
    for (int64_t i = from; i < to; i += 2) {
        __m512bh by[4];
        for (int column = 0; column < columns; column++) {
            by[column] = pairs_at(weights[column] + i * width);
            if (rows == 1) _mm_prefetch((const char *)(weights[column] + i * width) + AHEAD, _MM_HINT_T0);
        }
        for (int row = 0; row < rows; row++) {
            __m512bh own = pair_of(x + row * inputs + i);
            for (int column = 0; column < columns; column++)
                found[row][column] = _mm512_dpbf16_ps(found[row][column], own, by[column]);
        }
    }
    for (int row = 0; row < rows; row++)
        for (int column = 0; column < columns; column++)
            sums[row][column] = from ? _mm512_add_ps(sums[row][column], found[row][column]) : found[row][column];
}

static void block_sums(const bf16 *x, const bf16 **weights, int64_t width, int64_t inputs, int64_t from, int64_t to,
                       int rows, int columns, __m512 sums[MOST_ROWS][4]) {
#define CASE(count)                                                                                                    \
    case count:                                                                                                        \
        if (columns == 4)                                                                                              \
            vector_sums(x, weights, width, inputs, from, to, count, 4, sums);                                          \
        else                                                                                                           \
            vector_sums(x, weights, width, inputs, from, to, count, 2, sums);                                          \
        break;
    switch (rows) { CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6) }
}

/* out (R, outputs) = x (R, inputs) weight' + bias, of outputs [first, last), multiples of 32. */
static void linear(const bf16 *x, const bf16 *weight, const bf16 *bias, bf16 *out, int64_t R, int64_t inputs,
                   int64_t outputs, Product how, int64_t first, int64_t last) {
    __m512 sums[MOST_ROWS][4];
    const bf16 *weights[4];
    int columns;
    for (int64_t column = first; column < last; column += columns * TILE) {
        columns = last - column < 64 ? 2 : 4;
        for (int64_t i = 0, at = column; i < columns; i++, at += TILE)
            weights[i] = weight + at / how.width * how.width * inputs + at % how.width * 2;
        for (int64_t row = 0; row < R; row += MOST_ROWS) {
            int rows = R - row < MOST_ROWS ? (int)(R - row) : MOST_ROWS;
            for (int64_t from = 0; from < inputs; from += how.chunk) {
                int64_t to = from + how.chunk < inputs ? from + how.chunk : inputs;
                block_sums(x + row * inputs, weights, how.width, inputs, from, to, rows, columns, sums);
            }
            for (int line = 0; line < rows; line++)
                for (int i = 0; i < columns; i++) {
                    int64_t place = column + i * TILE;
                    __m512 value = sums[line][i];
                    store(out + (row + line) * outputs + place, bias ? _mm512_add_ps(value, load(bias + place)) : value);
                }
        }
    }
}

/* Sixteen keys (16, D) times sixteen queries, pair after pair of their D numbers (D / 2, 16, 2): found (16, 16). */
static void key_products(const bf16 *keys, const bf16 *queries, int64_t D, float *found) {
    __m512 sums[16];
    for (int key = 0; key < 16; key++) sums[key] = _mm512_setzero_ps();
    for (int64_t d = 0; d < D; d += 2) {
        __m512bh all = pairs_at(queries + d * 16);
        for (int key = 0; key < 16; key++) sums[key] = _mm512_dpbf16_ps(sums[key], pair_of(keys + key * D + d), all);
    }
    for (int key = 0; key < 16; key++) _mm512_store_ps(found + key * 16, sums[key]);
}

/* Rows of G weights, `stride` apart, times two lots of 16 columns of values, as pairs of keys: found (2, 16, 16). Up to
 * 16 rows are there. */
static void value_products(const bf16 *weights, int64_t stride, const bf16 (*pairs)[2][32], int64_t keys, int64_t G,
                           float (*found)[256]) {
    for (int64_t g = 0; g < G; g += 4) {
        __m512 sums[4][2];
        for (int i = 0; i < 8; i++) sums[i / 2][i % 2] = _mm512_setzero_ps();
        for (int64_t i = 0; i < keys; i += 2) {
            __m512bh low = pairs_at(pairs[i / 2][0]), high = pairs_at(pairs[i / 2][1]);
            for (int row = 0; row < 4; row++) {
                __m512bh own = pair_of(weights + (g + row) * stride + i);
                sums[row][0] = _mm512_dpbf16_ps(sums[row][0], own, low);
                sums[row][1] = _mm512_dpbf16_ps(sums[row][1], own, high);
            }
        }
        for (int row = 0; row < 4; row++)
            for (int half = 0; half < 2; half++) _mm512_store_ps(found[half] + (g + row) * 16, sums[row][half]);
    }
}
