/*
 * fuzz_forward.c: plans and forwards: limits of all kinds, a step or two, options of any combination. What
 * folio_attention_check says is what folio_attention_forward does; a forward writes all rows, or nothing.
 */
#include "fuzz/fuzz_step.h"

const char fuzz_name[] = "forward";

static folio_plan_desc draw_plan(fuzz_input *in, const fuzz_step *s,
                                 folio_attention *const *attention, const uint32_t *types)
{
    folio_plan_desc d = FOLIO_WITH(folio_plan_desc, .attentions = attention, .types = types,
                                   .num_attentions = 1, .cache = s->cache);
    if (fuzz_chance(in, 3)) return d; /* grows */
    int64_t more = fuzz_int(in, 0, 4);
    d.max_seqs = fuzz_any(in, s->num_seqs + more, s->num_seqs + more);
    d.max_query_tokens = fuzz_any(in, s->step.num_query_tokens + 1, s->step.num_query_tokens + 1);
    d.max_seq_len = fuzz_any(in, s->max_seq_len + 1, s->max_seq_len + 1);
    d.max_encoder_tokens = fuzz_any(in, 60, 60);
    if (d.max_seqs > 4096 || d.max_query_tokens > 4096 || d.max_seq_len > 4096 ||
        d.max_encoder_tokens > 4096)
        d.max_seqs = -1; /* minutes of work lists */
    if (fuzz_chance(in, 5)) d.max_query_len = fuzz_any(in, 8, 8);
    d.flags = (uint32_t)fuzz_any(in, 0, 0);
    if (fuzz_chance(in, 3)) d.flags |= FOLIO_PLAN_NO_WORKSPACE;
    if (fuzz_chance(in, 4)) d.flags |= FOLIO_PLAN_BATCH_INVARIANT;
    if (fuzz_chance(in, 4)) d.flags |= FOLIO_PLAN_PRIVATE_SLOTS;
    return d;
}

static void forward(fuzz_input *in, fuzz_step *s, const folio_plan *plan, bool needs_workspace)
{
    folio_run run = FOLIO_INIT(folio_run);
    folio_plan_info info = FOLIO_INIT(folio_plan_info);
    size_t bytes = 0;
    FUZZ_CHECK(folio_plan_get_workspace_size(plan, &bytes) == FOLIO_OK && bytes < 1 << 26,
               "a workspace of %zu bytes", bytes);
    if (needs_workspace || fuzz_chance(in, 4)) {
        run.workspace_size = (size_t)fuzz_any(in, (int64_t)bytes, (int64_t)bytes);
        if (run.workspace_size > bytes) run.workspace_size = bytes;
        run.workspace = fuzz_poison(in, (int64_t)run.workspace_size, 1);
    }
    int32_t attention = (int32_t)fuzz_any(in, 0, 0), layer = (int32_t)fuzz_any(in, 0, 0);
    folio_attention_type type =
        (folio_attention_type)fuzz_any(in, (int64_t)s->type, (int64_t)s->type);
    folio_status check =
        folio_attention_check(plan, attention, type, s->cache, layer, &s->tensors, &run, &info);
    folio_status status =
        folio_attention_forward(plan, attention, type, s->cache, layer, &s->tensors, &run);
    FUZZ_CHECK(check == status, "check says %s, forward %s", folio_status_name(check),
               folio_status_name(status));
    if (!fuzz_took(status)) fuzz_step_check_untouched(s);
    else if (fuzz_is_valid(in)) fuzz_step_check_written(s);
}

static folio_status update(fuzz_input *in, const fuzz_step *s, folio_plan *plan,
                           folio_batch **batch)
{
    if (fuzz_chance(in, 2)) return folio_plan_update_step(plan, &s->step, NULL);
    folio_batch_desc d = FOLIO_WITH(folio_batch_desc, .block_size = (int32_t)s->block_size);
    FUZZ_CHECK(folio_batch_create(s->ctx, &d, batch) == FOLIO_OK, "no batch");
    folio_status status = folio_batch_set(*batch, &s->step);
    return status == FOLIO_OK ? folio_plan_update(plan, *batch, NULL) : status;
}

void fuzz_run(fuzz_input *in)
{
    fuzz_step s;
    folio_attention *attention = NULL;
    folio_plan *plan = NULL;
    folio_batch *batch = NULL;
    if (fuzz_step_draw(in, &s) &&
        fuzz_took(folio_attention_create(s.ctx, &s.attention, &attention))) {
        uint32_t types =
            (uint32_t)fuzz_any(in, FOLIO_ATTENTION_BIT(s.type), FOLIO_ATTENTION_BIT(s.type));
        folio_plan_desc d = draw_plan(in, &s, &attention, &types);
        if (fuzz_took(folio_plan_create(s.ctx, &d, &plan)) &&
            fuzz_took(update(in, &s, plan, &batch)))
            forward(in, &s, plan, d.flags & FOLIO_PLAN_NO_WORKSPACE);
    }
    folio_plan_destroy(plan);
    folio_batch_destroy(batch);
    folio_attention_destroy(attention);
    fuzz_step_close(&s);
}
