/* vllm06_same_forward.c: every kind of layer through every kind of step, judged by the rig. */
#include "vllm06/vllm06_rig.h"

#include <math.h>

static const v06_seq prompts[] = {{0, true, 13, 13, 11}, {1, true, 8, 8, 28}};
/* whole prompts, a prompt's second chunk and a decode in one flat query; then all decode */
static const v06_seq mixed[] = {
    {2, true, 7, 7, 9}, {0, true, 5, 18, 11}, {3, true, 1, 1, 1}, {1, false, 1, 9, 28}};
static const v06_seq decodes[] = {
    {1, false, 1, 10, 28}, {0, false, 1, 19, 11}, {3, false, 1, 2, 1}, {2, false, 1, 8, 9}};

/* Biases of these types of the step's prompts, with a head or with all, over most keys. Then without them. */
static void run_biased(v06 *r, const char *types)
{
    static float numbers[6 * 28 * 28 + V06_SEQS]; /* most heads, and keys of an encoder */
    support_fill(numbers, COUNT_OF(numbers), 5, 2.0f);
    for (int k = 3; k < COUNT_OF(numbers); k += 7) numbers[k] = -INFINITY;
    for (const char *type = types; *type != '\0'; type++) {
        folio_attention_type t = v06_type(*type);
        folio_vllm06_bias biases[V06_SEQS];
        for (int i = 0; i < r->f.num_prefills; i++) {
            const v06_seq *s = &r->seqs[i];
            int64_t rows = t == ENCODER ? s->encoder_len : s->query_len;
            int64_t keys = t == ENCODER || t == CROSS ? s->encoder_len : s->seq_len;
            biases[i] = (folio_vllm06_bias){numbers + i, i % 2 ? r->d.num_heads : 1, rows, keys};
        }
        CHECK_OK(folio_vllm06_set_attn_bias(r->m, t, biases));
        v06_check_biases(r, t, biases, (int)r->f.num_prefills);
        v06_run_as(r, t);
        CHECK_OK(folio_vllm06_set_attn_bias(r->m, t, NULL));
    }
}

/* A profiling run, prompts, prompts over cached encoders, a mixed step, decodes. */
static void live(v06 *r)
{
    r->max_tokens = 64;
    r->no_cache = true;
    v06_play(r, prompts, 2, r->d.compat ? "D" : "DEOX");
    run_biased(r, "D");
    r->no_cache = false;
    v06_play(r, prompts, 2, "DEOX");
    run_biased(r, "DEX");
    v06_run(r, "D"); /* as before them */
    r->no_key = true;
    v06_run(r, "X");
    run_biased(r, "X");
    r->no_key = false;
    r->f.block_tables = NULL; /* whole prompts need none */
    v06_rerun(r, "D");
    run_biased(r, "D");
    v06_play(r, mixed, 4, "DX");
    run_biased(r, "DX");
    v06_play(r, decodes, 4, "D");
    r->no_key = true; /* decodes bring none */
    v06_run(r, "X");
    r->no_key = false;
}

/* Types, scales, heads, windows, slopes, caps; rows at strides. What is 0 is the rig's default, or none. */
V06_TEST(layers)
{
    static const struct {
        folio_dtype dtype;
        const char *kv;
        float k_scale, v_scale, scale, cap;
        int32_t heads, kv_heads;
        int64_t window;
        bool slopes, strided;
    } layers[] = {
        {.heads = 4},
        {.dtype = FOLIO_F16, .kv = "auto", .strided = true},
        {.dtype = FOLIO_BF16, .cap = 0.75f},
        {.kv = "fp8", .k_scale = 0.5f, .v_scale = 0.03125f, .cap = 0.75f},
        {.dtype = FOLIO_F16, .kv = "fp8_e4m3", .k_scale = 1.0f, .v_scale = 0.5f},
        {.dtype = FOLIO_BF16, .kv = "fp8_e5m2", .k_scale = 0.25f, .strided = true},
        {.kv = "fp8_e5m2", .k_scale = 0.5f, .v_scale = 0.03125f},
        {.k_scale = 0.5f, .v_scale = 0.25f}, /* in a cache of the model's dtype they do nothing */
        {.heads = 4, .kv_heads = 4, .scale = 0.3f},
        {.heads = 4, .kv_heads = 1},
        {.heads = 6, .kv_heads = 2, .scale = 0.3f, .strided = true},
        {.heads = 1, .kv_heads = 1},
        {.window = 1},
        {.window = 5, .strided = true},
        {.window = 9, .scale = 0.4f},
        {.window = 1000},
        {.slopes = true, .strided = true},
        {.slopes = true, .window = 4, .cap = 0.75f, .scale = 0.4f},
        {.slopes = true, .window = 6, .kv = "fp8", .dtype = FOLIO_F16, .cap = 0.75f},
        {.cap = 0.75f, .scale = 0.5f},
    };
    for (int i = 0; i < COUNT_OF(layers); i++) {
        v06_reset(r);
        if (layers[i].dtype != 0) r->d.dtype = layers[i].dtype;
        if (layers[i].heads != 0) r->d.num_heads = layers[i].heads;
        if (layers[i].heads != 0) r->d.num_kv_heads = layers[i].kv_heads; /* 0: num_heads */
        r->d.kv_cache_dtype = layers[i].kv;
        r->d.scale = layers[i].scale;
        r->d.logits_soft_cap = layers[i].cap;
        r->d.sliding_window = layers[i].window;
        r->d.alibi_slopes = layers[i].slopes ? r->slopes : NULL;
        r->k_scale = layers[i].k_scale;
        r->v_scale = layers[i].v_scale;
        r->strided = layers[i].strided;
        live(r);
    }
}

/* Everything that compat depends on, alone and with the others; judged by what habits_of of the rig says. */
V06_TEST(compat)
{
    for (int set = 0; set < 16; set++) {
        v06_reset(r);
        r->d.compat = 1;
        if (set & 1) r->d.alibi_slopes = r->slopes;
        if (set & 2) r->d.sliding_window = 4;
        if (set & 4) r->d.logits_soft_cap = 0.75f;
        if (set & 8) r->d.scale = 0.4f;
        live(r);
    }
}

/* Positions and, where far keys count most, distances that bf16 cannot hold: the slopes act in f32. */
V06_TEST(alibi_slopes)
{
    static const v06_seq long_prompt[] = {{0, true, 290, 290, 0}};
    for (int far = 0; far < 2; far++) {
        v06_reset(r);
        r->d.num_heads = r->d.num_kv_heads = 1;
        r->d.dtype = FOLIO_BF16;
        r->d.alibi_slopes = r->slopes;
        if (far) r->slopes[0] = -r->slopes[0];
        v06_play(r, long_prompt, 1, "D");
    }
}

/* Lengths, queries and tables said in each of the ways that there are: either array of lengths, query_start_loc or
 * context_lens_tensor or neither, arrays of prompts and of decodes apart, longer or shorter steps after others. */
V06_TEST(forms_of_a_step)
{
    static const v06_seq few_tokens[] = {
        {2, true, 3, 3, 0}, {3, true, 1, 1, 0}, {4, true, 2, 2, 0}, {5, true, 4, 4, 0}};
    static const struct {
        const v06_seq *seqs;
        int n;
    } steps[] = {{prompts, 2}, {mixed, 4}, {mixed, 3}, {decodes, 4}, {few_tokens, 4}, {prompts, 2}};
    for (int i = 0; i < COUNT_OF(steps) * 16; i++) {
        int form = i % 16, split = form & 1;
        v06_fields(r, steps[i / 16].seqs, steps[i / 16].n);
        int64_t p = r->f.num_prefills;
        r->f.chunked_prefill = split;
        if (split) {
            r->f.seq_lens_tensor = p < r->num_seqs ? r->lens + p : NULL;
            r->f.prefill_block_tables = r->tables;
            r->f.prefill_block_tables_stride = r->blocks_per_seq;
            r->f.block_tables = p < r->num_seqs ? r->tables + p * r->blocks_per_seq : NULL;
        } else if (form & 2) r->f.seq_lens = NULL;
        else r->f.seq_lens_tensor = NULL;
        if (form & 4) r->f.context_lens_tensor = NULL;
        if (form & 8 && (steps[i / 16].seqs != mixed || !(form & 4))) r->f.query_start_loc = NULL;
        if (form == 15) r->f.seq_start_loc = NULL;
        v06_rerun(r, "D");
    }
}

/* Encoders and cross attention do not read the blocks of decoder attention, whatever these say and however; encoders
 * that are longer than the prompts. Neither type's plan is the other's. */
V06_TEST(encoder_decoder)
{
    static const v06_seq longer[] = {{3, true, 5, 5, 20}, {4, true, 5, 5, 20}, {5, true, 5, 5, 20}};
    static const v06_seq swapped[] = {{0, true, 13, 13, 8}, {1, true, 8, 8, 13}};
    for (int i = 0; i < 6; i++) {
        v06_fields(r, longer, 3);
        for (int k = 0; i / 2 > 0 && k < COUNT_OF(r->tables); k++)
            r->tables[k] = i / 2 == 1 ? -1 : (int32_t)r->num_blocks;
        if (i % 2) {
            r->f.chunked_prefill = 1;
            r->f.prefill_block_tables = r->tables;
            r->f.prefill_block_tables_stride = r->blocks_per_seq;
            r->f.block_tables = NULL;
        }
        v06_rerun(r, "EXO");
        r->no_key = true; /* from the cross blocks */
        v06_run(r, "X");
        r->no_key = false;
    }
    for (int n = 1; n <= 2; n++) v06_play(r, swapped, n, "EOEO");
    v06_play(r, prompts, 2, "X");
    v06_fields(r, decodes, 2);
    v06_narrow_cross(r, 4);
    r->no_key = true;
    v06_rerun(r, "X");
}

/* Padding of a graph with length 0, whatever slot and encoder it names: rows of zeros, and nothing is stored. Behind
 * decodes, behind a prompt, and alone. */
V06_TEST(use_cuda_graph)
{
    static const v06_seq padded[] = {
        {1, false, 1, 9, 28}, {0, false, 1, 14, 11}, {4, false, 1, 0, 11}, {5, false, 1, 0, 0}};
    static const v06_seq behind[] = {{2, true, 3, 3, 0}, {4, false, 1, 0, 0}};
    static const struct {
        const v06_seq *seqs;
        int n, real;
    } steps[] = {{padded, 4, 2}, {behind, 2, 1}, {padded + 2, 2, 0}};
    v06_play(r, prompts, 2, "DX");
    for (int i = 0; i < 2 * COUNT_OF(steps); i++) {
        v06_fields(r, steps[i / 2].seqs, steps[i / 2].n);
        int64_t last = r->f.num_prefill_tokens + r->f.num_decode_tokens - 1;
        r->f.use_cuda_graph = 1;
        if (i % 2) r->slots[last] = v06_slot(r, 5, 2, false); /* left from a step before */
        if (i % 2) memset(r->cross_tables + 2 * r->blocks_per_seq, -1, 64);
        v06_remake(r);
        if (i % 2) r->slots[last] = -1; /* what the rig expects */
        v06_run(r, "D");
        for (int64_t k = 0; k < v06_width(r); k++) CHECK(v06_out(r, last, k) == 0.0);
        r->no_key = true;
        if (steps[i / 2].seqs == padded) v06_run(r, "X");
        r->no_key = false;
    }
}

V06_TEST_OF("xformers", make_biases)
{
    enum { HEADS = 2, N = 300 }; /* bf16 holds no odd number above 256 */
    static const int64_t windows[] = {0, 1, 7, N - 1, N, N + 1};
    static float bias[HEADS * N * N + 1];
    const float slopes[HEADS] = {0.7f, 0.1f}; /* nor f16 these times a distance */
    int64_t wrong = 0;
    (void)r;
    bias[HEADS * N * N] = 77.0f;
    CHECK_OK(folio_vllm06_make_alibi_bias(slopes, HEADS, N, bias));
    for (int64_t k = 0; k < HEADS * N * N; k++) {
        int64_t h = k / N / N, i = k / N % N, j = k % N;
        wrong += bias[k] != (j > i ? -INFINITY : slopes[h] * (float)(j - i));
    }
    CHECK(bias[HEADS * N * N] == 77.0f);
    for (int w = 0; w < COUNT_OF(windows); w++) {
        bias[N * N] = 77.0f;
        CHECK_OK(folio_vllm06_make_sliding_window_bias(N, windows[w], bias));
        CHECK(bias[N * N] == 77.0f);
        for (int64_t k = 0; k < N * N; k++) {
            bool seen = k % N <= k / N && (windows[w] == 0 || k / N - k % N < windows[w]);
            wrong += bias[k] != (seen ? 0.0f : -INFINITY);
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

/* Biases of every type given with the fields; ENCODER_ONLY has DECODER's. The layer's own slopes or window as a bias
 * change no row. */
V06_TEST(set_attn_bias)
{
    static float numbers[2][4 * 28 * 28];
    support_fill(numbers[1], COUNT_OF(numbers[1]), 7, 3.0f);
    for (int i = 0; i < 2; i++) {
        const folio_vllm06_bias *got = NOWHERE;
        v06_reset(r);
        r->d.alibi_slopes = i ? r->slopes : NULL;
        r->d.sliding_window = i ? 0 : 5;
        v06_play(r, prompts, 1, "D");
        CHECK_OK(folio_vllm06_get_attn_bias(r->m, DECODER, &got));
        CHECK(got == NULL);
        support_buffer plain = support_buffer_make(r->out.bytes);
        memcpy(plain.data, r->out.data, plain.bytes);
        if (i) CHECK_OK(folio_vllm06_make_alibi_bias(r->slopes, 4, 13, numbers[0]));
        else CHECK_OK(folio_vllm06_make_sliding_window_bias(13, 5, numbers[0]));
        const folio_vllm06_bias self[] = {{numbers[0], i ? 4 : 1, 13, 13}, {numbers[0], 1, 8, 8}};
        const folio_vllm06_bias encoder[] = {{numbers[1], 1, 11, 11}, {numbers[1], 1, 28, 28}};
        const folio_vllm06_bias cross[] = {{numbers[1], 4, 13, 11}, {numbers[1], 1, 8, 28}};
        const folio_vllm06_bias *given[] = {self, encoder, cross};
        for (int n = 1; n <= 2; n++) {
            v06_fields(r, prompts, n);
            r->f.attn_bias = self;
            r->f.encoder_attn_bias = encoder;
            r->f.cross_attn_bias = cross;
            v06_remake(r);
            for (int k = 0; k < 3; k++) v06_check_biases(r, v06_type("DEX"[k]), given[k], n);
            v06_run(r, "EOXD");
        }
        for (size_t k = 0; k < plain.bytes / sizeof(float); k++)
            CHECK(fabs(v06_out(r, 0, (int64_t)k) - (double)((float *)plain.data)[k]) <= 1e-5);
        CHECK_OK(folio_vllm06_get_attn_bias(r->m, ENCODER_ONLY, &got));
        CHECK(got == v06_get(r)->attn_bias && got[1].key_len == 8);
        support_buffer_free(&plain);
    }
}

/* The rows of sequences without an encoder are zeros, beside others that have one and alone, with set biases too. Their
 * tensors may be empty. Encoders of prompts are new, and then cached. */
V06_TEST(no_encoder)
{
    static const v06_seq steps[][3] = {
        {{0, true, 6, 6, 11}, {1, true, 9, 9, 0}, {2, true, 3, 3, 5}},
        {{3, true, 6, 6, 0}, {4, true, 9, 9, 20}, {5, true, 2, 2, 0}},
        {{0, false, 1, 7, 11}, {1, false, 1, 10, 0}, {2, false, 1, 4, 5}},
        {{3, false, 1, 7, 0}, {4, false, 1, 10, 20}, {5, false, 1, 3, 0}},
        {{5, true, 5, 5, 0}, {0, false, 1, 8, 11}, {1, false, 1, 11, 0}},
        {{5, true, 6, 6, 4}, {1, false, 1, 12, 0}, {3, false, 1, 8, 0}},
        {{5, true, 4, 4, 0}, {1, false, 1, 13, 0}, {3, false, 1, 9, 0}},
        {{1, true, 4, 4, 0}, {2, true, 13, 13, 0}, {3, true, 9, 9, 0}}};
    for (int i = 0; i < 2 * COUNT_OF(steps); i++) {
        bool again = i % 2;
        v06_fields(r, steps[i / 2], 3);
        r->no_key = again || r->f.num_encoder_tokens == 0;
        if (again && r->f.num_encoder_tokens == 0) r->f.cross_slot_mapping = NULL;
        r->f.encoder_seq_lens = r->f.encoder_seq_lens_tensor = r->encoder_lens;
        v06_rerun(r, "X");
        for (int s = 0; s < 3; s++)
            for (int64_t k = 0; r->encoder_lens[s] == 0 && k < v06_width(r); k++)
                CHECK(v06_out(r, r->starts[s + 1] - 1, k) == 0.0);
        if (r->f.num_prefills > 0) run_biased(r, "X");
    }
}
