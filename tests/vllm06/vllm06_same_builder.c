/* vllm06_same_builder.c: what CommonMetadataBuilder does for windows and graphs; see vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

#include <math.h>

/* What was added, in place of the step before: its fields. */
static const folio_vllm06_metadata_fields *build_added(v06 *r, folio_vllm06_builder *builder)
{
    folio_vllm06_metadata_destroy(r->m);
    r->m = NULL;
    CHECK_OK(folio_vllm06_builder_build(builder, &r->m));
    v06_need(r->m != NULL);
    return v06_get(r);
}

/* The first `real` sequences of a step to the builder; the rig expects all. */
static void add(v06 *r, folio_vllm06_builder *builder, const v06_seq *seqs, int n, int real)
{
    v06_fields(r, seqs, n);
    for (int i = 0; i < real; i++) v06_add(r, builder, i, false);
}

/* A step of the rig through the builder. */
static const folio_vllm06_metadata_fields *build(v06 *r, folio_vllm06_builder *builder,
                                                 const v06_seq *seqs, int n)
{
    add(r, builder, seqs, n, n);
    return build_added(r, builder);
}

/* The same of a graph: sequences past `real` are padding, and more of it may follow. */
static const folio_vllm06_metadata_fields *build_padded(v06 *r, folio_vllm06_builder *builder,
                                                        const v06_seq *seqs, int n, int real,
                                                        int by)
{
    add(r, builder, seqs, n, real);
    CHECK_OK(folio_vllm06_builder_pad(builder, by));
    return build_added(r, builder);
}

/* The step's first n rows are those of n sequences alone. */
static void check_rows_alone(v06 *r, folio_attention_type type, const v06_seq *seqs, int n)
{
    float rows[2 * 4 * 32];
    int width = (int)v06_width(r);
    folio_vllm06_forward_args a = v06_args(r, type);
    CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
    memcpy(rows, r->out.data, (size_t)(n * width) * sizeof *rows);
    v06_step(r, seqs, n);
    v06_run_as(r, type);
    for (int k = 0; k < n * width; k++) CHECK(fabs(v06_out(r, 0, k) - (double)rows[k]) <= 1e-5);
}

/* A prompt's first tokens are not stored. The originals held the window against the new tokens alone. */
static void window_of_prompts(v06 *r, folio_vllm06_builder *builder)
{
    static const v06_seq whole[] = {{0, true, 99, 99, 0}, {1, true, 20, 20, 0}};
    static const v06_seq chunk[] = {{1, true, 40, 60, 0}}, long_chunk[] = {{1, true, 60, 70, 0}};
    const folio_vllm06_seq bare = FOLIO_WITH(folio_vllm06_seq, .is_prompt = 1, .token_len = 40,
                                             .encoder_seq_len = 5, .encoder_is_new = 1);
    const folio_vllm06_metadata_fields *f = build(r, builder, whole, 2);
    for (int i = 0; i < 99; i++)
        CHECK_INT(f->slot_mapping[i], i < 67 ? -1 : v06_slot(r, 0, i, false));
    CHECK(f->slot_mapping[99] == v06_slot(r, 1, 0, false));
    CHECK(f->seq_lens[0] == 99 && f->block_tables == NULL); /* no context: no table */
    memcpy(r->slots, f->slot_mapping, 67 * sizeof *r->slots);
    v06_run(r, "D");
    f = build(r, builder, chunk, 1); /* 40 new tokens: all past position 8 */
    CHECK(f->slot_mapping[0] == v06_slot(r, 1, 20, false));
    CHECK(f->block_tables_stride == 4 && f->context_lens_tensor[0] == 20);
    for (int k = 0; k < 4; k++) /* of the context and of the new tokens */
        CHECK_INT(f->block_tables[k], v06_slot(r, 1, 16 * k, false) / 16);
    v06_run(r, "D");
    f = build(r, builder, long_chunk, 1); /* 60 new tokens: none before position 28 */
    for (int i = 0; i < 60; i++)
        CHECK_INT(f->slot_mapping[i], i < 18 ? -1 : v06_slot(r, 1, 10 + i, false));
    CHECK_OK(folio_vllm06_builder_add(builder, &bare)); /* of a profiling run: no blocks yet */
    f = build_added(r, builder);
    CHECK(f->num_prefills == 1 && f->num_encoder_tokens == 5);
    for (int i = 0; i < 40; i++) CHECK_INT(f->slot_mapping[i], -1);
    for (int i = 0; i < 5; i++) CHECK_INT(f->cross_slot_mapping[i], -1);
}

/* Slots of an encoder follow from its cross blocks, and those of a prompt from its blocks: with only one of the two,
 * the other's slots are all -1. */
static void one_kind_of_blocks(v06 *r, folio_vllm06_builder *builder)
{
    static const int32_t own[] = {5}, crossed[] = {7};
    folio_vllm06_seq s =
        FOLIO_WITH(folio_vllm06_seq, .is_prompt = 1, .token_len = 6, .block_table = own,
                   .num_blocks = 1, .encoder_seq_len = 4, .encoder_is_new = 1);
    CHECK_OK(folio_vllm06_builder_add(builder, &s));
    s.num_blocks = 0;
    s.cross_block_table = crossed;
    s.num_cross_blocks = 1;
    CHECK_OK(folio_vllm06_builder_add(builder, &s));
    const folio_vllm06_metadata_fields *f = build_added(r, builder);
    CHECK(f->num_prefill_tokens == 12 && f->num_encoder_tokens == 8);
    for (int i = 0; i < 12; i++) CHECK_INT(f->slot_mapping[i], i < 6 ? 5 * 16 + i : -1);
    for (int i = 0; i < 8; i++) CHECK_INT(f->cross_slot_mapping[i], i < 4 ? -1 : 7 * 16 + i - 4);
    CHECK(f->cross_block_tables_stride == 1 && f->cross_block_tables[0] == FOLIO_NO_BLOCK);
    CHECK_INT(f->cross_block_tables[1], 7);
}

/* A decode's length and table are clipped, and its context is not. What is left is enough for the window. */
static void window_of_decodes(v06 *r, folio_vllm06_builder *builder)
{
    static const v06_seq decodes[] = {{0, false, 1, 100, 0}, {1, false, 1, 61, 0}};
    r->clipped[0] = 64;
    r->clipped[1] = 16;
    const folio_vllm06_metadata_fields *f = build(r, builder, decodes, 2);
    CHECK(f->seq_lens[0] == 36 && f->seq_lens[1] == 45 && f->max_decode_seq_len == 45);
    CHECK(f->context_lens_tensor[0] == 99 && f->context_lens_tensor[1] == 60);
    CHECK(f->block_tables_stride == 3 && f->slot_mapping[0] == v06_slot(r, 0, 99, false));
    CHECK(f->block_tables[0] == v06_slot(r, 0, 64, false) / 16);
    CHECK(f->block_tables[3] == v06_slot(r, 1, 16, false) / 16);
    v06_run(r, "D");
    /* a graph's row has room for the clipped table, not for the 7 blocks of length 100 */
    f = build_padded(r, builder, decodes, 2, 2, 0);
    CHECK(f->seq_lens[0] == 36 && f->block_tables_stride == 4 && f->use_cuda_graph == 1);
    CHECK(f->block_tables[0] == v06_slot(r, 0, 64, false) / 16 && f->block_tables[3] == 0);
    v06_run(r, "D");
}

/* Decodes that are kept whole: shorter than the window, or longer by less than a block. Lengths of whole blocks. */
static void window_not_reached(v06 *r, folio_vllm06_builder *builder)
{
    static const int64_t lens[] = {5, 32, 47, 48, 96}, clipped[] = {0, 0, 0, 16, 64};
    memset(r->clipped, 0, sizeof r->clipped);
    for (int i = 0; i < COUNT_OF(lens); i++) {
        const v06_seq decode[] = {{3, false, 1, lens[i], 0}};
        r->clipped[0] = clipped[i];
        const folio_vllm06_metadata_fields *f = build(r, builder, decode, 1);
        CHECK_INT(f->seq_lens[0], lens[i] - clipped[i]);
        CHECK_INT(f->block_tables_stride, (lens[i] - clipped[i] + 15) / 16);
        CHECK_INT(f->block_tables[0], v06_slot(r, 3, clipped[i], false) / 16);
        CHECK_INT(f->slot_mapping[0], v06_slot(r, 3, lens[i] - 1, false));
        CHECK_INT(f->context_lens_tensor[0], lens[i] - 1);
    }
    memset(r->clipped, 0, sizeof r->clipped);
}

/* A window of 24 is rounded up to 32; of length 89 that and the last block's 9 tokens are left. */
static void window_within_a_block(v06 *r, folio_vllm06_builder *builder)
{
    static const v06_seq decode[] = {{0, false, 1, 89, 0}};
    r->clipped[0] = 48;
    const folio_vllm06_metadata_fields *f = build(r, builder, decode, 1);
    CHECK(f->seq_lens[0] == 41 && f->context_lens_tensor[0] == 88 && f->block_tables_stride == 3);
    CHECK(f->block_tables[0] == v06_slot(r, 0, 48, false) / 16);
}

/* The table of a prompt with a prefix hit is whole, also what its tokens do not need yet. */
static void spare_blocks(v06 *r, folio_vllm06_builder *builder)
{
    static const int32_t table[] = {7, 2, 5};
    const folio_vllm06_seq seq =
        FOLIO_WITH(folio_vllm06_seq, .is_prompt = 1, .token_len = 4, .context_len = 16,
                   .block_table = table, .num_blocks = COUNT_OF(table));
    CHECK_OK(folio_vllm06_builder_add(builder, &seq));
    const folio_vllm06_metadata_fields *f = build_added(r, builder);
    CHECK_INT(f->block_tables_stride, COUNT_OF(table));
    CHECK(memcmp(f->block_tables, table, sizeof table) == 0);
}

/* Windows over blocks of 16. */
void v06_same_builder_window(v06 *r)
{
    r->block_size = 16;
    r->d.sliding_window = 32;
    folio_vllm06_builder_desc d = FOLIO_WITH(folio_vllm06_builder_desc, .block_size = 16,
                                             .sliding_window = 32, .max_seq_len_to_capture = 64);
    v06_open(r);
    folio_vllm06_builder *of_32 = NULL, *of_24 = NULL;
    CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &of_32));
    d.sliding_window = 24;
    CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &of_24));
    window_of_prompts(r, of_32);
    one_kind_of_blocks(r, of_32);
    window_of_decodes(r, of_32);
    window_not_reached(r, of_32);
    window_within_a_block(r, of_24);
    spare_blocks(r, of_32);
    folio_vllm06_builder_destroy(of_32);
    folio_vllm06_builder_destroy(of_24);
}

/* A decode that writes to block 0, from which all padding reads. */
static void pad_over_block_0(v06 *r, folio_vllm06_builder *builder)
{
    static const v06_seq prompt[] = {{0, true, 3, 3, 0}};
    static const v06_seq decode[] = {{0, false, 1, 4, 0}, {5, false, 1, 1, 0}};
    build(r, builder, prompt, 1);
    v06_run(r, "D");
    build_padded(r, builder, decode, 2, 1, 1);
    CHECK(r->slots[0] == 3); /* block 0 */
    check_rows_alone(r, DECODER, decode, 1);
}

/* The longest list of cross blocks, not the longest encoder, gives the rows of a graph's table. */
static void pad_with_spare_cross_blocks(v06 *r, folio_vllm06_builder *builder)
{
    static const int32_t table[] = {7, 2, 5};
    const folio_vllm06_seq seq = FOLIO_WITH(
        folio_vllm06_seq, .token_len = 1, .context_len = 4, .block_table = table, .num_blocks = 1,
        .encoder_seq_len = 5, .cross_block_table = table, .num_cross_blocks = COUNT_OF(table));
    CHECK_OK(folio_vllm06_builder_add(builder, &seq));
    CHECK_OK(folio_vllm06_builder_pad(builder, 1));
    const folio_vllm06_metadata_fields *f = build_added(r, builder);
    CHECK_INT(f->cross_block_tables_stride, COUNT_OF(table));
    CHECK(memcmp(f->cross_block_tables, table, sizeof table) == 0);
}

/* Padding has an encoder of length 1 in block 0, and changes no other row of cross attention. */
static void pad_with_encoders(v06 *r, folio_vllm06_builder *builder)
{
    static const v06_seq prompts[] = {{0, true, 13, 13, 11}, {1, true, 8, 8, 20}};
    static const v06_seq decodes[] = {
        {1, false, 1, 9, 20}, {0, false, 1, 14, 11}, {4, false, 1, 1, 1}, {5, false, 1, 1, 1}};
    v06_play(r, prompts, 2, "DX");
    const folio_vllm06_metadata_fields *f = build_padded(r, builder, decodes, 4, 2, 2);
    CHECK(f->encoder_seq_lens[0] == 20 && f->encoder_seq_lens[1] == 11);
    CHECK_INT(f->cross_block_tables_stride, 3);
    CHECK_INT(f->cross_block_tables[3 + 2], 0); /* past the two blocks of 11 tokens */
    for (int i = 2; i < 4; i++) {
        CHECK(f->encoder_seq_lens[i] == 1 && f->encoder_seq_lens_tensor[i] == 1);
        for (int k = 0; k < 3; k++) CHECK_INT(f->cross_block_tables[i * 3 + k], 0);
    }
    r->no_key = true;
    check_rows_alone(r, CROSS, decodes, 2);
    r->no_key = false;
}

/* A decode with more blocks than a graph's row, a prompt, counts that are none. */
static void bad_padding(v06 *r, folio_vllm06_builder *builder)
{
    static const v06_seq long_one[] = {{0, false, 1, 41, 0}}, prompt[] = {{0, true, 3, 3, 0}};
    static const v06_seq full[] = {{0, false, 1, 40, 0}}; /* as many blocks as the row: padded */
    static const v06_seq one_long[] = {
        {0, false, 1, 41, 0}, {1, false, 1, 40, 0}, {0, false, 1, 41, 0}};
    static const v06_seq both[] = {{0, true, 3, 3, 0}, {1, false, 1, 40, 0}};
    const folio_vllm06_metadata_fields *f = build_padded(r, builder, full, 1, 1, 1);
    for (int k = 0; k < 5; k++) CHECK_INT(f->block_tables[k], r->tables[k]);
    static const struct {
        const v06_seq *seqs;
        int n;
        const char *words;
    } bad[] = {{long_one, 1, "6 blocks|row holds 5"},
               {one_long, 2, "sequence 0 has 6 blocks"},
               {one_long + 1, 2, "sequence 1 has 6 blocks"},
               {both, 2, "sequence 0 is a prompt"},
               {prompt, 1, "is a prompt"}};
    for (int i = 0; i < COUNT_OF(bad); i++) {
        add(r, builder, bad[i].seqs, bad[i].n, bad[i].n);
        REJECTED(folio_vllm06_builder_pad(builder, 1), bad[i].words);
        f = build_added(r, builder); /* without padding */
        CHECK(f->num_prefills + f->num_decode_tokens == bad[i].n && f->use_cuda_graph == 0);
    }
    add(r, builder, prompt, 1, 1);
    REJECTED(folio_vllm06_builder_pad(builder, -1), "-1");
    REJECTED(folio_vllm06_builder_pad(builder, INT32_MAX), "2147483646");
    REJECTED(folio_vllm06_builder_pad(NULL, 1), "NULL");
    build_added(r, builder);
}

/* A batch that is full already: by 0, and the step is a graph's all the same. */
static void pad_by_0(v06 *r, folio_vllm06_builder *builder)
{
    static const v06_seq decode[] = {{1, false, 1, 9, 0}};
    const folio_vllm06_metadata_fields *f = build_padded(r, builder, decode, 1, 1, 0);
    CHECK(f->num_decode_tokens == 1 && f->use_cuda_graph == 1 && f->block_tables_stride == 5);
    for (int k = 0; k < 5; k++) CHECK_INT(f->block_tables[k], k < 2 ? r->tables[k] : 0);
}

/* As many sequences as fill the memory of an array: none reaches into the next. */
static void pad_to_16(v06 *r, folio_vllm06_builder *builder)
{
    static const v06_seq decode[] = {{1, false, 1, 9, 0}};
    const folio_vllm06_metadata_fields *f = build_padded(r, builder, decode, 1, 1, 15);
    for (int i = 0; i < 16; i++) {
        CHECK(f->seq_lens[i] == (i == 0 ? 9 : 1) && f->context_lens_tensor[i] == (i == 0 ? 8 : 0));
        CHECK(f->query_start_loc[i + 1] == i + 1 && f->seq_start_loc[i + 1] == i + 9);
        CHECK(f->slot_mapping[i] == (i == 0 ? r->slots[0] : -1));
    }
}

/* A graph's row is for the blocks that the window leaves. Of length 60 those are 3 of 8 with a window of 16, and 6 with
 * one of 40. */
static void pad_with_window(v06 *r, folio_vllm06_builder_desc d)
{
    static const v06_seq decode[] = {{1, false, 1, 60, 0}};
    folio_vllm06_builder *of_16 = NULL, *of_40 = NULL;
    d.sliding_window = 16;
    CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &of_16));
    d.sliding_window = 40;
    CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &of_40));
    const folio_vllm06_metadata_fields *f = build_padded(r, of_16, decode, 1, 1, 1);
    CHECK(f->block_tables_stride == 5 && f->seq_lens[0] == 20 && f->seq_lens[1] == 1);
    for (int k = 0; k < 10; k++) CHECK_INT(f->block_tables[k], k < 3 ? r->tables[5 + k] : 0);
    add(r, of_40, decode, 1, 1);
    REJECTED(folio_vllm06_builder_pad(of_40, 1), "6 blocks|row holds 5");
    folio_vllm06_builder_destroy(of_16);
    folio_vllm06_builder_destroy(of_40);
}

/* Decodes padded to a graph's batch; the row of a graph's table; what cannot be padded. */
void v06_same_builder_pad(v06 *r)
{
    static const v06_seq prompts[] = {{0, true, 13, 13, 0}, {1, true, 8, 8, 0}};
    static const v06_seq decodes[] = {
        {1, false, 1, 9, 0}, {0, false, 1, 14, 0}, {4, false, 1, 1, 0}, {5, false, 1, 1, 0}};
    folio_vllm06_builder *builder = NULL;
    folio_vllm06_builder_desc d = {
        .struct_size = sizeof d, .block_size = 8, .max_seq_len_to_capture = 33};
    v06_open(r);
    CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &builder));
    build(r, builder, prompts, 2);
    v06_run(r, "D");
    add(r, builder, decodes, 4, 2);
    CHECK_OK(folio_vllm06_builder_pad(builder, 2));
    REJECTED(folio_vllm06_builder_pad(builder, 1), "already");
    folio_vllm06_seq late = {.struct_size = sizeof late, .token_len = 1};
    REJECTED(folio_vllm06_builder_add(builder, &late), "after the padding");
    const folio_vllm06_metadata_fields *f = build_added(r, builder);
    CHECK(f->num_decode_tokens == 4 && f->use_cuda_graph == 1 && f->block_tables_stride == 5);
    CHECK(f->slot_mapping[1] == r->slots[1] && f->slot_mapping[2] == -1);
    CHECK(f->seq_lens[3] == 1 && f->seq_lens_tensor[3] == 1 && f->seq_start_loc[4] == 25);
    CHECK(f->block_tables[1] == r->tables[1] && f->block_tables[2] == 0);
    for (int k = 10; k < 20; k++) CHECK_INT(f->block_tables[k], 0);
    check_rows_alone(r, DECODER, decodes, 2);
    f = build(r, builder, decodes, 1); /* the builder is empty again, and pads no more */
    CHECK_INT(f->use_cuda_graph, 0);
    pad_over_block_0(r, builder);
    pad_with_encoders(r, builder);
    pad_with_spare_cross_blocks(r, builder);
    pad_by_0(r, builder);
    pad_to_16(r, builder);
    bad_padding(r, builder);
    pad_with_window(r, d);
    folio_vllm06_builder_destroy(builder);
    d.max_seq_len_to_capture = 0;
    CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &builder));
    REJECTED(folio_vllm06_builder_pad(builder, 1), "no max_seq_len");
    folio_vllm06_builder_destroy(builder);
}
