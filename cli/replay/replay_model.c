/* replay_model.c: one step through all layers; see replay_model.h. */
#define _POSIX_C_SOURCE 200809L /* fileno */
#include "replay/replay_model.h"

#include "base/term.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

bool replay_ok(folio_status status, const char *call)
{
    if (status == FOLIO_OK) return true;
    term_progress_end();
    fprintf(stderr, "folio replay: %.*s: %s: %s\n", (int)strcspn(call, "("), call,
            folio_status_text(status), folio_last_error());
    return false;
}

/* ---- Steps */

/* q, k and v of all the step's rows in one layer. */
static void make_rows(replay_model *m, const replay_item *items, int64_t num_items, int32_t layer)
{
    const replay_options *o = m->o;
    size_t size = folio_dtype_size(o->dtype);
    size_t q_row = (size_t)(o->heads * o->head_size) * size;
    size_t kv_row = (size_t)(o->kv_heads * o->head_size) * size, row = 0;
    for (int64_t i = 0; i < num_items; i++) {
        const replay_request *r = items[i].request;
        for (int64_t p = items[i].first; p < items[i].first + items[i].count; p++, row++) {
            uint64_t token = replay_token(m->trace, r, p);
            replay_numbers_row(&m->numbers, REPLAY_Q, layer, replay_query(r, p), 0, o->heads,
                               (char *)m->host[0] + row * q_row);
            replay_numbers_row(&m->numbers, REPLAY_K, layer, token, 0, o->kv_heads,
                               (char *)m->host[1] + row * kv_row);
            replay_numbers_row(&m->numbers, REPLAY_V, layer, token, 0, o->kv_heads,
                               (char *)m->host[2] + row * kv_row);
        }
    }
}

static int64_t rows_of(const replay_item *items, int64_t num_items)
{
    int64_t rows = 0;
    for (int64_t i = 0; i < num_items; i++) rows += items[i].count;
    return rows;
}

static size_t row_bytes(const replay_model *m, int i)
{
    int32_t heads = i == 0 || i == 3 ? m->o->heads : m->o->kv_heads;
    return (size_t)heads * (size_t)m->o->head_size * folio_dtype_size(m->o->dtype);
}

static bool rows_failed(const replay_model *m)
{
    int why = errno;
    term_progress_end();
    fprintf(stderr, "folio replay: %s cannot be written: %s\n", m->o->rows, strerror(why));
    return false;
}

/* A line per row: request, position, layer, a hash of out's bits. */
static bool write_rows(replay_model *m, const replay_item *items, int64_t num_items, int32_t layer)
{
    size_t bytes = row_bytes(m, 3);
    const char *row = m->host[3];
    for (int64_t i = 0; i < num_items; i++)
        for (int64_t k = 0; k < items[i].count; k++, row += bytes) {
            uint64_t hash = 0, word;
            for (size_t b = 0; b < bytes; b += sizeof word) {
                memcpy(&word, row + b, sizeof word);
                hash = kit_mix(hash ^ word);
            }
            if (fprintf(m->rows, "%lld %lld %d %016llx\n", (long long)items[i].request->index,
                        (long long)(items[i].first + k), (int)layer, (unsigned long long)hash) < 0)
                return rows_failed(m);
        }
    return true;
}

static bool forward(replay_model *m, int64_t rows, int32_t layer)
{
    folio_tensors t =
        FOLIO_WITH(folio_tensors, .q = {.data = m->near[0], .dtype = m->o->dtype, .tokens = rows},
                   .k = {.data = m->near[1], .dtype = m->o->dtype, .tokens = rows},
                   .v = {.data = m->near[2], .dtype = m->o->dtype, .tokens = rows},
                   .out = {.data = m->near[3], .dtype = m->o->dtype, .tokens = rows});
    REPLAY_TRY(folio_attention_forward(m->l.plan, 0, FOLIO_ATTENTION_DECODER, m->l.cache, layer, &t,
                                       NULL));
    REPLAY_TRY(folio_run_wait(m->l.ctx, NULL));
    return true;
}

/* On a device, tensors go there and out comes back. */
static bool carry(replay_model *m, int first, int last, int64_t rows, bool back)
{
    if (!m->device) return true;
    for (int i = first; i <= last; i++)
        REPLAY_TRY(folio_memory_copy(m->l.ctx, back ? m->host[i] : m->near[i],
                                     back ? m->near[i] : m->host[i], (size_t)rows * row_bytes(m, i),
                                     NULL));
    REPLAY_TRY(folio_run_wait(m->l.ctx, NULL));
    return true;
}

static bool run_layer(replay_model *m, const replay_item *items, int64_t num_items, int32_t layer)
{
    replay_stats *s = m->stats;
    int64_t rows = rows_of(items, num_items);
    double start = term_seconds(), now;
    make_rows(m, items, num_items, layer);
    if (!carry(m, 0, 2, rows, false)) return false;
    now = term_seconds();
    s->numbers_seconds += now - start;
    start = now;
    if (!forward(m, rows, layer)) return false;
    now = term_seconds();
    s->attention_seconds += now - start;
    start = now;
    if (m->verifier == NULL && m->rows == NULL) return true;
    bool ok = carry(m, 3, 3, rows, true);
    if (ok && m->rows) ok = write_rows(m, items, num_items, layer);
    if (ok && m->verifier)
        ok = replay_verifier_check(m->verifier, m, items, num_items, layer, m->host[3]);
    s->verify_seconds += term_seconds() - start;
    return ok;
}

bool replay_model_step(replay_model *m, const replay_item *items, int64_t num_items)
{
    for (int64_t i = 0; i < num_items; i++) m->list[i] = items[i].sequence;
    folio_batch_clear(m->l.batch);
    REPLAY_TRY(folio_batch_add_sequences(m->l.batch, 0, m->list, num_items, NULL));
    REPLAY_TRY(folio_plan_update(m->l.plan, m->l.batch, NULL));
    for (int32_t layer = 0; layer < m->o->layers; layer++)
        if (!run_layer(m, items, num_items, layer)) return false;
    return true;
}

/* ---- Opening and closing */

static bool open_layers(replay_model *m)
{
    const replay_options *o = m->o;
    REPLAY_TRY(KIT_LAYER_OPEN(
        m->l.ctx, &m->l, .num_heads = o->heads, .num_kv_heads = o->kv_heads,
        .k_head_size = o->head_size, .dtype = o->dtype, .kv_dtype = o->kv_dtype,
        .window = o->window, .num_blocks = o->num_blocks, .num_layers = o->layers,
        .block_size = o->block_size, .max_seqs = o->max_seqs, .max_query_tokens = o->budget,
        .max_seq_len = m->trace->longest, .flags = m->rows ? FOLIO_PLAN_BATCH_INVARIANT : 0));
    return true;
}

static bool open_tensors(replay_model *m)
{
    for (int i = 0; i < 4; i++) {
        m->bytes[i] = (size_t)m->o->budget * row_bytes(m, i);
        REPLAY_TRY(folio_memory_create(m->l.ctx, FOLIO_MEMORY_HOST, m->bytes[i], &m->host[i]));
        m->near[i] = m->host[i];
        if (!m->device) continue;
        m->near[i] = NULL;
        REPLAY_TRY(folio_memory_create(m->l.ctx, FOLIO_MEMORY_DEVICE, m->bytes[i], &m->near[i]));
    }
    return true;
}

bool replay_note_place(replay_place *to, const folio_context *ctx)
{
    folio_context_info info = {.struct_size = sizeof info};
    REPLAY_TRY(folio_context_get_info(ctx, &info));
    snprintf(to->device, sizeof to->device, "%s", info.device);
    snprintf(to->backend, sizeof to->backend, "%s", info.backend);
    snprintf(to->level, sizeof to->level, "%s", info.level);
    to->threads = info.num_threads;
    return true;
}

bool replay_model_open(replay_model *m, const replay_options *o, const replay_trace *t,
                       replay_stats *stats)
{
    *m = (replay_model){.o = o, .trace = t, .stats = stats};
    replay_numbers_init(&m->numbers, o->seed, o->dtype, o->head_size);
    m->list = replay_alloc(o->max_seqs, sizeof *m->list);
    if (o->rows && (m->rows = fopen(o->rows, "w")) == NULL) return rows_failed(m);
    folio_context_desc desc =
        FOLIO_WITH(folio_context_desc, .backend = o->backend, .num_threads = o->threads);
    REPLAY_TRY(folio_context_create(&desc, &m->l.ctx));
    if (!replay_note_place(&stats->place, m->l.ctx)) return false;
    m->device = strcmp(stats->place.backend, "cuda") == 0;
    if (!open_layers(m) || !open_tensors(m)) return false;
    if (o->verify <= 0) return true;
    m->verifier = replay_verifier_open(m);
    return m->verifier != NULL;
}

/* What could not be written whole is not left there. */
static bool close_rows(replay_model *m)
{
    if (m->rows == NULL) return true;
    struct stat file;
    bool regular = fstat(fileno(m->rows), &file) == 0 && S_ISREG(file.st_mode);
    bool told = ferror(m->rows) != 0, ok = fclose(m->rows) == 0 && !told;
    if (!ok && !told) rows_failed(m);
    if (!ok && regular) remove(m->o->rows);
    return ok;
}

bool replay_model_close(replay_model *m)
{
    bool ok = close_rows(m);
    replay_verifier_close(m->verifier);
    for (int i = 0; i < 4; i++) {
        if (m->device) folio_memory_destroy(m->l.ctx, FOLIO_MEMORY_DEVICE, m->near[i], m->bytes[i]);
        folio_memory_destroy(m->l.ctx, FOLIO_MEMORY_HOST, m->host[i], m->bytes[i]);
    }
    kit_layer_close(&m->l);
    folio_context_destroy(m->l.ctx);
    free(m->list);
    *m = (replay_model){0};
    return ok;
}
