/* check_cases.c: the list of what `folio check` runs, and how one case is run. */
#include "check/check.h"

#include <stdarg.h>
#include <stdio.h>
#include <string.h>

/*
 * "kernels" and "combinations" are no features: every pair of types and layout, everything at
 * once.
 */
const check_part check_parts[] = {
    {"describe", "answers", 1, 1, NULL, run_describe},
    {"describe", "shape", 48, 48, NULL, run_shape},
    {"metadata", "summary", 12, 200, NULL, run_metadata},
    {"views", "views", 12, 200, NULL, run_views},
    {"kernels", "lines", 40, 160, NULL, run_lines},
    {"kernels", "attend", 144, 432, make_kernels, NULL},
    {"kernels", "tiles", 18, 126, make_tiles, NULL},
    {"kernels", "alone", 36, 252, make_alone, NULL},
    {"kernels", "pairings", 252, 504, make_pairings, NULL},
    {"kernels", "xpacked", 72, 576, make_xpacked, NULL},
    {"kernels", "f32_rows", 60, 400, NULL, run_f32_rows},
    {"mixed_batch", "attend", 12, 80, make_mixed_batch, NULL},
    {"prefix_prefill", "attend", 12, 80, make_prefix_prefill, NULL},
    {"prefix_prefill", "long", 6, 156, make_long_prefix, NULL},
    {"decoder", "attend", 36, 144, make_decoder, NULL},
    {"decoder", "private_slots", 48, 480, NULL, run_private_slots},
    {"encoder", "attend", 12, 80, make_encoder, NULL},
    {"encoder_only", "attend", 12, 80, make_encoder_only, NULL},
    {"cross", "attend", 16, 100, make_cross, NULL},
    {"completeness", "names", 7, 7, NULL, run_completeness},
    {"profiling", "attend", 12, 60, make_profiling, NULL},
    {"gqa", "attend", 12, 60, make_gqa, NULL},
    {"alibi", "attend", 12, 80, make_alibi, NULL},
    {"sliding_window", "attend", 24, 150, make_sliding_window, NULL},
    {"alibi_window", "attend", 12, 80, make_alibi_window, NULL},
    {"alibi_window", "matrix", 18, 80, NULL, run_bias_write},
    {"soft_cap", "attend", 12, 60, make_soft_cap, NULL},
    {"sinks", "attend", 12, 60, make_sinks, NULL},
    {"rotary", "attend", 24, 160, make_rotary, NULL},
    {"rotary", "pass", 12, 60, NULL, run_rotary_pass},
    {"bias", "attend", 32, 192, make_bias, NULL},
    {"bias", "hidden_nan", 12, 60, make_bias_nan, NULL},
    {"f16_bf16", "attend", 18, 72, make_f16_bf16, NULL},
    {"fp8_kv", "attend", 20, 100, make_fp8_kv, NULL},
    {"head_scales", "attend", 20, 100, make_head_scales, NULL},
    {"int8_kv", "attend", 12, 80, make_int8_kv, NULL},
    {"head_sizes", "attend", 18, 82, make_head_sizes, NULL},
    {"latent", "attend", 24, 144, make_latent, NULL},
    {"block_sizes", "attend", 18, 60, make_block_sizes, NULL},
    {"layouts", "attend", 16, 96, make_layouts, NULL},
    {"page_tables", "attend", 15, 60, make_page_tables, NULL},
    {"page_tables", "bits", 8, 40, NULL, run_table_bits},
    {"block_moves", "pack", 48, 96, NULL, run_pack},
    {"block_moves", "copy", 48, 96, NULL, run_copy},
    {"block_moves", "swap", 48, 192, NULL, run_swap},
    {"block_moves", "gather", 48, 96, NULL, run_gather},
    {"positions", "attend", 18, 100, make_positions, NULL},
    {"more_queries", "attend", 24, 144, make_more_queries, NULL},
    {"kv_append", "attend", 12, 80, make_kv_append, NULL},
    {"kv_append", "bits", 6, 30, NULL, run_append_bits},
    {"graph", "attend", 12, 60, make_graph, NULL},
    {"graph", "bits", 8, 40, NULL, run_graph_bits},
    {"split_kv", "attend", 16, 64, make_split_kv, NULL},
    {"split_kv", "plan", 2, 2, NULL, run_split_plan},
    {"lse_merge", "states", 18, 60, NULL, run_merge},
    {"lse_merge", "parts", 12, 60, NULL, run_merge_parts},
    {"row_invariant", "bits", 33, 300, NULL, run_row_invariant},
    {"batch_invariant", "bits", 12, 60, NULL, run_batch_invariant},
    {"batch_invariant", "addresses", 12, 60, NULL, run_address_bits},
    {"combinations", "attend", 40, 500, make_combinations, NULL},
};
const int check_num_parts = (int)(sizeof check_parts / sizeof check_parts[0]);

int64_t check_int(check_draw *d, int64_t low, int64_t high)
{
    return kit_random_int(d->key, KIT_USER, d->count++, low, high);
}

bool check_chance(check_draw *d, int64_t one_in) { return check_int(d, 1, one_in) == 1; }

bool check_fail(check_outcome *out, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(out->message, sizeof out->message, format, args);
    va_end(args);
    out->ok = false;
    return false;
}

void check_pass(check_outcome *out)
{
    out->ok = true;
    out->message[0] = '\0';
}

/* A case's key: its seed and name. The number of the case is mixed in like a token. */
static uint64_t case_key(uint64_t seed, const check_part *part, int64_t index)
{
    uint64_t name = 0;
    for (const char *p = part->feature; *p; p++) name = name * 131 + (unsigned char)*p;
    for (const char *p = part->name; *p; p++) name = name * 131 + (unsigned char)*p;
    return kit_random_bits(seed, KIT_USER, (int64_t)name, index, 0, 0);
}

void check_run_attention(const check_env *env, const check_attention *c, check_outcome *out)
{
    kit_verdict v;
    kit_check(env->ctx, env->reference, &c->spec, c->type, c->seqs, c->num_seqs, &v);
    out->ok = v.ok;
    out->error = v.max_error;
    out->budget = v.budget;
    snprintf(out->message, sizeof out->message, "%s", v.message);
    if (!v.ok) kit_describe(&c->spec, c->type, c->seqs, c->num_seqs, out->what, sizeof out->what);
}

void check_run_case(const check_env *env, const check_part *part, int64_t index, check_outcome *out)
{
    check_draw d = {.key = case_key(env->seed, part, index)};
    *out = (check_outcome){0};
    if (part->run) {
        part->run(env, &d, index, out);
        return;
    }
    check_attention c = {0};
    part->make(env, &d, index, &c);
    c.spec.in_place = index % 3 == 1; /* 3 divides no list of layouts */
    check_settle(&c);
    check_run_attention(env, &c, out);
}
