/* vllm06_same_metadata.c: the fields of metadata, those that are worked out, and its views. */
#include "vllm06/vllm06_rig.h"

static const v06_seq prompts[] = {{0, true, 6, 6, 11}, {1, true, 9, 17, 28}};
/* of each kind the first is the longest */
static const v06_seq falling[] = {
    {0, true, 9, 17, 28}, {1, true, 6, 6, 11}, {2, false, 1, 18, 20}, {3, false, 1, 7, 4}};

/* A step with every field, the arrays of its own length each. */
static void full_step(v06 *r, const v06_seq *seqs, int n)
{
    static int32_t encoder_starts[V06_SEQS + 1];
    v06_fields(r, seqs, n);
    v06_narrow_cross(r, 5);
    if (n > 0) r->f.encoder_seq_start_loc = encoder_starts;
    for (int i = 0; i < n; i++) encoder_starts[i + 1] = encoder_starts[i] + r->encoder_lens[i];
    r->f.seqlen_q = r->starts;
    r->f.kv_start_loc = r->seq_starts;
    r->f.multi_modal_placeholder_index_maps = NOWHERE; /* not read */
    r->f.use_cuda_graph = r->f.num_decode_tokens > 0;
}

/* What was given is there, in arrays of its own; maxima and sums are worked out, and raised where they are too small. A
 * maximum that is larger stays. */
V06_TEST(metadata_fields)
{
    static const struct {
        const v06_seq *seqs;
        int n;
        int64_t query, prefill, decode, encoder;
    } steps[] = {{NULL, 0, 0, 0, 0, 0},          {prompts, 2, 9, 17, 0, 28},
                 {falling + 2, 2, 1, 0, 18, 20}, {falling + 1, 2, 6, 6, 18, 20},
                 {falling, 1, 9, 17, 0, 28},     {falling, 4, 9, 17, 18, 28}};
    for (int i = 0; i < COUNT_OF(steps) * 5; i++) {
        int form = i % 5; /* lengths as list, as tensor; maxima too small, too large */
        int64_t least = form == 3 ? 1 : form == 4 ? 90 : 0;
        full_step(r, steps[i / 5].seqs, steps[i / 5].n);
        if (form == 1) r->f.seq_lens = NULL;
        if (form == 2) r->f.seq_lens_tensor = NULL;
        if (form > 0) r->f.num_encoder_tokens = 0;
        if (form > 0) r->f.cross_slot_mapping = r->f.multi_modal_placeholder_index_maps = NULL;
        int64_t *maxima[] = {&r->f.max_query_len,       &r->f.max_prefill_seq_len,
                             &r->f.max_seqlen,          &r->f.max_kv_len,
                             &r->f.max_decode_seq_len,  &r->f.max_decode_query_len,
                             &r->f.max_encoder_seq_len, &r->f.num_prefill_tokens};
        int64_t prefill = steps[i / 5].prefill, decode = steps[i / 5].decode;
        const int64_t longest[] = {
            steps[i / 5].query,   prefill,   prefill, prefill, decode, decode > 0,
            steps[i / 5].encoder, *maxima[7]};
        for (int k = 0; k < 7; k++) *maxima[k] = least > 0 ? least + k : 0;
        *maxima[7] = form == 1 ? 0 : longest[7];
        r->f.is_prompt = 0;
        if (form == 0) r->f.is_prompt = prefill > 0 && decode == 0; /* may be given */
        v06_remake(r);
        for (int k = 0; k < 8; k++) *maxima[k] = longest[k] > *maxima[k] ? longest[k] : *maxima[k];
        r->f.is_prompt = prefill > 0 && decode == 0;
        v06_check_fields(r->m, &r->f);
    }
    CHECK(folio_vllm06_metadata_get(NULL) == NULL);
    const folio_vllm06_metadata_fields *live = v06_get(r);
    const float number = 1.0f;
    const folio_vllm06_bias biases[] = {{&number, 1, 1, 1}, {&number, 1, 1, 1}};
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, ENCODER, biases));
    CHECK(live->encoder_attn_bias != NULL); /* no copy: it shows what is set later */
    v06_fields(r, prompts, 2);              /* by a caller who knows fewer of them */
    r->f.struct_size = offsetof(folio_vllm06_metadata_fields, max_decode_query_len);
    r->f.max_decode_query_len = r->f.max_seqlen = 99;
    r->f.prefill_block_tables_stride = 3; /* a stride of tables that are not given */
    v06_remake(r);
    CHECK_INT(v06_get(r)->struct_size, sizeof r->f);
    CHECK(v06_get(r)->max_decode_query_len == 0 && v06_get(r)->max_seqlen == 17);
}

/* Of split arrays each kind needs its own. */
V06_TEST(split_fields)
{
    const v06_seq *const steps[] = {falling, prompts, falling + 2, falling};
    const int counts[] = {4, 2, 2, 4};
    for (int i = 0; i < 4; i++) {
        folio_vllm06_metadata *m = NOWHERE;
        v06_fields(r, steps[i], counts[i]);
        r->f.chunked_prefill = 1;
        bool lens = i == 0 || i == 1; /* of the prompts */
        *(lens ? &r->f.seq_lens : &r->f.seq_lens_tensor) = NULL;
        REJECTED(folio_vllm06_make_metadata(r->state, r->b, &r->f, &m),
                 lens ? "of the prompts, is NULL" : "of the decodes, is NULL");
        if (counts[i] == 4) continue;
        v06_fields(r, steps[i], 2); /* the other kind's may lack */
        r->f.chunked_prefill = 1;
        *(lens ? &r->f.seq_lens_tensor : &r->f.seq_lens) = NULL;
        if (!lens) r->f.query_start_loc = NULL;
        if (lens) r->f.block_tables = NULL;
        v06_remake(r);
        CHECK_INT(v06_get(r)->max_query_len, lens ? 9 : 1);
        CHECK_INT(v06_get(r)->max_decode_seq_len, lens ? 0 : 18);
    }
}

/* What the view of the prompts has of a step's fields, or that of the decodes. */
static folio_vllm06_metadata_fields view_of(const folio_vllm06_metadata_fields *step, bool prompts_)
{
    folio_vllm06_metadata_fields f = *step;
    int64_t p = f.num_prefills;
    bool split = f.chunked_prefill;
    f.is_prompt = prompts_;
    if (prompts_) {
        f.num_decode_tokens = f.max_decode_seq_len = f.max_decode_query_len = f.use_cuda_graph = 0;
        if (!split) return f;
        f.seq_lens_tensor = f.block_tables = NULL;
        f.block_tables_stride = 0;
        return f;
    }
    if (f.slot_mapping != NULL) f.slot_mapping += f.num_prefill_tokens;
    f.num_prefills = f.num_prefill_tokens = f.max_prefill_seq_len = f.max_seqlen = f.max_kv_len = 0;
    f.max_query_len = 1;
    const int32_t **arrays[] = {&f.context_lens_tensor, &f.encoder_seq_lens,
                                &f.encoder_seq_lens_tensor, &f.seq_lens_tensor, &f.seq_lens};
    for (int i = 0; i < (split ? 3 : 5); i++)
        if (*arrays[i] != NULL) *arrays[i] += p;
    if (split) f.seq_lens = NULL;
    if (!split && f.block_tables != NULL) f.block_tables += p * f.block_tables_stride;
    if (f.cross_block_tables != NULL) f.cross_block_tables += p * f.cross_block_tables_stride;
    f.query_start_loc = f.seq_start_loc = f.encoder_seq_start_loc = NULL;
    f.seqlen_q = f.kv_start_loc = f.prefill_block_tables = NULL;
    f.prefill_block_tables_stride = 0;
    f.multi_modal_placeholder_index_maps = NULL;
    f.attn_bias = f.encoder_attn_bias = f.cross_attn_bias = NULL;
    return f;
}

/* Both views of the step, which are made once, and are their own views. */
static void check_views(const v06 *r)
{
    const folio_vllm06_metadata_fields *f = v06_get(r);
    const folio_vllm06_metadata *views[] = {folio_vllm06_decode_metadata(r->m),
                                            folio_vllm06_prefill_metadata(r->m)};
    CHECK(views[0] == folio_vllm06_decode_metadata(r->m));
    CHECK(views[1] == folio_vllm06_prefill_metadata(r->m));
    bool one_kind = f->num_prefills == 0 || f->num_decode_tokens == 0;
    for (int p = 0; p < 2; p++) {
        CHECK((views[p] != NULL) == ((p ? f->num_prefills : f->num_decode_tokens) > 0));
        if (views[p] == NULL) continue;
        bool whole = one_kind && strcmp(r->b->name, "xformers") != 0;
        CHECK((views[p] == r->m) == whole);
        const folio_vllm06_metadata_fields want = view_of(f, p);
        if (!one_kind) v06_check_same_fields(folio_vllm06_metadata_get(views[p]), &want);
        CHECK(folio_vllm06_prefill_metadata(views[p]) == (p ? views[p] : NULL));
        CHECK(folio_vllm06_decode_metadata(views[p]) == (p ? NULL : views[p]));
        if (whole) continue;
        CHECK(folio_vllm06_metadata_get(views[p])->slot_mapping == want.slot_mapping);
        REJECTED(folio_vllm06_set_attn_bias((folio_vllm06_metadata *)views[p], DECODER, NULL),
                 "view");
    }
}

/* A step of one kind is its own view, of xformers a copy; a mixed one has a view of each, of one array for both or of
 * split ones, of all fields or of few, with biases that are given, or set and taken back later. */
V06_TEST(views)
{
    static const float zeros[28 * 28];
    static const folio_vllm06_bias biases[] = {{zeros, 1, 9, 17}, {zeros, 1, 6, 6}};
    static const folio_attention_type types[] = {DECODER, ENCODER, CROSS};
    for (int i = 0; i < 16; i++) {
        bool split = i & 1, few = i & 2, biased = i & 4, late = i & 8;
        full_step(r, falling, 4);
        if (split) {
            r->f.chunked_prefill = 1;
            r->f.seq_lens_tensor = r->lens + 2;
            r->f.block_tables = r->tables + 2 * r->blocks_per_seq;
            r->f.prefill_block_tables = r->tables;
            r->f.prefill_block_tables_stride = 3;
        }
        if (few) {
            r->f.slot_mapping = NULL;
            r->f.block_tables = r->f.context_lens_tensor = r->f.encoder_seq_start_loc = NULL;
            r->f.encoder_seq_lens = r->f.encoder_seq_lens_tensor = r->f.cross_block_tables = NULL;
            r->f.num_encoder_tokens = 0;
            if (!split) *(late ? &r->f.seq_lens : &r->f.seq_lens_tensor) = NULL;
        }
        if (biased && !late)
            r->f.attn_bias = r->f.encoder_attn_bias = r->f.cross_attn_bias = biases;
        v06_remake(r);
        if (!late) check_views(r);
        for (int k = 0; k < 3; k++)
            CHECK_OK(folio_vllm06_set_attn_bias(r->m, types[k], biased ? biases : NULL));
        check_views(r);
        CHECK_OK(folio_vllm06_set_attn_bias(r->m, types[i % 3], NULL));
        check_views(r);
    }
    for (int i = 0; i < 4; i++) { /* of one kind, or of none */
        full_step(r, i == 1 ? falling + 2 : prompts, i < 3 ? 2 : 0);
        r->f.chunked_prefill = i == 2; /* without decodes all arrays are the prompts' */
        v06_remake(r);
        check_views(r);
        const folio_vllm06_metadata *p = folio_vllm06_prefill_metadata(r->m);
        if (p != NULL) CHECK(folio_vllm06_metadata_get(p)->seq_lens_tensor[1] == 17);
    }
    CHECK(folio_vllm06_prefill_metadata(NULL) == NULL);
    CHECK(folio_vllm06_decode_metadata(NULL) == NULL);
}

V06_TEST(get_seq_lens)
{
    v06_step(r, prompts, 2);
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

V06_TEST(get_seq_len_block_table_args)
{
    static const v06_seq mixed_step[] = {
        {2, true, 7, 7, 9}, {0, true, 5, 18, 11}, {3, true, 1, 1, 1}, {1, false, 1, 9, 20}};
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
