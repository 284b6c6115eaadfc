/* vllm06_graph.c: CommonAttentionState's part in CUDA graphs. The arrays of a captured step's metadata are the graph's
 * input buffers. The metadata has plans of its own, of fixed size, which begin_forward brings up to the buffers. */
#include "core/tensor.h"
#include "vllm06/vllm06.h"

#include <string.h>

folio_status folio_vllm06_graph_capture_begin(folio_vllm06_state *state,
                                              const folio_vllm06_graph_capture_desc *desc)
{
    REQUIRE(state != NULL, "graph_capture_begin: state is NULL");
    folio_vllm06_graph_capture_desc d;
    STRUCT_IN(d, desc, "folio_vllm06_graph_capture_desc");
    REQUIRE(state->capture.attn_backend == NULL,
            "graph_capture_begin: the state is capturing already");
    TRY(folioi_vllm06_check_backend(d.attn_backend, "graph_capture_begin: attn_backend"));
    REQUIRE(d.max_batch_size >= 1 && d.max_batch_size <= INT32_MAX,
            "graph_capture_begin: max_batch_size is %lld, outside [1, 2147483647]",
            (long long)d.max_batch_size);
    REQUIRE(d.max_seq_len_to_capture >= 1 && d.max_seq_len_to_capture <= INT32_MAX,
            "graph_capture_begin: max_seq_len_to_capture is %lld, outside [1, 2147483647]",
            (long long)d.max_seq_len_to_capture);
    REQUIRE(d.block_size >= 1 && d.block_size <= 4096,
            "graph_capture_begin: block_size is %lld, outside [1, 4096]", (long long)d.block_size);
    state->capture = d;
    return FOLIO_OK;
}

folio_status folio_vllm06_graph_capture_end(folio_vllm06_state *state)
{
    REQUIRE(state != NULL, "graph_capture_end: state is NULL");
    REQUIRE(state->capture.attn_backend != NULL, "graph_capture_end: the state is not capturing");
    state->capture = (folio_vllm06_graph_capture_desc){.attn_backend = NULL};
    return FOLIO_OK;
}

static folio_status check_capture(const folio_vllm06_state *state, int64_t batch_size,
                                  const char *what)
{
    REQUIRE(state != NULL, "%s: state is NULL", what);
    REQUIRE(state->capture.attn_backend != NULL, "%s: the state is not capturing", what);
    REQUIRE(batch_size >= 1 && batch_size <= state->capture.max_batch_size,
            "%s: batch_size %lld is outside [1, max_batch_size = %lld]", what,
            (long long)batch_size, (long long)state->capture.max_batch_size);
    return FOLIO_OK;
}

folio_status folio_vllm06_graph_clone(folio_vllm06_state *state, int64_t batch_size,
                                      folio_vllm06_state **out)
{
    REQUIRE(out != NULL, "graph_clone: out is NULL");
    *out = NULL;
    TRY(check_capture(state, batch_size, "graph_clone"));
    refs_retain(&state->ctx->refs);
    return folioi_vllm06_state_over(state->ctx, out);
}

/* What a captured step says: decodes of length 1 in block 0 that store nothing. */
typedef struct {
    int64_t *slots;
    int32_t *ones, *tables, *cross_tables;
} columns;

static columns carve(folioi_arena *arena, int64_t batch_size, int64_t max_blocks)
{
    columns c;
    c.slots = arena_take(arena, batch_size * 8);
    c.ones = arena_take(arena, batch_size * 4);
    c.tables = arena_take(arena, batch_size * max_blocks * 4);
    c.cross_tables = arena_take(arena, batch_size * max_blocks * 4);
    return c;
}

static folio_vllm06_metadata_fields fields_of(const columns *c,
                                              const folio_vllm06_graph_capture_desc *d,
                                              int64_t batch_size, int64_t max_blocks, bool encoder)
{
    for (int64_t i = 0; i < batch_size; i++) {
        c->slots[i] = -1;
        c->ones[i] = 1;
    }
    for (int64_t i = 0; i < batch_size * max_blocks; i++) {
        c->tables[i] = 0;
        c->cross_tables[i] = 1;
    }
    folio_vllm06_metadata_fields f = FOLIO_WITH(
        folio_vllm06_metadata_fields, .num_decode_tokens = batch_size, .slot_mapping = c->slots,
        .seq_lens_tensor = c->ones, .max_decode_seq_len = d->max_seq_len_to_capture,
        .block_tables = c->tables, .block_tables_stride = max_blocks, .use_cuda_graph = 1);
    if (encoder) {
        f.encoder_seq_lens = f.encoder_seq_lens_tensor = c->ones;
        f.max_encoder_seq_len = d->max_seq_len_to_capture;
        f.cross_slot_mapping = c->slots; /* empty: a step of decodes reads none */
        f.cross_block_tables = c->cross_tables;
        f.cross_block_tables_stride = max_blocks;
    }
    return f;
}

folio_status folio_vllm06_graph_capture_get_metadata_for_batch(folio_vllm06_state *state,
                                                               int64_t batch_size,
                                                               int is_encoder_decoder_model,
                                                               folio_vllm06_metadata **out)
{
    REQUIRE(out != NULL, "graph_capture_get_metadata_for_batch: out is NULL");
    *out = NULL;
    TRY(check_capture(state, batch_size, "graph_capture_get_metadata_for_batch"));
    const folio_vllm06_graph_capture_desc *d = &state->capture;
    int64_t max_blocks = ceil_div(d->max_seq_len_to_capture, d->block_size), entries;
    REQUIRE(checked_mul(batch_size, max_blocks, &entries) && entries <= INT64_MAX / 32,
            "graph_capture_get_metadata_for_batch: %lld sequences of %lld blocks are too many",
            (long long)batch_size, (long long)max_blocks);
    folioi_arena arena = {NULL, 0};
    folioi_array memory = {NULL, 0};
    carve(&arena, batch_size, max_blocks);
    TRY(folioi_array_reserve(&state->ctx->allocator, &memory, arena.used, "a graph's buffers"));
    arena = (folioi_arena){memory.data, 0};
    columns c = carve(&arena, batch_size, max_blocks);
    folio_vllm06_metadata_fields f =
        fields_of(&c, d, batch_size, max_blocks, is_encoder_decoder_model != 0);
    folio_status status = folio_vllm06_make_metadata(state, d->attn_backend, &f, out);
    folioi_array_free(&state->ctx->allocator, &memory);
    if (status != FOLIO_OK) return status;
    (*out)->graph_len = d->max_seq_len_to_capture;
    (*out)->f.encoder_seq_lens = (*out)->f.encoder_seq_lens_tensor; /* one buffer for both */
    return FOLIO_OK;
}

folio_status folio_vllm06_get_graph_input_buffers(folio_vllm06_state *state,
                                                  folio_vllm06_metadata *attn_metadata,
                                                  int is_encoder_decoder_model,
                                                  folio_vllm06_graph_input_buffers *out)
{
    REQUIRE(state != NULL, "get_graph_input_buffers: state is NULL");
    REQUIRE(attn_metadata != NULL && attn_metadata->graph_len > 0,
            "get_graph_input_buffers: attn_metadata is not a graph's");
    const folio_vllm06_metadata_fields *f = &attn_metadata->f;
    bool encoder = is_encoder_decoder_model != 0;
    REQUIRE(!encoder || f->cross_block_tables != NULL,
            "get_graph_input_buffers: the graph's metadata was made for a model without encoders");
    folio_vllm06_graph_input_buffers b = {
        .batch_size = attn_metadata->num_seqs,
        .slot_mapping = (int64_t *)f->slot_mapping,
        .seq_lens_tensor = (int32_t *)f->seq_lens_tensor,
        .block_tables = (int32_t *)f->block_tables,
        .block_tables_stride = f->block_tables_stride,
        .encoder_seq_lens_tensor = encoder ? (int32_t *)f->encoder_seq_lens_tensor : NULL,
        .cross_slot_mapping = encoder ? (int64_t *)f->cross_slot_mapping : NULL,
        .cross_block_tables = encoder ? (int32_t *)f->cross_block_tables : NULL,
        .cross_block_tables_stride = encoder ? f->cross_block_tables_stride : 0};
    return folioi_struct_out(out, &b, sizeof b, "folio_vllm06_graph_input_buffers");
}

/* Rows of a step's table into a buffer's, zeros past them. */
static void copy_rows(int32_t *to, int64_t to_stride, const int32_t *from, int64_t from_stride,
                      int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        memset(to + i * to_stride, 0, (size_t)to_stride * sizeof *to);
        if (from_stride > 0)
            memcpy(to + i * to_stride, from + i * from_stride, (size_t)from_stride * sizeof *to);
    }
}

static folio_status check_step(const folio_vllm06_graph_input_buffers *b,
                               const folio_vllm06_metadata *step, bool encoder)
{
    const folio_vllm06_metadata_fields *f = &step->f;
    REQUIRE(step->num_seqs == b->batch_size,
            "prepare_graph_input_buffers: the step has %lld decodes, the graph %lld",
            (long long)step->num_seqs, (long long)b->batch_size);
    REQUIRE(b->slot_mapping != NULL && b->seq_lens_tensor != NULL && b->block_tables != NULL,
            "prepare_graph_input_buffers: a buffer is NULL");
    REQUIRE(f->slot_mapping != NULL && f->block_tables != NULL,
            "prepare_graph_input_buffers: slot_mapping or block_tables of the step is NULL");
    REQUIRE(f->block_tables_stride <= b->block_tables_stride,
            "prepare_graph_input_buffers: block_tables_stride is %lld, the graph's %lld",
            (long long)f->block_tables_stride, (long long)b->block_tables_stride);
    if (!encoder) return FOLIO_OK;
    REQUIRE(b->encoder_seq_lens_tensor != NULL && b->cross_block_tables != NULL,
            "prepare_graph_input_buffers: a buffer of encoders is NULL");
    REQUIRE(f->encoder_seq_lens_tensor != NULL && f->cross_block_tables != NULL,
            "prepare_graph_input_buffers: encoder_seq_lens_tensor or cross_block_tables of the "
            "step is NULL");
    REQUIRE(f->cross_block_tables_stride <= b->cross_block_tables_stride,
            "prepare_graph_input_buffers: cross_block_tables_stride is %lld, the graph's %lld",
            (long long)f->cross_block_tables_stride, (long long)b->cross_block_tables_stride);
    return FOLIO_OK;
}

folio_status folio_vllm06_prepare_graph_input_buffers(
    folio_vllm06_state *state, const folio_vllm06_graph_input_buffers *input_buffers,
    const folio_vllm06_metadata *attn_metadata, int is_encoder_decoder_model)
{
    REQUIRE(state != NULL, "prepare_graph_input_buffers: state is NULL");
    folio_vllm06_graph_input_buffers b;
    STRUCT_IN(b, input_buffers, "folio_vllm06_graph_input_buffers");
    bool encoder = is_encoder_decoder_model != 0;
    REQUIRE(attn_metadata != NULL && attn_metadata->f.num_decode_tokens > 0,
            "prepare_graph_input_buffers: attn_metadata is NULL or has no decodes");
    const folio_vllm06_metadata *step = folio_vllm06_decode_metadata(attn_metadata);
    if (step == NULL) return FOLIO_ERR_MEMORY; /* which has been said */
    TRY(check_step(&b, step, encoder));
    const folio_vllm06_metadata_fields *f = &step->f;
    if (f->block_tables == b.block_tables) return FOLIO_OK; /* the graph's own: all is there */
    memcpy(b.slot_mapping, f->slot_mapping, (size_t)b.batch_size * sizeof *b.slot_mapping);
    for (int64_t i = 0; i < b.batch_size; i++)
        b.seq_lens_tensor[i] = (int32_t)folioi_vllm06_seq_len(step, i);
    copy_rows(b.block_tables, b.block_tables_stride, f->block_tables, f->block_tables_stride,
              b.batch_size);
    if (!encoder) return FOLIO_OK;
    memcpy(b.encoder_seq_lens_tensor, f->encoder_seq_lens_tensor,
           (size_t)b.batch_size * sizeof *b.encoder_seq_lens_tensor);
    copy_rows(b.cross_block_tables, b.cross_block_tables_stride, f->cross_block_tables,
              f->cross_block_tables_stride, b.batch_size);
    return FOLIO_OK;
}

folio_status folio_vllm06_begin_forward(folio_vllm06_state *state,
                                        const folio_vllm06_metadata *attn_metadata,
                                        const folio_run *given)
{
    REQUIRE(state != NULL, "begin_forward: state is NULL");
    REQUIRE(attn_metadata != NULL, "begin_forward: attn_metadata is NULL");
    REQUIRE(attn_metadata->graph_len == 0 || attn_metadata->state->ctx == state->ctx,
            "begin_forward: attn_metadata is of a graph of another context");
    folio_run run;
    TRY(folioi_run_in(state->ctx, given, &run));
    folio_status status = FOLIO_OK;
    folioi_vllm06_plan *p = attn_metadata->plans;
    for (; status == FOLIO_OK && p != NULL; p = p->next)
        status = folioi_vllm06_replan(attn_metadata, p, &run);
    if (status == FOLIO_OK) return FOLIO_OK;
    /* of a step that is refused no layer runs, nor by the plan of another step */
    for (p = attn_metadata->plans; p != NULL; p = p->next) p->update.metadata = 0;
    return status;
}
