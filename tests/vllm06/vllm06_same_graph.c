/* vllm06_same_graph.c: CommonAttentionState's part in graphs, as far as it needs no device; see vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

enum { BATCH = 4, MAX_LEN = 350, WINDOW = 4 };

static const v06_seq prompts[] = {{0, true, 13, 13, 11}, {1, true, 8, 8, 20}, {5, true, 8, 8, 3}};
/* padded by two, as vLLM pads: length 1, slot -1 */
static const v06_seq first_step[] = {
    {1, false, 1, 9, 20}, {0, false, 1, 14, 11}, {5, false, 1, 1, 1}, {5, false, 1, 1, 1}};
static const v06_seq second_step[] = {
    {0, false, 1, 15, 11}, {1, false, 1, 10, 20}, {5, false, 1, 9, 3}, {5, false, 1, 1, 1}};

/* a decode that writes to block 0, which padding reads */
static const v06_seq third_step[] = {
    {0, false, 1, 4, 11}, {0, false, 1, 1, 1}, {0, false, 1, 1, 1}, {0, false, 1, 1, 1}};

static folio_vllm06_graph_capture_desc capture_desc(const v06 *r)
{
    return FOLIO_WITH(folio_vllm06_graph_capture_desc, .attn_backend = r->b, .max_batch_size = 8,
                      .max_seq_len_to_capture = MAX_LEN, .block_size = r->block_size);
}

/* Metadata of a graph of so many decodes. */
static folio_vllm06_metadata *capture(v06 *r, int64_t batch_size, int64_t max_len, int encoders)
{
    folio_vllm06_graph_capture_desc d = capture_desc(r);
    d.max_seq_len_to_capture = max_len;
    if (batch_size > d.max_batch_size) d.max_batch_size = batch_size;
    folio_vllm06_metadata *m = NULL;
    CHECK_OK(folio_vllm06_graph_capture_begin(r->state, &d));
    CHECK_OK(folio_vllm06_graph_capture_get_metadata_for_batch(r->state, batch_size, encoders, &m));
    CHECK_OK(folio_vllm06_graph_capture_end(r->state));
    v06_need(m != NULL);
    return m;
}

static folio_status begin(const v06 *r) { return folio_vllm06_begin_forward(r->state, r->m, NULL); }

/* The rig's fields for a step with so many real decodes, and metadata from them. */
static folio_vllm06_metadata *padded_step(v06 *r, const v06_seq *seqs, int num, int real)
{
    folio_vllm06_metadata *step = NULL;
    v06_fields(r, seqs, num);
    v06_narrow_cross(r, 4);
    for (int i = real; i < num; i++) r->slots[i] = -1;
    r->f.use_cuda_graph = 1;
    *(real % 2 ? &r->f.seq_lens : &r->f.seq_lens_tensor) = NULL; /* either is enough */
    CHECK_OK(folio_vllm06_make_metadata(r->state, r->b, &r->f, &step));
    v06_need(step != NULL);
    return step;
}

/* The step's layers once more, with other numbers in the buffers: after begin_forward the plans have the step. */
static void replay_by_plans(v06 *r, const folio_vllm06_graph_input_buffers *b, int encoders)
{
    static int64_t slots[BATCH];
    static int32_t lens[2][BATCH], tables[2][BATCH * V06_TOKENS];
    size_t n = (size_t)b->batch_size;
    size_t entries = n * (size_t)b->block_tables_stride;
    size_t cross_entries = encoders ? n * (size_t)b->cross_block_tables_stride : 0;
    if (strcmp(r->compute, "cuda") == 0)
        return; /* there forwards run on another stream, and update the plans for it */
    CHECK_OK(begin(r));
    memcpy(slots, b->slot_mapping, n * sizeof *slots);
    memcpy(lens[0], b->seq_lens_tensor, n * sizeof **lens);
    memcpy(tables[0], b->block_tables, entries * sizeof **tables);
    if (encoders) memcpy(lens[1], b->encoder_seq_lens_tensor, n * sizeof **lens);
    if (encoders) memcpy(tables[1], b->cross_block_tables, cross_entries * sizeof **tables);
    for (size_t i = 0; i < n; i++) {
        b->slot_mapping[i] = (int64_t)i;
        b->seq_lens_tensor[i] = 1;
        if (encoders) b->encoder_seq_lens_tensor[i] = 1;
    }
    for (size_t k = 0; k < entries; k++) b->block_tables[k] = 7;
    for (size_t k = 0; k < cross_entries; k++) b->cross_block_tables[k] = 7;
    v06_run(r, "D");
    r->no_key = true;
    if (encoders) v06_run(r, "X");
    r->no_key = false;
    memcpy(b->slot_mapping, slots, n * sizeof *slots);
    memcpy(b->seq_lens_tensor, lens[0], n * sizeof **lens);
    memcpy(b->block_tables, tables[0], entries * sizeof **tables);
    if (encoders) memcpy(b->encoder_seq_lens_tensor, lens[1], n * sizeof **lens);
    if (encoders) memcpy(b->cross_block_tables, tables[1], cross_entries * sizeof **tables);
    CHECK_OK(begin(r));
}

/* A step through the graph's buffers and plans; then every row and every byte of the caches is checked. */
static void replay(v06 *r, const folio_vllm06_graph_input_buffers *b, const v06_seq *seqs, int real,
                   int encoders)
{
    folio_vllm06_metadata *step = padded_step(r, seqs, (int)b->batch_size, real);
    CHECK_OK(folio_vllm06_prepare_graph_input_buffers(r->state, b, step, encoders));
    folio_vllm06_metadata_destroy(step);
    CHECK_OK(begin(r));
    v06_run(r, "D");
    r->no_key = true;
    if (encoders) v06_run(r, "X");
    r->no_key = false;
    replay_by_plans(r, b, encoders);
}

/* A step of two layers, the second with a window: the graph has a plan for each, and both follow the buffers. */
static void replay_both(v06 *r, const folio_vllm06_graph_input_buffers *b, const v06_seq *seqs,
                        int real, folio_vllm06_impl *windowed)
{
    folio_vllm06_impl *first = r->impl;
    replay(r, b, seqs, real, 0);
    r->impl = windowed;
    r->d.sliding_window = WINDOW;
    v06_run(r, "D");
    r->impl = first;
    r->d.sliding_window = 0;
}

/* The rows of a graph's table, full of what another step left; the next step must not keep it. */
static void dirty(int32_t *tables, int64_t stride)
{
    for (int64_t k = 0; k < BATCH * stride; k++) tables[k] = 7;
}

static void check_zeros_past(const int32_t *tables, int64_t stride, int64_t given)
{
    CHECK(given < stride);
    for (int64_t k = 0; k < BATCH * stride; k++)
        if (k % stride >= given) CHECK_INT(tables[k], 0);
}

/* A second graph has buffers of its own: steps go through both in turn. Its rows are as wide as a step's, as those of
 * vLLM always are. */
static void another_graph(v06 *r, const folio_vllm06_graph_input_buffers *b)
{
    static const v06_seq two[] = {{0, false, 1, 16, 11}, {1, false, 1, 11, 20}};
    static const v06_seq four[] = {
        {0, false, 1, 17, 11}, {1, false, 1, 12, 20}, {5, false, 1, 10, 3}, {5, false, 1, 1, 1}};
    folio_vllm06_graph_input_buffers own = {.struct_size = sizeof own};
    folio_vllm06_metadata *first = r->m, *second = capture(r, 2, V06_TOKENS, 0);
    int64_t slot = b->slot_mapping[0];
    int32_t len = b->seq_lens_tensor[0], block = b->block_tables[0];
    CHECK_OK(folio_vllm06_get_graph_input_buffers(r->state, second, 0, &own));
    CHECK(own.batch_size == 2 && own.slot_mapping != b->slot_mapping);
    CHECK(own.seq_lens_tensor != b->seq_lens_tensor && own.block_tables != b->block_tables);
    CHECK_INT(own.block_tables_stride, r->blocks_per_seq);
    r->m = second;
    replay(r, &own, two, 2, 0);
    CHECK(own.slot_mapping[0] == r->slots[0] && own.seq_lens_tensor[0] == 16);
    CHECK(slot != r->slots[0] && b->slot_mapping[0] == slot);
    CHECK(b->seq_lens_tensor[0] == len && b->block_tables[0] == block);
    for (int i = 0; i < 2; i++) { /* lengths as a tensor, and as a list */
        folio_vllm06_metadata *step = NULL;
        v06_fields(r, i ? two : first_step, 2);
        *(i ? &r->f.seq_lens_tensor : &r->f.seq_lens) = NULL;
        CHECK_OK(folio_vllm06_make_metadata(r->state, r->b, &r->f, &step));
        CHECK_OK(folio_vllm06_prepare_graph_input_buffers(r->state, &own, step, 0));
        for (int k = 0; k < 2; k++) CHECK_INT(own.seq_lens_tensor[k], r->lens[k]);
        folio_vllm06_metadata_destroy(step);
    }
    r->m = first;
    replay(r, b, four, 3, 0);
    CHECK(own.seq_lens_tensor[0] == 16 && own.seq_lens_tensor[1] == 11);
    folio_vllm06_metadata_destroy(second);
}

/* What the fields of a captured step hold. */
static void check_captured(const v06 *r, const folio_vllm06_metadata *m)
{
    const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(m);
    int64_t max_blocks = (MAX_LEN + r->block_size - 1) / r->block_size;
    CHECK(f->num_prefills == 0 && f->num_decode_tokens == BATCH && f->use_cuda_graph == 1);
    CHECK(f->seq_lens == NULL && f->query_start_loc == NULL && f->seq_start_loc == NULL);
    CHECK(f->context_lens_tensor == NULL && f->multi_modal_placeholder_index_maps == NULL);
    CHECK(f->max_query_len == 1 && f->max_decode_query_len == 1 && f->max_prefill_seq_len == 0);
    CHECK(f->max_decode_seq_len == MAX_LEN && f->block_tables_stride == max_blocks);
    for (int i = 0; i < BATCH; i++) CHECK(f->slot_mapping[i] == -1 && f->seq_lens_tensor[i] == 1);
    for (int64_t i = 0; i < BATCH * max_blocks; i++) CHECK(f->block_tables[i] == 0);
    CHECK(folio_vllm06_decode_metadata(m) == m && folio_vllm06_prefill_metadata(m) == NULL);
}

/* A table of a single column, which PyTorch spreads over a buffer. */
static void one_column(v06 *r, const folio_vllm06_graph_input_buffers *b)
{
    folio_vllm06_metadata *step = NULL;
    v06_fields(r, third_step, BATCH);
    for (int i = 0; i < BATCH; i++) r->tables[i] = 5 + i;
    r->f.block_tables_stride = 1;
    CHECK_OK(folio_vllm06_make_metadata(r->state, r->b, &r->f, &step));
    dirty(b->block_tables, b->block_tables_stride);
    CHECK_OK(folio_vllm06_prepare_graph_input_buffers(r->state, b, step, 0));
    check_zeros_past(b->block_tables, b->block_tables_stride, 1);
    for (int i = 0; i < BATCH; i++) CHECK_INT(b->block_tables[i * b->block_tables_stride], 5 + i);
    folio_vllm06_metadata_destroy(step);
}

/* Captured once, then steps of other lengths, tables and slots through the same buffers. */
void v06_same_graph_capture(v06 *r)
{
    for (int fp8 = 0; fp8 < 2; fp8++) {
        v06_reset(r);
        r->d.alibi_slopes = r->slopes;
        r->d.kv_cache_dtype = fp8 ? "fp8" : "auto";
        v06_play(r, prompts, 3, "D");
        folio_vllm06_metadata *m = capture(r, BATCH, MAX_LEN, 0);
        folio_vllm06_graph_input_buffers b = {.struct_size = sizeof b};
        check_captured(r, m);
        CHECK_OK(folio_vllm06_get_graph_input_buffers(r->state, m, 0, &b));
        const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(m);
        CHECK(b.batch_size == BATCH && b.slot_mapping == f->slot_mapping);
        CHECK(b.seq_lens_tensor == f->seq_lens_tensor && b.block_tables == f->block_tables);
        CHECK(b.block_tables_stride == f->block_tables_stride);
        CHECK(b.encoder_seq_lens_tensor == NULL && b.cross_block_tables == NULL);
        folio_vllm06_metadata_destroy(r->m);
        r->m = m;
        v06_fields(r, first_step, BATCH);
        folio_vllm06_forward_args a = v06_args(r, DECODER);
        folio_vllm06_impl *windowed = NULL;
        folio_vllm06_impl_desc d = r->d;
        d.sliding_window = WINDOW;
        CHECK_OK(folio_vllm06_make_impl(r->state, r->b, &d, &windowed));
        CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL)); /* the warm-up: it stores nothing */
        CHECK_OK(folio_vllm06_forward(windowed, &a, NULL));
        v06_check_images(r);
        replay_both(r, &b, first_step, 2, windowed);
        dirty(b.block_tables, b.block_tables_stride);
        replay_both(r, &b, second_step, 3, windowed);
        check_zeros_past(b.block_tables, b.block_tables_stride, r->f.block_tables_stride);
        replay_both(r, &b, third_step, 1, windowed);
        folio_vllm06_impl_destroy(windowed);
        CHECK(r->slots[0] == 3 && r->tables[r->blocks_per_seq] == 0);
        int32_t block = b.block_tables[1]; /* from the buffers into themselves */
        CHECK_OK(folio_vllm06_prepare_graph_input_buffers(r->state, &b, m, 0));
        CHECK(block == r->tables[1] && b.block_tables[1] == block);
        one_column(r, &b);
        another_graph(r, &b);
    }
}

/* With rows as wide as a step's. */
static void another_cross_graph(v06 *r)
{
    static const v06_seq step[] = {
        {0, false, 1, 16, 11}, {1, false, 1, 11, 20}, {5, false, 1, 10, 3}, {5, false, 1, 1, 1}};
    folio_vllm06_graph_input_buffers own = {.struct_size = sizeof own};
    folio_vllm06_metadata *first = r->m, *second = capture(r, BATCH, V06_TOKENS, 1);
    CHECK_OK(folio_vllm06_get_graph_input_buffers(r->state, second, 1, &own));
    CHECK_INT(own.cross_block_tables_stride, r->blocks_per_seq);
    r->m = second;
    replay(r, &own, step, 3, 1);
    r->m = first;
    folio_vllm06_metadata_destroy(second);
}

/* More decodes than blocks of a row, and enough of them that each array is long. */
static void many_short_decodes(v06 *r)
{
    enum { MANY = 64 };
    folio_vllm06_metadata *m = capture(r, MANY, r->block_size, 1);
    const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(m);
    for (int i = 0; i < MANY; i++) {
        CHECK(f->slot_mapping[i] == -1 && f->seq_lens_tensor[i] == 1 && f->block_tables[i] == 0);
        CHECK(f->encoder_seq_lens_tensor[i] == 1 && f->cross_block_tables[i] == 1);
    }
    folio_vllm06_metadata_destroy(m);
}

/* Of a step that has its encoder lengths as a tensor only. */
static void tensor_of_encoder_lens(v06 *r, const folio_vllm06_graph_input_buffers *b)
{
    folio_vllm06_metadata *step = NULL;
    v06_fields(r, first_step, BATCH);
    v06_narrow_cross(r, 4);
    r->f.encoder_seq_lens = NULL;
    r->f.num_encoder_tokens = 0;
    CHECK_OK(folio_vllm06_make_metadata(r->state, r->b, &r->f, &step));
    CHECK_OK(folio_vllm06_prepare_graph_input_buffers(r->state, b, step, 1));
    for (int i = 0; i < BATCH; i++)
        CHECK_INT(b->encoder_seq_lens_tensor[i], first_step[i].encoder_len);
    folio_vllm06_metadata_destroy(step);
}

/* A step without encoders: rows of zeros, and the next step's begin_forward has nothing to plan for them. */
static void step_without_encoders(v06 *r, const folio_vllm06_graph_input_buffers *b)
{
    for (int i = 0; i < BATCH; i++) b->encoder_seq_lens_tensor[i] = 0;
    r->no_key = true;
    for (int again = 0; again < 2; again++) {
        CHECK_OK(begin(r));
        folio_vllm06_forward_args a = v06_args(r, CROSS);
        CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
        for (int64_t k = 0; k < r->out_rows * v06_width(r); k++) CHECK(v06_out(r, 0, k) == 0.0);
    }
    r->no_key = false;
    replay(r, b, second_step, 3, 1);
}

/* The same with encoders; the plans of both kinds follow the buffers. */
void v06_same_graph_cross(v06 *r)
{
    v06_play(r, prompts, 3, "DX");
    folio_vllm06_metadata *m = capture(r, BATCH, MAX_LEN, 1);
    folio_vllm06_graph_input_buffers b = {.struct_size = sizeof b};
    const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(m);
    for (int i = 0; i < BATCH; i++)
        CHECK(f->encoder_seq_lens_tensor[i] == 1 && f->encoder_seq_lens[i] == 1);
    for (int64_t k = 0; k < BATCH * f->cross_block_tables_stride; k++)
        CHECK_INT(f->cross_block_tables[k], 1);
    CHECK_INT(f->max_encoder_seq_len, MAX_LEN);
    CHECK(f->num_encoder_tokens == 0 && f->cross_slot_mapping != NULL);
    CHECK_OK(folio_vllm06_get_graph_input_buffers(r->state, m, 1, &b));
    CHECK(b.encoder_seq_lens_tensor == f->encoder_seq_lens_tensor);
    CHECK(b.cross_slot_mapping == f->cross_slot_mapping);
    CHECK(b.cross_block_tables == f->cross_block_tables);
    CHECK(b.cross_block_tables_stride == f->cross_block_tables_stride);
    folio_vllm06_graph_input_buffers without = {.struct_size = sizeof without};
    CHECK_OK(folio_vllm06_get_graph_input_buffers(r->state, m, 0, &without));
    CHECK(without.block_tables == b.block_tables && without.encoder_seq_lens_tensor == NULL);
    CHECK(without.cross_slot_mapping == NULL && without.cross_block_tables == NULL);
    CHECK_INT(without.cross_block_tables_stride, 0);
    folio_vllm06_metadata_destroy(r->m);
    r->m = m;
    replay(r, &b, first_step, 2, 1);
    dirty(b.cross_block_tables, b.cross_block_tables_stride);
    replay(r, &b, second_step, 3, 1);
    check_zeros_past(b.cross_block_tables, b.cross_block_tables_stride,
                     r->f.cross_block_tables_stride);
    int32_t len = b.encoder_seq_lens_tensor[1], block = b.cross_block_tables[0];
    b.encoder_seq_lens_tensor[1] = MAX_LEN; /* as many keys as the graph is for */
    CHECK_OK(begin(r));
    b.encoder_seq_lens_tensor[1] = MAX_LEN + 1; /* more than the graph is for */
    REJECTED(begin(r), "351");
    b.encoder_seq_lens_tensor[1] = len;
    b.cross_block_tables[0] = (int32_t)r->num_blocks;
    REJECTED(begin(r), "cross_block_table");
    b.cross_block_tables[0] = -1;
    REJECTED(begin(r), "cross_block_table");
    b.cross_block_tables[0] = block;
    CHECK_OK(begin(r));
    step_without_encoders(r, &b);
    another_cross_graph(r);
    tensor_of_encoder_lens(r, &b);
    many_short_decodes(r);
}

/* A clone is a state of its own over the same context; it outlives the state, and serves a graph. */
void v06_same_graph_clone(v06 *r)
{
    v06_step(r, prompts, 3);
    folio_vllm06_graph_capture_desc d = capture_desc(r);
    folio_vllm06_state *clone = NULL;
    folio_vllm06_metadata *m = NULL;
    v06_run(r, "D");
    CHECK_OK(folio_vllm06_graph_capture_begin(r->state, &d));
    CHECK_OK(folio_vllm06_graph_capture_get_metadata_for_batch(r->state, BATCH, 0, &m));
    CHECK_OK(folio_vllm06_graph_clone(r->state, BATCH, &clone));
    CHECK_OK(folio_vllm06_graph_capture_begin(clone, &d)); /* the capture is not the clone's */
    CHECK_OK(folio_vllm06_graph_capture_end(clone));
    CHECK_OK(folio_vllm06_graph_capture_end(r->state));
    CHECK(clone != NULL && clone != r->state);
    CHECK(folio_vllm06_state_context(clone) == folio_vllm06_state_context(r->state));
    folio_vllm06_graph_input_buffers b = {.struct_size = sizeof b};
    CHECK_OK(folio_vllm06_get_graph_input_buffers(clone, m, 0, &b));
    folio_vllm06_state_destroy(r->state); /* the impl and the metadata keep it */
    r->state = clone;
    folio_vllm06_metadata_destroy(r->m);
    r->m = m;
    replay(r, &b, first_step, 2, 0);
    folio_vllm06_impl_destroy(r->impl); /* a layer of the clone's runs the graph too */
    r->impl = NULL;
    CHECK_OK(folio_vllm06_make_impl(clone, r->b, &r->d, &r->impl));
    replay(r, &b, second_step, 3, 0);
}

static void bad_captures(v06 *r)
{
    folio_vllm06_graph_capture_desc d = capture_desc(r);
    folio_vllm06_state *state = NOWHERE;
    folio_vllm06_metadata *m = NOWHERE;
    REJECTED(folio_vllm06_graph_capture_end(r->state), "is not capturing");
    REJECTED(folio_vllm06_graph_clone(r->state, 1, &state), "is not capturing");
    REJECTED(folio_vllm06_graph_capture_get_metadata_for_batch(r->state, 1, 0, &m),
             "is not capturing");
    CHECK(state == NULL && m == NULL);
#define BAD_DESC(change, words)                                                                    \
    d = capture_desc(r);                                                                           \
    change;                                                                                        \
    REJECTED(folio_vllm06_graph_capture_begin(r->state, &d), words)
    BAD_DESC(d.attn_backend = NULL, "attn_backend");
    BAD_DESC(d.max_batch_size = 0, "max_batch_size is 0");
    BAD_DESC(d.max_batch_size = INT64_MAX, "max_batch_size is 9223372036854775807");
    BAD_DESC(d.max_seq_len_to_capture = 0, "max_seq_len_to_capture is 0");
    BAD_DESC(d.max_seq_len_to_capture = INT64_MAX, "max_seq_len_to_capture is 92233");
    BAD_DESC(d.block_size = 5000, "block_size is 5000");
    BAD_DESC(d.block_size = 0, "block_size is 0");
    BAD_DESC(d.struct_size = 0, "struct_size");
    d = capture_desc(r);
    REJECTED(folio_vllm06_graph_capture_begin(NULL, &d), "NULL");
    CHECK_OK(folio_vllm06_graph_capture_begin(r->state, &d));
    REJECTED(folio_vllm06_graph_capture_begin(r->state, &d), "already");
    REJECTED(folio_vllm06_graph_clone(r->state, 9, &state), "batch_size 9|8");
    REJECTED(folio_vllm06_graph_capture_get_metadata_for_batch(r->state, 0, 0, &m), "batch_size 0");
    REJECTED(folio_vllm06_graph_clone(r->state, 0, &state), "batch_size 0|8");
    REJECTED(folio_vllm06_graph_capture_get_metadata_for_batch(r->state, 9, 0, &m),
             "batch_size 9|8");
    for (int64_t size = 1; size <= 8; size += 7) { /* the smallest and the largest */
        CHECK_OK(folio_vllm06_graph_clone(r->state, size, &state));
        CHECK_OK(folio_vllm06_graph_capture_get_metadata_for_batch(r->state, size, 0, &m));
        folio_vllm06_state_destroy(state);
        folio_vllm06_metadata_destroy(m);
    }
    REJECTED(folio_vllm06_graph_clone(r->state, 1, NULL), "out");
    REJECTED(folio_vllm06_graph_clone(NULL, 1, &state), "state is NULL");
    REJECTED(folio_vllm06_graph_capture_get_metadata_for_batch(r->state, 1, 0, NULL), "out");
    REJECTED(folio_vllm06_graph_capture_end(NULL), "state is NULL");
    CHECK_OK(folio_vllm06_graph_capture_end(r->state));
    d.max_batch_size = d.max_seq_len_to_capture = d.block_size = 1; /* the smallest */
    CHECK_OK(folio_vllm06_graph_capture_begin(r->state, &d));
    CHECK_OK(folio_vllm06_graph_capture_end(r->state));
    d.max_batch_size = d.max_seq_len_to_capture = INT32_MAX;
    d.block_size = 2;
    CHECK_OK(folio_vllm06_graph_capture_begin(r->state, &d));
    REJECTED(folio_vllm06_graph_capture_get_metadata_for_batch(r->state, INT32_MAX, 0, &m),
             "2147483647 sequences of 1073741824 blocks are too many");
    CHECK_OK(folio_vllm06_graph_capture_end(r->state));
}

/* Tables as wide as the buffers', as the builder pads them; behind the buffers nothing is written. One block less in
 * a row of either is refused. */
static void tables_of_full_width(v06 *r)
{
    static int64_t slots[BATCH + 1];
    static int32_t lens[2][BATCH + 1], tables[2][BATCH * V06_TOKENS];
    folio_vllm06_metadata *step = padded_step(r, first_step, BATCH, 2);
    const int64_t entries = BATCH * r->f.block_tables_stride;
    const int64_t cross_entries = BATCH * r->f.cross_block_tables_stride;
    folio_vllm06_graph_input_buffers b =
        FOLIO_WITH(folio_vllm06_graph_input_buffers, .batch_size = BATCH, .slot_mapping = slots,
                   .seq_lens_tensor = lens[0], .block_tables = tables[0],
                   .block_tables_stride = r->f.block_tables_stride,
                   .encoder_seq_lens_tensor = lens[1], .cross_block_tables = tables[1],
                   .cross_block_tables_stride = r->f.cross_block_tables_stride);
    slots[BATCH] = lens[0][BATCH] = lens[1][BATCH] = 77;
    tables[0][entries] = tables[1][cross_entries] = 77;
    b.block_tables_stride--;
    REJECTED(folio_vllm06_prepare_graph_input_buffers(r->state, &b, step, 1),
             ": block_tables_stride is 40, the graph's 39");
    b.block_tables_stride++;
    b.cross_block_tables_stride--;
    REJECTED(folio_vllm06_prepare_graph_input_buffers(r->state, &b, step, 1),
             "cross_block_tables_stride is 4, the graph's 3");
    b.cross_block_tables_stride++;
    CHECK_OK(folio_vllm06_prepare_graph_input_buffers(r->state, &b, step, 1));
    CHECK(memcmp(slots, r->slots, BATCH * sizeof *slots) == 0);
    CHECK(memcmp(lens[0], r->lens, BATCH * sizeof **lens) == 0);
    CHECK(memcmp(lens[1], r->encoder_lens, BATCH * sizeof **lens) == 0);
    CHECK(memcmp(tables[0], r->tables, (size_t)entries * sizeof **tables) == 0);
    CHECK(memcmp(tables[1], r->cross_tables, (size_t)cross_entries * sizeof **tables) == 0);
    CHECK(slots[BATCH] == 77 && lens[0][BATCH] == 77 && lens[1][BATCH] == 77);
    CHECK(tables[0][entries] == 77 && tables[1][cross_entries] == 77);
    folio_vllm06_metadata_destroy(step);
}

/* Buffers and steps of encoder-decoder models that lack something. */
static void bad_encoder_buffers(v06 *r)
{
    folio_vllm06_metadata *m = capture(r, BATCH, MAX_LEN, 1), *step = NULL;
    folio_vllm06_graph_input_buffers b = {.struct_size = sizeof b}, other;
    CHECK_OK(folio_vllm06_get_graph_input_buffers(r->state, m, 1, &b));
    for (int i = 0; i < 6; i++) {
        static const char *const words[] = {
            "of encoders is NULL",        "of encoders is NULL",   "the graph's 1",
            "encoder_seq_lens_tensor or", "or cross_block_tables", "slot_mapping or block_tables"};
        v06_fields(r, first_step, BATCH);
        other = b;
        if (i == 0) other.encoder_seq_lens_tensor = NULL;
        if (i == 1) other.cross_block_tables = NULL;
        if (i == 2) other.cross_block_tables_stride = 1;
        if (i == 3) r->f.encoder_seq_lens_tensor = NULL;
        if (i == 4) r->f.cross_block_tables = NULL;
        if (i == 5) r->f.block_tables = NULL;
        CHECK_OK(folio_vllm06_make_metadata(r->state, r->b, &r->f, &step));
        REJECTED(folio_vllm06_prepare_graph_input_buffers(r->state, &other, step, 1), words[i]);
        folio_vllm06_metadata_destroy(step);
        CHECK(b.seq_lens_tensor[0] == 1 && b.slot_mapping[0] == -1);
    }
    folio_vllm06_metadata_destroy(m);
}

static void bad_buffers(v06 *r, folio_vllm06_metadata *m)
{
    folio_vllm06_graph_input_buffers b = {.struct_size = sizeof b}, other;
    REJECTED(folio_vllm06_get_graph_input_buffers(r->state, r->m, 0, &b), "not a graph's");
    REJECTED(folio_vllm06_get_graph_input_buffers(r->state, m, 1, &b), "without encoders");
    REJECTED(folio_vllm06_get_graph_input_buffers(NULL, m, 0, &b), "state");
    REJECTED(folio_vllm06_get_graph_input_buffers(r->state, NULL, 0, &b), "not a graph's");
    CHECK_OK(folio_vllm06_get_graph_input_buffers(r->state, m, 0, &b));
    folio_vllm06_metadata *step = padded_step(r, first_step, BATCH, 2);
    other = b; /* with decodes, padded for a graph, but not the graph's */
    REJECTED(folio_vllm06_get_graph_input_buffers(r->state, step, 0, &other), "not a graph's");
    REJECTED(folio_vllm06_prepare_graph_input_buffers(NULL, &b, step, 0), "state is NULL");
#define BAD_BUFFERS(change, encoders, words)                                                       \
    other = b;                                                                                     \
    change;                                                                                        \
    REJECTED(folio_vllm06_prepare_graph_input_buffers(r->state, &other, step, encoders), words)
    BAD_BUFFERS(other.batch_size = 3, 0, "4 decodes, the graph 3");
    folio_vllm06_metadata *four = step;
    step = padded_step(r, first_step, 1, 1); /* PyTorch spreads a single row over a buffer */
    BAD_BUFFERS((void)0, 0, "1 decodes, the graph 4");
    folio_vllm06_metadata_destroy(step);
    step = four;
    BAD_BUFFERS(other.block_tables_stride = 2, 0, "the graph's 2");
    BAD_BUFFERS(other.seq_lens_tensor = NULL, 0, "a buffer is NULL");
    BAD_BUFFERS(other.slot_mapping = NULL, 0, "a buffer is NULL");
    BAD_BUFFERS(other.block_tables = NULL, 0, "a buffer is NULL");
    BAD_BUFFERS((void)0, 1, "encoders is NULL");
    REJECTED(folio_vllm06_prepare_graph_input_buffers(r->state, &b, r->m, 0), "no decodes");
    folio_vllm06_metadata_destroy(step);
    for (int i = 0; i < BATCH; i++) CHECK(b.seq_lens_tensor[i] == 1 && b.slot_mapping[i] == -1);
    REJECTED(folio_vllm06_begin_forward(r->state, NULL, NULL), "NULL");
    REJECTED(folio_vllm06_begin_forward(NULL, m, NULL), "NULL");
    CHECK_OK(begin(r)); /* no graph's: nothing to do */
    v06_fields(r, first_step, BATCH);
    r->f.slot_mapping = NULL;
    CHECK_OK(folio_vllm06_make_metadata(r->state, r->b, &r->f, &step));
    BAD_BUFFERS((void)0, 0, "slot_mapping or block_tables of the step is NULL");
    folio_vllm06_metadata_destroy(step);
    bad_encoder_buffers(r);
    tables_of_full_width(r);
}

/* A graph's step shares no slot but -1; what begin_forward refuses runs in no layer, until it is mended. Two layers
 * have two plans: of both none is that of the step before. */
static void shared_slots(v06 *r, const folio_vllm06_graph_input_buffers *b,
                         const folio_vllm06_forward_args *args)
{
    folio_vllm06_impl *first = r->impl, *windowed = NULL;
    folio_vllm06_impl_desc d = r->d;
    d.sliding_window = 4;
    CHECK(b->slot_mapping[2] == -1 && b->slot_mapping[3] == -1); /* padding */
    CHECK_OK(begin(r));
    CHECK_OK(folio_vllm06_make_impl(r->state, r->b, &d, &windowed));
    CHECK_OK(folio_vllm06_forward(windowed, args, NULL));
    support_buffer_poison(&r->out);
    b->slot_mapping[0] = b->slot_mapping[1];
    REJECTED(begin(r), "slot_mapping[0] and slot_mapping[1] are both");
    V06_REJECTED(r, args, "slot_mapping[0] and slot_mapping[1] are both");
    r->impl = windowed;
    V06_REJECTED(r, args, "slot_mapping[0] and slot_mapping[1] are both");
    r->impl = first;
    b->slot_mapping[0] = b->slot_mapping[1] = 0; /* a slot like others */
    REJECTED(begin(r), "slot_mapping[0] and slot_mapping[1] are both 0");
    b->slot_mapping[0] = r->slots[0];
    b->slot_mapping[1] = r->slots[1];
    b->slot_mapping[2] = b->slot_mapping[1]; /* of length 1: it would be stored */
    REJECTED(begin(r), "slot_mapping[1] and slot_mapping[2] are both");
    b->seq_lens_tensor[2] = 0; /* padding of length 0 stores nothing */
    CHECK_OK(begin(r));
    b->slot_mapping[3] = b->slot_mapping[1];
    REJECTED(begin(r), "slot_mapping[1] and slot_mapping[3] are both");
    b->seq_lens_tensor[2] = 1;
    b->slot_mapping[2] = b->slot_mapping[3] = -1;
    CHECK_OK(begin(r));
    v06_run(r, "D");
    folio_vllm06_impl_destroy(windowed);
}

void v06_same_graph_errors(v06 *r)
{
    v06 foreign;
    v06_init(&foreign, r->b->name, r->compute);
    v06_open(&foreign);
    v06_step(r, prompts, 3);
    folio_vllm06_metadata *m = NULL, *whole = r->m;
    v06_run(r, "D");
    bad_captures(r);
    m = capture(r, BATCH, MAX_LEN, 0);
    folio_vllm06_graph_input_buffers b = {.struct_size = sizeof b};
    bad_buffers(r, m);
    CHECK_OK(folio_vllm06_get_graph_input_buffers(r->state, m, 0, &b));
    r->m = m;
    replay(r, &b, first_step, 2, 0);
    b.seq_lens_tensor[1] = MAX_LEN; /* as many keys as the graph is for */
    CHECK_OK(begin(r));
    for (int i = 0; i < 6; i++) { /* more than that or less than none; no block; no slot */
        static const char *const words[] = {"351", "-1", "block", "block", "slot", "slot"};
        b.seq_lens_tensor[1] = i == 0 ? MAX_LEN + 1 : i == 1 ? -1 : 14;
        b.block_tables[0] = i == 2 ? (int32_t)r->num_blocks : i == 3 ? -1 : r->tables[0];
        b.slot_mapping[0] = i == 4 ? r->num_blocks * r->block_size : i == 5 ? -2 : r->slots[0];
        REJECTED(begin(r), words[i]);
        V06_REJECTS(r, DECODER, words[i]);
    }
    b.slot_mapping[0] = r->slots[0];
    folio_vllm06_forward_args a = v06_args(r, DECODER);
    shared_slots(r, &b, &a);
    a = v06_args(r, DECODER);
    support_mark_error();
    REJECTED(folio_vllm06_forward(foreign.impl, &a, NULL), "another context");
    REJECTED(folio_vllm06_begin_forward(foreign.state, m, NULL), "another context");
    CHECK_OK(folio_vllm06_begin_forward(foreign.state, whole, NULL)); /* no graph's */
    folio_vllm06_metadata_destroy(m);
    r->m = whole;
    v06_close(&foreign);
}
