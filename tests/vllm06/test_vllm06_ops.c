/*
 * test_vllm06_ops.c: the plain operators over x-packed caches. reshape_and_cache writes the layout
 * byte for byte; paged_attention v1 and v2 agree with each other and with dense attention in
 * double, for every head size and block size the originals list.
 */
#include "vllm06/vllm06_ops_bed.h"

#include <math.h>
#include <stdlib.h>

/* Lengths around a block, a partition and two of them; 0 is padding. */
static const int32_t long_lens[SEQS] = {LONGEST, 0, 512, 513, 9};
static const int32_t short_lens[SEQS] = {530, 0, 16, 17, 1};

static const int32_t head_sizes[] = {32, 64, 80, 96, 112, 120, 128, 192, 256};
static const int32_t block_sizes[] = {8, 16, 32};

static void each_size(folio_vllm06_state *state, folio_dtype kv, bool ipex, bool alibi)
{
    int32_t x = ipex ? 1 : 16 / (int32_t)folio_dtype_size(kv);
    for (int s = 0; s < COUNT_OF(head_sizes); s++) {
        if (head_sizes[s] % x != 0) continue;
        for (int k = 0; k < COUNT_OF(block_sizes); k++) {
            bed b;
            bed_open(&b, state, kv, x, head_sizes[s], block_sizes[k], short_lens);
            b.alibi = alibi;
            bed_check(&b, 2);
            bed_close(&b);
        }
    }
}

/* Sizes that the originals' kernels did not have; v1 also takes blocks that do not divide a partition. Scale 0 is the
 * usual one. */
static void other_sizes(folio_vllm06_state *state)
{
    static const int32_t few[SEQS] = {9, 0, 16, 1, 3}; /* more sequences than blocks in a row */
    static const struct {
        int32_t block_size;
        const int32_t *lens;
        int last;
        bool no_scale;
    } cases[] = {{64, short_lens, 2, false},
                 {24, short_lens, 1, false},
                 {16, few, 2, false},
                 {16, few, 2, true}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        bed b;
        bed_open(&b, state, FOLIO_F32, 4, 40, cases[i].block_size, cases[i].lens);
        b.no_scale = cases[i].no_scale;
        if (b.no_scale) b.scale = 1.0f / sqrtf(40.0f);
        bed_check(&b, cases[i].last);
        bed_close(&b);
    }
}

OPS_TEST(paged_attention_sizes)
{
    each_size(state, FOLIO_F32, false, false);
    other_sizes(state);
}

OPS_TEST(paged_attention_alibi) { each_size(state, FOLIO_F32, false, true); }
OPS_TEST(paged_attention_x_1) { each_size(state, FOLIO_F32, true, false); }

OPS_TEST(paged_attention_fp8)
{
    each_size(state, FOLIO_FP8_E4M3, false, true);
    each_size(state, FOLIO_FP8_E5M2, false, false);
    for (int i = 0; i < 2; i++) { /* a scale of 0 is 1 */
        bed b;
        bed_open(&b, state, FOLIO_FP8_E4M3, 16, 32, 8, short_lens);
        *(i ? &b.v_scale : &b.k_scale) = 0;
        bed_check(&b, 2);
        bed_close(&b);
    }
}

/* Padding alone, max_seq_len 0: one partition, which is empty, and rows of zeros. */
static void no_keys_at_all(folio_vllm06_state *state)
{
    static const int32_t no_lens[SEQS] = {0};
    bed b;
    bed_open(&b, state, FOLIO_F32, 4, 32, 8, short_lens);
    for (int v = 1; v <= 2; v++) {
        folio_vllm06_paged_attention_args a = bed_arguments(&b);
        a.seq_lens = no_lens;
        a.max_seq_len = 0;
        CHECK_OK(bed_run(&b, v, &a, &b.c, NULL));
        const float *out = b.out.data, *sums = b.sums.data, *tops = b.tops.data;
        for (int k = 0; k < SEQS * HEADS * 32; k++) CHECK(out[k] == 0.0f);
        for (int k = 0; v == 2 && k < SEQS * HEADS; k++) CHECK(sums[k] == 0.0f);
        CHECK(support_is_poison(sums + SEQS * HEADS, sizeof *sums));
        CHECK(support_is_poison(tops + SEQS * HEADS, sizeof *tops));
    }
    bed_close(&b);
}

OPS_TEST(paged_attention_partitions)
{
    no_keys_at_all(state);
    static const folio_dtype kvs[] = {FOLIO_F32, FOLIO_FP8_E4M3};
    CHECK_INT(FOLIO_VLLM06_PARTITION_SIZE, 512);
    for (int i = 0; i < 4; i++) {
        bed b;
        int32_t x = 16 / (int32_t)folio_dtype_size(kvs[i / 2]);
        bed_open(&b, state, kvs[i / 2], x, 32, i % 2 ? 8 : 32, long_lens);
        b.alibi = i % 2;
        if (i == 1) b.max_seq_len = 2000; /* one partition more than the longest needs */
        if (i == 2) b.max_seq_len = 3 * FOLIO_VLLM06_PARTITION_SIZE; /* none more */
        bed_check(&b, 2);
        bed_close(&b);
    }
}

/* The state's plan follows what a call is given: lengths and blocks that changed in place, and other caches. */
OPS_TEST(paged_attention_plans_anew)
{
    bed b, other;
    bed_open(&b, state, FOLIO_F32, 4, 32, 8, short_lens);
    bed_open(&other, state, FOLIO_F32, 4, 32, 8, short_lens);
    bed_check(&b, 2);
    bed_check(&other, 2);
    b.lens[0]--; /* one key less, of the same blocks */
    bed_check(&b, 2);
    int32_t *blocks = b.tables, first = blocks[0];
    blocks[0] = blocks[1]; /* keys in another order */
    blocks[1] = first;
    bed_check(&b, 2);
    b.max_seq_len = 1200; /* a partition more, without keys */
    bed_check(&b, 2);
    bed_check(&other, 2);
    b.tables[0] = (int32_t)b.c.num_blocks;
    folio_vllm06_paged_attention_args a = bed_arguments(&b);
    bed_check(&other, 1); /* what was refused is refused again, and harms no call before or after */
    for (int i = 0; i < 2; i++)
        REJECTED(folio_vllm06_paged_attention_v1(state, &a, &b.c, NULL), "block_table");
    bed_check(&other, 1);
    bed_close(&b);
    bed_close(&other);
}

/* Sequences that share all their blocks, as forks do: reading needs no block of one's own. */
OPS_TEST(paged_attention_shared_blocks)
{
    enum { SIZE = 64, N = HEADS * SIZE };
    static const int32_t lens[SEQS] = {LONGEST, LONGEST};
    bed b;
    double expected[SIZE];
    bed_open(&b, state, FOLIO_F32, 4, SIZE, 16, long_lens);
    memcpy(b.tables + b.row_blocks, b.tables, (size_t)b.row_blocks * sizeof *b.tables);
    memcpy((float *)b.query + N, b.query, N * sizeof(float));
    for (int v = 1; v <= 2; v++) {
        folio_vllm06_paged_attention_args a = bed_arguments(&b);
        const float *out = b.out.data;
        a.num_seqs = 2;
        a.seq_lens = lens;
        CHECK_OK(bed_run(&b, v, &a, &b.c, NULL));
        CHECK(memcmp(out, out + N, N * sizeof *out) == 0);
        for (int64_t k = 0; k < N; k++) {
            if (k % SIZE == 0) bed_dense(&b, 0, k / SIZE, expected);
            CHECK(fabs((double)out[k] - expected[k % SIZE]) < 1e-5);
        }
    }
    bed_close(&b);
}

/* Each partition with keys is in its place of tmp_out, in the type of query. */
static void check_half_partitions(const bed *b, double budget)
{
    int64_t parts = bed_num_parts(b), size = b->c.head_size;
    double own[128];
    for (int64_t row = 0; row < SEQS * HEADS; row++)
        for (int64_t p = 0; p < parts; p++) {
            int64_t first = p * FOLIO_VLLM06_PARTITION_SIZE, n = b->lens[row / HEADS];
            int64_t end = first + FOLIO_VLLM06_PARTITION_SIZE;
            if (n <= first) continue;
            (void)bed_dense_keys(b, row / HEADS, row % HEADS, first, n < end ? n : end, own);
            for (int64_t d = 0; d < size; d++) {
                uint32_t bits = kit_get(b->dtype, b->tmp.data, (row * parts + p) * size + d);
                CHECK(fabs(kit_decode(b->dtype, bits) - own[d]) <= budget);
            }
        }
    CHECK(support_buffer_guards_hold(&b->tmp));
}

/* In the 16-bit types v1 and v2 differ from the reference by no more than the type's spacing. */
OPS_TEST(paged_attention_half)
{
    static const folio_dtype dtypes[] = {FOLIO_F16, FOLIO_BF16};
    for (int i = 0; i < 2; i++) {
        bed b;
        double budget = i ? 0x1p-8 : 0x1p-10, out[128], largest = 2.0;
        bed_open(&b, state, dtypes[i], 8, 128, 16, long_lens);
        b.dtype = dtypes[i];
        float *q = b.query;
        uint16_t *half = malloc((size_t)SEQS * HEADS * 128 * 2);
        if (half == NULL) abort();
        for (int64_t k = 0; k < SEQS * HEADS * 128; k++) {
            uint32_t bits = kit_encode(b.dtype, (double)q[k]);
            half[k] = (uint16_t)bits;
            q[k] = (float)kit_decode(b.dtype, bits);
        }
        for (int v = 1; v <= 2; v++) {
            folio_vllm06_paged_attention_args a = bed_arguments(&b);
            a.query = half;
            CHECK_OK(bed_run(&b, v, &a, &b.c, NULL));
            if (v == 2) check_half_partitions(&b, budget * largest);
            for (int64_t row = 0; row < SEQS * HEADS; row++) {
                bed_dense(&b, row / HEADS, row % HEADS, out);
                for (int64_t d = 0; d < 128; d++) {
                    uint32_t bits = kit_get(b.dtype, b.out.data, row * 128 + d);
                    double got = kit_decode(b.dtype, bits);
                    CHECK_MSG(fabs(got - out[d]) <= budget * largest, "v%d: %g, expected %g", v,
                              got, out[d]);
                }
            }
        }
        free(half);
        bed_close(&b);
    }
}

/* Queries as they come out of a fused projection: v1 and v2 give the bits of dense ones. */
OPS_TEST(paged_attention_query_stride)
{
    enum { WIDTH = HEADS * 32, STRIDE = 2 * WIDTH + 4 };
    static float fused[SEQS * STRIDE], rows[SEQS * WIDTH];
    bed b;
    bed_open(&b, state, FOLIO_F32, 4, 32, 8, short_lens);
    memset(fused, 0xFF, sizeof fused);
    for (int64_t i = 0; i < SEQS; i++)
        memcpy(fused + i * STRIDE, (const float *)b.query + i * WIDTH, WIDTH * sizeof *fused);
    for (int v = 1; v <= 2; v++)
        for (int strided = 0; strided < 2; strided++) {
            folio_vllm06_paged_attention_args a = bed_arguments(&b);
            if (strided) a.query = fused;
            if (strided) a.query_stride = STRIDE;
            CHECK_OK(bed_run(&b, v, &a, &b.c, NULL));
            if (!strided) memcpy(rows, b.out.data, sizeof rows);
            else CHECK(memcmp(rows, b.out.data, sizeof rows) == 0);
        }
    static const int64_t bad[] = {-1, 31, WIDTH - 1, INT64_MAX};
    for (int i = 0; i <= COUNT_OF(bad); i++) {
        folio_vllm06_paged_attention_args a = bed_arguments(&b);
        a.query = fused;
        a.query_stride = i < COUNT_OF(bad) ? bad[i] : STRIDE;
        /* in place only where query is dense, as out is */
        if (i == COUNT_OF(bad)) a.query = b.out.data;
        const char *words = i < COUNT_OF(bad) ? "token_stride" : "share memory";
        if (i == COUNT_OF(bad) && strcmp(backend, "cuda") == 0) continue;
        for (int v = 1; v <= 2; v++) REJECTED(bed_run(&b, v, &a, &b.c, NULL), words);
        CHECK(bed_is_untouched(&b));
    }
    bed_close(&b);
}

/* Rows in the 16-bit types, into caches of the same type and of fp8. */
static void store_half_rows(folio_vllm06_state *state)
{
    enum { SIZE = 32, WIDTH = KV_HEADS * SIZE, TOKENS = 3 };
    static const folio_dtype dtypes[] = {FOLIO_F16, FOLIO_BF16};
    static const int64_t slots[TOKENS] = {5, 0, 9};
    for (int i = 0; i < 4; i++) {
        folio_dtype dtype = dtypes[i / 2], kv = i % 2 ? FOLIO_FP8_E4M3 : dtype;
        uint16_t rows[2][TOKENS * WIDTH];
        bed b;
        bed_open(&b, state, kv, 16 / (int32_t)folio_dtype_size(kv), SIZE, 8, short_lens);
        if (i == 1) b.k_scale = b.v_scale = 0; /* 1 */
        for (int part = 0; part < 2; part++)
            for (int64_t e = 0; e < TOKENS * WIDTH; e++)
                rows[part][e] = (uint16_t)kit_encode(dtype, (double)b.rows[part][e]);
        CHECK_OK(bed_store(&b, rows[0], rows[1], dtype, TOKENS, 0, 0, slots, NULL));
        for (int part = 0; part < 2; part++)
            for (int64_t e = 0; e < TOKENS * WIDTH; e++) {
                float scale = part ? b.v_scale : b.k_scale;
                double x = kit_decode(dtype, rows[part][e]) / (scale > 0 ? (double)scale : 1.0);
                int64_t at = bed_place(&b, part, slots[e / WIDTH], e / SIZE % KV_HEADS, e % SIZE);
                CHECK(kit_get(kv, part ? b.v.data : b.k.data, at) == kit_encode(kv, x));
            }
        bed_close(&b);
    }
}

/* Every byte of both caches: what the layout says for a stored slot, NaN elsewhere. */
OPS_TEST(reshape_and_cache)
{
    for (int i = 0; i < SUPPORT_NUM_KV_DTYPES * 2; i++) {
        folio_dtype kv = support_kv_dtypes[i / 2];
        if (kv == FOLIO_INT8) continue;
        bed b;
        bed_open(&b, state, kv, i % 2 ? 1 : 16 / (int32_t)folio_dtype_size(kv), 64, 8, short_lens);
        for (int part = 0; part < 2; part++) {
            support_buffer *cache = part ? &b.v : &b.k;
            unsigned char *image = malloc(cache->bytes);
            if (image == NULL) abort();
            memset(image, 0xFF, cache->bytes);
            float scale = part ? b.v_scale : b.k_scale;
            for (int64_t s = 0; s < SEQS; s++)
                for (int64_t e = 0; e < (int64_t)b.lens[s] * KV_HEADS * 64; e++) {
                    int64_t t = e / (KV_HEADS * 64), h = e / 64 % KV_HEADS, d = e % 64;
                    double x = (double)b.rows[part][bed_row_at(&b, s, 0) + e];
                    kit_set(kv, image, bed_place(&b, part, bed_slot_at(&b, s, t), h, d),
                            kit_encode(kv, x / (scale > 0 ? (double)scale : 1.0)));
                }
            CHECK(memcmp(image, cache->data, cache->bytes) == 0);
            free(image);
        }
        bed_close(&b);
    }
    store_half_rows(state);
}

/* A slot that several tokens name holds the last of them. */
OPS_TEST(reshape_and_cache_last_token)
{
    enum { SIZE = 32, WIDTH = KV_HEADS * SIZE, TOKENS = 6 };
    static float k[TOKENS * WIDTH], v[TOKENS * WIDTH];
    static const int64_t slots[TOKENS] = {5, 9, 5, -1, 9, 0}, last[] = {2, 4, 5};
    support_fill(k, COUNT_OF(k), 8, 1.0f);
    support_fill(v, COUNT_OF(v), 9, 1.0f);
    bed b;
    bed_open(&b, state, FOLIO_F32, 4, SIZE, 8, short_lens);
    CHECK_OK(bed_store(&b, k, v, FOLIO_F32, TOKENS, 0, 0, slots, NULL));
    for (int i = 0; i < COUNT_OF(last); i++)
        for (int64_t e = 0; e < WIDTH; e++) {
            int64_t t = last[i];
            CHECK(bed_stored(&b, 0, slots[t], e / SIZE, e % SIZE) == (double)k[t * WIDTH + e]);
            CHECK(bed_stored(&b, 1, slots[t], e / SIZE, e % SIZE) == (double)v[t * WIDTH + e]);
        }
    bed_close(&b);
}

/* Strided rows as they come out of a fused projection, of keys and of values by another stride; slot -1 stores
 * nothing. */
OPS_TEST(reshape_and_cache_strides)
{
    enum { SIZE = 32, WIDTH = KV_HEADS * SIZE, STRIDE = 3 * WIDTH, V_STRIDE = 2 * WIDTH };
    static float qk[4 * STRIDE], v[4 * V_STRIDE];
    static const int64_t slots[] = {5, -1, 0, 9};
    support_fill(qk, COUNT_OF(qk), 8, 1.0f);
    support_fill(v, COUNT_OF(v), 9, 1.0f);
    bed b;
    bed_open(&b, state, FOLIO_F32, 4, SIZE, 8, short_lens);
    support_buffer_poison(&b.k);
    support_buffer_poison(&b.v);
    CHECK_OK(bed_store(&b, qk + WIDTH, v + WIDTH, FOLIO_F32, 4, STRIDE, V_STRIDE, slots, NULL));
    int64_t written[2] = {0, 0};
    for (int64_t t = 0; t < 4; t++)
        for (int64_t e = 0; e < WIDTH && slots[t] >= 0; e++) {
            CHECK(bed_stored(&b, 0, slots[t], e / SIZE, e % SIZE) ==
                  (double)qk[t * STRIDE + WIDTH + e]);
            CHECK(bed_stored(&b, 1, slots[t], e / SIZE, e % SIZE) ==
                  (double)v[t * V_STRIDE + WIDTH + e]);
        }
    for (size_t i = 0; i < b.k.bytes / 4; i++) {
        written[0] += !support_is_poison((const char *)b.k.data + 4 * i, 4);
        written[1] += !support_is_poison((const char *)b.v.data + 4 * i, 4);
    }
    CHECK(written[0] == 3 * WIDTH && written[1] == 3 * WIDTH);
    bed_close(&b);
}

static bool same_block(const bed *a, int64_t from, const bed *b, int64_t to)
{
    size_t n = (size_t)(a->c.block_size * KV_HEADS * a->c.head_size) * folio_dtype_size(a->c.dtype);
    return memcmp((char *)a->k.data + (size_t)from * n, (char *)b->k.data + (size_t)to * n, n) ==
               0 &&
           memcmp((char *)a->v.data + (size_t)from * n, (char *)b->v.data + (size_t)to * n, n) == 0;
}

/* Fills each block, keys apart from values, with a byte of its own; then is block i what block `from` was? */
static bool is_filled(const bed *b, int64_t i, int64_t from, bool fill)
{
    size_t n = (size_t)(b->c.block_size * b->c.num_kv_heads * b->c.head_size) *
               folio_dtype_size(b->c.dtype);
    bool same = true;
    for (int part = 0; part < 2; part++) {
        char *block = (char *)(part ? b->v.data : b->k.data) + (size_t)i * n;
        char byte = (char)((from + 100 * part) % 251);
        if (fill) memset(block, byte, n);
        same &= block[0] == byte && memcmp(block, block + 1, n - 1) == 0;
    }
    return same;
}

/* Pairs that every move refuses, of caches with `last` + 1 blocks; within one cache also a chain. */
static void bad_pairs(folio_vllm06_state *state, const folio_vllm06_kv_cache *from,
                      const folio_vllm06_kv_cache *to, int64_t last)
{
    const struct {
        folio_block_pair pairs[2];
        const char *words;
        bool chain;
    } bad[] = {{{{last, 3}, {last + 1, 4}}, "(from)[1]|outside [0,", false},
               {{{last, 3}, {-1, 4}}, "(from)[1] = -1 is outside [0,", false},
               {{{last, 3}, {last - 1, -1}}, "(to)[1] = -1 is outside [0,", false},
               {{{last, 3}, {2, last + 1}}, "(to)[1]|outside [0,", false},
               {{{last, 3}, {last - 1, 3}}, "(to)[1] = 3 is written twice", false},
               {{{last, 3}, {3, 4}}, "block 3 is both read and written", true},
               {{{3, 4}, {last, 3}}, "block 3 is both read and written", true},
               {{{last, 3}, {3, last}}, "is both read and written", true}};
    for (int i = 0; i < COUNT_OF(bad); i++) {
        if (bad[i].chain && from != to) continue;
        REJECTED(folio_vllm06_swap_blocks(state, from, to, bad[i].pairs, 2, NULL), bad[i].words);
        if (from == to)
            REJECTED(folio_vllm06_copy_blocks(state, from, 1, bad[i].pairs, 2, NULL), bad[i].words);
    }
}

OPS_TEST(copy_blocks)
{
    bed a, b;
    bed_open(&a, state, FOLIO_BF16, 8, 64, 8, short_lens);
    bed_open(&b, state, FOLIO_BF16, 8, 64, 8, short_lens);
    for (int64_t i = 0; i < b.c.num_blocks; i++) is_filled(&b, i, i, true);
    int64_t last = a.c.num_blocks - 1;
    const folio_block_pair pairs[] = {{last, 1}, {last, 0}, {last - 1, 2}}, one[] = {{last, 5}};
    folio_vllm06_kv_cache caches[] = {a.c, b.c};
    CHECK(!same_block(&a, last, &a, 1));
    CHECK_OK(folio_vllm06_copy_blocks(state, caches, 2, pairs, 3, NULL));
    for (int i = 0; i < 3; i++) CHECK(same_block(&a, pairs[i].from, &a, pairs[i].to));
    for (int64_t i = 0; i <= last; i++) /* and no other block */
        CHECK(is_filled(&b, i, i < 2 ? last : i == 2 ? last - 1 : i, false));
    CHECK_OK(folio_vllm06_copy_blocks(state, caches, 1, one, 1, NULL)); /* a list that goes on */
    CHECK_OK(folio_vllm06_copy_blocks(state, NULL, 0, one, 1, NULL));   /* and none at all */
    CHECK(same_block(&a, last, &a, 5) && is_filled(&b, 5, 5, false));
    bad_pairs(state, &a.c, &a.c, last);
    REJECTED(folio_vllm06_copy_blocks(state, NULL, 2, pairs, 1, NULL), "NULL");
    REJECTED(folio_vllm06_copy_blocks(NULL, caches, 2, pairs, 1, NULL), "state");
    static const int64_t bad_counts[] = {-1, INT64_MAX};
    for (int i = 0; i < 2; i++)
        REJECTED(folio_vllm06_copy_blocks(state, caches, bad_counts[i], pairs, 1, NULL),
                 "num_caches is outside [0, 2147483647]");
    const folio_block_pair fresh[] = {{last, 3}};
    caches[1].value_cache = NULL;
    REJECTED(folio_vllm06_copy_blocks(state, caches, 2, fresh, 1, NULL),
             "K and V in one allocation");
    for (int i = 0; i < 2; i++) {
        caches[0] = a.c;
        caches[1] = b.c;
        caches[i].num_blocks--;
        REJECTED(folio_vllm06_copy_blocks(state, caches, 2, fresh, 1, NULL),
                 i ? "caches[1] has 339 blocks, kv_caches[0] 340"
                   : "caches[1] has 340 blocks, kv_caches[0] 339");
    }
    CHECK(!same_block(&a, last, &a, 3) && !same_block(&a, last - 1, &a, 3));
    bed_close(&a);
    bed_close(&b);
}

/* Caches that share a part of their memory, in any shape: a of the caches is apart, b has last + 1 blocks. */
static void swap_overlapping(const bed *a, const bed *b, int64_t last, size_t block)
{
    const folio_block_pair one[] = {{2, 6}}, zero[] = {{0, 0}};
    folio_vllm06_kv_cache bad[7];
    for (int i = 0; i < 7; i++) bad[i] = b->c;
    bad[0].num_blocks--;
    bad[1].value_cache = a->v.data;
    bad[2].head_size /= 2;
    bad[3].num_kv_heads /= 2;
    bad[4].block_size /= 2;
    bad[5].dtype = FOLIO_BF16;
    bad[6].key_cache = a->k.data;
    for (int i = 0; i < 7; i++)
        REJECTED(folio_vllm06_swap_blocks(b->state, &b->c, &bad[i], one, 1, NULL),
                 i == 6 ? "dst value_cache and src value_cache share memory"
                        : "dst key_cache and src key_cache share memory");
    for (int i = 0; i < 4; i++) { /* the last block of one is all of the other */
        folio_vllm06_kv_cache other = b->c;
        other.num_blocks = 1;
        other.bytes = block;
        other.key_cache = i < 2 ? (char *)b->k.data + (size_t)last * block : a->k.data;
        other.value_cache = i < 2 ? a->v.data : (char *)b->v.data + (size_t)last * block;
        REJECTED(folio_vllm06_swap_blocks(b->state, i % 2 ? &other : &b->c, i % 2 ? &b->c : &other,
                                          zero, 1, NULL),
                 i < 2 ? "dst key_cache and src key_cache share memory"
                       : "dst value_cache and src value_cache share memory");
    }
    CHECK(!same_block(b, 2, b, 6));
}

OPS_TEST(swap_blocks)
{
    bed a, b;
    bed_open(&a, state, FOLIO_F16, 8, 64, 8, short_lens);
    bed_open(&b, state, FOLIO_F16, 8, 64, 8, short_lens);
    support_buffer_poison(&b.k);
    support_buffer_poison(&b.v);
    int64_t last = a.c.num_blocks - 1;
    const folio_block_pair pairs[] = {{last, 4}, {last - 1, 2}}, within[] = {{2, 3}};
    CHECK_OK(folio_vllm06_swap_blocks(state, &a.c, &b.c, pairs, 2, NULL));
    CHECK(same_block(&a, last, &b, 4) && same_block(&a, last - 1, &b, 2));
    size_t n = (size_t)b.c.block_size * KV_HEADS * 64 * 2;
    for (int64_t i = 0; i <= last; i++) {
        bool swapped = i == 2 || i == 4;
        CHECK(support_is_poison((char *)b.k.data + (size_t)i * n, n) != swapped);
        CHECK(support_is_poison((char *)b.v.data + (size_t)i * n, n) != swapped);
    }
    bad_pairs(state, &a.c, &b.c, last);
    bad_pairs(state, &b.c, &b.c, last);
    const folio_block_pair beyond[] = {{last, 3},
                                       {last - 1, 5}}; /* of a target with fewer blocks */
    folio_vllm06_kv_cache fewer = b.c;
    fewer.num_blocks = 5;
    REJECTED(folio_vllm06_swap_blocks(state, &a.c, &fewer, beyond, 2, NULL),
             "pairs (to)[1] = 5 is outside [0, 5)");
    CHECK(support_is_poison((char *)b.k.data + 3 * n, n));
    CHECK_OK(folio_vllm06_swap_blocks(state, &b.c, &b.c, within, 1, NULL));
    CHECK(same_block(&b, 2, &b, 3) && same_block(&b, 2, &a, last - 1));
    REJECTED(folio_vllm06_swap_blocks(state, &a.c, NULL, pairs, 2, NULL), "dst");
    REJECTED(folio_vllm06_swap_blocks(state, NULL, &b.c, pairs, 2, NULL), "src");
    REJECTED(folio_vllm06_swap_blocks(NULL, &a.c, &b.c, pairs, 2, NULL), "state");
    /* on a device a part is brought to a place of its own */
    if (strcmp(backend, "cuda") != 0) swap_overlapping(&a, &b, last, n);
    folio_vllm06_kv_cache other = b.c;
    other.dtype = FOLIO_BF16;
    REJECTED(folio_vllm06_swap_blocks(state, &a.c, &other, pairs, 2, NULL),
             "dtypes differ, f16 and bf16");
    for (int i = 0; i < 3; i++) { /* blocks of half the size */
        other = b.c;
        *(i == 0 ? &other.head_size : i == 1 ? &other.num_kv_heads : &other.block_size) /= 2;
        REJECTED(folio_vllm06_swap_blocks(state, &a.c, &other, pairs, 2, NULL),
                 "geometries differ");
        REJECTED(folio_vllm06_swap_blocks(state, &other, &a.c, pairs, 2, NULL),
                 "geometries differ");
    }
    CHECK_OK(folio_vllm06_swap_blocks(state, &a.c, &fewer, beyond, 1, NULL));
    CHECK(same_block(&a, last, &b, 3));
    bed_close(&a);
    bed_close(&b);
}

/* The caller's workspace, which no plan of the caller's measured, is not used: it may be too small. */
static void workspace_is_not_used(bed *b, bed *other)
{
    static float rows[SEQS * HEADS * 32];
    support_buffer small = support_buffer_make(1);
    const folio_run run = {
        .struct_size = sizeof run, .workspace = small.data, .workspace_size = small.bytes};
    for (int v = 1; v <= 2; v++)
        for (int given = 0; given < 2; given++) {
            folio_vllm06_paged_attention_args a = bed_arguments(b);
            CHECK_OK(bed_run(b, v, &a, &b->c, given ? &run : NULL));
            if (!given) memcpy(rows, b->out.data, sizeof rows);
            else CHECK(memcmp(rows, b->out.data, sizeof rows) == 0);
        }
    static const int64_t slot = 5;
    static const folio_block_pair pair[] = {{0, 2}};
    static float row[KV_HEADS * 32];
    CHECK_OK(bed_store(b, row, row, FOLIO_F32, 1, 0, 0, &slot, &run));
    CHECK(bed_stored(b, 0, slot, 1, 7) == 0.0 && bed_stored(b, 1, slot, 0, 0) == 0.0);
    CHECK_OK(folio_vllm06_copy_blocks(b->state, &b->c, 1, pair, 1, &run));
    CHECK(same_block(b, 0, b, 2));
    CHECK_OK(folio_vllm06_swap_blocks(b->state, &b->c, &other->c, pair, 1, &run));
    CHECK(same_block(b, 0, other, 2));
    CHECK(support_is_poison(small.data, small.bytes) && support_buffer_guards_hold(&small));
    support_buffer_free(&small);
}

/* On a host backend there is no stream but NULL; another is refused, and nothing is written. */
OPS_TEST(streams)
{
    if (strcmp(backend, "cuda") == 0) return; /* there every call has run on one */
    int there = 0;
    const folio_run on_stream = {.struct_size = sizeof on_stream, .stream = &there};
    static const int64_t slot = 3;
    static const folio_block_pair pair[] = {{0, 1}};
    static float row[KV_HEADS * 32];
    bed a, b;
    bed_open(&a, state, FOLIO_F32, 4, 32, 8, short_lens);
    bed_open(&b, state, FOLIO_F32, 4, 32, 8, short_lens);
    CHECK_OK(folio_vllm06_swap_blocks(state, &a.c, &b.c, pair, 1, NULL));
    CHECK(same_block(&a, 0, &b, 1));
    CHECK_OK(folio_vllm06_copy_blocks(state, &a.c, 1, pair, 1, NULL));
    CHECK(same_block(&a, 0, &a, 1));
    CHECK_OK(bed_store(&a, row, row, FOLIO_F32, 1, 0, 0, &slot, NULL));
    CHECK(bed_stored(&a, 0, slot, 1, 7) == 0.0 && bed_stored(&a, 1, slot, 0, 0) == 0.0);
    workspace_is_not_used(&a, &b);
    support_buffer_poison(&b.k);
    support_buffer_poison(&b.v);
    REJECTED(bed_store(&b, row, row, FOLIO_F32, 1, 0, 0, &slot, &on_stream), "stream");
    REJECTED(folio_vllm06_swap_blocks(state, &a.c, &b.c, pair, 1, &on_stream), "stream");
    CHECK(support_is_poison(b.k.data, b.k.bytes) && support_is_poison(b.v.data, b.v.bytes));
    int64_t last = a.c.num_blocks - 1;
    const folio_block_pair other[] = {{last, 2}};
    CHECK(!same_block(&a, last, &a, 2));
    REJECTED(folio_vllm06_copy_blocks(state, &a.c, 1, other, 1, &on_stream), "stream");
    REJECTED(folio_vllm06_swap_blocks(state, &a.c, &a.c, other, 1, &on_stream),
             "stream"); /* within one cache */
    CHECK(!same_block(&a, last, &a, 2));
    folio_vllm06_paged_attention_args args = bed_arguments(&a);
    for (int v = 1; v <= 2; v++) REJECTED(bed_run(&a, v, &args, &a.c, &on_stream), "stream");
    CHECK(bed_is_untouched(&a));
    bed_close(&a);
    bed_close(&b);
}

/* The same with neighbours that differ in one thing: the block size, the dtype and its x, the kv heads, x, the dtype
 * alone. */
static void copy_blocks_of_neighbours(folio_vllm06_state *state)
{
    static const struct {
        folio_dtype dtype;
        int32_t x, block_size, num_kv_heads;
    } shapes[] = {{FOLIO_F16, 8, 8, 2},  {FOLIO_F16, 8, 16, 2}, {FOLIO_F32, 4, 16, 2},
                  {FOLIO_F32, 4, 16, 1}, {FOLIO_F32, 1, 16, 1}, {FOLIO_F16, 1, 16, 1}};
    enum { SHAPES = COUNT_OF(shapes) };
    bed beds[SHAPES];
    folio_vllm06_kv_cache caches[SHAPES];
    for (int i = 0; i < SHAPES; i++) {
        bed_open(&beds[i], state, shapes[i].dtype, shapes[i].x, 64, shapes[i].block_size,
                 short_lens);
        beds[i].c.num_kv_heads = shapes[i].num_kv_heads;
        beds[i].c.num_blocks *= KV_HEADS / shapes[i].num_kv_heads; /* of the same memory */
        for (int64_t k = 0; k < beds[i].c.num_blocks; k++) is_filled(&beds[i], k, k, true);
        caches[i] = beds[i].c;
        caches[i].num_blocks = 100; /* the first of each */
    }
    const folio_block_pair pairs[] = {{99, 1}, {98, 2}};
    CHECK_OK(folio_vllm06_copy_blocks(state, caches, SHAPES, pairs, 2, NULL));
    for (int i = 0; i < SHAPES; i++) {
        for (int64_t k = 0; k < beds[i].c.num_blocks; k++)
            CHECK(is_filled(&beds[i], k, k == 1 ? 99 : k == 2 ? 98 : k, false));
        bed_close(&beds[i]);
    }
}

/* Caches of several shapes in one call: those of one shape side by side go together. */
OPS_TEST(copy_blocks_of_all_shapes)
{
    static const int32_t sizes[] = {64, 64, 32, 64};
    bed beds[4];
    folio_vllm06_kv_cache caches[4];
    for (int i = 0; i < 4; i++) {
        bed_open(&beds[i], state, FOLIO_F16, 8, sizes[i], 8, short_lens);
        caches[i] = beds[i].c;
    }
    int64_t last = caches[0].num_blocks - 1;
    const folio_block_pair pairs[] = {{last, 1}, {last - 1, 2}};
    CHECK_OK(folio_vllm06_copy_blocks(state, caches, 4, pairs, 2, NULL));
    for (int i = 0; i < 4; i++)
        CHECK(same_block(&beds[i], last, &beds[i], 1) &&
              same_block(&beds[i], last - 1, &beds[i], 2));
    const folio_block_pair others[] = {{last, 3}};
    caches[3].bytes--; /* the last of them is refused before the first is written */
    REJECTED(folio_vllm06_copy_blocks(state, caches, 4, others, 1, NULL), "bytes is");
    caches[3] = beds[3].c;
    for (int i = 2; i < 4; i++) { /* of another shape than the first, and of the same */
        caches[i].num_blocks--;
        REJECTED(folio_vllm06_copy_blocks(state, caches, 4, others, 1, NULL),
                 i == 2 ? "caches[2] has 339 blocks" : "caches[3] has 339 blocks");
        caches[i].num_blocks++;
    }
    for (int i = 0; i < 4; i++) {
        CHECK(!same_block(&beds[i], last, &beds[i], 3));
        bed_close(&beds[i]);
    }
    copy_blocks_of_neighbours(state);
}

#define BAD_STORE(change, words)                                                                   \
    do {                                                                                           \
        folio_vllm06_kv_cache c = b.c;                                                             \
        int64_t slots[] = {3, 4};                                                                  \
        folio_vllm06_reshape_and_cache_args a = bed_store_args(&b, row, row, FOLIO_F32, 2, slots); \
        change;                                                                                    \
        REJECTED(folio_vllm06_reshape_and_cache(state, &a, &c, NULL), words);                      \
        CHECK(support_is_poison(b.k.data, b.k.bytes) && support_is_poison(b.v.data, b.v.bytes));   \
    } while (0)

OPS_TEST(reshape_and_cache_errors)
{
    static float row[2 * KV_HEADS * 32];
    bed b;
    bed_open(&b, state, FOLIO_F32, 4, 32, 8, short_lens);
    support_buffer_poison(&b.k);
    support_buffer_poison(&b.v);
    BAD_STORE(slots[1] = b.c.num_blocks * 8, "slots[1]");
    BAD_STORE(slots[1] = -2, "slots[1]");
    BAD_STORE(a.slot_mapping = NULL, "slots");
    BAD_STORE(a.key = NULL, "");
    BAD_STORE(a.value = NULL, "");
    BAD_STORE(a.num_tokens = -1, "-1");
    BAD_STORE(a.dtype = FOLIO_FP8_E4M3, "fp8_e4m3");
    BAD_STORE(a.x = 8, "x is 8");
    BAD_STORE(c.dtype = (folio_dtype)0, "");
    BAD_STORE(c.key_cache = NULL, "");
    BAD_STORE(c.value_cache = NULL, "K and V in one allocation");
    BAD_STORE(c.num_blocks = 0, "0 blocks");
    BAD_STORE(c.head_size = 30, "30");
    BAD_STORE(c.bytes--, "each; bytes is");
    BAD_STORE(c.num_blocks *= 4, "each; bytes is"); /* bytes taken for elements */
    BAD_STORE(a.k_scale = -1.0f, "k_scale is -1");
    BAD_STORE(a.v_scale = -1.0f, "v_scale is -1");
    BAD_STORE(a.k_scale = NAN, "k_scale is");
    BAD_STORE(a.v_scale = NAN, "v_scale is");
    BAD_STORE(a.k_scale = INFINITY, "k_scale is inf");
    BAD_STORE(a.v_scale = INFINITY, "v_scale is inf");
    if (strcmp(backend, "cuda") != 0) { /* there each array is brought to a place of its own */
        BAD_STORE(c.value_cache = (char *)c.key_cache + 4, "key_cache and value_cache share");
        BAD_STORE(a.key = (float *)b.k.data + 32, "k and layer 0 of the cache share memory");
        BAD_STORE(a.value = (float *)b.k.data + 32, "v and layer 0 of the cache share memory");
        BAD_STORE(a.key = (float *)b.v.data + 32, "k and layer 0 of the cache share memory");
        BAD_STORE(a.value = (float *)b.v.data + 32, "v and layer 0 of the cache share memory");
    }
    int64_t slot = -1; /* stores nothing */
    CHECK_OK(bed_store(&b, row, row, FOLIO_F32, 1, 0, 0, &slot, NULL));
    CHECK(support_is_poison(b.k.data, b.k.bytes) && support_is_poison(b.v.data, b.v.bytes));
    folio_vllm06_reshape_and_cache_args a = bed_store_args(&b, row, row, FOLIO_F32, 1, &slot);
    REJECTED(folio_vllm06_reshape_and_cache(NULL, &a, &b.c, NULL), "state");
    REJECTED(folio_vllm06_reshape_and_cache(state, &a, NULL, NULL), "cache");
    REJECTED(folio_vllm06_reshape_and_cache(state, NULL, &b.c, NULL), "NULL");
    bed_close(&b);
}

#define BAD_ATTENTION(change, words)                                                               \
    do {                                                                                           \
        folio_vllm06_kv_cache c = b.c;                                                             \
        folio_vllm06_paged_attention_args a = bed_arguments(&b);                                   \
        change;                                                                                    \
        for (int v = 1; v <= 2; v++) REJECTED(bed_run(&b, v, &a, &c, NULL), words);                \
        CHECK(bed_is_untouched(&b));                                                               \
    } while (0)

OPS_TEST(paged_attention_errors)
{
    static const float nan_slopes[HEADS] = {0, 0, NAN, 0}, inf_slopes[HEADS] = {0, -INFINITY, 0, 0};
    bed b;
    bed_open(&b, state, FOLIO_F32, 4, 32, 8, short_lens);
    BAD_ATTENTION(a.max_seq_len = 39, "seq_lens[0] = 530|39");
    BAD_ATTENTION(a.max_seq_len = 529, "seq_lens[0] = 530|529");
    BAD_ATTENTION(a.max_num_blocks_per_seq = 4, "");
    BAD_ATTENTION(a.max_num_blocks_per_seq = 66, ""); /* one block less than 530 keys have */
    BAD_ATTENTION(a.max_num_blocks_per_seq = -1, "max_num_blocks_per_seq -1 is negative");
    BAD_ATTENTION(a.max_num_blocks_per_seq = INT64_MAX, "exceed the largest size");
    BAD_ATTENTION(a.max_num_blocks_per_seq = INT64_MAX / 8, "exceed the largest size");
    BAD_ATTENTION(a.block_tables = NULL, "block_tables");
    BAD_ATTENTION(a.seq_lens = NULL, "seq_lens");
    BAD_ATTENTION(a.num_seqs = -1, "num_seqs -1");
    BAD_ATTENTION(a.num_heads = 3, "3");
    BAD_ATTENTION(a.query = NULL, "");
    BAD_ATTENTION(a.out = NULL, "");
    BAD_ATTENTION(a.dtype = FOLIO_FP8_E4M3, "fp8_e4m3");
    if (strcmp(backend, "cuda") != 0) { /* numbers on a device are not looked at */
        BAD_ATTENTION(a.alibi_slopes = nan_slopes, "slopes[2]");
        BAD_ATTENTION(a.alibi_slopes = inf_slopes, "slopes[1]");
    }
    BAD_ATTENTION(a.struct_size = 0, "struct_size");
    BAD_ATTENTION(a.x = 3, "x is 3");
    BAD_ATTENTION(a.k_scale = -1.0f, "k_scale is -1");
    BAD_ATTENTION(a.k_scale = NAN, "k_scale is");
    BAD_ATTENTION(a.k_scale = INFINITY, "k_scale is inf");
    BAD_ATTENTION(a.v_scale = -1.0f, "v_scale is -1");
    BAD_ATTENTION(a.v_scale = NAN, "v_scale is");
    BAD_ATTENTION(a.v_scale = INFINITY, "v_scale is inf");
    BAD_ATTENTION(c.key_cache = NULL, "NULL");
    BAD_ATTENTION(c.value_cache = NULL, "K and V in one allocation");
    BAD_ATTENTION(c.bytes--, "each; bytes is");
    b.tables[0] = (int32_t)b.c.num_blocks;
    BAD_ATTENTION((void)0, "block_table");
    b.tables[0] = -1;
    BAD_ATTENTION((void)0, "block_table");
    b.tables[0] = 0;
    b.tables[512 / 8] = (int32_t)b.c.num_blocks; /* found before the first partition is computed */
    BAD_ATTENTION((void)0, "block_table");
    b.tables[512 / 8] = 0;
    b.lens[2] = -1;
    BAD_ATTENTION((void)0, "seq_lens[2]");
    b.lens[2] = 1;
    folio_vllm06_paged_attention_args a = bed_arguments(&b);
    REJECTED(folio_vllm06_paged_attention_v1(state, NULL, &b.c, NULL), "NULL");
    REJECTED(folio_vllm06_paged_attention_v1(NULL, &a, &b.c, NULL), "state");
    REJECTED(folio_vllm06_paged_attention_v1(state, &a, NULL, NULL), "cache");
    static const char *const names[] = {"exp_sums", "max_logits", "tmp_out"};
    for (int i = 0; i < 5; i++) { /* NULL, then not aligned */
        char words[32];
        float *scratch[] = {b.sums.data, b.tops.data, b.tmp.data};
        scratch[i % 3] = i < 3 ? NULL : (float *)(void *)((char *)scratch[i % 3] + 1);
        snprintf(words, sizeof words, i < 3 ? "%s" : "%s|align", names[i % 3]);
        REJECTED(folio_vllm06_paged_attention_v2(state, &a, &b.c, scratch[0], scratch[1],
                                                 scratch[2], NULL),
                 words);
    }
    CHECK(bed_is_untouched(&b));
    a.num_seqs = 0;
    a.seq_lens = a.block_tables = NULL;
    CHECK_OK(folio_vllm06_paged_attention_v1(state, &a, &b.c, NULL));
    CHECK_OK(folio_vllm06_paged_attention_v2(state, &a, &b.c, NULL, NULL, NULL, NULL));
    CHECK(support_is_poison(b.out.data, b.out.bytes));
    bed_close(&b);
    bed_open(&b, state, FOLIO_F32, 4, 32, 24, short_lens);
    a = bed_arguments(&b);
    REJECTED(bed_run(&b, 2, &a, &b.c, NULL), "block_size 24 does not divide");
    bed_close(&b);
}

/* What v2 writes, then what it reads. */
enum { OUT, SUMS, TOPS, TMP, NUM_WRITTEN, QUERY = NUM_WRITTEN, SLOPES, KEYS, VALUES, NUM_PLACES };

static folio_status run_at(bed *b, float *const at[NUM_PLACES], int v)
{
    folio_vllm06_paged_attention_args a = bed_arguments(b);
    folio_vllm06_kv_cache c = b->c;
    a.out = at[OUT];
    a.query = at[QUERY];
    a.alibi_slopes = at[SLOPES];
    c.key_cache = at[KEYS];
    c.value_cache = at[VALUES];
    if (v == 1) return folio_vllm06_paged_attention_v1(b->state, &a, &c, NULL);
    return folio_vllm06_paged_attention_v2(b->state, &a, &c, at[SUMS], at[TOPS], at[TMP], NULL);
}

/* Place k begins at `to`, the last number of place i: rejected, with nothing written. v1 writes out only. */
static void overlap(bed *b, float *const apart[NUM_PLACES], int k, int i, float *to,
                    const support_buffer *written)
{
    static const char *const names[NUM_PLACES] = {"out",       "exp_sums",   "max_logits",
                                                  "tmp_out",   "query",      "alibi_slopes",
                                                  "key_cache", "value_cache"};
    char words[64];
    float *at[NUM_PLACES];
    bool slopes = k == SLOPES && i == OUT; /* for v1 finite, as NaN is rejected too */
    memcpy(at, apart, sizeof at);
    at[k] = to;
    snprintf(words, sizeof words, "%s and %s share memory", names[k < i ? k : i],
             names[k < i ? i : k]);
    REJECTED(run_at(b, at, 2), words);
    CHECK(support_is_poison(written->data, written->bytes));
    if ((k == OUT ? i : k) < QUERY || (k != OUT && i != OUT)) return;
    if (slopes) memset(to, 0, HEADS * sizeof *to);
    REJECTED(run_at(b, at, 1), "share memory");
    if (slopes) memset(to, 0xFF, HEADS * sizeof *to);
    CHECK(support_is_poison(written->data, written->bytes));
}

/* tmp_out would have 2^61 bytes, one more than the largest size. */
static void tmp_out_too_large(folio_vllm06_state *state)
{
    static const int32_t no_lens[1 << 13];
    static float scratch[3];
    bed b;
    bed_open(&b, state, FOLIO_F32, 4, 256, 8, short_lens);
    folio_vllm06_paged_attention_args a = bed_arguments(&b);
    a.num_seqs = COUNT_OF(no_lens);
    a.seq_lens = no_lens;
    a.max_num_blocks_per_seq = 0;
    a.num_heads = 1 << 16;
    a.max_seq_len = INT32_MAX;
    REJECTED(
        folio_vllm06_paged_attention_v2(state, &a, &b.c, scratch, scratch + 1, scratch + 2, NULL),
        "8192 sequences x 4194304 partitions exceed the largest size");
    bed_close(&b);
}

/* Two partitions. Each place in turn begins at the last number of each place that is written, and what is written at
 * the last number of each place that is read. */
OPS_TEST(paged_attention_overlap)
{
    enum { ROWS = SEQS * HEADS, ROOM = 0x40000 };
    if (strcmp(backend, "cuda") == 0)
        return; /* there each array is brought to a place of its own */
    bed b;
    bed_open(&b, state, FOLIO_F32, 4, 32, 8, short_lens);
    const int64_t sizes[NUM_PLACES] = {[OUT] = ROWS * 32,
                                       [SUMS] = ROWS * 2,
                                       [TOPS] = ROWS * 2,
                                       [TMP] = ROWS * 2 * 32,
                                       [QUERY] = ROWS * 32,
                                       [SLOPES] = HEADS,
                                       [KEYS] = (int64_t)(b.k.bytes / sizeof(float)),
                                       [VALUES] = (int64_t)(b.v.bytes / sizeof(float))};
    const void *const from[NUM_PLACES] = {
        [QUERY] = b.query, [SLOPES] = b.slopes, [KEYS] = b.k.data, [VALUES] = b.v.data};
    support_buffer memory = support_buffer_make((size_t)NUM_WRITTEN * ROOM * sizeof(float));
    support_buffer sources =
        support_buffer_make((size_t)(NUM_PLACES - NUM_WRITTEN) * ROOM * sizeof(float));
    float *apart[NUM_PLACES]; /* ROOM is more than the largest place has: none reaches the next */
    for (int i = 0; i < NUM_PLACES; i++) {
        CHECK(sizes[i] + ROWS * 2 * 32 <= ROOM);
        apart[i] = (float *)(i < QUERY ? memory.data : sources.data) + (int64_t)(i % QUERY) * ROOM;
        if (i >= QUERY) memcpy(apart[i], from[i], (size_t)sizes[i] * sizeof(float));
    }
    for (int k = 0; k < NUM_PLACES; k++)
        for (int i = 0; i < NUM_PLACES; i++)
            if (k != i && (k < QUERY || i < QUERY))
                overlap(&b, apart, k, i, apart[i] + sizes[i] - 1, &memory);
    float *at[NUM_PLACES];
    memcpy(at, apart, sizeof at);
    at[OUT] = apart[QUERY]; /* out may be query itself */
    for (int v = 1; v <= 2; v++) {
        CHECK_OK(run_at(&b, apart, v));
        CHECK_OK(run_at(&b, at, v));
        CHECK(memcmp(at[OUT], apart[OUT], (size_t)sizes[OUT] * sizeof(float)) == 0);
        memcpy(apart[QUERY], b.query, (size_t)sizes[OUT] * sizeof(float));
    }
    support_buffer_free(&memory);
    support_buffer_free(&sources);
    bed_close(&b);
    tmp_out_too_large(state);
}
