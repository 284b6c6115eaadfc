/*
 * check_lineage.c: `folio check --lineage`: a short life of each of vLLM 0.6's attention backends
 * through folio_vllm06.h: prompts, chunks, decodes, a fork by block moves, encoder and cross
 * attention. Two states live it side by side, the one checked and one on the reference backend,
 * each in memory of its own context: outputs agree within a budget, caches bit for bit, a fork with
 * what it was forked from. In one life of three the one checked has compat, and the reference has
 * layers without it, which say what the original did with prompts, with decodes and in other types.
 */
#include "check/check.h"

#include <folio/folio_vllm06.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { NUM_BLOCKS = 67, SEQ_BLOCKS = 8, CROSS_BLOCKS = 4, NUM_SEQS = 4, MAX_PROMPT = 20 };

/* Of what a layer computes, what compat tells apart. */
typedef enum workload {
    WORKLOAD_PROMPTS,
    WORKLOAD_DECODES,
    WORKLOAD_OTHER_TYPES,
    NUM_WORKLOADS
} workload;

typedef struct life_seq {
    int64_t id, len, encoder_len; /* len: tokens stored so far */
    int32_t blocks[SEQ_BLOCKS], cross[CROSS_BLOCKS];
} life_seq;

/* A sequence in a step: its next `count` tokens. */
typedef struct life_row {
    life_seq *seq;
    bool prompt;
    int64_t count;
} life_row;

/* [0]: the backend checked, [1]: the reference. */
typedef struct life {
    const folio_vllm06_backend *backend;
    folio_vllm06_impl_desc desc;
    folio_dtype kv_dtype;
    float slopes[16], k_scale, v_scale;
    int32_t block_size;
    bool encoder;
    bool chunked;           /* prompts without context have block tables too */
    int64_t builder_window; /* the builder masks and clips */
    uint64_t seed;
    life_seq seqs[NUM_SEQS];
    folio_vllm06_state *state[2];
    folio_vllm06_impl *impl[2][NUM_WORKLOADS]; /* [state][workload] */
    folio_vllm06_kv_cache cache[2], spare[2];
    size_t cache_bytes;
    check_outcome *out;
} life;

static bool ok(life *l, folio_status status, const char *what)
{
    return status == FOLIO_OK || check_fail(l->out, "%s: %s", what, folio_last_error());
}

/* Memory in which every number is NaN. */
static void *poisoned(size_t bytes)
{
    void *p = malloc(bytes + 1);
    if (p == NULL) abort();
    return memset(p, 0xFF, bytes);
}

/* Memory of a state's context with these bytes in it; NULL stays NULL. */
static void *put(life *l, int i, folio_memory_kind kind, const void *from, size_t bytes)
{
    folio_context *ctx = folio_vllm06_state_context(l->state[i]);
    void *to = NULL;
    if (from == NULL || !l->out->ok) return NULL;
    if (ok(l, folio_memory_create(ctx, kind, bytes + 1, &to), "memory"))
        ok(l, folio_memory_copy(ctx, to, from, bytes, NULL), "copy");
    return to;
}

static void get(life *l, int i, void *to, const void *from, size_t bytes)
{
    folio_context *ctx = folio_vllm06_state_context(l->state[i]);
    if (!l->out->ok) return;
    ok(l, folio_memory_copy(ctx, to, from, bytes, NULL), "copy");
    ok(l, folio_run_wait(ctx, NULL), "wait");
}

static void drop(const life *l, int i, folio_memory_kind kind, void *memory, size_t bytes)
{
    folio_context *ctx = folio_vllm06_state_context(l->state[i]);
    folio_memory_destroy(ctx, kind, memory, bytes + 1);
}

static void draw_life(life *l, check_draw *d, int64_t index)
{
    static const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};
    static const char *const kv_names[] = {"auto", "auto", "fp8", "fp8_e5m2"};
    static const folio_dtype kv_dtypes[] = {0, 0, FOLIO_FP8_E4M3, FOLIO_FP8_E5M2};
    static const int32_t heads_per_kv[] = {1, 1, 2, 4};
    const folio_vllm06_backend *b = l->backend;
    folio_vllm06_impl_desc *i = &l->desc;
    int64_t kv = check_int(d, 0, 3);
    *i = (folio_vllm06_impl_desc){.struct_size = sizeof *i, .dtype = CHECK_PICK(d, dtypes)};
    i->head_size = b->supported_head_sizes[index % b->num_supported_head_sizes];
    if (i->head_size % 16 != 0) kv = 0; /* 16 numbers of one byte lie side by side */
    i->kv_cache_dtype = kv_names[kv];
    l->kv_dtype = kv_dtypes[kv] ? kv_dtypes[kv] : i->dtype;
    i->num_kv_heads = (int32_t)check_int(d, 1, 2);
    i->num_heads = i->num_kv_heads * CHECK_PICK(d, heads_per_kv);
    if (check_chance(d, 3)) i->sliding_window = check_int(d, 1, 24);
    if (check_chance(d, 4)) i->logits_soft_cap = 5.0f;
    for (int h = 0; h < i->num_heads; h++)
        l->slopes[h] = (float)exp2(-8.0 * (h + 1) / (double)i->num_heads);
    if (check_chance(d, 3)) i->alibi_slopes = l->slopes;
    if (check_chance(d, 3)) i->compat = 1;
    if (i->compat) i->scale = 0.5f / sqrtf((float)i->head_size); /* xformers' prefixes ignore it */
    l->chunked = check_chance(d, 2);
    /* not with compat, which sees keys of the window's first block that prompts do not store */
    if (!i->compat && check_chance(d, 2)) l->builder_window = i->sliding_window;
    l->k_scale = kv > 1 ? 0.25f : 1.0f;
    l->v_scale = kv > 1 ? 0.5f : 1.0f;
    l->block_size = b->supported_block_sizes[check_int(d, 0, b->num_supported_block_sizes - 1)];
    l->seed = (uint64_t)check_int(d, 1, INT64_MAX - 1);
    for (int s = 0; s < NUM_SEQS; s++) {
        life_seq *q = &l->seqs[s];
        q->id = s + 1;
        q->encoder_len = l->encoder ? check_int(d, 1, CROSS_BLOCKS * 8) : 0;
        for (int k = 0; k < SEQ_BLOCKS + CROSS_BLOCKS; k++) /* blocks far from their order */
            *(k < SEQ_BLOCKS ? &q->blocks[k] : &q->cross[k - SEQ_BLOCKS]) =
                (s * (SEQ_BLOCKS + CROSS_BLOCKS) + k) * 29 % NUM_BLOCKS;
    }
}

/* The layer without compat that computes what it brings back; lives with compat have whole prompts. */
static folio_vllm06_impl_desc plainly(const life *l, workload of)
{
    bool decodes = of == WORKLOAD_DECODES;
    folio_vllm06_impl_desc d = l->desc;
    bool ipex = strcmp(l->backend->name, "ipex") == 0;
    bool xformers = strcmp(l->backend->name, "xformers") == 0;
    if (!d.compat) return d;
    d.compat = 0;
    if (of == WORKLOAD_OTHER_TYPES) return d;
    if (decodes || ipex || d.alibi_slopes != NULL) d.sliding_window = 0;
    if (decodes && ipex) d.logits_soft_cap = 0;
    if (!decodes && ipex) d.alibi_slopes = NULL;
    if (!decodes && xformers && l->chunked) d.scale = 0;
    return d;
}

static bool make_impls(life *l, int i)
{
    for (int of = 0; of < NUM_WORKLOADS; of++) {
        folio_vllm06_impl_desc d = i ? plainly(l, (workload)of) : l->desc;
        if (!ok(l, folio_vllm06_make_impl(l->state[i], l->backend, &d, &l->impl[i][of]),
                "make_impl"))
            return false;
    }
    return true;
}

static bool begin(life *l, const check_env *env)
{
    const folio_vllm06_impl_desc *d = &l->desc;
    int64_t shape[3];
    folio_status status = folio_vllm06_get_kv_cache_shape(NUM_BLOCKS, l->block_size,
                                                          d->num_kv_heads, d->head_size, shape);
    if (!ok(l, status, "get_kv_cache_shape")) return false;
    l->cache_bytes = (size_t)(shape[0] * shape[1] * shape[2]) * folio_dtype_size(l->kv_dtype);
    for (int i = 0; i < 2; i++) {
        folio_context_desc c = {.struct_size = sizeof c, .num_threads = i ? 1 : env->threads};
        if (i == 0) c.level = env->level;
        l->cache[i] = l->spare[i] = (folio_vllm06_kv_cache){.bytes = l->cache_bytes,
                                                            .dtype = l->kv_dtype,
                                                            .block_size = l->block_size,
                                                            .num_kv_heads = d->num_kv_heads,
                                                            .head_size = d->head_size,
                                                            .num_blocks = NUM_BLOCKS};
        const char *compute = i ? "reference" : env->info.name;
        if (!ok(l, folio_vllm06_state_create(compute, &c, &l->state[i]), "state_create") ||
            !make_impls(l, i))
            return false;
        void *nan = poisoned(l->cache_bytes);
        l->cache[i].key_cache = put(l, i, FOLIO_MEMORY_DEVICE, nan, l->cache_bytes);
        l->spare[i].key_cache = put(l, i, FOLIO_MEMORY_HOST, nan, l->cache_bytes);
        free(nan);
    }
    return l->out->ok;
}

/* New tokens of a sequence in a step, the decoder's or the encoder's. */
static int64_t new_tokens(bool encoder, const life_row *r)
{
    return !encoder ? r->count : r->prompt ? r->seq->encoder_len : 0;
}

/* A tensor of the step's new tokens; data NULL where there are none. */
static folio_tensor tokens_of(const life *l, const life_row *rows, int64_t n, int32_t tensor)
{
    bool encoder = tensor >= KIT_ENCODER_Q;
    bool query = tensor == KIT_Q || tensor == KIT_ENCODER_Q;
    int64_t heads = query ? l->desc.num_heads : l->desc.num_kv_heads, size = l->desc.head_size;
    folio_tensor t = {.dtype = l->desc.dtype};
    for (int64_t i = 0; i < n; i++) t.tokens += new_tokens(encoder, &rows[i]);
    int64_t width = heads * size, at = 0;
    if (t.tokens == 0) return t;
    t.data = poisoned((size_t)(t.tokens * width) * folio_dtype_size(t.dtype));
    for (int64_t i = 0; i < n; i++)
        for (int64_t j = 0; j < new_tokens(encoder, &rows[i]); j++)
            for (int64_t e = 0; e < width; e++) {
                int64_t id = rows[i].seq->id, token = j + (encoder ? 0 : rows[i].seq->len);
                double x = kit_random(l->seed, tensor, id, token, e / size, e % size);
                kit_store(t.dtype, t.data, at++, x);
            }
    return t;
}

static void judge_caches(life *l, const char *what)
{
    void *held[2];
    for (int i = 0; i < 2; i++) {
        held[i] = poisoned(l->cache_bytes);
        get(l, i, held[i], l->cache[i].key_cache, l->cache_bytes);
    }
    if (l->out->ok && memcmp(held[0], held[1], l->cache_bytes) != 0)
        check_fail(l->out, "%s: the cache differs from the reference's", what);
    for (int i = 0; i < 2; i++) free(held[i]);
}

static void judge(life *l, const char *what, const folio_tensor *got, const folio_tensor *want)
{
    double largest = 0;
    int64_t count = got->tokens * l->desc.num_heads * l->desc.head_size;
    for (int64_t i = 0; i < count; i++)
        largest = fmax(largest, fabs(kit_load(want->dtype, want->data, i)));
    double budget = 0x1p-18 * largest + kit_ulp(l->desc.dtype, largest);
    for (int64_t i = 0; i < count && l->out->ok; i++) {
        double a = kit_load(got->dtype, got->data, i);
        double b = kit_load(want->dtype, want->data, i), error = fabs(a - b);
        if (!(error <= budget))
            check_fail(l->out, "%s: number %lld is %.9g, on the reference %.9g, allowed %.3g", what,
                       (long long)i, a, b, budget);
        if (l->out->budget <= 0 || error / budget > l->out->error / l->out->budget) {
            l->out->error = error;
            l->out->budget = budget;
        }
    }
    judge_caches(l, what);
}

static size_t bytes_of(const life *l, const folio_tensor *t, int32_t heads)
{
    return (size_t)(t->tokens * heads * l->desc.head_size) * folio_dtype_size(t->dtype);
}

/* One forward in memory of the state's context; the output comes back to `out`. */
static void run(life *l, int i, folio_attention_type type, const folio_tensor qkv[3],
                const folio_vllm06_metadata *metadata, void *out)
{
    const int32_t heads[] = {l->desc.num_heads, l->desc.num_kv_heads, l->desc.num_kv_heads};
    folio_tensor placed[4]; /* query, key, value, output */
    for (int t = 0; t < 4; t++) {
        placed[t] = qkv[t % 3];
        placed[t].data = put(l, i, FOLIO_MEMORY_DEVICE, t < 3 ? qkv[t].data : out,
                             bytes_of(l, &placed[t], heads[t % 3]));
    }
    folio_vllm06_forward_args a = FOLIO_WITH(
        folio_vllm06_forward_args, .query = placed[0], .key = placed[1], .value = placed[2],
        .kv_cache = &l->cache[i], .attn_metadata = metadata, .k_scale = l->k_scale,
        .v_scale = l->v_scale, .attn_type = type, .output = placed[3]);
    workload of = type != FOLIO_ATTENTION_DECODER                   ? WORKLOAD_OTHER_TYPES
                  : folio_vllm06_prefill_metadata(metadata) == NULL ? WORKLOAD_DECODES
                                                                    : WORKLOAD_PROMPTS;
    if (l->out->ok)
        ok(l, folio_vllm06_forward(l->impl[i][of], &a, NULL), folio_attention_type_name(type));
    get(l, i, out, placed[3].data, bytes_of(l, &placed[3], heads[0]));
    for (int t = 0; t < 4; t++)
        drop(l, i, FOLIO_MEMORY_DEVICE, placed[t].data, bytes_of(l, &placed[t], heads[t % 3]));
}

static void attend(life *l, folio_attention_type type, const life_row *rows, int64_t n,
                   folio_vllm06_metadata *const metadata[2])
{
    const char *what = folio_attention_type_name(type);
    int32_t kv = type == FOLIO_ATTENTION_DECODER ? KIT_K : KIT_ENCODER_K;
    const folio_tensor qkv[3] = {
        tokens_of(l, rows, n, type == FOLIO_ATTENTION_ENCODER ? KIT_ENCODER_Q : KIT_Q),
        tokens_of(l, rows, n, kv), tokens_of(l, rows, n, kv + 1)};
    const folio_tensor q = qkv[0];
    size_t row = (size_t)(l->desc.num_heads * l->desc.head_size) * folio_dtype_size(q.dtype);
    folio_tensor out[2];
    for (int i = 0; i < 2; i++) {
        out[i] = q;
        out[i].data = poisoned((size_t)q.tokens * row);
        if (l->out->ok) run(l, i, type, qkv, metadata[i], out[i].data);
    }
    if (l->out->ok) judge(l, what, &out[0], &out[1]);
    const char *first = out[0].data, *last = first + (size_t)(q.tokens - 1) * row;
    if (l->out->ok && n == NUM_SEQS && memcmp(first, last, row) != 0)
        check_fail(l->out, "%s: the fork differs from what it was forked from", what);
    void *const owned[] = {q.data, qkv[1].data, qkv[2].data, out[0].data, out[1].data};
    for (int i = 0; i < 5; i++) free(owned[i]);
}

static folio_vllm06_metadata *build(life *l, int i, const life_row *rows, int64_t n)
{
    folio_vllm06_builder *b = NULL;
    folio_vllm06_metadata *metadata = NULL;
    folio_vllm06_builder_desc d =
        FOLIO_WITH(folio_vllm06_builder_desc, .block_size = l->block_size,
                   .sliding_window = l->builder_window, .chunked_prefill_enabled = l->chunked);
    ok(l, folio_vllm06_builder_create(l->state[i], l->backend, &d, &b), "builder");
    for (int64_t s = 0; s < n && l->out->ok; s++) {
        life_seq *q = rows[s].seq;
        folio_vllm06_seq seq = FOLIO_WITH(
            folio_vllm06_seq, .is_prompt = rows[s].prompt, .token_len = rows[s].count,
            .context_len = q->len, .block_table = q->blocks,
            .num_blocks = (q->len + rows[s].count - 1) / l->block_size + 1,
            .encoder_seq_len = q->encoder_len, .encoder_is_new = rows[s].prompt,
            .cross_block_table = q->cross, .num_cross_blocks = l->encoder ? CROSS_BLOCKS : 0);
        ok(l, folio_vllm06_builder_add(b, &seq), "builder_add");
    }
    if (l->out->ok) ok(l, folio_vllm06_builder_build(b, &metadata), "builder_build");
    folio_vllm06_builder_destroy(b);
    return metadata;
}

/* Biases that hide no key, where ipex ignored them: whole prompts with compat stay causal. */
static void set_ignored_biases(life *l, const life_row *rows, int64_t n,
                               folio_vllm06_metadata *metadata)
{
    static const float zeros[MAX_PROMPT * MAX_PROMPT];
    folio_vllm06_bias biases[NUM_SEQS];
    bool ipex = strcmp(l->backend->name, "ipex") == 0;
    if (!l->out->ok || !ipex || !l->desc.compat || !rows[0].prompt) return;
    for (int64_t s = 0; s < n; s++)
        biases[s] = (folio_vllm06_bias){zeros, 1, rows[s].count, rows[s].count};
    ok(l, folio_vllm06_set_attn_bias(metadata, FOLIO_ATTENTION_DECODER, biases), "set_attn_bias");
}

/* The layers of one step, as a model runs them: encoder, decoder, cross attention. */
static bool step(life *l, const life_row *rows, int64_t n)
{
    folio_vllm06_metadata *metadata[2] = {NULL, NULL};
    for (int i = 0; i < 2 && l->out->ok; i++) metadata[i] = build(l, i, rows, n);
    set_ignored_biases(l, rows, n, metadata[0]);
    if (l->out->ok && l->encoder && rows[0].prompt)
        attend(l, FOLIO_ATTENTION_ENCODER, rows, n, metadata);
    if (l->out->ok) attend(l, FOLIO_ATTENTION_DECODER, rows, n, metadata);
    if (l->out->ok && l->encoder) attend(l, FOLIO_ATTENTION_ENCODER_DECODER, rows, n, metadata);
    for (int i = 0; i < 2; i++) folio_vllm06_metadata_destroy(metadata[i]);
    for (int64_t s = 0; s < n; s++) rows[s].seq->len += rows[s].count;
    return l->out->ok;
}

/* The last sequence becomes a copy of the first: within the cache, or out to another and back. */
static bool fork_first(life *l, bool by_swap)
{
    folio_block_pair pairs[SEQ_BLOCKS], back[SEQ_BLOCKS];
    life_seq *from = &l->seqs[0], *to = &l->seqs[NUM_SEQS - 1];
    int64_t n = (from->len + l->block_size - 1) / l->block_size;
    for (int64_t b = 0; b < n; b++) {
        pairs[b] = (folio_block_pair){from->blocks[b], to->blocks[b]};
        back[b] = (folio_block_pair){to->blocks[b], to->blocks[b]};
    }
    for (int i = 0; i < 2; i++) {
        folio_vllm06_kv_cache *here = &l->cache[i], *there = &l->spare[i];
        folio_status status =
            by_swap ? folio_vllm06_swap_blocks(l->state[i], here, there, pairs, n, NULL)
                    : folio_vllm06_copy_blocks(l->state[i], here, 1, pairs, n, NULL);
        if (by_swap && status == FOLIO_OK)
            status = folio_vllm06_swap_blocks(l->state[i], there, here, back, n, NULL);
        if (!ok(l, status, by_swap ? "swap_blocks" : "copy_blocks")) return false;
    }
    life_seq copy = *from;
    memcpy(copy.blocks, to->blocks, sizeof copy.blocks);
    *to = copy;
    return true;
}

static void live(const char *name, bool mixes, bool has_cross, const check_env *env, check_draw *d,
                 int64_t index, check_outcome *out)
{
    life l = {.backend = folio_vllm06_backend_find(name), .out = out};
    life_seq *s = l.seqs;
    l.encoder = has_cross && index % 3 == 2;
    draw_life(&l, d, index);
    /* encoder-decoder models run whole prompts, apart from decodes; so do layers of two phases */
    mixes = mixes && !l.encoder && !l.desc.compat;
    life_row prompts[] = {{&s[0], true, check_int(d, 1, MAX_PROMPT)},
                          {&s[1], true, check_int(d, 1, MAX_PROMPT)}};
    life_row chunks[] = {{&s[2], true, check_int(d, 1, MAX_PROMPT)},
                         {&s[1], true, check_int(d, 1, MAX_PROMPT)},
                         {&s[0], false, 1}};
    life_row decodes[] = {
        {&s[0], false, 1}, {&s[1], false, 1}, {&s[2], false, 1}, {&s[3], false, 1}};
    bool going = begin(&l, env) && step(&l, prompts, 2) && step(&l, chunks, mixes ? 3 : 1) &&
                 fork_first(&l, index % 2 == 1);
    for (int i = 0; i < 2 && going; i++) going = step(&l, decodes, NUM_SEQS);
    for (int i = 0; i < 2; i++) {
        drop(&l, i, FOLIO_MEMORY_DEVICE, l.cache[i].key_cache, l.cache_bytes);
        drop(&l, i, FOLIO_MEMORY_HOST, l.spare[i].key_cache, l.cache_bytes);
        for (int of = 0; of < NUM_WORKLOADS; of++) folio_vllm06_impl_destroy(l.impl[i][of]);
        folio_vllm06_state_destroy(l.state[i]);
    }
}

#define LIFE(id, name, mixes, has_cross)                                                           \
    static void id(const check_env *env, check_draw *d, int64_t index, check_outcome *out)         \
    {                                                                                              \
        live(name, mixes, has_cross, env, d, index, out);                                          \
    }
LIFE(live_xformers, "xformers", true, true)
LIFE(live_torch_sdpa, "torch-sdpa", false, true)
LIFE(live_torch_sdpa_ipex, "torch-sdpa-ipex", false, true)
LIFE(live_ipex, "ipex", false, false)

const check_series check_lineage_series[] = {
    {"lineage_xformers", "life", 36, 180, NULL, live_xformers},
    {"lineage_torch_sdpa", "life", 36, 180, NULL, live_torch_sdpa},
    {"lineage_sdpa_ipex", "life", 36, 180, NULL, live_torch_sdpa_ipex},
    {"lineage_ipex", "life", 36, 180, NULL, live_ipex},
};
const int check_num_lineage_series =
    (int)(sizeof check_lineage_series / sizeof check_lineage_series[0]);
