/*
 * bad_write.c: FOLIO_PLAN_NOTE_BAD on host backends. After a forward its threads look at the rows that it wrote, which
 * caches still hold. The least key is the first bad one, whoever finds it.
 */
#include "core/executor.h"
#include "plan/bad_key.h"
#include "plan/plan.h"

#include <float.h>
#include <math.h>
#include <sched.h>

#define SEARCH_BYTES ((int64_t)262144) /* less is not worth a worker's while */

/* ---- rows */

/*
 * Has one of numbers [at, at + n) this magnitude or more, or is NaN? Bits are compared: those of NaN are the largest. The
 * sign of a difference, and no bool, so that the loops become vectors.
 */
static bool reaches(const void *data, folio_dtype dtype, int64_t at, int32_t n, double limit)
{
    if (dtype == FOLIO_F32) {
        const uint32_t *x = (const uint32_t *)data + at;
        uint32_t most = bits_of_f32((float)limit) - 1, signs = 0;
        for (int32_t i = 0; i < n; i++) signs |= most - (x[i] & 0x7fffffff);
        return signs >> 31 != 0;
    }
    if (dtype == FOLIO_F64) {
        const double *x = (const double *)data + at;
        bool any = false;
        for (int32_t i = 0; i < n; i++) any |= !(fabs(x[i]) < limit);
        return any;
    }
    const uint16_t *x = (const uint16_t *)data + at;
    bool bf16 = dtype == FOLIO_BF16;
    uint16_t most = bf16 ? f32_to_bf16((float)limit) : f32_to_f16((float)limit), signs = 0;
    most--;
    for (int32_t i = 0; i < n; i++) signs |= (uint16_t)(most - (x[i] & 0x7fff));
    return signs >> 15 != 0;
}

/* What rounds to infinity in a dtype. */
static double limit_of(folio_dtype dtype)
{
    if (dtype == FOLIO_F16) return 65520.0;
    return dtype == FOLIO_BF16 ? 0x1.ffp127 : INFINITY;
}

/* One of K, V and out, as a forward has it. */
typedef struct {
    const folio_tensor *t;
    int32_t heads, dims;
    double limit;
    const folioi_rotation *rotation; /* NULL: it stays */
} written;

/* May a row reach the limit when it is rotated? With cosines and sines below 2 a number grows to less than four times the largest. */
static bool may_grow(const written *w, int64_t at, int64_t position)
{
    const folioi_rotation *r = w->rotation;
    double near = fmin(fmin(w->limit, limit_of(w->t->dtype)), (double)FLT_MAX) / 4.1;
    return reaches(w->t->data, w->t->dtype, at, w->dims, near) ||
           reaches(r->table, FOLIO_F32, position * r->num_dims, r->num_dims, 2.0);
}

static bool is_bad(const written *w, int64_t at, int64_t position)
{
    if (reaches(w->t->data, w->t->dtype, at, w->dims, w->limit)) return true;
    if (w->rotation == NULL || !may_grow(w, at, position)) return false;
    float rotated[FOLIOI_MAX_HEAD_SIZE];
    const char *from = (const char *)w->t->data + at * (int64_t)folio_dtype_size(w->t->dtype);
    folioi_rotate_row(rotated, from, w->t->dtype, w->dims, w->rotation, position);
    return reaches(rotated, w->t->dtype, 0, w->dims, w->limit);
}

/* ---- a forward */

typedef struct {
    const folioi_call *call;
    written of[FOLIO_WRITTEN_OUT + 1];
    int64_t workers;
    atomic_ullong first; /* a key */
} search;

static uint64_t key_of(const folioi_call *call, int what, int64_t row, int32_t head)
{
    return bad_key(call->layer_index, call->attention_index, call->shape->desc.num_attentions,
                   (int)call->type, what, row, head);
}

static search search_of(const folioi_call *call)
{
    const folio_attention_desc *a = call->attention;
    const folio_tensors *t = &call->tensors;
    double limit = call->stores ? limit_of(call->layer.format->desc.dtype) : (double)INFINITY;
    search s = {.call = call,
                .of = {{&t->k, a->num_kv_heads, a->k_head_size, limit,
                        call->rotation.table != NULL ? &call->rotation : NULL},
                       {&t->v, a->num_kv_heads, a->v_in_k ? 0 : a->v_head_size, limit, NULL},
                       {&t->out, a->num_heads, a->v_head_size, INFINITY, NULL}}};
    int64_t bytes = 0;
    for (int what = 0; what <= FOLIO_WRITTEN_OUT; what++) {
        const written *w = &s.of[what];
        bytes += w->t->tokens * w->heads * w->dims * (int64_t)folio_dtype_size(w->t->dtype);
    }
    s.workers = min_i64(1 + bytes / SEARCH_BYTES, call->shape->ctx->num_threads);
    atomic_init(&s.first, FOLIOI_BAD_NONE);
    return s;
}

/* The first head of row i of a sequence that is bad; -1: none. */
static int32_t bad_head(const search *s, int what, const folioi_rows *rows, int64_t i)
{
    const written *w = &s->of[what];
    const folioi_call *call = s->call;
    bool is_out = what == FOLIO_WRITTEN_OUT;
    int64_t row = (is_out ? rows->query_row : rows->new_row) + i;
    if (!is_out && call->stores && call->slots[row] < 0) return -1;
    int64_t position = w->rotation != NULL ? call_position(call, rows, i) : 0;
    for (int32_t h = 0; h < w->heads; h++)
        if (is_bad(w, row * w->t->token_stride + h * w->t->head_stride, position)) return h;
    return -1;
}

/* The first bad write of rows [begin, end) of K, V or out. */
static uint64_t search_rows(const search *s, int what, int64_t begin, int64_t end)
{
    const folio_batch *batch = s->call->batch;
    for (int64_t seq = 0; seq < batch->num_seqs; seq++) {
        folioi_rows r = folioi_batch_rows(batch, seq, s->call->type);
        bool is_out = what == FOLIO_WRITTEN_OUT;
        int64_t first = is_out ? r.query_row : r.new_row, len = is_out ? r.query_len : r.new_len;
        if (first >= end) break;
        if (r.key_len == 0) continue; /* padding */
        for (int64_t i = max_i64(begin - first, 0); i < min_i64(end - first, len); i++) {
            int32_t head = bad_head(s, what, &r, i);
            if (head >= 0) return key_of(s->call, what, first + i, head);
        }
    }
    return FOLIOI_BAD_NONE;
}

static void search_worker(void *arg, int64_t worker)
{
    search *s = arg;
    for (int what = 0; what <= FOLIO_WRITTEN_OUT; what++) {
        const written *w = &s->of[what];
        int64_t rows = w->dims > 0 ? w->t->tokens : 0;
        uint64_t key =
            search_rows(s, what, rows * worker / s->workers, rows * (worker + 1) / s->workers);
        if (key == FOLIOI_BAD_NONE) continue;
        unsigned long long first = atomic_load(&s->first);
        while (key < first && !atomic_compare_exchange_weak(&s->first, &first, key)) {
        }
        return; /* what follows has larger keys */
    }
}

/* ---- the plan's note */

/* A thread holds it for a few instructions. */
static folioi_bad_note *open_note(const folio_plan *plan)
{
    folioi_bad_note *note = (folioi_bad_note *)&plan->bad;
    while (atomic_exchange(&note->is_busy, true)) sched_yield();
    return note;
}

static folio_plan_bad_write describe(const folio_plan *plan, const folioi_call *call, uint64_t key)
{
    int what = bad_key_what(key);
    folio_plan_bad_write bad = {.found = 1,
                                .layer = call->layer_index,
                                .attention = call->attention_index,
                                .type = call->type,
                                .what = (folio_written)what,
                                .head = bad_key_head(key),
                                .step = plan->bad.step};
    for (;; bad.seq++) {
        folioi_rows r = folioi_batch_rows(call->batch, bad.seq, call->type);
        bool is_out = what == FOLIO_WRITTEN_OUT;
        int64_t i = bad_key_row(key) - (is_out ? r.query_row : r.new_row);
        if (i >= (is_out ? r.query_len : r.new_len)) continue;
        bad.position = bad_position(call->type == FOLIO_ATTENTION_DECODER, what, r.query_len,
                                    r.key_len, r.context_len, i);
        return bad;
    }
}

void folioi_plan_note_bad(const folio_plan *plan, const folioi_call *call)
{
    if (plan->shape.ctx->backend->on_device) return; /* its kernels do it */
    search s = search_of(call);
    folioi_parallel(plan->shape.ctx, s.workers, search_worker, &s);
    uint64_t key = atomic_load(&s.first);
    if (key == FOLIOI_BAD_NONE) return;
    folioi_bad_note *note = open_note(plan);
    bool is_older = note->first.found && note->first.step < note->step;
    if (key < note->key && !is_older) {
        note->key = key;
        note->first = describe(plan, call, key);
        note->was_asked = false;
    }
    atomic_store(&note->is_busy, false);
}

void folioi_plan_begin_notes(folio_plan *plan)
{
    folioi_bad_note *note = &plan->bad;
    if (note->was_asked || !note->first.found) {
        note->key = FOLIOI_BAD_NONE;
        note->first = (folio_plan_bad_write){.found = 0};
    }
    note->step++;
    /* nobody is in it now, but a thread may seem to be that stayed behind when the process forked */
    atomic_store(&note->is_busy, false);
}

folio_status folio_plan_get_bad_write(folio_plan *plan, folio_plan_bad_write *out)
{
    REQUIRE(plan != NULL, "folio_plan_get_bad_write: plan is NULL");
    REQUIRE(plan->shape.desc.flags & FOLIO_PLAN_NOTE_BAD,
            "folio_plan_get_bad_write: the plan was created without FOLIO_PLAN_NOTE_BAD");
    const folioi_backend *b = plan->shape.ctx->backend;
    folio_plan_bad_write found = {.found = 0};
    if (b->on_device) {
        b->plan_bad_write(plan->room.state, &found);
    } else if (!atomic_exchange(&plan->bad.is_busy, true)) { /* else one is being noted: not yet */
        found = plan->bad.first;
        plan->bad.was_asked = found.found != 0;
        atomic_store(&plan->bad.is_busy, false);
    }
    return folioi_struct_out(out, &found, sizeof found, "folio_plan_bad_write");
}
