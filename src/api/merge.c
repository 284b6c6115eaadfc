/* merge.c: checks a merge of attention over parts of the keys, then calls the backend. */
#include "core/context.h"
#include "core/tensor.h"

#include <stdio.h>

#define MAX_ROWS ((int64_t)1 << 32) /* of all heads: a device's grid counts them in 32 bits */

/* A resolved part against what is written. out may be its out, lse its lse. */
static folio_status check_part_apart(const folio_merge *m, const folio_state *p, int64_t i)
{
    int64_t heads = m->num_heads, tokens = m->out.tokens;
    folioi_span out = folioi_tensor_span(&m->out, heads, m->head_size);
    folioi_span lse =
        folioi_lse_span(m->lse, m->lse_token_stride, m->lse_head_stride, heads, tokens);
    folioi_span part = folioi_tensor_span(&p->out, heads, m->head_size);
    folioi_span part_lse =
        folioi_lse_span(p->lse, p->lse_token_stride, p->lse_head_stride, heads, tokens);
    bool own_lse = m->lse == p->lse && m->lse_token_stride == p->lse_token_stride &&
                   m->lse_head_stride == p->lse_head_stride;
    REQUIRE(folioi_tensors_same(&m->out, &p->out) || !folioi_spans_share(&out, &part),
            "merge: out and parts[%lld].out share memory, but are not the same tensor",
            (long long)i);
    REQUIRE(own_lse || !folioi_spans_share(&lse, &part_lse),
            "merge: lse and parts[%lld].lse share memory, but are not the same array",
            (long long)i);
    REQUIRE(!folioi_spans_share(&out, &part_lse), "merge: out and parts[%lld].lse share memory",
            (long long)i);
    REQUIRE(!folioi_spans_share(&lse, &part), "merge: lse and parts[%lld].out share memory",
            (long long)i);
    REQUIRE(!folioi_spans_share(&out, &lse), "merge: out and lse share memory");
    return FOLIO_OK;
}

static folio_status check_merge(folio_merge *m)
{
    REQUIRE(m->num_heads >= 1 && m->head_size >= 1,
            "merge: num_heads is %d and head_size %d; both must be at least 1", m->num_heads,
            m->head_size);
    REQUIRE(m->num_parts >= 1, "merge: num_parts is %lld; it must be at least 1",
            (long long)m->num_parts);
    REQUIRE(m->parts != NULL, "merge: parts is NULL, but num_parts is %lld",
            (long long)m->num_parts);
    REQUIRE(m->out.dtype != 0, "merge: out has no dtype");
    TRY(folioi_tensor_resolve(&m->out, "merge: out", 0, m->num_heads, m->head_size, m->out.tokens));
    REQUIRE(m->out.tokens <= MAX_ROWS / m->num_heads,
            "merge: out has %lld tokens of %d heads, more than %lld rows", (long long)m->out.tokens,
            m->num_heads, (long long)MAX_ROWS);
    TRY(folioi_lse_resolve(m->lse, &m->lse_token_stride, &m->lse_head_stride, m->num_heads,
                           m->out.tokens));
    for (int64_t i = 0; i < m->num_parts; i++) {
        folio_state p = m->parts[i];
        char name[48];
        snprintf(name, sizeof name, "merge: parts[%lld].out", (long long)i);
        TRY(folioi_tensor_resolve(&p.out, name, 0, m->num_heads, m->head_size, m->out.tokens));
        REQUIRE(p.lse != NULL || m->out.tokens == 0, "merge: parts[%lld].lse is NULL",
                (long long)i);
        TRY(folioi_lse_resolve(p.lse, &p.lse_token_stride, &p.lse_head_stride, m->num_heads,
                               m->out.tokens));
        TRY(check_part_apart(m, &p, i));
    }
    return FOLIO_OK;
}

folio_status folio_state_merge(folio_context *ctx, const folio_merge *merge, const folio_run *run)
{
    REQUIRE(ctx != NULL, "folio_state_merge: ctx is NULL");
    folio_merge m;
    folio_run r;
    STRUCT_IN(m, merge, "folio_merge");
    TRY(folioi_run_in(ctx, run, &r));
    TRY(check_merge(&m));
    return ctx->backend->merge(ctx, &m, r.stream);
}
