/* test_vllm06.c: the backends of vLLM 0.6: tests that are the same for all four (vllm06_same*.c), and those that one
 * is enough for, which run as xformers: views of mixed steps, layers that share a state, streams, memory. */
#include "vllm06/vllm06_rig.h"

#include <stdlib.h>

#define FOR_ALL(name)                                                                              \
    TEST(vllm06, name) { v06_on_all(v06_same_##name); }
V06_SAME(FOR_ALL)

#define FOR_ONE(name)                                                                              \
    TEST(vllm06, name) { v06_on_one("xformers", name); }

/* ---------------------------------------------------------------------------------------- views */

/* A decode of the step writes over a prompt's token; the view of the prompts knows nothing of it. */
TEST(vllm06, a_view_of_prompts_stores_all_its_tokens)
{
    static float memory[2 * 4 * 8 * 8], rows[2 * 8], out[2 * 8];
    const int32_t lens[2] = {2, 1}, tables[2] = {0, 0};
    const int64_t slots[3] = {0, 1, 0};
    folio_vllm06_kv_cache cache = {memory, NULL, sizeof memory, FOLIO_F32, 8, 1, 8, 4};
    folio_tensor t = {.data = rows, .dtype = FOLIO_F32, .tokens = 2};
    const folio_vllm06_backend *xformers = folio_vllm06_backend_find("xformers");
    folio_vllm06_state *state = NULL;
    folio_vllm06_impl *impl = NULL;
    folio_vllm06_metadata *m = NULL;
    for (int i = 0; i < 2 * 8; i++) rows[i] = 5;
    CHECK_OK(folio_vllm06_state_create("cpu", NULL, &state));
    REQUIRE_TEST(state);
    CHECK_OK(folio_vllm06_make_impl(
        state, xformers,
        &FOLIO_WITH(folio_vllm06_impl_desc, .num_heads = 1, .head_size = 8, .dtype = FOLIO_F32),
        &impl));
    CHECK_OK(folio_vllm06_make_metadata(state, xformers,
                                        &FOLIO_WITH(folio_vllm06_metadata_fields, .num_prefills = 1,
                                                    .num_decode_tokens = 1, .slot_mapping = slots,
                                                    .seq_lens = lens, .block_tables = tables,
                                                    .block_tables_stride = 1),
                                        &m));
    CHECK_OK(folio_vllm06_forward(
        impl,
        &FOLIO_WITH(folio_vllm06_forward_args, .query = t, .key = t, .value = t,
                    .output = {.data = out, .dtype = FOLIO_F32, .tokens = 2}, .kv_cache = &cache,
                    .attn_metadata = folio_vllm06_prefill_metadata(m)),
        NULL));
    CHECK(memory[0] == 5.0f && memory[4] == 5.0f); /* slots 0 and 1: [head_size / 4][8][4] */
    folio_vllm06_metadata_destroy(m);
    folio_vllm06_impl_destroy(impl);
    folio_vllm06_state_destroy(state);
}

static const v06_seq mixed[] = {{2, true, 7, 7, 9},
                                {0, true, 5, 18, 11},
                                {1, false, 1, 9, 20},
                                {3, false, 1, 4, 2},
                                {4, false, 1, 0, 0}};
static const int32_t encoder_starts[] = {0, 9, 20, 40, 42, 42};

/* A mixed step that has every field. */
static const folio_vllm06_metadata_fields *full_step(v06 *r)
{
    v06_fields(r, mixed, 5);
    v06_narrow_cross(r, 3);
    r->f.encoder_seq_start_loc = encoder_starts;
    r->f.use_cuda_graph = 1;
    v06_remake(r);
    return v06_get(r);
}

static bool same_biases(const folio_vllm06_metadata_fields *f,
                        const folio_vllm06_metadata_fields *all, bool set)
{
    return (f->attn_bias != NULL) == set && f->attn_bias == all->attn_bias &&
           (f->encoder_attn_bias != NULL) == set &&
           f->encoder_attn_bias == all->encoder_attn_bias && (f->cross_attn_bias != NULL) == set &&
           f->cross_attn_bias == all->cross_attn_bias;
}

/* A view shows the biases its metadata gets, before it is made and after, and takes none itself. Its fields are
 * those of vllm06.views; here: the sums of encoders, and maxima of the other kind. */
static void prefill_metadata(v06 *r)
{
    static const folio_attention_type types[] = {DECODER, ENCODER, CROSS};
    static const v06_seq longest_is_a_prompts[] = {{0, true, 6, 6, 30}, {1, false, 1, 9, 20}};
    float zeros[7 * 7] = {0};
    folio_vllm06_bias biases[2] = {{zeros, 1, 7, 7}, {zeros, 1, 1, 1}};
    for (int late = 0; late < 2; late++) {
        const folio_vllm06_metadata_fields *all = full_step(r), *f, *d;
        const folio_vllm06_metadata *p = late ? NULL : folio_vllm06_prefill_metadata(r->m);
        for (int i = 0; i < 6; i++) /* the second frees what the first one copied */
            CHECK_OK(folio_vllm06_set_attn_bias(r->m, types[i % 3], biases));
        if (late) p = folio_vllm06_prefill_metadata(r->m);
        f = folio_vllm06_metadata_get(p);
        d = folio_vllm06_metadata_get(folio_vllm06_decode_metadata(r->m));
        CHECK(f->encoder_seq_start_loc[2] == 20 && d->encoder_seq_start_loc == NULL);
        CHECK(same_biases(f, all, true) && d->attn_bias == NULL && d->slot_mapping[2] == -1);
        for (int i = 0; i < 3; i++)
            REJECTED(folio_vllm06_set_attn_bias((folio_vllm06_metadata *)p, types[i], biases),
                     "view");
        for (int i = 0; i < 3; i++) CHECK_OK(folio_vllm06_set_attn_bias(r->m, types[i], NULL));
        CHECK(same_biases(f, all, false));
    }
    v06_step(r, longest_is_a_prompts, 2);
    const folio_vllm06_metadata *d = folio_vllm06_decode_metadata(r->m);
    CHECK_INT(folio_vllm06_metadata_get(d)->max_encoder_seq_len, 30);
    CHECK(folio_vllm06_prefill_metadata(NULL) == NULL &&
          folio_vllm06_decode_metadata(NULL) == NULL);
}
FOR_ONE(prefill_metadata)

/* Cross attention over the mixed step and then over its views, which attend by plans of their own. */
static void cross_of_step_and_views(v06 *r)
{
    folio_vllm06_metadata *whole = r->m;
    for (int no_key = 0; no_key < 2; no_key++) {
        r->no_key = no_key;
        r->m = whole;
        v06_fields(r, mixed, 5);
        v06_run(r, "X");
        r->m = (folio_vllm06_metadata *)folio_vllm06_prefill_metadata(whole);
        v06_fields(r, mixed, 2);
        v06_run(r, "X");
        r->m = (folio_vllm06_metadata *)folio_vllm06_decode_metadata(whole);
        v06_fields(r, mixed + 2, 3);
        r->no_key = true; /* decodes bring none */
        v06_run(r, "X");
    }
    r->m = whole;
}

/* Attention over the view of a step of one kind. */
static void whole_views(v06 *r, const v06_seq *seqs, int n)
{
    v06_step(r, seqs, n);
    folio_vllm06_metadata *step = r->m;
    const folio_vllm06_metadata *prompts = folio_vllm06_prefill_metadata(step);
    const folio_vllm06_metadata *view =
        prompts != NULL ? prompts : folio_vllm06_decode_metadata(step);
    r->m = (folio_vllm06_metadata *)view;
    r->no_key = false;
    v06_run(r, "D");
    if (prompts != NULL) v06_run(r, "E");
    if (prompts != NULL) v06_run(r, "O");
    r->no_key = prompts == NULL;
    v06_run(r, "X");
    r->m = step;
}

/* Attention over the views of a mixed step, in turn: each gives its own rows. */
static void forward_of_a_view(v06 *r)
{
    static const v06_seq prompts[] = {
        {1, true, 8, 8, 20}, {3, true, 3, 3, 2}, {0, true, 13, 13, 11}};
    static float numbers[5 * 18];
    const folio_vllm06_bias biases[] = {{numbers, 1, 7, 7}, {numbers, 1, 5, 18}};
    support_fill(numbers, COUNT_OF(numbers), 5, 2.0f);
    v06_play(r, prompts, 3, "DX");
    v06_step(r, mixed, 5);
    v06_narrow_cross(r, 3);
    v06_remake(r);
    folio_vllm06_metadata *whole = r->m;
    r->m = (folio_vllm06_metadata *)folio_vllm06_prefill_metadata(whole);
    v06_fields(r, mixed, 2);
    v06_run(r, "EDX");
    CHECK_OK(folio_vllm06_set_attn_bias(whole, DECODER, biases));
    CHECK(v06_get(r)->attn_bias != NULL);
    v06_run(r, "D"); /* the step's biases hold for the view */
    r->m = (folio_vllm06_metadata *)folio_vllm06_decode_metadata(whole);
    v06_fields(r, mixed + 2, 3);
    v06_run(r, "D");
    r->no_key = true;
    v06_run(r, "X");
    r->m = whole;
    cross_of_step_and_views(r);
    whole_views(r, prompts, 3);
    whole_views(r, mixed + 2, 3);
}
FOR_ONE(forward_of_a_view)

/* ------------------------------------------------------------------------------------- one life */

/* A translation served with chunked prefill: a new request's encoder, cross and self attention in
 * the same step as the decodes of those before it. */
static void whole_life(v06 *r)
{
    static const v06_seq first[] = {{0, true, 6, 6, 11}, {1, true, 9, 9, 20}};
    static const v06_seq second[] = {
        {2, true, 12, 12, 30}, {0, false, 1, 7, 11}, {1, false, 1, 10, 20}};
    static const v06_seq third[] = {
        {1, false, 1, 11, 20}, {2, false, 1, 13, 30}, {0, false, 1, 8, 11}};
    r->d.kv_cache_dtype = "fp8";
    r->k_scale = 0.25f;
    r->v_scale = 0.5f;
    v06_open(r);
    for (int step = 0; step < 2; step++) {
        v06_play(r, step ? second : first, step ? 3 : 2, "EDX");
    }
    v06_play(r, third, 3, "D");
    r->no_key = true;
    v06_run(r, "X");
}
FOR_ONE(whole_life)

/* Biases of every type, with a head or with all. */
static void biases_by_type(v06 *r)
{
    static const v06_seq before[] = {{2, true, 8, 8, 4}, {1, true, 2, 2, 7}};
    static const v06_seq both[] = {{0, true, 6, 6, 11}, {1, true, 5, 5, 7}, {2, false, 1, 9, 4}};
    static const v06_seq three[] = {{0, true, 6, 6, 11}, {1, true, 5, 5, 7}, {3, true, 4, 4, 3}};
    static const v06_seq without[] = {{0, true, 6, 6, 11}, {1, true, 5, 5, 0}};
    static const v06_seq longer[] = {{0, true, 9, 9, 4}}, chunk[] = {{0, true, 3, 9, 0}};
    static float x[4 * 13 * 13];
    support_fill(x, COUNT_OF(x), 5, 2.0f);
    const struct {
        const v06_seq *seqs;
        int n;
        folio_attention_type type;
        folio_vllm06_bias biases[3];
    } cases[] = {{both, 3, ENCODER, {{x, 4, 11, 11}, {x + 50, 1, 7, 7}}},
                 {both, 3, DECODER, {{x, 4, 6, 6}, {x + 9, 4, 5, 5}}},
                 {both, 3, CROSS, {{x, 1, 6, 11}, {x + 3, 4, 5, 7}}},
                 {without, 2, CROSS, {{x, 1, 6, 11}, {x, 1, 5, 0}}}, /* over 0 keys */
                 {three, 3, DECODER, {{x, 4, 6, 6}, {x + 9, 4, 5, 5}, {x + 2, 1, 4, 4}}},
                 {three, 3, ENCODER, {{x, 4, 11, 11}, {x + 50, 1, 7, 7}, {x + 4, 4, 3, 3}}},
                 {three, 3, CROSS, {{x, 1, 6, 11}, {x + 3, 4, 5, 7}, {x + 7, 1, 4, 3}}},
                 {longer, 1, CROSS, {{x, 4, 9, 4}}},   /* more rows than keys */
                 {chunk, 1, DECODER, {{x, 4, 3, 9}}}}; /* [query_len][context + query_len] */
    v06_play(r, before, 2, "DX");
    for (int i = 0; i < COUNT_OF(cases); i++) {
        v06_step(r, cases[i].seqs, cases[i].n);
        for (int again = 0; again < 2; again++) { /* taken back and set again between layers */
            CHECK_OK(folio_vllm06_set_attn_bias(r->m, cases[i].type, cases[i].biases));
            v06_check_biases(r, cases[i].type, cases[i].biases, (int)r->f.num_prefills);
            v06_run_as(r, cases[i].type);
            CHECK_OK(folio_vllm06_set_attn_bias(r->m, cases[i].type, NULL));
            if (!again) v06_run_as(r, cases[i].type);
        }
    }
    r->f.attn_bias = cases[COUNT_OF(cases) - 1].biases; /* the last, given with the fields */
    v06_rerun(r, "D");
}
FOR_ONE(biases_by_type)

/* The context of a state is one of the backend that was named, whatever the description says or leaves out. */
static void context_of_a_state(const char *compute)
{
    const folio_context_desc other = {.struct_size = sizeof other, .backend = "no-such"};
    const folio_context_desc shorter = {.struct_size = offsetof(folio_context_desc, backend)};
    const folio_context_desc *descs[] = {NULL, &other, &shorter};
    for (int i = 0; i < COUNT_OF(descs); i++) {
        folio_vllm06_state *state = NULL;
        folio_context_info info = {.struct_size = sizeof info};
        CHECK_OK(folio_vllm06_state_create(compute, descs[i], &state));
        CHECK_OK(folio_context_get_info(folio_vllm06_state_context(state), &info));
        CHECK(info.backend != NULL && strcmp(info.backend, compute) == 0);
        folio_vllm06_state_destroy(state);
    }
    CHECK(folio_vllm06_state_context(NULL) == NULL);
}

/* Layers that are alike share the plans of their state: once the first has run, the others make none. */
static void alike_layers(v06 *r)
{
    static const v06_seq prompts[] = {{0, true, 11, 11, 0}};
    support_counter counter = {.fail_at = 0};
    folio_context_desc c = {
        .struct_size = sizeof c, .num_threads = 1, .allocator = support_allocator(&counter)};
    folio_vllm06_state *state = NULL;
    folio_vllm06_impl *impls[2] = {NULL, NULL};
    v06_reset(r);
    v06_step(r, prompts, 1);
    CHECK_OK(folio_vllm06_state_create(r->compute, &c, &state));
    for (int i = 0; i < 2; i++) CHECK_OK(folio_vllm06_make_impl(state, r->b, &r->d, &impls[i]));
    folio_vllm06_metadata_destroy(r->m);
    r->m = NULL;
    CHECK_OK(folio_vllm06_make_metadata(state, r->b, &r->f, &r->m));
    folio_vllm06_forward_args a = v06_args(r, DECODER);
    CHECK_OK(folio_vllm06_forward(impls[0], &a, NULL));
    int64_t made = counter.live;
    for (int i = 0; i < 4; i++) CHECK_OK(folio_vllm06_forward(impls[i % 2], &a, NULL));
    CHECK_INT(counter.live, made);
    folio_vllm06_metadata_destroy(r->m);
    r->m = NULL;
    for (int i = 0; i < 2; i++) folio_vllm06_impl_destroy(impls[i]);
    folio_vllm06_state_destroy(state);
    CHECK_INT(counter.live, 0);
}

/* Layers of one state: each pair differs in one thing, both stay right, in turn. */
static void layers_share_a_state(v06 *r)
{
    static const v06_seq steps[] = {
        {0, true, 11, 11, 0}, {0, true, 11, 11, 0}, {0, false, 1, 12, 0}};
    context_of_a_state(r->compute);
    alike_layers(r);
    for (int pair = 0; pair < 11; pair++) {
        v06 other;
        v06_reset(r);
        v06_init(&other, r->b->name, r->compute);
        if (pair == 0 || pair == 1) other.d.sliding_window = pair == 0 ? 1 : 4;
        if (pair == 1) r->d.sliding_window = 7;
        if (pair == 2) other.d.scale = 0.5f;
        if (pair == 3) other.d.logits_soft_cap = 1.0f;
        if (pair == 4) other.d.num_kv_heads = 4;
        if (pair == 5) other.block_size = 16;
        if (pair == 6) other.d.head_size = 64;
        if (pair == 7) other.d.num_heads = 8;
        if (pair == 8) other.d.dtype = FOLIO_F16;
        if (pair == 8) r->d.kv_cache_dtype = other.d.kv_cache_dtype = "fp8";
        if (pair == 9) other.d.kv_cache_dtype = "fp8";
        v06_open(r);
        v06_open(&other);
        if (pair == 5) r->num_blocks = r->kv[0].num_blocks = other.num_blocks;
        if (pair == 10) r->num_blocks = r->kv[0].num_blocks = other.num_blocks - 2;
        folio_vllm06_impl_destroy(other.impl);
        other.impl = NULL;
        CHECK_OK(folio_vllm06_make_impl(r->state, other.b, &other.d, &other.impl));
        CHECK(folio_vllm06_state_context(r->state) != NULL);
        for (int i = 0; i < COUNT_OF(steps) && other.impl != NULL; i++) {
            v06_play(r, steps + i, 1, "D");
            v06_fields(&other, steps + i, 1);
            folio_vllm06_metadata_destroy(other.m);
            CHECK_OK(folio_vllm06_make_metadata(r->state, other.b, &other.f, &other.m));
            v06_run(&other, "D");
        }
        folio_vllm06_metadata_destroy(other.m);
        folio_vllm06_impl_destroy(other.impl);
        other.m = NULL;
        other.impl = NULL;
        v06_close(&other);
    }
}
FOR_ONE(layers_share_a_state)

/* A step whose metadata another state made: it is told from the layer's own of the same number. */
static void run_foreign(v06 *r)
{
    static const v06_seq prompts[] = {{0, true, 5, 5, 0}, {1, true, 9, 9, 0}};
    folio_vllm06_metadata *own = r->m;
    v06 other;
    v06_init(&other, r->b->name, r->compute);
    v06_open(&other);
    v06_fields(r, prompts, 2);
    CHECK_OK(folio_vllm06_make_metadata(other.state, r->b, &r->f, &r->m));
    v06_run(r, "D");
    folio_vllm06_metadata_destroy(r->m);
    r->m = own;
    v06_close(&other);
}

/* A step that is refused for its blocks, between two layers of another one. */
static void run_refused(v06 *r, const v06_seq *prompts)
{
    static const v06_seq chunk[] = {{0, true, 3, 14, 0}};
    folio_vllm06_metadata *own = r->m;
    v06_fields(r, chunk, 1);
    r->tables[1] = (int32_t)r->num_blocks;
    CHECK_OK(folio_vllm06_make_metadata(r->state, r->b, &r->f, &r->m));
    V06_REJECTS(r, DECODER, "block_table");
    folio_vllm06_metadata_destroy(r->m);
    r->m = own;
    v06_fields(r, prompts, 2);
    v06_run(r, "D");
}

/* Layers with windows, slopes or a soft cap of their own over one metadata, in turn and back again. */
static void run_other_layers(v06 *r, const v06_seq *prompts)
{
    static const struct {
        int64_t window;
        bool slopes;
        float cap;
    } layers[] = {{2, false, 0}, {5, false, 0},    {1, false, 0},
                  {0, true, 0},  {0, false, 0.5f}, {2, false, 0}};
    folio_vllm06_impl *first = r->impl;
    const folio_vllm06_impl_desc d = r->d;
    v06_fields(r, prompts, 2);
    for (int i = 0; i < COUNT_OF(layers); i++) {
        r->d.sliding_window = layers[i].window;
        r->d.alibi_slopes = layers[i].slopes ? r->slopes : NULL;
        r->d.logits_soft_cap = layers[i].cap;
        CHECK_OK(folio_vllm06_make_impl(r->state, r->b, &r->d, &r->impl));
        if (r->impl != NULL) v06_run(r, "D");
        folio_vllm06_impl_destroy(r->impl);
    }
    r->impl = first;
    r->d = d;
    v06_run(r, "D");
}

/* More caches than a state describes at a time, each another by what it says of its bytes, twice around. */
static void more_caches_than_kept(v06 *r)
{
    static const v06_seq prompts[] = {{0, true, 11, 11, 0}}, decodes[] = {{0, false, 1, 12, 0}};
    v06_reset(r);
    v06_play(r, prompts, 1, "D");
    v06_play(r, decodes, 1, "D");
    support_buffer first = support_buffer_make(r->out.bytes);
    memcpy(first.data, r->out.data, first.bytes);
    folio_vllm06_forward_args a = v06_args(r, DECODER);
    folio_vllm06_kv_cache kv = r->kv[0];
    a.kv_cache = &kv;
    for (size_t i = 0; i < 1200; i++) {
        support_buffer_poison(&r->out);
        kv.bytes = r->kv[0].bytes + i % 600;
        CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
        CHECK(memcmp(first.data, r->out.data, first.bytes) == 0);
    }
    v06_check_images(r);
    support_buffer_free(&first);
}

/* One metadata serves layers with caches and masks of their own. */
static void metadata_serves_all_layers(v06 *r)
{
    static const v06_seq prompts[] = {{0, true, 11, 11, 0}, {1, true, 3, 3, 0}};
    more_caches_than_kept(r);
    v06_reset(r);
    v06_play(r, prompts, 2, "D");
    support_buffer first = support_buffer_make(r->out.bytes);
    memcpy(first.data, r->out.data, first.bytes);
    folio_vllm06_forward_args a = v06_args(r, DECODER);
    a.kv_cache = &r->kv[1];
    CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
    CHECK(memcmp(first.data, r->out.data, first.bytes) == 0);
    support_buffer_free(&first);
    memcpy(r->image[1], r->image[0], r->cache[0].bytes);
    v06_check_images(r);
    run_other_layers(r, prompts);
    run_refused(r, prompts);
    run_foreign(r);
}
FOR_ONE(metadata_serves_all_layers)

/* On a host backend there is no stream but NULL; another is refused, and nothing is written. */
static void streams(v06 *r)
{
    static const v06_seq prompts[] = {{0, true, 11, 11, 0}};
    if (strcmp(r->compute, "cuda") == 0) return; /* there every call has run on one */
    v06_step(r, prompts, 1);
    folio_vllm06_forward_args a = v06_args(r, DECODER);
    const folio_run on_stream = {.struct_size = sizeof on_stream, .stream = r};
    REJECTED(folio_vllm06_forward(r->impl, &a, &on_stream), "stream");
    REJECTED(folio_vllm06_begin_forward(r->state, r->m, &on_stream), "stream");
    CHECK(support_is_poison(r->out.data, r->out.bytes));
    v06_check_images(r); /* all NaN */
    v06_run(r, "D");
    /* plans are the state's: a workspace, which could not be large enough, is not used */
    support_buffer few = support_buffer_make(64);
    const folio_run in_few = {
        .struct_size = sizeof in_few, .workspace = few.data, .workspace_size = few.bytes};
    a = v06_args(r, DECODER);
    CHECK_OK(folio_vllm06_forward(r->impl, &a, &in_few));
    CHECK(support_is_poison(few.data, few.bytes));
    support_buffer_free(&few);
    v06_check_images(r);
    const folio_block_pair pair[] = {{r->tables[0], 5}}; /* a block with numbers, to one of NaN */
    REJECTED(folio_vllm06_copy_blocks(r->state, r->kv, 2, pair, 1, &on_stream), "stream");
    REJECTED(folio_vllm06_swap_blocks(r->state, &r->kv[0], &r->kv[1], pair, 1, &on_stream),
             "stream");
    v06_check_images(r);
    CHECK_OK(folio_vllm06_copy_blocks(r->state, r->kv, 2, pair, 1, NULL));
    CHECK_OK(folio_vllm06_swap_blocks(r->state, &r->kv[0], &r->kv[1], pair, 1, NULL));
}
FOR_ONE(streams)

/* A graph's state and metadata, and its plans. */
static folio_status capture_with(const v06 *r, folio_vllm06_state *state, folio_vllm06_impl *impl,
                                 const folio_vllm06_forward_args *args)
{
    folio_vllm06_graph_capture_desc d =
        FOLIO_WITH(folio_vllm06_graph_capture_desc, .attn_backend = r->b, .max_batch_size = 2,
                   .max_seq_len_to_capture = 20, .block_size = r->block_size);
    folio_vllm06_state *clone = NULL;
    folio_vllm06_metadata *m = NULL;
    folio_vllm06_forward_args a = *args;
    folio_status status = folio_vllm06_graph_capture_begin(state, &d);
    if (status == FOLIO_OK) status = folio_vllm06_graph_clone(state, 2, &clone);
    if (status == FOLIO_OK)
        status = folio_vllm06_graph_capture_get_metadata_for_batch(state, 2, 1, &m);
    a.attn_metadata = m;
    a.query.tokens = a.key.tokens = a.value.tokens = a.output.tokens = 2;
    if (status == FOLIO_OK) status = folio_vllm06_forward(impl, &a, NULL);
    a.attn_type = CROSS; /* a second plan of the graph */
    a.key = a.value = (folio_tensor){0};
    if (status == FOLIO_OK) status = folio_vllm06_forward(impl, &a, NULL);
    if (status == FOLIO_OK) status = folio_vllm06_begin_forward(clone, m, NULL);
    folio_vllm06_metadata_destroy(m);
    folio_vllm06_state_destroy(clone);
    return status;
}

/* A step with decodes and its views, for which the plan of another step is too small; blocks that are copied. */
static folio_status more_with(const v06 *r, folio_vllm06_state *state, folio_vllm06_impl *impl,
                              const folio_vllm06_forward_args *args)
{
    const int64_t slots[] = {0, 1, 8, 16};
    const folio_block_pair pairs[] = {{0, 5}};
    const int32_t lens[] = {2, 1, 1}, tables[] = {0, 1, 2};
    folio_vllm06_metadata_fields f =
        FOLIO_WITH(folio_vllm06_metadata_fields, .num_prefills = 1, .num_prefill_tokens = 2,
                   .num_decode_tokens = 2, .slot_mapping = slots, .seq_lens = lens,
                   .block_tables = tables, .block_tables_stride = 1);
    folio_vllm06_metadata *m[2] = {NULL, NULL};
    folio_vllm06_forward_args a = *args;
    folio_status status = FOLIO_OK;
    a.query.tokens = a.key.tokens = a.value.tokens = a.output.tokens = 4;
    for (int i = 0; i < 2 && status == FOLIO_OK; i++) { /* all prompts in the second step */
        if (i == 1) f.num_prefills = 3;
        if (i == 1) f.num_prefill_tokens = 4;
        if (i == 1) f.num_decode_tokens = 0;
        status = folio_vllm06_make_metadata(state, r->b, &f, &m[i]);
        a.attn_metadata = m[i];
        if (status == FOLIO_OK) status = folio_vllm06_forward(impl, &a, NULL);
    }
    if (status == FOLIO_OK && folio_vllm06_prefill_metadata(m[0]) == NULL)
        status = FOLIO_ERR_MEMORY;
    if (status == FOLIO_OK && folio_vllm06_decode_metadata(m[0]) == NULL) status = FOLIO_ERR_MEMORY;
    if (status == FOLIO_OK) status = folio_vllm06_copy_blocks(state, r->kv, 2, pairs, 1, NULL);
    if (status == FOLIO_OK)
        status = folio_vllm06_swap_blocks(state, &r->kv[0], &r->kv[1], pairs, 1, NULL);
    for (int i = 0; i < 2; i++) folio_vllm06_metadata_destroy(m[i]);
    return status;
}

/* All that a step takes, under an allocator that fails once; what was made is given back. */
static folio_status step_with(const v06 *r, const folio_allocator *allocator,
                              const folio_vllm06_forward_args *args)
{
    folio_context_desc c = {.struct_size = sizeof c, .num_threads = 1, .allocator = *allocator};
    folio_vllm06_state *state = NULL;
    folio_vllm06_impl *impl = NULL;
    folio_vllm06_builder *builder = NULL;
    folio_vllm06_metadata *built = NULL, *m = NULL;
    folio_vllm06_forward_args a = *args;
    float zeros[13 * 13] = {0};
    folio_vllm06_bias bias = {zeros, 1, 13, 13};
    const int32_t table[] = {1, 2};
    folio_vllm06_builder_desc d = {
        .struct_size = sizeof d, .block_size = 8, .max_seq_len_to_capture = 20};
    folio_vllm06_seq s = {.struct_size = sizeof s, .is_prompt = 1, .token_len = 13};
    s.block_table = table;
    s.num_blocks = 2;
    folio_status status = folio_vllm06_state_create(r->compute, &c, &state);
    if (status == FOLIO_OK) status = folio_vllm06_make_impl(state, r->b, &r->d, &impl);
    if (status == FOLIO_OK) status = folio_vllm06_builder_create(state, r->b, &d, &builder);
    if (status == FOLIO_OK) status = folio_vllm06_builder_add(builder, &s);
    if (status == FOLIO_OK) status = folio_vllm06_builder_build(builder, &built);
    if (status == FOLIO_OK) status = folio_vllm06_builder_pad(builder, 64);
    if (status == FOLIO_OK) status = folio_vllm06_make_metadata(state, r->b, &r->f, &m);
    if (status == FOLIO_OK && folio_vllm06_prefill_metadata(m) == NULL) status = FOLIO_ERR_MEMORY;
    a.attn_metadata = m;
    if (status == FOLIO_OK) status = folio_vllm06_forward(impl, &a, NULL);
    for (int i = 0; i < 2 && status == FOLIO_OK; i++) /* the second replaces the first */
        status = folio_vllm06_set_attn_bias(m, DECODER, &bias);
    if (status == FOLIO_OK) status = capture_with(r, state, impl, args);
    if (status == FOLIO_OK) status = more_with(r, state, impl, args);
    folio_vllm06_metadata_destroy(m);
    folio_vllm06_metadata_destroy(built);
    folio_vllm06_builder_destroy(builder);
    folio_vllm06_impl_destroy(impl);
    folio_vllm06_state_destroy(state);
    return status;
}

static void out_of_memory(v06 *r)
{
    static const v06_seq prompts[] = {{0, true, 13, 13, 4}};
    r->d.alibi_slopes = r->slopes;
    v06_step(r, prompts, 1);
    folio_status status = FOLIO_ERR_MEMORY;
    folio_vllm06_forward_args a = v06_args(r, DECODER);
    int64_t tries = 0;
    while (status == FOLIO_ERR_MEMORY && tries < 500) {
        support_counter counter = {.fail_at = ++tries};
        folio_allocator allocator = support_allocator(&counter);
        status = step_with(r, &allocator, &a);
        CHECK((status == FOLIO_OK) == (counter.calls < tries)); /* each failure is told */
        CHECK_INT(counter.live, 0);
        CHECK_INT(counter.faults, 0);
    }
    CHECK_INT(status, FOLIO_OK);
    CHECK(tries > 20);
}
FOR_ONE(out_of_memory)
