/*
 * test_vllm06_ops.c: the plain operators, over the rig's steps: reshape_and_cache leaves the image of the layout byte
 * for byte; paged_attention v1 and v2 give what dense attention gives. xformers stands for x-packed caches, ipex for
 * those with x = 1; K and V are two tensors.
 */
#include "vllm06/vllm06_rig.h"

#include <math.h>

enum { SEQS = 5, LONGEST = 1100, ROWS = SEQS * 4 };

#define OPS_TEST(name)                                                                             \
    static void name(v06 *r);                                                                      \
    TEST(vllm06_ops, name) { v06_on_one("xformers", name); }                                       \
    static void name(v06 *r)
#define OPS_TEST_OF_BOTH(name)                                                                     \
    static void name(v06 *r);                                                                      \
    TEST(vllm06_ops, name)                                                                         \
    {                                                                                              \
        v06_on_one("xformers", name);                                                              \
        v06_on_one("ipex", name);                                                                  \
    }                                                                                              \
    static void name(v06 *r)

/* ---------------------------------------------------------------------------- reshape_and_cache */

static folio_vllm06_kv_cache cache_of(const v06 *r) { return v06_in_two(&r->kv[0]); }

/* Of the step's keys and values. */
static folio_vllm06_reshape_and_cache_args store_arguments(v06 *r)
{
    const folio_vllm06_forward_args a = v06_args(r, DECODER);
    return FOLIO_WITH(folio_vllm06_reshape_and_cache_args, .key = a.key.data, .value = a.value.data,
                      .dtype = r->d.dtype, .x = (int32_t)r->x, .num_tokens = a.key.tokens,
                      .key_stride = a.key.token_stride, .value_stride = a.value.token_stride,
                      .slot_mapping = r->slots, .k_scale = r->k_scale, .v_scale = r->v_scale);
}

static void store(v06 *r, const v06_seq *seqs, int n)
{
    v06_fields(r, seqs, n);
    const folio_vllm06_reshape_and_cache_args a = store_arguments(r);
    const folio_vllm06_kv_cache c = cache_of(r);
    CHECK_OK(folio_vllm06_reshape_and_cache(r->state, &a, &c, NULL));
    v06_expect_stored(r, DECODER);
    v06_check_images(r);
}

static const v06_seq two_prompts[] = {{0, true, 13, 13, 0}, {1, true, 8, 8, 0}};

/* Rows of every type, side by side and at strides of their own. Slot -1 stores nothing, and of several tokens in one
 * slot the last is kept. */
OPS_TEST_OF_BOTH(reshape_and_cache)
{
    static const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};
    static const char *const names[] = {"auto", "fp8", "fp8_e5m2"};
    for (int i = 0; i < 18; i++) {
        v06_reset(r);
        r->d.dtype = dtypes[i % 3];
        r->d.kv_cache_dtype = names[i / 3 % 3];
        r->strided = i >= 9;
        if (i / 3 % 3 == 1) r->k_scale = 0.5f; /* 0 is 1 */
        if (i / 3 % 3 == 2) r->v_scale = 0.0625f;
        v06_fields(r, two_prompts, 2);
        r->slots[5] = -1;
        r->slots[17] = r->slots[20] = r->slots[2];
        folio_vllm06_reshape_and_cache_args a = store_arguments(r);
        const folio_vllm06_kv_cache c = cache_of(r);
        if (r->x != 1 && i % 2) a.x = 0; /* 16 / bytes */
        CHECK_OK(folio_vllm06_reshape_and_cache(r->state, &a, &c, NULL));
        v06_expect_stored(r, DECODER);
        v06_check_images(r);
    }
}

#define BAD_STORE(change, words)                                                                   \
    do {                                                                                           \
        folio_vllm06_reshape_and_cache_args a = store_arguments(r);                                \
        folio_vllm06_kv_cache c = cache_of(r);                                                     \
        int64_t slots[21] = {3};                                                                   \
        a.slot_mapping = slots;                                                                    \
        for (int i = 1; i < 21; i++) slots[i] = 3 + i;                                             \
        change;                                                                                    \
        REJECTED(folio_vllm06_reshape_and_cache(r->state, &a, &c, NULL), words);                   \
        v06_check_images(r);                                                                       \
    } while (0)

OPS_TEST(reshape_and_cache_errors)
{
    v06_fields(r, two_prompts, 2);
    BAD_STORE(slots[1] = c.num_blocks * 8, "slots[1]");
    BAD_STORE(slots[1] = -2, "slots[1]");
    BAD_STORE(a.slot_mapping = NULL, "slots");
    BAD_STORE(a.slot_mapping = (int64_t *)(void *)((char *)slots + 1), "slots|align");
    BAD_STORE(a.key = NULL, "");
    BAD_STORE(a.value = NULL, "");
    BAD_STORE(a.num_tokens = -1, "-1");
    BAD_STORE(a.num_tokens = INT64_MAX, "exceeds the largest size");
    BAD_STORE(a.dtype = FOLIO_FP8_E4M3, "fp8_e4m3");
    BAD_STORE(a.x = 8, "x is 8");
    BAD_STORE(a.struct_size = 0, "struct_size");
    BAD_STORE((c.dtype = (folio_dtype)0, a.x = 1), "dtype is 0");
    BAD_STORE(c.value_cache = NULL, "K and V in one allocation");
    BAD_STORE(c.head_size = 30, "30");
    BAD_STORE(a.k_scale = -1.0f, "k_scale is -1");
    BAD_STORE(a.v_scale = INFINITY, "v_scale is inf");
    if (strcmp(r->compute, "cuda") != 0) { /* there each array is brought to a place of its own */
        BAD_STORE(a.key = c.key_cache, "k and layer 0 of the cache share memory");
        BAD_STORE(a.value = c.value_cache, "v and layer 0 of the cache share memory");
    }
    const folio_vllm06_reshape_and_cache_args a = store_arguments(r);
    const folio_vllm06_kv_cache c = cache_of(r);
    REJECTED(folio_vllm06_reshape_and_cache(NULL, &a, &c, NULL), "state");
    REJECTED(folio_vllm06_reshape_and_cache(r->state, &a, NULL, NULL), "cache");
    REJECTED(folio_vllm06_reshape_and_cache(r->state, NULL, &c, NULL), "NULL");
}

/* ------------------------------------------------------------------------------ paged_attention */

/* Lengths around a block, a partition and two of them; 0 is padding. */
static const int32_t long_lens[SEQS] = {LONGEST, 0, 512, 513, 9};
static const int32_t short_lens[SEQS] = {530, 0, 16, 17, 1};
static const int32_t few_lens[SEQS] = {66, 0, 16, 17, 1}, no_lens[SEQS] = {0};

/* Sequences of these lengths are stored; the step is their last tokens. */
static void stored(v06 *r, const int32_t lens[SEQS])
{
    v06_seq prompts[SEQS], decodes[SEQS];
    r->max_tokens = 8;
    for (int i = 0; i < SEQS; i++) {
        if (r->max_tokens < lens[i] + 8) r->max_tokens = lens[i] + 8;
        prompts[i] = (v06_seq){i, true, lens[i], lens[i], 0};
        decodes[i] = (v06_seq){i, false, 1, lens[i], 0};
    }
    store(r, prompts, SEQS);
    v06_step(r, decodes, SEQS);
}

/* The step's, with everything that is written poisoned. */
static folio_vllm06_paged_attention_args arguments(v06 *r)
{
    const folio_vllm06_forward_args f = v06_args(r, DECODER);
    folio_vllm06_paged_attention_args a =
        FOLIO_WITH(folio_vllm06_paged_attention_args, .out = f.output.data, .query = f.query.data,
                   .query_stride = f.query.token_stride, .dtype = r->d.dtype,
                   .num_heads = r->d.num_heads, .num_seqs = r->num_seqs, .scale = r->d.scale,
                   .block_tables = r->tables, .max_num_blocks_per_seq = r->blocks_per_seq,
                   .seq_lens = r->lens, .alibi_slopes = r->d.alibi_slopes, .k_scale = r->k_scale,
                   .v_scale = r->v_scale, .x = (int32_t)r->x);
    for (int i = 0; i < r->num_seqs; i++)
        if (r->lens[i] > a.max_seq_len) a.max_seq_len = r->lens[i];
    return a;
}

static folio_status run(const v06 *r, int v, const folio_vllm06_paged_attention_args *a,
                        const folio_vllm06_kv_cache *c, const folio_run *on)
{
    if (v == 1) return folio_vllm06_paged_attention_v1(r->state, a, c, on);
    return folio_vllm06_paged_attention_v2(r->state, a, c, NULL, NULL, NULL, on);
}

static bool is_untouched(const v06 *r) { return support_is_poison(r->out.data, r->out.bytes); }

/* max_seq_len 0: the longest of the step. */
static void check(v06 *r, int64_t max_seq_len)
{
    const folio_vllm06_kv_cache c = cache_of(r);
    for (int v = 1; v <= 2; v++) {
        folio_vllm06_paged_attention_args a = arguments(r);
        if (max_seq_len > 0) a.max_seq_len = max_seq_len;
        CHECK_OK(run(r, v, &a, &c, NULL));
        v06_check_rows(r, DECODER);
    }
    v06_check_images(r);
}

/* Every size that the originals list and one that they do not, in turn with every type, scales and slopes. */
OPS_TEST_OF_BOTH(paged_attention_sizes)
{
    static const int32_t sizes[] = {32, 64, 80, 96, 112, 120, 128, 192, 256, 40};
    static const int32_t blocks[] = {8, 16, 32, 64, 24};
    static const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};
    static const char *const names[] = {"auto", "fp8", "auto", "fp8_e5m2"};
    for (int i = 0; i < 32; i++) {
        v06_reset(r);
        r->d.head_size = sizes[i % 10];
        r->block_size = i < 30 ? blocks[i % 3] : blocks[i - 27]; /* the last two are not listed */
        r->d.dtype = dtypes[i / 2 % 3];
        if (r->d.head_size % 16 == 0) r->d.kv_cache_dtype = names[i % 4];
        if (i % 2) r->k_scale = 0.5f; /* 0 is 1 */
        if (i % 3) r->v_scale = 0.0625f;
        if (i % 5 > 2) r->d.alibi_slopes = r->slopes;
        if (i % 4 > 1) r->d.scale = 0.11f; /* else the usual */
        stored(r, few_lens);
        check(r, 0);
    }
}

/* Long and short sequences, padding alone, and a max_seq_len past the longest. */
OPS_TEST(paged_attention_lengths)
{
    static const struct {
        const int32_t *lens;
        folio_dtype dtype;
        const char *kv;
        int64_t max_seq_len;
    } cases[] = {{long_lens, FOLIO_F32, "auto", 0},    {long_lens, FOLIO_F32, "auto", 2000},
                 {long_lens, FOLIO_F16, "fp8", 1536},  {short_lens, FOLIO_BF16, "auto", 0},
                 {short_lens, FOLIO_F32, "fp8", 1200}, {no_lens, FOLIO_F32, "auto", 0}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        v06_reset(r);
        r->d.dtype = cases[i].dtype;
        r->d.kv_cache_dtype = cases[i].kv;
        r->d.alibi_slopes = i % 2 ? r->slopes : NULL;
        r->strided = i % 2;
        stored(r, cases[i].lens);
        check(r, cases[i].max_seq_len);
    }
}

/* The state's plan follows what a call is given: other lengths, other blocks of the same lengths, blocks that sequences
 * share as forks do, more sequences. What was refused is refused again, and harms no other call. */
OPS_TEST(paged_attention_plans_anew)
{
    static const v06_seq steps[][3] = {
        {{0, false, 1, 530, 0}, {2, false, 1, 16, 0}},
        {{0, false, 1, 529, 0}, {2, false, 1, 16, 0}},
        {{0, false, 1, 16, 0}, {3, false, 1, 16, 0}},
        {{3, false, 1, 16, 0}, {0, false, 1, 16, 0}},
        {{0, false, 1, 530, 0}, {0, false, 1, 530, 0}},
        {{3, false, 1, 9, 0}, {0, false, 1, 9, 0}, {2, false, 1, 9, 0}}};
    stored(r, short_lens);
    const folio_vllm06_kv_cache c = cache_of(r);
    for (int i = 0; i < 2 * COUNT_OF(steps); i++) {
        v06_step(r, steps[i / 2], i / 2 == COUNT_OF(steps) - 1 ? 3 : 2);
        check(r, i % 2 ? 1200 : 0);
        folio_vllm06_paged_attention_args a = arguments(r);
        int32_t block = r->tables[0];
        r->tables[0] = (int32_t)r->num_blocks;
        for (int v = 1; v <= 2; v++) REJECTED(run(r, v, &a, &c, NULL), "block_table");
        CHECK(is_untouched(r));
        r->tables[0] = block;
    }
}

/* On a host backend there is no stream but NULL; another is refused, and nothing is written. A workspace, which no plan
 * of the caller's measured, is not used: it may be too small. */
OPS_TEST(streams)
{
    support_buffer small = support_buffer_make(1);
    const folio_run on_stream = {.struct_size = sizeof on_stream, .stream = r};
    const folio_run in_small = {
        .struct_size = sizeof in_small, .workspace = small.data, .workspace_size = small.bytes};
    stored(r, short_lens);
    const folio_vllm06_kv_cache c = cache_of(r);
    folio_vllm06_reshape_and_cache_args s = store_arguments(r);
    CHECK_OK(folio_vllm06_reshape_and_cache(r->state, &s, &c, &in_small));
    v06_expect_stored(r, DECODER);
    for (int v = 1; v <= 2; v++) {
        folio_vllm06_paged_attention_args a = arguments(r);
        bool host = strcmp(r->compute, "cuda") != 0; /* there every call has run on one */
        if (host) REJECTED(run(r, v, &a, &c, &on_stream), "stream");
        CHECK(!host || is_untouched(r));
        CHECK_OK(run(r, v, &a, &c, &in_small));
        v06_check_rows(r, DECODER);
        s = store_arguments(r);
        s.key = s.value; /* it would be seen */
        if (host) REJECTED(folio_vllm06_reshape_and_cache(r->state, &s, &c, &on_stream), "stream");
    }
    v06_check_images(r);
    CHECK(support_is_poison(small.data, small.bytes));
    support_buffer_free(&small);
}

#define BAD_ATTENTION(change, words)                                                               \
    do {                                                                                           \
        folio_vllm06_kv_cache c = cache_of(r);                                                     \
        folio_vllm06_paged_attention_args a = arguments(r);                                        \
        change;                                                                                    \
        for (int v = 1; v <= 2; v++) REJECTED(run(r, v, &a, &c, NULL), words);                     \
        CHECK(is_untouched(r));                                                                    \
    } while (0)
#define BAD_ENTRY(entry, value, words)                                                             \
    do {                                                                                           \
        int32_t before_ = entry;                                                                   \
        entry = value;                                                                             \
        BAD_ATTENTION((void)0, words);                                                             \
        entry = before_;                                                                           \
    } while (0)

OPS_TEST(paged_attention_errors)
{
    static const float nan_slopes[4] = {0, 0, NAN, 0};
    stored(r, short_lens);
    BAD_ATTENTION(a.max_seq_len = 529, "seq_lens[0] = 530|529");
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
    BAD_ATTENTION(a.query_stride = -1, "token_stride");
    BAD_ATTENTION(a.query_stride = 127, "token_stride");
    BAD_ATTENTION(a.query_stride = INT64_MAX, "token_stride");
    BAD_ATTENTION(a.struct_size = 0, "struct_size");
    BAD_ATTENTION(a.x = 3, "x is 3");
    BAD_ATTENTION(a.k_scale = NAN, "k_scale is");
    BAD_ATTENTION(a.v_scale = -1.0f, "v_scale is -1");
    BAD_ATTENTION(c.key_cache = NULL, "NULL");
    BAD_ATTENTION(c.bytes--, "each; bytes is");
    if (strcmp(r->compute, "cuda") != 0) { /* numbers on a device are not looked at */
        BAD_ATTENTION(a.alibi_slopes = nan_slopes, "slopes[2]");
        /* in place only where query is dense, as out is; there arrays have places of their own */
        BAD_ATTENTION((a.query = a.out, a.query_stride = 256), "share memory");
    }
    BAD_ENTRY(r->tables[0], -1, "block_table");
    BAD_ENTRY(r->tables[512 / 8], (int32_t)r->num_blocks, "block_table");
    BAD_ENTRY(r->lens[2], -1, "seq_lens[2]");
    folio_vllm06_paged_attention_args a = arguments(r);
    const folio_vllm06_kv_cache c = cache_of(r);
    REJECTED(folio_vllm06_paged_attention_v1(r->state, NULL, &c, NULL), "NULL");
    REJECTED(folio_vllm06_paged_attention_v1(NULL, &a, &c, NULL), "state");
    REJECTED(folio_vllm06_paged_attention_v1(r->state, &a, NULL, NULL), "cache");
    a.num_seqs = 0;
    a.seq_lens = a.block_tables = NULL;
    for (int v = 1; v <= 2; v++) CHECK_OK(run(r, v, &a, &c, NULL));
    CHECK(is_untouched(r));
}

/* out may be query itself, if query is dense. */
OPS_TEST(paged_attention_in_place)
{
    stored(r, short_lens);
    const folio_vllm06_kv_cache c = cache_of(r);
    for (int v = 1; v <= 2; v++) {
        folio_vllm06_paged_attention_args a = arguments(r);
        memcpy(r->out.data, r->q, r->out.bytes);
        a.query = a.out;
        CHECK_OK(run(r, v, &a, &c, NULL));
        v06_check_rows(r, DECODER);
    }
}
