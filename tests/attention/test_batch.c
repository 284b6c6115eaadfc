/*
 * test_batch.c: one step's sequences: the builder and the three forms of arrays must say the same
 * in summary, views and biases; counts, maxima, padding, phases, slots by block table,
 * completeness, reuse, growth, and errors that leave a batch empty. Expected views are computed
 * here from a plain list.
 */
#include "support.h"

#include <math.h>

enum { MAX_SEQS = 160, MAX_TABLE = 24, MAX_NEW = 64 };

/* One sequence as a test writes it down. */
typedef struct {
    int query_len, seq_len;
    folio_phase phase;
    folio_causality causality;
    int encoder_len;
    bool encoder_new;
    int64_t first_query_pos, first_key_pos; /* both 0 and not given: by length */
} seq_plan;

typedef struct {
    int block_size, decode_query_len, num_seqs;
    bool positions, no_cache, cross;
    const seq_plan *seqs;
} step;

/* A step, all its tables made: blocks are drawn from a shuffled pool. */
typedef struct {
    step s;
    int32_t table[MAX_SEQS][MAX_TABLE], cross[MAX_SEQS][MAX_TABLE];
} tables;

static int blocks_for(int len, int block_size) { return (len + block_size - 1) / block_size; }

/* There is one at a time, and so with arrays. */
static tables *tables_make(const step *s)
{
    static tables one;
    tables *t = &one;
    /* Past what a length needs: numbers no batch may look at. */
    memset(t, 0x81, sizeof *t);
    t->s = *s;
    int64_t pool[1024], next = 0;
    support_shuffle(pool, 1024, 17);
    for (int i = 0; i < s->num_seqs; i++) {
        for (int b = 0; b < blocks_for(s->seqs[i].seq_len, s->block_size); b++)
            t->table[i][b] = (int32_t)pool[next++];
        for (int b = 0; b < blocks_for(s->seqs[i].encoder_len, s->block_size); b++)
            t->cross[i][b] = (int32_t)pool[next++];
    }
    return t;
}

static bool is_padding(const seq_plan *q) { return q->seq_len == 0; }

static int context_of(const seq_plan *q) { return is_padding(q) ? 0 : q->seq_len - q->query_len; }

/* The header's rule. */
static folio_phase phase_of(const step *s, const seq_plan *q)
{
    if (q->phase != FOLIO_PHASE_AUTO) return q->phase;
    int limit = s->decode_query_len ? s->decode_query_len : 1;
    return context_of(q) > 0 && q->query_len <= limit ? FOLIO_PHASE_DECODE : FOLIO_PHASE_PREFILL;
}

static int encoder_new_of(const seq_plan *q) { return q->encoder_new ? q->encoder_len : 0; }

static folio_batch *make_batch(folio_context *ctx, const step *s)
{
    folio_batch_desc d = FOLIO_WITH(folio_batch_desc, .block_size = s->block_size,
                                    .decode_query_len = s->decode_query_len);
    folio_batch *batch = NULL;
    CHECK_OK(folio_batch_create(ctx, &d, &batch));
    return batch;
}

static folio_status add_seq(folio_batch *batch, const tables *t, int i)
{
    const seq_plan *q = &t->s.seqs[i];
    folio_batch_seq seq =
        FOLIO_WITH(folio_batch_seq, .query_len = q->query_len, .seq_len = q->seq_len,
                   .padding = q->seq_len == 0, .phase = q->phase, .causality = q->causality,
                   .positions_given = t->s.positions, .first_query_pos = q->first_query_pos,
                   .first_key_pos = q->first_key_pos, .encoder_len = q->encoder_len,
                   .encoder_new_len = encoder_new_of(q));
    if (!t->s.no_cache) {
        seq.block_table = t->table[i];
        seq.num_blocks = i % 2 ? MAX_TABLE : blocks_for(q->seq_len, t->s.block_size);
    }
    if (t->s.cross) {
        seq.cross_block_table = t->cross[i];
        seq.num_cross_blocks = blocks_for(q->encoder_len, t->s.block_size) + i % 2;
    }
    return folio_batch_add(batch, &seq);
}

static folio_batch *build(folio_context *ctx, const tables *t)
{
    folio_batch *batch = make_batch(ctx, &t->s);
    for (int i = 0; batch && i < t->s.num_seqs; i++) CHECK_OK(add_seq(batch, t, i));
    return batch;
}

/* ---------------------------------------------------------------------------------- from arrays */

typedef struct {
    folio_step a;
    int32_t query_start[MAX_SEQS + 1], seq_lens[MAX_SEQS], phases[MAX_SEQS], causality[MAX_SEQS];
    int32_t encoder_lens[MAX_SEQS], encoder_new_lens[MAX_SEQS];
    int64_t first_query_pos[MAX_SEQS], first_key_pos[MAX_SEQS];
    int32_t indptr[MAX_SEQS + 1], indices[MAX_SEQS * MAX_TABLE], last_block_len[MAX_SEQS];
    int64_t slots64[MAX_SEQS * MAX_TABLE];
} arrays;

static arrays *arrays_make(const tables *t)
{
    static arrays one;
    arrays *m = &one;
    memset(m, 0, sizeof *m);
    for (int i = 0; i < t->s.num_seqs; i++) {
        const seq_plan *q = &t->s.seqs[i];
        int n = blocks_for(q->seq_len, t->s.block_size);
        m->query_start[i + 1] = m->query_start[i] + q->query_len;
        m->seq_lens[i] = q->seq_len;
        m->phases[i] = (int32_t)q->phase;
        m->causality[i] = (int32_t)q->causality;
        m->encoder_lens[i] = q->encoder_len;
        m->encoder_new_lens[i] = encoder_new_of(q);
        m->first_query_pos[i] = q->first_query_pos;
        m->first_key_pos[i] = q->first_key_pos;
        m->last_block_len[i] = q->seq_len - (n - 1) * t->s.block_size;
        if (n == 0) m->last_block_len[i] = 0;
        m->indptr[i + 1] = m->indptr[i] + n;
        for (int b = 0; b < n; b++) {
            m->indices[m->indptr[i] + b] = t->table[i][b];
            m->slots64[m->indptr[i] + b] = t->table[i][b];
        }
    }
    m->a = (folio_step){.struct_size = sizeof m->a,
                        .num_seqs = t->s.num_seqs,
                        .query_start = m->query_start,
                        .seq_lens = m->seq_lens,
                        .phases = m->phases,
                        .causality = m->causality,
                        .encoder_lens = m->encoder_lens,
                        .encoder_new_lens = m->encoder_new_lens};
    if (t->s.positions)
        m->a.first_query_pos = m->first_query_pos, m->a.first_key_pos = m->first_key_pos;
    if (t->s.cross)
        m->a.cross_table = (folio_table){
            .kind = FOLIO_TABLE_ROWS, .indices = t->cross[0], .row_stride = MAX_TABLE};
    return m;
}

/* ------------------------------------------------------------------------------------ judgement */

static void check_summary(folio_batch *batch, const step *s)
{
    folio_batch_info e = {0}, g = {.struct_size = sizeof g};
    CHECK_OK(folio_batch_get_info(batch, &g));
    for (int i = 0; i < s->num_seqs; i++) {
        const seq_plan *q = &s->seqs[i];
        e.num_query_tokens += q->query_len;
        if (is_padding(q)) {
            e.num_padding++, e.num_padding_tokens += q->query_len;
        } else if (phase_of(s, q) == FOLIO_PHASE_PREFILL) {
            e.num_prefills++, e.num_prefill_tokens += q->query_len;
            if (q->seq_len > e.max_prefill_seq_len) e.max_prefill_seq_len = q->seq_len;
        } else {
            e.num_decodes++, e.num_decode_tokens += q->query_len;
            if (q->seq_len > e.max_decode_seq_len) e.max_decode_seq_len = q->seq_len;
        }
        if (q->query_len > e.max_query_len) e.max_query_len = q->query_len;
        if (q->seq_len > e.max_seq_len) e.max_seq_len = q->seq_len;
        e.num_encoder_tokens += encoder_new_of(q);
        if (q->encoder_len > e.max_encoder_len) e.max_encoder_len = q->encoder_len;
        if (encoder_new_of(q) > e.max_encoder_new_len) e.max_encoder_new_len = encoder_new_of(q);
    }
    e.kind = e.num_prefills && e.num_decodes ? FOLIO_BATCH_MIXED
             : e.num_prefills                ? FOLIO_BATCH_PREFILLS
             : e.num_decodes                 ? FOLIO_BATCH_DECODES
                                             : FOLIO_BATCH_EMPTY;
    CHECK_INT(g.kind, e.kind);
    CHECK_INT(g.num_seqs, s->num_seqs);
    CHECK_INT(g.num_query_tokens, e.num_query_tokens);
    CHECK_INT(g.num_prefills, e.num_prefills);
    CHECK_INT(g.num_prefill_tokens, e.num_prefill_tokens);
    CHECK_INT(g.num_decodes, e.num_decodes);
    CHECK_INT(g.num_decode_tokens, e.num_decode_tokens);
    CHECK_INT(g.num_padding, e.num_padding);
    CHECK_INT(g.num_padding_tokens, e.num_padding_tokens);
    CHECK_INT(g.max_query_len, e.max_query_len);
    CHECK_INT(g.max_seq_len, e.max_seq_len);
    CHECK_INT(g.max_prefill_seq_len, e.max_prefill_seq_len);
    CHECK_INT(g.max_decode_seq_len, e.max_decode_seq_len);
    CHECK_INT(g.num_encoder_tokens, e.num_encoder_tokens);
    CHECK_INT(g.max_encoder_len, e.max_encoder_len);
    CHECK_INT(g.max_encoder_new_len, e.max_encoder_new_len);
}

/* What one sequence brings to one type of attention. */
typedef struct {
    int rows, keys, fresh, context; /* rows of q; keys; rows of k; keys cached before */
    const int32_t *table;           /* NULL: none */
    int num_blocks;
} share;

static share share_of(const tables *t, int i, folio_attention_type type)
{
    const seq_plan *q = &t->s.seqs[i];
    int news = encoder_new_of(q), real = is_padding(q) ? 0 : q->query_len;
    switch (type) {
    case FOLIO_ATTENTION_ENCODER: return (share){news, news, news, 0, NULL, 0};
    case FOLIO_ATTENTION_ENCODER_ONLY: return (share){q->query_len, real, q->query_len, 0, NULL, 0};
    case FOLIO_ATTENTION_ENCODER_DECODER: {
        share s = {q->query_len, q->encoder_len, news, q->encoder_len - news, NULL, 0};
        if (t->s.cross) {
            s.table = t->cross[i];
            s.num_blocks = blocks_for(q->encoder_len, t->s.block_size);
        }
        return s;
    }
    default: {
        share s = {q->query_len, q->seq_len, q->query_len, context_of(q), NULL, 0};
        if (!t->s.no_cache) {
            s.table = t->table[i];
            s.num_blocks = blocks_for(q->seq_len, t->s.block_size);
        }
        return s;
    }
    }
}

/* Of its first row of q: encoders count their own tokens, all others the sequence's. */
static int64_t first_position(const tables *t, int i, folio_attention_type type)
{
    const seq_plan *q = &t->s.seqs[i];
    if (type == FOLIO_ATTENTION_ENCODER || type == FOLIO_ATTENTION_ENCODER_ONLY) return 0;
    return t->s.positions ? q->first_query_pos : context_of(q);
}

static void check_entry(const folio_batch_view *v, int64_t n, const tables *t, int i,
                        folio_attention_type type, int64_t row, int64_t *fresh)
{
    share e = share_of(t, i, type);
    bool stores = type == FOLIO_ATTENTION_DECODER || type == FOLIO_ATTENTION_ENCODER_DECODER;
    CHECK_INT(v->seqs[n], i);
    CHECK_INT(v->query_rows[n], row);
    CHECK_INT(v->query_lens[n], e.rows);
    CHECK_INT(v->query_start[n + 1] - v->query_start[n], e.rows);
    CHECK_INT(v->last_rows[n], e.rows > 0 ? row + e.rows - 1 : -1);
    for (int j = 0; j < e.rows; j++)
        CHECK_INT(v->positions[v->query_start[n] + j], first_position(t, i, type) + j);
    CHECK_INT(v->key_lens[n], e.keys);
    CHECK_INT(v->key_start[n + 1] - v->key_start[n], e.keys);
    CHECK_INT(v->context_lens[n], e.context);
    if (stores && v->slot_mapping != NULL && v->table_start != NULL) {
        CHECK_INT(v->table_start[n + 1] - v->table_start[n], e.num_blocks);
        for (int b = 0; b < e.num_blocks; b++)
            CHECK_INT(v->blocks[v->table_start[n] + b], e.table[b]);
        for (int j = 0; j < e.fresh && *fresh + j < v->num_new_tokens; j++) {
            int pos = e.context + j, N = t->s.block_size;
            int64_t slot = -1;
            if (pos < e.keys && e.table) slot = (int64_t)e.table[pos / N] * N + pos % N;
            CHECK_INT(v->slot_mapping[*fresh + j], slot);
        }
    }
    *fresh += e.fresh;
}

static void check_view(folio_batch *batch, const tables *t, folio_attention_type type,
                       folio_phase phase)
{
    int before = test_failures();
    folio_batch_view v = {.struct_size = sizeof v};
    CHECK_OK(folio_batch_get_view(batch, type, phase, &v));
    int64_t n = 0, row = 0, rows = 0, fresh = 0, max_q = 0, max_k = 0;
    bool encoder = type == FOLIO_ATTENTION_ENCODER || type == FOLIO_ATTENTION_ENCODER_ONLY;
    CHECK(!encoder || (v.slot_mapping == NULL && v.table_start == NULL));
    CHECK(encoder || v.slot_mapping != NULL || v.num_new_tokens == 0);
    CHECK(encoder || v.table_start != NULL || v.num_seqs == 0);
    for (int i = 0; i < t->s.num_seqs; i++) {
        share e = share_of(t, i, type);
        const seq_plan *q = &t->s.seqs[i];
        bool in = phase == FOLIO_PHASE_AUTO || (!is_padding(q) && phase_of(&t->s, q) == phase);
        if (in && n < v.num_seqs) {
            check_entry(&v, n, t, i, type, row, &fresh);
            rows += e.rows;
            if (e.rows > max_q) max_q = e.rows;
            if (e.keys > max_k) max_k = e.keys;
        }
        n += in;
        row += e.rows;
    }
    CHECK_INT(v.num_seqs, n);
    CHECK_INT(v.num_query_tokens, rows);
    CHECK_INT(v.num_new_tokens, fresh);
    CHECK_INT(v.max_query_len, max_q);
    CHECK_INT(v.max_key_len, max_k);
    if (n > 0 && v.query_start != NULL) {
        CHECK_INT(v.query_start[0], 0);
        CHECK_INT(v.key_start[0], 0);
        CHECK_INT(v.query_start[n], rows);
    }
    if (test_failures() != before)
        printf("  ... in view %s, phase %d\n", folio_attention_type_name(type), phase);
}

static void check_batch(folio_batch *batch, const tables *t)
{
    check_summary(batch, &t->s);
    for (int type = 0; type < FOLIO_NUM_ATTENTION_TYPES; type++)
        for (int phase = 0; phase <= 2; phase++)
            check_view(batch, t, (folio_attention_type)type, (folio_phase)phase);
}

/* Positions and causality, seen through the bias they amount to. */
static void check_same_bias(folio_context *ctx, folio_batch *a, folio_batch *b, int num_seqs)
{
    folio_attention_desc d =
        FOLIO_WITH(folio_attention_desc, .num_heads = 2, .k_head_size = 8, .dtype = FOLIO_F32);
    d.windowed = 1, d.window_left = 4, d.window_right = 3;
    folio_attention *attention = NULL;
    CHECK_OK(folio_attention_create(ctx, &d, &attention));
    const float slopes[2] = {0.5f, 0.125f};
    enum { CAPACITY = 2 * 64 * 256 };
    static float x[CAPACITY], y[CAPACITY];
    for (int i = 0; i < num_seqs; i++) {
        memset(x, 0xFF, sizeof x);
        memset(y, 0xFF, sizeof y);
        CHECK_OK(folio_bias_write(attention, a, FOLIO_ATTENTION_DECODER, i, slopes, x, CAPACITY));
        CHECK_OK(folio_bias_write(attention, b, FOLIO_ATTENTION_DECODER, i, slopes, y, CAPACITY));
        CHECK_MSG(memcmp(x, y, sizeof x) == 0, "seq %d: another bias", i);
    }
    folio_attention_destroy(attention);
}

/* ---------------------------------------------------------------------------------------- steps */

#define AUTO FOLIO_PHASE_AUTO

static const seq_plan prompts[] = {{.query_len = 5, .seq_len = 5},
                                   {.query_len = 16, .seq_len = 16},
                                   {.query_len = 17, .seq_len = 17}};
static const seq_plan decodes[] = {{.query_len = 1, .seq_len = 33},
                                   {.query_len = 1, .seq_len = 2},
                                   {.query_len = 1, .seq_len = 16}};
/* A decode first, padding between, a chunk of a prompt, a prefix hit, a query of no tokens. */
static const seq_plan mixed[] = {{.query_len = 1, .seq_len = 40}, {.query_len = 7, .seq_len = 7},
                                 {.query_len = 2, .seq_len = 0},  {.query_len = 8, .seq_len = 24},
                                 {.query_len = 1, .seq_len = 1},  {.query_len = 0, .seq_len = 0},
                                 {.query_len = 2, .seq_len = 19}, {.query_len = 0, .seq_len = 9},
                                 {.query_len = 1, .seq_len = 17}};
static const seq_plan labelled[] = {
    {.query_len = 1, .seq_len = 40, .phase = FOLIO_PHASE_PREFILL},
    {.query_len = 9, .seq_len = 9, .phase = FOLIO_PHASE_DECODE, .causality = FOLIO_CAUSAL_NO},
    {.query_len = 3, .seq_len = 30, .causality = FOLIO_CAUSAL_YES},
    {.query_len = 2, .seq_len = 0, .phase = FOLIO_PHASE_DECODE}};
static const seq_plan translation[] = {
    {.query_len = 4, .seq_len = 4, .encoder_len = 21, .encoder_new = true},
    {.query_len = 1, .seq_len = 12, .encoder_len = 5},
    {.query_len = 1, .seq_len = 3},
    {.query_len = 2, .seq_len = 0},
    {.query_len = 2, .seq_len = 2, .encoder_len = 16, .encoder_new = true}};
static const seq_plan positioned[] = {
    {.query_len = 3, .seq_len = 9, .first_query_pos = 100, .first_key_pos = 93},
    {.query_len = 2, .seq_len = 2, .first_query_pos = 1, .first_key_pos = 0},
    {.query_len = 1, .seq_len = 20, .first_query_pos = 5, .first_key_pos = -9}};

/* clang-format off */
#define STEP(list, n, ...) {.seqs = list, .num_seqs = COUNT_OF(list), .block_size = n, __VA_ARGS__}
/* clang-format on */
static const step steps[] = {
    STEP(prompts, 16, .decode_query_len = 0),
    STEP(decodes, 16, .decode_query_len = 1),
    STEP(mixed, 16, .decode_query_len = 0),
    STEP(mixed, 4, .decode_query_len = 2),
    STEP(mixed, 3, .decode_query_len = 8),
    STEP(labelled, 16, .decode_query_len = 4),
    STEP(translation, 16, .cross = true),
    STEP(translation, 5, .cross = true, .decode_query_len = 3),
    STEP(positioned, 8, .positions = true),
    {.seqs = prompts, .num_seqs = 0, .block_size = 16},
};

/* The step as 2-D tables, with garbage past what lengths need; as CSR, with lengths or with last_block_len; both with
 * indices of 64 bits, self and cross. */
enum { ROWS, CSR, CSR_LAST, WIDE_ROWS, WIDE_CSR, NUM_FORMS };

static folio_status set_wide(folio_batch *b, const tables *t, const arrays *m, bool csr)
{
    static int64_t rows[2][MAX_SEQS][MAX_TABLE], flat[2][MAX_SEQS * MAX_TABLE];
    int32_t cross_start[MAX_SEQS + 1] = {0};
    memset(rows, 0x81, sizeof rows);
    for (int s = 0; s < t->s.num_seqs; s++) {
        int n = m->indptr[s + 1] - m->indptr[s];
        int nc = blocks_for(t->s.seqs[s].encoder_len, t->s.block_size);
        for (int k = 0; k < n; k++) rows[0][s][k] = flat[0][m->indptr[s] + k] = t->table[s][k];
        for (int k = 0; k < nc; k++) rows[1][s][k] = flat[1][cross_start[s] + k] = t->cross[s][k];
        cross_start[s + 1] = cross_start[s] + nc;
    }
    folio_step given = m->a;
    const int32_t *const starts[2] = {m->indptr, cross_start};
    for (int c = 0; c <= t->s.cross; c++)
        *(c ? &given.cross_table : &given.table) = csr ? (folio_table){.kind = FOLIO_TABLE_CSR,
                                                                       .index_bytes = 8,
                                                                       .indices = flat[c],
                                                                       .start = starts[c]}
                                                       : (folio_table){.kind = FOLIO_TABLE_ROWS,
                                                                       .index_bytes = 8,
                                                                       .indices = rows[c],
                                                                       .row_stride = MAX_TABLE};
    return folio_batch_set(b, &given);
}

static folio_status set_form(folio_batch *b, const tables *t, const arrays *m, int form)
{
    folio_step bare = m->a;
    bare.seq_lens = NULL;
    switch (form) {
    case ROWS: return support_set_rows(b, &m->a, &t->table[0][0], MAX_TABLE);
    case CSR: return support_set_csr(b, &m->a, m->indptr, m->indices, NULL);
    case CSR_LAST: return support_set_csr(b, &bare, m->indptr, m->indices, m->last_block_len);
    default: return set_wide(b, t, m, form == WIDE_CSR);
    }
}

BACKEND_TEST(batch, every_form_says_the_same)
{
    for (int i = 0; i < COUNT_OF(steps); i++) {
        tables *t = tables_make(&steps[i]);
        arrays *m = arrays_make(t);
        folio_batch *a = build(ctx, t), *b = make_batch(ctx, &steps[i]);
        REQUIRE_TEST(a != NULL && b != NULL);
        check_batch(a, t);
        for (int form = 0; form < NUM_FORMS; form++) {
            CHECK_OK(set_form(b, t, m, form));
            check_batch(b, t);
            check_same_bias(ctx, a, b, t->s.num_seqs);
        }
        folio_batch_destroy(a);
        folio_batch_destroy(b);
    }
}

/* Block size 1: a table entry is a slot. */
BACKEND_TEST(batch, slot_lists_say_the_same)
{
    static const seq_plan seqs[] = {
        {.query_len = 3, .seq_len = 9},
        {.query_len = 1, .seq_len = 20},
        {.query_len = 2, .seq_len = 0},
        {.query_len = 6, .seq_len = 6, .encoder_len = 3, .encoder_new = true}};
    const step s = STEP(seqs, 1, .cross = true);
    tables *t = tables_make(&s);
    arrays *m = arrays_make(t);
    folio_batch *a = build(ctx, t), *b = make_batch(ctx, &s);
    REQUIRE_TEST(a != NULL && b != NULL);
    check_batch(a, t);
    for (int form = 0; form < 4; form++) {
        folio_step bare = m->a;
        if (form % 2) bare.seq_lens = NULL;
        const void *slots = form < 2 ? (const void *)m->indices : (const void *)m->slots64;
        CHECK_OK(support_set_slots(b, &bare, m->indptr, slots, form < 2 ? 4 : 8));
        check_batch(b, t);
        check_same_bias(ctx, a, b, s.num_seqs);
    }
    folio_batch_destroy(a);
    folio_batch_destroy(b);
}

/* One length and one causality for all sequences. */
BACKEND_TEST(batch, a_step_of_like_sequences)
{
    static const seq_plan seqs[] = {{.query_len = 3, .seq_len = 3, .causality = FOLIO_CAUSAL_NO},
                                    {.query_len = 3, .seq_len = 3, .causality = FOLIO_CAUSAL_NO}};
    const step s = STEP(seqs, 16, .no_cache = true);
    tables *t = tables_make(&s);
    folio_batch *a = build(ctx, t), *b = make_batch(ctx, &s);
    REQUIRE_TEST(a != NULL && b != NULL);
    const folio_step given = FOLIO_WITH(folio_step, .num_seqs = 2, .num_query_tokens = 6,
                                        .causality_default = FOLIO_CAUSAL_NO);
    CHECK_OK(folio_batch_set(b, &given));
    check_batch(b, t);
    check_same_bias(ctx, a, b, 2);
    folio_batch_destroy(a);
    folio_batch_destroy(b);
}

/* query_start NULL: one token each. Optional arrays left out. */
BACKEND_TEST(batch, arrays_have_defaults)
{
    const step s = STEP(decodes, 16, .decode_query_len = 0);
    tables *t = tables_make(&s);
    arrays *m = arrays_make(t);
    folio_batch *b = make_batch(ctx, &s);
    REQUIRE_TEST(b != NULL);
    folio_step bare = FOLIO_WITH(folio_step, .num_seqs = s.num_seqs, .seq_lens = m->seq_lens);
    CHECK_OK(support_set_rows(b, &bare, &t->table[0][0], MAX_TABLE));
    check_batch(b, t);
    /* block_tables NULL: no cache */
    t->s.no_cache = true;
    CHECK_OK(support_set_rows(b, &bare, NULL, 0));
    check_batch(b, t);
    folio_batch_destroy(b);
}

BACKEND_TEST(batch, without_a_cache)
{
    const step s = STEP(prompts, 16, .no_cache = true);
    tables *t = tables_make(&s);
    folio_batch *batch = build(ctx, t);
    REQUIRE_TEST(batch != NULL);
    check_batch(batch, t);
    CHECK_INT(folio_batch_is_complete(batch, FOLIO_ATTENTION_DECODER, NULL), 0); /* for a cache */
    folio_batch_destroy(batch);
}

/* Slots given: they are the mapping, whatever the table says; -1 among them. */
BACKEND_TEST(batch, slots_given)
{
    const int32_t table[3][2] = {{7, 3}, {1, 5}, {2, 4}}, cross[3] = {9, 8, 6};
    const int64_t slots[6] = {3 * 16 + 1, -1, 500, 17, 18, 70};
    const int64_t cross_slots[6] = {-1, 9 * 16, 4, 6, 5, 99};
    const int32_t query_start[4] = {0, 3, 5, 6}, seq_lens[3] = {20, 32, 17};
    const int32_t encoder_lens[3] = {2, 3, 1};
    const step s = {.block_size = 16};
    folio_batch *batch = make_batch(ctx, &s);
    REQUIRE_TEST(batch != NULL);
    for (int i = 0, fresh = 0; i < 3; fresh += encoder_lens[i++]) {
        folio_batch_seq seq =
            FOLIO_WITH(folio_batch_seq, .query_len = query_start[i + 1] - query_start[i],
                       .seq_len = seq_lens[i], .block_table = table[i], .num_blocks = 2,
                       .slots = slots + query_start[i], .encoder_len = encoder_lens[i],
                       .encoder_new_len = encoder_lens[i], .cross_block_table = cross + i,
                       .num_cross_blocks = 1, .cross_slots = cross_slots + fresh);
        CHECK_OK(folio_batch_add(batch, &seq));
    }
    folio_step a = FOLIO_WITH(
        folio_step, .num_seqs = 3, .query_start = query_start, .seq_lens = seq_lens, .slots = slots,
        .encoder_lens = encoder_lens, .encoder_new_lens = encoder_lens, .cross_slots = cross_slots,
        .cross_table = {.kind = FOLIO_TABLE_ROWS, .indices = cross, .row_stride = 1});
    for (int form = 0; form < 2; form++) {
        folio_batch_view v = {.struct_size = sizeof v}, x = {.struct_size = sizeof x};
        CHECK_OK(folio_batch_get_view(batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &v));
        CHECK_OK(
            folio_batch_get_view(batch, FOLIO_ATTENTION_ENCODER_DECODER, FOLIO_PHASE_AUTO, &x));
        REQUIRE_TEST(v.slot_mapping && x.slot_mapping);
        CHECK(memcmp(v.slot_mapping, slots, sizeof slots) == 0);
        CHECK(memcmp(x.slot_mapping, cross_slots, sizeof cross_slots) == 0);
        CHECK(memcmp(v.blocks, table, sizeof table) == 0);
        CHECK(memcmp(x.blocks, cross, sizeof cross) == 0);
        CHECK_OK(support_set_rows(batch, &a, &table[0][0], 2));
    }
    folio_batch_destroy(batch);
}

/* Views of different kinds hold side by side, and what was given may be freed. */
BACKEND_TEST(batch, views_live_together_and_inputs_are_copied)
{
    const step s = STEP(mixed, 16, .decode_query_len = 0);
    tables *t = tables_make(&s);
    folio_batch *batch = build(ctx, t);
    REQUIRE_TEST(batch != NULL);
    int32_t first = t->table[0][0], second = t->table[1][0];
    memset(t->table, 0, sizeof t->table);
    folio_batch_view p = {.struct_size = sizeof p}, d = {.struct_size = sizeof d};
    folio_batch_view e = {.struct_size = sizeof e};
    CHECK_OK(folio_batch_get_view(batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_PREFILL, &p));
    CHECK_OK(folio_batch_get_view(batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_DECODE, &d));
    CHECK_OK(folio_batch_get_view(batch, FOLIO_ATTENTION_ENCODER_ONLY, FOLIO_PHASE_AUTO, &e));
    REQUIRE_TEST(p.num_seqs == 4 && d.num_seqs == 3 && e.num_seqs == 9);
    CHECK(p.seqs[0] == 1 && d.seqs[0] == 0 && e.seqs[0] == 0);
    CHECK_INT(p.query_rows[0], 1);
    CHECK_INT(d.blocks[0], first);
    CHECK_INT(p.blocks[0], second);
    CHECK_INT(p.query_lens[1], 8);
    CHECK_INT(p.context_lens[1], 16);
    folio_batch_destroy(batch);
}

/* ------------------------------------------------------------------------ reuse, growth, memory */

BACKEND_TEST(batch, clear_and_reuse)
{
    folio_batch *batch = make_batch(ctx, &steps[2]);
    REQUIRE_TEST(batch != NULL);
    for (int round = 0; round < 3; round++) {
        tables *t = tables_make(&steps[2]);
        for (int i = 0; i < t->s.num_seqs; i++) CHECK_OK(add_seq(batch, t, i));
        check_batch(batch, t);
        folio_batch_clear(batch);
        t->s.num_seqs = 0;
        check_batch(batch, t);
    }
    folio_batch_destroy(batch);
}

/* Far past every capacity; lengths and tables of every sequence stay right. */
BACKEND_TEST(batch, grows_past_its_capacities)
{
    static seq_plan many[MAX_SEQS];
    for (int i = 0; i < MAX_SEQS; i++) {
        int len = 1 + (int)(support_bits(8, (uint64_t)i) % 40u);
        int query = 1 + (int)(support_bits(9, (uint64_t)i) % (uint64_t)len);
        many[i] = (seq_plan){.query_len = query, .seq_len = i % 13 == 5 ? 0 : len};
        if (i % 3 == 0 && many[i].seq_len > 0)
            many[i].encoder_len = len / 2 + 1, many[i].encoder_new = i % 2;
    }
    const step s = STEP(many, 16, .cross = true);
    tables *t = tables_make(&s);
    folio_batch_desc d =
        FOLIO_WITH(folio_batch_desc, .block_size = 16, .max_seqs = 2, .max_query_tokens = 3,
                   .max_blocks = 1, .max_encoder_tokens = 1, .max_cross_blocks = 1);
    folio_batch *batch = NULL;
    CHECK_OK(folio_batch_create(ctx, &d, &batch));
    REQUIRE_TEST(batch != NULL);
    for (int i = 0; i < MAX_SEQS; i++) {
        CHECK_OK(add_seq(batch, t, i));
        if (i % 50 != 1) continue;
        t->s.num_seqs = i + 1; /* a view in between must not go stale */
        check_batch(batch, t);
    }
    t->s.num_seqs = MAX_SEQS;
    check_batch(batch, t);
    folio_batch_destroy(batch);
}

TEST(batch, within_its_capacities_it_allocates_nothing)
{
    support_counter counter = {0};
    folio_allocator allocator = support_allocator(&counter);
    folio_context *ctx = support_context("cpu", 1, &allocator);
    REQUIRE_TEST(ctx != NULL);
    const step s = steps[6];
    tables *t = tables_make(&s);
    arrays *m = arrays_make(t);
    folio_batch_desc d = FOLIO_WITH(folio_batch_desc, .block_size = 16, .max_seqs = s.num_seqs,
                                    .max_query_tokens = 10, .max_blocks = 8,
                                    .max_encoder_tokens = 37, .max_cross_blocks = 4);
    folio_batch *batch = NULL;
    CHECK_OK(folio_batch_create(ctx, &d, &batch));
    REQUIRE_TEST(batch != NULL);
    int64_t calls = counter.calls;
    CHECK(calls > 0);
    for (int round = 0; round < 3; round++) {
        folio_batch_clear(batch);
        for (int i = 0; i < s.num_seqs; i++) CHECK_OK(add_seq(batch, t, i));
    }
    CHECK_INT(counter.calls, calls);
    CHECK_OK(support_set_rows(batch, &m->a, &t->table[0][0], MAX_TABLE));
    CHECK_OK(support_set_csr(batch, &m->a, m->indptr, m->indices, NULL));
    CHECK_INT(counter.calls, calls);
    check_batch(batch, t);
    folio_batch_destroy(batch);
    folio_context_destroy(ctx);
    CHECK_INT(counter.live, 0);
    CHECK_INT(counter.faults, 0);
}

/* --------------------------------------------------------------------------------- completeness */

static void check_missing(folio_context *ctx, const folio_batch_seq *change,
                          folio_attention_type type, const char *field)
{
    const step s = {.block_size = 16};
    folio_batch *batch = make_batch(ctx, &s);
    if (batch == NULL) return;
    CHECK_OK(folio_batch_add(batch, change));
    const char *missing = "not set";
    int complete = folio_batch_is_complete(batch, type, &missing);
    CHECK((missing == NULL) == complete);
    CHECK_INT(folio_batch_is_complete(batch, type, NULL), complete);
    CHECK_INT(complete, field == NULL);
    if (field && !complete)
        CHECK_MSG(missing && strstr(missing, field), "%s: missing %s, expected %s",
                  folio_attention_type_name(type), missing ? missing : "nothing", field);
    folio_batch_destroy(batch);
}

BACKEND_TEST(batch, completeness_names_the_missing_field)
{
    const int32_t table[2] = {0, 1};
    const folio_batch_seq prompt = {.struct_size = sizeof prompt, .query_len = 4, .seq_len = 4};
    folio_batch_seq decode = prompt, padding = prompt, crossed = prompt;
    decode.seq_len = 20, padding.seq_len = 0, padding.padding = 1, crossed.encoder_len = 5;
    check_missing(ctx, &prompt, FOLIO_ATTENTION_DECODER, "block_table");
    check_missing(ctx, &padding, FOLIO_ATTENTION_DECODER, NULL);
    check_missing(ctx, &decode, FOLIO_ATTENTION_DECODER, "block_table");
    check_missing(ctx, &prompt, FOLIO_ATTENTION_ENCODER, "encoder_len");
    check_missing(ctx, &crossed, FOLIO_ATTENTION_ENCODER, NULL);
    check_missing(ctx, &prompt, FOLIO_ATTENTION_ENCODER_ONLY, NULL);
    check_missing(ctx, &prompt, FOLIO_ATTENTION_ENCODER_DECODER, "encoder_len");
    check_missing(ctx, &crossed, FOLIO_ATTENTION_ENCODER_DECODER, "cross_block_table");
    decode.seq_len = 5, crossed.encoder_len = 1; /* a context of one token is a context */
    check_missing(ctx, &decode, FOLIO_ATTENTION_DECODER, "block_table");
    check_missing(ctx, &crossed, FOLIO_ATTENTION_ENCODER_DECODER, "cross_block_table");
    decode.block_table = table, decode.num_blocks = 2;
    check_missing(ctx, &decode, FOLIO_ATTENTION_DECODER, NULL);
    crossed.cross_block_table = table, crossed.num_cross_blocks = 1;
    check_missing(ctx, &crossed, FOLIO_ATTENTION_ENCODER_DECODER, NULL);
}

/* ----------------------------------------------------------------------------------- block size */

BACKEND_TEST(batch, block_size_of_a_cache_or_none)
{
    const folio_kv_cache_desc cd =
        FOLIO_WITH(folio_kv_cache_desc, .num_layers = 1, .num_blocks = 4, .block_size = 8,
                   .num_kv_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32);
    const int32_t table[2] = {3, 1}, lens[1] = {9}, indptr[2] = {0, 2};
    const folio_batch_seq tabled = FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = 9,
                                              .block_table = table, .num_blocks = 2);
    const folio_step a = {.struct_size = sizeof a, .num_seqs = 1, .seq_lens = lens};
    folio_kv_cache *cache = NULL;
    folio_batch *batch = NULL;
    CHECK_OK(folio_kv_cache_create(ctx, &cd, &cache));
    folio_batch_desc d = {.struct_size = sizeof d, .cache = cache, .block_size = 16};
    REFUSED(folio_batch_create(ctx, &d, &batch), FOLIO_ERR_ARGUMENT, "16|8");
    for (d.block_size = 0; d.block_size <= 8; d.block_size += 8) {
        CHECK_OK(folio_batch_create(ctx, &d, &batch));
        folio_batch_view v = {.struct_size = sizeof v};
        CHECK_OK(folio_batch_add(batch, &tabled));
        CHECK_OK(folio_batch_get_view(batch, FOLIO_ATTENTION_DECODER, FOLIO_PHASE_AUTO, &v));
        CHECK_INT(v.slot_mapping[0], 1 * 8);
        folio_batch_destroy(batch);
    }
    folio_kv_cache_destroy(cache);
    /* neither: lengths are fine, tables are not */
    d.cache = NULL, d.block_size = 0;
    CHECK_OK(folio_batch_create(ctx, &d, &batch));
    const char *words = "no block size|folio_batch_desc.block_size or .cache";
    folio_batch_seq crossed = tabled, plain = tabled;
    crossed.block_table = plain.block_table = NULL, crossed.num_blocks = plain.num_blocks = 0;
    crossed.encoder_len = 9, crossed.cross_block_table = table, crossed.num_cross_blocks = 2;
    REFUSED(folio_batch_add(batch, &tabled), FOLIO_ERR_ARGUMENT, words);
    REFUSED(folio_batch_add(batch, &crossed), FOLIO_ERR_ARGUMENT, words);
    REFUSED(support_set_rows(batch, &a, table, 2), FOLIO_ERR_ARGUMENT, words);
    REFUSED(support_set_csr(batch, &a, indptr, table, NULL), FOLIO_ERR_ARGUMENT, words);
    CHECK_OK(folio_batch_add(batch, &plain));
    CHECK_OK(support_set_rows(batch, &a, NULL, 0));
    /* slot lists have blocks of one token */
    const int32_t slots[9] = {8, 7, 6, 5, 4, 3, 2, 1, 0}, nine[2] = {0, 9};
    CHECK_OK(support_set_slots(batch, &a, nine, slots, 4));
    folio_batch_destroy(batch);
}

/* -------------------------------------------------------------------------------------- padding */

/* One sequence of two tokens and no length by each way in: arrays take it as padding. */
BACKEND_TEST(batch, a_forgotten_length_is_not_padding)
{
    const step s = {.block_size = 1};
    folio_batch *batch = make_batch(ctx, &s);
    REQUIRE_TEST(batch != NULL);
    folio_batch_seq seq = {.struct_size = sizeof seq, .query_len = 2};
    REFUSED(folio_batch_add(batch, &seq), FOLIO_ERR_ARGUMENT, "seq 0|seq_len is 0|padding");
    seq.query_len = 0;
    REFUSED(folio_batch_add(batch, &seq), FOLIO_ERR_ARGUMENT, "seq 0|seq_len is 0");
    seq.query_len = 2, seq.seq_len = 2, seq.padding = 1;
    REFUSED(folio_batch_add(batch, &seq), FOLIO_ERR_ARGUMENT, "seq 0|padding|seq_len is 2");
    seq.seq_len = 0, seq.encoder_len = seq.encoder_new_len = 3;
    REFUSED(folio_batch_add(batch, &seq), FOLIO_ERR_ARGUMENT, "seq 0|padding|encoder_new_len is 3");
    seq.encoder_new_len = 0;
    const int32_t query_start[2] = {0, 2}, lens[1] = {0}, indptr[2] = {0, 0};
    const folio_step a =
        FOLIO_WITH(folio_step, .num_seqs = 1, .query_start = query_start, .seq_lens = lens);
    folio_batch_info info = {.struct_size = sizeof info};
    for (int way = 0; way < 4; way++) {
        folio_batch_clear(batch);
        CHECK_OK(way == 0   ? folio_batch_add(batch, &seq)
                 : way == 1 ? support_set_rows(batch, &a, NULL, 0)
                 : way == 2 ? support_set_csr(batch, &a, indptr, NULL, NULL)
                            : support_set_slots(batch, &a, indptr, NULL, 4));
        CHECK_OK(folio_batch_get_info(batch, &info));
        CHECK_INT(info.num_padding, 1);
        CHECK_INT(info.num_padding_tokens, 2);
    }
    folio_batch_destroy(batch);
}

/* --------------------------------------------------------------------------------------- errors */

/* A bad set_* call leaves a filled batch empty. */
#define BAD_SET(words, set, ...)                                                                   \
    do {                                                                                           \
        tables *t = tables_make(&steps[6]);                                                        \
        arrays *m = arrays_make(t);                                                                \
        folio_batch *batch = build(ctx, t);                                                        \
        __VA_ARGS__;                                                                               \
        REFUSED(set, FOLIO_ERR_ARGUMENT, words);                                                   \
        t->s.num_seqs = 0;                                                                         \
        check_batch(batch, t);                                                                     \
        folio_batch_destroy(batch);                                                                \
    } while (0)

#define BAD_ARRAYS(words, change)                                                                  \
    BAD_SET(words, support_set_rows(batch, given, &t->table[0][0], stride),                        \
            int64_t stride = MAX_TABLE;                                                            \
            const folio_step *given = &m->a; change)

BACKEND_TEST(batch, bad_arrays_leave_it_empty)
{
    BAD_ARRAYS("folio_step", given = NULL);
    BAD_ARRAYS("-3", m->a.num_seqs = -3);
    BAD_ARRAYS("seq_lens", m->a.seq_lens = NULL);
    BAD_ARRAYS("query_start", m->query_start[0] = 1);
    BAD_ARRAYS("query_start|3", m->query_start[3] = 1);
    BAD_ARRAYS("-4", m->seq_lens[2] = -4);
    BAD_ARRAYS("4|3|positions_given", m->seq_lens[0] = 3); /* query_len 4 */
    BAD_ARRAYS("400", m->seq_lens[1] = 400);               /* 25 blocks, rows of 24 */
    BAD_ARRAYS("0", stride = 0);
    BAD_ARRAYS("-1", stride = -1);
    BAD_ARRAYS("7", m->phases[4] = 7);
    BAD_ARRAYS("-1", m->phases[1] = -1);
    BAD_ARRAYS("9", m->causality[0] = 9);
    BAD_ARRAYS("first_key_pos", m->a.first_query_pos = m->first_query_pos);
    BAD_ARRAYS("first_query_pos", m->a.first_key_pos = m->first_key_pos);
    BAD_ARRAYS("-5", m->encoder_lens[1] = -5);
    BAD_ARRAYS("20|21", m->encoder_new_lens[0] = 20);
    BAD_ARRAYS("encoder", m->a.encoder_lens = NULL);
    BAD_ARRAYS("21", m->a.cross_table.row_stride = 1); /* 2 blocks of 16 */
    BAD_ARRAYS("cross_table.kind 4", m->a.cross_table.kind = (folio_table_kind)4);
    BAD_ARRAYS("cross_table.indices|FOLIO_TABLE_NONE", m->a.cross_table.kind = FOLIO_TABLE_NONE);
    BAD_ARRAYS("cross_table.indices is NULL", m->a.cross_table.indices = NULL);
    BAD_ARRAYS("cross_table.index_bytes is 2", m->a.cross_table.index_bytes = 2);
    BAD_ARRAYS("cross_table|block size is 16", m->a.cross_table.kind = FOLIO_TABLE_SLOTS);
    BAD_ARRAYS("on_device is 1|folio_plan_update_step", m->a.on_device = 1);
    BAD_ARRAYS("causality_default 3", m->a.causality_default = (folio_causality)3);
    BAD_ARRAYS("num_query_tokens is 11|query_start[5] is 10", m->a.num_query_tokens = 11);
    BAD_ARRAYS("num_query_tokens is -1", m->a.num_query_tokens = -1);
    BAD_ARRAYS("11 for 5 sequences|query_start",
               (m->a.query_start = NULL, m->a.num_query_tokens = 11));
    BAD_ARRAYS("num_seqs is 0|10", (m->a.num_seqs = 0, m->a.num_query_tokens = 10));
}

#define BAD_CSR(words, arrays_given, indptr, indices, last, change)                                \
    BAD_SET(words, support_set_csr(batch, arrays_given, indptr, indices, last),                    \
            folio_step bare = m->a; /* lengths by last_block_len */                                \
            bare.seq_lens = NULL; (void)bare; change)

BACKEND_TEST(batch, bad_csr_leaves_it_empty)
{
    const int32_t falls[] = {0, 1, 3, 2, 3, 4}, from_one[] = {1, 2, 3, 4, 4, 5};
    BAD_CSR("table.start is NULL", &m->a, NULL, m->indices, NULL, );
    BAD_CSR("table.indices is NULL", &m->a, m->indptr, NULL, NULL, );
    BAD_CSR("last_block_len", &bare, m->indptr, m->indices, NULL, );
    BAD_CSR("table.start[3] = 2|table.start[2] = 3", &m->a, falls, m->indices, NULL, );
    BAD_CSR("table.start[0] is 1", &m->a, from_one, m->indices, NULL, );
    BAD_CSR("last_block_len[0] = 17", &bare, m->indptr, m->indices, m->last_block_len,
            m->last_block_len[0] = 17);
    BAD_CSR("last_block_len[0] = 0|[1, 16]", &bare, m->indptr, m->indices, m->last_block_len,
            m->last_block_len[0] = 0);
    BAD_CSR("last_block_len[1] = -1", &bare, m->indptr, m->indices, m->last_block_len,
            m->last_block_len[1] = -1);
    BAD_CSR("40", &m->a, m->indptr, m->indices, NULL, m->seq_lens[1] = 40); /* of one block */
    BAD_SET(
        "table.start[5] = 4|num_indices 3", folio_batch_set(batch, &m->a),
        m->a.table = (folio_table){
            .kind = FOLIO_TABLE_CSR, .indices = m->indices, .start = m->indptr, .num_indices = 3});
}

BACKEND_TEST(batch, bad_slot_lists_leave_it_empty)
{
    const int32_t indptr[2] = {0, 2}, slots[2] = {4, 5};
    const int64_t large[2] = {4, ((int64_t)1 << 32) + 5}, below[2] = {4, -2};
    const int64_t released[2] = {FOLIO_NO_BLOCK, 5};
    const folio_step a = {.struct_size = sizeof a, .num_seqs = 1};
    const step one = {.block_size = 1};
    folio_batch *b = make_batch(ctx, &one), *other = make_batch(ctx, &steps[0]);
    REQUIRE_TEST(b != NULL && other != NULL);
    CHECK_OK(support_set_slots(b, &a, indptr, released, 8));
    CHECK_OK(support_set_slots(b, &a, indptr, slots, 4));
    REFUSED(support_set_slots(b, &a, indptr, slots, 2), FOLIO_ERR_ARGUMENT, "2");
    folio_batch_info s = {.struct_size = sizeof s};
    CHECK_OK(folio_batch_get_info(b, &s));
    CHECK_INT(s.num_seqs, 0);
    CHECK_OK(support_set_slots(b, &a, indptr, slots, 0));
    REFUSED(support_set_slots(b, &a, indptr, slots, -4), FOLIO_ERR_ARGUMENT, "index_bytes|-4");
    REFUSED(support_set_slots(b, &a, indptr, NULL, 4), FOLIO_ERR_ARGUMENT, "table.indices");
    REFUSED(support_set_slots(b, &a, NULL, slots, 4), FOLIO_ERR_ARGUMENT, "table.start");
    REFUSED(support_set_slots(b, &a, indptr, large, 8), FOLIO_ERR_ARGUMENT,
            "table.indices[1] = 4294967301");
    REFUSED(support_set_slots(b, &a, indptr, below, 8), FOLIO_ERR_ARGUMENT, "-2");
    REFUSED(support_set_slots(other, &a, indptr, slots, 4), FOLIO_ERR_ARGUMENT, "16");
    folio_batch_destroy(b);
    folio_batch_destroy(other);
}

/* A bad sequence is not appended; those before it stay. */
#define BAD_SEQ(words, change)                                                                     \
    do {                                                                                           \
        folio_batch_seq seq =                                                                      \
            FOLIO_WITH(folio_batch_seq, .query_len = 2, .seq_len = 20, .block_table = table,       \
                       .num_blocks = 2, .encoder_len = 20, .encoder_new_len = 20,                  \
                       .cross_block_table = table, .num_cross_blocks = 2);                         \
        change;                                                                                    \
        REFUSED(folio_batch_add(batch, &seq), FOLIO_ERR_ARGUMENT, words);                          \
    } while (0)

/* They need positions, and slots of -1 or none. */
BACKEND_TEST(batch, more_queries_than_keys)
{
    const int32_t table[2] = {0, 1};
    const int64_t none[3] = {-1, -1, -1}, one[3] = {-1, 7, -1}, low[3] = {-1, -1, -2};
    folio_batch *batch = support_batch(ctx, 16);
    REQUIRE_TEST(batch != NULL);
    BAD_SEQ("seq 0|21|20|positions_given", seq.query_len = 21);
    BAD_SEQ("seq 0|slots[1] is 7|3|2", seq.query_len = 3; seq.seq_len = 2; seq.positions_given = 1;
            seq.slots = one);
    BAD_SEQ("slots[2] = -2", seq.query_len = 3; seq.seq_len = 2; seq.positions_given = 1;
            seq.slots = low);
    folio_batch_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_batch_get_info(batch, &info));
    CHECK_INT(info.num_seqs, 0);
    folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = 3, .seq_len = 2,
                                     .block_table = table, .num_blocks = 1, .positions_given = 1);
    CHECK_OK(folio_batch_add(batch, &seq));
    seq.slots = none;
    CHECK_OK(folio_batch_add(batch, &seq));
    seq.block_table = NULL, seq.num_blocks = 0;
    CHECK_OK(folio_batch_add(batch, &seq));
    CHECK(
        !folio_batch_is_complete(batch, FOLIO_ATTENTION_DECODER, NULL)); /* the last has no table */
    folio_batch_destroy(batch);
}

BACKEND_TEST(batch, bad_sequence_is_not_added)
{
    const int32_t table[2] = {0, 1};
    tables *t = tables_make(&steps[6]);
    folio_batch *batch = build(ctx, t);
    REQUIRE_TEST(batch != NULL);
    const int64_t large = (int64_t)1 << 31;
    BAD_SEQ("-1", seq.query_len = -1);
    BAD_SEQ("-20", seq.seq_len = -20);
    BAD_SEQ("seq 5|21|20|positions_given", seq.query_len = 21);
    BAD_SEQ("2147483648", seq.seq_len = large; seq.query_len = 1; seq.block_table = NULL);
    BAD_SEQ("9223372036854775807", seq.seq_len = seq.query_len = INT64_MAX; seq.block_table = NULL);
    BAD_SEQ("20", seq.num_blocks = 1);
    BAD_SEQ("0", seq.num_blocks = 0);
    BAD_SEQ("-2", seq.num_blocks = -2);
    BAD_SEQ("1", seq.seq_len = seq.query_len = 1; seq.num_blocks = 0);
    BAD_SEQ("3", seq.phase = (folio_phase)3);
    BAD_SEQ("-1", seq.phase = (folio_phase)-1);
    BAD_SEQ("3", seq.causality = (folio_causality)3);
    BAD_SEQ("9223372036854775807", seq.positions_given = 1; seq.first_query_pos = INT64_MAX);
    BAD_SEQ("-9223372036854775808", seq.positions_given = 1; seq.first_key_pos = INT64_MIN);
    BAD_SEQ("-8", seq.encoder_len = seq.encoder_new_len = -8);
    BAD_SEQ("19|20", seq.encoder_new_len = 19);
    BAD_SEQ("21|20", seq.encoder_new_len = 21);
    BAD_SEQ("-1", seq.encoder_new_len = -1);
    BAD_SEQ("20", seq.num_cross_blocks = 1);
    BAD_SEQ("2147483648", seq.encoder_len = large; seq.encoder_new_len = 0;
            seq.cross_block_table = NULL; seq.num_cross_blocks = 0);
    REFUSED(folio_batch_add(batch, NULL), FOLIO_ERR_ARGUMENT, "seq");
    check_batch(batch, t);
    folio_batch_view v = {.struct_size = sizeof v};
    REFUSED(folio_batch_get_view(batch, (folio_attention_type)4, AUTO, &v), FOLIO_ERR_ARGUMENT,
            "4");
    REFUSED(folio_batch_get_view(batch, (folio_attention_type)-1, AUTO, &v), FOLIO_ERR_ARGUMENT,
            "-1");
    REFUSED(folio_batch_get_view(batch, FOLIO_ATTENTION_DECODER, (folio_phase)3, &v),
            FOLIO_ERR_ARGUMENT, "3");
    REFUSED(folio_batch_get_view(batch, FOLIO_ATTENTION_DECODER, AUTO, NULL), FOLIO_ERR_ARGUMENT,
            "NULL");
    REFUSED(folio_batch_get_info(batch, NULL), FOLIO_ERR_ARGUMENT, "NULL");
    check_batch(batch, t);
    folio_batch_destroy(batch);
}

TEST(batch, a_step_that_is_rejected_leaves_the_block_size)
{
    static const int32_t indices[4] = {0, 1, 2, 3}, starts[2] = {1, 4};
    folio_context *ctx = NULL;
    folio_batch *batch = NULL;
    CHECK_OK(folio_context_create(NULL, &ctx));
    CHECK_OK(folio_batch_create(ctx, &FOLIO_INIT(folio_batch_desc), &batch));
    REQUIRE_TEST(batch);
    folio_step given =
        FOLIO_WITH(folio_step, .num_seqs = 1,
                   .table = {.kind = FOLIO_TABLE_SLOTS, .indices = indices, .start = starts});
    folio_batch_seq seq = FOLIO_WITH(folio_batch_seq, .query_len = 1, .seq_len = 4,
                                     .block_table = indices, .num_blocks = 4);
    REFUSED(folio_batch_set(batch, &given), FOLIO_ERR_ARGUMENT, "table.start[0]");
    REFUSED(folio_batch_add(batch, &seq), FOLIO_ERR_ARGUMENT, "block size");
    folio_batch_destroy(batch);
    folio_context_destroy(ctx);
}

/* Padding has no keys, and its tables are not read, whatever the indices' size. */
TEST(batch, a_cross_table_of_padding_is_not_read)
{
    static const int64_t wide[2] = {-9, 1LL << 40};
    static const int32_t narrow[2] = {-9, -9}, none = 0, encoder_len = 20;
    folio_context *ctx = NULL;
    folio_batch *batch = NULL;
    CHECK_OK(folio_context_create(NULL, &ctx));
    CHECK_OK(folio_batch_create(ctx, &FOLIO_WITH(folio_batch_desc, .block_size = 16), &batch));
    REQUIRE_TEST(batch);
    for (int bytes = 4; bytes <= 8; bytes += 4) {
        folio_step given =
            FOLIO_WITH(folio_step, .num_seqs = 1, .seq_lens = &none, .encoder_lens = &encoder_len);
        given.cross_table = (folio_table){.kind = FOLIO_TABLE_ROWS,
                                          .index_bytes = bytes,
                                          .indices = bytes == 8 ? (const void *)wide : narrow,
                                          .row_stride = 2};
        CHECK_OK(folio_batch_set(batch, &given));
    }
    folio_batch_destroy(batch);
    folio_context_destroy(ctx);
}
