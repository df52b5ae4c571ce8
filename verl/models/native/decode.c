/* New tokens of many sequences through the layers of Llama and its kin, with the bits of torch's operators.
 *
 * Between its matrix products a decode step is some two thousand small operations, each of which takes longer to call
 * than to compute. Here it is one call, and every intermediate result is rounded to bfloat16 where theirs is.
 *
 * Shape legend: T tokens (R of them with fill), H hidden size, A attention heads, K key-value heads,
 * G = A / K, D head size, F inner size of the MLP, S = 128 places of a block of keys.
 */
#include "numbers.h"

#define S 128

/* Addresses of a layer's tensors, as decoder.py lists them; 0 where the model has none. Weights lie in oneDNN's layout
 * (O / width, I / 32, 16, width, 2) of an (O, I) matrix. */
typedef struct {
    const bf16 *norm, *q, *q_bias, *k, *k_bias, *v, *v_bias, *q_norm, *k_norm, *o, *o_bias;
    const bf16 *mlp_norm, *gate, *gate_bias, *up, *up_bias, *down, *down_bias;
    bf16 *keys, *values; /* (blocks, K, S, D) */
    int64_t window;      /* keys that a query sees, itself included; 0: all */
} Layer;

typedef struct {
    int64_t layers, T, H, A, K, D, F, most_blocks;
    Product q, kv, o, gate, down;
    double scale, eps;
} Sizes;

/* --- row by row --------------------------------------------------------------------------------------------------- */

/* out = weight * x / rms(x) of one row; where there is a delta, it is added to x first. wide: count floats. */
static void norm_row(const bf16 *delta, bf16 *x, const bf16 *weight, bf16 *out, int64_t count, float eps, float *wide) {
    for (int64_t i = 0; i < count; i += TILE) {
        __m512 value = load(x + i);
        if (delta) {
            value = rounded(_mm512_add_ps(load(delta + i), value));
            store(x + i, value);
        }
        _mm512_storeu_ps(wide + i, value);
    }
    __m512 scale = _mm512_set1_ps(1.0f / sqrtf(cascade(wide, count, 1) / (float)count + eps));
    for (int64_t i = 0; i < count; i += TILE) {
        __m512 normal = rounded(_mm512_mul_ps(_mm512_loadu_ps(wide + i), scale));
        store(out + i, _mm512_mul_ps(load(weight + i), normal));
    }
}

/* silu(gate) * up, into gate. */
static void gate_row(bf16 *gate, const bf16 *up, int64_t count) {
    for (int64_t i = 0; i < count; i += TILE) store(gate + i, _mm512_mul_ps(silu(load(gate + i)), load(up + i)));
}

/* --- attention --------------------------------------------------------------------------------------------------- */

/* Scores of one head's row of a block, 16 apart in `found` (S, 16), rounded and scaled; -inf outside [first, last). */
static void scaled_scores(const float *found, float *scores, int64_t start, int64_t keys, int64_t first, int64_t last,
                          float scale) {
    const __m512i lanes = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512 never = _mm512_set1_ps(-INFINITY);
    for (int64_t i = 0; i < keys; i += TILE) {
        __m512 score = rounded(_mm512_i32gather_ps(_mm512_slli_epi32(lanes, 4), found + i * TILE, 4));
        __m512i place = _mm512_add_epi32(lanes, _mm512_set1_epi32((int)(start + i)));
        __mmask16 seen = _mm512_cmplt_epi32_mask(place, _mm512_set1_epi32((int)last)) &
                         _mm512_cmpge_epi32_mask(place, _mm512_set1_epi32((int)first));
        _mm512_storeu_ps(scores + i, _mm512_mask_mov_ps(never, seen, _mm512_mul_ps(score, _mm512_set1_ps(scale))));
    }
}

/* Of scores x, a multiple of 32, which are overwritten. */
static void softmax(float *x, bf16 *out, int64_t count) {
    __m512 share = _mm512_set1_ps(1.0f / exponentials(x, count, largest(x, count)));
    for (int64_t i = 0; i < count; i += TILE) store(out + i, _mm512_mul_ps(_mm512_loadu_ps(x + i), share));
}

/* G heads' (16, keys) weights, `stride` apart, times values (keys, D), keys a multiple of 32: into or onto sums (G, D),
 * each block's sum rounded before it is added. */
static void add_values(const bf16 *weights, int64_t stride, const bf16 *values, int64_t keys, int64_t G, int64_t D,
                       float *sums, int onto) {
    /* Unpacking two rows of 32 values pairs them up, but leaves columns in this order: fours of either tile. */
    const __m512i low = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i high = _mm512_setr_epi32(8, 9, 10, 11, 24, 25, 26, 27, 12, 13, 14, 15, 28, 29, 30, 31);
    bf16 pairs[S / 2][2][32] ALIGNED;
    float found[2][256] ALIGNED;
    for (int64_t d = 0; d < D; d += 32) {
        for (int64_t i = 0; i < keys / 2; i++) {
            const bf16 *at = values + 2 * i * D + d;
            __m512i a = _mm512_loadu_si512(at), b = _mm512_loadu_si512(at + D);
            _mm512_store_si512(pairs[i][0], _mm512_unpacklo_epi16(a, b));
            _mm512_store_si512(pairs[i][1], _mm512_unpackhi_epi16(a, b));
        }
        value_products(weights, stride, pairs, keys, G, found);
        for (int64_t g = 0; g < G; g++) {
            __m512 a = _mm512_load_ps(found[0] + g * TILE), b = _mm512_load_ps(found[1] + g * TILE);
            for (int half = 0; half < 2; half++) {
                float *to = sums + g * D + d + half * TILE;
                __m512 part = rounded(_mm512_permutex2var_ps(a, half ? high : low, b));
                _mm512_storeu_ps(to, onto ? _mm512_add_ps(_mm512_loadu_ps(to), part) : part);
            }
        }
    }
}

/* One token's G queries (G, D) of a key-value head over its blocks, into out (G, D). scores: 16 rows of all its keys in
 * float32; weights: the same in bfloat16, zeros behind the G-th row. */
static void attend(const bf16 *query, const Layer *layer, const Sizes *sizes, int64_t head, const int32_t *blocks,
                   int64_t length, bf16 *out, float *scores, bf16 *weights, float *sums) {
    int64_t D = sizes->D, G = sizes->A / sizes->K, stride = sizes->most_blocks * S;
    int64_t first = layer->window && length > layer->window ? length - layer->window : 0;
    int64_t start = first / S * S, end = (length + 31) / 32 * 32;
    bf16 queries[128 * 32] ALIGNED; /* D of at most 256 */
    float found[S * TILE] ALIGNED;
    memset(queries, 0, sizeof queries);
    for (int64_t g = 0; g < G; g++)
        for (int64_t pair = 0; pair < D / 2; pair++)
            memcpy(queries + (pair * 16 + g) * 2, query + g * D + pair * 2, 4);
    for (int64_t at = start; at < end; at += S) {
        const bf16 *keys = layer->keys + (blocks[at / S] * sizes->K + head) * S * D;
        int64_t count = end - at < S ? end - at : S;
        for (int64_t i = 0; i < count; i += TILE) {
            for (int64_t next = i * D; next < (i + TILE) * D; next += 32)
                _mm_prefetch((const char *)(layer->values + (keys - layer->keys) + next), _MM_HINT_T1);
            key_products(keys + i * D, queries, D, found + i * TILE);
        }
        for (int64_t g = 0; g < G; g++)
            scaled_scores(found + g, scores + g * stride + at, at, count, first, length, (float)sizes->scale);
    }
    for (int64_t g = 0; g < G; g++) softmax(scores + g * stride + start, weights + g * stride + start, end - start);
    for (int64_t at = start; at < end; at += S) {
        const bf16 *values = layer->values + (blocks[at / S] * sizes->K + head) * S * D;
        add_values(weights + at, stride, values, end - at < S ? end - at : S, G, D, sums, at > start);
    }
    for (int64_t i = 0; i < G * D; i += TILE) store(out + i, _mm512_loadu_ps(sums + i));
}

/* --- the layers -------------------------------------------------------------------------------------------------- */

/* Norms, turns, and the new key and value to their place in the token's block. */
static void turn_rows(const Layer *layer, const Sizes *n, bf16 *q, bf16 *k, const bf16 *v, const bf16 *cos,
                      const bf16 *sin, const int32_t *blocks, const int32_t *lengths, float *wide) {
    int64_t D = n->D;
    SHARE(n->T * n->K, 1);
    for (int64_t i = first; i < last; i++) {
        int64_t row = i / n->K, head = i % n->K, G = n->A / n->K, place = lengths[row] - 1;
        bf16 *key = k + i * D;
        if (layer->k_norm) norm_row(NULL, key, layer->k_norm, key, D, (float)n->eps, wide);
        turn(key, cos + row * D, sin + row * D, D);
        int64_t to = ((blocks[row * n->most_blocks + place / S] * n->K + head) * S + place % S) * D;
        memcpy(layer->keys + to, key, D * 2);
        memcpy(layer->values + to, v + i * D, D * 2);
        for (int64_t g = 0; g < G; g++) {
            bf16 *query = q + (i * G + g) * D;
            if (layer->q_norm) norm_row(NULL, query, layer->q_norm, query, D, (float)n->eps, wide);
            turn(query, cos + row * D, sin + row * D, D);
        }
    }
}

/* x (R, H): embeddings in, last hidden states out. cos, sin (T, D); blocks (T, most_blocks);
 * lengths (T,): keys that each token sees, its own included. space: bfloat16 of (R, 2 H + 2 A D + 2 K D + 2 F); scratch: of
 * every thread, bytes_of_scratch. */
void decode(const Sizes *n, const Layer *layers, const bf16 *last_norm, bf16 *x, const bf16 *cos, const bf16 *sin, const int32_t *blocks,
            const int32_t *lengths, bf16 *space, float *scratch, int64_t floats_of_scratch, int threads) {
    const int64_t T = n->T, R = FILLED_UP(T), H = n->H, D = n->D, A = n->A, K = n->K, F = n->F, G = A / K;
    bf16 *normed = space, *delta = normed + R * H, *q = delta + R * H, *seen = q + R * A * D, *k = seen + R * A * D;
    bf16 *v = k + R * K * D, *gate = v + R * K * D, *up = gate + R * F;
#pragma omp parallel num_threads(threads)
    {
        Tiles before;
        take_tiles(&before);
        float *wide = scratch + omp_get_thread_num() * floats_of_scratch, *sums = wide + (H > D ? H : D);
        float *scores = sums + G * D;
        bf16 *weights = (bf16 *)(scores + G * n->most_blocks * S);
        memset(weights, 0, 16 * n->most_blocks * S * 2);
        for (int64_t number = 0; number < n->layers; number++) {
            const Layer *layer = layers + number;
            const bf16 *before_norm = number ? delta : NULL;
            {
                SHARE(T, 1);
                for (int64_t row = first; row < last; row++)
                    norm_row(before_norm ? before_norm + row * H : NULL, x + row * H, layer->norm, normed + row * H, H,
                             (float)n->eps, wide);
            }
#pragma omp barrier
            project(normed, layer->q, layer->q_bias, q, R, H, A * D, n->q);
            project(normed, layer->k, layer->k_bias, k, R, H, K * D, n->kv);
            project(normed, layer->v, layer->v_bias, v, R, H, K * D, n->kv);
#pragma omp barrier
            turn_rows(layer, n, q, k, v, cos, sin, blocks, lengths, wide);
#pragma omp barrier /* a token of a prompt sees those before it */
            {
                SHARE(T * K, 1);
                for (int64_t i = first; i < last; i++)
                    attend(q + i * G * D, layer, n, i % K, blocks + i / K * n->most_blocks, lengths[i / K],
                           seen + i * G * D, scores, weights, sums);
            }
#pragma omp barrier
            project(seen, layer->o, layer->o_bias, delta, R, A * D, H, n->o);
#pragma omp barrier
            {
                SHARE(T, 1);
                for (int64_t row = first; row < last; row++)
                    norm_row(delta + row * H, x + row * H, layer->mlp_norm, normed + row * H, H, (float)n->eps, wide);
            }
#pragma omp barrier
            {
                SHARE(F, 32);
                linear(normed, layer->gate, layer->gate_bias, gate, R, H, F, n->gate, first, last);
                linear(normed, layer->up, layer->up_bias, up, R, H, F, n->gate, first, last);
                for (int64_t row = 0; row < T; row++)
                    gate_row(gate + row * F + first, up + row * F + first, last - first);
            }
#pragma omp barrier
            project(gate, layer->down, layer->down_bias, delta, R, F, H, n->down);
#pragma omp barrier
        }
        SHARE(T, 1);
        for (int64_t row = first; row < last; row++)
            norm_row(delta + row * H, x + row * H, last_norm, x + row * H, H, (float)n->eps, wide);
        give_tiles(&before);
    }
}
