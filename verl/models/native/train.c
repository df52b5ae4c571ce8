/* What an update computes around its matrix products, forth and back, with the bits of torch's operators.
 *
 * Each pass over memory does what takes the operators several. Shape legend: T tokens, H hidden size, F inner size of
 * the MLP, D head size. Sums over tokens go by parts of PART in order, whatever the threads.
 */
#include "numbers.h"

#define PART 128

/* out = weight * x / rms(x) and the scales 1 / rms(x) (T,) of x (T, H). wide: H floats for each thread. */
void norm_forward(const bf16 *x, const bf16 *weight, bf16 *out, float *scales, int64_t T, int64_t H, double eps,
                  float *wide, int threads) {
#pragma omp parallel num_threads(threads)
    {
        float *row = wide + omp_get_thread_num() * H;
        SHARE(T, 1);
        for (int64_t t = first; t < last; t++) {
            for (int64_t i = 0; i < H; i += TILE) _mm512_storeu_ps(row + i, load(x + t * H + i));
            scales[t] = 1.0f / sqrtf(cascade(row, H, 1) / (float)H + (float)eps);
            for (int64_t i = 0; i < H; i += TILE) {
                __m512 normal = rounded(_mm512_mul_ps(_mm512_loadu_ps(row + i), _mm512_set1_ps(scales[t])));
                store(out + t * H + i, _mm512_mul_ps(load(weight + i), normal));
            }
        }
    }
}

/* With n = x s: grad_x = s (g w - n mean(g w n)); of each part of tokens the sums of g n, (parts, H). wide: 2 H floats
 * for each thread. Sums over tokens are taken in the order of torch's sum over the first of two dimensions. */
void norm_backward(const bf16 *x, const bf16 *weight, const float *scales, const bf16 *grad, bf16 *grad_x, float *sums,
                   int64_t T, int64_t H, float *wide, int threads) {
#pragma omp parallel num_threads(threads)
    {
        float *along = wide + omp_get_thread_num() * 2 * H, *sixteen = along + H;
        SHARE(T, PART);
        for (int64_t start = first; start < last; start += PART) {
            int64_t end = start + PART < last ? start + PART : last;
            float *sum = sums + start / PART * H;
            memset(sum, 0, H * sizeof *sum);
            memset(sixteen, 0, H * sizeof *sixteen);
            for (int64_t t = start; t < end; t++) {
                const bf16 *row = x + t * H, *g = grad + t * H;
                __m512 scale = _mm512_set1_ps(scales[t]);
                int whole = (t - start) % 16 == 15;
                for (int64_t i = 0; i < H; i += TILE) {
                    __m512 normal = _mm512_mul_ps(load(row + i), scale), by = load(g + i);
                    _mm512_storeu_ps(along + i, _mm512_mul_ps(normal, _mm512_mul_ps(by, load(weight + i))));
                    __m512 added = _mm512_add_ps(_mm512_loadu_ps(sixteen + i), _mm512_mul_ps(by, normal));
                    if (whole) {
                        _mm512_storeu_ps(sum + i, _mm512_add_ps(_mm512_loadu_ps(sum + i), added));
                        added = _mm512_setzero_ps();
                    }
                    _mm512_storeu_ps(sixteen + i, added);
                }
                __m512 mean = _mm512_set1_ps(cascade(along, H, 0) / (float)H);
                for (int64_t i = 0; i < H; i += TILE) {
                    __m512 normal = _mm512_mul_ps(load(row + i), scale);
                    __m512 weighted = _mm512_mul_ps(load(g + i), load(weight + i));
                    weighted = _mm512_fnmadd_ps(normal, mean, weighted); /* as torch's addcmul does it */
                    store(grad_x + t * H + i, _mm512_mul_ps(weighted, scale));
                }
            }
            for (int64_t i = 0; i < H; i += TILE)
                _mm512_storeu_ps(sum + i, _mm512_add_ps(_mm512_loadu_ps(sixteen + i), _mm512_loadu_ps(sum + i)));
        }
    }
}

/* out = silu(gate) * up over count numbers, a multiple of 16. */
void gate_forward(const bf16 *gate, const bf16 *up, bf16 *out, int64_t count, int threads) {
#pragma omp parallel num_threads(threads)
    {
        SHARE(count, TILE);
        for (int64_t i = first; i < last; i += TILE) store(out + i, _mm512_mul_ps(silu(load(gate + i)), load(up + i)));
    }
}

/* From the gradient by out: those by gate and up, and out once more. */
void gate_backward(const bf16 *gate, const bf16 *up, const bf16 *by_out, bf16 *out, bf16 *grad_gate, bf16 *grad_up,
                   int64_t count, int threads) {
    const __m512 one = _mm512_set1_ps(1.0f);
#pragma omp parallel num_threads(threads)
    {
        SHARE(count, TILE);
        for (int64_t i = first; i < last; i += TILE) {
            __m512 x = load(gate + i), by = load(by_out + i), u = load(up + i);
            __m512 sigmoid = _mm512_div_ps(one, _mm512_add_ps(one, exponential(_mm512_sub_ps(_mm512_setzero_ps(), x))));
            __m512 active = silu(x), slope = _mm512_add_ps(one, _mm512_mul_ps(x, _mm512_sub_ps(one, sigmoid)));
            store(out + i, _mm512_mul_ps(active, u));
            store(grad_up + i, _mm512_mul_ps(by, active));
            store(grad_gate + i, _mm512_mul_ps(_mm512_mul_ps(rounded(_mm512_mul_ps(by, u)), sigmoid), slope));
        }
    }
}

/* x (T, heads, D) with each head's halves as coordinates of D / 2 points turned by cos, sin (T, D), of whose first half
 * the sign is changed; backward: turned back. */
void turn_forward(const bf16 *x, const bf16 *cos, const bf16 *sin, bf16 *out, int64_t T, int64_t heads, int64_t D,
                  int threads) {
#pragma omp parallel num_threads(threads)
    {
        SHARE(T, 1);
        for (int64_t t = first; t < last; t++)
            for (int64_t head = t * heads; head < (t + 1) * heads; head++) {
                memcpy(out + head * D, x + head * D, D * sizeof *x);
                turn(out + head * D, cos + t * D, sin + t * D, D);
            }
    }
}

void turn_backward(const bf16 *grad, const bf16 *cos, const bf16 *sin, bf16 *out, int64_t T, int64_t heads, int64_t D,
                   int threads) {
#pragma omp parallel num_threads(threads)
    {
        SHARE(T, 1);
        for (int64_t t = first; t < last; t++)
            for (int64_t head = t * heads; head < (t + 1) * heads; head++)
                for (int64_t i = 0, j = D / 2; i < D / 2; i += TILE, j += TILE) {
                    __m512 a = load(grad + head * D + i), b = load(grad + head * D + j);
                    __m512 a_sin = rounded(_mm512_mul_ps(a, load(sin + t * D + i)));
                    __m512 b_sin = rounded(_mm512_mul_ps(b, load(sin + t * D + j)));
                    __m512 a_cos = rounded(_mm512_mul_ps(a, load(cos + t * D + i)));
                    __m512 b_cos = rounded(_mm512_mul_ps(b, load(cos + t * D + j)));
                    store(out + head * D + i, _mm512_add_ps(a_cos, b_sin));
                    store(out + head * D + j, _mm512_add_ps(b_cos, a_sin));
                }
    }
}

/* Of T rows of V logits over a temperature: the target's log-prob, what was taken from its logit for it, and the entropy
 * in nats, (T, 3). scratch: 2 V floats for each thread. */
void log_probs(const bf16 *logits, const int64_t *targets, float *out, int64_t T, int64_t V, double temperature,
               float *scratch, int threads) {
    const __m512 divisor = _mm512_set1_ps((float)temperature), never = _mm512_set1_ps(-INFINITY);
#pragma omp parallel num_threads(threads)
    {
        float *x = scratch + omp_get_thread_num() * 2 * V, *e = x + V;
        SHARE(T, 1);
        for (int64_t t = first; t < last; t++) {
            for (int64_t i = 0; i < V; i += TILE) {
                __m512 tempered = _mm512_div_ps(load(logits + t * V + i), divisor);
                _mm512_storeu_ps(x + i, tempered);
                _mm512_storeu_ps(e + i, tempered);
            }
            float most = largest(x, V), sum = exponentials(e, V, most), less = logarithm(sum), own = x[targets[t]];
            __m512 share_of = _mm512_set1_ps(1.0f / sum);
            for (int64_t i = 0; i < V; i += TILE) {
                __m512 log_p = _mm512_sub_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(most));
                log_p = _mm512_sub_ps(log_p, _mm512_set1_ps(less));
                __m512 term = _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(e + i), share_of), log_p);
                __mmask16 impossible = _mm512_cmp_ps_mask(log_p, never, _CMP_EQ_OQ);
                _mm512_storeu_ps(e + i, _mm512_mask_mov_ps(term, impossible, _mm512_setzero_ps()));
            }
            out[t * 3] = own - most - less;
            out[t * 3 + 1] = own - out[t * 3];
            out[t * 3 + 2] = -cascade(e, V, 0);
        }
    }
}

/* The gradient by logits goes by way of torch's exponential, which is of another library: what that is taken of. */
void shifted(const bf16 *logits, const float *normalisers, float *out, int64_t T, int64_t V, double temperature,
             int threads) {
    const __m512 divisor = _mm512_set1_ps((float)temperature);
#pragma omp parallel num_threads(threads)
    {
        SHARE(T, 1);
        for (int64_t t = first; t < last; t++)
            for (int64_t i = t * V; i < (t + 1) * V; i += TILE) {
                __m512 tempered = _mm512_div_ps(load(logits + i), divisor);
                _mm512_storeu_ps(out + i, _mm512_sub_ps(tempered, _mm512_set1_ps(normalisers[t])));
            }
    }
}

/* (onehot(target) - p) by the target's gradient, times the slope. targets: places in these V tokens, or elsewhere. */
void logit_gradients(const float *p, const float *grads, const int64_t *targets, bf16 *out, int64_t T, int64_t V,
                     double slope, int threads) {
    const __m512 slopes = _mm512_set1_ps((float)slope);
#pragma omp parallel num_threads(threads)
    {
        SHARE(T, 1);
        for (int64_t t = first; t < last; t++) {
            const __m512 less = _mm512_set1_ps(-grads[t]);
            for (int64_t i = t * V; i < (t + 1) * V; i += TILE)
                store(out + i, _mm512_mul_ps(_mm512_mul_ps(_mm512_loadu_ps(p + i), less), slopes));
            if (targets[t] < 0 || targets[t] >= V) continue;
            int64_t at = t * V + targets[t];
            __m512 own = _mm512_set1_ps((p[at] * -grads[t] + grads[t]) * (float)slope);
            out[at] = (bf16)_mm256_extract_epi16(narrowed(own), 0);
        }
    }
}
