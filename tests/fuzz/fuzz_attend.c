/*
 * fuzz_attend.c: folio_attend, mostly with a rotary embedding of any scaling: its bits are those of a plan's forward
 * over the same step.
 */
#include "fuzz/fuzz_step.h"

const char fuzz_name[] = "attend";

/* The same by a plan, into other memory; the bits are equal. */
static void compare_with_plan(fuzz_input *in, fuzz_step *s)
{
    folio_attention *attention = NULL;
    folio_plan *plan = NULL;
    uint32_t types = FOLIO_ATTENTION_BIT(s->type);
    const void *out = s->tensors.out.data;
    const float *lse = s->tensors.lse;
    fuzz_step_new_out(in, s);
    folio_plan_desc d = FOLIO_WITH(folio_plan_desc, .attentions = &attention, .types = &types,
                                   .num_attentions = 1, .cache = s->cache);
    bool ok = folio_attention_create(s->ctx, &s->attention, &attention) == FOLIO_OK &&
              folio_plan_create(s->ctx, &d, &plan) == FOLIO_OK &&
              folio_plan_update_step(plan, &s->step, NULL) == FOLIO_OK &&
              folio_attention_forward(plan, 0, s->type, s->cache, 0, &s->tensors, NULL) == FOLIO_OK;
    FUZZ_CHECK(ok, "attend takes what a plan refuses");
    FUZZ_CHECK(memcmp(out, s->tensors.out.data, s->out_bytes) == 0,
               "attend's out has other bits than a forward's");
    FUZZ_CHECK(lse == NULL || memcmp(lse, s->tensors.lse, s->lse_bytes) == 0,
               "attend's lse has other bits than a forward's");
    folio_plan_destroy(plan);
    folio_attention_destroy(attention);
}

/* Positions of the rows, which the batch would give otherwise. */
static void draw_positions(fuzz_input *in, fuzz_step *s)
{
    int64_t first = fuzz_int(in, 0, 127);
    int64_t *positions = fuzz_zeros(in, s->rows, sizeof *positions);
    for (int64_t i = 0; i < s->rows; i++) positions[i] = (i * 7 + first) % 128;
    fuzz_spoil64(in, positions, s->rows, 0, 127);
    s->tensors.positions = positions;
}

/* What is accepted lies in the table, where a row sees keys. */
static void check_positions(const fuzz_step *s)
{
    const int64_t *positions = s->tensors.positions;
    for (int64_t i = 0, row = 0; positions != NULL && i < s->num_seqs; row += s->query_len[i++])
        for (int64_t t = 0; s->seq_len[i] > 0 && t < s->query_len[i]; t++)
            FUZZ_CHECK(positions[row + t] >= 0 && positions[row + t] < 128,
                       "position %lld of row %lld is accepted", (long long)positions[row + t],
                       (long long)(row + t));
}

void fuzz_run(fuzz_input *in)
{
    fuzz_step s;
    if (fuzz_step_draw(in, &s)) {
        bool cross = s.type == FOLIO_ATTENTION_ENCODER_DECODER;
        if (!cross && !fuzz_chance(in, 3) && fuzz_step_draw_rotary(in, &s)) {
            s.tensors.rotary = s.rotary;
            if (s.type == FOLIO_ATTENTION_DECODER && fuzz_chance(in, 2)) draw_positions(in, &s);
        }
        folio_status status = folio_attend(s.ctx, &s.attention, s.type, &s.step, s.cache,
                                           (int32_t)fuzz_any(in, 0, 0), &s.tensors, NULL);
        if (!fuzz_took(status)) fuzz_step_check_untouched(&s);
        else check_positions(&s);
        if (status == FOLIO_OK && fuzz_is_valid(in)) {
            fuzz_step_check_written(&s);
            compare_with_plan(in, &s);
        }
    }
    fuzz_step_close(&s);
}
