/* vllm06_ops_bed.c: see vllm06_ops_bed.h. */
#include "vllm06/vllm06_ops_bed.h"

#include <math.h>
#include <stdlib.h>

int64_t bed_row_at(const bed *b, int64_t seq, int64_t token)
{
    return (seq * b->longest + token) * KV_HEADS * b->c.head_size;
}

int64_t bed_slot_at(const bed *b, int64_t seq, int64_t token)
{
    int64_t n = b->c.block_size;
    return b->tables[seq * b->row_blocks + token / n] * n + token % n;
}

folio_vllm06_reshape_and_cache_args bed_store_args(const bed *b, const void *key, const void *value,
                                                   folio_dtype dtype, int64_t num_tokens,
                                                   const int64_t *slots)
{
    return FOLIO_WITH(folio_vllm06_reshape_and_cache_args, .key = key, .value = value,
                      .dtype = dtype, .x = b->x, .num_tokens = num_tokens, .slot_mapping = slots,
                      .k_scale = b->k_scale, .v_scale = b->v_scale);
}

folio_status bed_store(const bed *b, const void *key, const void *value, folio_dtype dtype,
                       int64_t num_tokens, int64_t key_stride, int64_t value_stride,
                       const int64_t *slots, const folio_run *run)
{
    folio_vllm06_reshape_and_cache_args a = bed_store_args(b, key, value, dtype, num_tokens, slots);
    a.key_stride = key_stride;
    a.value_stride = value_stride;
    return folio_vllm06_reshape_and_cache(b->state, &a, &b->c, run);
}

static folio_status store_seq(bed *b, int64_t seq)
{
    int64_t slots[LONGEST];
    for (int64_t t = 0; t < b->lens[seq]; t++) slots[t] = bed_slot_at(b, seq, t);
    return bed_store(b, b->rows[0] + bed_row_at(b, seq, 0), b->rows[1] + bed_row_at(b, seq, 0),
                     FOLIO_F32, b->lens[seq], 0, 0, slots, NULL);
}

void ops_on_each_backend(void (*body)(folio_vllm06_state *, const char *))
{
    for (int i = 0; i < SUPPORT_NUM_BACKENDS; i++) {
        folio_context_desc d = {.struct_size = sizeof d, .num_threads = 2};
        folio_vllm06_state *state = NULL;
        int before = test_failures();
        CHECK_OK(folio_vllm06_state_create(support_backends[i], &d, &state));
        if (state != NULL) body(state, support_backends[i]);
        folio_vllm06_state_destroy(state);
        if (test_failures() != before) printf("  ... on backend %s\n", support_backends[i]);
    }
}

void bed_open(bed *b, folio_vllm06_state *state, folio_dtype kv, int32_t x, int32_t head_size,
              int32_t block_size, const int32_t *lens)
{
    *b = (bed){.state = state, .dtype = FOLIO_F32, .scale = 0.11f};
    memcpy(b->lens, lens, sizeof b->lens);
    for (int i = 0; i < SEQS; i++)
        if (lens[i] > b->longest) b->longest = lens[i];
    b->max_seq_len = b->longest;
    b->row_blocks = (b->longest + block_size - 1) / block_size + 1;
    b->x = x;
    b->c = (folio_vllm06_kv_cache){.dtype = kv,
                                   .num_kv_heads = KV_HEADS,
                                   .head_size = head_size,
                                   .block_size = block_size,
                                   .num_blocks = SEQS * b->row_blocks};
    if (kv == FOLIO_FP8_E4M3 || kv == FOLIO_FP8_E5M2) {
        b->k_scale = 0.5f;
        b->v_scale = 0.0625f;
    }
    size_t elements = (size_t)(b->c.num_blocks * block_size * KV_HEADS * head_size);
    b->k = support_buffer_make(elements * folio_dtype_size(kv));
    b->v = support_buffer_make(elements * folio_dtype_size(kv));
    b->c.key_cache = b->k.data;
    b->c.value_cache = b->v.data;
    b->c.bytes = b->k.bytes;
    b->tables = malloc((size_t)b->c.num_blocks * sizeof *b->tables);
    int64_t n = bed_row_at(b, SEQS, 0);
    for (int part = 0; part < 2; part++) b->rows[part] = malloc((size_t)n * sizeof(float));
    b->query = malloc((size_t)(SEQS * HEADS * head_size) * sizeof(float));
    if (b->tables == NULL || b->rows[0] == NULL || b->rows[1] == NULL || b->query == NULL) abort();
    for (int64_t i = 0; i < b->c.num_blocks; i++) b->tables[i] = (int32_t)(b->c.num_blocks - 1 - i);
    support_fill(b->rows[0], n, 1, 2.0f);
    support_fill(b->rows[1], n, 2, 2.0f);
    support_fill(b->query, SEQS * HEADS * head_size, 3, 2.0f);
    for (int h = 0; h < HEADS; h++) b->slopes[h] = ldexpf(0.7f, -h);
    size_t rows = SEQS * HEADS, row = (size_t)head_size * sizeof(float);
    b->out = support_buffer_make(rows * row);
    b->sums = support_buffer_make(rows * MAX_PARTS * sizeof(float));
    b->tops = support_buffer_make(rows * MAX_PARTS * sizeof(float));
    b->tmp = support_buffer_make(rows * MAX_PARTS * row);
    for (int64_t i = 0; i < SEQS; i++) CHECK_OK(store_seq(b, i));
}

void bed_close(bed *b)
{
    support_buffer_free(&b->k);
    support_buffer_free(&b->v);
    support_buffer_free(&b->out);
    support_buffer_free(&b->sums);
    support_buffer_free(&b->tops);
    support_buffer_free(&b->tmp);
    free(b->tables);
    free(b->rows[0]);
    free(b->rows[1]);
    free(b->query);
}

int64_t bed_place(const bed *b, int part, int64_t slot, int64_t h, int64_t d)
{
    int64_t n = b->c.block_size, x = b->x;
    int64_t first = (slot / n * KV_HEADS + h) * b->c.head_size * n;
    return part ? first + d * n + slot % n : first + (d / x * n + slot % n) * x + d % x;
}

double bed_stored(const bed *b, int part, int64_t slot, int64_t h, int64_t d)
{
    float scale = part ? b->v_scale : b->k_scale;
    const void *cache = part ? b->v.data : b->k.data;
    return kit_decode(b->c.dtype, kit_get(b->c.dtype, cache, bed_place(b, part, slot, h, d))) *
           (scale > 0 ? (double)scale : 1.0);
}

folio_vllm06_paged_attention_args bed_arguments(bed *b)
{
    support_buffer *written[] = {&b->out, &b->sums, &b->tops, &b->tmp};
    for (int i = 0; i < COUNT_OF(written); i++) support_buffer_poison(written[i]);
    return FOLIO_WITH(folio_vllm06_paged_attention_args, .out = b->out.data, .query = b->query,
                      .dtype = b->dtype, .num_heads = HEADS, .num_seqs = SEQS,
                      .scale = b->no_scale ? 0.0f : b->scale, .block_tables = b->tables,
                      .max_num_blocks_per_seq = b->row_blocks, .seq_lens = b->lens,
                      .max_seq_len = b->max_seq_len, .alibi_slopes = b->alibi ? b->slopes : NULL,
                      .k_scale = b->k_scale, .v_scale = b->v_scale, .x = b->x);
}

folio_status bed_run(const bed *b, int v, const folio_vllm06_paged_attention_args *a,
                     const folio_vllm06_kv_cache *c, const folio_run *run)
{
    if (v == 1) return folio_vllm06_paged_attention_v1(b->state, a, c, run);
    return folio_vllm06_paged_attention_v2(b->state, a, c, b->sums.data, b->tops.data, b->tmp.data,
                                           run);
}

bool bed_is_untouched(const bed *b)
{
    return support_is_poison(b->out.data, b->out.bytes) &&
           support_is_poison(b->sums.data, b->sums.bytes) &&
           support_is_poison(b->tops.data, b->tops.bytes) &&
           support_is_poison(b->tmp.data, b->tmp.bytes);
}

int64_t bed_num_parts(const bed *b)
{
    return (b->max_seq_len + FOLIO_VLLM06_PARTITION_SIZE - 1) / FOLIO_VLLM06_PARTITION_SIZE;
}

double bed_dense_keys(const bed *b, int64_t seq, int64_t h, int64_t first, int64_t end, double *out)
{
    int64_t n = b->lens[seq], size = b->c.head_size, g = h / (HEADS / KV_HEADS);
    const float *q = (const float *)b->query + (seq * HEADS + h) * size;
    double score[LONGEST], top = -INFINITY, sum = 0;
    memset(out, 0, (size_t)size * sizeof *out);
    for (int64_t j = first; j < end; j++) {
        double dot = 0;
        for (int64_t d = 0; d < size; d++)
            dot += (double)q[d] * bed_stored(b, 0, bed_slot_at(b, seq, j), g, d);
        score[j] = dot * (double)b->scale;
        if (b->alibi) score[j] -= (double)b->slopes[h] * (double)(n - 1 - j);
        top = fmax(top, score[j]);
    }
    for (int64_t j = first; j < end; j++) {
        double p = exp(score[j] - top);
        sum += p;
        for (int64_t d = 0; d < size; d++)
            out[d] += p * bed_stored(b, 1, bed_slot_at(b, seq, j), g, d);
    }
    for (int64_t d = 0; d < size && sum > 0; d++) out[d] /= sum;
    return top + log(sum);
}

void bed_dense(const bed *b, int64_t seq, int64_t h, double *out)
{
    (void)bed_dense_keys(b, seq, h, 0, b->lens[seq], out);
}

static void check_out(const bed *b, const double *expected, const char *what)
{
    int64_t n = (int64_t)SEQS * HEADS * b->c.head_size;
    double largest = 0;
    for (int64_t i = 0; i < n; i++) largest = fmax(largest, fabs(expected[i]));
    for (int64_t i = 0; i < n; i++) {
        double got = (double)((const float *)b->out.data)[i];
        CHECK_MSG(fabs(got - expected[i]) <= 2e-6 * largest,
                  "%s, head size %d, blocks of %d, number %lld: %.9g, expected %.9g", what,
                  b->c.head_size, b->c.block_size, (long long)i, got, expected[i]);
    }
    CHECK(support_buffer_guards_hold(&b->out));
}

/* A partition holds the result and the weight of its own keys. */
static void check_partition(const bed *b, int64_t row, int64_t p, float sum, float top,
                            const float *tmp)
{
    int64_t first = p * FOLIO_VLLM06_PARTITION_SIZE, n = b->lens[row / HEADS];
    int64_t end = first + FOLIO_VLLM06_PARTITION_SIZE;
    double own[256];
    double lse = bed_dense_keys(b, row / HEADS, row % HEADS, first, n < end ? n : end, own);
    CHECK(fabs(log((double)sum) + (double)top - lse) < 1e-4);
    for (int64_t d = 0; d < b->c.head_size; d++) CHECK(fabs((double)tmp[d] - own[d]) < 1e-4);
}

/* exp_sums, max_logits and tmp_out: parts and weights that merge to out. */
static void check_partitions(const bed *b, const double *expected)
{
    const float *sums = b->sums.data, *tops = b->tops.data, *tmp = b->tmp.data;
    int64_t parts = bed_num_parts(b);
    for (int64_t row = 0; row < SEQS * HEADS; row++) {
        double top = -INFINITY, sum = 0, first = 0;
        for (int64_t p = 0; p < parts; p++) {
            bool empty = b->lens[row / HEADS] <= p * FOLIO_VLLM06_PARTITION_SIZE;
            CHECK(empty == (sums[row * parts + p] == 0.0f));
            if (empty) continue;
            top = fmax(top, (double)tops[row * parts + p]);
            check_partition(b, row, p, sums[row * parts + p], tops[row * parts + p],
                            tmp + (row * parts + p) * b->c.head_size);
        }
        for (int64_t p = 0; p < parts; p++) {
            double w = (double)sums[row * parts + p];
            if (w == 0) continue;
            w *= exp((double)tops[row * parts + p] - top);
            sum += w;
            first += w * (double)tmp[(row * parts + p) * b->c.head_size];
        }
        if (sum > 0) CHECK(fabs(first / sum - expected[row * b->c.head_size]) < 1e-5);
    }
}

/* The formula, which the caller frees. */
static double *expect(const bed *b)
{
    int64_t size = b->c.head_size;
    double *expected = malloc((size_t)(SEQS * HEADS * size) * sizeof *expected);
    if (expected == NULL) abort();
    for (int64_t row = 0; row < SEQS * HEADS; row++)
        bed_dense(b, row / HEADS, row % HEADS, expected + row * size);
    return expected;
}

void bed_check(bed *b, int last)
{
    double *expected = expect(b);
    for (int v = 1; v <= last; v++) {
        folio_vllm06_paged_attention_args a = bed_arguments(b);
        CHECK_OK(bed_run(b, v, &a, &b->c, NULL));
        check_out(b, expected, v == 1 ? "v1" : "v2");
        if (v == 2) check_partitions(b, expected);
        CHECK(support_buffer_guards_hold(&b->sums) && support_buffer_guards_hold(&b->tops));
        CHECK(support_buffer_guards_hold(&b->tmp));
    }
    free(expected);
}
