/* Numbers in bfloat16, exponentials, sums and products with the bits of torch's operators and oneDNN's.
 *
 * Every sum is taken in the order in which torch 2 and oneDNN 3 take it on a CPU with AVX-512; build.py looks whether it
 * holds. Shape legend: R rows, a multiple of FILLED. All other sizes are multiples of 32.
 */
#include <immintrin.h>
#include <math.h>
#include <omp.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bf16;
#define TILE 16
#define ALIGNED __attribute__((aligned(64)))

/* --- bfloat16 ---------------------------------------------------------------------------------------------------- */

static inline __m512 load(const bf16 *from) {
    __m512i bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const void *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(bits, 16));
}

static inline __m256i narrowed(__m512 x) { /* to the nearest, of two the even one */
    __m512i bits = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    bits = _mm512_srli_epi32(_mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff))), 16);
    return _mm512_cvtepi32_epi16(
        _mm512_mask_mov_epi32(bits, _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q), _mm512_set1_epi32(0x7fc0)));
}

static inline void store(bf16 *to, __m512 x) { _mm256_storeu_si256((void *)to, narrowed(x)); }

static inline __m512 rounded(__m512 x) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(narrowed(x)), 16));
}

/* --- elementwise ------------------------------------------------------------------------------------------------- */

static inline __m512 power_of_two(__m512i exponent) {
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(exponent, _mm512_set1_epi32(127)), 23));
}

/* The exponential within one unit in the last place, by the polynomial of the Sleef library (Shibata and Petrogalli,
 * 2020), which torch's vectors use. */
static inline __m512 exponential(__m512 x) {
    static const float terms[] = {0.00139304355252534151f, 0.00833336077630519867f, 0.0416664853692054749f,
                                  0.166666671633720398f, 0.5f};
    __m512 whole = _mm512_roundscale_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504088896341f)), 8);
    __m512 rest = _mm512_fmadd_ps(whole, _mm512_set1_ps(-0.693145751953125f), x);
    rest = _mm512_fmadd_ps(whole, _mm512_set1_ps(-1.428606765330187045e-06f), rest);
    __m512 sum = _mm512_set1_ps(0.000198527617612853646f);
    for (int i = 0; i < 5; i++) sum = _mm512_fmadd_ps(sum, rest, _mm512_set1_ps(terms[i]));
    sum = _mm512_add_ps(_mm512_set1_ps(1.0f), _mm512_fmadd_ps(_mm512_mul_ps(rest, rest), sum, rest));
    __m512i exponent = _mm512_cvtps_epi32(whole), half = _mm512_srai_epi32(exponent, 1);
    sum = _mm512_mul_ps(_mm512_mul_ps(sum, power_of_two(half)), power_of_two(_mm512_sub_epi32(exponent, half)));
    sum = _mm512_mask_mov_ps(sum, _mm512_cmp_ps_mask(x, _mm512_set1_ps(-104.0f), _CMP_LT_OQ), _mm512_setzero_ps());
    return _mm512_mask_mov_ps(sum, _mm512_cmp_ps_mask(_mm512_set1_ps(100.0f), x, _CMP_LT_OQ), _mm512_set1_ps(INFINITY));
}

/* The logarithm of a positive number within one unit in the last place, as Sleef computes it with two floats for one. */
static inline float logarithm(float x) {
    __m128 one = _mm_set_ss(x), scaled = _mm_set_ss(x * (1.0f / 0.75f));
    float e = _mm_cvtss_f32(_mm_getexp_ss(scaled, scaled));
    float m = _mm_cvtss_f32(_mm_getmant_ss(one, one, _MM_MANT_NORM_p75_1p5, _MM_MANT_SIGN_nan));
    float s = 0.69314718246459960938f * e;
    float s_low = fmaf(-1.904654323148236017e-09f, e, fmaf(0.69314718246459960938f, e, -s));
    float n = m - 1.0f, v = n + 1.0f, n_low = (-1.0f - (n - v)) + (m - v);
    float d = m + 1.0f, w = d - 1.0f, d_low = (1.0f - (d - w)) + (m - w);
    float t = 1.0f / d, q = n * t;
    float q_low = fmaf(q, fmaf(-d_low, t, fmaf(-d, t, 1.0f)), fmaf(n_low, t, fmaf(t, n, -q)));
    float square = q * q, sum = fmaf(fmaf(0.3027294874f, square, 0.3996108174f), square, 0.6666694880f);
    float r = s + q * 2, r_low = (((s - r) + q * 2) + s_low) + q_low * 2;
    float more = square * q * sum, last = r + more;
    return last + (((r - last) + more) + r_low);
}

/* Sum of x, or of its squares, in the order of torch's sum over a contiguous dimension: four accumulators of 8 lanes,
 * each a cascade of partial sums over at least 16 terms (Higham, 1993: pairwise summation, its base case unrolled). */
static inline __attribute__((always_inline)) float cascade(const float *x, int64_t count, int squared) {
    __m256 sums[4][4];
    for (int i = 0; i < 16; i++) sums[i / 4][i % 4] = _mm256_setzero_ps();
    int64_t vectors = count / 8, fours = vectors / 4, power = 0, i = 0;
    while ((1LL << power) < fours) power++;
    power = power / 4 > 4 ? power / 4 : 4;
    int64_t step = 1LL << power;
#define ADD(sum, place)                                                                                                \
    do {                                                                                                               \
        __m256 value = _mm256_loadu_ps(x + (place) * 8);                                                               \
        sum = _mm256_add_ps(sum, squared ? _mm256_mul_ps(value, value) : value);                                       \
    } while (0)
    while (i + step <= fours) {
        for (int64_t j = 0; j < step; j++, i++)
            for (int k = 0; k < 4; k++) ADD(sums[0][k], i * 4 + k);
        for (int level = 1; level < 4; level++) {
            for (int k = 0; k < 4; k++) {
                sums[level][k] = _mm256_add_ps(sums[level][k], sums[level - 1][k]);
                sums[level - 1][k] = _mm256_setzero_ps();
            }
            if (i & ((step - 1) << (level * power))) break;
        }
    }
    for (; i < fours; i++)
        for (int k = 0; k < 4; k++) ADD(sums[0][k], i * 4 + k);
    for (int level = 1; level < 4; level++)
        for (int k = 0; k < 4; k++) sums[0][k] = _mm256_add_ps(sums[0][k], sums[level][k]);
    for (i = fours * 4; i < vectors; i++) ADD(sums[0][0], i);
    for (int k = 1; k < 4; k++) sums[0][0] = _mm256_add_ps(sums[0][0], sums[0][k]);
    float lanes[8], total = 0;
    _mm256_storeu_ps(lanes, sums[0][0]);
    for (int k = 0; k < 8; k++) total += lanes[k];
    return total;
}


static inline float sum_of_lanes(__m512 x) { /* in the order of torch's vectors */
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0x4E));
    x = _mm512_add_ps(x, _mm512_shuffle_f32x4(x, x, 0xB1));
    x = _mm512_add_ps(x, _mm512_shuffle_ps(x, x, 0x4E));
    return _mm512_cvtss_f32(_mm512_add_ps(x, _mm512_shuffle_ps(x, x, 0xB1)));
}

/* exp(x - most) in place and their sum, in the order of torch's softmax over the last dimension. */
static float exponentials(float *x, int64_t count, float most) {
    __m512 sum = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += TILE) {
        __m512 e = exponential(_mm512_sub_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(most)));
        _mm512_storeu_ps(x + i, e);
        sum = _mm512_add_ps(sum, e);
    }
    return sum_of_lanes(sum);
}

static float largest(const float *x, int64_t count) {
    __m512 most = _mm512_loadu_ps(x);
    for (int64_t i = TILE; i < count; i += TILE) most = _mm512_max_ps(most, _mm512_loadu_ps(x + i));
    return _mm512_reduce_max_ps(most);
}

static inline __m512 silu(__m512 x) { /* rounded */
    __m512 e = exponential(_mm512_sub_ps(_mm512_setzero_ps(), x));
    return rounded(_mm512_div_ps(x, _mm512_add_ps(_mm512_set1_ps(1.0f), e)));
}

/* A head's two halves as the coordinates of D / 2 points, turned in place; the first half of sin is negative. */
static inline void turn(bf16 *x, const bf16 *cos, const bf16 *sin, int64_t D) {
    for (int64_t i = 0, j = D / 2; i < D / 2; i += TILE, j += TILE) {
        __m512 a = load(x + i), b = load(x + j);
        __m512 a_cos = rounded(_mm512_mul_ps(a, load(cos + i))), b_cos = rounded(_mm512_mul_ps(b, load(cos + j)));
        store(x + i, _mm512_add_ps(a_cos, rounded(_mm512_mul_ps(b, load(sin + i)))));
        store(x + j, _mm512_add_ps(b_cos, rounded(_mm512_mul_ps(a, load(sin + j)))));
    }
}

/* --- products ---------------------------------------------------------------------------------------------------- */

/* How oneDNN computes a kind of product. */
typedef struct {
    int64_t width; /* outputs that lie together */
    int64_t chunk; /* inputs after which a sum begins anew */
} Product;

#ifdef __AMX_BF16__
#include "tiles.h"
#else
#include "vectors.h"
#endif

#define FILLED_UP(rows) (((rows) + FILLED - 1) / FILLED * FILLED)

/* [first, last) of this thread's share of count, in units. */
static void share(int64_t count, int64_t unit, int64_t *first, int64_t *last) {
    int64_t units = (count + unit - 1) / unit, threads = omp_get_num_threads(), me = omp_get_thread_num();
    *first = units * me / threads * unit;
    *last = units * (me + 1) / threads * unit;
    if (*last > count) *last = count;
}

#define SHARE(count, unit)                                                                                             \
    int64_t first, last;                                                                                               \
    share(count, unit, &first, &last)

static void project(const bf16 *x, const bf16 *weight, const bf16 *bias, bf16 *out, int64_t R, int64_t inputs,
                    int64_t outputs, Product how) {
    SHARE(outputs, 32);
    linear(x, weight, bias, out, R, inputs, outputs, how, first, last);
}
