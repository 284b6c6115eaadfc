/* plan.c: plans created for limits, then updated with a batch every step without allocating. */
#include "plan/plan.h"

#include "tensor.h"

#include <string.h>

#define KNOWN_FLAGS (FOLIO_PLAN_GRAPH | FOLIO_PLAN_NO_WORKSPACE)

static folio_status check_limits(const folio_plan_desc *d)
{
    REQUIRE(d->num_attentions >= 1 && d->attentions != NULL,
            "plan: the list of attentions is empty (num_attentions %d)", d->num_attentions);
    REQUIRE(d->block_size >= 0 && d->block_size <= 4096,
            "plan: block_size is %d, outside [0, 4096]", d->block_size);
    REQUIRE(d->num_blocks >= 0 && d->num_blocks <= INT32_MAX && d->cross_num_blocks >= 0 &&
                d->cross_num_blocks <= INT32_MAX,
            "plan: num_blocks %lld or cross_num_blocks %lld is outside [0, 2147483647]",
            (long long)d->num_blocks, (long long)d->cross_num_blocks);
    REQUIRE((d->block_size == 0) == (d->num_blocks == 0),
            "plan: block_size %d and num_blocks %lld; for runs without a cache both are 0",
            d->block_size, (long long)d->num_blocks);
    REQUIRE(d->max_seqs >= 1 && d->max_seqs <= INT32_MAX, "plan: max_seqs is %lld",
            (long long)d->max_seqs);
    REQUIRE(d->max_query_tokens >= 1 && d->max_query_tokens <= INT32_MAX,
            "plan: max_query_tokens is %lld, outside [1, 2147483647]",
            (long long)d->max_query_tokens);
    REQUIRE(d->max_seq_len >= 1 && d->max_seq_len <= INT32_MAX,
            "plan: max_seq_len is %lld, outside [1, 2147483647]", (long long)d->max_seq_len);
    REQUIRE(d->max_encoder_tokens >= 0 && d->max_encoder_tokens <= INT32_MAX,
            "plan: max_encoder_tokens is %lld, outside [0, 2147483647]",
            (long long)d->max_encoder_tokens);
    REQUIRE((d->flags & ~KNOWN_FLAGS) == 0, "plan: flags 0x%x has unknown bits", d->flags);
    return FOLIO_OK;
}

static folio_status check_attentions(const folio_context *ctx, const folio_plan_desc *d)
{
    for (int32_t i = 0; i < d->num_attentions; i++) {
        REQUIRE(d->attentions[i] != NULL, "plan: attentions[%d] is NULL", i);
        REQUIRE(d->attentions[i]->ctx == ctx, "plan: attentions[%d] is of another context", i);
        uint32_t types = d->types != NULL ? d->types[i] : FOLIO_TYPE_BIT(FOLIO_DECODER);
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
        plan->shape.attentions[i] = d->attentions[i];
        plan->shape.types[i] = d->types != NULL ? d->types[i] : FOLIO_TYPE_BIT(FOLIO_DECODER);
    }
    plan->shape.desc.attentions = NULL;
    plan->shape.desc.types = NULL;
    TRY(folioi_slotset_reserve(a, &plan->slots,
                               max_i64(d->max_query_tokens, d->max_encoder_tokens)));
    TRY(ctx->backend->plan_create(&plan->shape, &plan->state, &plan->workspace_size));
    plan->has_state = true;
    if (d->flags & FOLIO_PLAN_NO_WORKSPACE) return FOLIO_OK;
    if (ctx->backend->memory != NULL)
        return ctx->backend->memory->alloc(ctx, FOLIO_MEMORY_DEVICE, plan->workspace_size,
                                           "a plan's workspace", &plan->workspace);
    /* not zeroed: a worker's part comes from the memory node of the thread that first works in it */
    return folioi_alloc_untouched(a, (int64_t)plan->workspace_size, "a plan's workspace",
                                  &plan->workspace);
}

folio_status folio_plan_create(folio_context *ctx, const folio_plan_desc *desc, folio_plan **out)
{
    REQUIRE(out != NULL, "folio_plan_create: out is NULL");
    *out = NULL;
    REQUIRE(ctx != NULL, "folio_plan_create: ctx is NULL");
    folio_plan_desc d;
    STRUCT_IN(d, desc, "folio_plan_desc");
    TRY(check_limits(&d));
    TRY(check_attentions(ctx, &d));
    if (d.cross_num_blocks == 0) d.cross_num_blocks = d.num_blocks;
    void *memory;
    TRY(folioi_alloc(&ctx->allocator, sizeof(folio_plan), "a plan", &memory));
    folio_plan *plan = memory;
    plan->shape = (folioi_plan_shape){.ctx = ctx, .desc = d};
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
    if (ctx->backend->memory != NULL)
        ctx->backend->memory->free(ctx, FOLIO_MEMORY_DEVICE, plan->workspace);
    else folioi_free(&a, plan->workspace, (int64_t)plan->workspace_size);
    if (plan->has_state) ctx->backend->plan_destroy(&plan->shape, plan->state);
    folioi_slotset_free(&a, &plan->slots);
    folioi_free(&a, plan->shape.attentions, plan->shape_bytes);
    folioi_free(&a, plan, sizeof *plan);
}

static folioi_plan_facts find_facts(const folio_batch *batch, folio_attention_type type)
{
    folioi_plan_facts f = {0, 0, -1, -1, -1};
    for (int64_t i = batch->num_seqs - 1; i >= 0; i--) {
        folioi_rows r = folioi_batch_rows(batch, i, type);
        f.max_query_len = max_i64(f.max_query_len, r.query_len);
        f.max_key_len = max_i64(f.max_key_len, r.key_len);
        if (r.context_len > 0) f.with_context = i;
        if (r.key_len > 0 && r.blocks == NULL) f.without_table = i;
        if (r.context_len > 0 && r.blocks == NULL) f.context_without_table = i;
    }
    return f;
}

folio_status folio_plan_update(folio_plan *plan, folio_batch *batch)
{
    return folio_plan_update_on(plan, batch, NULL);
}

folio_status folio_plan_update_on(folio_plan *plan, folio_batch *batch, const folio_run *run)
{
    REQUIRE(plan != NULL, "folio_plan_update: plan is NULL");
    REQUIRE(batch != NULL, "folio_plan_update: batch is NULL");
    folio_run r;
    TRY(folioi_run_in(plan->shape.ctx, run, &r));
    TRY(folioi_plan_check(plan, batch));
    if (plan->batch != batch) {
        folioi_batch_retain(batch);
        folio_batch_destroy(plan->batch);
        plan->batch = batch;
    }
    plan->generation = batch->generation;
    uint32_t types = 0;
    for (int32_t i = 0; i < plan->shape.desc.num_attentions; i++) types |= plan->shape.types[i];
    for (int t = 0; t < FOLIO_NUM_ATTENTION_TYPES; t++)
        if (types & FOLIO_TYPE_BIT(t)) plan->facts[t] = find_facts(batch, (folio_attention_type)t);
    return plan->shape.ctx->backend->plan_update(plan->state, batch, r.stream);
}

folio_status folio_plan_workspace_size(const folio_plan *plan, size_t *bytes)
{
    REQUIRE(plan != NULL, "folio_plan_workspace_size: plan is NULL");
    REQUIRE(bytes != NULL, "folio_plan_workspace_size: bytes is NULL");
    *bytes = plan->workspace_size;
    return FOLIO_OK;
}

folio_status folioi_plan_find(const folio_plan *plan, int32_t attention, folio_attention_type type)
{
    REQUIRE(plan != NULL, "plan is NULL");
    REQUIRE(plan->batch != NULL, "the plan has no batch yet; call folio_plan_update first");
    REQUIRE(plan->generation == plan->batch->generation,
            "the batch was changed after folio_plan_update; update the plan again");
    REQUIRE(attention >= 0 && attention < plan->shape.desc.num_attentions,
            "attention %d is outside the plan's list [0, %d)", attention,
            plan->shape.desc.num_attentions);
    REQUIRE((unsigned)type < FOLIO_NUM_ATTENTION_TYPES, "attention type %d is unknown", (int)type);
    REQUIRE(plan->shape.types[attention] & FOLIO_TYPE_BIT(type),
            "attention %d was not planned as type %s", attention, folio_attention_type_name(type));
    return FOLIO_OK;
}

folio_status folio_plan_describe(const folio_plan *plan, int32_t attention,
                                 folio_attention_type type, folio_plan_info *info)
{
    folio_plan_info i = {.kernel = ""};
    TRY(folioi_plan_find(plan, attention, type));
    plan->shape.ctx->backend->plan_describe(plan->state, attention, type, &i);
    return folioi_struct_out(info, &i, sizeof i, "info");
}
