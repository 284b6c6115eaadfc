/* vllm06_same_metadata.c: the fields of metadata, and the builder that makes them, in all three originals; see
 * vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

#include <math.h>
#include <stdlib.h>

static const v06_seq two_prompts[] = {{0, true, 13, 13, 0}, {1, true, 8, 8, 0}};
static const v06_seq two_decodes[] = {{1, false, 1, 9, 0}, {0, false, 1, 14, 0}};
static const v06_seq encoded_prompts[] = {{0, true, 6, 6, 11}, {1, true, 9, 17, 28}};
static const v06_seq encoded_decodes[] = {{2, false, 1, 7, 11}, {3, false, 1, 18, 28}};
static const v06_seq encoded_both[] = {{0, true, 6, 6, 11}, {1, false, 1, 18, 28}};
static const v06_seq mixed_step[] = {
    {2, true, 7, 7, 9}, {0, true, 5, 18, 11}, {3, true, 1, 1, 1}, {1, false, 1, 9, 20}};

static bool same_i32(const int32_t *a, const int32_t *b, int64_t n)
{
    return a != NULL && b != NULL && a != b && memcmp(a, b, (size_t)n * sizeof *a) == 0;
}

static bool same_i64(const int64_t *a, const int64_t *b, int64_t n)
{
    return a != NULL && b != NULL && a != b && memcmp(a, b, (size_t)n * sizeof *a) == 0;
}

/* Every field of m is what the rig's step says, in memory of its own. */
static void check_fields(const v06 *r, const folio_vllm06_metadata *m, int64_t stride,
                         int64_t cross_stride)
{
    const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(m), *e = &r->f;
    int64_t n = r->num_seqs;
    CHECK_INT(f->struct_size, sizeof *f);
    CHECK_INT(f->num_prefills, e->num_prefills);
    CHECK_INT(f->num_prefill_tokens, e->num_prefill_tokens);
    CHECK_INT(f->num_decode_tokens, e->num_decode_tokens);
    CHECK_INT(f->num_encoder_tokens, e->num_encoder_tokens);
    CHECK_INT(f->is_prompt, e->is_prompt);
    CHECK_INT(f->use_cuda_graph, e->use_cuda_graph);
    CHECK(same_i64(f->slot_mapping, e->slot_mapping, e->num_prefill_tokens + e->num_decode_tokens));
    CHECK(same_i32(f->seq_lens, e->seq_lens, n));
    CHECK(same_i32(f->seq_lens_tensor, e->seq_lens_tensor, n));
    CHECK(same_i32(f->query_start_loc, e->query_start_loc, n + 1));
    CHECK(same_i32(f->seq_start_loc, e->seq_start_loc, n + 1));
    CHECK(same_i32(f->context_lens_tensor, e->context_lens_tensor, n));
    CHECK(same_i32(f->encoder_seq_lens, e->encoder_seq_lens, n));
    CHECK(same_i32(f->encoder_seq_lens_tensor, e->encoder_seq_lens_tensor, n));
    CHECK(same_i64(f->cross_slot_mapping, e->cross_slot_mapping, e->num_encoder_tokens));
    CHECK(f->encoder_seq_start_loc == NULL); /* nobody gave it */
    CHECK_INT(f->block_tables_stride, stride);
    CHECK_INT(f->cross_block_tables_stride, cross_stride);
    for (int64_t i = 0; i < n; i++) {
        int64_t used = (r->lens[i] + r->block_size - 1) / r->block_size;
        int64_t cross = (r->encoder_lens[i] + r->block_size - 1) / r->block_size;
        CHECK(same_i32(f->block_tables + i * stride, e->block_tables + i * e->block_tables_stride,
                       used));
        CHECK(same_i32(f->cross_block_tables + i * cross_stride,
                       e->cross_block_tables + i * e->cross_block_tables_stride, cross));
    }
    CHECK(f->attn_bias == NULL && f->encoder_attn_bias == NULL && f->cross_attn_bias == NULL);
}

/* Maxima of the step below. */
static void check_maxima(const folio_vllm06_metadata_fields *f, int64_t query, int64_t prefill,
                         int64_t decode, int64_t encoder)
{
    CHECK_INT(f->max_query_len, query);
    CHECK_INT(f->max_prefill_seq_len, prefill);
    CHECK_INT(f->max_decode_seq_len, decode);
    CHECK_INT(f->max_encoder_seq_len, encoder);
}

void v06_same_metadata_fields(v06 *r)
{
    v06_step(r, encoded_prompts, 2);
    check_fields(r, r->m, r->blocks_per_seq, r->blocks_per_seq);
    check_maxima(v06_get(r), 9, 17, 0, 28);
    v06_step(r, encoded_decodes, 2);
    check_fields(r, r->m, r->blocks_per_seq, r->blocks_per_seq);
    check_maxima(v06_get(r), 1, 0, 18, 28);
    v06_fields(r, encoded_both, 2);
    v06_narrow_cross(r, 5);
    v06_remake(r);
    check_fields(r, r->m, r->blocks_per_seq, 5);
    check_maxima(v06_get(r), 6, 6, 18, 28);
    v06_fields(r, encoded_decodes, 2);
    folio_vllm06_metadata *m = NULL;
    int32_t rows[2 * 3]; /* narrower than the cross block tables */
    memcpy(rows, r->tables, sizeof rows / 2);
    memcpy(rows + 3, r->tables + r->blocks_per_seq, sizeof rows / 2);
    r->f.block_tables = rows;
    r->f.block_tables_stride = 3;
    r->f.max_decode_seq_len = 40; /* a hint larger than any length stays */
    r->f.use_cuda_graph = 1;
    v06_remake(r);
    check_fields(r, r->m, 3, r->blocks_per_seq);
    check_maxima(v06_get(r), 1, 0, 40, 28);
    CHECK(folio_vllm06_metadata_get(NULL) == NULL);
    const folio_vllm06_metadata_fields *live = v06_get(r);
    CHECK(live == v06_get(r) && live->encoder_attn_bias == NULL);
    const float number = 1.0f;
    const folio_vllm06_bias bias = {&number, 1, 1, 1};
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, ENCODER, &bias));
    CHECK(live->encoder_attn_bias != NULL); /* no copy: it shows what is set later */
    /* What the arrays tell is worked out. */
    v06_fields(r, two_prompts, 2);
    r->f.num_prefill_tokens = 0;
    r->f.query_start_loc = r->f.seq_start_loc = r->f.context_lens_tensor = NULL;
    r->f.seq_lens = NULL;
    v06_remake(r);
    CHECK_INT(v06_get(r)->num_prefill_tokens, 21);
    CHECK(folio_vllm06_prefill_metadata(r->m) != NULL);
    v06_fields(r, two_decodes, 2);
    r->f.seq_lens_tensor = NULL;
    v06_remake(r);
    check_maxima(v06_get(r), 1, 0, 14, 0);
    CHECK(folio_vllm06_decode_metadata(r->m) != NULL);
    /* steps of each kind with the tensor alone, and with the list alone */
    static const v06_seq *const kinds[] = {two_prompts, two_decodes, encoded_both};
    static const int64_t longest[][2] = {{13, 0}, {0, 14}, {6, 18}};
    for (int i = 0; i < 2 * COUNT_OF(kinds); i++) {
        v06_fields(r, kinds[i / 2], 2);
        *(i % 2 == 0 ? &r->f.seq_lens : &r->f.seq_lens_tensor) = NULL;
        v06_remake(r);
        check_maxima(v06_get(r), r->f.num_prefills > 0 ? longest[i / 2][0] : 1, longest[i / 2][0],
                     longest[i / 2][1], i / 2 == 2 ? 28 : 0);
    }
    v06_fields(r, two_prompts, 2); /* chunked_prefill: prompts need only seq_lens */
    r->f.chunked_prefill = 1;
    r->f.seq_lens_tensor = r->f.block_tables = NULL;
    v06_remake(r);
    check_maxima(v06_get(r), 13, 13, 0, 0);
    CHECK(same_i32(v06_get(r)->query_start_loc, r->starts, 3));
    v06_fields(r, two_decodes, 2); /* and decodes only seq_lens_tensor */
    r->f.chunked_prefill = 1;
    r->f.seq_lens = r->f.query_start_loc = NULL;
    v06_remake(r);
    check_maxima(v06_get(r), 1, 0, 14, 0);
    v06_fields(r, two_decodes, 2); /* from a caller with a shorter struct */
    r->f.struct_size = offsetof(folio_vllm06_metadata_fields, seqlen_q);
    v06_remake(r);
    CHECK_INT(v06_get(r)->struct_size, sizeof r->f);
    check_maxima(v06_get(r), 1, 0, 14, 0);
    static const v06_seq *const steps[] = {encoded_both, encoded_both, two_prompts, two_decodes};
    for (int i = 0; i < COUNT_OF(steps); i++) { /* each kind needs its own */
        v06_fields(r, steps[i], 2);
        r->f.chunked_prefill = 1;
        if (i % 2 == 0) r->f.seq_lens = NULL;
        else r->f.seq_lens_tensor = NULL;
        REJECTED(folio_vllm06_make_metadata(r->state, r->b, &r->f, &m),
                 i % 2 == 0 ? "of the prompts, is NULL" : "of the decodes, is NULL");
    }
    v06_fields(r, NULL, 0); /* an empty step */
    r->f.seq_lens = r->f.seq_lens_tensor = NULL;
    v06_remake(r);
    check_maxima(v06_get(r), 0, 0, 0, 0);
    static const v06_seq nothing_new[] = {{0, true, 0, 6, 0}, {1, true, 8, 8, 0}};
    v06_step(r, nothing_new, 2);
    check_maxima(v06_get(r), 8, 8, 0, 0);
    v06_fields(r, two_prompts, 2); /* a stride of tables that are not given */
    r->f.prefill_block_tables_stride = 3;
    v06_remake(r);
    CHECK(v06_get(r)->prefill_block_tables == NULL);
    /* fields by a caller who knows fewer of them */
    v06_fields(r, two_prompts, 2);
    r->f.struct_size = offsetof(folio_vllm06_metadata_fields, max_decode_query_len);
    r->f.max_decode_query_len = r->f.max_seqlen = 99;
    v06_remake(r);
    CHECK_INT(v06_get(r)->struct_size, sizeof r->f);
    CHECK_INT(v06_get(r)->max_decode_query_len, 0);
    CHECK_INT(v06_get(r)->max_seqlen, 13);
    /* maxima that are too small, and not 0; the prompt is longer than the decode */
    static const v06_seq longer[] = {{0, true, 30, 30, 11}, {1, false, 1, 18, 20}};
    v06_fields(r, longer, 2);
    r->f.max_query_len = r->f.max_prefill_seq_len = r->f.max_decode_seq_len = 1;
    r->f.max_encoder_seq_len = 1;
    v06_remake(r);
    check_maxima(v06_get(r), 30, 30, 18, 20);
    v06_fields(r, longer, 2); /* larger than any, and each another */
    r->f.max_query_len = 50;
    r->f.max_prefill_seq_len = 60;
    r->f.max_decode_seq_len = 70;
    r->f.max_encoder_seq_len = 80;
    v06_remake(r);
    check_maxima(v06_get(r), 50, 60, 70, 80);
    /* of each kind the first is the longest */
    static const v06_seq falling[] = {
        {0, true, 9, 17, 20}, {1, true, 6, 6, 11}, {2, false, 1, 18, 5}, {3, false, 1, 7, 4}};
    v06_step(r, falling, 4);
    check_maxima(v06_get(r), 9, 17, 18, 20);
    CHECK(v06_get(r)->max_seqlen == 17);
    CHECK(v06_get(r)->max_kv_len == 17);
}

/* The same step through the builder; the encoders of prompts are new, or cached already. */
static folio_vllm06_metadata *build_as(const v06 *r, folio_vllm06_builder *builder, bool fresh)
{
    for (int i = 0; i < r->num_seqs; i++) v06_add(r, builder, i, fresh);
    folio_vllm06_metadata *m = NULL;
    CHECK_OK(folio_vllm06_builder_build(builder, &m));
    return m;
}

static folio_vllm06_metadata *build(const v06 *r, folio_vllm06_builder *builder)
{
    return build_as(r, builder, true);
}

/* The fields of encoders: the longest comes first and the last sequence has none; tokens of new encoders are counted,
 * those of cached ones and of decodes are not. */
static void build_encoders(v06 *r, folio_vllm06_builder *builder)
{
    static const v06_seq falling[] = {
        {0, true, 6, 6, 28}, {1, true, 9, 17, 11}, {2, false, 1, 7, 20}, {3, false, 1, 18, 0}};
    for (int fresh = 0; fresh < 2; fresh++) {
        v06_fields(r, falling, 4);
        if (!fresh) r->f.num_encoder_tokens = 0;
        folio_vllm06_metadata *m = build_as(r, builder, fresh);
        check_fields(r, m, 3, 4);
        check_maxima(folio_vllm06_metadata_get(m), 9, 17, 18, 28);
        const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(m);
        CHECK_INT(f->num_encoder_tokens, fresh ? 39 : 0);
        for (int k = 0; k < 4; k++) {
            CHECK(f->cross_block_tables[k] == r->cross_tables[k]); /* of prompts too */
            CHECK((f->cross_block_tables[4 + k] == FOLIO_NO_BLOCK) == (k >= 2));
            CHECK((f->cross_block_tables[8 + k] == FOLIO_NO_BLOCK) == (k == 3));
            CHECK_INT(f->cross_block_tables[12 + k], FOLIO_NO_BLOCK);
        }
        folio_vllm06_metadata_destroy(m);
    }
}

/* Without chunked prefill whole prompts have no tables. */
static void build_whole_prompts(v06 *r)
{
    folio_vllm06_builder *builder = NULL;
    folio_vllm06_builder_desc d = {.struct_size = sizeof d, .block_size = r->block_size};
    CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &builder));
    v06_fields(r, two_prompts, 2);
    folio_vllm06_metadata *m = build(r, builder);
    const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(m);
    CHECK(f != NULL && f->num_prefills == 2 && f->block_tables == NULL);
    CHECK(f != NULL && f->multi_modal_placeholder_index_maps == NULL);
    CHECK(f != NULL && same_i64(f->slot_mapping, r->slots, 21));
    folio_vllm06_metadata_destroy(m);
    v06_fields(r, encoded_prompts, 2); /* but the second one, with context, has its table */
    m = build(r, builder);
    f = folio_vllm06_metadata_get(m);
    CHECK(f != NULL && f->block_tables_stride == 3 && f->block_tables[0] == FOLIO_NO_BLOCK);
    CHECK(f != NULL && same_i32(f->block_tables + 3, r->tables + r->blocks_per_seq, 3));
    folio_vllm06_metadata_destroy(m);
    static const v06_seq chunks[] = {{0, true, 9, 17, 0}, {1, true, 2, 6, 0}};
    v06_fields(r, chunks, 2);
    m = build(r, builder);
    f = folio_vllm06_metadata_get(m);
    CHECK(f != NULL && f->block_tables_stride == 3);
    CHECK(f != NULL && f->block_tables[3] == r->tables[r->blocks_per_seq]);
    for (int k = 4; f != NULL && k < 6; k++) CHECK_INT(f->block_tables[k], FOLIO_NO_BLOCK);
    folio_vllm06_metadata_destroy(m);
    folio_vllm06_builder_destroy(builder);
}

/* The longest table is not the last one. The last is that of a decode without context. */
static void build_falling(v06 *r, folio_vllm06_builder *builder)
{
    static const v06_seq falling[] = {{0, false, 1, 14, 0}, {1, false, 1, 1, 0}};
    v06_fields(r, falling, 2);
    folio_vllm06_builder_desc d = {.struct_size = sizeof d, .block_size = r->block_size};
    folio_vllm06_builder *plain = NULL;
    CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &plain));
    for (int i = 0; i < 2; i++) { /* with chunked prefill and without */
        folio_vllm06_metadata *m = build(r, i ? plain : builder);
        const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(m);
        CHECK(f != NULL && f->block_tables_stride == 2 && same_i32(f->block_tables, r->tables, 2));
        CHECK(f != NULL && f->block_tables[2] == r->tables[r->blocks_per_seq]);
        CHECK(f != NULL && f->block_tables[3] == FOLIO_NO_BLOCK);
        folio_vllm06_metadata_destroy(m);
    }
    folio_vllm06_builder_destroy(plain);
}

void v06_same_metadata_builder(v06 *r)
{
    folio_vllm06_builder *builder = NULL;
    v06_step(r, encoded_prompts, 2);
    folio_vllm06_builder_desc d = {
        .struct_size = sizeof d, .block_size = r->block_size, .chunked_prefill_enabled = 1};
    CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &builder));
    folio_vllm06_metadata *m = build(r, builder);
    check_fields(r, m, 3, 4);
    check_maxima(folio_vllm06_metadata_get(m), 9, 17, 0, 28);
    CHECK_INT(folio_vllm06_metadata_get(m)->num_encoder_tokens, 39);
    folio_vllm06_metadata_destroy(m);
    v06_fields(r, encoded_decodes, 2); /* the builder is empty again */
    m = build(r, builder);
    check_fields(r, m, 3, 4);
    check_maxima(folio_vllm06_metadata_get(m), 1, 0, 18, 28);
    CHECK_INT(folio_vllm06_metadata_get(m)->num_encoder_tokens, 0);
    folio_vllm06_metadata_destroy(m);
    v06_fields(r, encoded_both, 2); /* one array for prompts and decodes, of torch-sdpa too */
    m = build(r, builder);
    check_fields(r, m, 3, 4);
    check_maxima(folio_vllm06_metadata_get(m), 6, 6, 18, 28);
    CHECK_INT(folio_vllm06_metadata_get(m)->chunked_prefill, 0);
    CHECK(folio_vllm06_metadata_get(m)->multi_modal_placeholder_index_maps == NULL);
    folio_vllm06_metadata_destroy(m);
    v06_fields(r, two_decodes, 2);
    m = build(r, builder);
    const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(m);
    CHECK(f->encoder_seq_lens == NULL && f->cross_block_tables == NULL && !f->is_prompt);
    CHECK(f->encoder_seq_lens_tensor == NULL && f->cross_slot_mapping == NULL);
    CHECK(f->multi_modal_placeholder_index_maps == NULL);
    folio_vllm06_metadata_destroy(m);
    CHECK_OK(folio_vllm06_builder_build(builder, &m)); /* an empty step */
    f = folio_vllm06_metadata_get(m);
    CHECK(f->num_prefills == 0 && f->num_prefill_tokens == 0 && f->num_decode_tokens == 0);
    folio_vllm06_metadata_destroy(m);
    build_whole_prompts(r);
    build_falling(r, builder);
    build_encoders(r, builder);
    folio_vllm06_builder *none = NOWHERE;
    for (int i = 0; i < 2; i++) { /* the smallest and the largest */
        folio_vllm06_builder_desc limits = FOLIO_WITH(
            folio_vllm06_builder_desc, .block_size = i ? 4096 : 1,
            .sliding_window = i ? INT32_MAX : 0, .max_seq_len_to_capture = i ? INT32_MAX : 0);
        CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &limits, &none));
        folio_vllm06_builder_destroy(none);
    }
    none = NOWHERE;
    REJECTED(folio_vllm06_builder_create(NULL, r->b, &d, &none), "NULL");
    REJECTED(folio_vllm06_builder_create(r->state, NULL, &d, &none), "NULL");
    REJECTED(folio_vllm06_builder_create(r->state, r->b, NULL, &none), "NULL");
    REJECTED(folio_vllm06_builder_create(r->state, r->b, &d, NULL), "out");
    d.max_seq_len_to_capture = INT64_MAX;
    REJECTED(folio_vllm06_builder_create(r->state, r->b, &d, &none),
             "max_seq_len_to_capture is 9223372036854775807");
    d.max_seq_len_to_capture = -1;
    REJECTED(folio_vllm06_builder_create(r->state, r->b, &d, &none),
             "max_seq_len_to_capture is -1");
    d.sliding_window = INT64_MAX;
    REJECTED(folio_vllm06_builder_create(r->state, r->b, &d, &none),
             "sliding_window is 9223372036854775807");
    d.sliding_window = -1;
    REJECTED(folio_vllm06_builder_create(r->state, r->b, &d, &none), "sliding_window is -1");
    d.block_size = 4097;
    REJECTED(folio_vllm06_builder_create(r->state, r->b, &d, &none), "block_size is 4097");
    d.block_size = 0;
    REJECTED(folio_vllm06_builder_create(r->state, r->b, &d, &none), "block_size is 0");
    CHECK(none == NULL);
    folio_vllm06_builder_destroy(builder);
}

void v06_same_get_seq_lens(v06 *r)
{
    v06_step(r, encoded_prompts, 2);
    const folio_vllm06_metadata_fields *f = v06_get(r);
    CHECK_INT(DECODER, 0); /* what a caller gets who says nothing */
    for (int type = 0; type < FOLIO_NUM_ATTENTION_TYPES; type++) {
        const int32_t *q = NULL, *kv = NULL;
        bool encoder = type == ENCODER, cross = type == CROSS;
        CHECK_OK(folio_vllm06_get_seq_lens(r->m, (folio_attention_type)type, &q, &kv));
        CHECK(q == (encoder ? f->encoder_seq_lens : f->seq_lens));
        CHECK(kv == (encoder || cross ? f->encoder_seq_lens : f->seq_lens));
    }
    const int32_t *q, *kv;
    for (int i = 0; i < 2; i++) { /* a value that is no type, in each call that takes one */
        folio_attention_type none = (folio_attention_type)(i == 0 ? 4 : -1);
        const char *words = i == 0 ? "type 4 is unknown" : "type -1 is unknown";
        folio_vllm06_seq_len_block_table_args args;
        const folio_vllm06_bias *got;
        REJECTED(folio_vllm06_get_seq_lens(r->m, none, &q, &kv), words);
        REJECTED(folio_vllm06_get_seq_len_block_table_args(r->m, 1, none, &args), words);
        REJECTED(folio_vllm06_get_attn_bias(r->m, none, &got), words);
        REJECTED(folio_vllm06_set_attn_bias(r->m, none, NULL), words);
        folio_vllm06_forward_args a = v06_args(r, DECODER);
        a.attn_type = none;
        V06_REJECTED(r, &a, words);
    }
    REJECTED(folio_vllm06_get_seq_lens(NULL, DECODER, &q, &kv), "NULL");
    REJECTED(folio_vllm06_get_seq_lens(r->m, DECODER, NULL, &kv), "NULL");
    REJECTED(folio_vllm06_get_seq_lens(r->m, DECODER, &q, NULL), "NULL");
}

void v06_same_get_seq_len_block_table_args(v06 *r)
{
    for (int chunked = 0; chunked < 2; chunked++) {
        v06_fields(r, mixed_step, 4);
        v06_narrow_cross(r, 3);
        if (chunked) { /* lengths and tables of prompts and of decodes apart */
            r->f.chunked_prefill = 1;
            r->f.seq_lens_tensor = r->lens + 3;
            r->f.prefill_block_tables = r->tables;
            r->f.prefill_block_tables_stride = r->blocks_per_seq;
            r->f.block_tables = r->tables + 3 * r->blocks_per_seq;
        }
        v06_remake(r);
        const folio_vllm06_metadata_fields *f = v06_get(r);
        folio_vllm06_seq_len_block_table_args a;
        for (int prompt = 0; prompt < 2; prompt++) {
            const int32_t *lens = chunked && prompt ? f->seq_lens : f->seq_lens_tensor;
            const int32_t *tables = chunked && prompt ? f->prefill_block_tables : f->block_tables;
            for (int type = 0; type < FOLIO_NUM_ATTENTION_TYPES; type++) {
                bool of_encoder = type == ENCODER || type == CROSS;
                CHECK_OK(folio_vllm06_get_seq_len_block_table_args(r->m, prompt,
                                                                   (folio_attention_type)type, &a));
                CHECK(a.seq_lens == (of_encoder ? f->encoder_seq_lens_tensor : lens));
                CHECK_INT(a.max_seq_len, of_encoder ? 20 : prompt ? 18 : 9);
                CHECK(a.block_tables == (type == DECODER ? tables
                                         : type == CROSS ? f->cross_block_tables
                                                         : NULL));
                CHECK_INT(a.block_tables_stride, type == DECODER ? r->blocks_per_seq
                                                 : type == CROSS ? 3
                                                                 : 0);
            }
        }
        REJECTED(folio_vllm06_get_seq_len_block_table_args(r->m, 1, (folio_attention_type)4, &a),
                 "4");
        REJECTED(folio_vllm06_get_seq_len_block_table_args(r->m, 1, DECODER, NULL), "NULL");
    }
}
