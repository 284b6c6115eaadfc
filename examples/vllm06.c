/* vllm06.c: the interface of vLLM 0.6, by each of its three backends and by its operators: a prompt, decodes, blocks
 * copied and swapped, a bias, cross attention. Every row is compared with attention written out in plain loops. */
#include "example.h"

#include <folio/folio_vllm06.h>
#include <math.h>

enum { HEADS = 4, KV_HEADS = 2, SIZE = 64, BLOCK = 16, BLOCKS = 16, TOKENS = 20 };
enum { Q_ROW = HEADS * SIZE, K_ROW = KV_HEADS * SIZE, CACHE = BLOCKS * BLOCK * K_ROW };

static float q[TOKENS * Q_ROW], k[TOKENS * K_ROW], v[TOKENS * K_ROW], out[TOKENS * Q_ROW];
static float memory[2 * CACHE], spare[2 * CACHE]; /* K, then V */
static double worst;                              /* the largest difference */

/* Row `row` of out, over keys [first, end). */
static void compare(int64_t row, int64_t first, int64_t end)
{
    for (int64_t h = 0; h < HEADS; h++) {
        const float *qh = q + row * Q_ROW + h * SIZE, *oh = out + row * Q_ROW + h * SIZE;
        int64_t at = h / (HEADS / KV_HEADS) * SIZE; /* of the kv head, in a row of k or v */
        double p[TOKENS], sum = 0;
        for (int64_t j = first; j < end; j++) {
            double dot = 0;
            for (int64_t d = 0; d < SIZE; d++) dot += (double)qh[d] * (double)k[j * K_ROW + at + d];
            sum += p[j] = exp(dot / sqrt(SIZE));
        }
        for (int64_t d = 0; d < SIZE; d++) {
            double x = 0;
            for (int64_t j = first; j < end; j++) x += p[j] / sum * (double)v[j * K_ROW + at + d];
            worst = fmax(worst, fabs(x - (double)oh[d]));
        }
    }
}

static folio_vllm06_state *state;
static const folio_vllm06_backend *backend;
static folio_vllm06_impl *impl;
/* K and V in one allocation, its bytes, and sizes; V may have an allocation of its own. */
static folio_vllm06_kv_cache cache = {memory, NULL,     sizeof memory, FOLIO_F32,
                                      BLOCK,  KV_HEADS, SIZE,          BLOCKS};

static void fill_slots(int64_t *slots, const int32_t *table, int n)
{
    for (int t = 0; t < n; t++) slots[t] = table[t / BLOCK] * BLOCK + t % BLOCK;
}

static folio_tensor rows_of(float *x, int64_t n) { return (folio_tensor){x, FOLIO_F32, n, 0, 0}; }

/* One step: rows [row, row + n) of q and out; keys of self-attention are those of the same tokens. */
static void step(folio_vllm06_metadata_fields f, folio_attention_type type, int64_t row, int64_t n)
{
    int cross = type == FOLIO_ATTENTION_ENCODER_DECODER;
    int64_t first = cross ? 0 : row, keys = cross ? f.num_encoder_tokens : n;
    folio_vllm06_metadata *metadata;
    must(folio_vllm06_make_metadata(state, backend, &f, &metadata));
    folio_vllm06_forward_args a =
        FOLIO_WITH(folio_vllm06_forward_args, .query = rows_of(q + row * Q_ROW, n),
                   .output = rows_of(out + row * Q_ROW, n), .kv_cache = &cache,
                   .key = rows_of(keys ? k + first * K_ROW : NULL, keys),
                   .value = rows_of(keys ? v + first * K_ROW : NULL, keys),
                   .attn_metadata = metadata, .attn_type = type);
    must(folio_vllm06_forward(impl, &a, NULL));
    folio_vllm06_metadata_destroy(metadata);
}

/* The next token of a sequence that has `len` with it. */
static void decode(const int32_t *table, int32_t len)
{
    int64_t slot = table[(len - 1) / BLOCK] * BLOCK + (len - 1) % BLOCK;
    step(FOLIO_WITH(folio_vllm06_metadata_fields, .num_decode_tokens = 1, .slot_mapping = &slot,
                    .seq_lens = &len, .block_tables = table, .block_tables_stride = 2),
         FOLIO_ATTENTION_DECODER, len - 1, 1);
    compare(len - 1, 0, len);
}

static void run_backend(void)
{
    static const int32_t table[] = {3, 5}, copied[] = {8, 9}, back[] = {10, 9}, cross[] = {12},
                         len = 15, encoder_len = 7;
    int64_t slots[TOKENS], cross_slots[TOKENS];
    fill_slots(slots, table, len);
    fill_slots(cross_slots, cross, encoder_len);
    folio_vllm06_metadata_fields prompt =
        FOLIO_WITH(folio_vllm06_metadata_fields, .num_prefills = 1, .slot_mapping = slots,
                   .seq_lens = &len, .encoder_seq_lens = &encoder_len,
                   .encoder_seq_lens_tensor = &encoder_len, .cross_slot_mapping = cross_slots,
                   .cross_block_tables = cross, .cross_block_tables_stride = 1);
    step(prompt, FOLIO_ATTENTION_DECODER, 0, len);
    for (int t = 0; t < len; t++) compare(t, 0, t + 1);
    for (int32_t n = 16; n <= 18; n++) decode(table, n);
    folio_block_pair copies[] = {{3, 8}, {5, 9}}, away = {8, 0}, home = {0, 10};
    folio_vllm06_kv_cache host = cache; /* a block goes out, and comes back as block 10 */
    host.key_cache = spare;
    must(folio_vllm06_copy_blocks(state, &cache, 1, copies, 2, NULL));
    decode(copied, 19);
    must(folio_vllm06_swap_blocks(state, &cache, &host, &away, 1, NULL));
    must(folio_vllm06_swap_blocks(state, &host, &cache, &home, 1, NULL));
    decode(back, 19);
    float window[15 * 15]; /* a bias in place of causality: the last four keys */
    must(folio_vllm06_make_sliding_window_bias(len, 4, window));
    prompt.attn_bias = &(folio_vllm06_bias){window, 1, len, len};
    step(prompt, FOLIO_ATTENTION_DECODER, 0, len);
    for (int t = 0; t < len; t++) compare(t, t < 4 ? 0 : t - 3, t + 1);
    for (int stored = 0; stored < 2; stored++) { /* the encoder's keys come; then they are cached */
        prompt.num_encoder_tokens = stored ? 0 : encoder_len;
        step(prompt, FOLIO_ATTENTION_ENCODER_DECODER, 0, len);
        for (int t = 0; t < len; t++) compare(t, 0, encoder_len);
    }
}

/* Rows stored and attended to by plain calls, K and V in two allocations. */
static void run_operators(void)
{
    const int32_t table[] = {2, 7}, len = 18;
    int64_t slots[TOKENS];
    fill_slots(slots, table, len);
    cache.value_cache = spare;
    folio_vllm06_reshape_and_cache_args rows =
        FOLIO_WITH(folio_vllm06_reshape_and_cache_args, .key = k, .value = v, .dtype = FOLIO_F32,
                   .num_tokens = len, .slot_mapping = slots);
    must(folio_vllm06_reshape_and_cache(state, &rows, &cache, NULL));
    folio_vllm06_paged_attention_args a =
        FOLIO_WITH(folio_vllm06_paged_attention_args, .out = out, .query = q, .dtype = FOLIO_F32,
                   .num_heads = HEADS, .num_seqs = 1, .block_tables = table,
                   .max_num_blocks_per_seq = 2, .seq_lens = &len, .max_seq_len = len);
    must(folio_vllm06_paged_attention_v1(state, &a, &cache, NULL));
    compare(0, 0, len);
    must(folio_vllm06_paged_attention_v2(state, &a, &cache, NULL, NULL, NULL, NULL));
    compare(0, 0, len);
}

int main(void)
{
    folio_vllm06_impl_desc d =
        FOLIO_WITH(folio_vllm06_impl_desc, .num_heads = HEADS, .head_size = SIZE,
                   .num_kv_heads = KV_HEADS, .dtype = FOLIO_F32);
    float *inputs[] = {q, k, v};
    for (unsigned i = 0; i < 3; i++) make_numbers(inputs[i], TOKENS * (i ? K_ROW : Q_ROW), i + 1);
    must(folio_vllm06_state_create("cpu", NULL, &state));
    for (int i = 0; i < 3; i++) {
        backend = folio_vllm06_backend_find(i == 0 ? "xformers" : i == 1 ? "torch-sdpa" : "ipex");
        must(folio_vllm06_make_impl(state, backend, &d, &impl));
        run_backend();
        folio_vllm06_impl_destroy(impl);
    }
    run_operators();
    folio_vllm06_state_destroy(state);
    return printf("the largest difference is %.1e\n", worst) < 0 || worst > 1e-5;
}
