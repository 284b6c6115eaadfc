/*
 * check_batch.c: cases of `folio check` about batches and plans: counts, views, completeness, the
 * matrix that masks amount to, and what a plan says it will do.
 */
#include "check/check.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* A step with every kind of sequence, some with encoders. Phases are as AUTO would have them. */
static void make_step(const check_env *env, check_draw *d, check_attention *c)
{
    check_base(env, d, c);
    check_mixed(d, c);
    for (int64_t i = 0; i < c->num_seqs; i++) {
        kit_seq *s = &c->seqs[i];
        if (s->seq_len == 0 || check_chance(d, 2)) continue;
        s->encoder_len = check_int(d, 1, 40);
        s->encoder_new_len = check_chance(d, 2) ? s->encoder_len : 0;
    }
}

static folio_phase phase_of(const kit_seq *s)
{
    bool decode = s->seq_len > s->query_len && s->query_len <= 1;
    return decode ? FOLIO_PHASE_DECODE : FOLIO_PHASE_PREFILL;
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static folio_batch_info count(const check_attention *c)
{
    folio_batch_info n = {.struct_size = sizeof n, .num_seqs = c->num_seqs};
    for (int64_t i = 0; i < c->num_seqs; i++) {
        const kit_seq *s = &c->seqs[i];
        bool padding = s->seq_len == 0, decode = !padding && phase_of(s) == FOLIO_PHASE_DECODE;
        bool prefill = !padding && !decode;
        n.num_query_tokens += s->query_len;
        n.num_prefills += prefill;
        n.num_decodes += decode;
        n.num_padding += padding;
        n.num_prefill_tokens += prefill ? s->query_len : 0;
        n.num_decode_tokens += decode ? s->query_len : 0;
        n.num_padding_tokens += padding ? s->query_len : 0;
        n.max_query_len = larger(n.max_query_len, s->query_len);
        n.max_seq_len = larger(n.max_seq_len, s->seq_len);
        if (prefill) n.max_prefill_seq_len = larger(n.max_prefill_seq_len, s->seq_len);
        if (decode) n.max_decode_seq_len = larger(n.max_decode_seq_len, s->seq_len);
        n.num_encoder_tokens += s->encoder_new_len;
        n.max_encoder_len = larger(n.max_encoder_len, s->encoder_len);
        n.max_encoder_new_len = larger(n.max_encoder_new_len, s->encoder_new_len);
    }
    if (n.num_prefills) n.kind = FOLIO_BATCH_PREFILLS;
    if (n.num_decodes) n.kind = n.num_prefills ? FOLIO_BATCH_MIXED : FOLIO_BATCH_DECODES;
    return n;
}

static bool same_summary(const folio_batch_info *got, const folio_batch_info *want,
                         check_outcome *out)
{
    static const struct {
        const char *name;
        size_t offset;
    } fields[] = {
#define FIELD(name) {#name, offsetof(folio_batch_info, name)}
        FIELD(num_seqs),           FIELD(num_query_tokens),    FIELD(num_prefills),
        FIELD(num_prefill_tokens), FIELD(num_decodes),         FIELD(num_decode_tokens),
        FIELD(num_padding),        FIELD(num_padding_tokens),  FIELD(max_query_len),
        FIELD(max_seq_len),        FIELD(max_prefill_seq_len), FIELD(max_decode_seq_len),
        FIELD(num_encoder_tokens), FIELD(max_encoder_len),     FIELD(max_encoder_new_len),
#undef FIELD
    };
    if (got->kind != want->kind)
        return check_fail(out, "kind is %d, expected %d", (int)got->kind, (int)want->kind);
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; i++) {
        int64_t g, w;
        memcpy(&g, (const char *)got + fields[i].offset, sizeof g);
        memcpy(&w, (const char *)want + fields[i].offset, sizeof w);
        if (g != w)
            return check_fail(out, "%s is %lld, expected %lld", fields[i].name, (long long)g,
                              (long long)w);
    }
    return true;
}

void run_metadata(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    check_attention c = {0};
    make_step(env, d, &c);
    (void)index;
    kit_case *h = kit_open(env->ctx, &c.spec, c.seqs, c.num_seqs);
    folio_batch *batch = h ? kit_batch(h, c.seqs, c.num_seqs) : NULL;
    folio_batch_info got = {.struct_size = sizeof got}, want = count(&c);
    if (batch == NULL) check_fail(out, "%s", kit_error());
    else if (folio_batch_get_info(batch, &got) != FOLIO_OK)
        check_fail(out, "%s", folio_last_error());
    else same_summary(&got, &want, out);
    folio_batch_destroy(batch);
    kit_close(h);
}

/* ---- Views */

typedef struct seq_view {
    int64_t rows, keys, new_rows, context;
} seq_view;

static seq_view view_of(const kit_seq *s, folio_attention_type type)
{
    bool real = s->seq_len > 0;
    switch (type) {
    case FOLIO_ATTENTION_DECODER:
        return (seq_view){s->query_len, s->seq_len, s->query_len,
                          real ? s->seq_len - s->query_len : 0};
    case FOLIO_ATTENTION_ENCODER:
        return (seq_view){s->encoder_new_len, s->encoder_new_len, s->encoder_new_len, 0};
    case FOLIO_ATTENTION_ENCODER_ONLY:
        return (seq_view){s->query_len, real ? s->query_len : 0, s->query_len, 0};
    case FOLIO_ATTENTION_ENCODER_DECODER:
        return (seq_view){s->query_len, real ? s->encoder_len : 0, s->encoder_new_len,
                          s->encoder_len - s->encoder_new_len};
    }
    return (seq_view){0};
}

#define SAME(what, got, want)                                                                      \
    do {                                                                                           \
        long long g_ = (long long)(got), w_ = (long long)(want);                                   \
        if (g_ != w_)                                                                              \
            return check_fail(out, "%s view, phase %d, sequence %lld: %s is %lld, expected %lld",  \
                              folio_attention_type_name(type), (int)phase, (long long)i, what, g_, \
                              w_);                                                                 \
    } while (0)

/* Slots and blocks of entry n of the view, which is sequence i of the batch. */
static bool same_tables(kit_case *h, const check_attention *c, folio_attention_type type,
                        folio_phase phase, int64_t i, const folio_batch_view *v, int64_t n,
                        int64_t first_new, check_outcome *out)
{
    bool cross = type == FOLIO_ATTENTION_ENCODER_DECODER;
    const kit_seq *s = &c->seqs[i];
    seq_view want = view_of(s, type);
    int64_t bs = c->spec.block_size, count_blocks = 0, blocks = (want.keys + bs - 1) / bs;
    const int32_t *table = kit_blocks(h, i + 1, cross, &count_blocks);
    if (v->table_start[n + 1] - v->table_start[n] < blocks) SAME("number of blocks", 0, blocks);
    for (int64_t b = 0; b < blocks; b++) SAME("block", v->blocks[v->table_start[n] + b], table[b]);
    for (int64_t t = 0; t < want.new_rows; t++) {
        int64_t token = want.context + t;
        int64_t slot = s->seq_len ? table[token / bs] * bs + token % bs : -1;
        SAME("slot", v->slot_mapping[first_new + t], slot);
    }
    return true;
}

static bool same_view(kit_case *h, const check_attention *c, folio_attention_type type,
                      folio_phase phase, const folio_batch_view *v, check_outcome *out)
{
    int64_t n = 0, row = 0, rows = 0, keys = 0, new_rows = 0, longest = 0, most_keys = 0;
    for (int64_t i = 0; i < c->num_seqs; i++) {
        const kit_seq *s = &c->seqs[i];
        seq_view want = view_of(s, type);
        bool in_view = phase == FOLIO_PHASE_AUTO || (s->seq_len > 0 && phase_of(s) == phase);
        if (in_view) {
            if (n >= v->num_seqs) SAME("num_seqs", v->num_seqs, n + 1);
            SAME("seqs", v->seqs[n], i);
            SAME("query_rows", v->query_rows[n], row);
            SAME("query_lens", v->query_lens[n], want.rows);
            SAME("query_start", v->query_start[n], rows);
            SAME("key_lens", v->key_lens[n], want.keys);
            SAME("key_start", v->key_start[n], keys);
            SAME("context_lens", v->context_lens[n], want.context);
            bool cached =
                type == FOLIO_ATTENTION_DECODER || type == FOLIO_ATTENTION_ENCODER_DECODER;
            SAME("slot_mapping given", v->slot_mapping != NULL || new_rows + want.new_rows == 0,
                 cached || new_rows + want.new_rows == 0);
            if (cached && !same_tables(h, c, type, phase, i, v, n, new_rows, out)) return false;
            rows += want.rows;
            keys += want.keys;
            new_rows += want.new_rows;
            longest = larger(longest, want.rows);
            most_keys = larger(most_keys, want.keys);
            n++;
        }
        row += want.rows;
    }
    int64_t i = -1;
    SAME("num_seqs", v->num_seqs, n);
    SAME("num_query_tokens", v->num_query_tokens, rows);
    SAME("num_new_tokens", v->num_new_tokens, new_rows);
    SAME("max_query_len", v->max_query_len, longest);
    SAME("max_key_len", v->max_key_len, most_keys);
    SAME("query_start's end", v->query_start[n], rows);
    SAME("key_start's end", v->key_start[n], keys);
    return true;
}

void run_views(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    check_attention c = {0};
    make_step(env, d, &c);
    (void)index;
    kit_case *h = kit_open(env->ctx, &c.spec, c.seqs, c.num_seqs);
    folio_batch *batch = h ? kit_batch(h, c.seqs, c.num_seqs) : NULL;
    bool ok = batch != NULL || check_fail(out, "%s", kit_error());
    for (int type = 0; ok && type < FOLIO_NUM_ATTENTION_TYPES; type++)
        for (int phase = 0; ok && phase <= FOLIO_PHASE_DECODE; phase++) {
            folio_batch_view v = {.struct_size = sizeof v};
            folio_status status =
                folio_batch_get_view(batch, (folio_attention_type)type, (folio_phase)phase, &v);
            ok = status == FOLIO_OK
                     ? same_view(h, &c, (folio_attention_type)type, (folio_phase)phase, &v, out)
                     : check_fail(out, "%s", folio_last_error());
        }
    folio_batch_destroy(batch);
    kit_close(h);
}

/* ---- Completeness */

/* A batch that lacks one field of a type: the query names it. */
void run_completeness(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    static const struct {
        folio_attention_type type;
        bool context, encoder;
        const char *missing; /* NULL: complete */
    } cases[] = {
        {FOLIO_ATTENTION_DECODER, true, false, "block_table"},
        {FOLIO_ATTENTION_ENCODER, false, false, "encoder_len"},
        {FOLIO_ATTENTION_ENCODER_DECODER, false, false, "encoder_len"},
        {FOLIO_ATTENTION_ENCODER_DECODER, false, true, "cross_block_table"},
        {FOLIO_ATTENTION_DECODER, false, false, "block_table"},
        {FOLIO_ATTENTION_ENCODER, false, true, NULL},
        {FOLIO_ATTENTION_ENCODER_ONLY, false, false, NULL},
    };
    const int64_t n = index % (int64_t)(sizeof cases / sizeof cases[0]);
    (void)d;
    folio_batch_desc desc = {.struct_size = sizeof desc, .block_size = 16};
    folio_batch_seq seq =
        FOLIO_WITH(folio_batch_seq, .query_len = 3, .seq_len = cases[n].context ? 8 : 3);
    if (cases[n].encoder) seq.encoder_len = seq.encoder_new_len = 5;
    folio_batch *batch = NULL;
    const char *missing = NULL;
    if (folio_batch_create(env->ctx, &desc, &batch) != FOLIO_OK ||
        folio_batch_add(batch, &seq) != FOLIO_OK) {
        check_fail(out, "%s", folio_last_error());
    } else {
        int complete = folio_batch_is_complete(batch, cases[n].type, &missing);
        if (complete != (cases[n].missing == NULL))
            check_fail(out, "is_complete says %d for %s", complete,
                       folio_attention_type_name(cases[n].type));
        else if (!complete && (missing == NULL || strcmp(missing, cases[n].missing) != 0))
            check_fail(out, "missing is \"%s\", expected \"%s\"", missing ? missing : "(null)",
                       cases[n].missing);
    }
    folio_batch_destroy(batch);
}

/* ---- Masks as a matrix */

static bool same_matrix(const check_attention *c, int64_t seq, const float *slopes,
                        const float *got, check_outcome *out)
{
    const kit_seq *s = &c->seqs[seq];
    seq_view v = view_of(s, c->type);
    for (int64_t h = 0; h < c->spec.num_heads; h++)
        for (int64_t i = 0; i < v.rows; i++)
            for (int64_t j = 0; j < v.keys; j++) {
                int64_t distance;
                bool sees = kit_sees(&c->spec, c->type, s, i, j, &distance);
                double bias = slopes ? -(double)slopes[h] * fabs((double)distance) : 0.0;
                float want = sees ? (float)bias : -INFINITY;
                float value = got[(h * v.rows + i) * v.keys + j];
                if (value != want)
                    return check_fail(out, "[head %lld][query %lld][key %lld] is %g, expected %g",
                                      (long long)h, (long long)i, (long long)j, (double)value,
                                      (double)want);
            }
    return true;
}

void run_bias_write(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    check_attention c = {0};
    make_alibi_window(env, d, index, &c);
    check_settle(&c);
    kit_case *h = kit_open(env->ctx, &c.spec, c.seqs, c.num_seqs);
    folio_batch *batch = h ? kit_batch(h, c.seqs, c.num_seqs) : NULL;
    bool ok = batch != NULL || check_fail(out, "%s", kit_error());
    float slopes[64];
    for (int32_t i = 0; i < c.spec.num_heads; i++) slopes[i] = (float)ldexp(0.8, -i);
    const float *used = index % 3 ? slopes : NULL;
    for (int64_t i = 0; ok && i < c.num_seqs; i++) {
        seq_view v = view_of(&c.seqs[i], c.type);
        int64_t size = c.spec.num_heads * v.rows * v.keys;
        float *matrix = calloc((size_t)size + 1, sizeof *matrix);
        if (matrix == NULL) abort();
        matrix[size] = 42.0f;
        folio_status status =
            folio_bias_write(kit_attention(h), batch, c.type, i, used, matrix, size);
        if (status != FOLIO_OK) ok = check_fail(out, "%s", folio_last_error());
        else if (matrix[size] != 42.0f) ok = check_fail(out, "wrote past its capacity");
        else ok = same_matrix(&c, i, used, matrix, out);
        free(matrix);
    }
    folio_batch_destroy(batch);
    kit_close(h);
}

/* ---- What a plan says */

enum { MAX_NAMES = 128 };

/* kernel: the names of its kernels. */
static bool describe_plan(const check_env *env, const check_attention *c, folio_plan_info *info,
                          char kernel[MAX_NAMES])
{
    kit_case *h = kit_open(env->ctx, &c->spec, c->seqs, c->num_seqs);
    bool ok = h && kit_plan_info(h, c->seqs, c->num_seqs, info);
    snprintf(kernel, MAX_NAMES, "%s", ok ? info->kernel : "");
    kit_close(h);
    return ok;
}

int64_t check_split_len(const check_env *env)
{
    enum { USUAL = 512 };
    check_attention c = {.spec = {.seed = 1, .num_heads = 1, .k_head_size = 8, .block_size = 16}};
    folio_plan_info info;
    char kernel[MAX_NAMES];
    check_add(&c, 1, 7);
    if (!describe_plan(env, &c, &info, kernel) || info.split_len <= 0) return USUAL;
    return info.split_len;
}

/* One pass for short keys, splits for long ones wherever threads can share them. */
void run_split_plan(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    (void)d;
    check_attention c = {
        .spec = {
            .seed = 1, .num_heads = 4, .num_kv_heads = 1, .k_head_size = 16, .block_size = 16}};
    bool is_long = index % 2 != 0;
    folio_plan_info info;
    char kernel[MAX_NAMES];
    check_add(&c, 1, is_long ? 16 * check_split_len(env) : 40);
    if (!describe_plan(env, &c, &info, kernel)) {
        check_fail(out, "%s", folio_last_error());
        return;
    }
    if (*kernel == '\0') check_fail(out, "the kernel has no name");
    else if (info.num_items < 1) check_fail(out, "the plan has no work");
    else if (info.num_split_items < 0 || info.num_split_items > info.num_items)
        check_fail(out, "%lld of %lld items are split", (long long)info.num_split_items,
                   (long long)info.num_items);
    else if (!is_long && info.num_split_items != 0) check_fail(out, "41 keys were split");
    else if (is_long && info.split_len > 0 && env->threads > 1 && info.num_split_items < 2)
        check_fail(out, "long keys were not split, with %d threads", (int)env->threads);
}

/* ---- Every line of the kernel lists */

/* A kernel in the case that it names: the plan chooses it, and its results hold. */
static void run_line(const check_env *env, check_draw *d, int32_t number, check_outcome *out)
{
    static const int64_t contexts[] = {0, 1, 15, 16, 33, 130};
    folio_context_kernel kernel = {.struct_size = sizeof kernel};
    folio_plan_info plan;
    char chosen[MAX_NAMES];
    check_attention c = {0};
    if (folio_context_get_kernel(env->ctx, number, &kernel) != FOLIO_OK) {
        check_fail(out, "%s", folio_last_error());
        return;
    }
    int32_t heads_per_kv = (int32_t)check_int(d, 1, 4);
    c.spec = (kit_spec){.seed = (uint64_t)check_int(d, 1, INT64_MAX - 1),
                        .num_heads = 2 * heads_per_kv,
                        .num_kv_heads = 2,
                        .k_head_size = kernel.head_size,
                        .v_head_size = kernel.v_head_size,
                        .v_in_k = kernel.v_in_k != 0,
                        .dtype = kernel.dtype,
                        .kv_dtype = kernel.kv_dtype,
                        .layout = kernel.layout,
                        .soft_cap = kernel.soft_cap,
                        .block_size = kernel.block_size};
    int64_t least = (kernel.min_rows + heads_per_kv - 1) / heads_per_kv;
    int64_t most = kernel.max_rows > 0 ? kernel.max_rows / heads_per_kv : least + 130;
    check_add(&c, most, CHECK_PICK(d, contexts));
    for (int i = 0; i < 3; i++) check_add(&c, check_int(d, least, most), CHECK_PICK(d, contexts));
    if (!describe_plan(env, &c, &plan, chosen)) check_fail(out, "%s", folio_last_error());
    else if (strcmp(chosen, kernel.name) != 0)
        check_fail(out, "a plan for the case of %s chose %s", kernel.name, chosen);
    else check_run_attention(env, &c, out);
}

void run_lines(const check_env *env, check_draw *d, int64_t index, check_outcome *out)
{
    enum { QUICK = 40 }; /* cases that together run every kernel */
    folio_context_info info = {.struct_size = sizeof info};
    folio_context_get_info(env->ctx, &info);
    for (int32_t k = (int32_t)(index % QUICK); k < info.num_kernels && out->ok; k += QUICK)
        run_line(env, d, k, out);
}
