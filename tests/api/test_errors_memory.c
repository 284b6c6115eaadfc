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
    folio_tensors t = FOLIO_WITH(folio_tensors, .q = {.data = q, .dtype = FOLIO_F32, .tokens = 18},
                                 .k = {.data = k, .dtype = FOLIO_F32, .tokens = 18},
                                 .v = {.data = k, .dtype = FOLIO_F32, .tokens = 18},
                                 .out = {.data = out, .dtype = FOLIO_F32, .tokens = 18});
    kit_poison_cache(w->cache);
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
                              .max_seq_len = 64, .max_encoder_tokens = 32,
                              .flags = FOLIO_PLAN_NOTE_BAD));
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

static const folio_kv_cache_desc small_cache = {.struct_size = sizeof small_cache,
                                                .num_blocks = 5,
                                                .num_layers = 1,
                                                .block_size = 16,
                                                .num_kv_heads = 2,
                                                .k_head_size = 32,
                                                .dtype = FOLIO_F32,
                                                .layout = FOLIO_LAYOUT_NHD};

static size_t export_bytes;

static folio_status with_passport(const whole *w, const folio_kv_passport *passport)
{
    folio_kv_blocks none = FOLIO_WITH(folio_kv_blocks, .passport = passport);
    return folio_kv_cache_export(w->cache, &none, NULL, 0, &export_bytes, NULL);
}

/* Each call hands its struct to the library and gives back what it made. */
#define MAKE(name, type, call) SIZED_MAKE(name, whole, type, call)
#define CALL(name, call) SIZED_CALL(name, whole, call)
MAKE(sized_context, folio_context, folio_context_create(arg, &made))
MAKE(sized_attention, folio_attention, folio_attention_create(w->ctx, arg, &made))
MAKE(sized_cache, folio_kv_cache, folio_kv_cache_create(w->ctx, arg, &made))
MAKE(sized_rotary, folio_rotary, folio_rotary_create(w->ctx, arg, &made))
MAKE(sized_batch, folio_batch, folio_batch_create(w->ctx, arg, &made))
CALL(sized_write, folio_kv_cache_write(w->cache, 0, arg, NULL))
CALL(sized_gather, folio_kv_cache_gather(w->cache, 0, arg, NULL))
CALL(sized_rows, folio_kv_cache_unpack(w->cache, 0, arg, NULL))
CALL(sized_blocks, folio_kv_cache_export(w->cache, arg, NULL, 0, &export_bytes, NULL))
CALL(sized_passport, with_passport(w, arg))
CALL(sized_run, folio_kv_cache_copy_blocks(w->cache, w->cache, NULL, 0, arg))
CALL(sized_tensors,
     folio_attention_forward(w->plan, 0, FOLIO_ATTENTION_DECODER, w->cache, 0, arg, NULL))
CALL(sized_merge, folio_state_merge(w->ctx, arg, NULL))
CALL(sized_context_info, folio_context_get_info(w->ctx, arg))
CALL(sized_kernel, folio_context_get_kernel(w->ctx, 0, arg))
CALL(sized_view, folio_kv_cache_get_view(w->cache, 0, arg))
CALL(sized_summary, folio_batch_get_info(w->batch, arg))
CALL(sized_batch_view,
     folio_batch_get_view(w->batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, arg))
CALL(sized_bad_write, folio_plan_get_bad_write(w->plan, arg))
CALL(sized_plan_info, folio_plan_get_info(w->plan, 0, FOLIO_ATTENTION_DECODER, arg))
CALL(sized_backend, folio_backend_get_info("cpu", arg))
CALL(sized_shape, folio_kv_cache_get_shape("cpu", &small_cache, arg))
MAKE(sized_memory, folio_kv_cache, folio_kv_cache_wrap(w->ctx, &small_cache, arg, &made))

static folio_status with_batch(const whole *w, const folio_batch_seq *seq, const folio_step *step)
{
    folio_batch *made = support_batch(w->ctx, 16);
    folio_status status = seq ? folio_batch_add(made, seq) : folio_batch_set(made, step);
    folio_batch_destroy(made);
    return status;
}
CALL(sized_seq, with_batch(w, arg, NULL))
CALL(sized_step, with_batch(w, NULL, arg))

static folio_status with_plan(whole *w, folio_plan_desc *d, folio_plan **made)
{
    if (d->struct_size > 0) d->attentions = &w->attention;
    return folio_plan_create(w->ctx, d, made);
}
MAKE(sized_plan, folio_plan, with_plan(w, arg, &made))

static float zeros[16 * 5 * 2 * 32 * 2];
static void *const zero_rows[1] = {zeros};
static const int64_t two_slots[2] = {4, 9};
static const int32_t one_length[1] = {3};
static const int32_t starts[2] = {0, 3};
static const folio_state one_part[1] = {
    {.out = {.data = zeros, .dtype = FOLIO_F32, .tokens = 1}, .lse = zeros}};
static float sized_out[18 * 16];
static const support_sized sized_cases[] = {
    SIZED(folio_context_desc, sized_context, level, .backend = "cpu", .num_threads = 1),
    SIZED(folio_attention_desc, sized_attention, soft_cap, .num_heads = 2, .k_head_size = 8,
          .dtype = FOLIO_F32),
    SIZED(folio_kv_cache_desc, sized_cache, layout, .num_blocks = 2, .num_layers = 1,
          .block_size = 16, .num_kv_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32),
    SIZED(folio_kv_memory, sized_memory, k_strides, .k = zero_rows, .k_bytes = sizeof zeros),
    SIZED(folio_rotary_desc, sized_rotary, cos, .num_dims = 8, .num_positions = 3),
    SIZED(folio_batch_desc, sized_batch, decode_query_len, .block_size = 16),
    SIZED(folio_batch_seq, sized_seq, phase, .query_len = 3, .seq_len = 3),
    SIZED(folio_step, sized_step, phases, .num_seqs = 1, .query_start = starts,
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
    SIZED(folio_kv_blocks, sized_blocks, passport, .num_tokens = 0),
    SIZED(folio_kv_passport, sized_passport, rotary, .model = "a model"),
    SIZED(folio_run, sized_run, stream, .stream = NULL),
    SIZED(folio_tensors, sized_tensors, lse, .q = {.data = zeros, .dtype = FOLIO_F32, .tokens = 18},
          .k = {.data = zeros, .dtype = FOLIO_F32, .tokens = 18},
          .v = {.data = zeros, .dtype = FOLIO_F32, .tokens = 18},
          .out = {.data = sized_out, .dtype = FOLIO_F32, .tokens = 18}),
    SIZED(folio_merge, sized_merge, lse, .num_heads = 2, .head_size = 8, .num_parts = 1,
          .parts = one_part, .out = {.data = sized_out, .dtype = FOLIO_F32, .tokens = 1}),
    FILLED(folio_kv_cache_shape, sized_shape, layer_bytes),
    FILLED(folio_context_info, sized_context_info, device),
    FILLED(folio_context_kernel, sized_kernel, layout),
    FILLED(folio_kv_cache_view, sized_view, k_array),
    FILLED(folio_batch_info, sized_summary, num_decodes),
    FILLED(folio_batch_view, sized_batch_view, query_lens),
    FILLED(folio_plan_info, sized_plan_info, num_split_items),
    FILLED(folio_plan_bad_write, sized_bad_write, position),
    FILLED(folio_backend_info, sized_backend, layouts),
};

TEST(errors_memory, struct_sizes)
{
    folio_allocator none = {0};
    for (int b = 0; b < SUPPORT_NUM_BACKENDS; b++) {
        whole w = {0};
        CHECK_OK(make_whole(&w, support_backends[b], &none));
        if (w.plan == NULL) continue;
        support_check_sizes(&w, sized_cases, COUNT_OF(sized_cases));
        kit_layer_close(&w);
        folio_context_destroy(w.ctx);
    }
}
