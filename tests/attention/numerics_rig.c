/* numerics_rig.c: makes, runs and reads the small attention calls of numerics_rig.h. */
#include "attention/numerics_rig.h"

#include "support.h"

#include <stdlib.h>

static rig *begun; /* by rig_init */

static void close_begun(void)
{
    if (begun != NULL) rig_close(begun);
    begun = NULL;
}

void rig_each_engine(void (*body)(rig_engine e))
{
    folio_backend_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_backend_get_info("cpu", &info));
    for (int32_t n = 0; n <= info.num_levels; n++) {
        folio_context_desc desc = {.struct_size = sizeof desc, .num_threads = 2};
        desc.backend = n == 0 ? "reference" : "cpu";
        desc.level = n == 0 ? NULL : info.levels[n - 1];
        rig_engine e = {.name = n == 0 ? "reference" : desc.level, .reference = n == 0};
        int before = test_failures();
        folio_context_info got = {.struct_size = sizeof got};
        CHECK_OK(folio_context_create(&desc, &e.ctx));
        if (e.ctx != NULL) CHECK_OK(folio_context_get_info(e.ctx, &got));
        /* A level the processor lacks gives the best below it, which has had its turn. */
        if (e.ctx != NULL && (e.reference || strcmp(got.level, e.name) == 0)) body(e);
        close_begun();
        if (test_failures() > before) printf("  that was on %s\n", e.name);
        folio_context_destroy(e.ctx);
    }
}

/* The numbers of rig_init and rig_random_v, made once. */
static float random_q[RIG_SEQS][RIG_TOKENS][RIG_HEADS][RIG_DIM];
static float random_key[RIG_SEQS][RIG_TOKENS][RIG_HEADS][RIG_DIM];
static float random_val[RIG_SEQS][RIG_TOKENS][RIG_HEADS][RIG_DIM];
static float identity[RIG_SEQS][RIG_TOKENS][RIG_HEADS][RIG_DIM];

static void make_numbers(void)
{
    static bool made;
    for (int64_t s = 0; !made && s < RIG_SEQS; s++) {
        for (int64_t i = 0; i < RIG_TOKENS; i++) {
            for (int64_t h = 0; h < RIG_HEADS; h++) {
                for (int64_t d = 0; d < RIG_DIM; d++) {
                    random_q[s][i][h][d] = (float)kit_random(7, KIT_USER, s, i, h, d);
                    random_key[s][i][h][d] = (float)kit_random(7, KIT_USER + 1, s, i, h, d);
                    random_val[s][i][h][d] = (float)kit_random(7, KIT_USER + 2, s, i, h, d);
                    identity[s][i][h][d] = d == i;
                }
            }
        }
    }
    made = true;
}

void rig_init(rig *r, folio_context *ctx)
{
    close_begun();
    memset(r, 0, sizeof *r);
    begun = r;
    r->ctx = ctx;
    r->desc = (folio_attention_desc){.struct_size = sizeof r->desc,
                                     .num_heads = 2,
                                     .num_kv_heads = 2,
                                     .k_head_size = 8,
                                     .v_head_size = RIG_DIM,
                                     .dtype = FOLIO_F32};
    r->kv = (folio_kv_cache_desc){.struct_size = sizeof r->kv,
                                  .num_blocks = 160,
                                  .num_layers = 1,
                                  .block_size = 4,
                                  .layout = FOLIO_LAYOUT_NATIVE};
    r->t.struct_size = sizeof r->t;
    make_numbers();
    memcpy(r->q, random_q, sizeof r->q);
    memcpy(r->key, random_key, sizeof r->key);
    memcpy(r->val, identity, sizeof r->val);
}

void rig_random_v(rig *r) { memcpy(r->val, random_val, sizeof r->val); }

folio_batch_seq *rig_add(rig *r, int64_t query_len, int64_t seq_len)
{
    int64_t s = r->num_seqs++;
    folio_batch_seq *seq = &r->seqs[s];
    *seq = (folio_batch_seq){.struct_size = sizeof *seq,
                             .query_len = query_len,
                             .seq_len = seq_len,
                             .padding = seq_len == 0};
    /* 7 is coprime to the 160 / 2 blocks of each half: every block has one owner. */
    for (int64_t b = 0; b < RIG_TOKENS / 4; b++) {
        r->table[s][b] = (int32_t)((s * (RIG_TOKENS / 4) + b) * 7 % 80);
        r->cross_table[s][b] = (int32_t)(80 + (s * (RIG_TOKENS / 4) + b) * 7 % 80);
    }
    return seq;
}

int64_t rig_slot(const rig *r, int64_t s, int64_t j, bool cross)
{
    const int32_t *table = cross ? r->cross_table[s] : r->table[s];
    return (int64_t)table[j / r->kv.block_size] * r->kv.block_size + j % r->kv.block_size;
}

folio_status rig_store(rig *r, int64_t s, int64_t j, bool cross)
{
    int64_t slot = rig_slot(r, s, j, cross);
    folio_kv_write write = {.struct_size = sizeof write, .slots = &slot};
    write.k = (folio_tensor){.data = r->key[s][j], .dtype = FOLIO_F32, .tokens = 1};
    write.k.head_stride = RIG_DIM;
    write.k.token_stride = RIG_HEADS * RIG_DIM;
    write.v = write.k;
    write.v.data = r->val[s][j];
    write.k_scale = r->t.k_scale;
    write.v_scale = r->t.v_scale;
    write.k_head_scales = r->t.k_head_scales;
    write.v_head_scales = r->t.v_head_scales;
    return folio_kv_cache_write(r->l.cache, 0, &write, NULL);
}

void rig_close(rig *r) { kit_layer_close(&r->l); }

static folio_status rig_open_cache(rig *r, uint32_t types)
{
    folio_kv_cache_desc *kv = &r->kv;
    kv->num_kv_heads = r->desc.num_kv_heads;
    kv->k_head_size = r->desc.k_head_size;
    kv->v_head_size = r->desc.v_head_size;
    kv->dtype = r->desc.kv_dtype ? r->desc.kv_dtype : r->desc.dtype;
    folio_status status = folio_kv_cache_create(r->ctx, kv, &r->l.cache);
    if (status != FOLIO_OK) return status;
    kit_poison_cache(r->l.cache);
    for (int64_t s = 0; s < r->num_seqs && status == FOLIO_OK; s++) {
        const folio_batch_seq *seq = &r->seqs[s];
        int64_t context = seq->seq_len - seq->query_len;
        if (r->no_kv) context = seq->seq_len;
        int64_t encoder = seq->encoder_new_len && !r->no_kv ? 0 : seq->encoder_len;
        if (types & FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_DECODER))
            for (int64_t j = 0; j < context && status == FOLIO_OK; j++)
                if (r->table[s][j / kv->block_size] >= 0) status = rig_store(r, s, j, false);
        if (types & FOLIO_ATTENTION_BIT(FOLIO_ATTENTION_ENCODER_DECODER))
            for (int64_t j = 0; j < encoder && status == FOLIO_OK; j++)
                status = rig_store(r, s, j, true);
    }
    return status;
}

folio_status rig_replan(rig *r, uint32_t types)
{
    folio_plan_destroy(r->l.plan);
    folio_batch_destroy(r->l.batch);
    r->l.plan = NULL;
    r->l.batch = NULL;
    folio_status status =
        KIT_LAYER_OPEN(r->ctx, &r->l, .block_size = r->kv.block_size, .types = types,
                       .max_seqs = RIG_SEQS, .max_query_tokens = RIG_SEQS * RIG_TOKENS,
                       .max_seq_len = RIG_TOKENS, .max_encoder_tokens = RIG_SEQS * RIG_TOKENS);
    for (int64_t s = 0; s < r->num_seqs && status == FOLIO_OK; s++) {
        folio_batch_seq seq = r->seqs[s];
        if (r->l.cache) {
            seq.block_table = r->table[s];
            seq.num_blocks = (seq.seq_len + r->kv.block_size - 1) / r->kv.block_size;
            seq.cross_block_table = r->cross_table[s];
            seq.num_cross_blocks = (seq.encoder_len + r->kv.block_size - 1) / r->kv.block_size;
        }
        status = folio_batch_add(r->l.batch, &seq);
    }
    if (status == FOLIO_OK) status = folio_plan_update(r->l.plan, r->l.batch, NULL);
    return status;
}

folio_status rig_open(rig *r, uint32_t types)
{
    rig_close(r);
    folio_status status = folio_attention_create(r->ctx, &r->desc, &r->l.attention);
    if (status == FOLIO_OK && r->kv.num_blocks) status = rig_open_cache(r, types);
    if (status == FOLIO_OK) status = rig_replan(r, types);
    return status;
}

int64_t rig_rows(const rig *r, folio_attention_type type, int64_t s)
{
    return type == FOLIO_ATTENTION_ENCODER ? r->seqs[s].encoder_new_len : r->seqs[s].query_len;
}

int64_t rig_new_rows(const rig *r, folio_attention_type type, int64_t s)
{
    return type == FOLIO_ATTENTION_DECODER || type == FOLIO_ATTENTION_ENCODER_ONLY
               ? r->seqs[s].query_len
               : r->seqs[s].encoder_new_len;
}

void rig_fill(const rig *r, folio_attention_type type, void *q, void *k, void *v)
{
    int64_t row = 0, new_row = 0;
    int64_t dk = r->desc.k_head_size, dv = r->desc.v_head_size ? r->desc.v_head_size : dk;
    int64_t heads = r->desc.num_heads, kv_heads = r->desc.num_kv_heads;
    for (int64_t s = 0; s < r->num_seqs; s++) {
        for (int64_t i = 0; i < rig_rows(r, type, s); i++, row++)
            for (int64_t h = 0; h < heads; h++)
                for (int64_t d = 0; d < dk; d++)
                    kit_store(r->desc.dtype, q, (row * heads + h) * dk + d, r->q[s][i][h][d]);
        int64_t first = 0;
        if (type == FOLIO_ATTENTION_DECODER && r->seqs[s].seq_len > r->seqs[s].query_len)
            first = r->seqs[s].seq_len - r->seqs[s].query_len;
        for (int64_t i = 0; i < rig_new_rows(r, type, s); i++, new_row++) {
            for (int64_t g = 0; g < kv_heads; g++) {
                for (int64_t d = 0; d < dk; d++)
                    kit_store(r->desc.dtype, k, (new_row * kv_heads + g) * dk + d,
                              r->key[s][first + i][g][d]);
                for (int64_t d = 0; d < dv; d++)
                    kit_store(r->desc.dtype, v, (new_row * kv_heads + g) * dv + d,
                              r->val[s][first + i][g][d]);
            }
        }
    }
}

static void rig_read(rig *r, folio_attention_type type, folio_dtype dtype, const void *out,
                     const float *lse)
{
    int64_t row = 0, heads = r->desc.num_heads;
    int64_t dv = r->desc.v_head_size ? r->desc.v_head_size : r->desc.k_head_size;
    for (int64_t s = 0; s < r->num_seqs; s++) {
        for (int64_t i = 0; i < rig_rows(r, type, s); i++, row++) {
            for (int64_t h = 0; h < heads; h++) {
                r->lse[s][i][h] = lse[row * heads + h];
                for (int64_t d = 0; d < dv; d++)
                    r->out[s][i][h][d] = kit_load(dtype, out, (row * heads + h) * dv + d);
            }
        }
    }
}

folio_status rig_forward(rig *r, folio_attention_type type)
{
    int64_t rows = 0, new_rows = 0;
    for (int64_t s = 0; s < r->num_seqs; s++) {
        rows += rig_rows(r, type, s);
        new_rows += rig_new_rows(r, type, s);
    }
    int64_t dk = r->desc.k_head_size, dv = r->desc.v_head_size ? r->desc.v_head_size : dk;
    int64_t heads = r->desc.num_heads, kv_heads = r->desc.num_kv_heads;
    folio_dtype out_dtype = r->t.out.dtype ? r->t.out.dtype : r->desc.dtype;
    size_t bytes = folio_dtype_size(r->desc.dtype);
    int64_t q_rows = rows + r->q_rows_off, kv_rows = new_rows + r->kv_rows_off;
    size_t out_bytes = (size_t)(q_rows * heads * dv) * folio_dtype_size(out_dtype);
    size_t lse_bytes = (size_t)(q_rows * heads) * sizeof(float);
    void *q = malloc((size_t)((q_rows + 1) * heads * dk) * bytes);
    void *k = malloc((size_t)((kv_rows + 1) * kv_heads * dk) * bytes);
    void *v = malloc((size_t)((kv_rows + 1) * kv_heads * dv) * bytes);
    void *out = malloc(out_bytes + 8);
    float *lse = malloc(lse_bytes + 8);
    memset(out, 0xFF, out_bytes);
    memset(lse, 0xFF, lse_bytes);
    rig_fill(r, type, q, k, v);
    folio_tensors t = r->t;
    t.q = (folio_tensor){.data = q, .dtype = r->desc.dtype, .tokens = q_rows};
    t.out = (folio_tensor){.data = out, .dtype = out_dtype, .tokens = q_rows};
    if (!r->no_kv && kv_rows > 0) {
        t.k = (folio_tensor){.data = k, .dtype = r->desc.dtype, .tokens = kv_rows};
        t.v = (folio_tensor){.data = v, .dtype = r->desc.dtype, .tokens = kv_rows};
    }
    t.lse = lse;
    folio_status status = folio_attention_forward(r->l.plan, 0, type, r->l.cache, 0, &t, NULL);
    if (status == FOLIO_OK) rig_read(r, type, out_dtype, out, lse);
    free(q);
    free(k);
    free(v);
    free(out);
    free(lse);
    return status;
}

folio_status rig_run(rig *r, folio_attention_type type)
{
    folio_status status = rig_open(r, r->types ? r->types : FOLIO_ATTENTION_BIT(type));
    if (status == FOLIO_OK) status = rig_forward(r, type);
    return status;
}

uint64_t rig_seen(const rig *r, int64_t s, int64_t i, int64_t h)
{
    uint64_t seen = 0;
    for (int64_t d = 0; d < RIG_DIM; d++)
        if (r->out[s][i][h][d] != 0) seen |= (uint64_t)1 << d;
    return seen;
}

uint64_t rig_range(int64_t first, int64_t end)
{
    uint64_t bits = 0;
    for (int64_t j = first < 0 ? 0 : first; j < end && j < 64; j++) bits |= (uint64_t)1 << j;
    return bits;
}

double rig_dot(const float *a, const float *b, int64_t n)
{
    double sum = 0;
    for (int64_t d = 0; d < n; d++) sum += (double)a[d] * (double)b[d];
    return sum;
}
