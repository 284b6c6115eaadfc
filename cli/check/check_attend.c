/*
 * check_attend.c: the attention cases of `folio check`, feature by feature. Each starts from a
 * small random geometry with shuffled, poisoned blocks and adds what its feature is about;
 * lengths sit on the edges of blocks and splits.
 */
#include "check/check.h"

#include <math.h>
#include <string.h>

/* Short ones more often: cost grows with the square. */
static const int64_t edges[] = {1, 2, 7, 15, 16, 17, 31, 32, 33, 15, 16, 17, 48, 65};
static const int64_t contexts[] = {1, 8, 15, 16, 17, 31, 32, 33, 64, 100, 129};
static const folio_dtype query_dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};
static const folio_dtype kv_dtypes[] = {FOLIO_F32,      FOLIO_F16,      FOLIO_BF16,
                                        FOLIO_FP8_E4M3, FOLIO_FP8_E5M2, FOLIO_INT8};
#define COUNT(list) ((int64_t)(sizeof(list) / sizeof((list)[0])))

/* ---- Geometry and sequences */

kit_seq *check_add(check_attention *c, int64_t query_len, int64_t context_len)
{
    kit_seq *s = &c->seqs[c->num_seqs++];
    *s = (kit_seq){.query_len = query_len, .seq_len = query_len + context_len};
    return s;
}

static kit_seq *add_padding(check_attention *c, int64_t query_len)
{
    kit_seq *s = check_add(c, query_len, 0);
    s->seq_len = 0;
    return s;
}

static void add_prompt(check_draw *d, check_attention *c) { check_add(c, CHECK_PICK(d, edges), 0); }

static void add_chunk(check_draw *d, check_attention *c)
{
    check_add(c, check_int(d, 2, 20), CHECK_PICK(d, contexts));
}

static void add_decode(check_draw *d, check_attention *c)
{
    check_add(c, check_chance(d, 3) ? check_int(d, 2, 4) : 1, CHECK_PICK(d, contexts));
}

/* One of each kind, in random order, and now and then padding. */
void check_mixed(check_draw *d, check_attention *c)
{
    static void (*const kinds[])(check_draw *, check_attention *) = {add_prompt, add_chunk,
                                                                     add_decode};
    int64_t first = check_int(d, 0, 2), step = check_int(d, 1, 2);
    for (int64_t i = 0; i < 3; i++) kinds[(first + i * step) % 3](d, c);
    if (check_chance(d, 2)) add_decode(d, c);
    if (check_chance(d, 3)) add_padding(c, check_int(d, 0, 2));
    if (check_chance(d, 4)) check_add(c, 0, CHECK_PICK(d, contexts)); /* waits: asks nothing */
}

void check_latent(kit_spec *s, int32_t k_head_size, int32_t v_head_size)
{
    static const folio_layout without_v[FOLIO_NUM_LAYOUTS] = {
        [FOLIO_LAYOUT_NHD] = FOLIO_LAYOUT_NHD,
        [FOLIO_LAYOUT_HND] = FOLIO_LAYOUT_HND,
        [FOLIO_LAYOUT_INTERLEAVED_NHD] = FOLIO_LAYOUT_NHD,
        [FOLIO_LAYOUT_INTERLEAVED_HND] = FOLIO_LAYOUT_HND,
        [FOLIO_LAYOUT_STRIDED] = FOLIO_LAYOUT_STRIDED}; /* the others: NATIVE */
    s->v_in_k = true;
    s->k_head_size = k_head_size;
    s->v_head_size = v_head_size;
    s->layout = without_v[s->layout];
}

void check_settle(check_attention *c)
{
    kit_spec *s = &c->spec;
    bool bytes = folio_dtype_size(s->kv_dtype ? s->kv_dtype : s->dtype) == 1;
    bool interleaved =
        s->layout == FOLIO_LAYOUT_INTERLEAVED_NHD || s->layout == FOLIO_LAYOUT_INTERLEAVED_HND;
    if (interleaved && s->v_head_size != 0 && s->v_head_size != s->k_head_size)
        s->layout = FOLIO_LAYOUT_HND;
    if (s->layout == FOLIO_LAYOUT_XPACKED && bytes && s->k_head_size % 16 != 0)
        s->layout = FOLIO_LAYOUT_XPACKED_1;
    if (s->table == KIT_TABLE_SLOTS) s->block_size = 1;
    if (s->v_head_size != 0 && s->v_head_size != s->k_head_size) s->in_place = false;
}

static folio_layout any_layout(const check_env *env, check_draw *d)
{
    return env->info.layouts[check_int(d, 0, env->info.num_layouts - 1)];
}

void check_base(const check_env *env, check_draw *d, check_attention *c)
{
    static const int32_t kv_heads[] = {1, 2, 2, 3}, heads_per_kv[] = {1, 2, 4, 3};
    static const int32_t sizes[] = {16, 32, 32, 64, 24}, blocks[] = {16, 16, 16, 32, 8, 5};
    static const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_F32, FOLIO_F16, FOLIO_BF16};
    kit_spec *s = &c->spec;
    s->seed = (uint64_t)check_int(d, 1, INT64_MAX - 1);
    s->num_kv_heads = CHECK_PICK(d, kv_heads);
    s->num_heads = s->num_kv_heads * CHECK_PICK(d, heads_per_kv);
    s->k_head_size = CHECK_PICK(d, sizes);
    s->dtype = CHECK_PICK(d, dtypes);
    s->block_size = CHECK_PICK(d, blocks);
    s->layout = check_chance(d, 2) ? FOLIO_LAYOUT_NATIVE : any_layout(env, d);
    s->strided = check_chance(d, 4);
    s->no_lse = check_chance(d, 8);
    s->table = (kit_table)check_int(d, KIT_TABLE_SEQS, KIT_TABLE_CSR_LAST);
    s->amplitude = check_chance(d, 3) ? 4.0 : 1.0;
    s->num_layers = check_chance(d, 3) ? 2 : 1;
    s->layer = s->num_layers - 1;
}

/* A sequence with an encoder: new this step, or stored before. */
static void add_encoder(check_draw *d, check_attention *c, int64_t query_len, int64_t context_len)
{
    kit_seq *s = check_add(c, query_len, context_len);
    s->encoder_len = CHECK_PICK(d, edges);
    s->encoder_new_len = check_chance(d, 2) ? s->encoder_len : 0;
}

static void encoder_seqs(check_draw *d, check_attention *c)
{
    add_encoder(d, c, 1, CHECK_PICK(d, contexts));
    add_encoder(d, c, check_int(d, 2, 9), 0);
    check_add(c, check_int(d, 1, 3), 0); /* no encoder at all */
    add_encoder(d, c, check_int(d, 1, 4), CHECK_PICK(d, contexts));
    c->seqs[1].encoder_new_len = c->seqs[1].encoder_len; /* one at least is new */
    if (check_chance(d, 3)) add_padding(c, 2);
}

/* Prompts for types that see this step's tokens alone. */
static void prompt_seqs(check_draw *d, check_attention *c)
{
    int64_t n = check_int(d, 2, 4);
    for (int64_t i = 0; i < n; i++) add_prompt(d, c);
}

/* A base case of one of the four types, with sequences to match. */
static void base_of_type(const check_env *env, check_draw *d, folio_attention_type type,
                         check_attention *c)
{
    check_base(env, d, c);
    c->type = type;
    if (type == FOLIO_ATTENTION_DECODER) check_mixed(d, c);
    else if (type == FOLIO_ATTENTION_ENCODER_ONLY) prompt_seqs(d, c);
    else encoder_seqs(d, c);
}

/* No cache, and so prompts only. */
static void no_context(check_attention *c)
{
    c->spec.no_cache = true;
    c->spec.table = KIT_TABLE_SEQS;
    for (int64_t i = 0; i < c->num_seqs; i++) {
        kit_seq *s = &c->seqs[i];
        if (s->seq_len > 0) s->seq_len = s->query_len = s->query_len ? s->query_len : 1;
        s->encoder_new_len = s->encoder_len;
    }
}

/* Mostly decoders; every third case one of the encoder types. */
static folio_attention_type self_type(int64_t index)
{
    static const folio_attention_type types[] = {
        FOLIO_ATTENTION_DECODER, FOLIO_ATTENTION_DECODER, FOLIO_ATTENTION_ENCODER_ONLY,
        FOLIO_ATTENTION_DECODER, FOLIO_ATTENTION_DECODER, FOLIO_ATTENTION_ENCODER};
    return types[index % COUNT(types)];
}

/* ---- Every kernel */

/* q dtype x kv dtype x layout, with a head size each, over a mixed batch. */
void make_kernels(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const int32_t sizes[] = {32, 64, 128}; /* as kernels are specialised for */
    int64_t layouts = env->info.num_layouts;
    check_base(env, d, c);
    c->spec.layout = env->info.layouts[index % layouts];
    c->spec.kv_dtype = kv_dtypes[index / layouts % COUNT(kv_dtypes)];
    c->spec.dtype = query_dtypes[index / layouts / COUNT(kv_dtypes) % COUNT(query_dtypes)];
    c->spec.k_head_size = sizes[(index + index / layouts) % COUNT(sizes)];
    c->spec.block_size = 16;
    c->spec.num_heads = c->spec.num_kv_heads * 2;
    check_mixed(d, c);
}

static void random_window(check_draw *d, kit_spec *s);
static void release_blocks(check_attention *c);

/* One of several things that change which keys rows see, or how scores are distributed. */
static void add_one_thing(check_draw *d, int64_t index, check_attention *c)
{
    kit_spec *s = &c->spec;
    switch (index % 6) {
    case 1: s->sinks = true; break;
    case 2: c->seqs[0].causality = FOLIO_CAUSAL_NO; break;
    case 3: s->nan_from = check_int(d, 1, c->seqs[0].seq_len - 1); break;
    case 4: s->amplitude = 40.0; break;
    case 5:
        random_window(d, s);
        if (check_chance(d, 2)) c->seqs[0].causality = FOLIO_CAUSAL_NO;
        else release_blocks(c);
        break;
    }
}

/*
 * Prompts and chunks of several tiles of the largest kernels, in their favourite shapes: lengths at the edges of pages and
 * tiles, head group that fill no tile, and one thing more each. With --full, some have so many kv heads that a GPU's
 * blocks compute several tiles, none of which is cut.
 */
void make_tiles(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const int32_t heads_per_kv[] = {4, 1, 3, 6, 20, 8, 2};
    static const int32_t blocks[] = {16, 32, 16, 48};
    static const int32_t sizes[][2] = {{128, 128}, {64, 64}, {192, 128}, {256, 256}, {192, 192}};
    static const int64_t lens[] = {17, 31,  32,  33,  63,  64,  65,  80,  96,
                                   97, 116, 127, 128, 129, 143, 145, 191, 193};
    static const int64_t before[] = {0, 0, 1, 12, 63, 79, 100, 127, 128, 129, 180, 300};
    kit_spec *s = &c->spec;
    check_base(env, d, c);
    s->num_kv_heads = (int32_t)check_int(d, 1, 2);
    s->num_heads = s->num_kv_heads * heads_per_kv[index % COUNT(heads_per_kv)];
    if (index % 11 == 10 && index > 40) s->num_heads = s->num_kv_heads = 66;
    s->k_head_size = sizes[index % COUNT(sizes)][0];
    s->v_head_size = sizes[index % COUNT(sizes)][1];
    s->dtype = query_dtypes[1 + index % 2];
    s->block_size = CHECK_PICK(d, blocks);
    s->layout = FOLIO_LAYOUT_NATIVE;
    s->wide_gaps = true;
    s->graph = check_chance(d, 4);
    int64_t most = s->num_heads > 12 ? 1 : 2;
    if (s->num_kv_heads == 66) check_add(c, 193, 0), most = 0;
    for (int64_t i = 0; i < most; i++) check_add(c, CHECK_PICK(d, lens), CHECK_PICK(d, before));
    if (check_chance(d, 3)) add_decode(d, c);
    add_one_thing(d, index, c);
}

/*
 * One sequence with few new tokens, which a device may compute with clusters of blocks: parts of it may have no keys. Many
 * heads of one kv head may have several clusters.
 */
void make_alone(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const int32_t heads_per_kv[] = {4, 1, 3, 8, 16, 6, 2, 32};
    static const int32_t blocks[] = {16, 32, 16, 48};
    static const int64_t before[] = {1, 15, 16, 17, 100, 255, 256, 257, 600, 1023, 2000, 3100};
    kit_spec *s = &c->spec;
    check_base(env, d, c);
    s->num_kv_heads = (int32_t)check_int(d, 1, 3);
    if (heads_per_kv[index % COUNT(heads_per_kv)] == 32) s->num_kv_heads = 1;
    s->num_heads = s->num_kv_heads * heads_per_kv[index % COUNT(heads_per_kv)];
    s->k_head_size = 128;
    s->dtype = query_dtypes[1 + index % 2];
    s->block_size = CHECK_PICK(d, blocks);
    s->layout = FOLIO_LAYOUT_NATIVE;
    check_add(c, check_int(d, 1, 4), CHECK_PICK(d, before));
    add_one_thing(d, index, c);
}

/*
 * q dtype x dtype of new k and v x where keys are: for each type of attention, read as given without a cache, and
 * for those with a cache appended to or stored in each type of it. Every other case is at odd addresses, and in one
 * of four v is of another type than k.
 */
void make_pairings(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const folio_attention_type cached[] = {FOLIO_ATTENTION_DECODER,
                                                  FOLIO_ATTENTION_ENCODER_DECODER};
    enum { CACHES = COUNT(kv_dtypes), PLACES = FOLIO_NUM_ATTENTION_TYPES + 4 * CACHES };
    int64_t pair = index % 9, place = index / 9 % PLACES,
            stored = place - FOLIO_NUM_ATTENTION_TYPES;
    bool has_cache = stored >= 0;
    base_of_type(env, d, has_cache ? cached[stored / CACHES % 2] : (folio_attention_type)place, c);
    c->spec.dtype = query_dtypes[pair % 3];
    c->spec.k_dtype = query_dtypes[pair / 3];
    c->spec.v_dtype = query_dtypes[(pair / 3 + check_chance(d, 4)) % 3];
    c->spec.offset = (index + index / (9 * PLACES)) % 2;
    if (has_cache) {
        c->spec.kv_dtype = kv_dtypes[stored % CACHES];
        c->spec.append = stored < 2 * CACHES;
    } else no_context(c);
}

/* An option that not all kernels have. */
static void add_one_option(int64_t index, kit_spec *s)
{
    switch (index % 4) {
    case 0: s->alibi = true; break;
    case 1: s->soft_cap = 20.0f; break;
    case 2: s->bias = KIT_BIAS_SEQ | KIT_BIAS_KEY; break;
    case 3: s->head_scales = true; break;
    }
}

/* A window behind which a sequence's keys are NaN. */
static void add_nan_window(check_draw *d, const kit_seq *seq, kit_spec *s)
{
    random_window(d, s);
    if (s->window_left >= 0) s->nan_before = seq->seq_len - seq->query_len - s->window_left;
}

/*
 * vLLM 0.6's own caches: both of them x each type, with a block size and a head size each. Prompts, chunks and decodes, and one
 * thing more each.
 */
void make_xpacked(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const int32_t sizes[] = {128, 64, 128, 256, 80, 128, 128, 120, 264};
    static const int32_t blocks[] = {16, 8, 32, 24}, heads_per_kv[] = {4, 1, 8, 5};
    static const folio_dtype types[] = {0, 0, FOLIO_FP8_E4M3, FOLIO_FP8_E5M2, FOLIO_INT8};
    static const int64_t before[] = {0, 1, 7, 8, 13, 16, 63, 64, 65, 140, 300};
    kit_spec *s = &c->spec;
    check_base(env, d, c);
    s->layout = index % 2 ? FOLIO_LAYOUT_XPACKED_1 : FOLIO_LAYOUT_XPACKED;
    s->dtype = query_dtypes[1 + index / 2 % 2];
    s->kv_dtype = types[index / 4 % COUNT(types)];
    s->block_size = blocks[(index + index / 4) % COUNT(blocks)];
    s->k_head_size = sizes[(index + index / COUNT(sizes)) % COUNT(sizes)];
    s->num_kv_heads = (int32_t)check_int(d, 1, 2);
    s->num_heads = s->num_kv_heads * CHECK_PICK(d, heads_per_kv);
    s->wide_gaps = true;
    s->append = check_chance(d, 4);
    if (check_chance(d, 4)) add_one_option(index / 2, s);
    check_add(c, check_int(d, 2, 90), CHECK_PICK(d, before));
    check_add(c, 1, CHECK_PICK(d, before));
    check_add(c, check_int(d, 1, 3), CHECK_PICK(d, before));
    if (check_chance(d, 3)) add_nan_window(d, &c->seqs[1], s);
    else if (check_chance(d, 2)) add_one_thing(d, index, c);
}

/* f32 with few rows, and so little noise in the budget: large scores, half of them close to their soft cap. */
static void make_f32_rows(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const int64_t lengths[] = {1, 2, 4, 16, 63, 99, 300, 1000, 3000};
    static const int32_t sizes[] = {8, 16, 32, 64, 128, 256};
    static const double amplitudes[] = {1.0, 4.0, 20.0, 100.0};
    check_base(env, d, c);
    bool capped = index % 2 != 0;
    c->spec.dtype = FOLIO_F32;
    c->spec.num_kv_heads = 1;
    c->spec.num_heads = capped ? 4 : 1;
    c->spec.k_head_size = CHECK_PICK(d, sizes);
    c->spec.v_head_size = CHECK_PICK(d, sizes);
    c->spec.amplitude = capped ? 100.0 : CHECK_PICK(d, amplitudes);
    c->spec.soft_cap = capped ? 50.0f : 0.0f;
    c->spec.alibi = check_chance(d, 4);
    check_add(c, capped ? 4 : 1, CHECK_PICK(d, lengths));
}

/* A device computes them in double precision, and so within an ulp of the reference. */
static void check_ulp(const check_env *env, const check_attention *c, check_outcome *out)
{
    kit_result got = {0}, ref = {0};
    kit_case *h = kit_open(env->ctx, &c->spec, c->seqs, c->num_seqs);
    bool ok = h && kit_forward(h, NULL, c->type, c->seqs, c->num_seqs, &got) &&
              kit_judge(h, env->reference, c->type, c->seqs, c->num_seqs, &ref);
    if (!ok) check_fail(out, "%s", kit_error());
    int64_t count = ok ? got.rows * got.heads * got.head_size : 0;
    double largest = 0;
    for (int64_t i = 0; i < count; i++) largest = fmax(largest, fabs(ref.out[i]));
    double ulp = kit_ulp(FOLIO_F32, largest);
    for (int64_t i = 0; ok && i < count; i++)
        if (!(fabs(got.out[i] - ref.out[i]) <= ulp))
            ok = check_fail(out, "number %lld is %.9g, reference %.9g: off by %.3g, an ulp is %.3g",
                            (long long)i, got.out[i], ref.out[i], fabs(got.out[i] - ref.out[i]),
                            ulp);
    kit_result_free(&got);
    kit_result_free(&ref);
    kit_close(h);
}

void run_f32_rows(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    check_attention c = {0};
    make_f32_rows(env, d, index, &c);
    check_settle(&c);
    check_run_attention(env, &c, out);
    if (out->ok && strcmp(env->info.name, "cuda") == 0) check_ulp(env, &c, out);
}

static void random_window(check_draw *d, kit_spec *s)
{
    static const int64_t widths[] = {0, 1, 3, 14, 15, 16, 40, 100, -1};
    s->windowed = 1;
    s->window_left = CHECK_PICK(d, widths);
    s->window_right = CHECK_PICK(d, widths);
}

static void random_bias(check_draw *d, kit_spec *s)
{
    s->bias = (uint32_t)check_int(d, 0, KIT_BIAS_ALL);
    s->bias_shared = true;
    s->bias_dtype = CHECK_PICK(d, query_dtypes);
    s->bias_hidden = check_chance(d, 2) ? 0.2 : 0.0;
}

/* Some or all dims, from any on. */
void check_rotary(check_draw *d, kit_spec *s)
{
    int32_t k = s->k_head_size, some[] = {k, k, k / 2, 2, k - 2};
    s->rotary = CHECK_PICK(d, some);
    s->rotary_first = check_chance(d, 2) ? k - s->rotary : (int32_t)check_int(d, 0, k - s->rotary);
    s->rotary_pairing = check_chance(d, 2) ? FOLIO_ROTARY_PAIRS : FOLIO_ROTARY_HALVES;
    s->positions = check_chance(d, 3);
}

/* Everything at once, at random: what no single feature's cases would meet. */
void make_combinations(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const int32_t sizes[] = {8, 16, 24, 40, 64, 72, 128};
    folio_attention_type type = (folio_attention_type)(index % FOLIO_NUM_ATTENTION_TYPES);
    if (check_chance(d, 2)) type = FOLIO_ATTENTION_DECODER;
    base_of_type(env, d, type, c);
    kit_spec *s = &c->spec;
    s->kv_dtype = CHECK_PICK(d, kv_dtypes);
    s->layout = any_layout(env, d);
    s->k_head_size = CHECK_PICK(d, sizes);
    s->v_head_size = check_chance(d, 2) ? CHECK_PICK(d, sizes) : 0;
    if (type != FOLIO_ATTENTION_ENCODER_DECODER) {
        if (check_chance(d, 3)) random_window(d, s);
        s->alibi = check_chance(d, 3);
    }
    if (check_chance(d, 3)) s->soft_cap = 5.0f;
    s->sinks = check_chance(d, 3);
    if (check_chance(d, 3)) random_bias(d, s);
    if (check_chance(d, 3)) s->scale = 0.3f;
    s->k_scale = check_chance(d, 2) ? 0.37f : 0.0f;
    s->v_scale = check_chance(d, 2) ? 1.7f : 0.0f;
    s->head_scales = check_chance(d, 4);
    s->graph = check_chance(d, 4);
    if (check_chance(d, 3) && type != FOLIO_ATTENTION_ENCODER_DECODER) check_rotary(d, s);
    int64_t way = check_int(d, 0, 3);
    s->append = way == 0 && type == FOLIO_ATTENTION_DECODER;
    s->no_write = way == 1;
    for (int64_t i = 0; i < c->num_seqs; i++)
        if (check_chance(d, 5)) c->seqs[i].causality = FOLIO_CAUSAL_NO;
}

/* ---- Kinds of attention */

void make_mixed_batch(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    (void)index;
    check_base(env, d, c);
    check_mixed(d, c);
    while (c->num_seqs < 8) add_decode(d, c);
}

void make_prefix_prefill(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    (void)index;
    check_base(env, d, c);
    for (int i = 0; i < 3; i++) check_add(c, CHECK_PICK(d, edges), CHECK_PICK(d, contexts));
}

/* Options of a long prefix, one each: few cases each, for all that a kernel does differently. */
static void long_option(check_draw *d, int64_t option, check_attention *c)
{
    kit_spec *s = &c->spec;
    switch (option) {
    case 0: s->windowed = 1, s->window_left = 700, s->window_right = -1; break;
    case 1: s->sinks = true; break;
    case 2: random_bias(d, s), s->bias |= KIT_BIAS_KEY, s->sinks = true; break;
    case 3: s->alibi = true; break;
    case 4: s->kv_dtype = FOLIO_FP8_E4M3, s->k_scale = 0.25f, s->v_scale = 1.7f; break;
    case 5: s->kv_dtype = FOLIO_INT8; break;
    case 6: s->append = true, s->sinks = true; break;
    case 7: s->graph = true; break;
    case 8: s->batch_invariant = true, s->sinks = true; break;
    case 9: s->amplitude = 80.0; break; /* maxima of parts lie far apart */
    case 10: c->seqs[0].causality = FOLIO_CAUSAL_NO; break;
    default: break; /* none */
    }
}

/* Many rows over long keys in a small batch: a device cuts their keys, and merges parts. */
void make_long_prefix(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const int32_t sizes[][2] = {{128, 128}, {192, 128}, {64, 64},  {192, 192},
                                       {256, 256}, {40, 40},   {128, 128}};
    static const int32_t rows[][2] = {{4, 8}, {20, 1}, {4, 16}, {32, 1}, {8, 3},  {32, 3},
                                      {3, 7}, {17, 2}, {8, 16}, {1, 33}, {6, 11}, {2, 70}};
    static const int64_t keys[] = {1000, 600, 1537, 513, 1281, 3001};
    check_base(env, d, c);
    kit_spec *s = &c->spec;
    const int32_t *shape = rows[index % COUNT(rows)];
    s->num_kv_heads = index % 4 == 3 ? 2 : 1;
    s->num_heads = s->num_kv_heads * shape[0];
    s->k_head_size = sizes[index % COUNT(sizes)][0];
    s->v_head_size = sizes[index % COUNT(sizes)][1];
    s->dtype = index % 3 ? FOLIO_BF16 : FOLIO_F16;
    check_add(c, shape[1], CHECK_PICK(d, keys));
    if (check_chance(d, 2)) check_add(c, check_int(d, 1, 6), CHECK_PICK(d, keys));
    if (check_chance(d, 3)) add_padding(c, 1);
    long_option(d, index % 13, c);
    if (s->batch_invariant) c->seqs[0].seq_len += 2048;
}

void make_decoder(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const int64_t shapes[][2] = {{1, 0},  {2, 0},  {15, 0},  {16, 0}, {17, 0},   {33, 0},
                                        {65, 0}, {1, 1},  {1, 15},  {1, 16}, {1, 17},   {1, 64},
                                        {3, 31}, {4, 64}, {16, 16}, {0, 5},  {100, 30}, {1, 511}};
    check_base(env, d, c);
    const int64_t *shape = shapes[index % COUNT(shapes)];
    check_add(c, shape[0], shape[1]);
    if (index % 2) add_decode(d, c);
    if (check_chance(d, 4)) c->spec.no_write = true;
    else if (check_chance(d, 4)) c->seqs[0].slots_given = true;
    else if (check_chance(d, 4)) c->seqs[0].slots_ignored = true;
}

void make_encoder(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    (void)index;
    base_of_type(env, d, FOLIO_ATTENTION_ENCODER, c);
}

void make_encoder_only(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    (void)index;
    base_of_type(env, d, FOLIO_ATTENTION_ENCODER_ONLY, c);
}

void make_cross(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    base_of_type(env, d, FOLIO_ATTENTION_ENCODER_DECODER, c);
    if (index % 4 == 1) /* decode steps: nothing new */
        for (int64_t i = 0; i < c->num_seqs; i++) c->seqs[i].encoder_new_len = 0;
    if (index % 4 == 2) c->spec.no_write = true;
    if (index % 4 == 3) c->spec.kv_dtype = CHECK_PICK(d, kv_dtypes);
}

void make_profiling(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    base_of_type(env, d, (folio_attention_type)(index % FOLIO_NUM_ATTENTION_TYPES), c);
    no_context(c);
    c->spec.table = index % 2 ? KIT_TABLE_2D : KIT_TABLE_SEQS;
}

void make_gqa(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const int32_t heads[][2] = {{1, 1}, {8, 8},  {8, 1}, {8, 2},  {6, 3},  {12, 4},
                                       {5, 1}, {16, 2}, {7, 7}, {14, 2}, {32, 1}, {9, 3}};
    check_base(env, d, c);
    c->spec.num_heads = heads[index % COUNT(heads)][0];
    c->spec.num_kv_heads = heads[index % COUNT(heads)][1];
    c->spec.k_head_size = 16;
    check_mixed(d, c);
}

/* ---- Scores */

void make_alibi(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    base_of_type(env, d, self_type(index), c);
    c->spec.alibi = true;
}

/* Window blocks that no row sees any more are gone from the table. */
static void release_blocks(check_attention *c)
{
    const kit_spec *s = &c->spec;
    for (int64_t i = 0; i < c->num_seqs && s->window_left >= 0; i++) {
        int64_t first_seen = c->seqs[i].seq_len - c->seqs[i].query_len - s->window_left;
        if (first_seen > 0) c->seqs[i].released = first_seen / s->block_size;
        if (c->seqs[i].query_len == 0) c->seqs[i].released = 0;
    }
}

void make_sliding_window(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    base_of_type(env, d, self_type(index), c);
    random_window(d, &c->spec);
    if (c->type == FOLIO_ATTENTION_DECODER && index % 4 == 0) release_blocks(c);
    if (c->type == FOLIO_ATTENTION_DECODER && index % 4 == 1)
        c->seqs[0].causality = FOLIO_CAUSAL_NO;
}

void make_alibi_window(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    make_sliding_window(env, d, index, c);
    c->spec.alibi = true;
}

void make_soft_cap(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const float caps[] = {0.5f, 1.0f, 5.0f, 30.0f, 50.0f};
    base_of_type(env, d, (folio_attention_type)(index % FOLIO_NUM_ATTENTION_TYPES), c);
    c->spec.soft_cap = caps[index % COUNT(caps)];
    c->spec.amplitude = 4.0;
}

void make_sinks(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    base_of_type(env, d, (folio_attention_type)(index % FOLIO_NUM_ATTENTION_TYPES), c);
    c->spec.sinks = true;
    if (index % 2) { /* rows that see no key keep the sink */
        random_bias(d, &c->spec);
        c->spec.bias_hidden = 0.9;
    }
}

void make_rotary(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const int32_t sizes[] = {8, 16, 64, 128, 192};
    base_of_type(env, d, self_type(index), c);
    kit_spec *s = &c->spec;
    s->k_head_size = CHECK_PICK(d, sizes);
    s->v_head_size = index % 4 == 3 ? 64 : 0;
    if (index % 2) s->kv_dtype = CHECK_PICK(d, kv_dtypes);
    if (index % 5 == 1) s->k_scale = 0.37f;
    s->append = index % 3 == 1 && c->type == FOLIO_ATTENTION_DECODER;
    s->layout = any_layout(env, d);
    if (index % 7 == 2) random_window(d, s);
    check_rotary(d, s);
    if (index % 8 == 6) {
        check_latent(s, 72, 40);
        s->rotary = index % 16 == 6 ? 32 : 30;
        s->rotary_first = 72 - s->rotary;
    }
    if (index % 7 == 5) no_context(c);
    for (int64_t i = 0; i < c->num_seqs; i++) /* the batch's own positions */
        if (check_chance(d, 3) && c->seqs[i].seq_len > 0) {
            kit_seq *q = &c->seqs[i];
            q->positions_given = 1;
            q->first_key_pos = check_int(d, 0, 300);
            q->first_query_pos = q->first_key_pos + q->seq_len - q->query_len;
        }
}

void make_bias(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    base_of_type(env, d, (folio_attention_type)((index + index / 16) % FOLIO_NUM_ATTENTION_TYPES),
                 c);
    random_bias(d, &c->spec);
    c->spec.bias = (uint32_t)(index % 16);
    c->spec.strided = index % 3 == 0;
}

/* -inf hides a key whatever K and V hold: here NaN. */
void make_bias_nan(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    base_of_type(env, d, (folio_attention_type)(index % FOLIO_NUM_ATTENTION_TYPES), c);
    c->spec.bias = KIT_BIAS_SEQ | KIT_BIAS_KEY;
    c->spec.bias_hidden = 0.3;
    c->spec.hidden_nan = true;
    c->spec.kv_dtype = index % 3 ? kv_dtypes[index % COUNT(kv_dtypes)] : 0;
    if (index % 3) return;
    /* rows that fill no whole step of the tensor cores: the next key must not get into this one's product */
    c->spec.dtype = query_dtypes[1 + index / 3 % 2];
    c->spec.k_head_size = (int32_t)(8 + 16 * (index / 3 % 5));
    c->spec.layout = FOLIO_LAYOUT_NATIVE;
}

/* ---- Numbers, sizes, layouts */

void make_f16_bf16(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    base_of_type(env, d, index % 4 ? FOLIO_ATTENTION_DECODER : FOLIO_ATTENTION_ENCODER_DECODER, c);
    c->spec.dtype = query_dtypes[index % 3];
    c->spec.kv_dtype = query_dtypes[index / 3 % 3];
}

void make_fp8_kv(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    /* 0.001 saturates e4m3: its largest number is 448 */
    static const float scales[] = {0.0f, 1.0f, 0.25f, 0.001f, 3.7f};
    base_of_type(env, d, index % 4 ? FOLIO_ATTENTION_DECODER : FOLIO_ATTENTION_ENCODER_DECODER, c);
    c->spec.kv_dtype = index % 2 ? FOLIO_FP8_E5M2 : FOLIO_FP8_E4M3;
    c->spec.k_scale = scales[index / 2 % COUNT(scales)];
    c->spec.v_scale = scales[(index / 2 + 2) % COUNT(scales)];
}

/* Each kv head has scales of its own: long and short sequences, in the ways keys come. */
void make_head_scales(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    make_fp8_kv(env, d, index, c);
    c->spec.head_scales = true;
    c->spec.dtype = query_dtypes[index % 3];
    c->spec.num_kv_heads = (int32_t)(2 + index % 2);
    c->spec.num_heads = c->spec.num_kv_heads * (int32_t)check_int(d, 1, 3);
    c->spec.append = c->type == FOLIO_ATTENTION_DECODER && index % 5 == 3;
    if (index % 4 == 1) c->spec.k_head_size = 128;
}

void make_int8_kv(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    base_of_type(env, d, index % 4 ? FOLIO_ATTENTION_DECODER : FOLIO_ATTENTION_ENCODER_DECODER, c);
    c->spec.kv_dtype = FOLIO_INT8;
    c->spec.dtype = query_dtypes[index % 3];
}

/* DeepSeek's shape with few and with many heads, the form of its prompts, small and odd ones; an option each. */
void make_latent(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const int32_t shapes[][4] = {{16, 1, 576, 512}, {128, 1, 576, 512}, {16, 1, 192, 128},
                                        {6, 2, 40, 24},    {3, 3, 72, 72},     {20, 1, 64, 40}};
    const int32_t *shape = shapes[(index + index / 12) % COUNT(shapes)];
    int64_t option = index % 12;
    folio_attention_type type = option == 9
                                    ? (folio_attention_type)(index % FOLIO_NUM_ATTENTION_TYPES)
                                    : FOLIO_ATTENTION_DECODER;
    check_base(env, d, c);
    kit_spec *s = &c->spec;
    check_latent(s, shape[2], shape[3]);
    s->num_heads = shape[0];
    s->num_kv_heads = shape[1];
    c->type = type;
    int64_t most = shape[0] == 128 ? 2 : shape[2] == 576 ? 9 : 18; /* rows; the judges are slow */
    if (type == FOLIO_ATTENTION_DECODER) {
        check_add(c, check_int(d, 1, most), 0);
        check_add(c, 1, shape[0] == 128 ? 33 : CHECK_PICK(d, contexts));
        check_add(c, check_int(d, 1, most), 17);
    } else if (type == FOLIO_ATTENTION_ENCODER_ONLY) check_add(c, 17, 0);
    else add_encoder(d, c, 3, 15), add_encoder(d, c, 2, 0);
    c->seqs[0].encoder_new_len = c->seqs[0].encoder_len;
    switch (option) {
    case 1: random_window(d, s), release_blocks(c); break;
    case 2: s->sinks = true; break;
    case 3: s->soft_cap = 5.0f, s->amplitude = 4.0; break;
    case 4:
        s->kv_dtype = index / 24 % 2 ? FOLIO_FP8_E5M2 : FOLIO_FP8_E4M3;
        s->k_scale = 0.3f, s->head_scales = index / 12 % 2;
        break;
    case 5: s->kv_dtype = FOLIO_INT8; break;
    case 6: s->kv_dtype = CHECK_PICK(d, kv_dtypes), s->append = true; break;
    case 7: s->alibi = true, s->kv_dtype = FOLIO_BF16, s->dtype = FOLIO_BF16; break;
    case 8:
        s->bias = KIT_BIAS_SEQ | KIT_BIAS_KEY, s->bias_hidden = 0.3, s->hidden_nan = true;
        break;
    case 10: no_context(c); break;
    case 11: s->graph = true, s->no_write = true; break;
    default: s->kv_dtype = CHECK_PICK(d, query_dtypes); break;
    }
}

/* Usual and odd sizes first, then every multiple of 8. */
void make_head_sizes(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const int32_t sizes[][2] = {{8, 8},     {16, 16},   {24, 24},  {40, 40},   {64, 64},
                                       {72, 72},   {80, 80},   {96, 96},  {112, 112}, {120, 120},
                                       {128, 128}, {192, 128}, {64, 128}, {24, 8},    {8, 72},
                                       {256, 256}, {512, 512}, {504, 16}, {576, 576}};
    check_base(env, d, c);
    c->spec.num_kv_heads = 1;
    c->spec.num_heads = (int32_t)check_int(d, 1, 3);
    if (index < COUNT(sizes)) {
        c->spec.k_head_size = sizes[index][0];
        c->spec.v_head_size = sizes[index][1];
    } else {
        int32_t largest = env->info.max_head_size / 8;
        c->spec.k_head_size = (int32_t)(8 * (1 + (index - COUNT(sizes)) % largest));
        c->spec.v_head_size = (int32_t)(8 * check_int(d, 1, largest));
    }
    check_add(c, check_int(d, 5, 20), 0);
    check_add(c, 1, CHECK_PICK(d, contexts));
}

void make_block_sizes(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const int32_t blocks[] = {1,  2,  3,  5,   7,   8,   15,   16,   17,
                                     32, 48, 64, 100, 128, 256, 1000, 1024, 4096};
    check_base(env, d, c);
    c->spec.block_size = index < COUNT(blocks) ? blocks[index] : (int32_t)check_int(d, 1, 300);
    if (c->spec.block_size >= 256) c->spec.k_head_size = 16;
    int64_t edge = c->spec.block_size < 200 ? c->spec.block_size : 64;
    check_mixed(d, c);
    check_add(c, 1, edge - 1);
    check_add(c, 2, edge);
}

void make_layouts(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    base_of_type(env, d, index % 5 ? FOLIO_ATTENTION_DECODER : FOLIO_ATTENTION_ENCODER_DECODER, c);
    c->spec.layout = env->info.layouts[index % env->info.num_layouts];
    c->spec.kv_dtype = CHECK_PICK(d, kv_dtypes);
    c->spec.num_layers = 3;
    c->spec.layer = 1;
}

void make_page_tables(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    base_of_type(env, d, index % 7 == 6 ? FOLIO_ATTENTION_ENCODER_DECODER : FOLIO_ATTENTION_DECODER,
                 c);
    c->spec.table = (kit_table)(index % (KIT_TABLE_SLOTS + 1));
    for (int64_t i = 0; i < c->num_seqs; i++) c->seqs[i].slots_given = index % 2 != 0;
}

/* ---- Ways to run */

void make_positions(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    check_base(env, d, c);
    check_mixed(d, c);
    for (int64_t i = 0; i < c->num_seqs; i++) {
        kit_seq *s = &c->seqs[i];
        if (check_chance(d, 3)) s->causality = FOLIO_CAUSAL_NO;
        if (i > 0 && check_chance(d, 3)) continue;
        s->positions_given = 1;
        s->first_key_pos = check_int(d, -20, 1000);
        s->first_query_pos = s->first_key_pos + s->seq_len - s->query_len + check_int(d, -40, 40);
    }
    c->spec.alibi = index % 2 != 0;
    if (index % 3 == 0) random_window(d, &c->spec);
}

/* More queries than keys, before them, among them and after them, alone and beside others; an option each. */
void make_more_queries(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    kit_spec *s = &c->spec;
    check_base(env, d, c);
    if (index % 3 == 1) s->k_head_size = 128, s->dtype = query_dtypes[1 + index % 2];
    if (index % 4 == 1) check_mixed(d, c);
    for (int64_t i = 0; i < 1 + index % 3; i++) {
        kit_seq *q = check_add(c, 0, CHECK_PICK(d, edges));
        q->query_len = q->seq_len + check_int(d, 1, index % 8 == 2 ? 150 : 20);
        q->positions_given = 1;
        q->first_key_pos = check_int(d, 0, 50);
        q->first_query_pos = check_int(d, 0, q->first_key_pos + 2 * q->seq_len);
        q->slots_given = check_chance(d, 4);
        if (check_chance(d, 4)) q->causality = FOLIO_CAUSAL_NO;
    }
    switch (index % 12) {
    case 1: random_window(d, s); break;
    case 2: s->alibi = s->sinks = true; break;
    case 3: s->soft_cap = 5.0f, s->amplitude = 4.0; break;
    case 4: s->kv_dtype = FOLIO_FP8_E4M3, s->head_scales = true; break;
    case 5: s->kv_dtype = CHECK_PICK(d, kv_dtypes), s->graph = true; break;
    case 6: check_rotary(d, s); break;
    case 7: s->num_heads = 16, s->num_kv_heads = 1, check_latent(s, 72, 40); break;
    case 8: random_bias(d, s); break;
    case 9:
        s->bias = KIT_BIAS_SEQ | KIT_BIAS_KEY, s->bias_hidden = 0.3, s->hidden_nan = true;
        break;
    case 10: s->nan_from = 9; break;
    case 11: s->sinks = true, random_window(d, s); break;
    default: break;
    }
}

void make_kv_append(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    check_base(env, d, c);
    check_mixed(d, c);
    c->spec.append = true;
    if (index % 3 == 0) c->spec.kv_dtype = CHECK_PICK(d, kv_dtypes);
    if (index % 3 == 1) random_window(d, &c->spec);
}

void make_graph(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    base_of_type(env, d, (folio_attention_type)(index % FOLIO_NUM_ATTENTION_TYPES), c);
    c->spec.graph = true;
    c->spec.sinks = index % 8 >= 4;
    if (c->num_seqs < 6) add_padding(c, 1);
    if (c->num_seqs < 6) add_padding(c, 1);
}

void make_split_kv(const check_env *env, check_draw *d, int64_t index, check_attention *c)
{
    static const int64_t queries[] = {1, 1, 2, 5, 17};
    int64_t split = check_split_len(env);
    int64_t lengths[] = {split - 1, split,         split + 1,     2 * split - 1,
                         2 * split, 2 * split + 1, 3 * split + 7, split / 2};
    check_base(env, d, c);
    c->spec.num_kv_heads = (int32_t)(1 + index % 2);
    c->spec.num_heads = 2 * c->spec.num_kv_heads;
    c->spec.k_head_size = 16;
    for (int64_t i = 0; i < 2; i++) {
        int64_t query = queries[(index + i) % COUNT(queries)];
        check_add(c, query, lengths[(index + 3 * i) % COUNT(lengths)] - query);
    }
    if (index % 4 == 3) random_window(d, &c->spec);
    if (index % 4 == 2) c->spec.sinks = true;
    if (index % 4 == 1) c->spec.amplitude = 80.0; /* maxima of splits lie far apart */
}
