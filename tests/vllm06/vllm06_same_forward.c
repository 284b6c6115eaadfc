/* vllm06_same_forward.c: forwards in all three originals; see vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

#include <math.h>
#include <stdlib.h>

static const v06_seq two_prompts[] = {{0, true, 13, 13, 0}, {1, true, 8, 8, 0}};
static const v06_seq two_decodes[] = {{1, false, 1, 9, 0}, {0, false, 1, 14, 0}};
static const v06_seq encoded_prompts[] = {{0, true, 6, 6, 11}, {1, true, 9, 17, 28}};
static const v06_seq encoded_both[] = {{0, true, 6, 6, 11}, {1, false, 1, 18, 28}};

/* Opens r and runs a step of prompts, without a cache and with it, then two of decodes; the lengths of the second follow
 * on. */
static void live(v06 *r)
{
    static const v06_seq later[] = {{0, false, 1, 15, 0}, {1, false, 1, 10, 0}};
    v06_open(r);
    for (int cache = 0; cache < 2; cache++) {
        r->no_cache = !cache;
        v06_play(r, two_prompts, 2, "D");
    }
    v06_play(r, two_decodes, 2, "D");
    v06_play(r, later, 2, "D");
}

void v06_same_prompts_then_decodes(v06 *r)
{
    const folio_vllm06_forward_args none = {.struct_size = sizeof none};
    CHECK_INT(none.attn_type, DECODER); /* the default */
    live(r);
    /* The same without what forward can work out by itself. */
    for (int list = 0; list < 2; list++) {
        v06_fields(r, two_prompts, 2);
        r->f.query_start_loc = r->f.seq_start_loc = r->f.context_lens_tensor = NULL;
        *(list ? &r->f.seq_lens_tensor : &r->f.seq_lens) = NULL;
        r->f.block_tables = NULL;
        v06_rerun(r, "DO");
    }
    /* more sequences than before and fewer tokens; more tokens and no longer prompt */
    static const v06_seq short_prompts[] = {
        {2, true, 3, 3, 0}, {3, true, 1, 1, 0}, {4, true, 2, 2, 0}, {5, true, 4, 4, 0}};
    static const v06_seq more_tokens[] = {{2, true, 13, 13, 0}, {3, true, 13, 13, 0}};
    v06_play(r, short_prompts, 4, "D");
    v06_play(r, more_tokens, 2, "D");
}

void v06_same_profiling_run(v06 *r)
{
    r->no_cache = true;
    v06_play(r, two_prompts, 2, "D");
    v06_fields(r, two_prompts, 2); /* such a run has neither slots nor blocks */
    r->f.slot_mapping = NULL;
    r->f.block_tables = NULL;
    for (int chunked = 0; chunked < 2; chunked++) {
        r->f.chunked_prefill = chunked;
        v06_rerun(r, "DO");
    }
    v06_step(r, two_decodes, 2);
    V06_REJECTS(r, DECODER, "kv_cache is NULL|2 decodes");
    static const v06_seq chunk[] = {{0, true, 3, 16, 0}};
    v06_step(r, chunk, 1);
    V06_REJECTS(r, DECODER, "");
    v06_play(r, encoded_both, 2, "E");
    v06_play(r, encoded_prompts, 2, "X");
    v06_fields(r, encoded_prompts, 2);
    for (int64_t t = 0; t < r->f.num_encoder_tokens; t++) r->cross_slots[t] = -1;
    r->f.cross_block_tables = NULL; /* empty, as of all prompts */
    r->f.cross_block_tables_stride = 0;
    for (int chunked = 0; chunked < 2; chunked++) {
        r->f.chunked_prefill = chunked;
        v06_rerun(r, "E"); /* it needs no cache */
        v06_run(r, "X");
    }
}

void v06_same_use_cuda_graph(v06 *r)
{
    static const v06_seq padded[] = {
        {1, false, 1, 9, 0}, {0, false, 1, 14, 0}, {4, false, 1, 0, 0}, {5, false, 1, 0, 0}};
    v06_play(r, two_prompts, 2, "D");
    v06_fields(r, padded, 4);
    r->f.use_cuda_graph = 1;
    v06_rerun(r, "D");
    for (int64_t k = 0; k < 2 * v06_width(r); k++) CHECK(v06_out(r, 2, k) == 0.0);
    CHECK_INT(folio_vllm06_metadata_get(folio_vllm06_decode_metadata(r->m))->use_cuda_graph, 1);
    r->slots[3] = v06_slot(r, 5, 2, false); /* left from a step before: not written */
    v06_remake(r);
    v06_run_unstored(r);
    v06_fields(r, padded + 2, 2); /* nothing but padding, each with a slot */
    r->f.use_cuda_graph = 1;
    for (int i = 0; i < 2; i++) r->slots[i] = v06_slot(r, 4 + i, 2, false);
    v06_remake(r);
    v06_run_unstored(r);
    /* behind a prompt of another length */
    static const v06_seq behind[] = {{2, true, 3, 3, 0}, {4, false, 1, 0, 0}};
    v06_fields(r, behind, 2);
    r->f.use_cuda_graph = 1;
    v06_rerun(r, "D");
    r->slots[3] = v06_slot(r, 4, 2, false);
    v06_remake(r);
    v06_run_unstored(r);
    /* in cross attention too, whatever encoder it names */
    static const v06_seq encoders[] = {{0, true, 13, 13, 11}, {1, true, 8, 8, 20}};
    static const v06_seq cross[] = {
        {1, false, 1, 9, 20}, {0, false, 1, 14, 11}, {0, false, 1, 0, 11}};
    v06_play(r, encoders, 2, "X");
    r->no_key = true;
    for (int none = 0; none < 2; none++) {
        v06_fields(r, cross, 3);
        r->f.use_cuda_graph = 1;
        if (none) /* nor are its blocks read */
            for (int k = 0; k < 2; k++) r->cross_tables[2 * r->blocks_per_seq + k] = -1;
        v06_rerun(r, "X");
    }
}

/* Scales of cached keys that prompts read: their own of an earlier step, and their encoders'; with set biases too. Then
 * the encoders' that decodes read. */
static void scales_of_cached_keys(v06 *r)
{
    static const v06_seq chunk[] = {{0, true, 5, 20, 0}};
    static const v06_seq decodes[] = {{0, false, 1, 7, 11}, {1, false, 1, 18, 28}};
    static const v06_seq of_graph[] = {{0, false, 1, 21, 0}, {1, false, 1, 11, 0}};
    static float numbers[9 * 28];
    const folio_vllm06_bias own = {numbers, 1, 5, 20};
    const folio_vllm06_bias cross[] = {{numbers, 1, 6, 11}, {numbers, 1, 9, 28}};
    support_fill(numbers, COUNT_OF(numbers), 6, 2.0f);
    v06_play(r, chunk, 1, "D");
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, &own));
    v06_run(r, "D");
    v06_fields(r, of_graph, 2);
    r->f.use_cuda_graph = 1;
    v06_rerun(r, "D");
    v06_play(r, encoded_prompts, 2, "X");
    r->no_key = true;
    v06_run(r, "X");
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, CROSS, cross));
    v06_run(r, "X");
    v06_play(r, decodes, 2, "X");
    r->no_key = false;
}

void v06_same_k_scale_v_scale(v06 *r)
{
    static const char *const names[] = {"fp8", "fp8_e4m3", "fp8_e5m2"};
    for (int i = 0; i < 3; i++) {
        v06_reset(r);
        r->d.kv_cache_dtype = names[i];
        r->k_scale = 0.5f;
        r->v_scale = 0.03125f;
        live(r);
        scales_of_cached_keys(r);
    }
    static const v06_seq fresh[] = {{2, true, 5, 5, 0}, {1, false, 1, 11, 0}};
    /* in a cache of the model's dtype scales do nothing: the same rows, the same bytes */
    v06_reset(r);
    live(r);
    v06_step(r, fresh, 2);
    support_buffer before = support_buffer_make(r->cache[0].bytes);
    memcpy(before.data, r->cache[0].data, before.bytes);
    v06_run(r, "D");
    memcpy(r->cache[0].data, before.data, before.bytes);
    support_buffer_free(&before);
    support_buffer rows = support_buffer_make(r->out.bytes);
    memcpy(rows.data, r->out.data, rows.bytes);
    folio_vllm06_forward_args a = v06_args(r, DECODER);
    a.k_scale = a.v_scale = 0.5f;
    CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
    CHECK(memcmp(rows.data, r->out.data, rows.bytes) == 0);
    v06_check_images(r);
    support_buffer_free(&rows);
}

void v06_same_dtypes(v06 *r)
{
    static const folio_dtype dtypes[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};
    static const char *const names[] = {NULL, "auto", "fp8", "fp8_e4m3", "fp8_e5m2"};
    static float numbers[13 * 13];
    const folio_vllm06_bias biases[] = {{numbers, 1, 13, 13}, {numbers, 1, 8, 8}};
    support_fill(numbers, COUNT_OF(numbers), 5, 2.0f);
    for (int i = 0; i < 15; i++) {
        v06_reset(r);
        r->d.dtype = dtypes[i / 5];
        r->d.kv_cache_dtype = names[i % 5];
        if (i % 5 == 3) r->k_scale = r->v_scale = 1.0f; /* which 0 stands for */
        live(r);
        v06_step(r, two_prompts, 2); /* biases stay f32 */
        CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, biases));
        v06_run(r, "D");
    }
}

void v06_same_num_queries_per_kv(v06 *r)
{
    static const int32_t heads[][2] = {{4, 0}, {4, 1}, {6, 2}, {1, 1}};
    for (int i = 0; i < 4; i++) {
        v06_reset(r);
        r->d.num_heads = heads[i][0];
        r->d.num_kv_heads = heads[i][1];
        r->d.scale = i % 2 ? 0.3f : 0.0f;
        live(r);
    }
}

/* Rows of query, key and value next to each other, as a fused projection gives them: in a step of both kinds too, in
 * all types, and with set biases. */
void v06_same_fused_qkv(v06 *r)
{
    static const v06_seq both[] = {{2, true, 7, 7, 0}, {1, false, 1, 10, 0}};
    static const float zeros[13 * 13];
    static const folio_vllm06_bias biases[] = {{zeros, 1, 13, 13}, {zeros, 1, 8, 8}};
    static const struct {
        const v06_seq *seqs;
        folio_attention_type type;
        const folio_vllm06_bias *biases;
    } steps[] = {{two_prompts, DECODER, NULL},
                 {two_decodes, DECODER, NULL},
                 {both, DECODER, NULL},
                 {two_prompts, DECODER, biases},
                 {two_prompts, ENCODER_ONLY, NULL},
                 {encoded_prompts, ENCODER, NULL},
                 {encoded_prompts, CROSS, NULL}};
    v06_open(r);
    int64_t parts[3] = {v06_width(r), v06_width(r) / 2, v06_width(r) / 2};
    int64_t width = v06_width(r) * 2;
    for (int step = 0; step < COUNT_OF(steps); step++) {
        folio_attention_type type = steps[step].type;
        v06_step(r, steps[step].seqs, 2);
        CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, steps[step].biases));
        v06_run_as(r, type);
        int64_t n = r->out_rows * v06_width(r);
        double *apart = malloc((size_t)n * sizeof *apart), largest = 0;
        float *fused = malloc((size_t)(V06_SEQS * V06_TOKENS * width) * sizeof *fused);
        if (apart == NULL || fused == NULL) abort();
        for (int64_t k = 0; k < n; k++) largest = fmax(largest, fabs(apart[k] = v06_out(r, 0, k)));
        folio_vllm06_forward_args a = v06_args(r, type);
        folio_tensor *tensors[3] = {&a.query, &a.key, &a.value};
        for (int64_t t = 0, at = 0; t < 3; at += parts[t++]) {
            for (int64_t row = 0; row < tensors[t]->tokens; row++)
                memcpy(fused + row * width + at, (float *)tensors[t]->data + row * parts[t],
                       (size_t)parts[t] * sizeof *fused);
            tensors[t]->data = fused + at;
            tensors[t]->token_stride = width;
        }
        CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
        for (int64_t k = 0; k < n; k++) CHECK(fabs(v06_out(r, 0, k) - apart[k]) <= 2e-6 * largest);
        v06_check_images(r);
        free(apart);
        free(fused);
    }
}

void v06_same_alibi_slopes(v06 *r)
{
    static const v06_seq long_prompt[] = {{0, true, 290, 290, 0}};
    r->d.alibi_slopes = r->slopes;
    live(r);
    /* positions and, where far keys count most, distances that bf16 cannot hold: the slopes act in f32 */
    for (int far = 0; far < 2; far++) {
        v06_reset(r);
        r->d.num_heads = r->d.num_kv_heads = 1;
        r->d.dtype = FOLIO_BF16;
        r->d.alibi_slopes = r->slopes;
        if (far) r->slopes[0] = -r->slopes[0];
        v06_play(r, long_prompt, 1, "D");
    }
}

void v06_same_sliding_window(v06 *r)
{
    static const int64_t windows[] = {1, 5, 9, 1000};
    for (int i = 0; i < 4; i++) {
        v06_reset(r);
        r->d.sliding_window = windows[i];
        live(r);
    }
}

/* Prompts with set biases run another way; they are capped too. */
static void cap_with_biases(v06 *r)
{
    static float numbers[28 * 28];
    const folio_vllm06_bias decoder[] = {{numbers, 1, 13, 13}, {numbers, 1, 8, 8}};
    const folio_vllm06_bias encoder[] = {{numbers, 1, 11, 11}, {numbers, 1, 28, 28}};
    const folio_vllm06_bias cross[] = {{numbers, 1, 6, 11}, {numbers, 1, 9, 28}};
    support_fill(numbers, COUNT_OF(numbers), 6, 2.0f);
    v06_step(r, two_prompts, 2);
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, decoder));
    v06_run(r, "DO");
    v06_step(r, encoded_prompts, 2);
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, ENCODER, encoder));
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, CROSS, cross));
    v06_run(r, "EX");
}

void v06_same_logits_soft_cap(v06 *r)
{
    r->d.logits_soft_cap = 0.75f;
    r->d.scale = 0.5f;
    live(r);
    static const v06_seq decodes[] = {{0, false, 1, 7, 11}, {1, false, 1, 18, 28}};
    v06_play(r, encoded_prompts, 2, "EX");
    r->no_key = true;
    v06_play(r, decodes, 2, "X");
    r->no_key = false;
    v06_play(r, two_prompts, 2, "O");
    cap_with_biases(r);
}

void v06_same_make_biases(__attribute__((unused)) v06 *r)
{
    enum { HEADS = 2, N = 300 }; /* bf16 holds no odd number above 256 */
    static const int64_t windows[] = {0, 1, 7, N - 1, N, N + 1};
    static float bias[HEADS * N * N + 1];
    const float slopes[HEADS] = {0.7f, 0.1f}; /* nor f16 these times a distance */
    int64_t wrong = 0;
    bias[HEADS * N * N] = 77.0f;
    CHECK_OK(folio_vllm06_make_alibi_bias(slopes, HEADS, N, bias));
    for (int h = 0; h < HEADS; h++)
        for (int i = 0; i < N; i++)
            for (int j = 0; j < N; j++)
                wrong +=
                    bias[(h * N + i) * N + j] != (j > i ? -INFINITY : slopes[h] * (float)(j - i));
    CHECK(bias[HEADS * N * N] == 77.0f);
    for (int k = 0; k < COUNT_OF(windows); k++) {
        bias[N * N] = 77.0f;
        CHECK_OK(folio_vllm06_make_sliding_window_bias(N, windows[k], bias));
        CHECK(bias[N * N] == 77.0f);
        for (int i = 0; i < N; i++)
            for (int j = 0; j < N; j++) {
                bool seen = j <= i && (windows[k] == 0 || i - j < windows[k]);
                wrong += bias[i * N + j] != (seen ? 0.0f : -INFINITY);
            }
    }
    CHECK_INT(wrong, 0);
    REJECTED(folio_vllm06_make_alibi_bias(NULL, 1, 1, bias), "NULL");
    REJECTED(folio_vllm06_make_alibi_bias(slopes, -1, 1, bias), "-1");
    REJECTED(folio_vllm06_make_alibi_bias(slopes, 1, -1, bias), "seq_len -1");
    REJECTED(folio_vllm06_make_alibi_bias(slopes, 1, 1, NULL), "NULL");
    REJECTED(folio_vllm06_make_sliding_window_bias(-1, 1, bias), "seq_len is -1");
    REJECTED(folio_vllm06_make_sliding_window_bias(1, -2, bias), "-2");
    REJECTED(folio_vllm06_make_sliding_window_bias(1, 1, NULL), "NULL");
}

/* Biases of the two prompts, with alibi (all heads) or a window (one for all heads). */
static void make_biases(const v06 *r, int64_t window, folio_vllm06_bias biases[2])
{
    for (int i = 0; i < 2; i++) {
        int64_t n = two_prompts[i].seq_len, heads = window > 0 ? 1 : r->d.num_heads;
        float *data = malloc((size_t)(heads * n * n) * sizeof *data);
        if (data == NULL) abort();
        if (window > 0) CHECK_OK(folio_vllm06_make_sliding_window_bias(n, window, data));
        else CHECK_OK(folio_vllm06_make_alibi_bias(r->slopes, heads, n, data));
        biases[i] = (folio_vllm06_bias){data, heads, n, n};
    }
}

/* Biases set by type give what the layer's own slopes or window give. Others that are set, which are not causal, count
 * in their place. */
void v06_same_set_attn_bias(v06 *r)
{
    static float numbers[13 * 13];
    const folio_vllm06_bias others[] = {{numbers, 1, 13, 13}, {numbers, 1, 8, 8}};
    support_fill(numbers, COUNT_OF(numbers), 5, 2.0f);
    for (int64_t window = 0; window <= 5; window += 5) {
        folio_vllm06_bias biases[2];
        const folio_vllm06_bias *got = NOWHERE;
        v06_reset(r);
        r->d.alibi_slopes = window > 0 ? NULL : r->slopes;
        r->d.sliding_window = window;
        r->d.scale = 0.3f;
        v06_play(r, two_prompts, 2, "D");
        int64_t n = r->out_rows * v06_width(r);
        double *plain = malloc((size_t)n * sizeof *plain), largest = 0;
        if (plain == NULL) abort();
        for (int64_t k = 0; k < n; k++) largest = fmax(largest, fabs(plain[k] = v06_out(r, 0, k)));
        CHECK_OK(folio_vllm06_get_attn_bias(r->m, DECODER, &got));
        CHECK(got == NULL);
        make_biases(r, window, biases);
        CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, biases));
        free((void *)biases[0].data);
        free((void *)biases[1].data);
        CHECK_OK(folio_vllm06_get_attn_bias(r->m, ENCODER_ONLY, &got));
        CHECK(got != NULL && got != biases && got[1].key_len == 8);
        CHECK(got == v06_get(r)->attn_bias);
        v06_run(r, "D");
        for (int64_t k = 0; k < n; k++) CHECK(fabs(v06_out(r, 0, k) - plain[k]) <= 2e-6 * largest);
        CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, others));
        v06_check_biases(r, DECODER, others, 2);
        v06_run(r, "D");
        CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, NULL));
        CHECK_OK(folio_vllm06_get_attn_bias(r->m, DECODER, &got));
        CHECK(got == NULL);
        r->f.block_tables = NULL; /* prompts without a prefix have none */
        v06_rerun(r, "D");
        CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, others));
        v06_run(r, "D");
        r->no_cache = true; /* a step without a cache */
        v06_run(r, "D");
        CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, NULL));
        v06_run(r, "D");
        free(plain);
    }
}

/* The step once more with chunked_prefill; tables are those of the prompts. */
static void remake_split(v06 *r)
{
    r->f.chunked_prefill = 1;
    r->f.prefill_block_tables = r->tables;
    r->f.prefill_block_tables_stride = r->blocks_per_seq;
    r->f.block_tables = NULL;
    v06_remake(r);
}

/* The same with set biases, which run another way: slopes and window do not count there either. */
static void encoders_with_biases(v06 *r)
{
    static const v06_seq step[] = {{0, true, 6, 6, 11}, {1, true, 9, 9, 20}};
    static float numbers[20 * 20];
    const folio_vllm06_bias encoder[] = {{numbers, 1, 11, 11}, {numbers, 1, 20, 20}};
    const folio_vllm06_bias cross[] = {{numbers, 1, 6, 11}, {numbers, 1, 9, 20}};
    support_fill(numbers, COUNT_OF(numbers), 6, 2.0f);
    v06_step(r, step, 2);
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, ENCODER, encoder));
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, CROSS, cross));
    v06_run(r, "EX");
}

void v06_same_encoder_decoder(v06 *r)
{
    static const v06_seq prompts[] = {{0, true, 6, 6, 11}, {1, true, 9, 9, 20}, {2, true, 1, 1, 1}};
    static const v06_seq decodes[] = {
        {2, false, 1, 2, 1}, {0, false, 1, 7, 11}, {1, false, 1, 10, 20}};
    static const v06_seq both[] = {{3, true, 4, 4, 5}, {0, false, 1, 7, 11}};
    static const v06_seq more_encoders[] = {
        {3, true, 5, 5, 20}, {4, true, 5, 5, 20}, {5, true, 5, 5, 20}};
    for (int i = 0; i < 4; i++) {
        v06_reset(r);
        r->d.kv_cache_dtype = i == 1 ? "fp8" : "auto";
        /* neither belongs to encoder or cross attention: both, and each alone */
        r->d.alibi_slopes = i == 2 ? NULL : r->slopes;
        r->d.sliding_window = i == 3 ? 0 : 4;
        r->d.compat = i == 1; /* of decoder attention alone */
        r->d.scale = 0.4f;
        r->d.logits_soft_cap = 0.75f;
        v06_play(r, prompts, 3, "EDX");
        r->no_key = true; /* another pass over encoder K and V that are stored already */
        v06_run(r, "X");
        r->no_key = false;
        v06_play(r, decodes, 3, "D");
        r->no_key = true;
        v06_run(r, "X");
        v06_narrow_cross(r, 3);
        v06_rerun(r, "X");
        r->no_key = false;
        v06_play(r, both, 2, "X");
        v06_play(r, more_encoders, 3, "X");
        for (int blocks = 0; blocks < 3; blocks++) { /* of decoder attention: not read */
            v06_fields(r, more_encoders, 3);
            for (int k = 0; blocks && k < COUNT_OF(r->tables); k++)
                r->tables[k] = blocks == 1 ? -1 : (int32_t)r->num_blocks;
            v06_rerun(r, "EX");
            remake_split(r);
            v06_run(r, "EX");
            r->no_key = true; /* from the cross blocks */
            v06_run(r, "X");
            r->no_key = false;
        }
        encoders_with_biases(r);
    }
}

/* Tokens from earlier steps, which no cache of this type holds, and decodes. */
static void refuse_encoder_only(v06 *r)
{
    static const v06_seq chunk[] = {{0, true, 3, 16, 0}};
    static const v06_seq both[] = {{0, true, 13, 13, 0}, {1, false, 1, 9, 0}};
    /* as many rows as the prompts have tokens */
    static const v06_seq as_many[] = {{0, true, 3, 4, 0}, {1, false, 1, 9, 0}};
    static const v06_seq *const steps[] = {chunk, both, as_many, both + 1};
    static const int counts[] = {1, 2, 2, 1};
    for (int i = 0; i < COUNT_OF(steps); i++) {
        v06_step(r, steps[i], counts[i]);
        folio_vllm06_forward_args a = v06_args(r, ENCODER_ONLY);
        V06_REJECTED(r, &a, i == 0 ? "16 tokens|3 rows" : "1 decodes");
    }
}

/* Both types over one step: of as many tokens, and of other lengths. */
static void encoder_beside_encoder_only(v06 *r)
{
    static const v06_seq swapped[] = {{0, true, 13, 13, 8}, {1, true, 8, 8, 13}};
    static float numbers[13 * 13];
    const folio_vllm06_bias only[] = {{numbers, 1, 13, 13}, {numbers, 1, 8, 8}};
    const folio_vllm06_bias encoder[] = {{numbers, 1, 8, 8}, {numbers, 1, 13, 13}};
    support_fill(numbers, COUNT_OF(numbers), 5, 2.0f);
    for (int i = 0; i < 4; i++) { /* of one prompt and of both, without biases and with them */
        v06_step(r, swapped, 1 + i % 2);
        if (i >= 2) {
            CHECK_OK(folio_vllm06_set_attn_bias(r->m, ENCODER, encoder));
            CHECK_OK(folio_vllm06_set_attn_bias(r->m, ENCODER_ONLY, only));
        }
        v06_run(r, "EOE");
    }
}

/* Bidirectional, without ALiBi or window; the cache stays as it is. A set bias replaces nothing. */
static void encoder_only(v06 *r, bool slopes, int64_t window, int32_t compat)
{
    folio_vllm06_bias biases[2];
    v06_reset(r);
    r->d.alibi_slopes = slopes ? r->slopes : NULL;
    r->d.sliding_window = window;
    r->d.compat = compat; /* of decoder attention alone */
    r->d.scale = 0.4f;
    r->d.logits_soft_cap = 0.75f;
    v06_play(r, two_prompts, 2, "O");
    make_biases(r, 4, biases);
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, ENCODER_ONLY, biases));
    v06_run(r, "O");
    for (int i = 0; i < 2; i++) free((void *)biases[i].data);
    memset(r->tables, 0xFF, sizeof r->tables); /* blocks of decoder attention: not read */
    v06_rerun(r, "O");
    remake_split(r);
    v06_run(r, "O");
    r->no_cache = true;
    v06_run(r, "O");
    v06_fields(r, two_prompts, 2); /* as the CPU runner makes it */
    r->f.slot_mapping = NULL;
    r->f.block_tables = r->f.query_start_loc = r->f.seq_start_loc = r->f.context_lens_tensor = NULL;
    r->f.block_tables_stride = 0;
    v06_rerun(r, "O");
    refuse_encoder_only(r);
    r->no_cache = false;
    refuse_encoder_only(r);
    encoder_beside_encoder_only(r);
}

void v06_same_encoder_only(v06 *r)
{
    encoder_only(r, true, 3, 0);
    encoder_only(r, true, 3, 1);
    encoder_only(r, true, 0, 0);
    encoder_only(r, false, 3, 0);
}

static const v06_seq mixed_step[] = {
    {2, true, 7, 7, 9}, {0, true, 5, 18, 11}, {3, true, 1, 1, 1}, {1, false, 1, 9, 20}};

/* Whole prompts, a prompt's second chunk, and decodes in one flat query; then all decode. */
void v06_same_mixed_step(v06 *r)
{
    static const v06_seq decodes[] = {
        {0, false, 1, 19, 0}, {1, false, 1, 10, 0}, {2, false, 1, 8, 0}, {3, false, 1, 2, 0}};
    for (int i = 0; i < 5; i++) {
        v06_reset(r);
        if (i == 1) r->d.kv_cache_dtype = "fp8";
        if (i == 2) r->d.alibi_slopes = r->slopes;
        if (i == 3) r->d.sliding_window = 6;
        if (i == 4) r->d.logits_soft_cap = 0.75f;
        v06_play(r, two_prompts, 2, "D");
        for (int k = 0; k < 6; k++) {         /* either array alone will do */
            int left_out = k < 4 ? k : k - 3; /* at last of the prompts only */
            v06_fields(r, mixed_step, k < 4 ? 4 : 3);
            if (left_out == 1) r->f.context_lens_tensor = NULL;
            if (left_out == 2) r->f.query_start_loc = NULL;
            if (left_out == 3) { /* none, but prompts and decodes have arrays of their own */
                r->f.chunked_prefill = 1;
                r->f.seq_lens_tensor = r->lens + 3;
                r->f.prefill_block_tables = r->tables;
                r->f.prefill_block_tables_stride = r->blocks_per_seq;
                r->f.block_tables = r->tables + 3 * r->blocks_per_seq;
            }
            v06_rerun(r, "D");
        }
        v06_play(r, decodes, 4, "D");
    }
}
