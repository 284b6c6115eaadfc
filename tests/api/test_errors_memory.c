/*
 * test_errors_memory.c: a whole layer made and run where the n-th allocation fails, for every n:
 * one clear refusal, no handle, nothing lost; and every struct of the header handed over with the
 * size of an older client, of a newer one, and of none.
 */
#include "kit/layer.h"
#include "support.h"

#include <stdlib.h>

/* ------------------------------------------------------------------------- memory that runs out */

typedef kit_layer whole;

#define TRY_STATUS(call)                                                                           \
    do {                                                                                           \
        folio_status status_ = (call);                                                             \
        if (status_ != FOLIO_OK) return status_;                                                   \
    } while (0)

/* More sequences than the batch has room for, so that it grows; a view of each kind. */
static folio_status fill_batch(folio_batch *batch)
{
    for (int32_t i = 0; i < 6; i++) {
        const int32_t table[2] = {2 * i, 2 * i + 1}, cross[1] = {12 + i};
        folio_batch_seq seq =
            FOLIO_WITH(folio_batch_seq, .query_len = 3, .seq_len = 20, .block_table = table,
                       .num_blocks = 2, .encoder_len = 4, .encoder_new_len = 4,
                       .cross_block_table = cross, .num_cross_blocks = 1);
        folio_batch_info before = {.struct_size = sizeof before}, after = before;
        CHECK_OK(folio_batch_get_info(batch, &before));
        folio_status status = folio_batch_add(batch, &seq);
        CHECK_OK(folio_batch_get_info(batch, &after));
        if (status != FOLIO_OK) { /* and nothing is half added */
            CHECK(memcmp(&before, &after, sizeof before) == 0);
            return status;
        }
    }
    folio_batch_view v = {.struct_size = sizeof v};
    for (int type = 0; type < FOLIO_NUM_ATTENTION_TYPES; type++)
        for (int phase = 0; phase < 3; phase++)
            TRY_STATUS(
                folio_batch_get_view(batch, (folio_attention_type)type, (folio_phase)phase, &v));
    return FOLIO_OK;
}

static folio_status use_plan(whole *w)
{
    float q[18 * 16] = {0}, k[18 * 8] = {0}, out[18 * 16];
    folio_tensors t =
        FOLIO_WITH(folio_tensors, .q = {.data = q, .tokens = 18}, .k = {.data = k, .tokens = 18},
                   .v = {.data = k, .tokens = 18}, .out = {.data = out, .tokens = 18});
    TRY_STATUS(folio_plan_update(w->plan, w->batch, NULL));
    TRY_STATUS(folio_attention_forward(w->plan, 0, FOLIO_ATTENTION_DECODER, w->cache, 1, &t, NULL));
    const int64_t slots[2] = {40, 3};
    const folio_block_pair pairs[2] = {{1, 4}, {0, 5}};
    folio_kv_write write =
        FOLIO_WITH(folio_kv_write, .k = {.data = k, .dtype = FOLIO_F32, .tokens = 2},
                   .v = {.data = k, .dtype = FOLIO_F32, .tokens = 2}, .slots = slots);
    TRY_STATUS(folio_kv_cache_write(w->cache, 0, &write, NULL));
    return folio_kv_cache_copy_blocks(w->cache, w->cache, pairs, 2, NULL);
}

static folio_status make_whole(whole *w, const char *backend, const folio_allocator *allocator)
{
    folio_context_desc cd = {.struct_size = sizeof cd, .backend = backend, .num_threads = 2};
    cd.allocator = *allocator;
    TRY_STATUS(folio_context_create(&cd, &w->ctx));
    TRY_STATUS(KIT_LAYER_OPEN(w->ctx, w, .num_heads = 2, .num_kv_heads = 1, .k_head_size = 8,
                              .kv_dtype = FOLIO_INT8, .num_blocks = 20, .num_layers = 2,
                              .block_size = 16, .types = 15u, .max_seqs = 8, .max_query_tokens = 32,
                              .max_seq_len = 64, .max_encoder_tokens = 32));
    TRY_STATUS(fill_batch(w->batch));
    return use_plan(w);
}

/* The n-th allocation fails, for every n: one clear refusal, no handle, nothing lost. */
TEST(errors_memory, memory_that_runs_out)
{
    for (int b = 0; b < SUPPORT_NUM_BACKENDS; b++) {
        int64_t n = 1;
        for (; n < 2000; n++) {
            support_counter counter = {.fail_at = n};
            folio_allocator allocator = support_allocator(&counter);
            whole w = {0};
            support_mark_error();
            folio_status status = make_whole(&w, support_backends[b], &allocator);
            bool failed = counter.calls >= n;
            if (failed)
                support_refused(__FILE__, __LINE__, "make_whole", status, FOLIO_ERR_MEMORY, "");
            else CHECK_INT(status, FOLIO_OK);
            kit_layer_close(&w);
            folio_context_destroy(w.ctx);
            CHECK_MSG(counter.live == 0 && counter.live_bytes == 0,
                      "%s: allocation %lld fails: %lld are never freed", support_backends[b],
                      (long long)n, (long long)counter.live);
            CHECK_INT(counter.faults, 0);
            if (!failed) break;
        }
        CHECK(n > 5 && n < 2000);
    }
}

/* ----------------------------------------------------------------------------- sizes of structs */

static folio_kv_cache_desc small_cache(void)
{
    return FOLIO_WITH(folio_kv_cache_desc, .num_blocks = 5, .num_layers = 1, .block_size = 16,
                      .num_kv_heads = 2, .k_head_size = 32, .dtype = FOLIO_F32);
}

/* Each call hands its struct to the library and gives back what it made. */
static folio_status sized_context(whole *w, void *arg)
{
    (void)w;
    folio_context *made = NULL;
    folio_status status = folio_context_create(arg, &made);
    folio_context_destroy(made);
    return status;
}
static folio_status sized_attention(whole *w, void *arg)
{
    folio_attention *made = NULL;
    folio_status status = folio_attention_create(w->ctx, arg, &made);
    folio_attention_destroy(made);
    return status;
}
static folio_status sized_cache(whole *w, void *arg)
{
    folio_kv_cache *made = NULL;
    folio_status status = folio_kv_cache_create(w->ctx, arg, &made);
    folio_kv_cache_destroy(made);
    return status;
}
static folio_status sized_memory(whole *w, void *arg)
{
    folio_kv_cache_desc c = small_cache();
    c.layout = FOLIO_LAYOUT_NHD;
    folio_kv_cache *made = NULL;
    folio_status status = folio_kv_cache_wrap(w->ctx, &c, arg, &made);
    folio_kv_cache_destroy(made);
    return status;
}
static folio_status sized_batch(whole *w, void *arg)
{
    folio_batch *made = NULL;
    folio_status status = folio_batch_create(w->ctx, arg, &made);
    folio_batch_destroy(made);
    return status;
}
static folio_status with_batch(whole *w, const folio_batch_seq *seq,
                               const folio_batch_arrays *arrays)
{
    folio_batch_desc d = {.struct_size = sizeof d, .block_size = 16};
    folio_batch *made = NULL;
    CHECK_OK(folio_batch_create(w->ctx, &d, &made));
    folio_status status =
        seq ? folio_batch_add(made, seq) : folio_batch_set_block_tables(made, arrays, NULL, 0);
    folio_batch_destroy(made);
    return status;
}
static folio_status sized_seq(whole *w, void *arg) { return with_batch(w, arg, NULL); }
static folio_status sized_arrays(whole *w, void *arg) { return with_batch(w, NULL, arg); }
static folio_status sized_plan(whole *w, void *arg)
{
    folio_attention *list[1] = {w->attention};
    folio_plan *made = NULL;
    if (((folio_plan_desc *)arg)->struct_size > 0) ((folio_plan_desc *)arg)->attentions = list;
    folio_status status = folio_plan_create(w->ctx, arg, &made);
    folio_plan_destroy(made);
    return status;
}
static folio_status sized_write(whole *w, void *arg)
{
    return folio_kv_cache_write(w->cache, 0, arg, NULL);
}
static folio_status sized_gather(whole *w, void *arg)
{
    return folio_kv_cache_gather(w->cache, 0, arg, NULL);
}
static folio_status sized_rows(whole *w, void *arg)
{
    return folio_kv_cache_unpack(w->cache, 0, arg, NULL);
}
static folio_status sized_run(whole *w, void *arg)
{
    return folio_kv_cache_copy_blocks(w->cache, w->cache, NULL, 0, arg);
}
static folio_status sized_tensors(whole *w, void *arg)
{
    return folio_attention_forward(w->plan, 0, FOLIO_ATTENTION_DECODER, w->cache, 0, arg, NULL);
}
static folio_status sized_merge(whole *w, void *arg)
{
    return folio_merge_states(w->ctx, arg, NULL);
}
static folio_status sized_attend(whole *w, void *arg) { return folio_attend(w->ctx, arg, NULL); }
static folio_status sized_shape(whole *w, void *arg)
{
    (void)w;
    folio_kv_cache_desc c = small_cache();
    return folio_kv_cache_get_shape("cpu", &c, arg);
}
static folio_status sized_context_info(whole *w, void *arg)
{
    return folio_context_get_info(w->ctx, arg);
}
static folio_status sized_view(whole *w, void *arg)
{
    return folio_kv_cache_get_view(w->cache, 0, arg);
}
static folio_status sized_summary(whole *w, void *arg)
{
    return folio_batch_get_info(w->batch, arg);
}
static folio_status sized_batch_view(whole *w, void *arg)
{
    return folio_batch_get_view(w->batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, arg);
}
static folio_status sized_plan_info(whole *w, void *arg)
{
    return folio_plan_get_info(w->plan, 0, FOLIO_ATTENTION_DECODER, arg);
}
static folio_status sized_backend(whole *w, void *arg)
{
    (void)w;
    return folio_backend_get_info("cpu", arg);
}

static float zeros[16 * 5 * 2 * 32 * 2];
static void *const zero_rows[1] = {zeros};
static const int64_t two_slots[2] = {4, 9};
static const int32_t one_length[1] = {3};
static const int32_t starts[2] = {0, 3};
static const folio_state one_part[1] = {
    {.out = {.data = zeros, .dtype = FOLIO_F32, .tokens = 1}, .lse = zeros}};
static float sized_out[18 * 16];
typedef struct {
    const char *name;
    folio_status (*call)(whole *w, void *arg);
    const void *good; /* NULL: the struct is filled by the call */
    size_t size;
    size_t older; /* what a client of an older header would say; fields past it get defaults */
} sized_case;
/* clang-format off */
#define SIZED(type, call, field, ...)                                                              \
    {#type, call, &(const type){__VA_ARGS__}, sizeof(type), offsetof(type, field)}
#define FILLED(type, call, field) {#type, call, NULL, sizeof(type), offsetof(type, field)}
/* clang-format on */

static const sized_case sized_cases[] = {
    SIZED(folio_context_desc, sized_context, level, .backend = "cpu", .num_threads = 1),
    SIZED(folio_attention_desc, sized_attention, soft_cap, .num_heads = 2, .k_head_size = 8,
          .dtype = FOLIO_F32),
    SIZED(folio_kv_cache_desc, sized_cache, layout, .num_blocks = 2, .num_layers = 1,
          .block_size = 16, .num_kv_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32),
    SIZED(folio_kv_memory, sized_memory, k_strides, .k = zero_rows, .k_bytes = sizeof zeros),
    SIZED(folio_batch_desc, sized_batch, decode_query_len, .block_size = 16),
    SIZED(folio_batch_seq, sized_seq, phase, .query_len = 3, .seq_len = 3),
    SIZED(folio_batch_arrays, sized_arrays, phases, .num_seqs = 1, .query_start = starts,
          .seq_lens = one_length),
    SIZED(folio_plan_desc, sized_plan, flags, .num_attentions = 1, .block_size = 16,
          .num_blocks = 4, .max_seqs = 2, .max_query_tokens = 8, .max_seq_len = 16),
    SIZED(folio_kv_write, sized_write, k_scale,
          .k = {.data = zeros, .dtype = FOLIO_F32, .tokens = 2},
          .v = {.data = zeros, .dtype = FOLIO_F32, .tokens = 2}, .slots = two_slots),
    SIZED(folio_kv_gather, sized_gather, k_scale,
          .k = {.data = sized_out, .dtype = FOLIO_F32, .tokens = 2}, .slots = two_slots,
          .num_slots = 2),
    SIZED(folio_kv_rows, sized_rows, num_blocks, .k = sized_out, .v = sized_out,
          .k_scales = sized_out, .v_scales = sized_out),
    SIZED(folio_run, sized_run, stream, .stream = NULL),
    SIZED(folio_tensors, sized_tensors, lse, .q = {.data = zeros, .tokens = 18},
          .k = {.data = zeros, .tokens = 18}, .v = {.data = zeros, .tokens = 18},
          .out = {.data = sized_out, .tokens = 18}),
    SIZED(folio_merge, sized_merge, lse, .num_heads = 2, .head_size = 8, .num_parts = 1,
          .parts = one_part, .out = {.data = sized_out, .dtype = FOLIO_F32, .tokens = 1}),
    SIZED(folio_attend_args, sized_attend, query_start, .q = {zeros, FOLIO_F32, 1, 0, 0},
          .k = {zeros, 0, 1, 0, 0}, .v = {zeros, 0, 1, 0, 0}, .out = {sized_out, 0, 1, 0, 0},
          .num_heads = 1, .k_head_size = 8, .num_seqs = 1),
    FILLED(folio_kv_cache_shape, sized_shape, layer_bytes),
    FILLED(folio_context_info, sized_context_info, device),
    FILLED(folio_kv_cache_view, sized_view, k_array),
    FILLED(folio_batch_info, sized_summary, num_decodes),
    FILLED(folio_batch_view, sized_batch_view, query_lens),
    FILLED(folio_plan_info, sized_plan_info, num_split_items),
    FILLED(folio_backend_info, sized_backend, layouts),
};

static void check_sizes(whole *w, const sized_case *s)
{
    enum { TAIL = 24 };
    _Alignas(16) unsigned char arg[1024];
    const size_t sizes[] = {0, s->size, s->size + TAIL, s->size + TAIL, s->older};
    for (int i = 0; i < COUNT_OF(sizes); i++) {
        memset(arg, 0, sizeof arg);
        if (s->good) memcpy(arg, s->good, s->size);
        memcpy(arg, &sizes[i], sizeof sizes[i]);
        if (i == 3) arg[s->size + TAIL - 1] = 1; /* a field this library does not know */
        if (i == 4) memset(arg + s->older, 0xFF, sizeof arg - s->older); /* not the client's */
        support_mark_error();
        folio_status status = s->call(w, arg);
        if (i == 0 || i == 3)
            support_refused(__FILE__, __LINE__, s->name, status, FOLIO_ERR_ARGUMENT, "struct_size");
        else
            CHECK_MSG(status == FOLIO_OK, "%s, struct_size %zu: %s", s->name, sizes[i],
                      folio_last_error());
        CHECK(memcmp(arg, &sizes[i], sizeof sizes[i]) == 0);
        if (i == 4)
            CHECK_MSG(support_is_poison(arg + s->older, sizeof arg - s->older),
                      "%s: written past the client's struct", s->name);
    }
}

TEST(errors_memory, struct_sizes)
{
    folio_allocator none = {0};
    for (int b = 0; b < SUPPORT_NUM_BACKENDS; b++) {
        whole w = {0};
        CHECK_OK(make_whole(&w, support_backends[b], &none));
        if (w.plan == NULL) continue;
        for (int i = 0; i < COUNT_OF(sized_cases); i++) check_sizes(&w, &sized_cases[i]);
        folio_plan_destroy(w.plan);
        folio_batch_destroy(w.batch);
        folio_kv_cache_destroy(w.cache);
        folio_attention_destroy(w.attention);
        folio_context_destroy(w.ctx);
    }
}
