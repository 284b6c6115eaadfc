/*
 * cuda_plan.c: creates plans on the device and updates them with a batch. An update copies sequences, block tables and
 * slots to the device, and one launch makes the work lists. Every layer reads them.
 */
#include "backends/cuda/host/cuda_plan.h"

#include <string.h>

/* ---- create ---- */

/* What passes all memory stays so: the sum of some such places must not come round to a small number. */
static folioi_cuda_place take(folioi_cuda_plan *p, int64_t count, size_t size)
{
    const int64_t most = MAX_EXTENT / 1024;
    int64_t bytes;
    if (!checked_mul(count, (int64_t)size, &bytes) || bytes > most) bytes = most;
    folioi_cuda_place at = {p->bytes, (size_t)bytes};
    p->bytes += (size_t)round_up(bytes, 256);
    return at;
}

static void lay_out(folioi_cuda_plan *p)
{
    const folio_plan_desc *d = &p->shape.desc;
    uint32_t types = 0;
    for (int32_t i = 0; i < d->num_attentions; i++) types |= p->shape.types[i];
    int64_t tables = d->block_size > 0 ? d->max_seqs * ceil_div(d->max_seq_len, d->block_size) : 0;
    for (int t = 0; t < FOLIO_NUM_ATTENTION_TYPES; t++) {
        if (!(types & FOLIO_ATTENTION_BIT(t))) continue;
        p->counts[t] = take(p, 1, sizeof(folioi_cuda_counts));
        p->seqs[t] = take(p, d->max_seqs, sizeof(folioi_cuda_seq));
    }
    if (types & FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER)) {
        p->blocks = take(p, tables, sizeof(int32_t));
        p->slots = take(p, d->max_query_tokens, sizeof(int64_t));
    }
    if (types & FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_DECODER)) {
        p->cross_blocks = take(p, tables, sizeof(int32_t));
        p->cross_slots = take(p, d->max_encoder_tokens, sizeof(int64_t));
    }
    p->staged_bytes = p->bytes;
    p->problems = take(p, d->max_seqs, sizeof(int32_t));
    p->num_checked = take(p, 1, sizeof(uint32_t));
    if (notes_bad(p)) p->notes = take(p, 1, sizeof(folioi_cuda_notes));
    if (p->num_lists > 0)
        p->counters = take(p, FOLIOI_CUDA_WORKSPACES, p->lists[0].decode.counter_bytes);
    p->jobs = take(p, 2 * (int64_t)p->num_lists, sizeof(folioi_cuda_job));
    for (int32_t i = 0; i < p->num_lists; i++) {
        folioi_cuda_list *list = &p->lists[i];
        if (list->limit.decode_rows > 0) list->schedule = take(p, 1, list->decode.schedule_bytes);
        if (list->limit.prefills) list->items = take(p, 1, list->prefill.list_bytes);
    }
}

/* No note, in device and in host memory. */
static folio_status start_notes(folioi_cuda_plan *p)
{
    const folio_context *ctx = p->shape.ctx;
    folioi_cuda_notes none = {.first = FOLIOI_BAD_NONE};
    if (!notes_bad(p)) return FOLIO_OK;
    TRY_CUDA(cudaMemcpy(folioi_cuda_at(p, p->notes), &none, sizeof none, cudaMemcpyHostToDevice),
             "copying a plan");
    TRY(ctx->backend->alloc(ctx, FOLIO_MEMORY_HOST, sizeof *p->bad, "a plan", (void **)&p->bad));
    *p->bad = (folioi_cuda_bad){.key = FOLIOI_BAD_NONE};
    return FOLIO_OK;
}

/* Behind all that an update has sent. */
static folio_status begin_notes(const folioi_cuda_plan *p, cudaStream_t stream)
{
    if (!notes_bad(p)) return FOLIO_OK;
    return folioi_cuda_status(folioi_cuda_begin_notes(folioi_cuda_at(p, p->notes), p->bad, stream),
                              "kernel begin_notes");
}

static folio_status reserve(folioi_cuda_plan *p)
{
    const folio_context *ctx = p->shape.ctx;
    const folioi_backend *b = ctx->backend;
    TRY(b->alloc(ctx, FOLIO_MEMORY_DEVICE, p->bytes, "a plan", (void **)&p->device));
    TRY_CUDA(cudaMemset(folioi_cuda_at(p, p->num_checked), 0, sizeof(uint32_t)), "filling memory");
    TRY_CUDA(cudaMemset(folioi_cuda_at(p, p->counters), 0, p->counters.bytes), "filling memory");
    TRY(b->alloc(ctx, FOLIO_MEMORY_HOST, sizeof *p->word, "a plan", (void **)&p->word));
    *p->word = 0;
    TRY(start_notes(p));
    for (int i = 0; i < FOLIOI_CUDA_STAGES; i++) {
        TRY(b->alloc(ctx, FOLIO_MEMORY_HOST, p->staged_bytes, "a plan", (void **)&p->stage[i]));
        TRY_CUDA(cudaEventCreateWithFlags(&p->copied[i], cudaEventDisableTiming), "a plan's event");
    }
    return FOLIO_OK;
}

/* Everything a new plan owns; on error what was made is left for folioi_cuda_plan_destroy. */
static folio_status build(folioi_cuda_plan *p)
{
    const folio_allocator *a = &p->shape.ctx->allocator;
    int64_t most = (int64_t)p->shape.desc.num_attentions * FOLIO_NUM_ATTENTION_TYPES;
    void *memory;
    TRY(folioi_core->alloc(a, most * (int64_t)sizeof *p->lists, "a plan", &memory));
    p->lists = memory;
    TRY(folioi_core->alloc(a, most * (int64_t)sizeof *p->uses, "a plan", &memory));
    p->uses = memory;
    TRY(folioi_core->alloc(a, FOLIOI_CUDA_WORKSPACES * (int64_t)sizeof *p->workspaces, "a plan",
                           &memory));
    p->workspaces = memory;
    TRY(folioi_core->alloc(a, (int64_t)sizeof *p->ahead, "a plan", &memory));
    p->ahead = memory;
    p->may_pad = folioi_cuda_is_graph(p);
    folioi_cuda_lists_init(p);
    lay_out(p);
    TRY(reserve(p));
    return folioi_cuda_lists_start(p);
}

folio_status folioi_cuda_plan_create(const folioi_plan_shape *shape, void **state,
                                     size_t *workspace_size)
{
    void *memory;
    int before;
    TRY(folioi_core->alloc(&shape->ctx->allocator, sizeof(folioi_cuda_plan), "a plan", &memory));
    folioi_cuda_plan *p = memory;
    p->shape = *shape;
    folio_status status = folioi_cuda_enter(shape->ctx, &before);
    if (status == FOLIO_OK) {
        status = build(p);
        folioi_cuda_leave(shape->ctx, before);
    }
    if (status != FOLIO_OK) {
        folioi_cuda_plan_destroy(shape, p);
        return status;
    }
    *state = p;
    *workspace_size = 0;
    for (int32_t i = 0; i < p->num_lists; i++) {
        const folioi_cuda_list *list = &p->lists[i];
        if (list->limit.decode_rows > 0 && list->decode.workspace_bytes > *workspace_size)
            *workspace_size = list->decode.workspace_bytes;
        if (list->limit.prefills && list->prefill.workspace_bytes > *workspace_size)
            *workspace_size = list->prefill.workspace_bytes;
    }
    return FOLIO_OK;
}

void folioi_cuda_plan_destroy(const folioi_plan_shape *shape, void *state)
{
    folioi_cuda_plan *p = state;
    const folioi_backend *b = shape->ctx->backend;
    b->free(shape->ctx, FOLIO_MEMORY_DEVICE, p->device, p->bytes);
    b->free(shape->ctx, FOLIO_MEMORY_HOST, p->word, sizeof *p->word);
    b->free(shape->ctx, FOLIO_MEMORY_HOST, p->bad, sizeof *p->bad);
    for (int i = 0; i < FOLIOI_CUDA_STAGES; i++) {
        if (p->copied[i] != NULL) (void)cudaEventDestroy(p->copied[i]);
        b->free(shape->ctx, FOLIO_MEMORY_HOST, p->stage[i], p->staged_bytes);
    }
    int64_t most = (int64_t)shape->desc.num_attentions * FOLIO_NUM_ATTENTION_TYPES;
    const folio_allocator *a = &shape->ctx->allocator;
    folioi_core->free(a, p->lists, most * (int64_t)sizeof *p->lists);
    folioi_core->free(a, p->uses, most * (int64_t)sizeof *p->uses);
    folioi_core->free(a, p->workspaces, FOLIOI_CUDA_WORKSPACES * (int64_t)sizeof *p->workspaces);
    folioi_core->free(a, p->ahead, sizeof *p->ahead);
    folioi_core->free(a, p, sizeof *p);
}

/* ---- update ---- */

static bool has_type(const folioi_cuda_plan *p, folio_attention_type type)
{
    return p->seqs[type].bytes > 0;
}

typedef struct {
    folioi_cuda_plan *plan;
    char *stage;
    cudaStream_t stream;
} update;

/* `bytes` of an array to its place on the device; those past `used` of them are -1. from NULL: the stage has them. */
static folio_status send(const update *u, folioi_cuda_place to, const void *from, size_t used,
                         size_t bytes)
{
    if (bytes == 0) return FOLIO_OK;
    char *stage = u->stage + to.at;
    if (from != NULL) memcpy(stage, from, used);
    memset(stage + used, 0xff, bytes - used);
    return folioi_cuda_status(
        cudaMemcpyAsync(u->plan->device + to.at, stage, bytes, cudaMemcpyHostToDevice, u->stream),
        "copying a plan");
}

static folio_status send_seqs(const update *u, const folio_batch *batch, folio_attention_type type)
{
    folioi_cuda_plan *p = u->plan;
    bool cross = type == FOLIO_ATTENTION_ENCODER_DECODER;
    const int32_t *tables = cross ? batch->cross_blocks.data : batch->blocks.data;
    folioi_cuda_seq *seqs = (void *)(u->stage + p->seqs[type].at);
    folioi_cuda_counts counts = {.num_seqs = (int32_t)batch->num_seqs};
    for (int64_t i = 0; i < batch->num_seqs; i++) {
        folioi_rows r = folioi_core->rows(batch, i, type);
        seqs[i] = (folioi_cuda_seq){
            .query_row = r.query_row,
            .new_row = r.new_row,
            .first_query_pos = r.first_query_pos,
            .first_key_pos = r.first_key_pos,
            .table = r.blocks != NULL ? r.blocks - tables : 0,
            .query_len = r.query_len,
            .key_len = r.key_len,
            .context_len = r.context_len,
            .causal = r.causal,
        };
        counts.num_rows = r.query_row + r.query_len;
    }
    folioi_cuda_lists_update(p, type, seqs, batch->num_seqs);
    size_t bytes = (size_t)batch->num_seqs * sizeof *seqs;
    TRY(send(u, p->counts[type], &counts, sizeof counts, sizeof counts));
    return send(u, p->seqs[type], NULL, bytes, bytes);
}

/* All slots of a graph plan are sent: rows past the batch's are stored nowhere. */
static folio_status send_all(const update *u, const folio_batch *batch)
{
    folioi_cuda_plan *p = u->plan;
    bool graph = folioi_cuda_is_graph(p);
    for (int t = 0; t < FOLIO_NUM_ATTENTION_TYPES; t++)
        if (has_type(p, (folio_attention_type)t)) TRY(send_seqs(u, batch, (folio_attention_type)t));
    size_t blocks = (size_t)batch->num_blocks * sizeof(int32_t);
    size_t cross = (size_t)batch->num_cross_blocks * sizeof(int32_t);
    size_t slots = (size_t)batch->num_query_tokens * sizeof(int64_t);
    size_t cross_slots = (size_t)batch->num_encoder_tokens * sizeof(int64_t);
    if (p->blocks.bytes > 0) TRY(send(u, p->blocks, batch->blocks.data, blocks, blocks));
    if (p->slots.bytes > 0)
        TRY(send(u, p->slots, batch->slots.data, slots, graph ? p->slots.bytes : slots));
    if (p->cross_blocks.bytes > 0)
        TRY(send(u, p->cross_blocks, batch->cross_blocks.data, cross, cross));
    if (p->cross_slots.bytes > 0)
        TRY(send(u, p->cross_slots, batch->cross_slots.data, cross_slots,
                 graph ? p->cross_slots.bytes : cross_slots));
    return FOLIO_OK;
}

/* The most keys of a step of one sequence; more of them need no such number. A graph is launched for all that may come. */
static int64_t longest_of(const folioi_cuda_plan *p, const folio_batch *batch)
{
    if (folioi_cuda_is_graph(p)) return p->shape.desc.max_seq_len;
    int64_t longest = 0;
    for (int t = 0; t < FOLIO_NUM_ATTENTION_TYPES && batch->num_seqs == 1; t++)
        if (has_type(p, (folio_attention_type)t))
            longest =
                max_i64(longest, folioi_core->rows(batch, 0, (folio_attention_type)t).key_len);
    return longest;
}

folio_status folioi_cuda_plan_update(void *state, const folio_batch *batch, void *stream)
{
    folioi_cuda_plan *p = state;
    int before;
    TRY(folioi_cuda_refuse_capture(stream));
    TRY(folioi_cuda_enter(p->shape.ctx, &before));
    p->ahead->is_there = false;
    p->num_seqs = batch->num_seqs;
    p->longest = longest_of(p, batch);
    int current = p->current = (p->current + 1) % FOLIOI_CUDA_STAGES;
    update u = {p, p->stage[current], stream};
    /* what was sent from this stage two updates ago has long arrived */
    folio_status status =
        folioi_cuda_status(cudaEventSynchronize(p->copied[current]), "waiting for a plan's copy");
    if (status == FOLIO_OK) {
        status = send_all(&u, batch);
        /* also behind what was sent before a failure */
        folio_status recorded =
            folioi_cuda_status(cudaEventRecord(p->copied[current], stream), "a plan's event");
        if (status == FOLIO_OK) status = recorded;
    }
    if (status == FOLIO_OK)
        status = folioi_cuda_status(folioi_cuda_schedule(folioi_cuda_at(p, p->jobs), p->num_jobs,
                                                         p->longest, NULL, NULL, stream),
                                    "kernel schedule");
    if (status == FOLIO_OK) status = begin_notes(p, stream);
    p->may_pad = folioi_cuda_is_graph(p);
    folioi_cuda_leave(p->shape.ctx, before);
    return status;
}

/* ---- update on the device ---- */

/* A window as wide as the widest of the plan's, for blocks that nobody sees. */
static void widest_window(const folioi_plan_shape *shape, int64_t *left, int64_t *right)
{
    *left = *right = 0;
    for (int32_t i = 0; i < shape->desc.num_attentions; i++) {
        const folio_attention_desc *a = &shape->attentions[i]->desc;
        if (!(shape->types[i] & FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER))) continue;
        if (*left >= 0) *left = a->window_left < 0 ? -1 : max_i64(*left, a->window_left);
        if (*right >= 0) *right = a->window_right < 0 ? -1 : max_i64(*right, a->window_right);
    }
}

static folioi_device_step step_of(const folioi_cuda_plan *p, const folio_step *b)
{
    const folio_plan_desc *d = &p->shape.desc;
    bool decoder = has_type(p, FOLIO_ATTENTION_DECODER),
         encoder = has_type(p, FOLIO_ATTENTION_ENCODER_ONLY);
    folioi_device_step s = {
        .num_seqs = (int32_t)b->num_seqs,
        .query_start = b->query_start,
        .seq_lens = b->seq_lens,
        .causality = b->causality,
        .slots = b->slots,
        .first_query_pos = b->first_query_pos,
        .first_key_pos = b->first_key_pos,
        .blocks = decoder ? b->table.indices : NULL,
        .table_start = b->table.kind == FOLIO_TABLE_CSR ? b->table.start : NULL,
        .row_stride = b->table.row_stride,
        .num_table_entries = b->table.num_indices,
        .num_rows = b->num_query_tokens,
        .max_query_len = d->max_query_len,
        .max_seq_len = d->max_seq_len,
        .num_blocks = d->num_blocks,
        .block_size = d->block_size,
        .private_slots = has_private_slots(p),
        .problems = folioi_cuda_at(p, p->problems),
    };
    widest_window(&p->shape, &s.window_left, &s.window_right);
    if (encoder) {
        s.counts[0] = folioi_cuda_at(p, p->counts[FOLIO_ATTENTION_ENCODER_ONLY]);
        s.encoder_only = folioi_cuda_at(p, p->seqs[FOLIO_ATTENTION_ENCODER_ONLY]);
    }
    if (!decoder) return s;
    s.counts[1] = folioi_cuda_at(p, p->counts[FOLIO_ATTENTION_DECODER]);
    s.decoder = folioi_cuda_at(p, p->seqs[FOLIO_ATTENTION_DECODER]);
    s.tables = folioi_cuda_at(p, p->blocks);
    s.table_stride = d->block_size > 0 ? ceil_div(d->max_seq_len, d->block_size) : 0;
    s.slots_out = folioi_cuda_at(p, p->slots);
    s.slots_room = d->max_query_tokens;
    return s;
}

folio_status folioi_cuda_plan_update_device(void *state, const folio_step *given, void *stream)
{
    folioi_cuda_plan *p = state;
    int before;
    folioi_device_step step = step_of(p, given);
    folioi_cuda_report report = {folioi_cuda_at(p, p->num_checked), p->word};
    TRY(folioi_cuda_enter(p->shape.ctx, &before));
    p->ahead->is_there = false;
    p->may_pad = true;
    p->num_seqs = -1;
    p->longest = p->shape.desc.max_seq_len;
    for (int t = 0; t < FOLIO_NUM_ATTENTION_TYPES; t++)
        folioi_cuda_lists_update(p, (folio_attention_type)t, NULL, given->num_seqs);
    folio_status status =
        folioi_cuda_status(folioi_cuda_check_step(&step, stream), "kernel check_step");
    if (status == FOLIO_OK)
        status = folioi_cuda_status(folioi_cuda_schedule(folioi_cuda_at(p, p->jobs), p->num_jobs,
                                                         p->longest, &step, &report, stream),
                                    "kernel schedule");
    if (status == FOLIO_OK) status = begin_notes(p, stream);
    folioi_cuda_leave(p->shape.ctx, before);
    return status;
}

folio_status folioi_cuda_plan_status(const void *state, folio_plan_findings *out)
{
    static const char *const sentences[FOLIOI_STEP_NUM_PROBLEMS] = {
        [FOLIOI_STEP_QUERY_START] =
            "query_start decreases, does not begin at 0 or exceeds the rows of q",
        [FOLIOI_STEP_QUERY_LEN] = "its query is longer than the plan's max_query_len",
        [FOLIOI_STEP_SEQ_LEN] =
            "seq_lens is negative, above max_seq_len, or below the query's length, which only "
            "arrays in host memory may have",
        [FOLIOI_STEP_NO_TABLE] = "it has a context, and the step has no table",
        [FOLIOI_STEP_TABLE_START] =
            "table.start leaves its table outside of table.indices or too short",
        [FOLIOI_STEP_BLOCK] =
            "an entry of its block table that its rows see is outside [0, num_blocks)",
        [FOLIOI_STEP_SLOT] = "a slot is outside [-1, num_blocks * block_size)",
        [FOLIOI_STEP_PLACE] = "the slot of its new token is not the token's place in the block "
                              "table, as FOLIO_PLAN_PRIVATE_SLOTS promises",
        [FOLIOI_STEP_POSITION] = "a position is 2^40 or more in size",
        [FOLIOI_STEP_CAUSALITY] = "causality is not a value of folio_causality",
    };
    const folioi_cuda_plan *p = state;
    uint32_t num_checked;
    int32_t bad_seq, problem;
    folioi_cuda_report_read(*(const volatile uint64_t *)p->word, &num_checked, &bad_seq, &problem);
    out->num_checked = num_checked;
    out->bad_seq = bad_seq;
    if (bad_seq < 0) return FOLIO_OK;
    const char *why = problem < FOLIOI_STEP_NUM_PROBLEMS ? sentences[problem] : NULL;
    return folioi_core->fail(FOLIO_ERR_ARGUMENT, "seq %lld was emptied on the device: %s",
                             (long long)out->bad_seq, why != NULL ? why : "the reason is unknown");
}

/* The device may be writing it: then there is none yet. */
void folioi_cuda_plan_bad_write(void *state, folio_plan_bad_write *out)
{
    const folioi_cuda_plan *p = state;
    volatile folioi_cuda_bad *from = p->bad;
    uint64_t version = __atomic_load_n(&from->version, __ATOMIC_ACQUIRE);
    folioi_cuda_bad bad = {.key = from->key,
                           .step = from->step,
                           .seq = from->seq,
                           .position = from->position,
                           .layer = from->layer,
                           .attention = from->attention};
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (version % 2 != 0 || from->version != version || bad.key == FOLIOI_BAD_NONE) return;
    __atomic_store_n(&from->asked, version, __ATOMIC_RELEASE);
    *out = (folio_plan_bad_write){.found = 1,
                                  .layer = bad.layer,
                                  .attention = bad.attention,
                                  .type = (folio_attention_type)bad_key_type(bad.key),
                                  .what = (folio_written)bad_key_what(bad.key),
                                  .head = bad_key_head(bad.key),
                                  .step = bad.step,
                                  .seq = bad.seq,
                                  .position = bad.position};
}

/* The first lines of what the step has; none if one is missing. */
static folioi_cuda_picks first_picks(const folioi_cuda_use *use, const folioi_cuda_work *now)
{
    folioi_cuda_picks picks = {now->prefills, now->decode_rows > 0};
    bool all = use->list >= 0 && (!picks.prefill || use->prefill.lines[0] != NULL) &&
               (!picks.decode || use->decode.lines[0] != NULL);
    return all ? picks : (folioi_cuda_picks){0, 0};
}

void folioi_cuda_plan_describe(const void *state, int32_t attention, folio_attention_type type,
                               const folioi_call *call, folio_plan_info *info)
{
    const folioi_cuda_plan *p = state;
    const folioi_cuda_use *use = folioi_cuda_use_of(p, attention, type);
    const folioi_cuda_list *list = use->list >= 0 ? &p->lists[use->list] : NULL;
    const folioi_cuda_work *work = list != NULL ? &list->now : &(folioi_cuda_work){0};
    folioi_cuda_picks picks = call != NULL ? folioi_cuda_picks_of(p, call) : first_picks(use, work);
    info->kernel = use->names[picks.prefill][picks.decode];
    if (call == NULL && strcmp(info->kernel, "generic") != 0)
        info->fallback = use->fallback[picks.prefill][picks.decode];
    if (list != NULL) info->split_len = list->decode.split_len;
    const folioi_cuda_seq *seqs = (const void *)(p->stage[p->current] + p->seqs[type].at);
    if (p->num_seqs < 0) info->num_items = info->num_split_items = -1;
    else if (strcmp(info->kernel, "generic") != 0)
        folioi_cuda_lists_count(p, list, seqs, &info->num_items, &info->num_split_items);
    else { /* a row and head each */ int32_t heads = p->shape.attentions[attention]->desc.num_heads;
        for (int64_t i = 0; i < p->num_seqs; i++)
            info->num_items += (int64_t)seqs[i].query_len * heads;
    }
}
