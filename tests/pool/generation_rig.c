/* generation_rig.c: a toy engine over a pool; see generation_rig.h. */
#include "pool/generation_rig.h"

#include "fake_device.h"

#include <math.h>
#include <stdlib.h>
#include <unistd.h>

const gen_geometry gen_small = {
    .backend = "cpu", .block_size = 4, .kv_dtype = FOLIO_F32, .num_layer_groups = 1};
const gen_geometry gen_windowed = {
    .backend = "cpu", .block_size = 4, .kv_dtype = FOLIO_INT8, .num_layer_groups = 2, .window = 9};
const gen_geometry gen_translating = {.backend = "cpu",
                                      .block_size = 4,
                                      .kv_dtype = FOLIO_BF16,
                                      .num_layer_groups = 1,
                                      .encoder = true};
const gen_geometry gen_quantised = {
    .backend = "cpu", .block_size = 16, .kv_dtype = FOLIO_INT8, .num_layer_groups = 1};
const gen_geometry gen_over_each_other = {.backend = "reference",
                                          .block_size = 4,
                                          .kv_dtype = FOLIO_F32,
                                          .num_layer_groups = 2,
                                          .window = 9,
                                          .one_memory = true};
const gen_geometry gen_latent = {.backend = "cpu",
                                 .block_size = 4,
                                 .kv_dtype = FOLIO_INT8,
                                 .num_layer_groups = 1,
                                 .v_in_k = true};

/* ---------------------------------------------------------------------------------- the model */

typedef struct {
    int32_t heads, kv_heads, head_size, layers, first_layer;
} shape;

/* One memory for both groups takes blocks of different bytes. */
static shape shape_of(const gen_geometry *g, int32_t group)
{
    if (group == 0) return (shape){4, 2, 16, 2, 0};
    if (group == 1) return (shape){4, 1, 32, 1, 2};
    return (shape){4, 2, 16, 1, g->num_layer_groups == 2 ? 3 : 2};
}

static int32_t v_size(const gen_geometry *g, shape s)
{
    return g->v_in_k ? s.head_size / 2 : s.head_size;
}

enum { CROSS = GEN_GROUPS }; /* its index among attentions and caches */
enum { WIDTH = 4 * 32 };     /* numbers of the widest row of q */
enum { KV_WIDTH = 32 };

static int32_t num_parts(const gen_geometry *g) { return g->encoder ? GEN_GROUPS + 1 : GEN_GROUPS; }
static bool has_part(const gen_geometry *g, int32_t i)
{
    return i < g->num_layer_groups || i == CROSS;
}

static uint64_t mix(uint64_t hash, const void *data, size_t bytes)
{
    const unsigned char *p = data;
    for (size_t i = 0; i < bytes; i++) hash = (hash ^ p[i]) * 0x100000001B3u;
    return support_bits(hash, bytes);
}

typedef enum { Q, K, V } kind;

static void numbers(float *x, int32_t n, kind what, int32_t layer, int32_t token, int64_t position)
{
    uint64_t seed = support_bits((uint64_t)what * 64u + (uint64_t)layer,
                                 (uint64_t)token * 4096u + (uint64_t)position);
    for (int32_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        x[i] = (float)(seed >> 40) / 8388608.0f - 1.0f;
    }
}

static int32_t encoder_token(const gen_request *r, int64_t position)
{
    return (int32_t)(support_bits(r->encoder_seed, (uint64_t)position) % GEN_VOCABULARY);
}

static bool is_fake(const gen_geometry *g) { return strcmp(g->backend, "fake") == 0; }

/* By name, for calls without a context: sizes are the same on all of them. */
static const char *shape_backend(const gen_model *m)
{
    return is_fake(&m->g) ? "reference" : m->g.backend;
}

bool gen_model_open(gen_model *m, const gen_geometry *g, int32_t num_threads,
                    const folio_allocator *allocator)
{
    static char stream;
    const char *instead = getenv("FOLIO_TESTS_BACKEND");
    *m = (gen_model){.g = *g, .run = {.struct_size = sizeof m->run}};
    if (instead != NULL && instead[0] != 0) m->g.backend = instead;
    m->device = is_fake(&m->g) || strcmp(m->g.backend, "cuda") == 0;
    if (is_fake(&m->g)) m->run.stream = &stream;
    m->ctx = is_fake(&m->g) ? fake_device_context(allocator)
                            : support_context(m->g.backend, num_threads, allocator);
    if (m->ctx == NULL) return false;
    for (int32_t i = 0; i < num_parts(g); i++) {
        if (!has_part(g, i)) continue;
        shape s = shape_of(g, i);
        folio_attention_desc desc =
            FOLIO_WITH(folio_attention_desc, .num_heads = s.heads, .num_kv_heads = s.kv_heads,
                       .k_head_size = s.head_size, .dtype = FOLIO_F32, .kv_dtype = g->kv_dtype,
                       .windowed = i == 1, .window_left = i == 1 ? g->window - 1 : 0,
                       .v_head_size = v_size(g, s), .v_in_k = g->v_in_k);
        CHECK_OK(folio_attention_create(m->ctx, &desc, &m->attention[i]));
        if (m->attention[i] == NULL) return false;
        m->num_layers += s.layers;
    }
    return true;
}

void gen_model_close(gen_model *m)
{
    for (int32_t i = 0; i <= GEN_GROUPS; i++) folio_attention_destroy(m->attention[i]);
    folio_context_destroy(m->ctx);
    *m = (gen_model){0};
}

const char *gen_model_name(const gen_model *m)
{
    static _Thread_local char name[96];
    snprintf(name, sizeof name, "%s %s, blocks of %d, %d group(s)%s%s%s", m->g.backend,
             folio_dtype_name(m->g.kv_dtype), (int)m->g.block_size, (int)m->g.num_layer_groups,
             m->g.one_memory ? ", one memory" : "", m->g.encoder ? ", encoder" : "",
             m->g.v_in_k ? ", latent" : "");
    return name;
}

/* ------------------------------------------------------------------------------------- requests */

void gen_request_make(gen_request *r, uint64_t shared_seed, int64_t shared_len, uint64_t seed,
                      int64_t prompt_len, int64_t len)
{
    *r = (gen_request){.shared_len = shared_len, .prompt_len = prompt_len, .len = len};
    for (int64_t i = 0; i < prompt_len; i++) {
        uint64_t from = i < shared_len ? shared_seed : seed;
        r->tokens[i] = (int32_t)(support_bits(from, (uint64_t)i) % GEN_VOCABULARY);
    }
}

folio_tokens gen_tokens(const gen_request *r, int64_t num_tokens)
{
    return FOLIO_WITH(folio_tokens, .num_tokens = num_tokens, .ids = r->tokens);
}

bool gen_request_alone(gen_model *m, gen_request *r)
{
    gen_pool p;
    int64_t blocks = (GEN_TOKENS / m->g.block_size + 1) * (GEN_GROUPS + 1);
    folio_pool_desc desc = {.struct_size = sizeof desc, .num_blocks = blocks};
    if (!gen_pool_open(&p, m, &desc, NULL)) return false;
    static _Thread_local gen_item item;
    item = (gen_item){.request = r, .tokens = r->tokens};
    CHECK_OK(folio_sequence_create(p.pool, NULL, &item.sequence));
    bool fine = item.sequence != NULL;
    if (fine && m->g.encoder)
        fine = folio_sequence_reserve_encoder(item.sequence, r->encoder_len, 0, NULL) == FOLIO_OK;
    for (int64_t done = 0; fine && done < r->len - 1;) {
        int64_t n = done == 0 ? r->prompt_len : 1;
        CHECK_OK(folio_sequence_reserve(item.sequence, n, 0, NULL));
        fine = gen_step(&p, (gen_item *const[]){&item}, 1);
        if (!fine) break;
        memcpy(r->rows[done], item.rows, (size_t)n * sizeof item.rows[0]);
        done += n;
        if (done < GEN_TOKENS) r->tokens[done] = item.next[n - 1];
        CHECK_OK(folio_sequence_commit(item.sequence, NULL));
    }
    folio_sequence_destroy(item.sequence);
    gen_pool_close(&p);
    CHECK(fine);
    return fine;
}

/* --------------------------------------------------------------------------------------- memory */

/* Host backends: not of the context's allocator, which a test may count or let fail. */
static void *take_memory(const gen_model *m, folio_memory_kind where, size_t bytes)
{
    void *p = NULL;
    if (m->device) CHECK_OK(folio_memory_create(m->ctx, where, bytes, &p));
    else p = aligned_alloc(64, (bytes + 63) / 64 * 64);
    if (p == NULL) abort();
    return p;
}

static void give_memory(const gen_model *m, folio_memory_kind where, void *p, size_t bytes)
{
    if (m->device) folio_memory_destroy(m->ctx, where, p, bytes);
    else free(p);
}

static void wait_for_device(const gen_model *m) { CHECK_OK(folio_run_wait(m->ctx, &m->run)); }

/* ----------------------------------------------------------------------------------- the caches */

/* Rows of one layer's call, the items' one after another. */
typedef struct {
    float q[GEN_ROWS * WIDTH], k[GEN_ROWS * KV_WIDTH], v[GEN_ROWS * KV_WIDTH];
    float out[GEN_ROWS * WIDTH], lse[GEN_ROWS * 4];
    int64_t rows, kv_rows;
} layer_rows;

static void poison_blocks(gen_pool *p, int32_t part, const int64_t *blocks, int64_t n);

/* Of a layer's K or V in f32. */
static size_t ones_bytes(const gen_pool *p)
{
    return (size_t)p->num_blocks * (size_t)p->m->g.block_size * KV_WIDTH * sizeof(float);
}

static folio_kv_cache_desc cache_desc(const gen_model *m, int32_t part, int64_t num_blocks)
{
    shape s = shape_of(&m->g, part);
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = num_blocks, .num_layers = s.layers,
                      .block_size = m->g.block_size, .num_kv_heads = s.kv_heads,
                      .k_head_size = s.head_size, .v_head_size = v_size(&m->g, s),
                      .dtype = m->g.kv_dtype, .v_in_k = m->g.v_in_k);
}

static bool make_cache(gen_pool *p, int32_t part)
{
    folio_kv_cache_desc desc = cache_desc(p->m, part, p->num_blocks);
    if (p->m->g.one_memory && part == 0) {
        folio_kv_cache_desc second = cache_desc(p->m, 1, p->num_blocks);
        const folio_kv_cache_desc *const both[2] = {&desc, &second};
        CHECK_OK(folio_kv_cache_create_shared(p->m->ctx, both, 2, p->caches));
    }
    if (p->caches[part] == NULL)
        CHECK_OK(folio_kv_cache_create(p->m->ctx, &desc, &p->caches[part]));
    if (p->caches[part] == NULL) return false;
    int64_t *blocks = malloc((size_t)p->num_blocks * sizeof *blocks);
    if (blocks == NULL) abort();
    for (int64_t b = 0; b < p->num_blocks; b++) blocks[b] = b;
    poison_blocks(p, part, blocks, p->num_blocks);
    free(blocks);
    return true;
}

/* Plans of their own: what lies outside the window has no block in the window's group. */
static bool make_plan(gen_pool *p, int32_t group)
{
    const gen_geometry *g = &p->m->g;
    bool cross = group == 0 && g->encoder;
    p->batch[group] = support_batch(p->m->ctx, g->block_size);
    folio_attention *list[] = {p->m->attention[group], p->m->attention[CROSS]};
    const uint32_t types[] = {FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER),
                              FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_DECODER)};
    folio_plan_desc plan =
        FOLIO_WITH(folio_plan_desc, .attentions = list, .types = types,
                   .num_attentions = cross ? 2 : 1, .block_size = g->block_size,
                   .num_blocks = p->num_blocks, .max_seqs = GEN_SEQS, .max_query_tokens = GEN_ROWS,
                   .max_seq_len = GEN_TOKENS, .max_encoder_tokens = GEN_ENCODER_ROWS);
    CHECK_OK(folio_plan_create(p->m->ctx, &plan, &p->plan[group]));
    return p->plan[group] != NULL;
}

static void free_parts(gen_pool *p)
{
    for (int32_t i = 0; i < GEN_GROUPS; i++) {
        folio_plan_destroy(p->plan[i]);
        folio_batch_destroy(p->batch[i]);
    }
    for (int32_t i = 0; i <= GEN_GROUPS; i++) folio_kv_cache_destroy(p->caches[i]);
    give_memory(p->m, FOLIO_MEMORY_HOST, p->ones, ones_bytes(p));
    give_memory(p->m, FOLIO_MEMORY_HOST, p->rows, sizeof(layer_rows));
    *p = (gen_pool){0};
}

bool gen_pool_open(gen_pool *p, gen_model *m, const folio_pool_desc *desc, folio_status *status)
{
    *p = (gen_pool){.m = m, .num_blocks = desc->num_blocks};
    p->ones = take_memory(m, FOLIO_MEMORY_HOST, ones_bytes(p));
    p->rows = take_memory(m, FOLIO_MEMORY_HOST, sizeof(layer_rows));
    memset(p->ones, 0xFF, ones_bytes(p));
    bool fine = true;
    for (int32_t i = 0; i < num_parts(&m->g) && fine; i++)
        if (has_part(&m->g, i)) fine = make_cache(p, i) && (i == CROSS || make_plan(p, i));
    folio_layer_group groups[GEN_GROUPS] = {{.cache = p->caches[0]},
                                            {.window = m->g.window, .cache = p->caches[1]}};
    folio_pool_desc full = *desc;
    full.block_size = m->g.block_size;
    full.num_layer_groups = m->g.num_layer_groups;
    full.layer_groups = groups;
    full.cross_cache = p->caches[CROSS];
    full.stream = m->run.stream;
    folio_status s = FOLIO_ERR_MEMORY;
    if (fine) {
        s = folio_pool_create(m->ctx, &full, &p->pool);
        if (status == NULL) CHECK_OK(s);
        CHECK((s == FOLIO_OK) == (p->pool != NULL));
    }
    if (status != NULL) *status = s;
    if (s != FOLIO_OK) free_parts(p);
    return s == FOLIO_OK;
}

void gen_pool_close(gen_pool *p)
{
    if (p->pool == NULL) return;
    CHECK_OK(folio_pool_check(p->pool));
    folio_pool_stats s = gen_stats(p);
    CHECK_INT(s.num_sequences, 0);
    CHECK_INT(s.num_used, 0);
    CHECK_INT(s.num_copies, 0);
    CHECK_INT(s.num_free + s.num_cached, s.num_blocks);
    folio_pool_destroy(p->pool);
    free_parts(p);
}

folio_pool_stats gen_stats(gen_pool *p)
{
    folio_pool_stats s = {.struct_size = sizeof s};
    CHECK_OK(folio_pool_get_stats(p->pool, &s));
    return s;
}

folio_sequence_info gen_info(const folio_sequence *s)
{
    folio_sequence_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_sequence_get_info(s, &info));
    return info;
}

int64_t gen_store_bytes(const gen_model *m, int64_t num_frames)
{
    int64_t payload = 0;
    for (int32_t i = 0; i < num_parts(&m->g); i++) {
        if (!has_part(&m->g, i)) continue;
        folio_kv_cache_desc desc = cache_desc(m, i, 1);
        folio_kv_cache_shape s = {.struct_size = sizeof s};
        CHECK_OK(folio_kv_cache_get_shape(shape_backend(m), &desc, &s));
        if (s.total_bytes > payload) payload = s.total_bytes;
    }
    /* A header and the ids before each payload, whole pages, one frame more for the superblock. */
    int64_t frame = (payload + 256 + 4 * m->g.block_size + 4095) / 4096 * 4096;
    return (num_frames + 1) * frame;
}

void gen_store_path(char *path, size_t size)
{
    static _Atomic int count;
    const char *dir = getenv("TMPDIR");
    snprintf(path, size, "%s/folio-tests-%d-%d.store", dir != NULL ? dir : "/tmp", (int)getpid(),
             ++count);
    unlink(path);
}

/* --------------------------------------------------------------------------------------- poison */

/* 0xFF in the given blocks of all layers: a NaN in every format, by the scale in INT8. */
static void poison_blocks(gen_pool *p, int32_t part, const int64_t *blocks, int64_t n)
{
    shape s = shape_of(&p->m->g, part);
    folio_kv_rows rows = FOLIO_WITH(folio_kv_rows, .k = p->ones, .v = p->ones, .k_scales = p->ones,
                                    .v_scales = p->ones, .num_blocks = n, .blocks = blocks);
    if (p->m->g.v_in_k) rows.v = NULL, rows.v_scales = NULL;
    for (int32_t l = 0; l < s.layers && n > 0; l++)
        CHECK_OK(folio_kv_cache_pack(p->caches[part], l, &rows, &p->m->run));
}

static void see_owner(const folio_sequence *s, int32_t group, int8_t part, int8_t *owner)
{
    const int32_t *table = NULL;
    int64_t n = 0;
    CHECK_OK(folio_sequence_get_table(s, group, &table, &n));
    for (int64_t i = 0; i < n; i++)
        if (table[i] != FOLIO_NO_BLOCK) owner[table[i]] = part;
}

void gen_poison(gen_pool *p, folio_sequence *const *sequences, int64_t num_sequences)
{
    CHECK_INT(gen_stats(p).num_copies, 0);
    uint8_t *states = malloc((size_t)p->num_blocks);
    int8_t *owner = malloc((size_t)p->num_blocks);
    int64_t *blocks = malloc((size_t)p->num_blocks * sizeof *blocks);
    if (states == NULL || owner == NULL || blocks == NULL) abort();
    memset(owner, -1, (size_t)p->num_blocks);
    CHECK_OK(folio_pool_get_block_states(p->pool, FOLIO_TIER_DEVICE, 0, p->num_blocks, states));
    for (int64_t i = 0; i < num_sequences; i++) {
        if (gen_info(sequences[i]).state != FOLIO_SEQUENCE_RESIDENT) continue;
        for (int8_t g = 0; g < p->m->g.num_layer_groups; g++) see_owner(sequences[i], g, g, owner);
        if (p->m->g.encoder) see_owner(sequences[i], FOLIO_LAYER_GROUP_CROSS, CROSS, owner);
    }
    for (int32_t part = 0; part < num_parts(&p->m->g); part++) {
        if (!has_part(&p->m->g, part)) continue;
        int64_t n = 0;
        for (int64_t b = 0; b < p->num_blocks; b++) {
            bool other = owner[b] >= 0 && owner[b] != part && !p->m->g.one_memory;
            if (states[b] == FOLIO_BLOCK_FREE || other) blocks[n++] = b;
        }
        poison_blocks(p, part, blocks, n);
    }
    free(blocks);
    free(owner);
    free(states);
}

/* ----------------------------------------------------------------------------------------- step */

static void fill_rows(const gen_pool *p, int32_t part, int32_t layer, gen_item *const *items,
                      int64_t num_items, layer_rows *x)
{
    shape s = shape_of(&p->m->g, part);
    int32_t q_width = s.heads * s.head_size, kv_width = s.kv_heads * s.head_size;
    x->rows = x->kv_rows = 0;
    for (int64_t i = 0; i < num_items; i++) {
        const gen_item *item = items[i];
        for (int64_t t = item->first; t < item->first + item->n; t++, x->rows++) {
            numbers(x->q + x->rows * q_width, q_width, Q, layer, item->tokens[t], t);
            if (part == CROSS) continue;
            numbers(x->k + x->kv_rows * kv_width, kv_width, K, layer, item->tokens[t], t);
            numbers(x->v + x->kv_rows * kv_width, kv_width, V, layer, item->tokens[t], t);
            x->kv_rows++;
        }
        folio_sequence_info info = gen_info(item->sequence);
        if (part != CROSS || info.encoder_committed_len == info.encoder_len) continue;
        for (int64_t t = 0; t < info.encoder_len; t++, x->kv_rows++) {
            int32_t token = encoder_token(item->request, t);
            numbers(x->k + x->kv_rows * kv_width, kv_width, K, layer, token, t);
            numbers(x->v + x->kv_rows * kv_width, kv_width, V, layer, token, t);
        }
    }
    memset(x->out, 0xFF, (size_t)(x->rows * q_width) * sizeof *x->out);
    memset(x->lse, 0xFF, (size_t)(x->rows * s.heads) * sizeof *x->lse);
}

static bool forward_layer(gen_pool *p, int32_t part, int32_t layer, gen_item *const *items,
                          int64_t num_items)
{
    layer_rows *x = p->rows;
    shape s = shape_of(&p->m->g, part);
    int32_t width = s.heads * v_size(&p->m->g, s);
    fill_rows(p, part, s.first_layer + layer, items, num_items, x);
    void *k = x->kv_rows > 0 ? x->k : NULL, *v = x->kv_rows > 0 ? x->v : NULL;
    folio_tensors t =
        FOLIO_WITH(folio_tensors, .q = {.data = x->q, .dtype = FOLIO_F32, .tokens = x->rows},
                   .k = {.data = k, .dtype = FOLIO_F32, .tokens = x->kv_rows},
                   .v = {.data = v, .dtype = FOLIO_F32, .tokens = x->kv_rows},
                   .out = {.data = x->out, .dtype = FOLIO_F32, .tokens = x->rows}, .lse = x->lse);
    if (p->m->g.v_in_k) t.v = (folio_tensor){0};
    folio_attention_type type =
        part == CROSS ? FOLIO_ATTENTION_ENCODER_DECODER : FOLIO_ATTENTION_DECODER;
    folio_status status = folio_attention_forward(p->plan[part == CROSS ? 0 : part], part == CROSS,
                                                  type, p->caches[part], layer, &t, &p->m->run);
    CHECK_OK(status);
    if (status != FOLIO_OK) return false;
    wait_for_device(p->m);
    for (int64_t i = 0, row = 0; i < num_items; i++)
        for (int64_t j = 0; j < items[i]->n; j++, row++) {
            uint64_t h = mix(1, x->out + row * width, (size_t)width * sizeof *x->out);
            h = mix(h, x->lse + row * s.heads, (size_t)s.heads * sizeof *x->lse);
            items[i]->rows[j][s.first_layer + layer] = h;
            float sum = 0;
            for (int32_t d = 0; d < width; d++) sum += x->out[row * width + d];
            for (int32_t d = 0; d < s.heads; d++) sum += x->lse[row * s.heads + d];
            if (isfinite(sum)) continue;
            test_fail(__FILE__, __LINE__, "%s: position %lld, layer %d is not finite",
                      gen_model_name(p->m), (long long)(items[i]->first + j),
                      (int)(s.first_layer + layer));
            return false;
        }
    return true;
}

/* Items without rows (all committed) are refused by nobody, but have nothing to say. */
static bool set_items(gen_item *const *items, int64_t num_items, folio_sequence **sequences)
{
    int64_t rows = 0;
    for (int64_t i = 0; i < num_items; i++) {
        folio_sequence_info info = gen_info(items[i]->sequence);
        items[i]->first = info.committed_len;
        items[i]->n = info.len - info.committed_len;
        sequences[i] = items[i]->sequence;
        rows += items[i]->n;
        if (items[i]->n > GEN_ROWS / 2 || info.len > GEN_TOKENS) return false;
    }
    return rows <= GEN_ROWS && num_items <= GEN_SEQS;
}

bool gen_step(gen_pool *p, gen_item *const *items, int64_t num_items)
{
    const gen_geometry *g = &p->m->g;
    folio_sequence *sequences[GEN_SEQS];
    if (num_items > GEN_SEQS || !set_items(items, num_items, sequences)) {
        test_fail(__FILE__, __LINE__, "a step is larger than the rig");
        return false;
    }
    folio_status status = folio_pool_run_copies(p->pool, NULL);
    CHECK_OK(status);
    if (status != FOLIO_OK) return false;
    gen_poison(p, sequences, num_items);
    for (int32_t group = 0; group < g->num_layer_groups; group++) {
        folio_batch_clear(p->batch[group]);
        status = folio_batch_add_sequences(p->batch[group], group, sequences, num_items, NULL);
        CHECK_OK(status);
        if (status == FOLIO_OK)
            CHECK_OK(status = folio_plan_update(p->plan[group], p->batch[group], &p->m->run));
        if (status != FOLIO_OK) return false;
        shape s = shape_of(g, group);
        for (int32_t l = 0; l < s.layers; l++)
            if (!forward_layer(p, group, l, items, num_items)) return false;
        if (group == 0 && g->encoder && !forward_layer(p, CROSS, 0, items, num_items)) return false;
    }
    for (int64_t i = 0; i < num_items; i++)
        for (int64_t j = 0; j < items[i]->n; j++)
            items[i]->next[j] =
                (int32_t)(mix(2, items[i]->rows[j], (size_t)p->m->num_layers * sizeof(uint64_t)) %
                          GEN_VOCABULARY);
    return true;
}

bool gen_rows_right(const gen_pool *p, const gen_item *item, int64_t n)
{
    const gen_request *r = item->request;
    for (int64_t j = 0; j < n; j++) {
        int64_t position = item->first + j;
        for (int32_t l = 0; l < p->m->num_layers; l++) {
            if (item->rows[j][l] == r->rows[position][l]) continue;
            test_fail(__FILE__, __LINE__, "%s: position %lld, layer %d differs from alone",
                      gen_model_name(p->m), (long long)position, (int)l);
            return false;
        }
        if (position + 1 < r->prompt_len || item->next[j] == r->tokens[position + 1]) continue;
        test_fail(__FILE__, __LINE__, "token %lld differs from alone", (long long)position + 1);
        return false;
    }
    return true;
}

folio_status gen_feed(gen_pool *p, folio_sequence *s, const gen_request *r, int64_t len)
{
    static _Thread_local gen_item item;
    folio_sequence_info info = gen_info(s);
    item = (gen_item){.sequence = s, .request = r, .tokens = r->tokens};
    folio_status status;
    if (p->m->g.encoder && info.encoder_len == 0) {
        status = folio_sequence_reserve_encoder(s, r->encoder_len, 0, NULL);
        if (status != FOLIO_OK) return status;
    }
    if (len > info.len) {
        status = folio_sequence_reserve(s, len - info.len, 0, NULL);
        if (status != FOLIO_OK) return status;
    }
    if (!gen_step(p, (gen_item *const[]){&item}, 1)) return FOLIO_ERR_INTERNAL;
    if (!gen_rows_right(p, &item, item.n)) return FOLIO_ERR_INTERNAL;
    folio_tokens tokens = gen_tokens(r, len);
    return folio_sequence_commit(s, &tokens);
}

/* ------------------------------------------------------------------------------------- contents */

/* Slots of positions [first, first + n) by a block table; false where a block is missing. */
static bool slots_of(const folio_sequence *s, int32_t group, int32_t block_size, int64_t first,
                     int64_t n, int64_t *slots)
{
    const int32_t *table = NULL;
    int64_t num_blocks = 0;
    CHECK_OK(folio_sequence_get_table(s, group, &table, &num_blocks));
    for (int64_t i = 0; i < n; i++) {
        int64_t at = (first + i) / block_size;
        if (at >= num_blocks || table[at] == FOLIO_NO_BLOCK) return false;
        slots[i] = (int64_t)table[at] * block_size + (first + i) % block_size;
    }
    return true;
}

/* Store what a request's positions [first, first + n) have as K and V in a layer. */
static void write_layer(const gen_model *m, int32_t part, int32_t layer, const gen_request *r,
                        int64_t first, int64_t n, const int64_t *slots, folio_kv_cache *cache)
{
    enum { BYTES = GEN_TOKENS * KV_WIDTH * sizeof(float) };
    float *k = take_memory(m, FOLIO_MEMORY_HOST, 2 * BYTES), *v = k + GEN_TOKENS * KV_WIDTH;
    shape s = shape_of(&m->g, part);
    int32_t width = s.kv_heads * s.head_size;
    for (int64_t i = 0; i < n; i++) {
        int32_t token = part == CROSS ? encoder_token(r, first + i) : r->tokens[first + i];
        numbers(k + i * width, width, K, s.first_layer + layer, token, first + i);
        numbers(v + i * width, width, V, s.first_layer + layer, token, first + i);
    }
    folio_kv_write write =
        FOLIO_WITH(folio_kv_write, .k = {.data = k, .dtype = FOLIO_F32, .tokens = n},
                   .v = {.data = v, .dtype = FOLIO_F32, .tokens = n}, .slots = slots);
    if (m->g.v_in_k) write.v = (folio_tensor){0};
    CHECK_OK(folio_kv_cache_write(cache, layer, &write, &m->run));
    wait_for_device(m);
    give_memory(m, FOLIO_MEMORY_HOST, k, 2 * BYTES);
}

folio_status gen_write(gen_pool *p, folio_sequence *s, const gen_request *r, int64_t len)
{
    const gen_geometry *g = &p->m->g;
    int64_t slots[GEN_GROUPS * GEN_TOKENS], first = gen_info(s).len, n = len - first;
    if (g->encoder && gen_info(s).encoder_len == 0) {
        folio_status status = folio_sequence_reserve_encoder(s, r->encoder_len, 0, slots);
        if (status != FOLIO_OK) return status;
        write_layer(p->m, CROSS, 0, r, 0, r->encoder_len, slots, p->caches[CROSS]);
    }
    folio_status status = folio_sequence_reserve(s, n, 0, slots);
    if (status != FOLIO_OK) return status;
    for (int32_t group = 0; group < g->num_layer_groups; group++)
        for (int32_t l = 0; l < shape_of(g, group).layers; l++)
            write_layer(p->m, group, l, r, first, n, slots + group * n, p->caches[group]);
    folio_tokens tokens = gen_tokens(r, len);
    return folio_sequence_commit(s, &tokens);
}

void gen_nudge(gen_pool *p, int32_t layer, int64_t slot)
{
    float *k = take_memory(p->m, FOLIO_MEMORY_HOST, 2 * KV_WIDTH * sizeof *k), *v = k + KV_WIDTH;
    folio_kv_gather gather = FOLIO_WITH(
        folio_kv_gather, .k = {.data = k, .dtype = FOLIO_F32, .tokens = 1},
        .v = {.data = v, .dtype = FOLIO_F32, .tokens = 1}, .slots = &slot, .num_slots = 1);
    CHECK_OK(folio_kv_cache_gather(p->caches[0], layer, &gather, &p->m->run));
    wait_for_device(p->m);
    k[5] += 0.25f;
    folio_kv_write write = FOLIO_WITH(folio_kv_write, .k = gather.k, .v = gather.v, .slots = &slot);
    if (p->m->g.v_in_k) write.v = (folio_tensor){0};
    CHECK_OK(folio_kv_cache_write(p->caches[0], layer, &write, &p->m->run));
    wait_for_device(p->m);
    give_memory(p->m, FOLIO_MEMORY_HOST, k, 2 * KV_WIDTH * sizeof *k);
}

/* K and V of a layer's rows: what the cache holds in `slots` against rows stored and read again. */
static bool layer_right(gen_pool *p, int32_t part, int32_t layer, const gen_request *r,
                        int64_t first, int64_t n, const int64_t *slots, folio_kv_cache *scratch)
{
    enum { NUMBERS = GEN_TOKENS * KV_WIDTH, BYTES = 4 * NUMBERS * sizeof(float) };
    float *want = take_memory(p->m, FOLIO_MEMORY_HOST, BYTES), *got = want + 2 * NUMBERS;
    shape s = shape_of(&p->m->g, part);
    int64_t straight[GEN_TOKENS];
    for (int64_t i = 0; i < n; i++) straight[i] = i;
    write_layer(p->m, part, layer, r, first, n, straight, scratch);
    folio_kv_gather gather =
        FOLIO_WITH(folio_kv_gather, .k = {.data = want, .dtype = FOLIO_F32, .tokens = n},
                   .v = {.data = want + NUMBERS, .dtype = FOLIO_F32, .tokens = n},
                   .slots = straight, .num_slots = n);
    CHECK_OK(folio_kv_cache_gather(scratch, layer, &gather, &p->m->run));
    gather.k.data = got;
    gather.v.data = got + NUMBERS;
    gather.slots = slots;
    CHECK_OK(folio_kv_cache_gather(p->caches[part], layer, &gather, &p->m->run));
    wait_for_device(p->m);
    size_t row = (size_t)(n * s.kv_heads) * sizeof(float),
           v_bytes = row * (size_t)v_size(&p->m->g, s);
    bool right = memcmp(got, want, row * (size_t)s.head_size) == 0 &&
                 memcmp(got + NUMBERS, want + NUMBERS, v_bytes) == 0;
    give_memory(p->m, FOLIO_MEMORY_HOST, want, BYTES);
    return right;
}

bool gen_contents_right(gen_pool *p, const folio_sequence *s, const gen_request *r)
{
    const gen_geometry *g = &p->m->g;
    folio_sequence_info info = gen_info(s);
    bool fine = true;
    for (int32_t part = 0; part < num_parts(g) && fine; part++) {
        if (!has_part(g, part)) continue;
        int64_t len = part == CROSS ? info.encoder_committed_len : info.committed_len;
        int64_t first = part == 1 && len >= g->window ? len - g->window + 1 : 0;
        int64_t slots[GEN_TOKENS];
        if (len == first) continue;
        int32_t group = part == CROSS ? FOLIO_LAYER_GROUP_CROSS : part;
        fine = slots_of(s, group, g->block_size, first, len - first, slots);
        folio_kv_cache_desc desc = cache_desc(p->m, part, GEN_TOKENS / g->block_size + 1);
        folio_kv_cache *scratch = NULL;
        CHECK_OK(folio_kv_cache_create(p->m->ctx, &desc, &scratch));
        for (int32_t l = 0; l < desc.num_layers && fine && scratch != NULL; l++)
            fine = layer_right(p, part, l, r, first, len - first, slots, scratch);
        folio_kv_cache_destroy(scratch);
    }
    if (!fine)
        test_fail(__FILE__, __LINE__, "%s: contents are not the request's", gen_model_name(p->m));
    return fine;
}

void gen_end(gen_pool *p, folio_sequence *s, const gen_request *r)
{
    CHECK(gen_contents_right(p, s, r));
    CHECK_OK(gen_feed(p, s, r, 39));
    folio_sequence_destroy(s);
}

/* ------------------------------------------------------------------------------------- a world */

bool gen_world_model(gen_world *w, const gen_geometry *g, const folio_allocator *allocator)
{
    gen_store_path(w->store, sizeof w->store);
    if (!gen_model_open(&w->m, g, 2, allocator)) return false;
    for (int i = 0; i < GEN_REQUESTS; i++) {
        gen_request_make(&w->r[i], 5, i < 2 ? 20 : 0, 100 + (uint64_t)i, 25 + i, 40);
        w->r[i].encoder_len = g->encoder ? 5 : 0;
        w->r[i].encoder_seed = g->encoder ? 3 : 0;
        if (!gen_request_alone(&w->m, &w->r[i])) return false;
    }
    return true;
}

folio_pool_desc gen_world_desc(const gen_world *w, int64_t blocks, int64_t host, int64_t frames)
{
    static const folio_kv_passport passport = {.struct_size = sizeof passport, .model = "toy"};
    return FOLIO_WITH(folio_pool_desc, .num_blocks = blocks, .flags = FOLIO_POOL_CHECK,
                      .host_blocks = host, .store_path = frames > 0 ? w->store : NULL,
                      .store_bytes = frames > 0 ? gen_store_bytes(&w->m, frames) : 0,
                      .passport = &passport);
}

bool gen_world_pool(gen_world *w, int64_t blocks, int64_t host, int64_t frames)
{
    folio_pool_desc desc = gen_world_desc(w, blocks, host, frames);
    return gen_pool_open(&w->p, &w->m, &desc, NULL);
}

bool gen_world_open(gen_world *w, const gen_geometry *g, int64_t blocks, int64_t host,
                    int64_t frames)
{
    return gen_world_model(w, g, NULL) && gen_world_pool(w, blocks, host, frames);
}

void gen_world_close(gen_world *w)
{
    gen_pool_close(&w->p);
    gen_model_close(&w->m);
    unlink(w->store);
}

void gen_world_run(const gen_geometry *g, int64_t blocks, int64_t host, int64_t frames,
                   gen_body body)
{
    static gen_world w;
    REQUIRE_TEST(gen_world_open(&w, g, blocks, host, frames));
    body(&w);
    gen_world_close(&w);
}

folio_sequence *gen_sequence(gen_world *w, const gen_request *r)
{
    folio_sequence_desc desc = {.struct_size = sizeof desc, .salt = r->encoder_seed};
    folio_sequence *s = NULL;
    CHECK_OK(folio_sequence_create(w->p.pool, &desc, &s));
    return s;
}

folio_sequence *gen_filled(gen_world *w, const gen_request *r, int64_t len)
{
    folio_sequence *s = gen_sequence(w, r);
    CHECK_OK(gen_feed(&w->p, s, r, len));
    return s;
}

int64_t gen_match(gen_world *w, folio_sequence *s, const gen_request *r, int64_t num_tokens)
{
    folio_tokens tokens = gen_tokens(r, num_tokens);
    int64_t matched = -1;
    CHECK_OK(folio_sequence_match(s, &tokens, &matched, NULL));
    CHECK_OK(folio_pool_check(w->p.pool));
    gen_check_at(s, FOLIO_SEQUENCE_RESIDENT, FOLIO_TIER_DEVICE, matched);
    return matched;
}

int64_t gen_lower(gen_world *w, folio_tier tier, int64_t max_blocks)
{
    int64_t n = -1;
    CHECK_OK(folio_pool_swap_out(w->p.pool, tier, max_blocks, NULL, &n, NULL));
    CHECK_OK(folio_pool_check(w->p.pool));
    return n;
}

void gen_poison_free(gen_world *w) { gen_poison(&w->p, NULL, 0); }

void gen_check_at(const folio_sequence *s, folio_sequence_state state, folio_tier tier, int64_t len)
{
    folio_sequence_info info = gen_info(s);
    CHECK_INT(info.state, state);
    CHECK_INT(info.tier, tier);
    CHECK_INT(info.len, len);
    CHECK_INT(info.committed_len, len);
}
