/* vllm06_same_forward_errors.c: calls of forward that are refused, with nothing written; see vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

#include <math.h>
#include <stdlib.h>

static const v06_seq two_prompts[] = {{0, true, 13, 13, 0}, {1, true, 8, 8, 0}};
static const v06_seq two_others[] = {{2, true, 13, 13, 0}, {3, true, 8, 8, 0}}; /* not stored yet */
static const v06_seq two_decodes[] = {{1, false, 1, 9, 0}, {0, false, 1, 14, 0}};
static const v06_seq encoded_prompts[] = {{0, true, 6, 6, 11}, {1, true, 9, 17, 20}};
static const v06_seq encoded_decode[] = {{1, false, 1, 9, 20}};

/* A change to the arguments of one forward, and the sentence it must bring. */
#define BAD(change, words)                                                                         \
    do {                                                                                           \
        folio_vllm06_forward_args a = v06_args(r, DECODER);                                        \
        folio_vllm06_kv_cache kv = r->kv[0];                                                       \
        a.kv_cache = &kv;                                                                          \
        change;                                                                                    \
        V06_REJECTED(r, &a, words);                                                                \
    } while (0)

static void bad_decodes(v06 *r)
{
    v06_step(r, two_decodes, 2);
    r->f.block_tables = NULL;
    v06_remake(r);
    V06_REJECTS(r, DECODER, "block table has 0 blocks");
    v06_fields(r, two_decodes, 2);
    r->f.block_tables_stride = 1; /* one block where 9 tokens need two */
    v06_remake(r);
    V06_REJECTS(r, DECODER, "block table has 1 blocks");
    v06_fields(r, two_decodes, 2);
    r->tables[1] = (int32_t)r->num_blocks;
    v06_remake(r);
    V06_REJECTS(r, DECODER, "block_table");
    v06_fields(r, two_decodes, 2);
    v06_remake(r);
    BAD(a.key = a.value = (folio_tensor){0}, "key and value are NULL");
    r->tables[1] = -1;
    v06_remake(r);
    V06_REJECTS(r, DECODER, "block_table");
}

/* The cached blocks of a prompt: one outside the cache, and one too few. */
static void bad_chunks(v06 *r)
{
    static const v06_seq chunk[] = {{0, true, 5, 18, 0}};
    for (int i = 0; i < 3; i++) {
        v06_fields(r, chunk, 1);
        if (i < 2) r->tables[1] = i == 0 ? (int32_t)r->num_blocks : -1;
        else r->f.block_tables_stride = 1; /* 13 tokens are cached */
        v06_remake(r);
        V06_REJECTS(r, DECODER, i < 2 ? "block_table[1]" : "13 tokens are cached|1 blocks of 8");
    }
}

/* Scales that are none: without a cache, in decodes, in encoders, and over cached encoders. */
static void bad_scales(v06 *r)
{
    static const struct {
        const v06_seq *seqs;
        int num_seqs;
        folio_attention_type type;
        bool no_cache, no_key;
    } calls[] = {
        {two_prompts, 2, DECODER, true, false},       {two_decodes, 2, DECODER, false, false},
        {two_prompts, 2, ENCODER_ONLY, false, false}, {encoded_prompts, 2, ENCODER, false, false},
        {encoded_prompts, 2, CROSS, false, true},     {encoded_decode, 1, CROSS, false, true}};
    for (int i = 0; i < COUNT_OF(calls); i++) {
        r->no_cache = calls[i].no_cache;
        r->no_key = calls[i].no_key;
        v06_step(r, calls[i].seqs, calls[i].num_seqs);
        folio_vllm06_forward_args a = v06_args(r, calls[i].type);
        a.k_scale = -1.0f;
        V06_REJECTED(r, &a, "k_scale is -1");
        a.k_scale = 0;
        a.v_scale = INFINITY;
        V06_REJECTED(r, &a, "v_scale is inf");
    }
    r->no_cache = r->no_key = false;
}

/* A step of each kind and type. */
static const v06_seq of_both_kinds[] = {{2, true, 4, 4, 0}, {1, false, 1, 9, 0}};
static const struct {
    const v06_seq *seqs;
    int num_seqs;
    folio_attention_type type;
    bool no_key;
} calls_of_types[] = {{two_prompts, 2, DECODER, false},     {two_decodes, 2, DECODER, false},
                      {of_both_kinds, 2, DECODER, false},   {two_prompts, 2, ENCODER_ONLY, false},
                      {encoded_prompts, 2, ENCODER, false}, {encoded_prompts, 2, CROSS, false},
                      {encoded_decode, 1, CROSS, true}};

/* One row less or more in each tensor; key without value and value without key; decodes without a cache. */
static void bad_rows(v06 *r)
{
    static const char *const words[] = {"query: tokens is", "output: tokens is", "key: tokens is",
                                        "value: tokens is"};
    /* cuda: what a tensor is said to have is brought to the device, so it has no row more */
    int num_changes = strcmp(r->compute, "cuda") == 0 ? 4 : 8;
    for (int i = 0; i < COUNT_OF(calls_of_types); i++) {
        folio_vllm06_forward_args a;
        r->no_key = calls_of_types[i].no_key;
        v06_step(r, calls_of_types[i].seqs, calls_of_types[i].num_seqs);
        for (int change = 0; change < num_changes; change++) {
            a = v06_args(r, calls_of_types[i].type);
            folio_tensor *tensors[] = {&a.query, &a.output, &a.key, &a.value};
            if (tensors[change % 4]->data == NULL) continue;
            tensors[change % 4]->tokens += change < 4 ? -1 : 1;
            V06_REJECTED(r, &a, words[change % 4]);
        }
        for (int only = 0; !r->no_key && only < 2; only++) {
            a = v06_args(r, calls_of_types[i].type);
            *(only ? &a.key : &a.value) = (folio_tensor){0};
            V06_REJECTED(r, &a, "must both be set");
        }
        a = v06_args(r, calls_of_types[i].type);
        a.kv_cache = NULL;
        if (r->f.num_decode_tokens > 0) V06_REJECTED(r, &a, "kv_cache is NULL");
    }
    r->no_key = false;
}

/* Caches of other dtypes, larger, smaller and of the same size, wherever one is used. */
static void bad_cache_dtypes(v06 *r)
{
    static const char *const names[] = {"auto", "fp8", "fp8_e5m2"};
    static const folio_dtype others[][2] = {
        {FOLIO_FP8_E4M3, FOLIO_BF16}, {FOLIO_FP8_E5M2, FOLIO_F16}, {FOLIO_FP8_E4M3, FOLIO_F16}};
    for (int i = 0; i < COUNT_OF(names) * COUNT_OF(calls_of_types); i++) {
        int call = i / COUNT_OF(names), name = i % COUNT_OF(names);
        folio_attention_type type = calls_of_types[call].type;
        if (type == ENCODER || type == ENCODER_ONLY) continue;
        v06_reset(r);
        r->d.dtype = FOLIO_F16;
        r->d.kv_cache_dtype = names[name];
        r->no_key = calls_of_types[call].no_key;
        v06_step(r, calls_of_types[call].seqs, calls_of_types[call].num_seqs);
        for (int k = 0; k < 2; k++) {
            folio_vllm06_forward_args a = v06_args(r, type);
            folio_vllm06_kv_cache kv = *a.kv_cache;
            kv.dtype = others[name][k];
            kv.num_blocks = 3; /* so that it fits where it is */
            a.kv_cache = &kv;
            V06_REJECTED(r, &a, "the layer's kv_cache_dtype is");
        }
    }
}

/* A type that is none, in prompts with tables and without, in split arrays, and in decodes. */
static void bad_types(v06 *r)
{
    for (int kind = 0; kind < 4; kind++) {
        v06_fields(r, kind == 3 ? two_decodes : two_prompts, 2);
        if (kind == 1 || kind == 2) r->f.block_tables = NULL;
        if (kind == 2) {
            r->f.chunked_prefill = 1;
            r->f.prefill_block_tables = r->tables;
            r->f.prefill_block_tables_stride = r->blocks_per_seq;
        }
        v06_remake(r);
        BAD(a.attn_type = (folio_attention_type)4, "attention type 4 is unknown");
        BAD(a.attn_type = (folio_attention_type)-1, "attention type -1 is unknown");
    }
}

/* Cross attention: slots of prompts, blocks of decodes. */
static void bad_cross(v06 *r)
{
    static const v06_seq decodes[] = {{0, false, 1, 7, 11}, {1, false, 1, 10, 20}};
    static const v06_seq no_token[] = {{0, true, 0, 0, 5}, {1, true, 6, 6, 11}, {0, true, 0, 0, 5}};
    for (int i = 0; i < 2; i++) {
        v06_fields(r, encoded_prompts, 2);
        r->cross_slots[3] = i == 0 ? r->num_blocks * r->block_size : -2;
        v06_remake(r);
        V06_REJECTS(r, CROSS, "slots[3]|outside [-1,");
    }
    r->cross_slots[3] = -1; /* stored nowhere */
    v06_rerun(r, "X");
    r->no_key = true;
    V06_REJECTS(r, ENCODER, "key and value are NULL"); /* only cross attention may lack them */
    v06_step(r, two_prompts, 2);
    V06_REJECTS(r, ENCODER_ONLY, "key and value are NULL");
    for (int i = 0; i < 3; i++) {
        v06_fields(r, decodes, 2);
        if (i < 2) r->cross_tables[1] = i == 0 ? (int32_t)r->num_blocks : -1;
        else r->f.cross_block_tables_stride = 1;
        v06_remake(r);
        V06_REJECTS(r, CROSS,
                    i < 2 ? "cross_block_table" : "11 tokens|block table has 1 blocks of 8");
    }
    v06_fields(r, encoded_prompts, 2); /* their encoders are cached already */
    r->cross_tables[0] = (int32_t)r->num_blocks;
    v06_remake(r);
    V06_REJECTS(r, CROSS, "cross_block_table");
    for (int i = 0; i < 4; i++) { /* the first or the last; encoders are new, or cached */
        v06_step(r, no_token + i % 2, 2);
        r->no_key = i >= 2;
        V06_REJECTS(r, CROSS,
                    i % 2 ? "prompt 1 has no token" : "prompt 0 has no token|encoder has 5");
    }
    r->no_key = false;
}

/* output lies `rows` rows behind query. Prompts with biases run one by one, decodes run after prompts:
 * the rows of each such call alone are apart. */
static void bad_later_rows(v06 *r, int64_t rows)
{
    folio_vllm06_forward_args a = v06_args(r, DECODER);
    size_t row = (size_t)v06_width(r) * folio_dtype_size(r->d.dtype), n = (size_t)r->out_rows * row;
    support_buffer both = support_buffer_make(2 * n);
    memcpy(both.data, r->q, n);
    a.query.data = both.data;
    a.output.data = (char *)both.data + (size_t)rows * row;
    V06_REJECTED(r, &a, "output and query share memory");
    CHECK(memcmp(both.data, r->q, n) == 0 && support_is_poison((char *)both.data + n, n));
    support_buffer_free(&both);
}

/* output may be query itself: the same bits. */
static void output_is_query(v06 *r, folio_attention_type type)
{
    v06_run_as(r, type);
    support_buffer apart = support_buffer_make(r->out.bytes);
    memcpy(apart.data, r->out.data, r->out.bytes);
    folio_vllm06_forward_args a = v06_args(r, type);
    a.output = a.query;
    CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
    CHECK(memcmp(r->q, apart.data, apart.bytes) == 0);
    support_buffer_free(&apart);
}

/* Encoders do not use the cache: query, key and value may lie in it, and it stays as it is. */
static void inputs_in_the_cache(v06 *r, folio_attention_type type)
{
    for (int i = 0; i < 3; i++) {
        folio_vllm06_forward_args a = v06_args(r, type);
        folio_tensor *inputs[] = {&a.query, &a.key, &a.value};
        inputs[i]->data = r->kv[0].key_cache;
        CHECK(a.kv_cache == &r->kv[0]);
        CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
        v06_check_images(r);
    }
}

/* Each pair that may not share memory, in attention of this type; encoders do not use the cache. */
static void bad_pairs(v06 *r, folio_attention_type type)
{
    static const char *const names[] = {"query", "key", "value"};
    bool cached = type == DECODER || type == CROSS;
    for (int i = 0; i < (cached ? 7 : 3); i++) {
        char words[64];
        folio_vllm06_forward_args a = v06_args(r, type);
        folio_tensor *tensors[] = {&a.query, &a.key, &a.value, &a.output};
        if (i < 3) a.output.data = (float *)tensors[i]->data + 1;
        else tensors[i - 3]->data = a.kv_cache->key_cache;
        snprintf(words, sizeof words, "%s and %s share memory",
                 i == 6 || i < 3 ? "output" : "kv_cache", i == 6 ? "kv_cache" : names[i % 3]);
        V06_REJECTED(r, &a, words);
    }
}

static void bad_overlaps(v06 *r)
{
    static const v06_seq mixed[] = {{2, true, 4, 4, 0}, {1, false, 1, 9, 0}, {0, false, 1, 14, 0}};
    static const float bias[13 * 13];
    const folio_vllm06_bias biases[] = {{bias, 1, 13, 13}, {bias, 1, 8, 8}};
    if (strcmp(r->compute, "cuda") == 0)
        return; /* there each array is brought to a place of its own */
    v06_step(r, two_prompts, 2);
    output_is_query(r, DECODER);
    output_is_query(r, ENCODER_ONLY);
    inputs_in_the_cache(r, ENCODER_ONLY);
    bad_pairs(r, ENCODER_ONLY);
    bad_pairs(r, DECODER);
    BAD((a.output = a.query, a.output.token_stride = v06_width(r) + 8),
        "output and query share memory"); /* they begin alike */
    BAD(a.value.data = (char *)kv.key_cache + kv.bytes / 2, "kv_cache and value share memory");
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, biases));
    output_is_query(r, DECODER);
    bad_later_rows(r, 13);
    if (strcmp(r->b->name, "xformers") == 0) {
        v06_step(r, mixed, 3);
        output_is_query(r, DECODER);
        bad_later_rows(r, 4);
    }
    v06_step(r, two_decodes, 2);
    bad_pairs(r, DECODER);
    v06_step(r, encoded_prompts, 2);
    output_is_query(r, ENCODER);
    inputs_in_the_cache(r, ENCODER);
    bad_pairs(r, ENCODER);
    bad_pairs(r, CROSS);
    folio_vllm06_forward_args a = v06_args(r, CROSS);
    a.output = a.query;
    V06_REJECTED(r, &a, "output and query share memory");
}

static void bad_slots(v06 *r)
{
    static const v06_seq decodes[] = {{1, false, 1, 9, 0}, {0, false, 1, 14, 0}};
    for (int i = 0; i < 4; i++) {
        v06_fields(r, decodes, 2);
        r->slots[i / 2] = i % 2 == 0 ? r->num_blocks * r->block_size : -2;
        v06_remake(r);
        V06_REJECTS(r, DECODER, "slot");
    }
    static const v06_seq fresh[] = {{4, false, 1, 1, 0}};
    v06_fields(r, fresh, 1);
    r->slots[0] = -1; /* its own key is missing, then */
    v06_remake(r);
    v06_run_unstored(r);
    for (int i = 0; i < 3; i++) {
        v06_fields(r, two_others, 2);
        if (i == 0) r->slots[3] = r->num_blocks * r->block_size;
        if (i == 1) r->slots[3] = -2; /* the originals took every number below 0 for padding */
        if (i == 2) r->f.slot_mapping = NULL;
        v06_remake(r);
        V06_REJECTS(r, DECODER, "slot");
    }
    v06_fields(r, two_others, 2);
    r->slots[3] = -1;
    v06_rerun(r, "D");
}

/* Of the other types: for a key less or more, for as many as rows, or for one that PyTorch would spread. Prompt 1 has 9
 * rows and 20 keys. */
static void bad_biases_of_types(v06 *r)
{
    static const float bias[24 * 24];
    static const struct {
        folio_attention_type type;
        int rows, keys;
    } of[] = {{ENCODER, 20, 20}, {ENCODER_ONLY, 8, 8}, {CROSS, 9, 20}};
    for (int t = 0; t < COUNT_OF(of); t++) {
        bool only = of[t].type == ENCODER_ONLY;
        bool cross = of[t].type == CROSS;
        v06_step(r, only ? two_prompts : encoded_prompts, 2);
        for (int change = 0; change < (cross ? 7 : 5); change++) {
            int first = only ? 13 : 11;
            folio_vllm06_bias biases[] = {{bias, 1, cross ? 6 : first, first},
                                          {bias, 1, of[t].rows, of[t].keys}};
            if (change == 0) biases[1].key_len++;
            if (change == 1) biases[1].key_len--;
            if (change == 2) biases[1].key_len = 1;
            if (change == 3) biases[1].query_len++;
            if (change == 4) biases[1].query_len = 1;
            if (change == 5) biases[1].key_len = of[t].rows;
            if (change == 6) biases[1].query_len = of[t].keys;
            CHECK_OK(folio_vllm06_set_attn_bias(r->m, of[t].type, biases));
            folio_vllm06_forward_args a = v06_args(r, of[t].type);
            V06_REJECTED(r, &a, "attn_bias[1]");
        }
    }
}

static void bad_biases(v06 *r)
{
    float bias[13 * 13] = {0};
    folio_vllm06_bias biases[2] = {{bias, 1, 13, 13}};
    static const struct {
        int64_t heads, rows, keys;
        const char *words;
    } bad[] = {{1, 8, 9, "attn_bias[1]|9 keys"},
               {1, 7, 8, "attn_bias[1] is for 7 queries"},
               {1, 9, 8, "attn_bias[1] is for 9 queries"},
               {1, 1, 8, "attn_bias[1] is for 1 queries and 8 keys"}, /* PyTorch spreads these */
               {1, 8, 1, "attn_bias[1] is for 8 queries and 1 keys"},
               {2, 8, 8, "attn_bias[1]|2 heads"}};
    v06_step(r, two_prompts, 2);
    for (int i = 0; i < COUNT_OF(bad); i++) {
        biases[1] = (folio_vllm06_bias){bias, bad[i].heads, bad[i].rows, bad[i].keys};
        CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, biases));
        V06_REJECTS(r, DECODER, bad[i].words);
    }
    biases[1].data = NULL;
    REJECTED(folio_vllm06_set_attn_bias(r->m, DECODER, biases), "[1]");
    const folio_vllm06_bias *got;
    folio_attention_type unknown = (folio_attention_type)9;
    REJECTED(folio_vllm06_get_attn_bias(r->m, unknown, &got), "9");
    REJECTED(folio_vllm06_set_attn_bias(r->m, unknown, biases), "9");
    REJECTED(folio_vllm06_get_attn_bias(NULL, DECODER, &got), "NULL");
    REJECTED(folio_vllm06_get_attn_bias(r->m, DECODER, NULL), "out");
    static const int64_t no_sizes[][3] = {{0, 8, 8}, {1, -1, 8}, {1, 8, -1}, {1, INT64_MAX / 8, 1}};
    for (int i = 0; i < COUNT_OF(no_sizes); i++) {
        biases[1] = (folio_vllm06_bias){bias, no_sizes[i][0], no_sizes[i][1], no_sizes[i][2]};
        REJECTED(folio_vllm06_set_attn_bias(r->m, DECODER, biases), "attn_bias[1]: num_heads");
    }
}

void v06_same_forward_errors(v06 *r)
{
    v06_play(r, two_prompts, 2, "D");
    v06_step(r, two_others, 2);
    BAD(a.attn_metadata = NULL, "attn_metadata is NULL");
    BAD(a.output.tokens = 0, "output|0");
    BAD(a.query.data = NULL, "query");
    BAD(a.output.data = NULL, "output");
    BAD(a.key = a.value = (folio_tensor){0}, "key and value are NULL");
    BAD(a.query.dtype = FOLIO_F16, "query is f16");
    BAD(a.output.dtype = FOLIO_F16, "output f16");
    BAD(a.key.dtype = FOLIO_FP8_E4M3, "key|fp8_e4m3");
    BAD(a.value.dtype = FOLIO_F64, "value|f64");
    BAD(a.k_scale = -1.0f, "k_scale is -1");
    BAD(a.k_scale = INFINITY, "k_scale is inf");
    BAD(a.k_scale = NAN, "k_scale is");
    BAD(a.v_scale = -1.0f, "v_scale is -1");
    BAD(a.v_scale = INFINITY, "v_scale is inf");
    BAD(a.v_scale = NAN, "v_scale is");
    BAD(a.struct_size = 0, "struct_size");
    BAD(kv.key_cache = NULL, "kv_cache: key_cache is NULL");
    BAD(kv.dtype = FOLIO_F16, "f16");
    BAD(kv.dtype = FOLIO_FP8_E4M3, "kv_cache is fp8_e4m3, the layer's kv_cache_dtype is f32");
    BAD(kv.num_kv_heads /= 2, "kv_cache has 1 kv heads x 32, the layer 2 x 32");
    BAD(kv.head_size /= 2, "kv_cache has 2 kv heads x 16, the layer 2 x 32");
    BAD(kv.block_size *= 1024, "bytes is");
    BAD(kv.num_blocks = 0, "kv_cache: 0 blocks");
    BAD(kv.bytes--, "K and V in one allocation; bytes is");
    BAD(kv.num_blocks *= 4, "K and V in one allocation; bytes is"); /* bytes for elements */
    BAD(kv.num_blocks = 3, "");
    REJECTED(folio_vllm06_forward(NULL, &(folio_vllm06_forward_args){.struct_size = 8}, NULL),
             "impl");
    REJECTED(folio_vllm06_forward(r->impl, NULL, NULL), "NULL");
    bad_slots(r);
    bad_biases(r);
    bad_biases_of_types(r);
    bad_decodes(r);
    bad_chunks(r);
    bad_scales(r);
    bad_rows(r);
    bad_types(r);
    bad_cross(r);
    bad_overlaps(r);
    bad_cache_dtypes(r);
}
