/*
 * plan.c: creates plans and updates them with every step. Within limits an update allocates nothing; a plan without limits
 * gets a larger room when a step needs it.
 */
#include "plan/plan.h"

#include "cache/kv_cache.h"
#include "core/tensor.h"
#include "plan/judge.h"

#include <string.h>

#define KNOWN_FLAGS                                                                                \
    (FOLIO_PLAN_GRAPH | FOLIO_PLAN_NO_WORKSPACE | FOLIO_PLAN_BATCH_INVARIANT |                     \
     FOLIO_PLAN_PRIVATE_SLOTS | FOLIO_PLAN_NOTE_BAD)

/* One number of a cache's, which the description may repeat. */
static folio_status take_number(int64_t *number, const char *name, int64_t of_cache,
                                const char *cache)
{
    REQUIRE(*number == 0 || *number == of_cache, "plan: %s is %lld, %s has %lld", name,
            (long long)*number, cache, (long long)of_cache);
    *number = of_cache;
    return FOLIO_OK;
}

/* Block size, counts and layouts from the caches, where these are given. */
static folio_status take_geometry(folio_plan_desc *d, folioi_plan_shape *shape)
{
    int64_t block_size = d->block_size;
    if (d->cache != NULL) {
        const folio_kv_cache_desc *c = &d->cache->format.desc;
        TRY(take_number(&block_size, "block_size", c->block_size, "cache"));
        TRY(take_number(&d->num_blocks, "num_blocks", c->num_blocks, "cache"));
        shape->layout = c->layout;
    }
    if (d->cross_cache != NULL) {
        const folio_kv_cache_desc *c = &d->cross_cache->format.desc;
        TRY(take_number(&block_size, "block_size", c->block_size, "cross_cache"));
        TRY(take_number(&d->cross_num_blocks, "cross_num_blocks", c->num_blocks, "cross_cache"));
        shape->cross_layout = c->layout;
    }
    d->block_size = (int32_t)block_size;
    d->cache = d->cross_cache = NULL; /* not kept */
    return FOLIO_OK;
}

static folio_status check_desc(const folio_plan_desc *d)
{
    REQUIRE(d->num_attentions >= 1 && d->attentions != NULL,
            "plan: the list of attentions is empty (num_attentions %d)", d->num_attentions);
    REQUIRE(d->block_size >= 0 && d->block_size <= 4096,
            "plan: block_size is %d, outside [0, 4096]", d->block_size);
    REQUIRE(d->num_blocks >= 0 && d->num_blocks <= INT32_MAX && d->cross_num_blocks >= 0 &&
                d->cross_num_blocks <= INT32_MAX,
            "plan: num_blocks %lld or cross_num_blocks %lld is outside [0, 2147483647]",
            (long long)d->num_blocks, (long long)d->cross_num_blocks);
    REQUIRE(
        (d->block_size == 0) == (d->num_blocks == 0 && d->cross_num_blocks == 0),
        "plan: block_size is %d, num_blocks %lld and cross_num_blocks %lld; set block_size and a "
        "number of blocks, or none of them",
        d->block_size, (long long)d->num_blocks, (long long)d->cross_num_blocks);
    REQUIRE((d->flags & ~KNOWN_FLAGS) == 0, "plan: flags 0x%x has unknown bits", d->flags);
    return FOLIO_OK;
}

static bool has_no_limits(const folio_plan_desc *d)
{
    return d->max_seqs == 0 && d->max_query_tokens == 0 && d->max_seq_len == 0;
}

static folio_status check_limits(const folio_plan_desc *d)
{
    if (has_no_limits(d)) {
        REQUIRE(d->max_encoder_tokens == 0 && d->max_query_len == 0,
                "plan: max_encoder_tokens is %lld and max_query_len %lld; they need max_seqs, "
                "max_query_tokens and max_seq_len",
                (long long)d->max_encoder_tokens, (long long)d->max_query_len);
        REQUIRE((d->flags & (FOLIO_PLAN_GRAPH | FOLIO_PLAN_NO_WORKSPACE)) == 0,
                "plan: flags 0x%x: FOLIO_PLAN_GRAPH and FOLIO_PLAN_NO_WORKSPACE need max_seqs, "
                "max_query_tokens and max_seq_len",
                d->flags);
        return FOLIO_OK;
    }
    REQUIRE(d->max_seqs != 0 && d->max_query_tokens != 0 && d->max_seq_len != 0,
            "plan: max_seqs is %lld, max_query_tokens %lld and max_seq_len %lld; give all of them, "
            "or none for a plan that grows",
            (long long)d->max_seqs, (long long)d->max_query_tokens, (long long)d->max_seq_len);
    REQUIRE(d->max_seqs >= 1 && d->max_seqs <= INT32_MAX,
            "plan: max_seqs is %lld, outside [1, 2147483647]", (long long)d->max_seqs);
    REQUIRE(d->max_query_tokens >= 1 && d->max_query_tokens <= INT32_MAX,
            "plan: max_query_tokens is %lld, outside [1, 2147483647]",
            (long long)d->max_query_tokens);
    REQUIRE(d->max_seq_len >= 1 && d->max_seq_len <= INT32_MAX,
            "plan: max_seq_len is %lld, outside [1, 2147483647]", (long long)d->max_seq_len);
    REQUIRE(d->max_encoder_tokens >= 0 && d->max_encoder_tokens <= INT32_MAX,
            "plan: max_encoder_tokens is %lld, outside [0, 2147483647]",
            (long long)d->max_encoder_tokens);
    REQUIRE(d->max_query_len >= 0 && d->max_query_len <= d->max_query_tokens,
            "plan: max_query_len is %lld, outside [0, %lld], the query tokens of a step",
            (long long)d->max_query_len, (long long)d->max_query_tokens);
    return FOLIO_OK;
}

/* Notes on a device lie in the room, which growth would replace. */
static folio_status check_notes(const folioi_backend *b, const folio_plan_desc *d)
{
    if (!(d->flags & FOLIO_PLAN_NOTE_BAD) || !b->on_device) return FOLIO_OK;
    if (b->plan_bad_write == NULL)
        FAIL(FOLIO_ERR_UNSUPPORTED,
             "plan: backend %s does not note bad writes: flags 0x%x has "
             "FOLIO_PLAN_NOTE_BAD",
             b->name, d->flags);
    REQUIRE(
        !has_no_limits(d),
        "plan: flags 0x%x: FOLIO_PLAN_NOTE_BAD on a device needs max_seqs, max_query_tokens and "
        "max_seq_len",
        d->flags);
    return FOLIO_OK;
}

static folio_status check_attentions(const folio_context *ctx, const folio_plan_desc *d)
{
    for (int32_t i = 0; i < d->num_attentions; i++) {
        REQUIRE(d->attentions[i] != NULL, "plan: attentions[%d] is NULL", i);
        REQUIRE(d->attentions[i]->ctx == ctx, "plan: attentions[%d] is of another context", i);
        uint32_t types =
            d->types != NULL ? d->types[i] : FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER);
        REQUIRE(types != 0 && types >> FOLIO_NUM_ATTENTION_TYPES == 0,
                "plan: types[%d] = 0x%x is empty or has unknown bits", i, types);
        char text[256] = "";
        folioi_reasons reasons = {.text = text, .size = sizeof text};
        folioi_request request = {&d->attentions[i]->desc, types, NULL};
        folioi_backend_judge(ctx->backend, &request, &reasons);
        if (reasons.count > 0) FAIL(FOLIO_ERR_UNSUPPORTED, "plan: attentions[%d]: %s", i, text);
    }
    return FOLIO_OK;
}

/* Everything a new plan owns; on error what was made is left for folio_plan_destroy. */
static folio_status build(folio_plan *plan, const folio_plan_desc *d)
{
    folio_context *ctx = plan->shape.ctx;
    const folio_allocator *a = &ctx->allocator;
    int64_t n = d->num_attentions;
    void *memory;
    plan->shape_bytes = n * (int64_t)(sizeof(folio_attention *) + sizeof(uint32_t));
    TRY(folioi_alloc(a, plan->shape_bytes, "a plan's attentions", &memory));
    plan->shape.attentions = memory;
    plan->shape.types = (uint32_t *)(plan->shape.attentions + n);
    for (int64_t i = 0; i < n; i++) {
        plan->shape.attentions[i] = (folio_attention *)d->attentions[i]; /* to keep it alive */
        refs_retain(&plan->shape.attentions[i]->refs);
        plan->shape.types[i] =
            d->types != NULL ? d->types[i] : FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER);
    }
    plan->shape.desc.attentions = NULL;
    plan->shape.desc.types = NULL;
    return plan->grows ? FOLIO_OK : folioi_plan_room_make(&plan->shape, &plan->room);
}

folio_status folio_plan_create(folio_context *ctx, const folio_plan_desc *desc, folio_plan **out)
{
    REQUIRE(out != NULL, "folio_plan_create: out is NULL");
    *out = NULL;
    REQUIRE(ctx != NULL, "folio_plan_create: ctx is NULL");
    folio_plan_desc d;
    STRUCT_IN(d, desc, "folio_plan_desc");
    folioi_plan_shape shape = {.ctx = ctx};
    TRY(take_geometry(&d, &shape));
    TRY(check_desc(&d));
    TRY(check_limits(&d));
    TRY(check_notes(ctx->backend, &d));
    TRY(check_attentions(ctx, &d));
    if (d.cross_num_blocks == 0) d.cross_num_blocks = d.num_blocks;
    if (d.max_query_len == 0) d.max_query_len = d.max_query_tokens; /* 0 in a plan that grows */
    void *memory;
    TRY(folioi_alloc(&ctx->allocator, sizeof(folio_plan), "a plan", &memory));
    folio_plan *plan = memory;
    refs_retain(&ctx->refs);
    shape.desc = d;
    plan->shape = shape;
    plan->grows = has_no_limits(&d);
    folio_status status = build(plan, &d);
    if (status != FOLIO_OK) {
        folio_plan_destroy(plan);
        return status;
    }
    *out = plan;
    return FOLIO_OK;
}

void folio_plan_destroy(folio_plan *plan)
{
    if (plan == NULL) return;
    folio_context *ctx = plan->shape.ctx;
    folio_allocator a = ctx->allocator;
    folio_batch_destroy(plan->batch);
    for (int i = 0; i < 2; i++) folio_batch_destroy(plan->own_batches[i]);
    folioi_plan_room_free(&plan->shape, &plan->room);
    for (int32_t i = 0; plan->shape.attentions != NULL && i < plan->shape.desc.num_attentions; i++)
        folio_attention_destroy(plan->shape.attentions[i]);
    folioi_free(&a, plan->shape.attentions, plan->shape_bytes);
    folioi_free(&a, plan, sizeof *plan);
    folio_context_destroy(ctx);
}

/* What an update makes the plan serve. */
typedef struct {
    folio_batch *batch; /* NULL: arrays of the device, or nothing */
    bool on_device;
    int64_t num_seqs;
    folioi_plan_facts facts[FOLIO_NUM_ATTENTION_TYPES];
} plan_step;

static folioi_plan_facts find_facts(const folio_batch *batch, folio_attention_type type)
{
    folioi_plan_facts f = {.query_rows = folioi_batch_query_rows(batch, type),
                           .new_rows = folioi_batch_new_rows(batch, type),
                           .with_context = -1,
                           .without_table = -1,
                           .context_without_table = -1,
                           .only_reads = -1};
    for (int64_t i = batch->num_seqs - 1; i >= 0; i--) {
        folioi_rows r = folioi_batch_rows(batch, i, type);
        f.max_query_len = max_i64(f.max_query_len, r.query_len);
        f.max_key_len = max_i64(f.max_key_len, r.key_len);
        if (r.context_len > 0) f.with_context = i;
        if (r.key_len > 0 && r.blocks == NULL) f.without_table = i;
        if (r.context_len > 0 && r.blocks == NULL) f.context_without_table = i;
        if (type == FOLIO_ATTENTION_DECODER && seq_only_reads(r.query_len, r.key_len))
            f.only_reads = i;
        if (r.key_len == 0 || r.query_len == 0) continue;
        int64_t first = r.first_query_pos, last = first + r.query_len - 1;
        if (first < f.low_pos) f.low_pos = first, f.low_seq = i;
        if (last > f.high_pos) f.high_pos = last, f.high_seq = i;
    }
    return f;
}

/* What the last update left, as the next one begins: a step that forwards run, or none. */
static void take_over(folio_plan *plan, const plan_step *step)
{
    if (step->batch != NULL) refs_retain(&step->batch->refs);
    folio_batch_destroy(plan->batch);
    plan->batch = step->batch;
    plan->generation = step->batch != NULL ? step->batch->generation : 0;
    plan->on_device = step->on_device;
    plan->num_seqs = step->num_seqs;
    memcpy(plan->facts, step->facts, sizeof plan->facts);
    if (step->batch != NULL) folioi_plan_begin_notes(plan);
    plan->workspace_use.is_bound = false;
    /* no forward runs now, but one may seem to: of a thread that stayed behind when the process forked */
    atomic_store(&plan->workspace_use.is_busy, false);
}

/*
 * The step becomes the plan's once the backend has it. A backend that refuses has changed nothing; one that fails may
 * have sent half of it, and then the plan has none.
 */
static folio_status end_update(folio_plan *plan, const plan_step *step, folio_status status)
{
    static const plan_step none = {.batch = NULL};
    if (status == FOLIO_OK) take_over(plan, step);
    else if (status == FOLIO_ERR_DEVICE) take_over(plan, &none);
    return status;
}

static plan_step step_of(const folioi_plan_shape *shape, folioi_slotset *slots, folio_batch *batch)
{
    plan_step step = {.batch = batch, .num_seqs = batch->num_seqs};
    uint32_t types = folioi_plan_types(shape);
    for (int t = 0; t < FOLIO_NUM_ATTENTION_TYPES; t++)
        if (types & FOLIO_ATTENTION_BIT(t)) {
            step.facts[t] = find_facts(batch, (folio_attention_type)t);
            step.facts[t].shared_slot =
                folioi_plan_find_shared_slot(slots, batch, (folio_attention_type)t);
        }
    return step;
}

/* The batch in a larger room, made beside the one the plan has: that one goes once the new one serves. */
static folio_status move(folio_plan *plan, const folioi_plan_shape *larger, folio_batch *batch,
                         void *stream)
{
    const folio_context *ctx = plan->shape.ctx;
    folioi_plan_room room = {.state = NULL};
    plan_step step = {.batch = NULL};
    /* forwards of the last step may still read the old one */
    folio_status status = ctx->backend->wait(ctx, stream);
    if (status == FOLIO_OK) status = folioi_plan_room_make(larger, &room);
    if (status == FOLIO_OK) {
        step = step_of(larger, &room.slots, batch);
        status = ctx->backend->plan_update(room.state, batch, stream);
    }
    if (status == FOLIO_OK) {
        folioi_plan_room old = plan->room;
        plan->room = room;
        room = old;
        plan->shape = *larger;
    }
    folioi_plan_room_free(larger, &room);
    return end_update(plan, &step, status);
}

folio_status folio_plan_update(folio_plan *plan, folio_batch *batch, const folio_run *run)
{
    REQUIRE(plan != NULL, "folio_plan_update: plan is NULL");
    REQUIRE(batch != NULL, "folio_plan_update: batch is NULL");
    folio_run r;
    const folio_context *ctx = plan->shape.ctx;
    TRY(folioi_run_in(ctx, run, &r));
    TRY(folioi_batch_check_stamps(batch));
    folioi_plan_shape shape = plan->shape;
    bool is_larger = plan->grows && folioi_plan_grow(&shape, batch);
    TRY(folioi_plan_check(&shape, batch));
    if (is_larger) return move(plan, &shape, batch, r.stream);
    plan_step step = step_of(&shape, &plan->room.slots, batch);
    return end_update(plan, &step, ctx->backend->plan_update(plan->room.state, batch, r.stream));
}

/* What a device's arrays cannot say. */
static folio_status check_device_kind(const folio_plan *plan, const folio_step *s)
{
    uint32_t taken = FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER) |
                     FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_ONLY);
    for (int32_t i = 0; i < plan->shape.desc.num_attentions; i++)
        if (plan->shape.types[i] & ~taken)
            FAIL(FOLIO_ERR_UNSUPPORTED,
                 "attention %d is planned with an encoder; its lengths are given in host memory",
                 i);
    if (s->encoder_lens != NULL || s->encoder_new_lens != NULL || s->cross_slots != NULL ||
        s->cross_table.kind != FOLIO_TABLE_NONE)
        FAIL(FOLIO_ERR_UNSUPPORTED, "device step: arrays of an encoder must lie in host memory");
    if (s->phases != NULL)
        FAIL(FOLIO_ERR_UNSUPPORTED, "device step: phases are given; they must be NULL");
    if (s->causality_default != FOLIO_CAUSAL_AUTO)
        FAIL(FOLIO_ERR_UNSUPPORTED,
             "device step: causality_default is %d; give `causality`, an array on the device",
             (int)s->causality_default);
    REQUIRE((unsigned)s->table.kind <= FOLIO_TABLE_SLOTS, "device step: table.kind %d is unknown",
            (int)s->table.kind);
    if (s->table.kind == FOLIO_TABLE_SLOTS)
        FAIL(FOLIO_ERR_UNSUPPORTED,
             "device step: the table is of slots; it must be of rows or CSR");
    if (s->table.index_bytes != 0 && s->table.index_bytes != 4)
        FAIL(FOLIO_ERR_UNSUPPORTED, "device step: table.index_bytes is %d; it must be 4",
             s->table.index_bytes);
    return FOLIO_OK;
}

static folio_status check_device_table(const folio_plan_desc *d, const folio_table *t)
{
    if (t->kind == FOLIO_TABLE_NONE) {
        REQUIRE(t->indices == NULL,
                "device step: table.indices are given, yet table.kind is FOLIO_TABLE_NONE");
        return FOLIO_OK;
    }
    REQUIRE(t->indices != NULL, "device step: table.indices is NULL");
    REQUIRE(
        d->block_size > 0,
        "device step: a table is given, but the plan was made without a cache: set folio_plan_desc.cache");
    if (t->kind == FOLIO_TABLE_CSR) {
        REQUIRE(t->start != NULL, "device step: table.start is NULL");
        REQUIRE(t->num_indices >= 1,
                "device step: table.num_indices is %lld; it must be at least 1",
                (long long)t->num_indices);
        return FOLIO_OK;
    }
    int64_t most = ceil_div(d->max_seq_len, d->block_size);
    REQUIRE(
        t->row_stride >= most && t->row_stride <= INT32_MAX,
        "device step: table.row_stride is %lld; the plan's max_seq_len %lld needs at least %lld, and "
        "at most 2147483647 are possible",
        (long long)t->row_stride, (long long)d->max_seq_len, (long long)most);
    return FOLIO_OK;
}

static folio_status check_device_step(const folio_plan *plan, const folio_step *s)
{
    const folio_plan_desc *d = &plan->shape.desc;
    REQUIRE(!plan->grows,
            "device step: the plan was created without limits, and lengths on a device "
            "are not known here; set max_seqs, max_query_tokens and max_seq_len");
    TRY(check_device_kind(plan, s));
    REQUIRE(s->num_seqs >= 1 && s->num_seqs <= d->max_seqs,
            "device step: num_seqs is %lld, outside [1, %lld], the plan's limit",
            (long long)s->num_seqs, (long long)d->max_seqs);
    REQUIRE(s->num_query_tokens >= 0 && s->num_query_tokens <= d->max_query_tokens,
            "device step: num_query_tokens is %lld, outside [0, %lld], the plan's limit",
            (long long)s->num_query_tokens, (long long)d->max_query_tokens);
    REQUIRE(s->seq_lens != NULL, "device step: seq_lens is NULL");
    REQUIRE(
        s->query_start != NULL || s->num_query_tokens == 0 || s->num_query_tokens == s->num_seqs ||
            (d->flags & FOLIO_PLAN_GRAPH) != 0,
        "device step: query_start is NULL, which means one token each, but there are %lld tokens "
        "for %lld sequences",
        (long long)s->num_query_tokens, (long long)s->num_seqs);
    REQUIRE((s->first_query_pos == NULL) == (s->first_key_pos == NULL),
            "device step: first_query_pos and first_key_pos must both be set or both be NULL");
    REQUIRE(
        s->slots == NULL || d->block_size > 0,
        "device step: slots are given, but the plan was made without a cache: set folio_plan_desc.cache");
    return check_device_table(d, &s->table);
}

static folio_status update_from_device(folio_plan *plan, folio_step *s, const folio_run *run)
{
    folio_run r;
    const folio_context *ctx = plan->shape.ctx;
    const folio_plan_desc *d = &plan->shape.desc;
    if (ctx->backend->plan_update_device == NULL)
        FAIL(FOLIO_ERR_UNSUPPORTED,
             "backend %s has no device memory: on_device must be 0, with arrays in host memory",
             ctx->backend->name);
    TRY(folioi_run_in(ctx, run, &r));
    TRY(check_device_step(plan, s));
    if (s->num_query_tokens == 0) s->num_query_tokens = min_i64(s->num_seqs, d->max_query_tokens);
    if (d->flags & FOLIO_PLAN_GRAPH) s->num_query_tokens = d->max_query_tokens;
    plan_step step = {.on_device = true, .num_seqs = s->num_seqs};
    bool tabled = s->table.kind != FOLIO_TABLE_NONE;
    for (int t = 0; t < FOLIO_NUM_ATTENTION_TYPES; t++)
        step.facts[t] = (folioi_plan_facts){.query_rows = s->num_query_tokens,
                                            .new_rows = s->num_query_tokens,
                                            .max_query_len = d->max_query_len,
                                            .max_key_len = d->max_seq_len,
                                            /* what is not known is taken to be there */
                                            .with_context = tabled ? 0 : -1,
                                            .without_table = tabled ? -1 : 0,
                                            .context_without_table = -1,
                                            .only_reads = -1,
                                            .shared_slot = -1};
    return end_update(plan, &step, ctx->backend->plan_update_device(plan->room.state, s, r.stream));
}

/* Sequences and rows against the plan's limits, before a batch makes room for them. */
static folio_status check_step_limits(const folio_plan_desc *d, const folio_step *s)
{
    TRY(folioi_step_check_rows(s));
    int64_t rows = s->query_start != NULL && s->num_seqs > 0 ? s->query_start[s->num_seqs]
                                                             : s->num_query_tokens;
    REQUIRE(s->num_seqs <= d->max_seqs, "step: num_seqs is %lld, the plan's max_seqs is %lld",
            (long long)s->num_seqs, (long long)d->max_seqs);
    REQUIRE(rows <= d->max_query_tokens,
            "step: it has %lld query tokens, the plan's max_query_tokens is %lld", (long long)rows,
            (long long)d->max_query_tokens);
    return FOLIO_OK;
}

/* Into the one of its two batches that the plan does not serve: an update that fails leaves the other as it is. */
static folio_status update_from_host(folio_plan *plan, const folio_step *s, const folio_run *run)
{
    folio_batch **own = &plan->own_batches[plan->batch == plan->own_batches[0]];
    folio_batch_desc d = {.struct_size = sizeof d, .block_size = plan->shape.desc.block_size};
    REQUIRE(
        d.block_size > 0 ||
            (s->table.kind == FOLIO_TABLE_NONE && s->cross_table.kind == FOLIO_TABLE_NONE),
        "step: a table is given, but the plan was made without a cache: set folio_plan_desc.cache");
    if (!plan->grows) TRY(check_step_limits(&plan->shape.desc, s));
    if (*own == NULL) TRY(folio_batch_create(plan->shape.ctx, &d, own));
    TRY(folio_batch_set(*own, s));
    return folio_plan_update(plan, *own, run);
}

folio_status folio_plan_update_step(folio_plan *plan, const folio_step *step, const folio_run *run)
{
    folio_step s;
    REQUIRE(plan != NULL, "folio_plan_update_step: plan is NULL");
    STRUCT_IN(s, step, "folio_step");
    REQUIRE(s.on_device == 0 || s.on_device == 1, "step: on_device is %d, not 0 or 1", s.on_device);
    return s.on_device ? update_from_device(plan, &s, run) : update_from_host(plan, &s, run);
}

folio_status folio_plan_get_findings(const folio_plan *plan, folio_plan_findings *out)
{
    folio_plan_findings found = {.bad_seq = -1};
    folio_status status = FOLIO_OK;
    REQUIRE(plan != NULL, "folio_plan_get_findings: plan is NULL");
    if (plan->shape.ctx->backend->plan_status != NULL && plan->room.has_state)
        status = plan->shape.ctx->backend->plan_status(plan->room.state, &found);
    if (out != NULL) TRY(folioi_struct_out(out, &found, sizeof found, "folio_plan_findings"));
    return status;
}

folio_status folio_plan_get_workspace_size(const folio_plan *plan, size_t *bytes)
{
    REQUIRE(plan != NULL, "folio_plan_get_workspace_size: plan is NULL");
    REQUIRE(bytes != NULL, "folio_plan_get_workspace_size: bytes is NULL");
    *bytes = plan->room.workspace_size;
    return FOLIO_OK;
}

folio_status folioi_plan_find(const folio_plan *plan, int32_t attention, folio_attention_type type)
{
    REQUIRE(plan != NULL, "plan is NULL");
    REQUIRE(plan->batch != NULL || plan->on_device,
            "the plan has no batch; call folio_plan_update first");
    REQUIRE(plan->on_device || plan->generation == plan->batch->generation,
            "the batch was changed after folio_plan_update; update the plan again");
    REQUIRE(attention >= 0 && attention < plan->shape.desc.num_attentions,
            "attention %d is outside the plan's list [0, %d)", attention,
            plan->shape.desc.num_attentions);
    REQUIRE((unsigned)type < FOLIO_NUM_ATTENTION_TYPES, "attention type %d is unknown", (int)type);
    REQUIRE(plan->shape.types[attention] & FOLIO_ATTENTION_BIT(type),
            "attention %d was not planned as type %s: set folio_plan_desc.types", attention,
            folio_attention_type_name(type));
    return FOLIO_OK;
}

folio_status folio_plan_get_info(const folio_plan *plan, int32_t attention,
                                 folio_attention_type type, folio_plan_info *info)
{
    folio_plan_info i = {.kernel = "", .fallback = ""};
    TRY(folioi_plan_find(plan, attention, type));
    plan->shape.ctx->backend->plan_describe(plan->room.state, attention, type, NULL, &i);
    return folioi_struct_out(info, &i, sizeof i, "folio_plan_info");
}
