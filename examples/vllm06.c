/*
 * vllm06.c: runs each of vLLM 0.6's three backends, found by name.
 * Two layers, two prompts in one step, then one decode step over the caches that step has filled.
 */
#include "example.h"

#include <folio/folio_vllm06.h>

#include <math.h>

enum { HEADS = 4, KV_HEADS = 2, SIZE = 64, BLOCK = 16, BLOCKS = 8, LAYERS = 2, SEQS = 2 };

static float q[24 * HEADS * SIZE], k[24 * KV_HEADS * SIZE], v[24 * KV_HEADS * SIZE];
static float out[24 * HEADS * SIZE], memory[LAYERS][2 * BLOCKS * BLOCK * KV_HEADS * SIZE];

static folio_tensor make_tensor(float *x, int64_t tokens, int heads, unsigned seed)
{
    make_numbers(x, tokens * heads * SIZE, seed);
    return (folio_tensor){.data = x, .dtype = FOLIO_F32, .tokens = tokens};
}

/* Both layers over one step's metadata; the sum of what the last one gives. */
static double run_step(folio_vllm06_impl *impl, const folio_vllm06_kv_cache *caches,
                       folio_vllm06_metadata *metadata)
{
    const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(metadata);
    int64_t tokens = f->num_prefill_tokens + f->num_decode_tokens;
    for (unsigned layer = 0; layer < LAYERS; layer++) {
        folio_vllm06_forward_args a =
            FOLIO_WITH(folio_vllm06_forward_args, .attn_type = FOLIO_ATTENTION_DECODER);
        a.query = make_tensor(q, tokens, HEADS, 3 * layer);
        a.key = make_tensor(k, tokens, KV_HEADS, 3 * layer + 1);
        a.value = make_tensor(v, tokens, KV_HEADS, 3 * layer + 2);
        a.output = (folio_tensor){.data = out, .dtype = FOLIO_F32, .tokens = tokens};
        a.kv_cache = &caches[layer];
        a.attn_metadata = metadata;
        must(folio_vllm06_forward(impl, &a, NULL));
    }
    double sum = 0;
    for (int64_t i = 0; i < tokens * HEADS * SIZE; i++) sum += (double)out[i];
    return sum;
}

static void run_backend(const folio_vllm06_backend *b, double sums[2])
{
    static const int32_t blocks[SEQS][2] = {{3, 5}, {6, 1}};
    static const int64_t lens[SEQS] = {15, 9};
    folio_vllm06_state *state;
    folio_vllm06_impl *impl;
    folio_vllm06_builder *builder;
    folio_vllm06_impl_desc d = {.struct_size = sizeof d, .num_heads = HEADS, .head_size = SIZE};
    d.num_kv_heads = KV_HEADS;
    d.dtype = FOLIO_F32;
    must(folio_vllm06_state_create("auto", NULL, &state));
    must(folio_vllm06_make_impl(state, b, &d, &impl));
    folio_vllm06_builder_desc how = FOLIO_WITH(folio_vllm06_builder_desc, .block_size = BLOCK);
    must(folio_vllm06_builder_create(state, b, &how, &builder));
    int64_t shape[3]; /* 2, BLOCKS, the rest */
    folio_vllm06_kv_cache caches[LAYERS];
    must(folio_vllm06_get_kv_cache_shape(BLOCKS, BLOCK, KV_HEADS, SIZE, shape));
    for (int i = 0; i < LAYERS; i++)
        caches[i] = (folio_vllm06_kv_cache){.key_cache = memory[i],
                                            .bytes = sizeof memory[i],
                                            .dtype = FOLIO_F32,
                                            .block_size = BLOCK,
                                            .num_kv_heads = KV_HEADS,
                                            .head_size = SIZE,
                                            .num_blocks = shape[1]};
    for (int step = 0; step < 2; step++) {
        folio_vllm06_metadata *metadata;
        for (int i = 0; i < SEQS; i++) {
            folio_vllm06_seq s =
                FOLIO_WITH(folio_vllm06_seq, .block_table = blocks[i], .num_blocks = 2);
            s.is_prompt = step == 0;
            s.token_len = step == 0 ? lens[i] : 1;
            s.context_len = step == 0 ? 0 : lens[i];
            must(folio_vllm06_builder_add(builder, &s));
        }
        must(folio_vllm06_builder_build(builder, &metadata));
        sums[step] = run_step(impl, caches, metadata);
        folio_vllm06_metadata_destroy(metadata);
    }
    printf("%-10s prompts %9.5f, decodes %9.5f\n", b->name, sums[0], sums[1]);
    folio_vllm06_builder_destroy(builder);
    folio_vllm06_impl_destroy(impl);
    folio_vllm06_state_destroy(state);
}

int main(void)
{
    double x[2], t[2], i[2]; /* two layouts, three names, one attention */
    run_backend(folio_vllm06_backend_find("xformers"), x);
    run_backend(folio_vllm06_backend_find("torch-sdpa"), t);
    run_backend(folio_vllm06_backend_find("ipex"), i);
    return !(fabs(x[0] - t[0]) + fabs(x[1] - t[1]) + fabs(x[0] - i[0]) + fabs(x[1] - i[1]) < 1e-3);
}
