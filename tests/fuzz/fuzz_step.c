/* fuzz_step.c: see fuzz_step.h. */
#include "fuzz/fuzz_step.h"

#include <math.h>
#include <stdlib.h>

static const folio_dtype types[] = {FOLIO_F32, FOLIO_F16, FOLIO_BF16};

/* --------------------------------------------------------------------------------------- geometry */

static void draw_attention(fuzz_input *in, fuzz_step *s)
{
    static const int32_t sizes[] = {32, 8, 16, 24, 64};
    static const folio_attention_type kinds[] = {
        FOLIO_ATTENTION_DECODER,      FOLIO_ATTENTION_DECODER, FOLIO_ATTENTION_DECODER,
        FOLIO_ATTENTION_ENCODER_ONLY, FOLIO_ATTENTION_ENCODER, FOLIO_ATTENTION_ENCODER_DECODER};
    folio_attention_desc *a = &s->attention;
    s->type = FUZZ_PICK(in, kinds);
    *a = FOLIO_WITH(folio_attention_desc, .num_kv_heads = (int32_t)fuzz_any(in, 1, 2));
    a->num_heads = (int32_t)((uint32_t)a->num_kv_heads * (uint32_t)fuzz_any(in, 1, 3));
    a->k_head_size = FUZZ_PICK(in, sizes);
    a->k_head_size = (int32_t)fuzz_any(in, a->k_head_size, a->k_head_size);
    a->v_head_size = fuzz_chance(in, 4) ? FUZZ_PICK(in, sizes) : 0;
    a->dtype = FUZZ_PICK(in, types);
    a->kv_dtype = (folio_dtype)fuzz_any(in, 0, 6);
    a->scale = fuzz_chance(in, 4) ? (float)fuzz_any(in, 1, 100) / 64 : 0;
    a->soft_cap = fuzz_chance(in, 6) ? (float)fuzz_any(in, 1, 50) : 0;
    bool cross = s->type == FOLIO_ATTENTION_ENCODER_DECODER;
    a->windowed = !cross && fuzz_chance(in, 3);
    a->window_left = fuzz_any(in, -1, 40);
    a->window_right = fuzz_any(in, -1, 10);
    a->v_in_k = !cross && fuzz_chance(in, 8);
    if (a->v_in_k && a->v_head_size > a->k_head_size) a->v_head_size = 8;
}

static bool make_cache(fuzz_input *in, fuzz_step *s)
{
    static const int32_t blocks[] = {16, 16, 4, 1, 5, 32};
    const folio_attention_desc *a = &s->attention;
    bool cached = s->type == FOLIO_ATTENTION_DECODER || s->type == FOLIO_ATTENTION_ENCODER_DECODER;
    s->block_size = FUZZ_PICK(in, blocks);
    if (!cached || fuzz_chance(in, 8)) return true;
    folio_layout layout = (folio_layout)fuzz_int(in, 0, 6);
    folio_dtype dtype = a->kv_dtype ? a->kv_dtype : a->dtype;
    if (a->v_in_k && layout > FOLIO_LAYOUT_HND) layout = FOLIO_LAYOUT_NATIVE;
    bool interleaved =
        layout == FOLIO_LAYOUT_INTERLEAVED_HND || layout == FOLIO_LAYOUT_INTERLEAVED_NHD;
    if (interleaved && a->v_head_size != 0) layout = FOLIO_LAYOUT_NHD;
    if (layout == FOLIO_LAYOUT_XPACKED && folio_dtype_size(dtype) == 1)
        layout = FOLIO_LAYOUT_XPACKED_1;
    s->num_blocks = 4 * (64 / s->block_size + 1);
    folio_kv_cache_desc d =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = s->num_blocks, .num_layers = 1,
                   .block_size = (int32_t)s->block_size, .num_kv_heads = a->num_kv_heads,
                   .k_head_size = a->k_head_size, .v_head_size = a->v_head_size, .dtype = dtype,
                   .layout = layout, .v_in_k = a->v_in_k);
    if (!fuzz_took(folio_kv_cache_create(s->ctx, &d, &s->cache))) return false;
    folio_kv_cache_view v = FOLIO_INIT(folio_kv_cache_view);
    FUZZ_CHECK(folio_kv_cache_get_view(s->cache, 0, &v) == FOLIO_OK, "no view");
    const struct {
        unsigned char *data;
        int64_t bytes;
    } arrays[] = {{v.k, v.k_array.bytes},
                  {v.v, v.v_array.bytes},
                  {(void *)v.k_scales, v.k_scales_array.bytes},
                  {(void *)v.v_scales, v.v_scales_array.bytes}};
    static unsigned char pattern[4096]; /* finite in each type */
    for (int b = COUNT_OF(pattern) - 1; pattern[0] == 0 && b >= 0; b--)
        pattern[b] = (unsigned char)(0x30 | ((b * 37 + b / 64) & 0x0B));
    for (int i = 0; i < COUNT_OF(arrays); i++)
        for (int64_t b = 0; arrays[i].data != NULL && b < arrays[i].bytes; b += COUNT_OF(pattern))
            memcpy(arrays[i].data + b, pattern,
                   (size_t)(arrays[i].bytes - b < COUNT_OF(pattern) ? arrays[i].bytes - b
                                                                    : COUNT_OF(pattern)));
    return true;
}

bool fuzz_step_draw_rotary(fuzz_input *in, fuzz_step *s)
{
    int64_t dims = 2 * fuzz_int(in, 1, 4), pairs;
    dims = fuzz_any(in, dims, dims);
    pairs = dims / 2;
    folio_rotary_desc d = FOLIO_WITH(
        folio_rotary_desc, .num_dims = (int32_t)dims,
        .pairing = (folio_rotary_pairing)fuzz_any(in, 0, 1),
        .scaling = (folio_rotary_scaling)fuzz_any(in, 0, 4),
        .num_positions = fuzz_any(in, 128, 128),
        .theta = fuzz_chance(in, 3) ? (double)fuzz_any(in, 2, 500) : 0,
        .factor = (double)fuzz_any(in, 1, 8), .original_len = fuzz_any(in, 1, 64),
        .exact_bounds = (int32_t)fuzz_any(in, 0, 1), .magnitude = (double)fuzz_any(in, 0, 2));
    if (s->attention.v_in_k)
        d.first_dim =
            s->attention.v_head_size ? s->attention.v_head_size : s->attention.k_head_size;
    d.first_dim = (int32_t)fuzz_any(in, d.first_dim, d.first_dim);
    if (dims > 0 && dims <= 64 && d.num_positions > 0 && d.num_positions <= 128) {
        if (fuzz_chance(in, 4)) d.frequencies = fuzz_zeros(in, pairs, sizeof(double));
        else if (fuzz_chance(in, 4)) {
            d.cos = fuzz_numbers(in, FOLIO_F32, d.num_positions * pairs);
            d.sin = fuzz_numbers(in, FOLIO_F32, d.num_positions * pairs);
        }
    }
    return fuzz_took(folio_rotary_create(s->ctx, &d, &s->rotary));
}

/* -------------------------------------------------------------------------------------- sequences */

static int32_t *running_sum(fuzz_input *in, const int32_t *lens, int64_t n)
{
    int32_t *sum = fuzz_zeros(in, n + 1, sizeof *sum);
    for (int64_t i = 0; i < n; i++) sum[i + 1] = sum[i] + lens[i];
    return sum;
}

static void draw_lengths(fuzz_input *in, fuzz_step *s)
{
    bool cross = s->type == FOLIO_ATTENTION_ENCODER || s->type == FOLIO_ATTENTION_ENCODER_DECODER;
    bool context = s->cache != NULL || s->type != FOLIO_ATTENTION_DECODER;
    s->num_seqs = fuzz_int(in, 1, FUZZ_MAX_SEQS);
    for (int64_t i = 0; i < s->num_seqs; i++) {
        s->query_len[i] = (int32_t)fuzz_int(in, 0, 7);
        if (fuzz_chance(in, 2)) s->query_len[i] = 1;
        int64_t before = context ? fuzz_int(in, 0, 50) : 0;
        s->seq_len[i] = (int32_t)(s->query_len[i] + before);
        if (fuzz_chance(in, 8)) s->seq_len[i] = 0; /* padding */
        if (cross && s->seq_len[i] > 0) s->encoder_len[i] = (int32_t)fuzz_int(in, 0, 12);
    }
}

/* Blocks that no other sequence has, in some order. */
static folio_table draw_table(fuzz_input *in, const fuzz_step *s, const int32_t *lens)
{
    int64_t stride = 64 / s->block_size + 1;
    int32_t *order = fuzz_zeros(in, s->num_blocks, sizeof *order);
    int32_t *rows = fuzz_zeros(in, s->num_seqs * stride, sizeof *rows);
    fuzz_shuffle(in, order, s->num_blocks);
    for (int64_t i = 0; i < s->num_seqs; i++)
        for (int64_t b = 0; b < (lens[i] + s->block_size - 1) / s->block_size; b++)
            rows[i * stride + b] = order[i * stride + b];
    fuzz_spoil32(in, rows, s->num_seqs * stride, 0, s->num_blocks - 1);
    return (folio_table){.kind = FOLIO_TABLE_ROWS, .indices = rows, .row_stride = stride};
}

static const int32_t *wrong_copy(fuzz_input *in, const int32_t *numbers, int64_t n)
{
    int32_t *copy = fuzz_zeros(in, n, sizeof *copy);
    memcpy(copy, numbers, (size_t)n * sizeof *copy);
    fuzz_spoil32(in, copy, n, 0, numbers[n - 1]);
    return copy;
}

/* Where the table puts the new tokens, and nowhere for some. */
static void draw_slots(fuzz_input *in, fuzz_step *s)
{
    int64_t *slots = fuzz_zeros(in, s->rows, sizeof *slots), row = 0;
    const int32_t *blocks = s->step.table.indices;
    for (int64_t i = 0; i < s->num_seqs; i++)
        for (int64_t at = s->seq_len[i] - s->query_len[i]; at < s->seq_len[i]; at++, row++) {
            slots[row] = -1;
            if (at < 0) continue; /* padding */
            int64_t block = blocks[i * s->step.table.row_stride + at / s->block_size];
            if (block >= 0 && block < s->num_blocks)
                slots[row] = block * s->block_size + at % s->block_size;
        }
    fuzz_spoil64(in, slots, s->rows, -1, s->num_blocks * s->block_size - 1);
    if (s->rows > 0 && fuzz_chance(in, 3)) slots[fuzz_int(in, 0, s->rows - 1)] = -1;
    s->step.slots = slots;
}

static void draw_positions(fuzz_input *in, fuzz_step *s)
{
    int64_t *first[2] = {fuzz_zeros(in, s->num_seqs, sizeof(int64_t)),
                         fuzz_zeros(in, s->num_seqs, sizeof(int64_t))};
    for (int64_t i = 0; i < s->num_seqs; i++) {
        first[1][i] = fuzz_int(in, 0, 20);
        first[0][i] = fuzz_int(in, 20, 60);
    }
    fuzz_spoil64(in, first[0], s->num_seqs, 0, 127);
    fuzz_spoil64(in, first[1], s->num_seqs, 0, 127);
    s->step.first_query_pos = first[0];
    s->step.first_key_pos = first[1];
}

static void draw_sequences(fuzz_input *in, fuzz_step *s)
{
    folio_step *t = &s->step;
    int64_t n = s->num_seqs;
    *t = FOLIO_WITH(folio_step, .num_seqs = n,
                    .causality_default = (folio_causality)fuzz_any(in, 0, 2));
    t->query_start = running_sum(in, s->query_len, n);
    s->rows = s->new_rows = t->query_start[n];
    t->query_start = wrong_copy(in, t->query_start, n + 1);
    t->num_query_tokens = s->rows;
    t->seq_lens = wrong_copy(in, s->seq_len, n);
    for (int64_t i = 0; i < n; i++)
        s->max_seq_len = s->seq_len[i] > s->max_seq_len ? s->seq_len[i] : s->max_seq_len;
    if (s->cache != NULL && s->type == FOLIO_ATTENTION_DECODER) {
        t->table = draw_table(in, s, s->seq_len);
        if (fuzz_chance(in, 3)) draw_slots(in, s);
    }
    if (fuzz_chance(in, 4)) draw_positions(in, s);
    if (s->type != FOLIO_ATTENTION_ENCODER && s->type != FOLIO_ATTENTION_ENCODER_DECODER) return;
    bool is_new = s->type == FOLIO_ATTENTION_ENCODER || s->cache == NULL || fuzz_chance(in, 2);
    const int32_t *sum = running_sum(in, s->encoder_len, n);
    s->new_rows = is_new ? sum[n] : 0;
    if (s->type == FOLIO_ATTENTION_ENCODER) s->rows = s->new_rows;
    t->encoder_lens = wrong_copy(in, s->encoder_len, n);
    t->encoder_new_lens = is_new ? t->encoder_lens : NULL;
    for (int64_t i = 0; i < n; i++)
        s->max_seq_len = s->encoder_len[i] > s->max_seq_len ? s->encoder_len[i] : s->max_seq_len;
    if (s->cache != NULL) t->cross_table = draw_table(in, s, s->encoder_len);
}

/* ---------------------------------------------------------------------------------------- tensors */

static folio_tensor draw_tensor(fuzz_input *in, folio_dtype dtype, int64_t rows, int64_t heads,
                                int64_t size)
{
    folio_tensor t = {.dtype = dtype, .tokens = fuzz_any(in, rows, rows)};
    if (t.tokens > rows) t.tokens = rows - 1;
    if (fuzz_chance(in, 4)) t.head_stride = size + 8, t.token_stride = heads * t.head_stride + 8;
    int64_t head = t.head_stride ? t.head_stride : size,
            row = t.token_stride ? t.token_stride : heads * head;
    t.data = fuzz_numbers(in, dtype, rows > 0 ? (rows - 1) * row + (heads - 1) * head + size : 0);
    if (fuzz_is_valid(in)) return t;
    int64_t stride = fuzz_any(in, t.token_stride, t.token_stride);
    if (stride < t.token_stride) t.token_stride = stride; /* more would be past the memory */
    return t;
}

static void draw_bias(fuzz_input *in, fuzz_step *s)
{
    folio_bias *b = &s->tensors.bias;
    const int64_t full[4] = {s->num_seqs, s->attention.num_heads, 12, 64};
    int64_t count = 1;
    b->dtype = FUZZ_PICK(in, types);
    for (int d = 0; d < 4; d++) {
        b->dims[d] = fuzz_chance(in, 2) ? full[d] : 1;
        count *= b->dims[d];
        if (!fuzz_is_valid(in) && fuzz_any(in, 0, 0) < 0) b->dims[d] = 0;
    }
    b->data = fuzz_numbers(in, b->dtype, count);
}

void fuzz_step_new_out(fuzz_input *in, fuzz_step *s)
{
    int64_t heads = s->attention.num_heads;
    int64_t size = s->attention.v_head_size ? s->attention.v_head_size : s->attention.k_head_size;
    s->out_bytes = (size_t)(s->rows * heads * size) * folio_dtype_size(s->attention.dtype);
    s->lse_bytes = (size_t)(s->rows * heads) * sizeof(float);
    s->tensors.out = (folio_tensor){.data = fuzz_poison(in, (int64_t)s->out_bytes, 1),
                                    .dtype = s->attention.dtype,
                                    .tokens = s->rows};
    s->tensors.lse = s->lse_bytes > 0 ? fuzz_poison(in, (int64_t)s->lse_bytes, 1) : NULL;
}

static void draw_tensors(fuzz_input *in, fuzz_step *s)
{
    const folio_attention_desc *a = &s->attention;
    folio_tensors *t = &s->tensors;
    int64_t v_size = a->v_head_size ? a->v_head_size : a->k_head_size;
    bool cross = s->type == FOLIO_ATTENTION_ENCODER_DECODER;
    *t = FOLIO_WITH(folio_tensors,
                    .q = draw_tensor(in, a->dtype, s->rows, a->num_heads, a->k_head_size));
    fuzz_step_new_out(in, s);
    if (s->cache == NULL || !fuzz_chance(in, 4)) {
        folio_dtype type = FUZZ_PICK(in, types);
        t->k = draw_tensor(in, type, s->new_rows, a->num_kv_heads, a->k_head_size);
        if (!a->v_in_k) t->v = draw_tensor(in, type, s->new_rows, a->num_kv_heads, v_size);
        if (s->cache != NULL && fuzz_chance(in, 4)) t->flags = FOLIO_KV_APPEND;
    }
    if (!cross && fuzz_chance(in, 5)) t->slopes = fuzz_numbers(in, FOLIO_F32, a->num_heads);
    if (fuzz_chance(in, 5)) t->sinks = fuzz_numbers(in, FOLIO_F32, a->num_heads);
    if (fuzz_chance(in, 5)) draw_bias(in, s);
    folio_dtype kv = a->kv_dtype ? a->kv_dtype : a->dtype;
    if (kv == FOLIO_FP8_E4M3 || kv == FOLIO_FP8_E5M2) {
        t->k_scale = (float)fuzz_any(in, 0, 3);
        t->v_scale = a->v_in_k ? 0 : (float)fuzz_any(in, 0, 3);
    }
    t->flags = (uint32_t)fuzz_any(in, t->flags, t->flags);
}

bool fuzz_step_draw(fuzz_input *in, fuzz_step *s)
{
    *s = (fuzz_step){.ctx = fuzz_context(fuzz_int(in, 0, fuzz_num_contexts() - 1))};
    draw_attention(in, s);
    if (!make_cache(in, s)) return false;
    draw_lengths(in, s);
    draw_sequences(in, s);
    const folio_attention_desc *a = &s->attention;
    bool small = a->num_heads > 0 && a->num_heads <= 64 && a->num_kv_heads > 0 &&
                 a->num_kv_heads <= 64 && a->k_head_size > 0 && a->k_head_size <= 640 &&
                 a->v_head_size >= 0;
    if (!small) { /* no memory for its tensors */
        folio_attention *attention = NULL;
        fuzz_took(folio_attention_create(s->ctx, a, &attention));
        folio_attention_destroy(attention);
        return false;
    }
    draw_tensors(in, s);
    return true;
}

void fuzz_step_close(fuzz_step *s)
{
    folio_rotary_destroy(s->rotary);
    folio_kv_cache_destroy(s->cache);
}

void fuzz_step_check_written(const fuzz_step *s)
{
    int64_t count = (int64_t)(s->out_bytes / folio_dtype_size(s->attention.dtype));
    for (int64_t i = 0; i < count; i++)
        FUZZ_CHECK(!isnan(kit_load(s->attention.dtype, s->tensors.out.data, i)),
                   "number %lld of out is NaN", (long long)i);
    for (int64_t i = 0; i < (int64_t)(s->lse_bytes / sizeof(float)); i++)
        FUZZ_CHECK(!isnan(s->tensors.lse[i]), "number %lld of lse is NaN", (long long)i);
}

void fuzz_step_check_untouched(const fuzz_step *s)
{
    FUZZ_CHECK(support_is_poison(s->tensors.out.data, s->out_bytes),
               "refused, and out was written");
    FUZZ_CHECK(s->lse_bytes == 0 || support_is_poison(s->tensors.lse, s->lse_bytes),
               "refused, and lse was written");
}
