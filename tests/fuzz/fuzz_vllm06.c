/*
 * fuzz_vllm06.c: vLLM 0.6's layer: a step through its builder, its metadata again from the fields with one number wrong
 * now and then, the views, a forward over a cache, the operators. A forward that is accepted leaves no NaN in output.
 */
#include "fuzz/fuzz.h"

#include <folio/folio_vllm06.h>
#include <math.h>
#include <stdlib.h>

const char fuzz_name[] = "vllm06";
enum { MAX_SEQS = 5, MAX_BLOCKS = 8 };

typedef struct world {
    folio_vllm06_state *state;
    const folio_vllm06_backend *backend;
    folio_vllm06_impl *impl;
    folio_vllm06_impl_desc desc;
    folio_vllm06_metadata *built, *again;
    folio_vllm06_kv_cache cache;
    int64_t block_size, num_blocks, prompt_tokens, decodes;
} world;

/* One of its own for each input: it keeps plans and caches. */
static folio_vllm06_state *make_state(const char *compute)
{
    folio_vllm06_state *state = NULL;
    folio_context_desc d = FOLIO_WITH(folio_context_desc, .num_threads = 1,
                                      .allocator = support_allocator(&fuzz_memory));
    FUZZ_CHECK(folio_vllm06_state_create(compute, &d, &state) == FOLIO_OK, "no state");
    return state;
}

static void draw_layer(fuzz_input *in, world *w)
{
    static const char *const backends[] = {"xformers", "torch-sdpa", "ipex", "torch-sdpa-ipex"};
    static const int32_t sizes[] = {32, 16, 64};
    static const folio_dtype types[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};
    static const char *const kv_types[] = {NULL, "auto", "fp8", "fp8_e5m2"};
    w->backend = folio_vllm06_backend_find(FUZZ_PICK(in, backends));
    int32_t size = FUZZ_PICK(in, sizes), heads = (int32_t)fuzz_int(in, 1, 3);
    w->desc = FOLIO_WITH(
        folio_vllm06_impl_desc, .num_heads = heads, .num_kv_heads = fuzz_chance(in, 3) ? 1 : heads,
        .head_size = (int32_t)fuzz_any(in, size, size),
        .sliding_window = fuzz_chance(in, 3) ? fuzz_any(in, 1, 40) : 0,
        .scale = (float)fuzz_any(in, 0, 1), .kv_cache_dtype = FUZZ_PICK(in, kv_types),
        .logits_soft_cap = fuzz_chance(in, 6) ? (float)fuzz_any(in, 1, 30) : 0,
        .dtype = FUZZ_PICK(in, types), .compat = fuzz_chance(in, 4));
    if (fuzz_chance(in, 4)) w->desc.alibi_slopes = fuzz_numbers(in, FOLIO_F32, heads);
}

static bool add_sequence(fuzz_input *in, world *w, folio_vllm06_builder *builder, bool prompt)
{
    int32_t *table = fuzz_zeros(in, MAX_BLOCKS, sizeof *table);
    folio_vllm06_seq s = FOLIO_WITH(folio_vllm06_seq, .is_prompt = prompt, .block_table = table);
    int64_t most = MAX_BLOCKS * w->block_size;
    if (most > 40) most = 40;
    s.token_len = prompt ? fuzz_any(in, 1, 6) : fuzz_any(in, 1, 1);
    if (!prompt || fuzz_chance(in, 3)) s.context_len = fuzz_any(in, 0, most - 7);
    s.num_blocks = fuzz_any(in, MAX_BLOCKS, MAX_BLOCKS);
    if (s.num_blocks > MAX_BLOCKS) s.num_blocks = 0;
    int64_t first = fuzz_int(in, 0, MAX_SEQS - 1) * MAX_BLOCKS;
    for (int64_t b = 0; b < MAX_BLOCKS; b++) table[b] = (int32_t)(first + b);
    fuzz_spoil32(in, table, MAX_BLOCKS, 0, w->num_blocks - 1);
    if (s.token_len > 6) s.token_len = 0; /* more rows than there is memory for */
    if (!fuzz_took(folio_vllm06_builder_add(builder, &s))) return false;
    if (prompt) w->prompt_tokens += s.token_len;
    else w->decodes++;
    return true;
}

static bool build(fuzz_input *in, world *w)
{
    folio_vllm06_builder *builder = NULL;
    folio_vllm06_builder_desc d = FOLIO_WITH(
        folio_vllm06_builder_desc, .block_size = fuzz_any(in, w->block_size, w->block_size),
        .sliding_window = w->desc.sliding_window,
        .chunked_prefill_enabled = (int32_t)fuzz_any(in, 1, 1));
    if (!fuzz_took(folio_vllm06_builder_create(w->state, w->backend, &d, &builder))) return false;
    int64_t prompts = fuzz_int(in, 0, 3),
            decodes = w->backend->mixes || prompts == 0 ? fuzz_int(in, 0, 2) : 0;
    bool ok = prompts + decodes > 0;
    for (int64_t i = 0; i < prompts + decodes && ok; i++)
        ok = add_sequence(in, w, builder, i < prompts);
    ok = ok && fuzz_took(folio_vllm06_builder_build(builder, &w->built));
    folio_vllm06_builder_destroy(builder);
    return ok;
}

static const int32_t *copy32(fuzz_input *in, const int32_t *numbers, int64_t n)
{
    if (numbers == NULL) return NULL;
    int32_t *copy = fuzz_zeros(in, n, sizeof *copy);
    memcpy(copy, numbers, (size_t)n * sizeof *copy);
    fuzz_spoil32(in, copy, n, 0, n > 0 ? numbers[n - 1] : 0);
    return copy;
}

/* The same metadata from its fields, in memory of just their size, with a number of them wrong now and then. */
static bool make_again(fuzz_input *in, world *w)
{
    folio_vllm06_metadata_fields f = *folio_vllm06_metadata_get(w->built);
    int64_t seqs = f.num_prefills + f.num_decode_tokens,
            rows = f.num_prefill_tokens + f.num_decode_tokens;
    int64_t *slots = fuzz_zeros(in, rows, sizeof *slots);
    for (int64_t i = 0; i < rows; i++) slots[i] = f.slot_mapping[i];
    fuzz_spoil64(in, slots, rows, -1, w->num_blocks * w->block_size - 1);
    f.slot_mapping = slots;
    f.seq_lens = copy32(in, f.seq_lens, f.chunked_prefill ? f.num_prefills : seqs);
    f.seq_lens_tensor = copy32(
        in, f.seq_lens_tensor,
        f.chunked_prefill ? (f.num_decode_tokens ? f.num_decode_tokens : f.num_prefills) : seqs);
    f.context_lens_tensor = copy32(in, f.context_lens_tensor, seqs);
    f.query_start_loc =
        copy32(in, f.query_start_loc, (f.chunked_prefill ? f.num_prefills : seqs) + 1);
    f.seq_start_loc = copy32(in, f.seq_start_loc, seqs + 1);
    f.block_tables =
        copy32(in, f.block_tables,
               (f.chunked_prefill ? f.num_decode_tokens : seqs) * f.block_tables_stride);
    f.max_query_len = fuzz_any(in, f.max_query_len, f.max_query_len);
    f.max_prefill_seq_len = fuzz_any(in, f.max_prefill_seq_len, f.max_prefill_seq_len);
    f.max_decode_seq_len = fuzz_any(in, f.max_decode_seq_len, f.max_decode_seq_len);
    f.use_cuda_graph = (int32_t)fuzz_any(in, f.use_cuda_graph, f.use_cuda_graph);
    f.num_encoder_tokens = fuzz_any(in, 0, 0);
    return fuzz_took(folio_vllm06_make_metadata(w->state, w->backend, &f, &w->again));
}

static void look(const folio_vllm06_metadata *m)
{
    const int32_t *q = NULL, *kv = NULL;
    folio_vllm06_seq_len_block_table_args args;
    const folio_vllm06_metadata *prompts = folio_vllm06_prefill_metadata(m),
                                *decodes = folio_vllm06_decode_metadata(m);
    if (prompts != NULL)
        FUZZ_CHECK(folio_vllm06_prefill_metadata(prompts) == prompts,
                   "a view's view is not itself");
    if (decodes != NULL)
        FUZZ_CHECK(folio_vllm06_metadata_get(decodes)->num_prefills == 0, "decodes with prompts");
    for (int type = 0; type < 4; type++) {
        folio_vllm06_get_seq_lens(m, (folio_attention_type)type, &q, &kv);
        folio_vllm06_get_seq_len_block_table_args(m, 1, (folio_attention_type)type, &args);
        folio_vllm06_get_seq_len_block_table_args(m, 0, (folio_attention_type)type, &args);
    }
}

static bool make_cache(fuzz_input *in, world *w)
{
    const char *kv = w->desc.kv_cache_dtype;
    folio_dtype dtype = kv == NULL || strcmp(kv, "auto") == 0 ? w->desc.dtype
                        : strcmp(kv, "fp8_e5m2") == 0         ? FOLIO_FP8_E5M2
                                                              : FOLIO_FP8_E4M3;
    int64_t numbers = w->num_blocks * w->block_size * w->desc.num_kv_heads * w->desc.head_size;
    size_t bytes = (size_t)numbers * folio_dtype_size(dtype), less = fuzz_chance(in, 10) ? 1 : 0;
    bool one = fuzz_chance(in, 2);
    w->cache = (folio_vllm06_kv_cache){.dtype = dtype,
                                       .block_size = (int32_t)w->block_size,
                                       .num_kv_heads = w->desc.num_kv_heads,
                                       .head_size = w->desc.head_size,
                                       .num_blocks = w->num_blocks};
    w->cache.bytes = (one ? 2 * bytes : bytes) - less;
    w->cache.key_cache = fuzz_zeros(in, (int64_t)w->cache.bytes, 1);
    if (!one) w->cache.value_cache = fuzz_zeros(in, (int64_t)(bytes - less), 1);
    return less == 0;
}

static void forward(fuzz_input *in, world *w, const folio_vllm06_metadata *m)
{
    int64_t rows = w->prompt_tokens + w->decodes,
            q = (int64_t)w->desc.num_heads * w->desc.head_size;
    int64_t kv = (int64_t)w->desc.num_kv_heads * w->desc.head_size;
    bool whole = make_cache(in, w), bare = fuzz_chance(in, 6), valid = fuzz_is_valid(in);
    folio_vllm06_forward_args a =
        FOLIO_WITH(folio_vllm06_forward_args,
                   .query = {fuzz_numbers(in, w->desc.dtype, rows * q), w->desc.dtype, rows, 0, 0},
                   .key = {fuzz_numbers(in, w->desc.dtype, rows * kv), w->desc.dtype,
                           fuzz_any(in, rows, rows), 0, 0},
                   .value = {fuzz_numbers(in, w->desc.dtype, rows * kv), w->desc.dtype, rows, 0, 0},
                   .kv_cache = bare ? NULL : &w->cache, .attn_metadata = m,
                   .k_scale = (float)fuzz_any(in, 0, 2), .v_scale = (float)fuzz_any(in, 0, 2),
                   .attn_type = (folio_attention_type)fuzz_any(in, 0, 0),
                   .output = {fuzz_poison(in, rows * q, folio_dtype_size(w->desc.dtype)),
                              w->desc.dtype, rows, 0, 0});
    if (a.key.tokens > rows) a.key.tokens = rows - 1;
    if (!fuzz_took(folio_vllm06_forward(w->impl, &a, NULL))) return;
    bool encoder = a.attn_type == FOLIO_ATTENTION_ENCODER || /* their keys are in no cache */
                   a.attn_type == FOLIO_ATTENTION_ENCODER_ONLY;
    FUZZ_CHECK(whole || bare || encoder, "a cache that is one byte too short is accepted");
    for (int64_t i = 0; valid && i < rows * q; i++)
        FUZZ_CHECK(!isnan(kit_load(w->desc.dtype, a.output.data, i)),
                   "number %lld of output is NaN", (long long)i);
}

static void operators(fuzz_input *in, world *w)
{
    int64_t n = fuzz_int(in, 1, 4), q = (int64_t)w->desc.num_heads * w->desc.head_size;
    int64_t kv = (int64_t)w->desc.num_kv_heads * w->desc.head_size,
            *slots = fuzz_zeros(in, n, sizeof *slots);
    int32_t *tables = fuzz_zeros(in, n * MAX_BLOCKS, sizeof *tables),
            *lens = fuzz_zeros(in, n, sizeof *lens);
    for (int64_t i = 0; i < n; i++) slots[i] = fuzz_int(in, -1, w->num_blocks * w->block_size - 1);
    fuzz_spoil64(in, slots, n, -1, w->num_blocks * w->block_size - 1);
    for (int64_t i = 0; i < n; i++) lens[i] = (int32_t)fuzz_int(in, 0, MAX_BLOCKS * w->block_size);
    fuzz_spoil32(in, lens, n, 0, MAX_BLOCKS * w->block_size);
    for (int64_t i = 0; i < n * MAX_BLOCKS; i++) tables[i] = (int32_t)(i % w->num_blocks);
    fuzz_spoil32(in, tables, n * MAX_BLOCKS, 0, w->num_blocks - 1);
    make_cache(in, w);
    int32_t x = fuzz_chance(in, 3) ? 1 : 0;
    folio_vllm06_reshape_and_cache_args r = FOLIO_WITH(
        folio_vllm06_reshape_and_cache_args, .key = fuzz_numbers(in, w->desc.dtype, n * kv),
        .value = fuzz_numbers(in, w->desc.dtype, n * kv), .dtype = w->desc.dtype,
        .x = (int32_t)fuzz_any(in, x, x), .num_tokens = n, .slot_mapping = slots);
    fuzz_took(folio_vllm06_reshape_and_cache(w->state, &r, &w->cache, NULL));
    folio_vllm06_paged_attention_args a = FOLIO_WITH(
        folio_vllm06_paged_attention_args,
        .out = fuzz_poison(in, n * q, folio_dtype_size(w->desc.dtype)),
        .query = fuzz_numbers(in, w->desc.dtype, n * q), .dtype = w->desc.dtype,
        .num_heads = w->desc.num_heads, .num_seqs = n, .block_tables = tables,
        .max_num_blocks_per_seq = MAX_BLOCKS, .seq_lens = lens,
        .max_seq_len = fuzz_any(in, MAX_BLOCKS * w->block_size, MAX_BLOCKS * w->block_size),
        .x = x);
    bool valid = fuzz_is_valid(in);
    if (!fuzz_took(folio_vllm06_paged_attention_v1(w->state, &a, &w->cache, NULL))) return;
    for (int64_t i = 0; valid && i < n * q; i++)
        FUZZ_CHECK(!isnan(kit_load(w->desc.dtype, a.out, i)), "number %lld of out is NaN",
                   (long long)i);
}

static void move_blocks(fuzz_input *in, world *w)
{
    folio_block_pair pairs[3];
    int64_t n = fuzz_int(in, 0, 3);
    for (int64_t i = 0; i < n; i++)
        pairs[i] =
            (folio_block_pair){fuzz_any(in, 2 * i, 2 * i), fuzz_any(in, 2 * i + 1, 2 * i + 1)};
    make_cache(in, w);
    fuzz_took(folio_vllm06_copy_blocks(w->state, &w->cache, 1, pairs, n, NULL));
    folio_vllm06_kv_cache from = w->cache;
    make_cache(in, w);
    fuzz_took(folio_vllm06_swap_blocks(w->state, &from, &w->cache, pairs, n, NULL));
}

void fuzz_run(fuzz_input *in)
{
    static const int64_t blocks[] = {16, 4, 8, 1};
    world w = {.state = make_state(fuzz_chance(in, 3) ? "reference" : "cpu"),
               .block_size = FUZZ_PICK(in, blocks),
               .num_blocks = MAX_SEQS * MAX_BLOCKS};
    draw_layer(in, &w);
    bool made = fuzz_took(folio_vllm06_make_impl(w.state, w.backend, &w.desc, &w.impl));
    int64_t what = fuzz_int(in, 0, 5);
    if (made && w.desc.head_size <= 64 && what < 4) {
        if (build(in, &w)) {
            look(w.built);
            if (what < 2) forward(in, &w, w.built);
            else if (make_again(in, &w)) look(w.again), forward(in, &w, w.again);
        }
    } else if (made && w.desc.head_size <= 64 && what == 4) operators(in, &w);
    else if (made && w.desc.head_size <= 64) move_blocks(in, &w);
    folio_vllm06_metadata_destroy(w.again);
    folio_vllm06_metadata_destroy(w.built);
    folio_vllm06_impl_destroy(w.impl);
    folio_vllm06_state_destroy(w.state);
}
