/* vllm06_same_errors.c: layers, metadata and builders that are refused, with nothing written; see vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

#include <math.h>
#include <stdlib.h>

static const v06_seq two_decodes[] = {{1, false, 1, 9, 0}, {0, false, 1, 14, 0}};
static const v06_seq encoded_prompts[] = {{0, true, 6, 6, 11}, {1, true, 9, 17, 20}};
static const v06_seq encoded_mixed[] = {{0, true, 6, 6, 11}, {1, false, 1, 9, 20}};
static const v06_seq encoded_decode[] = {{1, false, 1, 9, 20}};

/* Fields of encoders that are missing, and NULL for a tensor that is empty in vLLM: the slots if no prompt has an
 * encoder, the tables, with stride 0, if no decode has one. */
V06_TEST(incomplete_metadata)
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
    for (int i = 0; i < 5 * COUNT_OF(steps); i++) {
        int missing = i % 5; /* slots, tables, lengths, their tensor, tables with a stride */
        bool complete = missing < 2 && !steps[i / 5].needs[missing];
        v06_fields(r, steps[i / 5].seqs, steps[i / 5].num_seqs);
        if (missing == 0) r->f.cross_slot_mapping = NULL;
        if (missing == 1 || missing == 4) r->f.cross_block_tables = NULL;
        if (missing == 1) r->f.cross_block_tables_stride = 0;
        if (missing == 2) r->f.num_encoder_tokens = 0;
        *(missing == 2 ? &r->f.encoder_seq_lens : &r->f.encoder_seq_lens_tensor) =
            missing == 2 || missing == 3 ? NULL : r->encoder_lens;
        v06_remake(r);
        bool lengths = missing != 2 && missing != 3;
        CHECK_INT(folio_vllm06_is_all_encoder_attn_metadata_set(r->m), lengths);
        CHECK_INT(folio_vllm06_is_all_cross_attn_metadata_set(r->m), complete);
        if (!lengths) V06_REJECTS(r, ENCODER, "encoder metadata");
        if (complete) v06_run(r, "X");
        else V06_REJECTS(r, CROSS, "cross-attention metadata");
    }
    CHECK_INT(folio_vllm06_is_all_encoder_attn_metadata_set(NULL), 0);
    CHECK_INT(folio_vllm06_is_all_cross_attn_metadata_set(NULL), 0);
    v06_fields(r, encoded_prompts, 2);
    r->f.num_encoder_tokens =
        0; /* key, or none of its rows, and the prompts' encoders have tokens */
    v06_remake(r);
    for (int i = 0; i < 2; i++) {
        folio_vllm06_forward_args a = v06_args(r, i ? CROSS : ENCODER);
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

V06_TEST(init_errors)
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
    BAD_FIELDS(encoded_prompts, r->f.chunked_prefill = 2, "chunked_prefill is 2");
    BAD_FIELDS(encoded_prompts, r->f.prefill_block_tables_stride = INT64_MAX,
               "prefill_block_tables_stride 9223372036854775807");
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
    static const int32_t others[V06_SEQS] = {6, 16};
    BAD_FIELDS(encoded_mixed, r->f.seq_lens_tensor = others,
               "seq_lens[1] is 9|seq_lens_tensor[1] is 16");
    BAD_FIELDS(encoded_prompts, r->f.seq_lens = r->f.seq_lens_tensor = NULL, "seq_lens");
    BAD_FIELDS(two_decodes, r->lens[1] = -3, "seq_lens[1] is -3");
    BAD_FIELDS(two_decodes, (r->f.seq_lens = NULL, r->lens[1] = -3), "seq_lens[1] is -3");
    BAD_FIELDS(encoded_prompts, r->f.seq_lens_tensor = others,
               "seq_lens[1] is 17|seq_lens_tensor[1] is 16");
    BAD_FIELDS(encoded_prompts, (r->f.chunked_prefill = 1, r->f.seq_lens_tensor = others),
               "seq_lens[1] is 17|seq_lens_tensor[1] is 16");
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
    /* slot -1 is no padding: the step is no graph's */
    BAD_FIELDS(two_decodes, (r->contexts[1] = 12, r->slots[1] = -1),
               "decode 1|context_len 12, less than the 13 keys");
    BAD_FIELDS(encoded_mixed, r->contexts[1] = 7, "decode 1|context_len 7");
    BAD_FIELDS(two_decodes, r->starts[2] = 1, "decode 1|0 new tokens");
    BAD_FIELDS(two_decodes, r->starts[2] = 85, "decode 1|84 new tokens");
}

static void bad_encoders(v06 *r)
{
    static const int64_t not_31[] = {-1, 20, 32};
    static const int32_t last_other[] = {11, 19};
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
    BAD_FIELDS(encoded_decode, r->encoder_lens[0] = -1, "encoder_seq_lens[0]");
    BAD_FIELDS(encoded_prompts, r->f.encoder_seq_lens_tensor = r->lens,
               "encoder_seq_lens[0] is 11|encoder_seq_lens_tensor[0] is 6");
    BAD_FIELDS(encoded_mixed, r->f.encoder_seq_lens_tensor = last_other,
               "encoder_seq_lens[1] is 20|encoder_seq_lens_tensor[1] is 19");
}

/* Running sums that are not those of the lengths, at their first entry or at their last. */
static void bad_sums(v06 *r)
{
    static const v06_seq seqs[] = {{0, true, 6, 6, 11}, {1, true, 9, 17, 20}, {2, false, 1, 19, 3}};
    static const struct {
        size_t field;
        const char *name;
        int32_t sums[4];
        int n;
    } arrays[] = {
        {offsetof(folio_vllm06_metadata_fields, seq_start_loc),
         ": seq_start_loc",
         {0, 6, 23, 42},
         3},
        {offsetof(folio_vllm06_metadata_fields, encoder_seq_start_loc),
         "encoder_seq_start_loc",
         {0, 11, 31, 34},
         3},
        {offsetof(folio_vllm06_metadata_fields, seqlen_q), "seqlen_q", {0, 6, 15}, 2},
        {offsetof(folio_vllm06_metadata_fields, kv_start_loc), "kv_start_loc", {0, 6, 23}, 2}};
    for (int i = 0; i < 3 * COUNT_OF(arrays); i++) {
        int32_t sums[4];
        const int32_t *given = sums;
        char words[64];
        int at = i % 3 * arrays[i / 3].n / 2; /* first, a middle one, last */
        memcpy(sums, arrays[i / 3].sums, sizeof sums);
        sums[at]++;
        snprintf(words, sizeof words, "%s[%d] is %d|add up to %d", arrays[i / 3].name, at, sums[at],
                 sums[at] - 1);
        BAD_FIELDS(seqs, memcpy((char *)&r->f + arrays[i / 3].field, &given, sizeof given), words);
    }
    const int32_t bad[] = {0, 11, 31, 34};
    BAD_FIELDS(seqs,
               (r->f.encoder_seq_start_loc = bad, r->f.encoder_seq_lens = NULL,
                r->f.num_encoder_tokens = 0),
               "encoder_seq_lens is NULL");
    BAD_FIELDS(seqs, r->starts[0] = 1, "query_start_loc[0] is 1");
    r->starts[0] = 0;
    BAD_FIELDS(seqs, r->starts[3] = 17, "decode 2 has 2 new tokens");
}

/* Fields that contradict each other. */
V06_TEST(metadata_errors)
{
    folio_vllm06_metadata *m = NOWHERE;
    v06_open(r);
    bad_counts(r);
    bad_lengths(r);
    bad_encoders(r);
    bad_sums(r);
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
    BAD_SEQ(s.num_blocks = INT64_MAX / 2, "num_blocks is 4611");
    BAD_SEQ(s.num_blocks = -1, "num_blocks is -1");
    BAD_SEQ(s.block_table = NULL, " block_table is NULL");
    BAD_SEQ(s.num_cross_blocks = INT64_MAX / 2, "num_cross_blocks is 4611");
    BAD_SEQ(s.num_cross_blocks = -1, "num_cross_blocks is -1");
    BAD_SEQ(s.cross_block_table = NULL, "cross_block_table is NULL");
    BAD_SEQ((s.block_table = NULL, s.num_cross_blocks = 0), " block_table is NULL");
    BAD_SEQ((s.cross_block_table = NULL, s.num_blocks = 0), "cross_block_table is NULL");
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

static void bad_builders(const v06 *r)
{
    static const struct {
        int64_t block_size, window, max_len;
        const char *words; /* NULL: taken */
    } cases[] = {{1, 0, 0, NULL},
                 {4096, INT32_MAX, INT32_MAX, NULL},
                 {0, 0, 0, "block_size is 0"},
                 {4097, 0, 0, "block_size is 4097"},
                 {8, -1, 0, "sliding_window is -1"},
                 {8, INT64_MAX, 0, "sliding_window is 9223372036854775807"},
                 {8, 0, -1, "max_seq_len_to_capture is -1"},
                 {8, 0, INT64_MAX, "max_seq_len_to_capture is 9223372036854775807"}};
    folio_vllm06_builder *builder = NOWHERE;
    for (int i = 0; i < COUNT_OF(cases); i++) {
        const folio_vllm06_builder_desc d = FOLIO_WITH(
            folio_vllm06_builder_desc, .block_size = cases[i].block_size,
            .sliding_window = cases[i].window, .max_seq_len_to_capture = cases[i].max_len);
        if (cases[i].words == NULL) {
            CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &builder));
            folio_vllm06_builder_destroy(builder);
            continue;
        }
        builder = NOWHERE;
        REJECTED(folio_vllm06_builder_create(r->state, r->b, &d, &builder), cases[i].words);
        REJECTED(folio_vllm06_builder_create(NULL, r->b, &d, &builder), "NULL");
        REJECTED(folio_vllm06_builder_create(r->state, r->b, NULL, &builder), "NULL");
        REJECTED(folio_vllm06_builder_create(r->state, r->b, &d, NULL), "out");
        CHECK(builder == NULL);
    }
}

/* A decode with more blocks than a graph's row of 5, also after the clip to a window of 40; a prompt; counts that are
 * none. What was refused is built without padding. */
static void bad_padding(const v06 *r)
{
    static const struct {
        int64_t len[2];
        int prompts;
        int64_t by, window, max_len;
        const char *words;
    } cases[] = {{{41, 40}, 0, 1, 0, 33, "sequence 0 has 6 blocks|row holds 5"},
                 {{40, 41}, 0, 1, 0, 33, "sequence 1 has 6 blocks"},
                 {{60, 1}, 0, 1, 40, 33, "6 blocks|row holds 5"},
                 {{3, 40}, 1, 1, 0, 33, "sequence 0 is a prompt"},
                 {{3, 3}, 0, -1, 0, 33, "-1"},
                 {{3, 3}, 0, INT32_MAX, 0, 33, "2147483645"},
                 {{3, 3}, 0, 1, 0, 0, "no max_seq_len"}};
    static const int32_t table[] = {7, 2, 5, 9, 1, 3, 4, 0};
    for (int i = 0; i < COUNT_OF(cases); i++) {
        folio_vllm06_builder *builder = NULL;
        folio_vllm06_metadata *m = NULL;
        const folio_vllm06_builder_desc d = FOLIO_WITH(folio_vllm06_builder_desc, .block_size = 8,
                                                       .sliding_window = cases[i].window,
                                                       .max_seq_len_to_capture = cases[i].max_len);
        CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &builder));
        for (int k = 0; k < 2; k++) {
            bool prompt = k < cases[i].prompts;
            int64_t len = cases[i].len[k], token_len = prompt ? len : 1;
            const folio_vllm06_seq s = FOLIO_WITH(
                folio_vllm06_seq, .is_prompt = prompt, .token_len = token_len,
                .context_len = len - token_len, .block_table = table, .num_blocks = (len + 7) / 8);
            CHECK_OK(folio_vllm06_builder_add(builder, &s));
        }
        REJECTED(folio_vllm06_builder_pad(builder, cases[i].by), cases[i].words);
        CHECK_OK(folio_vllm06_builder_build(builder, &m));
        const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(m);
        CHECK(f->num_prefills + f->num_decode_tokens == 2 && f->use_cuda_graph == 0);
        folio_vllm06_metadata_destroy(m);
        folio_vllm06_builder_destroy(builder);
    }
    REJECTED(folio_vllm06_builder_pad(NULL, 1), "NULL");
}

V06_TEST(builder_errors)
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
    bad_builders(r);
    bad_padding(r);
    bad_sequences(first, &good);
    bad_steps(first, &good);
    missing_blocks(r, second, &good);
    folio_vllm06_builder_destroy(first);
    folio_vllm06_builder_destroy(second);
}
