/*
 * replay_verify.c: some (token, head) rows of a replay again, by the reference backend. Their K and V
 * are made anew from the tokens' identities, in a cache of the verifier's own: a block that was shared,
 * moved or evicted wrongly shows, not only wrong arithmetic.
 */
#include "base/term.h"
#include "replay/replay_model.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 16, FILL = 512, ROWS = 64 }; /* tokens written, rows computed by one call */

typedef struct row {
    int64_t position, head, at; /* at: its row in the step */
} row;

struct replay_verifier {
    kit_layer l;     /* one head of the model */
    int32_t *table;  /* 0, 1, 2, ... */
    void *k, *v, *q; /* [FILL], [FILL], [ROWS] rows of one head */
    double *out;
    uint64_t threshold; /* of a row's hash */
    row rows[ROWS];
    int64_t num_rows;
    bool told;
};

static bool is_chosen(const replay_verifier *v, const replay_model *m, const replay_request *r,
                      int64_t position, int32_t layer, int64_t head)
{
    uint64_t place = replay_query(r, position) ^ kit_mix((uint64_t)layer << 32 | (uint64_t)head);
    return kit_mix(m->o->seed ^ kit_mix(place)) <= v->threshold;
}

/* K and V of one head for tokens [from, end), each in the slot of its position. */
static bool fill(replay_verifier *v, const replay_model *m, const replay_request *r, int32_t layer,
                 int64_t kv_head, int64_t from, int64_t end)
{
    int64_t slots[FILL];
    size_t bytes = (size_t)m->o->head_size * folio_dtype_size(m->o->dtype);
    for (int64_t n; from < end; from += n) {
        n = end - from < FILL ? end - from : FILL;
        for (int64_t i = 0; i < n; i++) {
            uint64_t token = replay_token(m->trace, r, from + i);
            slots[i] = from + i;
            replay_numbers_row(&m->numbers, REPLAY_K, layer, token, kv_head, 1,
                               (char *)v->k + (size_t)i * bytes);
            replay_numbers_row(&m->numbers, REPLAY_V, layer, token, kv_head, 1,
                               (char *)v->v + (size_t)i * bytes);
        }
        folio_kv_write write =
            FOLIO_WITH(folio_kv_write, .k = {.data = v->k, .dtype = m->o->dtype, .tokens = n},
                       .v = {.data = v->v, .dtype = m->o->dtype, .tokens = n}, .slots = slots);
        REPLAY_TRY(folio_kv_cache_write(v->l.cache, 0, &write, NULL));
    }
    return true;
}

/*
 * How far a row may be from the reference: a rounding of out, and 64 of the arithmetic at the size of
 * V, which is 1 (f32; with 16-bit q, where weights are rounded too, four of out).
 */
static double tolerance(folio_dtype dtype, double largest)
{
    double step = kit_ulp(dtype, largest);
    return dtype == FOLIO_F32 ? step + 64 * 0x1p-24 : 4 * step + 64 * 0x1p-24;
}

static void compare(replay_verifier *v, const replay_model *m, const replay_request *r,
                    int32_t layer, const row *w, const double *want, const void *out)
{
    int64_t size = m->o->head_size, first = (w->at * m->o->heads + w->head) * size, worst = 0;
    double largest = 0, error = 0;
    bool odd = false; /* a NaN here or there */
    for (int64_t i = 0; i < size; i++) {
        double apart = fabs(kit_load(m->o->dtype, out, first + i) - want[i]);
        largest = fmax(largest, fabs(want[i]));
        if (!(apart <= error) && !odd) error = apart, worst = i, odd = isnan(apart);
    }
    m->stats->verified_rows++;
    if (!odd && error <= tolerance(m->o->dtype, largest)) return;
    m->stats->mismatched_rows++;
    if (v->told) return;
    v->told = true;
    term_progress_end();
    fprintf(
        stderr,
        "folio replay: request %lld, position %lld, layer %d, head %lld: out[%lld] is %.9g, the "
        "reference has %.9g\n",
        (long long)r->index, (long long)w->position, (int)layer, (long long)w->head,
        (long long)worst, kit_load(m->o->dtype, out, first + worst), want[worst]);
}

/* The rows collected, all of one request and one kv head. */
static bool check_rows(replay_verifier *v, const replay_model *m, const replay_request *r,
                       int32_t layer, int64_t kv_head, const void *out)
{
    const replay_options *o = m->o;
    size_t bytes = (size_t)o->head_size * folio_dtype_size(o->dtype);
    int64_t first = INT64_MAX, last = 0, n = v->num_rows;
    v->num_rows = 0;
    if (n == 0) return true;
    folio_batch_clear(v->l.batch);
    for (int64_t i = 0; i < n; i++) {
        int64_t p = v->rows[i].position;
        first = p < first ? p : first;
        last = p > last ? p : last;
        replay_numbers_row(&m->numbers, REPLAY_Q, layer, replay_query(r, p), v->rows[i].head, 1,
                           (char *)v->q + (size_t)i * bytes);
        folio_batch_seq seq =
            FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = p + 1, .block_table = v->table,
                       .num_blocks = p / BLOCK + 1, .slots = (const int64_t[]){-1});
        REPLAY_TRY(folio_batch_add(v->l.batch, &seq));
    }
    first = o->window > 0 && first >= o->window ? first - o->window + 1 : 0;
    if (!fill(v, m, r, layer, kv_head, first, last + 1)) return false;
    REPLAY_TRY(folio_plan_update(v->l.plan, v->l.batch, NULL));
    folio_tensors t = FOLIO_WITH(folio_tensors, .q = {.data = v->q, .dtype = o->dtype, .tokens = n},
                                 .out = {.data = v->out, .dtype = FOLIO_F64, .tokens = n});
    REPLAY_TRY(
        folio_attention_forward(v->l.plan, 0, FOLIO_ATTENTION_DECODER, v->l.cache, 0, &t, NULL));
    for (int64_t i = 0; i < n; i++)
        compare(v, m, r, layer, &v->rows[i], v->out + i * o->head_size, out);
    return true;
}

bool replay_verifier_check(replay_verifier *v, const replay_model *m, const replay_item *items,
                           int64_t num_items, int32_t layer, const void *out)
{
    int64_t heads_per_kv = m->o->heads / m->o->kv_heads, at = 0;
    for (int64_t i = 0; i < num_items; at += items[i].count, i++)
        for (int64_t kv_head = 0; kv_head < m->o->kv_heads; kv_head++) {
            const replay_item *it = &items[i];
            for (int64_t k = 0; k < it->count * heads_per_kv; k++) {
                int64_t position = it->first + k / heads_per_kv,
                        head = kv_head * heads_per_kv + k % heads_per_kv;
                if (!is_chosen(v, m, it->request, position, layer, head)) continue;
                v->rows[v->num_rows++] = (row){position, head, at + k / heads_per_kv};
                if (v->num_rows == ROWS && !check_rows(v, m, it->request, layer, kv_head, out))
                    return false;
            }
            if (!check_rows(v, m, it->request, layer, kv_head, out)) return false;
        }
    return true;
}

/* ---- Opening and closing */

static bool open_layer(replay_verifier *v, const replay_model *m)
{
    const replay_options *o = m->o;
    int64_t blocks = m->trace->longest / BLOCK + 1;
    folio_context_desc context =
        FOLIO_WITH(folio_context_desc, .backend = "reference", .num_threads = o->threads);
    REPLAY_TRY(folio_context_create(&context, &v->l.ctx));
    REPLAY_TRY(KIT_LAYER_OPEN(v->l.ctx, &v->l, .num_heads = 1, .k_head_size = o->head_size,
                              .dtype = o->dtype, .kv_dtype = o->kv_dtype, .window = o->window,
                              .num_blocks = blocks, .block_size = BLOCK, .max_seqs = ROWS,
                              .max_query_tokens = ROWS, .max_seq_len = m->trace->longest));
    v->table = replay_alloc(blocks, sizeof *v->table);
    for (int64_t i = 0; i < blocks; i++) v->table[i] = (int32_t)i;
    return true;
}

replay_verifier *replay_verifier_open(const replay_model *m)
{
    replay_verifier *v = replay_alloc(1, sizeof *v);
    double share = m->o->verify / 100;
    v->threshold = share >= 1 ? UINT64_MAX : (uint64_t)(share * 0x1p64);
    v->k = replay_alloc(FILL * m->o->head_size, sizeof(float));
    v->v = replay_alloc(FILL * m->o->head_size, sizeof(float));
    v->q = replay_alloc(ROWS * m->o->head_size, sizeof(float));
    v->out = replay_alloc(ROWS * m->o->head_size, sizeof *v->out);
    if (open_layer(v, m)) return v;
    replay_verifier_close(v);
    return NULL;
}

void replay_verifier_close(replay_verifier *v)
{
    if (v == NULL) return;
    kit_layer_close(&v->l);
    folio_context_destroy(v->l.ctx);
    free(v->table);
    free(v->k);
    free(v->v);
    free(v->q);
    free(v->out);
    free(v);
}
