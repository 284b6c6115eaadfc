/* test_vllm06.c: the backends of vLLM 0.6, in vllm06_same*.c for all four; here what one is enough for: views of mixed
 * steps, layers that share a state, streams, memory. */
#include "vllm06/vllm06_rig.h"

static const v06_seq mixed[] = {{2, true, 7, 7, 9},
                                {0, true, 5, 18, 11},
                                {1, false, 1, 9, 20},
                                {3, false, 1, 4, 2},
                                {4, false, 1, 0, 0}};

/* The views of a step of p prompts and d decodes, then the step itself, in turn: each gives its own rows, by a plan of
 * its own. */
static void run_views(v06 *r, const v06_seq *seqs, int p, int d)
{
    const folio_vllm06_metadata *prompts = folio_vllm06_prefill_metadata(r->m);
    const folio_vllm06_metadata *decodes = folio_vllm06_decode_metadata(r->m);
    folio_vllm06_metadata *whole = r->m;
    for (int again = 0; again < 2; again++) {
        if (p > 0) {
            r->m = (folio_vllm06_metadata *)prompts;
            v06_fields(r, seqs, p);
            v06_run(r, "DEX");
        }
        if (d > 0) {
            r->m = (folio_vllm06_metadata *)decodes;
            v06_fields(r, seqs + p, d);
            v06_run(r, "D");
            r->no_key = true;
            v06_run(r, "X");
            r->no_key = false;
        }
        r->m = whole;
        v06_fields(r, seqs, p + d);
        v06_run(r, "D");
        r->no_key = p == 0;
        v06_run(r, "X");
        r->no_key = false;
    }
}

/* A decode of the step writes over a prompt's token; the view of the prompts knows nothing of it. */
static void view_stores_all_its_tokens(v06 *r)
{
    v06_fields(r, mixed, 3);
    r->slots[12] = r->slots[0];
    v06_remake(r);
    folio_vllm06_metadata *whole = r->m;
    r->m = (folio_vllm06_metadata *)folio_vllm06_prefill_metadata(whole);
    v06_fields(r, mixed, 2);
    v06_run(r, "D");
    r->m = whole;
}

V06_TEST_OF("xformers", forward_of_a_view)
{
    static const v06_seq prompts[] = {
        {1, true, 8, 8, 20}, {3, true, 3, 3, 2}, {0, true, 13, 13, 11}};
    static float numbers[5 * 18];
    const folio_vllm06_bias biases[] = {{numbers, 1, 7, 7}, {numbers, 1, 5, 18}};
    support_fill(numbers, COUNT_OF(numbers), 5, 2.0f);
    v06_play(r, prompts, 3, "DX");
    for (int biased = 0; biased < 2; biased++) {
        v06_fields(r, mixed, 5);
        v06_narrow_cross(r, 3);
        v06_remake(r);
        /* set before the view is made, or after it */
        if (biased) folio_vllm06_prefill_metadata(r->m);
        CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, biases));
        run_views(r, mixed, 2, 3);
    }
    v06_step(r, prompts, 3);
    run_views(r, prompts, 3, 0);
    v06_step(r, mixed + 2, 3);
    run_views(r, mixed + 2, 0, 3);
    view_stores_all_its_tokens(r);
}

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

/* The rig goes on in this state, which it owns then. */
static void move_to(v06 *r, folio_vllm06_state *state)
{
    folio_vllm06_metadata_destroy(r->m);
    folio_vllm06_impl_destroy(r->impl);
    folio_vllm06_state_destroy(r->state);
    r->m = NULL;
    r->impl = NULL;
    r->state = state;
    CHECK_OK(folio_vllm06_make_impl(state, r->b, &r->d, &r->impl));
    v06_need(r->impl != NULL);
}

/* Layers that are alike share the plans of their state: once the first has run, the others make none. Of layers that
 * differ a state keeps 64 plans: others take their places, and the first ones are made anew. */
static void plans_of_a_state(v06 *r)
{
    enum { MOST = 64 };
    static const v06_seq prompts[] = {{0, true, 11, 11, 0}};
    support_counter counter = {.fail_at = 0};
    const folio_context_desc c = {
        .struct_size = sizeof c, .num_threads = 1, .allocator = support_allocator(&counter)};
    folio_vllm06_state *state = NULL;
    folio_vllm06_impl *first, *second = NULL;
    v06_open(r);
    CHECK_OK(folio_vllm06_state_create(r->compute, &c, &state));
    move_to(r, state);
    CHECK_OK(folio_vllm06_make_impl(state, r->b, &r->d, &second));
    v06_play(r, prompts, 1, "D");
    int64_t made = counter.live;
    first = r->impl;
    r->impl = second;
    v06_run(r, "DD");
    r->impl = first;
    CHECK_INT(counter.live, made);
    folio_vllm06_impl_destroy(second);
    for (int i = 0; i < 3 * MOST; i++) {
        folio_vllm06_impl_destroy(r->impl);
        r->impl = NULL;
        r->d.scale = 0.125f + (float)(i % (2 * MOST)) / 1024;
        CHECK_OK(folio_vllm06_make_impl(state, r->b, &r->d, &r->impl));
        v06_need(r->impl != NULL);
        v06_play(r, prompts, 1, "D");
        if (i == MOST) made = counter.live;
        if (i > MOST) CHECK_INT(counter.live, made);
    }
    v06_reset(r);
    CHECK_INT(counter.live, 0);
}

/* Layers of one state: each pair differs in one thing, both stay right, in turn. */
V06_TEST_OF("xformers", layers_share_a_state)
{
    static const v06_seq steps[] = {
        {0, true, 11, 11, 0}, {0, true, 11, 11, 0}, {0, false, 1, 12, 0}};
    context_of_a_state(r->compute);
    plans_of_a_state(r);
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
        move_to(&other, r->state);
        for (int i = 0; i < COUNT_OF(steps); i++) {
            v06_play(r, steps + i, 1, "D");
            v06_play(&other, steps + i, 1, "D");
        }
        other.state = NULL;
        v06_close(&other);
    }
}

/* Blocks behind a window may be gone, whatever the layers before this one see. */
V06_TEST_OF("xformers", blocks_behind_a_window)
{
    static const v06_seq prompt[] = {{0, true, 30, 30, 0}};
    static const v06_seq decodes[] = {{0, false, 1, 31, 0}, {0, false, 1, 32, 0}};
    v06_play(r, prompt, 1, "D");
    v06_play(r, decodes, 1, "D");
    folio_vllm06_impl *full = r->impl, *windowed = NULL;
    r->d.sliding_window = 9;
    CHECK_OK(folio_vllm06_make_impl(r->state, r->b, &r->d, &windowed));
    r->impl = windowed;
    v06_fields(r, decodes + 1, 1);
    r->tables[0] = FOLIO_NO_BLOCK;
    for (int i = 0; i < 2; i++) v06_rerun(r, "D");
    r->impl = full;
    V06_REJECTS(r, DECODER, "FOLIO_NO_BLOCK");
    r->impl = windowed;
    v06_run(r, "D");
    folio_vllm06_impl_destroy(full);
}

/* More caches than a state describes at a time, each another by what it says of its bytes, twice around. */
static void more_caches_than_kept(v06 *r)
{
    static const v06_seq prompts[] = {{0, true, 11, 11, 0}}, decodes[] = {{0, false, 1, 12, 0}};
    v06_play(r, prompts, 1, "D");
    v06_play(r, decodes, 1, "D");
    folio_vllm06_forward_args a = v06_args(r, DECODER);
    folio_vllm06_kv_cache kv = r->kv[0];
    a.kv_cache = &kv;
    for (size_t i = 0; i < 1200; i++) {
        support_buffer_poison(&r->out);
        kv.bytes = r->kv[0].bytes + i % 600;
        CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
        v06_check_rows(r, DECODER);
    }
    v06_check_images(r);
}

/* Layers with windows or a soft cap of their own over one metadata, in turn and back again. */
static void run_other_layers(v06 *r)
{
    static const int64_t windows[] = {2, 5, 0, 2};
    folio_vllm06_impl *first = r->impl;
    const folio_vllm06_impl_desc d = r->d;
    for (int i = 0; i < COUNT_OF(windows); i++) {
        r->d.sliding_window = windows[i];
        r->d.logits_soft_cap = windows[i] == 0 ? 0.5f : 0;
        CHECK_OK(folio_vllm06_make_impl(r->state, r->b, &r->d, &r->impl));
        if (r->impl != NULL) v06_run(r, "D");
        folio_vllm06_impl_destroy(r->impl);
    }
    r->impl = first;
    r->d = d;
    v06_run(r, "D");
}

/* Another step between two layers of one: refused for its blocks, or made by another state with the same number. */
static void run_between(v06 *r, const v06_seq *prompts, folio_vllm06_state *state, bool refused)
{
    static const v06_seq chunk[] = {{0, true, 3, 14, 0}};
    static const v06_seq others[] = {{0, true, 5, 5, 0}, {1, true, 9, 9, 0}};
    folio_vllm06_metadata *own = r->m;
    v06_fields(r, refused ? chunk : others, refused ? 1 : 2);
    if (refused) r->tables[1] = (int32_t)r->num_blocks;
    CHECK_OK(folio_vllm06_make_metadata(state, r->b, &r->f, &r->m));
    if (refused) V06_REJECTS(r, DECODER, "block_table");
    else v06_run(r, "D");
    folio_vllm06_metadata_destroy(r->m);
    r->m = own;
    v06_fields(r, prompts, 2);
    v06_run(r, "D");
}

/* One metadata serves layers with caches and masks of their own. */
V06_TEST_OF("xformers", metadata_serves_all_layers)
{
    static const v06_seq prompts[] = {{0, true, 11, 11, 0}, {1, true, 3, 3, 0}};
    folio_vllm06_state *state = NULL;
    more_caches_than_kept(r);
    v06_reset(r);
    v06_play(r, prompts, 2, "D");
    folio_vllm06_forward_args a = v06_args(r, DECODER);
    a.kv_cache = &r->kv[1];
    CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
    v06_check_rows(r, DECODER);
    memcpy(r->image[1], r->image[0], r->cache[0].bytes);
    v06_check_images(r);
    run_other_layers(r);
    CHECK_OK(folio_vllm06_state_create(r->compute, NULL, &state));
    run_between(r, prompts, r->state, true);
    run_between(r, prompts, state, false);
    folio_vllm06_state_destroy(state);
}

/* On a host backend there is no stream but NULL; another is refused, and nothing is written. Plans are the state's: a
 * workspace, which could not be large enough, is not used. */
V06_TEST_OF("xformers", streams)
{
    static const v06_seq prompts[] = {{0, true, 11, 11, 0}};
    if (strcmp(r->compute, "cuda") == 0) return; /* there every call has run on one */
    support_buffer few = support_buffer_make(64);
    const folio_run on_stream = {.struct_size = sizeof on_stream, .stream = r};
    const folio_run in_few = {
        .struct_size = sizeof in_few, .workspace = few.data, .workspace_size = few.bytes};
    v06_step(r, prompts, 1);
    folio_vllm06_forward_args a = v06_args(r, DECODER);
    REJECTED(folio_vllm06_forward(r->impl, &a, &on_stream), "stream");
    REJECTED(folio_vllm06_begin_forward(r->state, r->m, &on_stream), "stream");
    CHECK(support_is_poison(r->out.data, r->out.bytes));
    v06_check_images(r); /* all NaN */
    v06_run(r, "D");
    const folio_block_pair pair[] = {{r->tables[0], 5}}; /* a block with numbers, to one of NaN */
    REJECTED(folio_vllm06_copy_blocks(r->state, r->kv, 2, pair, 1, &on_stream), "stream");
    REJECTED(folio_vllm06_swap_blocks(r->state, &r->kv[0], &r->kv[1], pair, 1, &on_stream),
             "stream");
    a = v06_args(r, DECODER);
    CHECK_OK(folio_vllm06_forward(r->impl, &a, &in_few));
    v06_check_rows(r, DECODER);
    v06_check_images(r);
    CHECK_OK(folio_vllm06_copy_blocks(r->state, r->kv, 2, pair, 1, &in_few));
    CHECK_OK(folio_vllm06_swap_blocks(r->state, &r->kv[0], &r->kv[1], pair, 1, &in_few));
    CHECK(support_is_poison(few.data, few.bytes));
    support_buffer_free(&few);
}

/* ------------------------------------------------------------------------------ out of memory */

typedef struct {
    folio_vllm06_state *state, *clone;
    folio_vllm06_impl *impl;
    folio_vllm06_builder *builder;
    folio_vllm06_metadata *built, *first, *graph, *mixed, *longer;
} objects;

#define STEP(call)                                                                                 \
    do {                                                                                           \
        folio_status s_ = (call);                                                                  \
        if (s_ != FOLIO_OK) return s_;                                                             \
    } while (0)
#define THERE(made) STEP((made) != NULL ? FOLIO_OK : FOLIO_ERR_MEMORY)

static folio_status forward(const objects *o, const folio_vllm06_metadata *m,
                            folio_vllm06_forward_args a, int64_t tokens, folio_attention_type type)
{
    a.attn_metadata = m;
    a.attn_type = type;
    a.query.tokens = a.key.tokens = a.value.tokens = a.output.tokens = tokens;
    if (type == CROSS) a.key = a.value = (folio_tensor){0};
    return folio_vllm06_forward(o->impl, &a, NULL);
}

/* Steps with decodes and of more prompts, for which the plan of the first is too small; views; blocks that move. */
static folio_status use_more(const v06 *r, objects *o, const folio_vllm06_forward_args *a)
{
    const int64_t slots[] = {0, 1, 8, 16};
    const int32_t lens[] = {2, 1, 1}, tables[] = {0, 1, 2};
    const folio_block_pair pairs[] = {{0, 5}};
    folio_vllm06_metadata_fields f =
        FOLIO_WITH(folio_vllm06_metadata_fields, .num_prefills = 1, .num_prefill_tokens = 2,
                   .num_decode_tokens = 2, .slot_mapping = slots, .seq_lens = lens,
                   .block_tables = tables, .block_tables_stride = 1);
    STEP(folio_vllm06_make_metadata(o->state, r->b, &f, &o->mixed));
    STEP(forward(o, o->mixed, *a, 4, DECODER));
    THERE(folio_vllm06_prefill_metadata(o->mixed));
    THERE(folio_vllm06_decode_metadata(o->mixed));
    f.num_prefills = 3;
    f.num_prefill_tokens = 4;
    f.num_decode_tokens = 0;
    STEP(folio_vllm06_make_metadata(o->state, r->b, &f, &o->longer));
    STEP(forward(o, o->longer, *a, 4, DECODER));
    STEP(folio_vllm06_copy_blocks(o->state, r->kv, 2, pairs, 1, NULL));
    return folio_vllm06_swap_blocks(o->state, &r->kv[0], &r->kv[1], pairs, 1, NULL);
}

/* All that a step takes, under an allocator that fails once. */
static folio_status use(const v06 *r, objects *o, const folio_allocator *allocator,
                        const folio_vllm06_forward_args *a)
{
    static const float zeros[13 * 13];
    static const int32_t table[] = {1, 2};
    const folio_vllm06_bias bias = {zeros, 1, 13, 13};
    const folio_context_desc c = {
        .struct_size = sizeof c, .num_threads = 1, .allocator = *allocator};
    const folio_vllm06_builder_desc d =
        FOLIO_WITH(folio_vllm06_builder_desc, .block_size = 8, .max_seq_len_to_capture = 20);
    const folio_vllm06_seq seq = FOLIO_WITH(folio_vllm06_seq, .is_prompt = 1, .token_len = 13,
                                            .block_table = table, .num_blocks = 2);
    const folio_vllm06_graph_capture_desc g =
        FOLIO_WITH(folio_vllm06_graph_capture_desc, .attn_backend = r->b, .max_batch_size = 2,
                   .max_seq_len_to_capture = 20, .block_size = r->block_size);
    STEP(folio_vllm06_state_create(r->compute, &c, &o->state));
    STEP(folio_vllm06_make_impl(o->state, r->b, &r->d, &o->impl));
    STEP(folio_vllm06_builder_create(o->state, r->b, &d, &o->builder));
    STEP(folio_vllm06_builder_add(o->builder, &seq));
    STEP(folio_vllm06_builder_build(o->builder, &o->built));
    STEP(folio_vllm06_builder_pad(o->builder, 64));
    STEP(folio_vllm06_make_metadata(o->state, r->b, &r->f, &o->first));
    THERE(folio_vllm06_prefill_metadata(o->first));
    STEP(forward(o, o->first, *a, 13, DECODER));
    STEP(folio_vllm06_set_attn_bias(o->first, DECODER, &bias));
    STEP(folio_vllm06_set_attn_bias(o->first, DECODER, &bias)); /* replaces the first */
    STEP(folio_vllm06_graph_capture_begin(o->state, &g));
    STEP(folio_vllm06_graph_clone(o->state, 2, &o->clone));
    STEP(folio_vllm06_graph_capture_get_metadata_for_batch(o->state, 2, 1, &o->graph));
    STEP(forward(o, o->graph, *a, 2, DECODER));
    STEP(forward(o, o->graph, *a, 2, CROSS)); /* a second plan of the graph */
    STEP(folio_vllm06_begin_forward(o->clone, o->graph, NULL));
    return use_more(r, o, a);
}

/* Each failure is told, and what was made is given back. */
V06_TEST_OF("xformers", out_of_memory)
{
    static const v06_seq prompts[] = {{0, true, 13, 13, 4}};
    r->d.alibi_slopes = r->slopes;
    v06_step(r, prompts, 1);
    folio_status status = FOLIO_ERR_MEMORY;
    const folio_vllm06_forward_args a = v06_args(r, DECODER);
    int64_t tries = 0;
    while (status == FOLIO_ERR_MEMORY && tries < 500) {
        support_counter counter = {.fail_at = ++tries};
        const folio_allocator allocator = support_allocator(&counter);
        objects o = {.state = NULL};
        status = use(r, &o, &allocator, &a);
        CHECK((status == FOLIO_OK) == (counter.calls < tries));
        folio_vllm06_metadata *made[] = {o.built, o.first, o.graph, o.mixed, o.longer};
        for (int i = 0; i < COUNT_OF(made); i++) folio_vllm06_metadata_destroy(made[i]);
        folio_vllm06_builder_destroy(o.builder);
        folio_vllm06_impl_destroy(o.impl);
        folio_vllm06_state_destroy(o.clone);
        folio_vllm06_state_destroy(o.state);
        CHECK_INT(counter.live, 0);
        CHECK_INT(counter.faults, 0);
    }
    CHECK_INT(status, FOLIO_OK);
    CHECK(tries > 20);
}
