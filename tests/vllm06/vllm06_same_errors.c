/* vllm06_same_errors.c: layers, metadata and builders that are refused, with nothing written; see vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

#include <math.h>
#include <stdlib.h>

static const v06_seq two_decodes[] = {{1, false, 1, 9, 0}, {0, false, 1, 14, 0}};
static const v06_seq encoded_prompts[] = {{0, true, 6, 6, 11}, {1, true, 9, 17, 20}};
static const v06_seq encoded_mixed[] = {{0, true, 6, 6, 11}, {1, false, 1, 9, 20}};
static const v06_seq encoded_decode[] = {{1, false, 1, 9, 20}};

/* NULL for a tensor that is empty in vLLM: the slots if no prompt has an encoder, the tables if no decode has one. */
static void empty_tensors(v06 *r)
{
    static const v06_seq of_decode[] = {{0, true, 6, 6, 0}, {1, false, 1, 9, 20}};
    static const v06_seq of_prompt[] = {{0, true, 6, 6, 0}, {1, true, 9, 9, 20}};
    static const v06_seq not_of_decode[] = {{0, true, 6, 6, 11}, {1, false, 1, 9, 0}};
    static const v06_seq of_last[] = {{0, false, 1, 7, 0}, {1, false, 1, 9, 20}};
    static const struct {
        const v06_seq *seqs;
        int num_seqs;
        bool needs[2]; /* slots, tables */
    } steps[] = {{encoded_prompts, 2, {true, false}}, {encoded_decode, 1, {false, true}},
                 {encoded_mixed, 2, {true, true}},    {of_decode, 2, {false, true}},
                 {of_prompt, 2, {true, false}},       {not_of_decode, 2, {true, false}},
                 {of_last, 2, {false, true}}};
    for (int i = 0; i < 2 * COUNT_OF(steps); i++) {
        bool tables = i % 2, needed = steps[i / 2].needs[tables];
        v06_fields(r, steps[i / 2].seqs, steps[i / 2].num_seqs);
        if (tables) r->f.cross_block_tables = NULL;
        if (tables) r->f.cross_block_tables_stride = 0;
        if (!tables) r->f.cross_slot_mapping = NULL;
        v06_remake(r);
        CHECK_INT(folio_vllm06_is_all_encoder_attn_metadata_set(r->m), 1);
        CHECK_INT(folio_vllm06_is_all_cross_attn_metadata_set(r->m), !needed);
        folio_vllm06_forward_args a = v06_args(r, CROSS);
        if (needed) V06_REJECTED(r, &a, "cross-attention metadata");
        else v06_run(r, "X");
    }
}

void v06_same_incomplete_metadata(v06 *r)
{
    v06_open(r);
    for (int i = 0; i < 11;
         i++) { /* of prompts, of both kinds, and of decodes, which need no slots */
        int missing = i < 10 ? i % 4 : 3;
        v06_fields(r,
                   i < 4   ? encoded_prompts
                   : i < 8 ? encoded_mixed
                           : encoded_decode,
                   i < 8 ? 2 : 1);
        if (missing == 0) r->f.encoder_seq_lens_tensor = NULL;
        if (missing == 1) {
            r->f.encoder_seq_lens = NULL;
            r->f.num_encoder_tokens = 0;
        }
        if (missing == 2) r->f.cross_slot_mapping = NULL;
        if (missing == 3) r->f.cross_block_tables = NULL;
        v06_remake(r);
        CHECK_INT(folio_vllm06_is_all_encoder_attn_metadata_set(r->m), missing >= 2);
        CHECK_INT(folio_vllm06_is_all_cross_attn_metadata_set(r->m), 0);
        folio_vllm06_forward_args a = v06_args(r, ENCODER);
        if (missing < 2) V06_REJECTED(r, &a, "encoder metadata");
        V06_REJECTS(r, CROSS, "cross-attention metadata");
    }
    v06_fields(r, encoded_prompts, 2);
    v06_remake(r);
    CHECK_INT(folio_vllm06_is_all_encoder_attn_metadata_set(r->m), 1);
    CHECK_INT(folio_vllm06_is_all_cross_attn_metadata_set(r->m), 1);
    CHECK(r->f.max_encoder_seq_len == 0); /* computed, so it is never missing */
    CHECK_INT(v06_get(r)->max_encoder_seq_len, 20);
    CHECK_INT(folio_vllm06_is_all_encoder_attn_metadata_set(NULL), 0);
    CHECK_INT(folio_vllm06_is_all_cross_attn_metadata_set(NULL), 0);
    empty_tensors(r);
    v06_fields(r, encoded_prompts, 2);
    r->f.num_encoder_tokens =
        0; /* rows of key, or none of them, and the prompts' encoders have tokens */
    v06_remake(r);
    static const folio_attention_type types[] = {ENCODER, CROSS};
    for (int i = 0; i < 2; i++) {
        folio_vllm06_forward_args a = v06_args(r, types[i]);
        V06_REJECTED(r, &a, i == 0 ? "query|31" : "key|31");
        a.key.tokens = a.value.tokens = 0;
        if (i == 0) a.query.tokens = a.output.tokens = 0;
        V06_REJECTED(r, &a, "31 tokens|0 rows");
    }
}

/* A change to a layer, and the sentence it must bring. */
#define BAD_IMPL_AS(change, status, words)                                                         \
    do {                                                                                           \
        folio_vllm06_impl_desc d = r->d;                                                           \
        impl = NOWHERE;                                                                            \
        change;                                                                                    \
        REFUSED(folio_vllm06_make_impl(r->state, r->b, &d, &impl), status, words);                 \
        CHECK(impl == NULL);                                                                       \
    } while (0)
#define BAD_IMPL(change, words) BAD_IMPL_AS(change, FOLIO_ERR_ARGUMENT, words)
#define BAD_IMPLS(list, change, words)                                                             \
    for (int i = 0; i < COUNT_OF(list); i++) BAD_IMPL(change, words)

/* fp8 in packs of 16 takes no other head sizes, where the layout has packs. */
static void bad_packs(const v06 *r)
{
    static const char *const names[] = {"fp8", "fp8_e4m3", "fp8_e5m2"};
    for (int i = 0; i < COUNT_OF(names); i++) {
        folio_vllm06_impl_desc d = r->d;
        folio_vllm06_impl *impl = NULL;
        d.head_size = 120;
        d.kv_cache_dtype = names[i];
        if (r->b->layout != FOLIO_LAYOUT_XPACKED)
            CHECK_OK(folio_vllm06_make_impl(r->state, r->b, &d, &impl));
        else
            REJECTED(folio_vllm06_make_impl(r->state, r->b, &d, &impl),
                     "packs of 16; k_head_size 120 is not a multiple");
        folio_vllm06_impl_destroy(impl);
    }
}

void v06_same_init_errors(v06 *r)
{
    static const float bad_slopes[][4] = {
        {NAN, 1, 1, 1}, {1, 1, -INFINITY, 1}, {1, 1, 1, INFINITY}};
    static const char *const which[] = {"slopes[0]", "slopes[2]", "slopes[3]"};
    static const char *const no_names[] = {"fp7", "fp8_e3m4", "fp8_e4m3fn", "FP8", "f32", ""};
    static const float no_caps[] = {-1.0f, NAN, INFINITY}, no_scales[] = {NAN, INFINITY, -INFINITY};
    static const int no_dtypes[] = {0, 99, FOLIO_F64, FOLIO_FP8_E4M3, FOLIO_FP8_E5M2};
    static const int32_t no_sizes[] = {0, -8, 4, 36, 572};
    v06_open(r);
    folio_vllm06_impl *impl = NOWHERE;
    folio_vllm06_state *state = NOWHERE;
    BAD_IMPL_AS(d.blocksparse_params = &d, FOLIO_ERR_UNSUPPORTED, "block-sparse");
    BAD_IMPL(d.num_kv_heads = 3, "3");
    BAD_IMPL(d.num_heads = -4, "num_heads|-4");
    BAD_IMPL(d.num_kv_heads = -1, "num_kv_heads is -1");
    BAD_IMPL(d.sliding_window = -1, "sliding_window is -1");
    BAD_IMPL(d.compat = 2, "compat is 2");
    BAD_IMPL(d.compat = -1, "compat is -1");
    BAD_IMPL_AS(d.head_size = 584, FOLIO_ERR_UNSUPPORTED, "584|576");
    BAD_IMPL(d.struct_size = 0, "struct_size");
    BAD_IMPLS(bad_slopes, d.alibi_slopes = bad_slopes[i], which[i]);
    BAD_IMPLS(no_names, d.kv_cache_dtype = no_names[i], "kv_cache_dtype");
    BAD_IMPLS(no_caps, d.logits_soft_cap = no_caps[i], "soft_cap is");
    BAD_IMPLS(no_scales, d.scale = no_scales[i], "scale is");
    BAD_IMPLS(no_dtypes, d.dtype = (folio_dtype)no_dtypes[i], "dtype");
    BAD_IMPLS(no_sizes, d.head_size = no_sizes[i], "head_size");
    bad_packs(r);
    REJECTED(folio_vllm06_make_impl(r->state, r->b, NULL, &impl), "NULL");
    REJECTED(folio_vllm06_make_impl(NULL, r->b, &r->d, &impl), "state");
    REJECTED(folio_vllm06_make_impl(r->state, r->b, &r->d, NULL), "out");
    REFUSED(folio_vllm06_state_create("no-such", NULL, &state), ANY_REFUSAL, "no-such");
    REJECTED(folio_vllm06_state_create("reference", NULL, NULL), "out");
    CHECK(impl == NULL && state == NULL && folio_vllm06_state_context(r->state) != NULL);
}

/* A change to the fields of a step, and the sentence it must bring. */
#define BAD_FIELDS(seqs, change, words)                                                            \
    do {                                                                                           \
        folio_vllm06_metadata *m = NOWHERE;                                                        \
        v06_fields(r, seqs, COUNT_OF(seqs));                                                       \
        change;                                                                                    \
        REJECTED(folio_vllm06_make_metadata(r->state, r->b, &r->f, &m), words);                    \
        CHECK(m == NULL);                                                                          \
    } while (0)

static void bad_counts(v06 *r)
{
    BAD_FIELDS(encoded_prompts, r->f.num_prefills = -1, "num_prefills -1|negative");
    BAD_FIELDS(encoded_prompts, r->f.num_prefill_tokens = -1, "num_prefill_tokens -1|negative");
    BAD_FIELDS(encoded_prompts, r->f.num_decode_tokens = -1, "num_decode_tokens -1|negative");
    BAD_FIELDS(encoded_prompts, r->f.num_prefills = (int64_t)1 << 31, "too many");
    BAD_FIELDS(encoded_prompts, r->f.num_prefills = r->f.num_decode_tokens = INT64_MAX, "too many");
    BAD_FIELDS(encoded_prompts, r->f.num_prefill_tokens = 14, "15 tokens|14");
    BAD_FIELDS(encoded_prompts, r->f.num_prefill_tokens = 16, "15 tokens|16");
    BAD_FIELDS(encoded_mixed, r->f.is_prompt = 1, "is_prompt is set, yet 1 sequences are decodes");
    BAD_FIELDS(encoded_prompts, r->f.block_tables_stride = -1, "stride is -1");
    BAD_FIELDS(encoded_prompts, r->f.cross_block_tables_stride = -1, "stride is -1");
    BAD_FIELDS(encoded_prompts, r->f.prefill_block_tables_stride = -1, "stride is -1");
    BAD_FIELDS(encoded_prompts, r->f.block_tables_stride = 0, "2 rows|block_tables_stride is 0");
    BAD_FIELDS(encoded_prompts, r->f.cross_block_tables_stride = 0,
               "cross_block_tables_stride is 0");
    BAD_FIELDS(encoded_prompts, r->f.prefill_block_tables = r->tables,
               "prefill_block_tables_stride is 0");
    BAD_FIELDS(encoded_prompts, r->f.block_tables_stride = INT64_MAX,
               "block_tables_stride 9223372036854775807");
    BAD_FIELDS(encoded_prompts, r->f.cross_block_tables_stride = (int64_t)1 << 62,
               "cross_block_tables_stride 4611686018427387904");
    /* the same row for prompt 0, another for prompt 1 */
    BAD_FIELDS(encoded_prompts,
               (r->f.prefill_block_tables = r->tables + 1,
                r->f.prefill_block_tables_stride = r->blocks_per_seq,
                memset(r->tables, 0, (size_t)(r->blocks_per_seq + 1) * sizeof *r->tables)),
               "prompt 1|prefill_block_tables");
    int32_t rows[2][3]; /* another last block only */
    BAD_FIELDS(encoded_prompts,
               (memcpy(rows[0], r->tables, sizeof rows[0]),
                memcpy(rows[1], r->tables + r->blocks_per_seq, sizeof rows[1]), rows[1][2]++,
                r->f.prefill_block_tables = rows[0], r->f.prefill_block_tables_stride = 3),
               "prompt 1|prefill_block_tables");
    BAD_FIELDS(encoded_prompts,
               (memcpy(rows[0], r->tables, sizeof rows[0]),
                memcpy(rows[1], r->tables + r->blocks_per_seq, sizeof rows[1]), rows[0][0]++,
                r->f.prefill_block_tables = rows[0], r->f.prefill_block_tables_stride = 3),
               "prompt 0|prefill_block_tables");
    r->f.chunked_prefill = 1; /* here block_tables has no rows of prompts */
    v06_remake(r);
}

static void bad_lengths(v06 *r)
{
    static const int32_t others[V06_SEQS] = {6, 16}, larger[V06_SEQS] = {6, 18};
    BAD_FIELDS(encoded_mixed, r->f.seq_lens_tensor = others,
               "seq_lens[1] is 9|seq_lens_tensor[1] is 16");
    BAD_FIELDS(encoded_prompts, r->f.seq_lens = r->f.seq_lens_tensor = NULL, "seq_lens");
    BAD_FIELDS(encoded_prompts, r->lens[1] = -3, "seq_lens[1] is -3");
    BAD_FIELDS(two_decodes, r->lens[1] = -3, "seq_lens[1] is -3");
    BAD_FIELDS(two_decodes, (r->f.seq_lens = NULL, r->lens[1] = -3), "seq_lens[1] is -3");
    BAD_FIELDS(encoded_prompts, r->f.seq_lens_tensor = others,
               "seq_lens[1] is 17|seq_lens_tensor[1] is 16");
    BAD_FIELDS(encoded_prompts, r->f.seq_lens_tensor = larger,
               "seq_lens[1] is 17|seq_lens_tensor[1] is 18");
    BAD_FIELDS(encoded_prompts, (r->f.chunked_prefill = 1, r->f.seq_lens_tensor = others),
               "seq_lens[1] is 17|seq_lens_tensor[1] is 16");
    BAD_FIELDS(two_decodes, r->f.seq_lens_tensor = others,
               "seq_lens[0] is 9|seq_lens_tensor[0] is 6");
    BAD_FIELDS(encoded_prompts, r->lens[0] = 5, "prompt 0|6 new tokens");
    BAD_FIELDS(encoded_prompts, (r->f.context_lens_tensor = NULL, r->lens[0] = 5),
               "prompt 0 has 6 new tokens by query_start_loc|5");
    BAD_FIELDS(encoded_prompts, (r->f.context_lens_tensor = NULL, r->starts[1] = -1),
               "prompt 0 has -1 new tokens by query_start_loc");
    BAD_FIELDS(encoded_prompts, r->contexts[1] = 7, "prompt 1|context_len 7");
    BAD_FIELDS(encoded_prompts, r->contexts[1] = 9, "prompt 1|context_len 9");
    BAD_FIELDS(encoded_prompts, (r->f.query_start_loc = NULL, r->contexts[0] = 7),
               "prompt 0 has -1 new tokens by context_lens_tensor|6");
    BAD_FIELDS(encoded_prompts, (r->f.query_start_loc = NULL, r->contexts[0] = -1),
               "prompt 0 has 7 new tokens by context_lens_tensor|6");
    BAD_FIELDS(encoded_prompts, r->seq_starts[2] = 99, "seq_start_loc[2] is 99");
    BAD_FIELDS(encoded_mixed, r->seq_starts[2] = 99, "seq_start_loc[2] is 99"); /* a decode's */
    BAD_FIELDS(encoded_prompts, r->starts[0] = 1, "query_start_loc[0] is 1");
    BAD_FIELDS(encoded_prompts, r->starts[0] = -1, "query_start_loc[0] is -1");
    r->starts[0] = 0;
    /* slot -1 is no padding: the step is no graph's */
    BAD_FIELDS(two_decodes, (r->contexts[1] = 12, r->slots[1] = -1),
               "decode 1|context_len 12, less than the 13 keys");
    BAD_FIELDS(two_decodes, r->contexts[1] = 9, "decode 1|context_len 9");
    BAD_FIELDS(two_decodes, r->contexts[0] = 7, "decode 0|context_len 7");
    BAD_FIELDS(encoded_mixed, r->contexts[1] = 7, "decode 1|context_len 7");
    BAD_FIELDS(encoded_mixed, r->starts[2] = 8, "decode 1|2 new tokens");
    BAD_FIELDS(two_decodes, r->starts[2] = 1, "decode 1|0 new tokens");
    BAD_FIELDS(two_decodes, r->starts[2] = 85, "decode 1|84 new tokens");
}

static void bad_encoders(v06 *r)
{
    static const int64_t not_31[] = {-1, 20, 32};
    static const int32_t last_other[] = {11, 19}, last_larger[] = {11, 21};
    for (int i = 0; i < COUNT_OF(not_31); i++)
        BAD_FIELDS(encoded_prompts, r->f.num_encoder_tokens = not_31[i],
                   "num_encoder_tokens is|0 or 31, the sum of encoder_seq_lens of the prompts");
    BAD_FIELDS(encoded_mixed, r->f.num_encoder_tokens = 31, "num_encoder_tokens is 31|0 or 11");
    BAD_FIELDS(encoded_decode, r->f.num_encoder_tokens = 11,
               "num_encoder_tokens is 11|0 or 20, the sum of encoder_seq_lens of the decodes");
    v06_fields(r, encoded_prompts, 2);
    r->f.num_encoder_tokens = 0; /* 0 or the sum, of prompts and of decodes */
    v06_remake(r);
    v06_fields(r, encoded_mixed, 2);
    r->f.num_encoder_tokens = 0;
    v06_remake(r);
    v06_fields(r, encoded_decode, 1);
    r->f.num_encoder_tokens = 20;
    v06_remake(r);
    BAD_FIELDS(encoded_prompts, r->encoder_lens[1] = -1, "encoder_seq_lens[1]");
    BAD_FIELDS(encoded_mixed, r->encoder_lens[1] = -1, "encoder_seq_lens[1]");
    BAD_FIELDS(encoded_decode, r->encoder_lens[0] = -1, "encoder_seq_lens[0]");
    BAD_FIELDS(encoded_prompts, r->f.encoder_seq_lens_tensor = r->lens,
               "encoder_seq_lens[0] is 11|encoder_seq_lens_tensor[0] is 6");
    BAD_FIELDS(encoded_mixed, r->f.encoder_seq_lens_tensor = last_other,
               "encoder_seq_lens[1] is 20|encoder_seq_lens_tensor[1] is 19");
    BAD_FIELDS(encoded_mixed, r->f.encoder_seq_lens_tensor = last_larger,
               "encoder_seq_lens[1] is 20|encoder_seq_lens_tensor[1] is 21");
}

/* Fields that contradict each other; but maxima may be larger than the lengths. */
void v06_same_metadata_errors(v06 *r)
{
    folio_vllm06_metadata *m = NOWHERE;
    v06_open(r);
    bad_counts(r);
    bad_lengths(r);
    bad_encoders(r);
    v06_fields(r, encoded_mixed, 2);
    r->f.max_query_len = r->f.max_prefill_seq_len = r->f.max_decode_seq_len = 98;
    r->f.max_encoder_seq_len = r->f.max_seqlen = r->f.max_kv_len = r->f.max_decode_query_len = 99;
    v06_remake(r);
    const folio_vllm06_metadata_fields *f = v06_get(r);
    CHECK(f->max_query_len == 98 && f->max_prefill_seq_len == 98);
    CHECK(f->max_decode_seq_len == 98 && f->max_encoder_seq_len == 99);
    CHECK(f->max_seqlen == 99 && f->max_kv_len == 99 && f->max_decode_query_len == 99);
    REJECTED(folio_vllm06_make_metadata(NULL, r->b, &r->f, &m), "state");
    REJECTED(folio_vllm06_make_metadata(r->state, r->b, NULL, &m), "NULL");
    REJECTED(folio_vllm06_make_metadata(r->state, r->b, &r->f, NULL), "out");
    r->f.struct_size = 0;
    REJECTED(folio_vllm06_make_metadata(r->state, r->b, &r->f, &m), "struct_size");
    CHECK(m == NULL);
}

/* A change to a sequence that the builder would take, and the sentence it must bring. */
#define BAD_SEQ(change, words)                                                                     \
    do {                                                                                           \
        folio_vllm06_seq s = *good;                                                                \
        change;                                                                                    \
        REJECTED(folio_vllm06_builder_add(builder, &s), words);                                    \
    } while (0)

static void bad_sequences(folio_vllm06_builder *builder, const folio_vllm06_seq *good)
{
    BAD_SEQ((s.token_len = INT64_MAX, s.context_len = 5), "9223372036854775807");
    BAD_SEQ(s.token_len = 0, "token_len 0");
    BAD_SEQ(s.token_len = -1, "token_len -1");
    BAD_SEQ((s.token_len = (int64_t)1 << 31, s.num_blocks = 0), "token_len 2147483648");
    BAD_SEQ(s.context_len = -1, "context_len -1");
    BAD_SEQ((s.context_len = INT32_MAX, s.num_blocks = 0), "context_len 2147483647");
    BAD_SEQ((s.token_len = INT32_MAX, s.context_len = 1, s.num_blocks = 0), "context_len 1 ");
    BAD_SEQ(s.num_blocks = INT64_MAX / 2, "a block table");
    BAD_SEQ(s.num_blocks = -1, "a block table");
    BAD_SEQ(s.block_table = NULL, "a block table");
    BAD_SEQ(s.num_cross_blocks = INT64_MAX / 2, "a block table");
    BAD_SEQ(s.num_cross_blocks = -1, "a block table");
    BAD_SEQ(s.cross_block_table = NULL, "a block table");
    BAD_SEQ((s.block_table = NULL, s.num_cross_blocks = 0), "a block table");
    BAD_SEQ((s.cross_block_table = NULL, s.num_blocks = 0), "a block table");
    BAD_SEQ(s.encoder_seq_len = -1, "encoder_seq_len -1");
    BAD_SEQ(s.encoder_seq_len = 9, "encoder_seq_len 9 does not fit its 1 cross blocks");
    BAD_SEQ((s.encoder_seq_len = (int64_t)1 << 31, s.num_cross_blocks = 0), "2147483648");
    BAD_SEQ((s.is_prompt = 0, s.token_len = s.encoder_is_new = 1), "decode|encoder");
    BAD_SEQ((s.is_prompt = 0, s.token_len = 2), "decode|2 tokens|has 1");
    BAD_SEQ((s.is_prompt = 0, s.token_len = 1, s.context_len = 8), "do not hold 9");
    BAD_SEQ(s.token_len = 9, "do not hold 9");
    BAD_SEQ((s.token_len = 9, s.num_cross_blocks = 2), "1 blocks of 8 do not hold 9");
    BAD_SEQ((s.encoder_seq_len = 9, s.num_blocks = 2), "does not fit its 1 cross blocks");
    BAD_SEQ((s.encoder_seq_len = 9, s.encoder_is_new = 1), "does not fit its 1 cross blocks");
    BAD_SEQ((s.is_prompt = 0, s.token_len = 1, s.encoder_seq_len = 9), "its 1 cross blocks");
    REJECTED(folio_vllm06_builder_add(builder, NULL), "");
    REJECTED(folio_vllm06_builder_add(NULL, good), "NULL");
}

/* Sequences that are good alone and make no step together. */
static void bad_steps(folio_vllm06_builder *builder, const folio_vllm06_seq *good)
{
    folio_vllm06_metadata *m = NOWHERE;
    folio_vllm06_seq s = *good;
    s.is_prompt = 0;
    s.token_len = 1;
    s.context_len = 7;
    CHECK_OK(folio_vllm06_builder_add(builder, &s));
    REJECTED(folio_vllm06_builder_add(builder, good), "prompts come first");
    REJECTED(folio_vllm06_builder_build(builder, NULL), "NULL");
    REJECTED(folio_vllm06_builder_build(NULL, &m), "NULL");
    CHECK_OK(folio_vllm06_builder_build(builder, &m));
    CHECK_INT(folio_vllm06_metadata_get(m)->num_decode_tokens, 1); /* it has what it had before */
    folio_vllm06_metadata_destroy(m);
    CHECK_OK(folio_vllm06_builder_add(builder, good)); /* nor where the first is a prompt */
    CHECK_OK(folio_vllm06_builder_add(builder, &s));
    REJECTED(folio_vllm06_builder_add(builder, good), "prompts come first");
    CHECK_OK(folio_vllm06_builder_build(builder, &m));
    CHECK_INT(folio_vllm06_metadata_get(m)->num_prefills, 1);
    CHECK_INT(folio_vllm06_metadata_get(m)->num_decode_tokens, 1);
    folio_vllm06_metadata_destroy(m);
    CHECK_OK(folio_vllm06_builder_add(builder, good)); /* an encoder that is cached */
    CHECK_OK(folio_vllm06_builder_build(builder, &m));
    CHECK_INT(folio_vllm06_metadata_get(m)->num_encoder_tokens, 0);
    folio_vllm06_metadata_destroy(m);
    for (int i = 0; i < 4; i++) {
        s = *good; /* a prompt without an encoder goes with a new one, after or before it */
        s.encoder_is_new = i == 0 || i == 3;
        if (i == 3) s.encoder_seq_len = s.token_len = 8; /* all that a block holds */
        if (!s.encoder_is_new) s.encoder_seq_len = s.num_cross_blocks = 0;
        CHECK_OK(folio_vllm06_builder_add(builder, &s));
        if (i % 2 == 0) continue;
        CHECK_OK(folio_vllm06_builder_build(builder, &m));
        CHECK_INT(folio_vllm06_metadata_get(m)->num_encoder_tokens, i == 1 ? 5 : 8);
        folio_vllm06_metadata_destroy(m);
    }
    m = NOWHERE;
    CHECK_OK(folio_vllm06_builder_add(builder, good));
    CHECK_OK(folio_vllm06_builder_add(builder, &s));
    REJECTED(folio_vllm06_builder_build(builder, &m), "new encoders");
    CHECK_OK(folio_vllm06_builder_add(builder, good)); /* nor does a cached one go after it */
    REJECTED(folio_vllm06_builder_build(builder, &m), "new encoders");
    CHECK(m == NULL);
    s = (folio_vllm06_seq){.struct_size = sizeof s, .is_prompt = 1, .token_len = INT32_MAX};
    CHECK_OK(folio_vllm06_builder_add(builder, &s));
    REJECTED(folio_vllm06_builder_build(builder, &m), "2147483663 tokens");
    s.token_len = 7; /* tokens of earlier steps count too */
    s.context_len = INT32_MAX - 7;
    CHECK_OK(folio_vllm06_builder_add(builder, &s));
    REJECTED(folio_vllm06_builder_build(builder, &m), "4294967310 tokens");
}

/* A decode without blocks next to one that has them must not read the other's row of padding. */
static void missing_blocks(v06 *r, folio_vllm06_builder *builder, const folio_vllm06_seq *good)
{
    folio_vllm06_metadata *m = NULL;
    folio_vllm06_seq s = *good;
    s.is_prompt = 0;
    s.token_len = 1;
    s.context_len = 8;
    s.num_blocks = s.num_cross_blocks = 2;
    CHECK_OK(folio_vllm06_builder_add(builder, &s));
    s.num_blocks = 0;
    s.num_cross_blocks = 1;
    CHECK_OK(folio_vllm06_builder_add(builder, &s));
    CHECK_OK(folio_vllm06_builder_build(builder, &m));
    CHECK(m != NULL && folio_vllm06_metadata_get(m)->block_tables[2] == FOLIO_NO_BLOCK);
    CHECK(m != NULL && folio_vllm06_metadata_get(m)->cross_block_tables[3] == FOLIO_NO_BLOCK);
    v06_step(r, two_decodes, 2);
    folio_vllm06_forward_args a = v06_args(r, DECODER);
    a.attn_metadata = m;
    V06_REJECTED(r, &a, "FOLIO_NO_BLOCK");
    folio_vllm06_metadata_destroy(m);
}

void v06_same_builder_errors(v06 *r)
{
    static const int32_t table[] = {3, 4};
    const folio_vllm06_seq good = FOLIO_WITH(
        folio_vllm06_seq, .is_prompt = 1, .token_len = 4, .block_table = table, .num_blocks = 1,
        .encoder_seq_len = 5, .cross_block_table = table, .num_cross_blocks = 1);
    folio_vllm06_builder_desc d = {.struct_size = sizeof d, .block_size = r->block_size};
    v06_open(r);
    folio_vllm06_builder *first = NULL, *second = NULL;
    CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &first));
    CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &second));
    bad_sequences(first, &good);
    bad_steps(first, &good);
    missing_blocks(r, second, &good);
    folio_vllm06_builder_destroy(first);
    folio_vllm06_builder_destroy(second);
}

/* A view of a step of one kind has the step's sequences and arrays, and is its own view. */
static void check_view(const folio_vllm06_metadata *view, const folio_vllm06_metadata *step)
{
    const folio_vllm06_metadata *prompts = folio_vllm06_prefill_metadata(view);
    const folio_vllm06_metadata *decodes = folio_vllm06_decode_metadata(view);
    CHECK(prompts == NULL ? decodes == view : prompts == view && decodes == NULL);
    const folio_vllm06_metadata_fields *v = folio_vllm06_metadata_get(view);
    const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(step);
    CHECK(v->num_prefills == f->num_prefills && v->num_prefill_tokens == f->num_prefill_tokens);
    CHECK(v->num_decode_tokens == f->num_decode_tokens && v->is_prompt == f->is_prompt);
    CHECK(v->slot_mapping == f->slot_mapping && v->seq_lens == f->seq_lens);
    CHECK(v->seq_lens_tensor == f->seq_lens_tensor && v->max_query_len == f->max_query_len);
    CHECK(v->block_tables == f->block_tables && v->block_tables_stride == f->block_tables_stride);
    CHECK(v->context_lens_tensor == f->context_lens_tensor);
    CHECK(v->max_prefill_seq_len == f->max_prefill_seq_len);
    CHECK(v->max_decode_seq_len == f->max_decode_seq_len);
}

/* What a view of a mixed step has of the arrays: p of the prompts, d of the decodes, f of the whole. In a split step
 * some are of one kind only. */
static void check_mixed_arrays(const folio_vllm06_metadata_fields *p,
                               const folio_vllm06_metadata_fields *d,
                               const folio_vllm06_metadata_fields *f, bool split)
{
    CHECK(p->slot_mapping == f->slot_mapping && d->slot_mapping == f->slot_mapping + 8);
    CHECK(p->seq_lens == f->seq_lens && d->seq_lens == (split ? NULL : f->seq_lens + 2));
    CHECK(p->seq_lens_tensor == (split ? NULL : f->seq_lens_tensor));
    CHECK(d->seq_lens_tensor == f->seq_lens_tensor + (split ? 0 : 2));
    CHECK(d->seq_lens_tensor[0] == 4 && d->seq_lens_tensor[1] == 17);
    CHECK(p->context_lens_tensor == f->context_lens_tensor);
    CHECK(d->context_lens_tensor == f->context_lens_tensor + 2 && d->context_lens_tensor[1] == 16);
    CHECK_INT(p->block_tables_stride, split ? 0 : f->block_tables_stride);
    CHECK(p->block_tables == (split ? NULL : f->block_tables));
    CHECK_INT(d->block_tables_stride, f->block_tables_stride);
    CHECK(d->block_tables == f->block_tables + (split ? 0 : 2 * f->block_tables_stride));
    CHECK(p->prefill_block_tables == f->prefill_block_tables && d->prefill_block_tables == NULL);
    CHECK_INT(p->prefill_block_tables_stride, f->prefill_block_tables_stride);
    CHECK_INT(d->prefill_block_tables_stride, 0);
    CHECK(p->encoder_seq_lens == f->encoder_seq_lens);
    CHECK(d->encoder_seq_lens == f->encoder_seq_lens + 2 && d->encoder_seq_lens[0] == 20);
    CHECK(p->encoder_seq_lens_tensor == f->encoder_seq_lens_tensor);
    CHECK(d->encoder_seq_lens_tensor == f->encoder_seq_lens_tensor + 2);
    CHECK(p->cross_slot_mapping == f->cross_slot_mapping);
    CHECK(p->cross_block_tables == f->cross_block_tables);
    CHECK(d->cross_block_tables == f->cross_block_tables + 2 * 3);
    CHECK(p->cross_block_tables_stride == 3 && d->cross_block_tables_stride == 3);
    CHECK(p->query_start_loc == f->query_start_loc && d->query_start_loc == NULL);
    CHECK(p->seq_start_loc == f->seq_start_loc && d->seq_start_loc == NULL);
}

/* A mixed step, with one array for prompts and decodes or with split ones: each view has its own sequences. */
static void mixed_views(v06 *r, bool split)
{
    static const v06_seq step[] = {
        {0, true, 5, 15, 11}, {2, true, 3, 3, 9}, {1, false, 1, 4, 20}, {3, false, 1, 17, 2}};
    static const float zeros[5 * 15];
    static const folio_vllm06_bias biases[] = {{zeros, 1, 5, 15}, {zeros, 1, 3, 3}};
    v06_fields(r, step, 4);
    v06_narrow_cross(r, 3);
    r->f.attn_bias = r->f.encoder_attn_bias = r->f.cross_attn_bias = biases;
    r->f.use_cuda_graph = 1;
    if (split) {
        r->f.chunked_prefill = 1;
        r->f.seq_lens_tensor = r->lens + 2;
        r->f.block_tables = r->tables + 2 * r->blocks_per_seq;
        r->f.prefill_block_tables = r->tables;
        r->f.prefill_block_tables_stride = 2;
    }
    v06_remake(r);
    const folio_vllm06_metadata *prompts = folio_vllm06_prefill_metadata(r->m);
    const folio_vllm06_metadata *decodes = folio_vllm06_decode_metadata(r->m);
    CHECK(prompts != NULL && prompts != r->m && prompts == folio_vllm06_prefill_metadata(r->m));
    CHECK(decodes != NULL && decodes != r->m && decodes == folio_vllm06_decode_metadata(r->m));
    if (prompts == NULL || decodes == NULL) return;
    CHECK(folio_vllm06_prefill_metadata(prompts) == prompts); /* no copy that could go stale */
    CHECK(folio_vllm06_decode_metadata(decodes) == decodes);
    CHECK(folio_vllm06_decode_metadata(prompts) == NULL);
    CHECK(folio_vllm06_prefill_metadata(decodes) == NULL);
    const folio_vllm06_metadata_fields *f = v06_get(r);
    const folio_vllm06_metadata_fields *p = folio_vllm06_metadata_get(prompts);
    const folio_vllm06_metadata_fields *d = folio_vllm06_metadata_get(decodes);
    CHECK(p->is_prompt == 1 && p->num_prefills == 2 && p->num_decode_tokens == 0);
    CHECK(d->is_prompt == 0 && d->num_prefills == 0 && d->num_decode_tokens == 2);
    CHECK(p->num_prefill_tokens == 8 && d->num_prefill_tokens == 0);
    CHECK(p->num_encoder_tokens == 20 && p->max_encoder_seq_len == 20);
    CHECK(d->num_encoder_tokens == 20 && d->max_encoder_seq_len == 20);
    CHECK(p->max_query_len == 5 && p->max_prefill_seq_len == 15 && p->max_decode_seq_len == 0);
    CHECK(d->max_query_len == 1 && d->max_prefill_seq_len == 0 && d->max_decode_seq_len == 17);
    CHECK(p->max_decode_query_len == 0 && d->max_decode_query_len == 1);
    CHECK(p->max_seqlen == 15 && p->max_kv_len == 15 && d->max_seqlen == 0 && d->max_kv_len == 0);
    CHECK(p->use_cuda_graph == 0 && d->use_cuda_graph == 1);
    CHECK(p->chunked_prefill == split && d->chunked_prefill == split);
    check_mixed_arrays(p, d, f, split);
    CHECK(f->attn_bias != NULL && p->attn_bias == f->attn_bias && d->attn_bias == NULL);
    CHECK(p->encoder_attn_bias == f->encoder_attn_bias && d->encoder_attn_bias == NULL);
    CHECK(p->cross_attn_bias == f->cross_attn_bias && d->cross_attn_bias == NULL);
}

/* What a mixed step does not have its view of the decodes does not have either. */
static void views_of_few_fields(v06 *r)
{
    static const v06_seq step[] = {{0, true, 5, 5, 0}, {1, false, 1, 4, 0}};
    for (int i = 0; i < 2; i++) { /* lengths as a tensor, and as a list */
        v06_fields(r, step, 2);
        r->f.slot_mapping = NULL;
        r->f.block_tables = r->f.context_lens_tensor = NULL;
        *(i == 0 ? &r->f.seq_lens : &r->f.seq_lens_tensor) = NULL;
        v06_remake(r);
        const folio_vllm06_metadata_fields *d =
            folio_vllm06_metadata_get(folio_vllm06_decode_metadata(r->m));
        CHECK(d->slot_mapping == NULL && d->block_tables == NULL);
        CHECK(d->context_lens_tensor == NULL && d->cross_block_tables == NULL);
        CHECK(d->encoder_seq_lens == NULL && d->encoder_seq_lens_tensor == NULL);
        CHECK((i == 0 ? d->seq_lens : d->seq_lens_tensor) == NULL);
        CHECK_INT((i == 0 ? d->seq_lens_tensor : d->seq_lens)[0], 4);
    }
}

/* A step of one kind: its view is the step itself, of xformers a copy, and the other kind has none. */
void v06_same_views(v06 *r)
{
    static const v06_seq step[] = {{0, true, 5, 5, 0}, {1, false, 1, 4, 0}};
    bool whole = strcmp(r->b->name, "xformers") != 0;
    v06_step(r, step, 1);
    const folio_vllm06_metadata *p = folio_vllm06_prefill_metadata(r->m);
    CHECK(p != NULL && (p == r->m) == whole);
    check_view(p, r->m);
    CHECK(folio_vllm06_decode_metadata(r->m) == NULL);
    v06_step(r, step + 1, 1);
    CHECK(folio_vllm06_prefill_metadata(r->m) == NULL);
    const folio_vllm06_metadata *d = folio_vllm06_decode_metadata(r->m);
    CHECK(d != NULL && (d == r->m) == whole);
    check_view(d, r->m);
    v06_fields(r, step, 1); /* split arrays without decodes: all are of the prompts */
    r->f.chunked_prefill = 1;
    v06_remake(r);
    p = folio_vllm06_prefill_metadata(r->m);
    check_view(p, r->m);
    CHECK(p != NULL && folio_vllm06_metadata_get(p)->seq_lens_tensor[0] == 5);
    mixed_views(r, false);
    mixed_views(r, true);
    views_of_few_fields(r);
    v06_step(r, NULL, 0); /* an empty step */
    CHECK(folio_vllm06_prefill_metadata(r->m) == NULL);
    CHECK(folio_vllm06_decode_metadata(r->m) == NULL);
}

/* is_prompt may be left out, as xformers has no such field; where it is given, no sequence is a decode. */
void v06_same_is_prompt(v06 *r)
{
    static const v06_seq step[] = {{0, true, 5, 5, 0}, {1, false, 1, 4, 0}};
    static const struct {
        int first, n, given, expected; /* -1: rejected */
    } cases[] = {{0, 1, 1, 1}, {0, 1, 0, 1},  {1, 1, 0, 0}, {0, 2, 0, 0},
                 {0, 0, 0, 0}, {0, 2, 1, -1}, {1, 1, 1, -1}};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        folio_vllm06_metadata *m = NOWHERE;
        v06_fields(r, step + cases[i].first, cases[i].n);
        r->f.is_prompt = cases[i].given;
        if (cases[i].expected < 0) {
            REJECTED(folio_vllm06_make_metadata(r->state, r->b, &r->f, &m), "is_prompt");
            CHECK(m == NULL);
            continue;
        }
        v06_remake(r);
        CHECK_INT(v06_get(r)->is_prompt, cases[i].expected);
    }
}

/* A layer sets no biases. Those given with the fields are applied. */
void v06_same_biases_in_fields(v06 *r)
{
    static const v06_seq mixed[] = {{0, true, 6, 6, 11}, {1, false, 1, 9, 20}};
    static const v06_seq before[] = {{1, true, 8, 8, 20}};
    static float numbers[121];
    const folio_vllm06_bias self = {numbers, 1, 6, 6}, encoder = {numbers, 1, 11, 11};
    const folio_vllm06_bias cross = {numbers, 1, 6, 11};
    support_fill(numbers, COUNT_OF(numbers), 7, 3.0f);
    v06_step(r, before, 1);
    const folio_vllm06_metadata_fields *none = v06_get(r);
    v06_run(r, "EDX");
    CHECK(none->attn_bias == NULL && none->encoder_attn_bias == NULL);
    CHECK(none->cross_attn_bias == NULL);
    v06_fields(r, mixed, 2);
    r->f.attn_bias = &self;
    r->f.encoder_attn_bias = &encoder;
    r->f.cross_attn_bias = &cross;
    v06_remake(r);
    static const folio_attention_type types[] = {DECODER, ENCODER, CROSS};
    const folio_vllm06_bias *given[] = {&self, &encoder, &cross};
    for (int i = 0; i < 3; i++) {
        v06_check_biases(r, types[i], given[i], 1);
        v06_run_as(r, types[i]);
    }
}

/* The rows of sequences without an encoder are zeros. */
static void check_zeros(const v06 *r)
{
    for (int s = 0; s < r->num_seqs; s++)
        for (int64_t row = r->starts[s]; r->encoder_lens[s] == 0 && row < r->starts[s + 1]; row++)
            for (int64_t k = 0; k < v06_width(r); k++) CHECK(v06_out(r, row, k) == 0.0);
}

/* Prompts with set biases run another way; a bias over no key leaves zeros too. */
static void some_encoders_biased(v06 *r)
{
    static float numbers[9 * 20];
    folio_vllm06_bias biases[3];
    support_fill(numbers, COUNT_OF(numbers), 5, 2.0f);
    for (int i = 0; i < 3; i++)
        biases[i] = (folio_vllm06_bias){numbers, 1, r->seqs[i].query_len, r->encoder_lens[i]};
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, CROSS, biases));
    v06_run(r, "X");
    check_zeros(r);
}

/* Sequences without an encoder beside others that have one: their rows alone are zeros. Encoders of prompts are new,
 * and then cached. */
static void some_encoders(v06 *r)
{
    static const v06_seq steps[][3] = {
        {{0, true, 6, 6, 11}, {1, true, 9, 9, 0}, {2, true, 3, 3, 5}},
        {{3, true, 6, 6, 0}, {4, true, 9, 9, 20}, {5, true, 2, 2, 0}},
        {{0, false, 1, 7, 11}, {1, false, 1, 10, 0}, {2, false, 1, 4, 5}},
        {{3, false, 1, 7, 0}, {4, false, 1, 10, 20}, {5, false, 1, 3, 0}},
        {{5, true, 5, 5, 0}, {0, false, 1, 8, 11}, {1, false, 1, 11, 0}},
        {{5, true, 5, 5, 0}, {1, false, 1, 11, 0}, {4, false, 1, 10, 20}},
        {{5, true, 6, 6, 4}, {1, false, 1, 12, 0}, {3, false, 1, 8, 0}},
        {{5, true, 4, 4, 0}, {1, false, 1, 13, 0}, {3, false, 1, 9, 0}}};
    v06_reset(r);
    for (int i = 0; i < 2 * COUNT_OF(steps); i++) {
        bool again = i % 2;
        v06_fields(r, steps[i / 2], 3);
        r->no_key = again || r->f.num_encoder_tokens == 0;
        if (again && r->f.num_encoder_tokens == 0) r->f.cross_slot_mapping = NULL;
        r->f.encoder_seq_lens = r->f.encoder_seq_lens_tensor = r->encoder_lens;
        v06_rerun(r, "X");
        check_zeros(r);
        if (r->f.num_prefills > 0) some_encoders_biased(r);
    }
}

/* Cross attention in a step without any encoder: every row sees no key and is zeros. */
void v06_same_no_encoder(v06 *r)
{
    static const v06_seq steps[][2] = {{{0, true, 6, 6, 0}, {1, true, 9, 9, 0}},
                                       {{0, false, 1, 7, 0}, {1, false, 1, 10, 0}}};
    for (int i = 0; i < 6; i++) {
        v06_reset(r);
        v06_fields(r, steps[i % 2], 2);
        r->f.encoder_seq_lens = r->f.encoder_seq_lens_tensor = r->encoder_lens;
        if (i < 2) { /* else tensors of (0) and (2, 0), whose data is NULL */
            r->f.cross_slot_mapping = r->cross_slots;
            r->f.cross_block_tables = r->cross_tables;
            r->f.cross_block_tables_stride = r->blocks_per_seq;
        }
        v06_remake(r);
        CHECK(folio_vllm06_is_all_cross_attn_metadata_set(r->m));
        r->no_key = i < 4;
        folio_vllm06_forward_args a = v06_args(r, CROSS);
        CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
        for (int64_t k = 0; k < r->out_rows * v06_width(r); k++) CHECK(v06_out(r, 0, k) == 0.0);
        v06_check_images(r);
        r->f.cross_block_tables = NULL; /* rows that are missing are no empty tensor */
        r->f.cross_block_tables_stride = r->blocks_per_seq;
        v06_remake(r);
        CHECK(!folio_vllm06_is_all_cross_attn_metadata_set(r->m));
    }
    some_encoders(r);
}

/* A bias over encoder keys that are new, and over the same when they are cached. */
void v06_same_cross_bias_of_cached_encoder(v06 *r)
{
    static const v06_seq prompts[] = {{0, true, 6, 6, 11}, {1, true, 6, 6, 20}};
    static float numbers[2][6 * 20];
    const folio_vllm06_bias biases[] = {{numbers[0], 1, 6, 11}, {numbers[1], 1, 6, 20}};
    for (int i = 0; i < 2 * 6 * 20; i++)
        (&numbers[0][0])[i] = i % 7 == 0 ? -INFINITY : (float)(i % 5);
    v06_step(r, prompts, 2);
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, CROSS, biases));
    v06_check_biases(r, CROSS, biases, 2);
    v06_run(r, "X");
    r->no_key = true;
    v06_run(r, "X");
}
