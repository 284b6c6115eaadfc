/* vllm06_rig.c: steps of vLLM 0.6's interface, judged by dense attention; see vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

#include <math.h>
#include <setjmp.h>
#include <stdlib.h>

enum { Q, K, V, ENCODER_Q, ENCODER_K, ENCODER_V };

static jmp_buf stop; /* where a test goes on that cannot */

void v06_need(bool there)
{
    CHECK(there);
    if (!there) longjmp(stop, 1);
}

static void run_body(v06 *r, const char *original, const char *compute, v06_body body)
{
    if (setjmp(stop) != 0) return;
    v06_init(r, original, compute);
    body(r);
}

void v06_on_one(const char *original, v06_body body)
{
    static v06 r;
    for (int i = 0; i < SUPPORT_NUM_BACKENDS; i++) {
        int before = test_failures();
        run_body(&r, original, support_backends[i], body);
        if (test_failures() != before)
            printf("  ... %s on backend %s\n", original, support_backends[i]);
        v06_close(&r);
    }
}

void v06_on_all(v06_body body)
{
    static const char *const originals[] = {"xformers", "torch-sdpa", "torch-sdpa-ipex", "ipex"};
    for (int i = 0; i < COUNT_OF(originals); i++) v06_on_one(originals[i], body);
}

void v06_init(v06 *r, const char *original, const char *compute)
{
    memset(r, 0, sizeof *r);
    r->compute = compute;
    r->b = folio_vllm06_backend_find(original);
    v06_need(r->b != NULL && strcmp(r->b->name, original) == 0);
    r->block_size = 8;
    r->max_tokens = 320;
    r->d = (folio_vllm06_impl_desc){.struct_size = sizeof r->d,
                                    .num_heads = 4,
                                    .head_size = 32,
                                    .num_kv_heads = 2,
                                    .dtype = FOLIO_F32};
    for (int h = 0; h < 8; h++) r->slopes[h] = ldexpf(1.0f, -h - 1) * 1.3f;
}

void v06_reset(v06 *r)
{
    const char *original = r->b->name, *compute = r->compute;
    v06_close(r);
    v06_init(r, original, compute);
}

static int64_t kv_heads(const v06 *r)
{
    return r->d.num_kv_heads > 0 ? r->d.num_kv_heads : r->d.num_heads;
}

void v06_open(v06 *r)
{
    const char *name = r->d.kv_cache_dtype;
    r->kv_dtype = name == NULL || strcmp(name, "auto") == 0 ? r->d.dtype
                  : strcmp(name, "fp8_e5m2") == 0           ? FOLIO_FP8_E5M2
                                                            : FOLIO_FP8_E4M3;
    folio_context_desc c = {.struct_size = sizeof c, .num_threads = 2};
    CHECK_OK(folio_vllm06_state_create(r->compute, &c, &r->state));
    if (r->state != NULL) CHECK_OK(folio_vllm06_make_impl(r->state, r->b, &r->d, &r->impl));
    v06_need(r->impl != NULL);
    int64_t elem = (int64_t)folio_dtype_size(r->kv_dtype), shape[3] = {0, 0, 0};
    r->x = strcmp(r->b->name, "ipex") == 0 ? 1 : 16 / elem;
    r->blocks_per_seq = (r->max_tokens + r->block_size - 1) / r->block_size;
    r->num_blocks = 2 * V06_SEQS * r->blocks_per_seq + 3;
    CHECK_OK(folio_vllm06_get_kv_cache_shape(r->num_blocks, r->block_size, kv_heads(r),
                                             r->d.head_size, shape));
    for (int l = 0; l < V06_LAYERS; l++) {
        r->cache[l] = support_buffer_make((size_t)(shape[0] * shape[1] * shape[2] * elem));
        r->image[l] = malloc(r->cache[l].bytes);
        if (r->image[l] == NULL) abort();
        memset(r->image[l], 0xFF, r->cache[l].bytes);
        r->kv[l] = (folio_vllm06_kv_cache){.key_cache = r->cache[l].data,
                                           .bytes = r->cache[l].bytes,
                                           .dtype = r->kv_dtype,
                                           .block_size = (int32_t)r->block_size,
                                           .num_kv_heads = (int32_t)kv_heads(r),
                                           .head_size = r->d.head_size,
                                           .num_blocks = r->num_blocks};
    }
}

static void drop_call(v06 *r)
{
    free(r->q);
    free(r->k);
    free(r->v);
    r->q = r->k = r->v = NULL;
    if (r->out.base != NULL) support_buffer_free(&r->out);
    r->out = (support_buffer){0};
}

void v06_close(v06 *r)
{
    drop_call(r);
    for (int l = 0; l < V06_LAYERS; l++) {
        if (r->cache[l].base != NULL) support_buffer_free(&r->cache[l]);
        free(r->image[l]);
    }
    folio_vllm06_metadata_destroy(r->m);
    folio_vllm06_impl_destroy(r->impl);
    folio_vllm06_state_destroy(r->state);
    memset(r, 0, sizeof *r);
}

/* -------------------------------------------------------------------------------------- numbers */

static double number(const v06 *r, int what, int id, int64_t token, int64_t head, int64_t d)
{
    uint64_t index = (((uint64_t)id * 1024 + (uint64_t)token) * 64 + (uint64_t)head) * 512;
    double x = 2.0 * (double)support_random((uint64_t)what + 1, index + (uint64_t)d);
    if (r->d.dtype == FOLIO_F32) return x; /* exact */
    return kit_decode(r->d.dtype, kit_encode(r->d.dtype, x));
}

/* Blocks of a sequence, never side by side: num_blocks is odd, so steps of -2 meet every block. */
static int32_t block_of(const v06 *r, int id, int64_t nth, bool cross)
{
    int64_t b = (int64_t)(2 * id + cross) * r->blocks_per_seq + nth;
    return (int32_t)(b * (r->num_blocks - 2) % r->num_blocks);
}

int64_t v06_slot(const v06 *r, int id, int64_t token, bool cross)
{
    return block_of(r, id, token / r->block_size, cross) * r->block_size + token % r->block_size;
}

/* The originals' layout: K [block][head][d / x][offset][x], then V [block][head][d][offset]; under IPEX both
 * [block][head][offset][d]. */
static int64_t element(const v06 *r, int64_t slot, int64_t head, int64_t d, bool value)
{
    int64_t block = slot / r->block_size, offset = slot % r->block_size, size = r->d.head_size;
    int64_t first = (block * kv_heads(r) + head) * size * r->block_size;
    if (value) first += r->num_blocks * r->block_size * kv_heads(r) * size;
    if (strcmp(r->b->name, "torch-sdpa-ipex") == 0) return first + offset * size + d;
    if (value) return first + d * r->block_size + offset;
    return first + (d / r->x * r->block_size + offset) * r->x + d % r->x;
}

/* Of an fp8 cache; in others scales do nothing. */
static double scale_of(const v06 *r, bool value)
{
    float scale = value ? r->v_scale : r->k_scale;
    return scale > 0 && folio_dtype_size(r->kv_dtype) == 1 ? (double)scale : 1.0;
}

static void image_store(v06 *r, int layer, int64_t slot, int id, int64_t token)
{
    if (slot < 0) return;
    for (int64_t h = 0; h < kv_heads(r); h++)
        for (int64_t d = 0; d < r->d.head_size; d++)
            for (int value = 0; value < 2; value++) {
                int what = (layer == 1 ? ENCODER_K : K) + value;
                double x = number(r, what, id, token, h, d) / scale_of(r, value);
                kit_set(r->kv_dtype, r->image[layer], element(r, slot, h, d, value),
                        kit_encode(r->kv_dtype, x));
            }
}

static double image_load(const v06 *r, int layer, int64_t slot, int64_t h, int64_t d, bool value)
{
    uint32_t bits = kit_get(r->kv_dtype, r->image[layer], element(r, slot, h, d, value));
    return kit_decode(r->kv_dtype, bits) * scale_of(r, value);
}

/* ----------------------------------------------------------------------------------------- step */

void v06_fields(v06 *r, const v06_seq *seqs, int n)
{
    folio_vllm06_metadata_fields *f = &r->f;
    *f = (folio_vllm06_metadata_fields){.struct_size = sizeof *f};
    if (r->state == NULL) v06_open(r);
    r->num_seqs = n;
    int64_t tokens = 0;
    bool encoder = false;
    for (int i = 0; i < n; i++) {
        const v06_seq *s = &seqs[i];
        r->seqs[i] = *s;
        r->lens[i] = (int32_t)(s->seq_len - r->clipped[i]);
        r->contexts[i] = (int32_t)(s->seq_len > 0 ? s->seq_len - s->query_len : 0);
        r->starts[i + 1] = r->starts[i] + (int32_t)s->query_len;
        r->seq_starts[i + 1] = r->seq_starts[i] + r->lens[i];
        r->encoder_lens[i] = (int32_t)s->encoder_len;
        encoder |= s->encoder_len > 0;
        f->num_prefills += s->prompt;
        *(s->prompt ? &f->num_prefill_tokens : &f->num_decode_tokens) += s->query_len;
        for (int64_t t = 0; t < s->query_len; t++)
            r->slots[tokens++] =
                s->seq_len > 0 ? v06_slot(r, s->id, s->seq_len - s->query_len + t, false) : -1;
        for (int64_t t = 0; s->prompt && t < s->encoder_len; t++)
            r->cross_slots[f->num_encoder_tokens++] = v06_slot(r, s->id, t, true);
        for (int64_t k = 0; k < r->blocks_per_seq; k++) {
            r->tables[i * r->blocks_per_seq + k] =
                block_of(r, s->id, k + r->clipped[i] / r->block_size, false);
            r->cross_tables[i * r->blocks_per_seq + k] = block_of(r, s->id, k, true);
        }
    }
    f->slot_mapping = r->slots;
    f->seq_lens = f->seq_lens_tensor = r->lens;
    f->query_start_loc = r->starts;
    f->seq_start_loc = r->seq_starts;
    f->context_lens_tensor = r->contexts;
    f->block_tables = r->tables;
    f->block_tables_stride = r->blocks_per_seq;
    f->is_prompt = f->num_decode_tokens == 0;
    if (!encoder) return;
    f->encoder_seq_lens = f->encoder_seq_lens_tensor = r->encoder_lens;
    f->cross_slot_mapping = r->cross_slots;
    f->cross_block_tables = r->cross_tables;
    f->cross_block_tables_stride = r->blocks_per_seq;
}

static void narrow(const v06 *r, int32_t *tables, int64_t stride)
{
    for (int64_t i = 0; i < r->num_seqs; i++)
        memmove(tables + i * stride, tables + i * r->blocks_per_seq,
                (size_t)stride * sizeof *tables);
}

void v06_narrow(v06 *r, int64_t stride) { narrow(r, r->tables, r->f.block_tables_stride = stride); }

void v06_narrow_cross(v06 *r, int64_t stride)
{
    if (r->f.cross_block_tables != NULL)
        narrow(r, r->cross_tables, r->f.cross_block_tables_stride = stride);
}

void v06_remake(v06 *r)
{
    folio_vllm06_metadata_destroy(r->m);
    r->m = NULL;
    CHECK_OK(folio_vllm06_make_metadata(r->state, r->b, &r->f, &r->m));
    v06_need(r->m != NULL);
}

void v06_step(v06 *r, const v06_seq *seqs, int n)
{
    v06_fields(r, seqs, n);
    v06_remake(r);
}

/* Rows of query (or, with keys, of key and value) that sequence i has in attention of this type. */
static int64_t rows_of(const v06 *r, folio_attention_type type, int i, bool keys)
{
    const v06_seq *s = &r->seqs[i];
    bool encoder = type == ENCODER || (keys && type == CROSS);
    return encoder ? (s->prompt ? s->encoder_len : 0) : s->query_len;
}

/* Rows of Q, K and V as a fused projection gives them, each at a stride of its own; 0: rows side by side. */
static int64_t token_stride(const v06 *r, int what)
{
    return r->strided ? (r->d.num_heads + 2 + what) * (int64_t)r->d.head_size : 0;
}

static void *fill(const v06 *r, int what, folio_attention_type type, bool keys, int64_t *rows)
{
    int64_t heads = keys ? kv_heads(r) : r->d.num_heads, size = r->d.head_size, row = 0;
    int64_t stride = token_stride(r, what) > 0 ? token_stride(r, what) : heads * size;
    bool encoder = type == ENCODER || (keys && type == CROSS);
    *rows = 0;
    for (int i = 0; i < r->num_seqs; i++) *rows += rows_of(r, type, i, keys);
    /* room for rows of query in each, for tests that let output lie in one */
    int64_t room = *rows * (stride > v06_width(r) ? stride : v06_width(r));
    size_t bytes = (size_t)room * folio_dtype_size(r->d.dtype);
    void *data = malloc(bytes + 1);
    if (data == NULL) abort();
    memset(data, 0xFF, bytes);
    for (int i = 0; i < r->num_seqs; i++) {
        const v06_seq *s = &r->seqs[i];
        int64_t first = encoder || s->seq_len == 0 ? 0 : s->seq_len - s->query_len;
        for (int64_t t = 0; t < rows_of(r, type, i, keys); t++, row++)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t d = 0; d < size; d++)
                    kit_set(r->d.dtype, data, row * stride + h * size + d,
                            kit_encode(r->d.dtype, number(r, encoder ? what + 3 : what, s->id,
                                                          first + t, h, d)));
    }
    return data;
}

folio_vllm06_forward_args v06_args(v06 *r, folio_attention_type type)
{
    int64_t key_rows;
    drop_call(r);
    r->q = fill(r, Q, type, false, &r->out_rows);
    r->k = fill(r, K, type, true, &key_rows);
    r->v = fill(r, V, type, true, &key_rows);
    size_t elem = folio_dtype_size(r->d.dtype);
    r->out = support_buffer_make((size_t)(r->out_rows * v06_width(r)) * elem);
    folio_vllm06_forward_args a = FOLIO_WITH(
        folio_vllm06_forward_args, .query = {r->q, r->d.dtype, r->out_rows, token_stride(r, Q), 0},
        .key = {r->k, r->d.dtype, key_rows, token_stride(r, K), 0},
        .value = {r->v, r->d.dtype, key_rows, token_stride(r, V), 0}, .attn_metadata = r->m,
        .k_scale = r->k_scale, .v_scale = r->v_scale, .attn_type = type,
        .output = {r->out.data, r->d.dtype, r->out_rows, 0, 0});
    if (!r->no_cache) a.kv_cache = &r->kv[type == CROSS];
    if (r->no_key) a.key = a.value = (folio_tensor){0};
    return a;
}

int64_t v06_width(const v06 *r) { return (int64_t)r->d.num_heads * r->d.head_size; }

double v06_out(const v06 *r, int64_t row, int64_t column)
{
    return kit_decode(r->d.dtype, kit_get(r->d.dtype, r->out.data, row * v06_width(r) + column));
}

/* ------------------------------------------------------------------------------ dense attention */

/* Is key j of sequence i read from the cache, rather than from this step's key and value? */
static bool is_cached(const v06 *r, folio_attention_type type, int i, int64_t j)
{
    const v06_seq *s = &r->seqs[i];
    if (r->no_cache || type == ENCODER || type == ENCODER_ONLY) return false;
    if (type == CROSS) return !s->prompt || r->no_key;
    return !s->prompt || j < s->seq_len - s->query_len;
}

static double key_number(const v06 *r, folio_attention_type type, int i, int64_t j, int64_t h,
                         int64_t d, bool value)
{
    const v06_seq *s = &r->seqs[i];
    bool cross = type == CROSS, encoder = cross || type == ENCODER;
    if (is_cached(r, type, i, j))
        return image_load(r, cross, v06_slot(r, s->id, j, cross), h, d, value);
    return number(r, (encoder ? ENCODER_K : K) + value, s->id, j, h, d);
}

/* What a layer does with sequence i: as it is described, or in decoder attention with compat as the
 * originals did. */
typedef struct {
    int64_t window;
    const float *slopes;
    double scale, cap;
    bool biased; /* set biases count */
} habits;

static habits habits_of(const v06 *r, folio_attention_type type, int i)
{
    double usual = 1.0 / sqrt((double)r->d.head_size);
    bool ipex = strcmp(r->b->name, "ipex") == 0, prompt = r->seqs[i].prompt;
    bool tables = !r->no_cache && r->f.block_tables != NULL && r->f.block_tables_stride > 0;
    habits h = {r->d.sliding_window, r->d.alibi_slopes, r->d.scale > 0 ? (double)r->d.scale : usual,
                (double)r->d.logits_soft_cap, true};
    if (!r->d.compat || type != DECODER) return h;
    if (!prompt || ipex || h.slopes != NULL) h.window = 0;
    if (!prompt && ipex) h.cap = 0;
    if (prompt && ipex) h.slopes = NULL;
    if (prompt && ipex) h.biased = false;
    if (prompt && strcmp(r->b->name, "xformers") == 0 && tables) h.scale = usual;
    return h;
}

/* What is added to the score of key j for query i, at position pos; -inf: not seen. */
static double mask(const habits *a, folio_attention_type type, const folio_vllm06_bias *bias,
                   int64_t i, int64_t pos, int64_t j, int64_t h)
{
    if (bias != NULL && a->biased)
        return (double)
            bias->data[((bias->num_heads > 1 ? h : 0) * bias->query_len + i) * bias->key_len + j];
    if (type != DECODER) return 0.0;
    if (j > pos || (a->window > 0 && j <= pos - a->window)) return -INFINITY;
    return a->slopes != NULL ? -(double)a->slopes[h] * (double)(pos - j) : 0.0;
}

/* K and V of sequence i's kv head g, [keys][head_size]. */
typedef struct {
    double *k, *v;
    int64_t keys;
} head;

static head load_head(const v06 *r, folio_attention_type type, int i, int64_t g)
{
    const v06_seq *s = &r->seqs[i];
    int64_t size = r->d.head_size;
    head kv = {.keys = type == ENCODER || type == CROSS ? s->encoder_len : s->seq_len};
    size_t bytes = (size_t)(kv.keys * size + 1) * sizeof(double);
    kv.k = malloc(bytes);
    kv.v = malloc(bytes);
    if (kv.k == NULL || kv.v == NULL) abort();
    for (int64_t e = 0; e < kv.keys * size; e++) {
        kv.k[e] = key_number(r, type, i, e / size, g, e % size, false);
        kv.v[e] = key_number(r, type, i, e / size, g, e % size, true);
    }
    return kv;
}

static void free_head(head *kv)
{
    free(kv->k);
    free(kv->v);
}

/* Row t of sequence i and head h over keys [first, end) into out[head_size]; returns lse. */
static double dense(const v06 *r, folio_attention_type type, const folio_vllm06_bias *bias, int i,
                    int64_t t, int64_t h, const head *kv, int64_t first, int64_t end, double *out)
{
    const v06_seq *s = &r->seqs[i];
    int64_t size = r->d.head_size, pos = type == ENCODER ? t : s->seq_len - s->query_len + t;
    habits a = habits_of(r, type, i);
    double q[512], score[V06_TOKENS], top = -INFINITY, sum = 0;
    memset(out, 0, (size_t)size * sizeof *out);
    if (s->seq_len == 0) return -INFINITY;
    if (end > kv->keys) end = kv->keys;
    for (int64_t d = 0; d < size; d++)
        q[d] = number(r, type == ENCODER ? ENCODER_Q : Q, s->id, pos, h, d);
    for (int64_t j = first; j < end; j++) {
        double dot = 0;
        double added =
            type == DECODER && j < r->clipped[i] ? -INFINITY : mask(&a, type, bias, t, pos, j, h);
        for (int64_t d = 0; d < size && added > -INFINITY; d++) dot += q[d] * kv->k[j * size + d];
        dot *= a.scale;
        if (a.cap > 0) dot = a.cap * tanh(dot / a.cap);
        score[j] = dot + added;
        top = score[j] > top ? score[j] : top;
    }
    for (int64_t j = first; j < end; j++) {
        double p = score[j] > -INFINITY ? exp(score[j] - top) : 0;
        sum += p;
        for (int64_t d = 0; d < size && p > 0; d++) out[d] += p * kv->v[j * size + d];
    }
    for (int64_t d = 0; d < size && sum > 0; d++) out[d] /= sum;
    return top + log(sum);
}

double v06_dense_decode(const v06 *r, int i, int64_t h, int64_t first, int64_t end, double *out)
{
    head kv = load_head(r, DECODER, i, h / (r->d.num_heads / kv_heads(r)));
    double lse = dense(r, DECODER, NULL, i, 0, h, &kv, first, end, out);
    free_head(&kv);
    return lse;
}

void v06_check_rows(const v06 *r, folio_attention_type type)
{
    const folio_vllm06_bias *biases = NULL;
    CHECK_OK(folio_vllm06_get_attn_bias(r->m, type, &biases));
    CHECK(support_buffer_guards_hold(&r->out));
    int64_t size = r->d.head_size, heads = r->d.num_heads, n = r->out_rows * heads * size, row = 0;
    double *expected = calloc((size_t)n + 1, sizeof *expected), largest = 0;
    if (expected == NULL) abort();
    for (int i = 0; i < r->num_seqs; row += rows_of(r, type, i, false), i++)
        for (int64_t g = 0; g < kv_heads(r); g++) {
            const folio_vllm06_bias *bias = biases != NULL && r->seqs[i].prompt ? &biases[i] : NULL;
            int64_t group = heads / kv_heads(r);
            head kv = load_head(r, type, i, g);
            for (int64_t k = 0; k < rows_of(r, type, i, false) * group; k++) {
                int64_t t = k / group, h = g * group + k % group;
                dense(r, type, bias, i, t, h, &kv, 0, kv.keys,
                      expected + ((row + t) * heads + h) * size);
            }
            free_head(&kv);
        }
    for (int64_t k = 0; k < n; k++) largest = fmax(largest, fabs(expected[k]));
    double budget = 2e-6 * largest; /* and the spacing of the 16-bit types */
    if (r->d.dtype != FOLIO_F32) budget += kit_ulp(r->d.dtype, largest);
    for (int64_t k = 0; k < n; k++) {
        double got = v06_out(r, 0, k);
        CHECK_MSG(fabs(got - expected[k]) <= budget,
                  "%s, row %lld, column %lld: %.9g, expected %.9g", folio_attention_type_name(type),
                  (long long)(k / v06_width(r)), (long long)(k % v06_width(r)), got, expected[k]);
    }
    free(expected);
}

void v06_check_biases(const v06 *r, folio_attention_type type, const folio_vllm06_bias *given,
                      int n)
{
    const folio_vllm06_bias *got = NULL;
    CHECK_OK(folio_vllm06_get_attn_bias(r->m, type, &got));
    CHECK(got != NULL && got != given);
    for (int i = 0; got != NULL && i < n; i++) {
        const folio_vllm06_bias *b = &given[i];
        CHECK(got[i].num_heads == b->num_heads && got[i].query_len == b->query_len);
        CHECK(got[i].key_len == b->key_len && got[i].data != b->data);
        CHECK(memcmp(got[i].data, b->data,
                     (size_t)(b->num_heads * b->query_len * b->key_len) * sizeof *b->data) == 0);
    }
}

void v06_check_images(const v06 *r)
{
    for (int l = 0; l < V06_LAYERS; l++) {
        CHECK(support_buffer_guards_hold(&r->cache[l]));
        CHECK_MSG(memcmp(r->cache[l].data, r->image[l], r->cache[l].bytes) == 0,
                  "the bytes of cache %d are not those of the originals' layout", l);
    }
}

void v06_expect_stored(v06 *r, folio_attention_type type)
{
    bool cross = type == CROSS;
    int64_t row = 0;
    for (int i = 0; i < r->num_seqs; i++) {
        const v06_seq *s = &r->seqs[i];
        int64_t first = cross ? 0 : s->seq_len - s->query_len;
        for (int64_t t = 0; t < rows_of(r, type, i, true); t++, row++)
            image_store(r, cross, cross ? r->cross_slots[row] : r->slots[row], s->id, first + t);
    }
}

void v06_run_as(v06 *r, folio_attention_type type)
{
    folio_vllm06_forward_args a = v06_args(r, type);
    folio_status status = folio_vllm06_forward(r->impl, &a, NULL);
    CHECK_MSG(status == FOLIO_OK, "forward as %s: %s", folio_attention_type_name(type),
              folio_last_error());
    if (status != FOLIO_OK) return;
    if ((type == CROSS || type == DECODER) && a.kv_cache != NULL && a.key.data != NULL)
        v06_expect_stored(r, type);
    v06_check_images(r);
    v06_check_rows(r, type);
}

folio_attention_type v06_type(char letter)
{
    return letter == 'D' ? DECODER : letter == 'E' ? ENCODER : letter == 'O' ? ENCODER_ONLY : CROSS;
}

void v06_run(v06 *r, const char *types)
{
    for (; *types != '\0'; types++) v06_run_as(r, v06_type(*types));
}

folio_vllm06_kv_cache v06_in_two(const folio_vllm06_kv_cache *c)
{
    folio_vllm06_kv_cache two = *c;
    two.bytes /= 2;
    two.value_cache = (char *)c->key_cache + two.bytes;
    return two;
}

void v06_rerun(v06 *r, const char *types)
{
    v06_remake(r);
    v06_run(r, types);
}

void v06_play(v06 *r, const v06_seq *seqs, int n, const char *types)
{
    v06_fields(r, seqs, n);
    v06_rerun(r, types);
}

void v06_rejected(v06 *r, const folio_vllm06_forward_args *args, const char *words,
                  const char *file, int line)
{
    support_mark_error();
    support_refused(file, line, "forward", folio_vllm06_forward(r->impl, args, NULL),
                    FOLIO_ERR_ARGUMENT, words);
    int before = test_failures();
    v06_check_images(r);
    CHECK(support_is_poison(r->out.data, r->out.bytes));
    if (test_failures() != before) test_fail(file, line, "the rejected forward wrote");
}

void v06_rejects(v06 *r, folio_attention_type type, const char *words, const char *file, int line)
{
    folio_vllm06_forward_args a = v06_args(r, type);
    v06_rejected(r, &a, words, file, line);
}

/* Arrays of the fields, of as many numbers as they have. */
typedef struct {
    size_t field, size;
    int64_t count;
} array;
#define ARRAY(field, count)                                                                        \
    {                                                                                              \
        offsetof(folio_vllm06_metadata_fields, field),                                             \
            sizeof *((folio_vllm06_metadata_fields *)NULL)->field, count                           \
    }

void v06_check_fields(const folio_vllm06_metadata *m, const folio_vllm06_metadata_fields *given)
{
    folio_vllm06_metadata_fields f = *given;
    const folio_vllm06_metadata_fields *got = folio_vllm06_metadata_get(m);
    int64_t p = f.num_prefills, n = p + f.num_decode_tokens;
    const array arrays[] = {
        ARRAY(slot_mapping, f.num_prefill_tokens + f.num_decode_tokens),
        ARRAY(seq_lens, n),
        ARRAY(seq_lens_tensor, n),
        ARRAY(query_start_loc, n + 1),
        ARRAY(seq_start_loc, n + 1),
        ARRAY(context_lens_tensor, n),
        ARRAY(block_tables, n * f.block_tables_stride),
        ARRAY(encoder_seq_lens, n),
        ARRAY(encoder_seq_lens_tensor, n),
        ARRAY(cross_slot_mapping, p > 0 ? f.num_encoder_tokens : 0),
        ARRAY(cross_block_tables, n * f.cross_block_tables_stride),
        ARRAY(encoder_seq_start_loc, n + 1),
        ARRAY(seqlen_q, p + 1),
        ARRAY(kv_start_loc, p + 1),
        ARRAY(prefill_block_tables, p * f.prefill_block_tables_stride),
    };
    for (int i = 0; i < COUNT_OF(arrays); i++) {
        const array *a = &arrays[i];
        const void *x, *y;
        memcpy(&x, (char *)&f + a->field, sizeof x);
        memcpy(&y, (const char *)got + a->field, sizeof y);
        if (x == NULL) continue;
        CHECK_MSG(y != NULL && y != x && memcmp(x, y, (size_t)a->count * a->size) == 0,
                  "array %d of the fields differs", i);
        memcpy((char *)&f + a->field, &y, sizeof y);
    }
    v06_check_same_fields(got, &f);
}

void v06_check_same_fields(const folio_vllm06_metadata_fields *a,
                           const folio_vllm06_metadata_fields *b)
{
    const size_t end = offsetof(folio_vllm06_metadata_fields, chunked_prefill) + sizeof(int32_t);
    for (size_t at = 0; at < end; at += sizeof(int32_t))
        CHECK_MSG(memcmp((const char *)a + at, (const char *)b + at, sizeof(int32_t)) == 0,
                  "the field at byte %zu differs", at);
}

const folio_vllm06_metadata_fields *v06_get(const v06 *r)
{
    return folio_vllm06_metadata_get(r->m);
}
