/* vllm06_same_forward_errors.c: calls of forward that are refused, with nothing written; see vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

#include <math.h>

static const v06_seq prompts[] = {{0, true, 13, 13, 0}, {1, true, 8, 8, 0}};
static const v06_seq others[] = {{2, true, 13, 13, 0}, {3, true, 8, 8, 0}}; /* not stored yet */
static const v06_seq decodes[] = {{1, false, 1, 9, 11}, {0, false, 1, 14, 20}};
static const v06_seq both[] = {{2, true, 4, 4, 0}, {1, false, 1, 9, 0}};
static const v06_seq encoded[] = {{0, true, 6, 6, 11}, {1, true, 9, 17, 20}};
static const v06_seq chunk[] = {{0, true, 5, 18, 0}};

/* A step of each kind and type. */
typedef struct {
    const v06_seq *seqs;
    int num_seqs;
    folio_attention_type type;
    bool no_key, no_cache;
} call;
static const call calls[] = {
    {others, 2, DECODER, false, false},       {prompts, 2, DECODER, false, true},
    {decodes, 2, DECODER, false, false},      {both, 2, DECODER, false, false},
    {prompts, 2, ENCODER_ONLY, false, false}, {encoded, 2, ENCODER, false, false},
    {encoded, 2, CROSS, false, false},        {encoded, 2, CROSS, true, false},
    {decodes, 2, CROSS, true, false}};

/* The fields of the call's step; its metadata is to be made. */
static void fields_of(v06 *r, const call *c)
{
    r->no_key = c->no_key;
    r->no_cache = c->no_cache;
    v06_fields(r, c->seqs, c->num_seqs);
}

/* A change to the arguments of one call, and the sentence it must bring; kv is its cache, if it has one. */
#define BAD(change, words)                                                                         \
    do {                                                                                           \
        folio_vllm06_forward_args a = v06_args(r, c->type);                                        \
        folio_vllm06_kv_cache kv = r->kv[c->type == CROSS];                                        \
        if (a.kv_cache != NULL) a.kv_cache = &kv;                                                  \
        change;                                                                                    \
        V06_REJECTED(r, &a, words);                                                                \
    } while (0)

static void bad_arguments(v06 *r, const call *c)
{
    const float bad[] = {-1.0f, NAN, INFINITY};
    /* cuda: what a tensor is said to have is brought to the device, so it has no row more */
    bool host = strcmp(r->compute, "cuda") != 0;
    BAD(a.query.tokens--, "query: tokens is");
    BAD(a.output.tokens--, "output: tokens is");
    if (host) BAD(a.query.tokens++, "query: tokens is");
    if (host) BAD(a.output.tokens++, "output: tokens is");
    BAD(a.query.data = NULL, "query");
    BAD(a.output.data = NULL, "output");
    BAD(a.query.dtype = FOLIO_F16, "query is f16");
    BAD(a.output.dtype = FOLIO_F16, "output f16");
    BAD(a.attn_metadata = NULL, "attn_metadata is NULL");
    BAD(a.attn_type = (folio_attention_type)4, "attention type 4 is unknown");
    BAD(a.attn_type = (folio_attention_type)-1, "attention type -1 is unknown");
    BAD(a.struct_size = 0, "struct_size");
    for (int i = 0; i < 3; i++) BAD(a.k_scale = bad[i], "k_scale is");
    for (int i = 0; i < 3; i++) BAD(a.v_scale = bad[i], "v_scale is");
    if (r->f.num_decode_tokens > 0) BAD(a.kv_cache = NULL, "kv_cache is NULL|decodes need one");
    if (c->no_key) return;
    BAD(a.key.tokens--, "key: tokens is");
    BAD(a.value.tokens--, "value: tokens is");
    if (host) BAD(a.key.tokens++, "key: tokens is");
    if (host) BAD(a.value.tokens++, "value: tokens is");
    BAD(a.key.dtype = FOLIO_FP8_E4M3, "key|fp8_e4m3");
    BAD(a.value.dtype = FOLIO_F64, "value|f64");
    BAD(a.key = (folio_tensor){0}, "must both be set");
    BAD(a.value = (folio_tensor){0}, "must both be set");
    if (c->type != CROSS) BAD(a.key = a.value = (folio_tensor){0}, "key and value are NULL");
}

static void bad_caches(v06 *r, const call *c)
{
    BAD(kv.key_cache = NULL, "kv_cache: key_cache is NULL");
    BAD(kv.dtype = FOLIO_F16, "kv_cache is f16, the layer's kv_cache_dtype is f32");
    BAD(kv.dtype = FOLIO_FP8_E4M3, "kv_cache is fp8_e4m3, the layer's kv_cache_dtype is f32");
    BAD(kv.num_kv_heads /= 2, "kv_cache has 1 kv heads x 32, the layer 2 x 32");
    BAD(kv.head_size /= 2, "kv_cache has 2 kv heads x 16, the layer 2 x 32");
    BAD(kv.num_blocks = 0, "kv_cache: 0 blocks");
    BAD(kv.bytes--, "K and V in one allocation; bytes is");
    BAD(kv.num_blocks *= 64, "K and V in one allocation; bytes is");
}

/* One entry of a step's arrays, or a stride. */
enum { SLOTS, CROSS_SLOTS, TABLES, CROSS_TABLES, STRIDE, CROSS_STRIDE };

static void bad_entries(v06 *r)
{
    enum { BEYOND = -99 }; /* the first that the cache does not have */
    static const call cross = {decodes, 2, CROSS, true, false};
    static const call cached = {encoded, 2, CROSS, true, false}, chunks = {chunk, 1, DECODER, 0, 0};
    static const struct {
        const call *c;
        int array, at, value;
        const char *words;
    } cases[] = {
        {&calls[0], SLOTS, 3, BEYOND, "slot"},
        {&calls[0], SLOTS, 3, -2, "slot"}, /* no padding, as in the originals */
        {&calls[2], SLOTS, 0, BEYOND, "slot"},
        {&calls[2], SLOTS, 1, -2, "slot"},
        {&calls[6], CROSS_SLOTS, 3, BEYOND, "slots[3]|outside [-1,"},
        {&calls[6], CROSS_SLOTS, 3, -2, "slots[3]|outside [-1,"},
        {&calls[2], TABLES, 1, BEYOND, "block_table"},
        {&calls[2], TABLES, 1, -1, "block_table"},
        {&calls[2], STRIDE, 0, 1, "block table has 1 blocks"},
        {&chunks, TABLES, 1, BEYOND, "block_table[1]"},
        {&chunks, TABLES, 1, -1, "block_table[1]"},
        {&chunks, STRIDE, 0, 1, "1 blocks of 8|13 cached tokens need 2"},
        {&cross, CROSS_TABLES, 1, BEYOND, "cross_block_table"},
        {&cross, CROSS_TABLES, 1, -1, "cross_block_table"},
        {&cross, CROSS_STRIDE, 0, 1, "11 cached tokens need 2|block table has 1 blocks of 8"},
        {&cached, CROSS_TABLES, 0, BEYOND, "cross_block_table"}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        int array = cases[i].array, at = cases[i].at;
        fields_of(r, cases[i].c);
        int64_t value = cases[i].value != BEYOND ? cases[i].value
                        : array <= CROSS_SLOTS   ? r->num_blocks * r->block_size
                                                 : r->num_blocks;
        if (array <= CROSS_SLOTS) (array == SLOTS ? r->slots : r->cross_slots)[at] = value;
        else if (array <= CROSS_TABLES)
            (array == TABLES ? r->tables : r->cross_tables)[at] = (int32_t)value;
        else
            *(array == STRIDE ? &r->f.block_tables_stride : &r->f.cross_block_tables_stride) =
                value;
        v06_remake(r);
        V06_REJECTS(r, cases[i].c->type, cases[i].words);
    }
    fields_of(r, &calls[0]);
    r->f.slot_mapping = NULL;
    v06_remake(r);
    V06_REJECTS(r, DECODER, "slot_mapping is NULL");
    fields_of(r, &calls[2]);
    r->f.block_tables = NULL;
    v06_remake(r);
    V06_REJECTS(r, DECODER, "block table has 0 blocks");
    fields_of(r, &calls[6]);
    r->cross_slots[3] = -1; /* stored nowhere */
    v06_rerun(r, "X");
    static const v06_seq fresh[] = {{4, false, 1, 1, 0}};
    v06_fields(r, fresh, 1);
    r->slots[0] = -1; /* its own key is missing, then */
    v06_remake(r);
    const folio_vllm06_forward_args a = v06_args(r, DECODER);
    CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
    v06_check_images(r);
}

/* Prompts without a token whose encoder has some, the first or the last; encoders are new, or cached. Tokens from
 * earlier steps, which encoder-only attention has no cache of, and decodes. A chunk without a cache. */
static void bad_steps(v06 *r)
{
    static const v06_seq no_token[] = {{0, true, 0, 0, 5}, {1, true, 6, 6, 11}, {0, true, 0, 0, 5}};
    static const v06_seq as_many[] = {{0, true, 3, 4, 0}, {1, false, 1, 9, 0}};
    static const struct {
        call c;
        const char *words;
    } cases[] = {{{no_token, 2, CROSS, false, false}, "prompt 0 has no token|encoder has 5"},
                 {{no_token + 1, 2, CROSS, false, false}, "prompt 1 has no token"},
                 {{no_token, 2, CROSS, true, false}, "prompt 0 has no token|encoder has 5"},
                 {{no_token + 1, 2, CROSS, true, false}, "prompt 1 has no token"},
                 {{chunk, 1, ENCODER_ONLY, false, false}, "18 tokens|5 rows"},
                 {{chunk, 1, ENCODER_ONLY, false, true}, "18 tokens|5 rows"},
                 {{both, 2, ENCODER_ONLY, false, false}, "1 decodes"},
                 {{as_many, 2, ENCODER_ONLY, false, true}, "1 decodes"},
                 {{chunk, 1, DECODER, false, true}, ""}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        fields_of(r, &cases[i].c);
        v06_remake(r);
        V06_REJECTS(r, cases[i].c.type, cases[i].words);
    }
}

/* Of prompt 1, which has 8 rows, or 9 and 20 keys of its encoder: for a row or a key less or more, or for one, which
 * PyTorch would spread. */
static void bad_biases(v06 *r)
{
    static const float x[2 * 21 * 21];
    static const struct {
        const call *c;
        folio_vllm06_bias first, second;
    } cases[] = {{&calls[0], {x, 1, 13, 13}, {x, 1, 8, 8}},
                 {&calls[4], {x, 1, 13, 13}, {x, 1, 8, 8}},
                 {&calls[5], {x, 1, 11, 11}, {x, 1, 20, 20}},
                 {&calls[6], {x, 1, 6, 11}, {x, 1, 9, 20}},
                 {&calls[7], {x, 1, 6, 11}, {x, 1, 9, 20}}};
    static const int64_t no_sizes[][3] = {{0, 8, 8}, {1, -1, 8}, {1, 8, -1}, {1, INT64_MAX / 8, 1}};
    const folio_vllm06_bias *got;
    folio_vllm06_bias biases[2];
    for (int i = 0; i < 7 * COUNT_OF(cases); i++) {
        biases[0] = cases[i / 7].first;
        biases[1] = cases[i / 7].second;
        int64_t *size = i % 7 < 3 ? &biases[1].query_len : &biases[1].key_len;
        if (i % 7 == 6) biases[1].num_heads = 2;
        else *size = i % 3 == 0 ? 1 : *size + i % 3 * 2 - 3;
        fields_of(r, cases[i / 7].c);
        v06_remake(r);
        CHECK_OK(folio_vllm06_set_attn_bias(r->m, cases[i / 7].c->type, biases));
        V06_REJECTS(r, cases[i / 7].c->type,
                    i % 7 == 6 ? "attn_bias[1]|2 heads" : "attn_bias[1] is for");
    }
    biases[1].data = NULL;
    REJECTED(folio_vllm06_set_attn_bias(r->m, DECODER, biases), "[1]");
    REJECTED(folio_vllm06_get_attn_bias(NULL, DECODER, &got), "NULL");
    REJECTED(folio_vllm06_get_attn_bias(r->m, DECODER, NULL), "out");
    for (int i = 0; i < COUNT_OF(no_sizes); i++) {
        biases[1] = (folio_vllm06_bias){x, no_sizes[i][0], no_sizes[i][1], no_sizes[i][2]};
        REJECTED(folio_vllm06_set_attn_bias(r->m, DECODER, biases), "attn_bias[1]: num_heads");
    }
}

/* output may be query itself, but in cross attention: the same bits. It may not lie some rows behind, though rows of a
 * part of the step would be apart; prompts with biases run one by one, decodes run after prompts. */
static void output_is_query(v06 *r, folio_attention_type type, int64_t rows)
{
    v06_run_as(r, type);
    support_buffer apart = support_buffer_make(r->out.bytes);
    support_buffer twice = support_buffer_make(2 * r->out.bytes);
    memcpy(apart.data, r->out.data, r->out.bytes);
    folio_vllm06_forward_args a = v06_args(r, type);
    size_t row = (size_t)v06_width(r) * folio_dtype_size(r->d.dtype);
    memcpy(twice.data, r->q, apart.bytes);
    a.query.data = twice.data;
    a.output.data = (char *)twice.data + (size_t)rows * row;
    V06_REJECTED(r, &a, "output and query share memory");
    a.output.data = a.query.data;
    a.output.token_stride = v06_width(r) + 8;
    V06_REJECTED(r, &a, "output and query share memory"); /* they begin alike */
    a.output = a.query;
    CHECK(memcmp(twice.data, r->q, apart.bytes) == 0);
    if (type == CROSS) V06_REJECTED(r, &a, "output and query share memory");
    else CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
    CHECK(type == CROSS || memcmp(twice.data, apart.data, apart.bytes) == 0);
    support_buffer_free(&twice);
    support_buffer_free(&apart);
}

/* Each pair that may not share memory. Encoders do not use the cache: their inputs may lie in it, and it stays as it
 * is. */
static void bad_pairs(v06 *r, const call *c)
{
    static const char *const names[] = {"query", "key", "value", "output"};
    bool cached = c->type == DECODER || c->type == CROSS;
    const folio_vllm06_kv_cache *cache = &r->kv[c->type == CROSS];
    for (int i = 0; i < 10; i++) {
        char words[64];
        folio_vllm06_forward_args a = v06_args(r, c->type);
        folio_tensor *tensors[] = {&a.query, &a.key, &a.value, &a.output};
        if (tensors[i % 4]->data == NULL || (i < 3 && tensors[i]->tokens == 0)) continue;
        if (i < 3) a.output.data = (float *)tensors[i]->data + 1;
        else tensors[i % 4]->data = (char *)cache->key_cache + (i < 6 ? 0 : cache->bytes / 2);
        bool out = i < 3 || i % 4 == 3;
        snprintf(words, sizeof words, "%s and %s share memory", out ? "output" : "kv_cache",
                 i % 4 == 3 ? "kv_cache" : names[i % 4]);
        if (cached || i < 3) V06_REJECTED(r, &a, words);
        else if (i % 4 != 3) CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
        v06_check_images(r);
    }
}

V06_TEST(forward_errors)
{
    static const float x[13 * 13];
    static const folio_vllm06_bias biases[] = {{x, 1, 13, 13}, {x, 1, 8, 8}};
    v06_play(r, prompts, 2, "D");
    for (int i = 0; i < COUNT_OF(calls); i++) {
        const call *c = &calls[i];
        fields_of(r, c);
        v06_remake(r);
        bad_arguments(r, c);
        if (!c->no_cache && (c->type == DECODER || c->type == CROSS)) bad_caches(r, c);
        /* on a device each array is brought to a place of its own */
        if (strcmp(r->compute, "cuda") == 0 || c->no_cache || c->no_key) continue;
        bad_pairs(r, c);
        output_is_query(r, c->type, c->num_seqs - 1);
        if (c->seqs != prompts && c->seqs != others) continue;
        CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, biases));
        output_is_query(r, c->type, 13);
    }
    bad_entries(r);
    bad_steps(r);
    bad_biases(r);
    REJECTED(folio_vllm06_forward(NULL, &(folio_vllm06_forward_args){.struct_size = 8}, NULL),
             "impl");
    REJECTED(folio_vllm06_forward(r->impl, NULL, NULL), "NULL");
}
