/*
 * test_vllm06_torch.c: the vLLM 0.6 layer judged by PyTorch.
 *
 * tests/data/golden/vllm06.golden holds random steps of the three backends with what PyTorch's attention
 * makes of them, and biases as PyTorch makes them. Here each step is run through folio_vllm06.h:
 * context stored in a cache of NaN, metadata, one forward, every row compared.
 * FOLIO_GOLDEN_VLLM06 names another file, FOLIO_GOLDEN_CASE one case of it.
 */
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wunused-function" /* the golden suite reads more */
#include "data/golden/golden_inputs.h"
#pragma GCC diagnostic pop

#include "support.h"

#include <folio/folio_vllm06.h>

#define COMMITTED_FILE FOLIO_TESTS_DIR "/data/golden/vllm06.golden"
#define COMMITTED_CASES 80

typedef struct {
    const char *compute;
    folio_vllm06_state *state;
    bool bf16_dots; /* its level multiplies pairs of bf16 */
    double worst;   /* error over bound */
} judge;

/* Everything of one case; what the library owns is destroyed by close_step. */
typedef struct {
    golden_case *c;
    const folio_vllm06_backend *backend;
    folio_vllm06_impl *impl, *other; /* other: of the same shape, with other options */
    folio_vllm06_metadata *metadata;
    folio_vllm06_kv_cache cache;
    size_t cache_bytes;
    folio_vllm06_metadata_fields fields;
} step;

/* Leaves the running function, with the case's number and the library's sentence. */
#define STEP(call)                                                                                 \
    do {                                                                                           \
        folio_status s_ = (call);                                                                  \
        if (s_ != FOLIO_OK) {                                                                      \
            test_fail(__FILE__, __LINE__, "case %lld: %s: %s: %s\n    %.400s",                     \
                      (long long)s->c->id, #call, folio_status_name(s_), folio_last_error(),       \
                      s->c->line);                                                                 \
            return s_;                                                                             \
        }                                                                                          \
    } while (0)

/* A word of the case's line, terminated. */
static char *word(golden_case *c, const char *key)
{
    const char *value = field(c->line, key);
    size_t n = value ? strcspn(value, " ") : 0;
    char *copy = take(&c->mem, n + 1, 0);
    if (n > 0) memcpy(copy, value, n);
    return copy;
}

/* ---------------------------------------------------------------------------------------------- */
/* The layer and its cache                                                                        */
/* ---------------------------------------------------------------------------------------------- */

static folio_status make_impl(step *s, folio_vllm06_state *state)
{
    const folio_attention_desc *a = &s->c->attention;
    folio_vllm06_impl_desc d = FOLIO_WITH(
        folio_vllm06_impl_desc, .num_heads = a->num_heads, .head_size = a->k_head_size,
        .scale = a->scale, .num_kv_heads = a->num_kv_heads, .alibi_slopes = s->c->slopes,
        .sliding_window = int_field(s->c->line, "sliding_window"),
        .kv_cache_dtype = word(s->c, "vkv"), .logits_soft_cap = a->soft_cap, .dtype = a->dtype);
    STEP(folio_vllm06_make_impl(state, s->backend, &d, &s->impl));
    d.scale = s->c->id % 2 ? 0.01f : d.scale;
    d.logits_soft_cap = s->c->id % 3 ? d.logits_soft_cap : 0.3f;
    d.sliding_window = s->c->id % 5 ? d.sliding_window + 2 : d.sliding_window == 0;
    d.alibi_slopes = NULL;
    STEP(folio_vllm06_make_impl(state, s->backend, &d, &s->other));
    return FOLIO_OK;
}

/* Mark the slots that a sequence reads and this step does not write. */
static void mark_needed(const golden_case *c, const golden_seq *q, unsigned char *needed)
{
    bool cross = c->type == FOLIO_ATTENTION_ENCODER_DECODER;
    bool unstored = q->phase == FOLIO_PHASE_DECODE && q->slots != NULL && q->slots[0] == -1;
    int64_t size = c->cache.block_size;
    int64_t n = cross ? q->enc - q->enc_new : q->s - (unstored ? 0 : q->q);
    for (int64_t j = 0; j < n; j++)
        needed[(cross ? q->cross_table : q->table)[j / size] * size + j % size] = 1;
}

/* The context goes in through the plain operator, at the place split_kv_cache gives. */
static folio_status write_context(step *s, folio_vllm06_state *state)
{
    golden_case *c = s->c;
    const folio_kv_cache_desc *d = &c->cache;
    int64_t total = d->num_blocks * d->block_size, n = 0;
    unsigned char *needed = take(&c->mem, (size_t)total, 0);
    int64_t *slots = take(&c->mem, (size_t)total * sizeof *slots, 0);
    for (int64_t i = 0; i < c->num_seqs; i++) mark_needed(c, &c->seqs[i], needed);
    for (int64_t slot = 0; slot < total; slot++)
        if (needed[slot]) slots[n++] = slot;
    folio_vllm06_cache_view key_cache, value_cache;
    STEP(folio_vllm06_split_kv_cache(s->backend, &s->cache, &key_cache, &value_cache));
    CHECK_INT(key_cache.dims[3], d->block_size);
    if (n == 0) return FOLIO_OK;
    folio_vllm06_kv_cache two = s->cache; /* as two tensors */
    two.value_cache = value_cache.data;
    two.bytes = s->cache_bytes / 2;
    const int64_t dense[2] = {0, 0};
    folio_dtype dtype = c->attention.dtype;
    strided k = make_tensor(&c->mem, dtype, n, d->num_kv_heads, d->k_head_size, dense);
    strided v = make_tensor(&c->mem, dtype, n, d->num_kv_heads, d->k_head_size, dense);
    for (int64_t i = 0; i < n; i++) {
        fill_row(c, &k, i, T_CACHED_K, slots[i]);
        fill_row(c, &v, i, T_CACHED_V, slots[i]);
    }
    folio_vllm06_reshape_and_cache_args w =
        FOLIO_WITH(folio_vllm06_reshape_and_cache_args, .key = k.t.data, .value = v.t.data,
                   .dtype = dtype, .x = (int32_t)key_cache.dims[4], .num_tokens = n,
                   .slot_mapping = slots, .k_scale = c->scales[0], .v_scale = c->scales[1]);
    STEP(folio_vllm06_reshape_and_cache(state, &w, &two, NULL));
    return FOLIO_OK;
}

/* A cache of NaN in the backend's own shape. */
static folio_status make_cache(step *s)
{
    const folio_kv_cache_desc *d = &s->c->cache;
    int64_t shape[3];
    STEP(folio_vllm06_get_kv_cache_shape(d->num_blocks, d->block_size, d->num_kv_heads,
                                         d->k_head_size, shape));
    s->cache_bytes = (size_t)(shape[0] * shape[1] * shape[2]) * folio_dtype_size(d->dtype);
    s->cache = (folio_vllm06_kv_cache){.key_cache = take(&s->c->mem, s->cache_bytes, 0xFF),
                                       .bytes = s->cache_bytes,
                                       .dtype = d->dtype,
                                       .block_size = d->block_size,
                                       .num_kv_heads = d->num_kv_heads,
                                       .head_size = d->k_head_size,
                                       .num_blocks = shape[1]};
    return FOLIO_OK;
}

/* ---------------------------------------------------------------------------------------------- */
/* The metadata                                                                                   */
/* ---------------------------------------------------------------------------------------------- */

/* [num_seqs][stride], padded with zeros: the originals' padding. */
static const int32_t *tables_of(golden_case *c, bool cross, int64_t *stride)
{
    *stride = c->id % 2;
    for (int64_t i = 0; i < c->num_seqs; i++) {
        int64_t n = cross ? c->seqs[i].num_cross_blocks : c->seqs[i].num_blocks;
        if (n > *stride) *stride = n;
    }
    int32_t *p = take(&c->mem, (size_t)(c->num_seqs * *stride) * sizeof *p, 0);
    for (int64_t i = 0; i < c->num_seqs; i++) {
        const int32_t *table = cross ? c->seqs[i].cross_table : c->seqs[i].table;
        int64_t n = cross ? c->seqs[i].num_cross_blocks : c->seqs[i].num_blocks;
        if (n > 0) memcpy(p + i * *stride, table, (size_t)n * sizeof *p);
    }
    return p;
}

static void set_encoder_fields(golden_case *c, folio_vllm06_metadata_fields *f)
{
    int32_t *lens = take(&c->mem, (size_t)c->num_seqs * sizeof *lens, 0);
    int64_t *slots = take(&c->mem, (size_t)c->encoder_rows * sizeof *slots, 0), row = 0;
    for (int64_t i = 0; i < c->num_seqs; i++) {
        const golden_seq *q = &c->seqs[i];
        lens[i] = (int32_t)q->enc;
        if (q->enc_new > 0) memcpy(slots + row, q->cross_slots, (size_t)q->enc_new * sizeof *slots);
        row += q->enc_new;
    }
    f->encoder_seq_lens = f->encoder_seq_lens_tensor = lens;
    f->num_encoder_tokens = c->encoder_rows;
    f->cross_slot_mapping = slots;
    f->cross_block_tables = tables_of(c, true, &f->cross_block_tables_stride);
}

/* Every field the originals have; some of those that may be left out are, by the case's number. */
static void make_fields(golden_case *c, folio_vllm06_metadata_fields *f)
{
    size_t n = (size_t)c->num_seqs;
    int32_t *lens = take(&c->mem, n * 4, 0), *context = take(&c->mem, n * 4, 0);
    int32_t *starts = take(&c->mem, (n + 1) * 4, 0), *sums = take(&c->mem, (n + 1) * 4, 0);
    int64_t *slots = take(&c->mem, (size_t)c->query_rows * sizeof *slots, 0);
    *f = (folio_vllm06_metadata_fields){.struct_size = sizeof *f};
    for (size_t i = 0; i < n; i++) {
        const golden_seq *q = &c->seqs[i];
        bool prompt = q->phase == FOLIO_PHASE_PREFILL;
        memcpy(slots + starts[i], q->slots, (size_t)q->q * sizeof *slots);
        lens[i] = (int32_t)q->s;
        context[i] = (int32_t)(q->s > q->q ? q->s - q->q : 0);
        starts[i + 1] = starts[i] + (int32_t)q->q;
        sums[i + 1] = sums[i] + (int32_t)q->s;
        f->num_prefills += prompt;
        *(prompt ? &f->num_prefill_tokens : &f->num_decode_tokens) += q->q;
    }
    f->slot_mapping = slots;
    if (c->id % 3 != 1) f->seq_lens = lens;
    if (c->id % 3 != 2) f->seq_lens_tensor = lens;
    if (c->id % 5 != 1) f->query_start_loc = starts;
    if (c->id % 5 != 2) f->context_lens_tensor = context;
    f->seq_start_loc = sums;
    /* Whole prompts need no tables: the originals leave theirs empty. */
    if (sums[n] != starts[n] || f->num_decode_tokens > 0 || c->id % 2)
        f->block_tables = tables_of(c, false, &f->block_tables_stride);
    f->use_cuda_graph = f->num_prefills == 0;
    f->is_prompt = f->num_decode_tokens == 0;
    if (c->type == FOLIO_ATTENTION_ENCODER || c->type == FOLIO_ATTENTION_ENCODER_DECODER)
        set_encoder_fields(c, f);
}

static folio_status set_biases(step *s)
{
    golden_case *c = s->c;
    if (c->bias_dtype == 0) return FOLIO_OK;
    int64_t heads = c->bias_dims[1], at = 0;
    folio_vllm06_bias *list = take(&c->mem, sizeof *list * MAX_SEQS, 0);
    for (int64_t i = 0; i < s->fields.num_prefills; i++) {
        const golden_seq *q = &c->seqs[i];
        int64_t rows = c->type == FOLIO_ATTENTION_ENCODER ? q->enc : q->q;
        int64_t keys =
            c->type == FOLIO_ATTENTION_ENCODER || c->type == FOLIO_ATTENTION_ENCODER_DECODER
                ? q->enc
                : q->s;
        float *x = take(&c->mem, (size_t)(heads * rows * keys) * sizeof *x, 0);
        for (int64_t j = 0; j < heads * rows * keys; j++) x[j] = bias_value(c, at++);
        list[i] = (folio_vllm06_bias){x, heads, rows, keys};
    }
    STEP(folio_vllm06_set_attn_bias(s->metadata, c->type, list));
    return FOLIO_OK;
}

/* ---------------------------------------------------------------------------------------------- */
/* Forward and the verdict                                                                        */
/* ---------------------------------------------------------------------------------------------- */

/* The library's error budget: twice what a plain softmax in f32 loses on the case (on a few rows,
 * by luck, next to nothing: 2e-6 of the largest number then), and one ulp of the type there. Where
 * kernels take bf16 dot products, and only there, plain rounds probabilities as they do: plain16, which
 * the committed file does not have. */
static void compare(const golden_case *c, judge *by, const strided *out)
{
    int64_t bad = 0;
    double noise = (double)float_field(c->line, "plain");
    if (by->bf16_dots && field(c->line, "plain16"))
        noise = fmax(noise, (double)float_field(c->line, "plain16"));
    double bound = fmax(2e-6 * c->largest, 2 * noise);
    bound += kit_ulp(out->t.dtype, c->largest);
    for (int64_t row = 0; row < c->rows; row++)
        for (int64_t h = 0; h < out->heads; h++) {
            double share = share_of_bound(c, out, row, h, bound);
            if (share > by->worst) by->worst = share;
            if (!(share <= 1) && bad++ < 2)
                CHECK_MSG(false,
                          "%s, case %lld: out[%lld][%lld] is not PyTorch's; the error is %.3g of "
                          "what is allowed\n    %.400s",
                          by->compute, (long long)c->id, (long long)row, (long long)h, share,
                          c->line);
        }
}

static strided filled(golden_case *c, int64_t rows, int64_t heads, int tensor)
{
    /* Every other case: rows as slices of one qkv, as engines hand them over. */
    const folio_attention_desc *a = &c->attention;
    int64_t fused = (a->num_heads + 2 * (int64_t)a->num_kv_heads) * a->k_head_size;
    const int64_t strides[2] = {c->id % 2 ? fused : 0, 0};
    strided x = make_tensor(&c->mem, a->dtype, rows, heads, a->k_head_size, strides);
    for (int64_t row = 0; tensor != 0 && row < rows; row++) fill_row(c, &x, row, tensor, row);
    return x;
}

static folio_status forward(step *s, judge *by)
{
    golden_case *c = s->c;
    strided q = filled(c, c->rows, c->attention.num_heads, T_Q);
    strided k = filled(c, c->new_rows, c->attention.num_kv_heads, T_K);
    strided v = filled(c, c->new_rows, c->attention.num_kv_heads, T_V);
    strided out = filled(c, c->rows, c->attention.num_heads, 0);
    folio_vllm06_forward_args a = FOLIO_WITH(
        folio_vllm06_forward_args, .query = q.t, .kv_cache = s->cache_bytes > 0 ? &s->cache : NULL,
        .attn_metadata = s->metadata, .k_scale = c->scales[0], .v_scale = c->scales[1],
        .attn_type = c->type, .output = out.t);
    if (c->kv_given) {
        a.key = k.t;
        a.value = v.t;
    }
    bool writes = c->kv_given && (c->type == FOLIO_ATTENTION_DECODER ||
                                  c->type == FOLIO_ATTENTION_ENCODER_DECODER);
    void *before = take(&c->mem, s->cache_bytes, 0);
    if (s->cache_bytes > 0) memcpy(before, s->cache.key_cache, s->cache_bytes);
    /* Another layer of the step first: it stores the same, and its answer is overwritten. */
    STEP(folio_vllm06_forward(s->other, &a, NULL));
    STEP(folio_vllm06_forward(s->impl, &a, NULL));
    compare(c, by, &out);
    CHECK_MSG(writes || s->cache_bytes == 0 ||
                  memcmp(before, s->cache.key_cache, s->cache_bytes) == 0,
              "case %lld: the cache changed, and nothing was to be stored", (long long)c->id);
    return FOLIO_OK;
}

static folio_status run_step(step *s, judge *by)
{
    golden_case *c = s->c;
    bool paged = c->type == FOLIO_ATTENTION_DECODER || c->type == FOLIO_ATTENTION_ENCODER_DECODER;
    bool cached = int_field(c->line, "profiling") == 0;
    if (make_impl(s, by->state) != FOLIO_OK) return FOLIO_ERR_ARGUMENT;
    if (cached && make_cache(s) != FOLIO_OK) return FOLIO_ERR_ARGUMENT;
    if (cached && paged && write_context(s, by->state) != FOLIO_OK) return FOLIO_ERR_ARGUMENT;
    make_fields(c, &s->fields);
    STEP(folio_vllm06_make_metadata(by->state, s->backend, &s->fields, &s->metadata));
    if (set_biases(s) != FOLIO_OK) return FOLIO_ERR_ARGUMENT;
    return forward(s, by);
}

static void run_case(golden_case *c, judge *by)
{
    step s = {.c = c, .backend = folio_vllm06_backend_find(word(c, "backend"))};
    CHECK_MSG(s.backend != NULL, "case %lld: no such backend", (long long)c->id);
    if (s.backend != NULL) run_step(&s, by);
    folio_vllm06_metadata_destroy(s.metadata);
    folio_vllm06_impl_destroy(s.impl);
    folio_vllm06_impl_destroy(s.other);
}

/* ---------------------------------------------------------------------------------------------- */
/* Biases                                                                                         */
/* ---------------------------------------------------------------------------------------------- */

/* One bias of the file against the backend's own, bit for bit; 0 where -0 would be a difference. */
static void check_bias(golden_case *c, const char *line, const float *want, int64_t count)
{
    int64_t len = int_field(line, "len"), heads = int_field(line, "heads");
    const float *slopes = floats_field(&c->mem, line, "slopes", heads);
    CHECK_INT(count, len * len * (slopes ? heads : 1));
    float *got = take(&c->mem, (size_t)count * sizeof *got, 0xFF);
    if (slopes) CHECK_OK(folio_vllm06_make_alibi_bias(slopes, heads, len, got));
    else CHECK_OK(folio_vllm06_make_sliding_window_bias(len, int_field(line, "size"), got));
    CHECK_MSG(memcmp(got, want, (size_t)count * sizeof *got) == 0,
              "the bias is not PyTorch's: %.200s", line);
}

static bool read_biases(golden_file *f, golden_case *c, int64_t n)
{
    for (int64_t i = 0; i < n; i++) {
        const char *line = next_line(f), *out = line ? next_line(f) : NULL;
        if (out == NULL || strncmp(out, "out ", 4) != 0) return false;
        int64_t count = (int64_t)strtoll(out + 4, NULL, 10);
        const float *want = parse_numbers(f, c, count);
        if (want == NULL) return false;
        check_bias(c, line, want, count);
        drop(&c->mem);
    }
    return true;
}

/* ---------------------------------------------------------------------------------------------- */
/* The file                                                                                       */
/* ---------------------------------------------------------------------------------------------- */

static bool open_file(golden_file *f, int64_t *num_biases)
{
    const char *path = getenv("FOLIO_GOLDEN_VLLM06");
    f->committed = path == NULL || path[0] == '\0';
    if (f->committed) path = COMMITTED_FILE;
    FILE *in = fopen(path, "rb");
    CHECK_MSG(in != NULL, "cannot open %s", path);
    if (in == NULL) return false;
    long size = fseek(in, 0, SEEK_END) == 0 ? ftell(in) : -1;
    f->text = size >= 0 ? malloc((size_t)size + 1) : NULL;
    rewind(in);
    bool read = f->text != NULL && fread(f->text, 1, (size_t)size, in) == (size_t)size;
    fclose(in);
    if (read) f->text[size] = '\0';
    f->next = f->text;
    const char *header = read ? next_line(f) : NULL;
    bool known = header != NULL && strncmp(header, "folio-golden-vllm06 2 ", 22) == 0;
    CHECK_MSG(known, "%s is not a golden file of this suite, version 2", path);
    f->promised = known ? int_field(header, "cases") : 0;
    *num_biases = known ? int_field(header, "biases") : 0;
    if (!known) free(f->text);
    return known;
}

/* Biases and cases in the file's order; by NULL: the biases only. */
static void run_file(judge *by)
{
    golden_file f;
    int64_t num_biases, count = 0, ran = 0;
    golden_case *c = calloc(1, sizeof *c);
    const char *only = getenv("FOLIO_GOLDEN_CASE");
    int got = 1;
    if (c == NULL || !open_file(&f, &num_biases)) {
        free(c);
        return;
    }
    CHECK(num_biases > 0);
    CHECK_MSG(read_biases(&f, c, num_biases), "malformed biases");
    while (by != NULL && (got = next_case(&f, c)) == 1) {
        if (only == NULL || strtoll(only, NULL, 10) == c->id) {
            run_case(c, by);
            ran++;
        }
        count++;
        drop(&c->mem);
    }
    if (by != NULL) {
        CHECK_MSG(got == 0, "malformed golden file at or after case %lld", (long long)c->id);
        CHECK_INT(count, f.promised);
        CHECK(ran > 0 && (!f.committed || count >= COMMITTED_CASES));
        printf("  vllm06_torch: %lld cases on %s, worst at %.3g of its bound\n", (long long)ran,
               by->compute, by->worst);
    }
    drop(&c->mem);
    free(f.text);
    free(c);
}

static void judge_compute(const char *compute)
{
    judge by = {.compute = compute};
    folio_context_desc d = {.struct_size = sizeof d, .num_threads = 2};
    folio_context_info info = {.struct_size = sizeof info};
    folio_context *ctx = support_context(compute, 2, NULL);
    REQUIRE_TEST(ctx != NULL && folio_context_get_info(ctx, &info) == FOLIO_OK);
    by.bf16_dots = strcmp(info.level, "avx512_bf16") == 0 || strcmp(info.level, "amx") == 0;
    folio_context_destroy(ctx);
    REQUIRE_TEST(folio_vllm06_state_create(compute, &d, &by.state) == FOLIO_OK);
    run_file(&by);
    folio_vllm06_state_destroy(by.state);
}

#ifdef FOLIO_TESTS_DEVICE
TEST(vllm06_torch, cuda_agrees_with_pytorch) { judge_compute("cuda"); }
#else
TEST(vllm06_torch, reference_agrees_with_pytorch) { judge_compute("reference"); }

TEST(vllm06_torch, cpu_agrees_with_pytorch) { judge_compute("cpu"); }
#endif

TEST(vllm06_torch, biases_equal_pytorch) { run_file(NULL); }
