/* The next token's probabilities, with the bits of torch's operators; and what build.py asks.
 *
 * Shape legend: T rows (R with fill, a multiple of 16), H hidden size, V tokens of the vocabulary.
 */
#include "numbers.h"

#include <sys/syscall.h>
#include <unistd.h>

/* Whether the system lets this process use AMX's tiles, where the code does. */
int may_use_tiles(void) {
#ifdef __AMX_BF16__
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return 1;
#endif
}

/* For build.py to find out how oneDNN computes. */
void one_linear(const bf16 *x, const bf16 *weight, const bf16 *bias, bf16 *out, int64_t R, int64_t inputs,
                int64_t outputs, Product how) {
    Tiles before;
    take_tiles(&before);
    linear(x, weight, bias, out, R, inputs, outputs, how, 0, outputs);
    give_tiles(&before);
}

#define BLOCK 256 /* tokens, see sampling.py */

/* logits (R, V) of hidden states x (R, H). */
void project_head(const bf16 *x, const bf16 *weight, const bf16 *bias, bf16 *logits, int64_t T, int64_t H, int64_t V,
                  Product how, int threads) {
    const int64_t R = FILLED_UP(T);
#pragma omp parallel num_threads(threads)
    {
        Tiles before;
        take_tiles(&before);
        project(x, weight, bias, logits, R, H, V, how);
        give_tiles(&before);
    }
}

/* Of T rows of logits over temperatures (T,): the largest, the log of the sum of exponentials less it and its inverse,
 * (T, 3); the first place of the largest (T,); and the probability of each block of tokens (T, blocks). scratch: V
 * floats for each thread. */
void masses(const bf16 *logits, int64_t T, int64_t V, const float *temperatures, float *sums, int64_t *best,
            float *blocks, float *scratch, int threads) {
#pragma omp parallel num_threads(threads)
    {
        float *x = scratch + omp_get_thread_num() * V;
        SHARE(T, 1);
        for (int64_t row = first; row < last; row++) {
            const bf16 *from = logits + row * V;
            __m512 temperature = _mm512_set1_ps(temperatures[row]);
            for (int64_t i = 0; i < V; i += TILE) _mm512_storeu_ps(x + i, _mm512_div_ps(load(from + i), temperature));
            float most = largest(x, V);
            int64_t place = 0;
            while (place < V - 1 && x[place] != most) place++;
            best[row] = place;
            float sum = exponentials(x, V, most), share_of = 1.0f / sum;
            sums[row * 3] = most, sums[row * 3 + 1] = logarithm(sum), sums[row * 3 + 2] = share_of;
            float *mass = blocks + row * ((V + BLOCK - 1) / BLOCK);
            for (int64_t i = 0; i < V; i += TILE)
                _mm512_storeu_ps(x + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(share_of)));
            for (int64_t i = 0; i < V; i += BLOCK) *mass++ = cascade(x + i, V - i < BLOCK ? V - i : BLOCK, 0);
        }
    }
}

/* The probabilities (T, BLOCK) of the tokens of one block of each row; 0 behind the vocabulary's end. */
void block_of(const bf16 *logits, int64_t T, int64_t V, const float *temperatures, const float *sums,
              const int64_t *block, float *out) {
    memset(out, 0, T * BLOCK * sizeof *out);
    for (int64_t row = 0; row < T; row++, out += BLOCK) {
        int64_t start = block[row] * BLOCK, count = V - start < BLOCK ? V - start : BLOCK;
        for (int64_t i = 0; i < count; i += TILE) {
            __m512 x = _mm512_div_ps(load(logits + row * V + start + i), _mm512_set1_ps(temperatures[row]));
            __m512 e = exponential(_mm512_sub_ps(x, _mm512_set1_ps(sums[row * 3])));
            _mm512_storeu_ps(out + i, _mm512_mul_ps(e, _mm512_set1_ps(sums[row * 3 + 2])));
        }
    }
}
