/* vllm06_same_graph.c: CommonAttentionState's part in graphs, as far as it needs no device; see vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

enum { BATCH = 4, MAX_LEN = 350, WINDOW = 4 };

static const v06_seq prompts[] = {{0, true, 13, 13, 11}, {1, true, 8, 8, 20}, {5, true, 8, 8, 3}};
/* padded by two, as vLLM pads: length 1, slot -1 */
static const v06_seq first_step[] = {
    {1, false, 1, 9, 20}, {0, false, 1, 14, 11}, {5, false, 1, 1, 1}, {5, false, 1, 1, 1}};
static const v06_seq second_step[] = {
    {0, false, 1, 15, 11}, {1, false, 1, 10, 20}, {5, false, 1, 9, 3}, {5, false, 1, 1, 1}};

/* a decode that writes to block 0, which padding reads; of one block each */
static const v06_seq third_step[] = {
    {0, false, 1, 4, 11}, {5, false, 1, 8, 3}, {0, false, 1, 1, 1}, {0, false, 1, 1, 1}};

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
    if (seqs == third_step) v06_narrow(r, 1); /* a single column, which PyTorch spreads */
    for (int i = real; i < num; i++) r->slots[i] = -1;
    r->f.use_cuda_graph = 1;
    *(real % 2 ? &r->f.seq_lens : &r->f.seq_lens_tensor) = NULL; /* either is enough */
    if (real % 2) r->f.encoder_seq_lens = NULL;                  /* the tensor, where it is read */
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
                        int real, int encoders, folio_vllm06_impl *windowed)
{
    folio_vllm06_impl *first = r->impl;
    replay(r, b, seqs, real, encoders);
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

/* The buffers of a graph's metadata are its arrays. */
static folio_vllm06_graph_input_buffers buffers_of(v06 *r, folio_vllm06_metadata *m, int encoders)
{
    const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(m);
    folio_vllm06_graph_input_buffers b = {.struct_size = sizeof b};
    CHECK_OK(folio_vllm06_get_graph_input_buffers(r->state, m, encoders, &b));
    CHECK(b.batch_size == f->num_decode_tokens && b.slot_mapping == f->slot_mapping);
    CHECK(b.seq_lens_tensor == f->seq_lens_tensor && b.block_tables == f->block_tables);
    CHECK_INT(b.block_tables_stride, f->block_tables_stride);
    CHECK(b.encoder_seq_lens_tensor == (encoders ? f->encoder_seq_lens_tensor : NULL));
    CHECK(b.cross_slot_mapping == (encoders ? f->cross_slot_mapping : NULL));
    CHECK(b.cross_block_tables == (encoders ? f->cross_block_tables : NULL));
    CHECK_INT(b.cross_block_tables_stride, encoders ? f->cross_block_tables_stride : 0);
    return b;
}

/* What the fields of a captured step hold. */
static void check_captured(const v06 *r, const folio_vllm06_metadata *m, int64_t batch,
                           int64_t max_len, bool encoders)
{
    enum { MOST = BATCH * V06_TOKENS };
    static int64_t slots[MOST];
    static int32_t ones[MOST], zeros[MOST];
    for (int i = 0; i < MOST; i++) slots[i] = -(ones[i] = 1);
    folio_vllm06_metadata_fields f = FOLIO_WITH(
        folio_vllm06_metadata_fields, .num_decode_tokens = batch, .slot_mapping = slots,
        .seq_lens_tensor = ones, .max_query_len = 1, .max_decode_query_len = 1,
        .max_decode_seq_len = max_len, .block_tables = zeros,
        .block_tables_stride = (max_len + r->block_size - 1) / r->block_size, .use_cuda_graph = 1);
    if (encoders) {
        f.encoder_seq_lens = f.encoder_seq_lens_tensor = f.cross_block_tables = ones;
        f.max_encoder_seq_len = max_len;
        f.cross_slot_mapping = slots;
        f.cross_block_tables_stride = f.block_tables_stride;
    }
    v06_check_fields(m, &f);
    CHECK(folio_vllm06_decode_metadata(m) == m && folio_vllm06_prefill_metadata(m) == NULL);
}

/* A second graph has buffers of its own: steps go through both in turn. Its rows are as wide as a step's, as those of
 * vLLM always are. */
static void another_graph(v06 *r, const folio_vllm06_graph_input_buffers *b, int encoders)
{
    static const v06_seq two[] = {{0, false, 1, 16, 11}, {1, false, 1, 11, 20}};
    static const v06_seq four[] = {
        {0, false, 1, 17, 11}, {1, false, 1, 12, 20}, {5, false, 1, 10, 3}, {5, false, 1, 1, 1}};
    folio_vllm06_metadata *first = r->m, *second = capture(r, 2, r->max_tokens, encoders);
    folio_vllm06_graph_input_buffers own = buffers_of(r, second, encoders);
    int64_t slot = b->slot_mapping[0];
    int32_t len = b->seq_lens_tensor[0];
    CHECK(own.seq_lens_tensor != b->seq_lens_tensor && own.block_tables != b->block_tables);
    CHECK_INT(own.block_tables_stride, r->blocks_per_seq);
    r->m = second;
    replay(r, &own, two, 2, encoders);
    CHECK(own.slot_mapping[0] == r->slots[0] && own.seq_lens_tensor[0] == 16);
    CHECK(slot != r->slots[0] && b->slot_mapping[0] == slot && b->seq_lens_tensor[0] == len);
    r->m = first;
    replay(r, b, four, 3, encoders);
    CHECK(own.seq_lens_tensor[0] == 16 && own.seq_lens_tensor[1] == 11);
    folio_vllm06_metadata_destroy(second);
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

/* Captured once, then steps of other lengths, tables and slots through the same buffers. */
static void captured(v06 *r, int encoders)
{
    folio_vllm06_impl *windowed = NULL;
    folio_vllm06_impl_desc d = r->d;
    v06_play(r, prompts, 3, "DX");
    folio_vllm06_metadata_destroy(r->m);
    r->m = capture(r, BATCH, MAX_LEN, encoders);
    check_captured(r, r->m, BATCH, MAX_LEN, encoders);
    folio_vllm06_graph_input_buffers b = buffers_of(r, r->m, encoders);
    if (encoders) buffers_of(r, r->m, 0); /* they may be left out */
    v06_fields(r, first_step, BATCH);
    folio_vllm06_forward_args a = v06_args(r, DECODER);
    d.sliding_window = WINDOW;
    CHECK_OK(folio_vllm06_make_impl(r->state, r->b, &d, &windowed));
    CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL)); /* the warm-up: it stores nothing */
    CHECK_OK(folio_vllm06_forward(windowed, &a, NULL));
    v06_check_images(r);
    replay_both(r, &b, first_step, 2, encoders, windowed);
    dirty(b.block_tables, b.block_tables_stride);
    if (encoders) dirty(b.cross_block_tables, b.cross_block_tables_stride);
    replay_both(r, &b, second_step, 3, encoders, windowed);
    check_zeros_past(b.block_tables, b.block_tables_stride, r->f.block_tables_stride);
    if (encoders) check_zeros_past(b.cross_block_tables, b.cross_block_tables_stride, 4);
    if (!encoders) replay_both(r, &b, third_step, 1, 0, windowed);
    folio_vllm06_impl_destroy(windowed);
    int32_t block = b.block_tables[0]; /* from the buffers into themselves */
    CHECK_OK(folio_vllm06_prepare_graph_input_buffers(r->state, &b, r->m, encoders));
    CHECK(block == r->tables[0] && b.block_tables[0] == block);
    if (encoders) step_without_encoders(r, &b);
    another_graph(r, &b, encoders);
}

V06_TEST(graph_capture)
{
    enum { MANY = 64 }; /* more than blocks of a row, and enough that each array is long */
    for (int i = 0; i < 3; i++) {
        v06_reset(r);
        r->d.alibi_slopes = r->slopes;
        r->d.kv_cache_dtype = i == 1 ? "fp8" : "auto";
        captured(r, i == 2);
    }
    folio_vllm06_metadata *m = capture(r, MANY, r->block_size, 1);
    check_captured(r, m, MANY, r->block_size, true);
    folio_vllm06_metadata_destroy(m);
}

/* A clone is a state of its own over the same context; it outlives the state, and serves a graph. */
V06_TEST(graph_clone)
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
    folio_vllm06_state_destroy(r->state); /* the impl and the metadata keep it */
    r->state = clone;
    folio_vllm06_metadata_destroy(r->m);
    r->m = m;
    const folio_vllm06_graph_input_buffers b = buffers_of(r, m, 0);
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
    static const struct {
        int64_t batch, max_len, block_size;
        const char *words;
    } bad[] = {{0, 9, 8, "max_batch_size is 0"},
               {INT64_MAX, 9, 8, "max_batch_size is 9223372036854775807"},
               {8, 0, 8, "max_seq_len_to_capture is 0"},
               {8, INT64_MAX, 8, "max_seq_len_to_capture is 92233"},
               {8, 9, 4097, "block_size is 4097"},
               {8, 9, 0, "block_size is 0"}};
    for (int i = 0; i < COUNT_OF(bad); i++) {
        d.max_batch_size = bad[i].batch;
        d.max_seq_len_to_capture = bad[i].max_len;
        d.block_size = bad[i].block_size;
        REJECTED(folio_vllm06_graph_capture_begin(r->state, &d), bad[i].words);
    }
    d.struct_size = 0;
    REJECTED(folio_vllm06_graph_capture_begin(r->state, &d), "struct_size");
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

/* Buffers and steps that lack something, or are of another size; PyTorch spreads a single row over a buffer. */
static void bad_buffers(v06 *r)
{
    static const char *const words[] = {"4 decodes, the graph 3",
                                        "1 decodes, the graph 4",
                                        "a buffer is NULL",
                                        "a buffer is NULL",
                                        "a buffer is NULL",
                                        "of encoders is NULL",
                                        "of encoders is NULL",
                                        "slot_mapping or block_tables",
                                        "slot_mapping or block_tables",
                                        "encoder_seq_lens_tensor or",
                                        "or cross_block_tables"};
    folio_vllm06_metadata *m = capture(r, BATCH, MAX_LEN, 1), *step = NULL;
    const folio_vllm06_graph_input_buffers b = buffers_of(r, m, 1);
    for (int i = 0; i < COUNT_OF(words); i++) {
        folio_vllm06_graph_input_buffers bad = b;
        v06_fields(r, first_step, i == 1 ? 1 : BATCH);
        if (i == 0) bad.batch_size = 3;
        if (i == 2) bad.seq_lens_tensor = NULL;
        if (i == 3) bad.slot_mapping = NULL;
        if (i == 4) bad.block_tables = NULL;
        if (i == 5) bad.encoder_seq_lens_tensor = NULL;
        if (i == 6) bad.cross_block_tables = NULL;
        if (i == 7) r->f.slot_mapping = NULL;
        if (i == 8) r->f.block_tables = NULL;
        if (i == 9) r->f.encoder_seq_lens_tensor = NULL;
        if (i == 10) r->f.cross_block_tables = NULL;
        CHECK_OK(folio_vllm06_make_metadata(r->state, r->b, &r->f, &step));
        REJECTED(folio_vllm06_prepare_graph_input_buffers(r->state, &bad, step, 1), words[i]);
        REJECTED(folio_vllm06_get_graph_input_buffers(r->state, step, 0, &bad), "not a graph's");
        REJECTED(folio_vllm06_prepare_graph_input_buffers(NULL, &b, step, 0), "state is NULL");
        folio_vllm06_metadata_destroy(step);
        check_captured(r, m, BATCH, MAX_LEN, true);
    }
    folio_vllm06_graph_input_buffers none = b;
    REJECTED(folio_vllm06_prepare_graph_input_buffers(r->state, &b, r->m, 0), "no decodes");
    REJECTED(folio_vllm06_get_graph_input_buffers(NULL, m, 0, &none), "state");
    REJECTED(folio_vllm06_get_graph_input_buffers(r->state, NULL, 0, &none), "not a graph's");
    folio_vllm06_metadata_destroy(m);
    m = capture(r, BATCH, MAX_LEN, 0);
    REJECTED(folio_vllm06_get_graph_input_buffers(r->state, m, 1, &none), "without encoders");
    REJECTED(folio_vllm06_begin_forward(NULL, m, NULL), "NULL");
    REJECTED(folio_vllm06_begin_forward(r->state, NULL, NULL), "NULL");
    CHECK_OK(begin(r)); /* no graph's: nothing to do */
    folio_vllm06_metadata_destroy(m);
    tables_of_full_width(r);
}

/* A graph's step shares no slot but -1; padding of length 0 has none, that of length 1 would be stored. What
 * begin_forward refuses runs in no layer, until it is mended: of two layers with two plans none has the step before. */
static void shared_slots(v06 *r, const folio_vllm06_graph_input_buffers *b)
{
    enum { ZERO = 9 };
    static const struct {
        int of[BATCH]; /* whose slot; -1, and slot 0 */
        int32_t len;   /* of decode 2 */
        const char *words;
    } steps[] = {{{1, 1, -1, -1}, 1, "slot_mapping[0] and slot_mapping[1] are both"},
                 {{ZERO, ZERO, -1, -1}, 1, "slot_mapping[0] and slot_mapping[1] are both 0"},
                 {{0, 1, 1, -1}, 1, "slot_mapping[1] and slot_mapping[2] are both"},
                 {{0, 1, 1, -1}, 0, NULL},
                 {{0, 1, 1, 1}, 0, "slot_mapping[1] and slot_mapping[3] are both"},
                 {{0, 1, -1, -1}, 1, NULL}};
    folio_vllm06_impl *layers[] = {r->impl, NULL};
    folio_vllm06_impl_desc d = r->d;
    d.sliding_window = WINDOW;
    CHECK_OK(folio_vllm06_make_impl(r->state, r->b, &d, &layers[1]));
    folio_vllm06_forward_args a = v06_args(r, DECODER);
    CHECK_OK(begin(r));
    CHECK_OK(folio_vllm06_forward(layers[1], &a, NULL));
    for (int i = 0; i < COUNT_OF(steps); i++) {
        for (int k = 0; k < BATCH; k++) {
            int of = steps[i].of[k];
            b->slot_mapping[k] = of == ZERO ? 0 : of < 0 ? -1 : r->slots[of];
        }
        b->seq_lens_tensor[2] = steps[i].len;
        if (steps[i].words == NULL) CHECK_OK(begin(r));
        if (steps[i].words == NULL) continue;
        REJECTED(begin(r), steps[i].words);
        for (int l = 0; l < 2; l++) {
            r->impl = layers[l];
            V06_REJECTS(r, DECODER, steps[i].words);
        }
        r->impl = layers[0];
    }
    v06_run(r, "D");
    folio_vllm06_impl_destroy(layers[1]);
}

V06_TEST(graph_errors)
{
    v06 foreign;
    v06_init(&foreign, r->b->name, r->compute);
    v06_open(&foreign);
    v06_step(r, prompts, 3);
    folio_vllm06_metadata *m = NULL, *whole = r->m;
    v06_run(r, "D");
    bad_captures(r);
    m = capture(r, BATCH, MAX_LEN, 0);
    const folio_vllm06_graph_input_buffers b = buffers_of(r, m, 0);
    bad_buffers(r);
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
    shared_slots(r, &b);
    const folio_vllm06_forward_args a = v06_args(r, DECODER);
    REJECTED(folio_vllm06_forward(foreign.impl, &a, NULL), "another context");
    REJECTED(folio_vllm06_begin_forward(foreign.state, m, NULL), "another context");
    CHECK_OK(folio_vllm06_begin_forward(foreign.state, whole, NULL)); /* no graph's */
    folio_vllm06_metadata_destroy(m);
    r->m = whole;
    v06_close(&foreign);
}
