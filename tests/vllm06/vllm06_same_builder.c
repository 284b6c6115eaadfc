/* vllm06_same_builder.c: the builder's metadata, field by field what the rig makes of the same sequences. */
#include "vllm06/vllm06_rig.h"

typedef struct {
    v06_seq seqs[4];
    int n, real;                   /* sequences, and those before a graph's padding; 0: no graph */
    int64_t window, max_len;       /* 0: none, no graph's */
    int64_t clipped[4], masked[4]; /* tokens that table and length leave out; that have slot -1 */
    int64_t spare;                 /* blocks past those that are needed */
    bool chunked, cached, no_own, no_cross; /* cached: no encoder is new; no blocks of a kind */
    const char *run;
} built;

static int64_t blocks_of(const v06 *r, const built *c, int i, bool cross)
{
    const v06_seq *s = &c->seqs[i];
    int64_t len = cross ? s->encoder_len : s->seq_len;
    if ((cross ? c->no_cross : c->no_own) || i >= c->real || len == 0) return 0;
    return (len + r->block_size - 1) / r->block_size + c->spare;
}

/* Rows of a table in the rig's place of it, as wide as the longest or as a graph's. */
static void expect_table(v06 *r, const built *c, bool cross)
{
    bool graph = c->max_len > 0;
    int32_t *tables = cross ? r->cross_tables : r->tables;
    int64_t used[4],
        stride = graph && !cross ? (c->max_len + r->block_size - 1) / r->block_size : 0;
    for (int i = 0; i < c->n; i++) {
        const v06_seq *s = &c->seqs[i];
        bool whole = s->prompt && s->query_len == s->seq_len && !c->chunked && !cross;
        used[i] = whole ? 0 : blocks_of(r, c, i, cross);
        if (!cross && used[i] > 0) used[i] -= c->clipped[i] / r->block_size;
        if (used[i] > stride) stride = used[i];
    }
    for (int64_t k = 0; k < c->n * stride; k++) {
        int64_t i = k / stride, at = k % stride;
        tables[k] = at < used[i] ? tables[i * r->blocks_per_seq + at] : graph ? 0 : FOLIO_NO_BLOCK;
    }
    *(cross ? &r->f.cross_block_tables_stride : &r->f.block_tables_stride) = stride;
    *(cross ? &r->f.cross_block_tables : &r->f.block_tables) = stride > 0 ? tables : NULL;
}

/* The rig's fields and metadata for these sequences. */
static void expect_built(v06 *r, const built *c)
{
    memcpy(r->clipped, c->clipped, sizeof c->clipped);
    v06_fields(r, c->seqs, c->n);
    bool encoder = r->f.encoder_seq_lens != NULL;
    int64_t token = 0;
    for (int i = 0; i < c->n; i++)
        for (int64_t t = 0; t < c->seqs[i].query_len; t++, token++)
            if (t < c->masked[i] || i >= c->real || c->no_own) r->slots[token] = -1;
    for (int64_t t = 0; c->no_cross && t < r->f.num_encoder_tokens; t++) r->cross_slots[t] = -1;
    if (c->cached) r->f.num_encoder_tokens = 0;
    expect_table(r, c, false);
    if (encoder) expect_table(r, c, true);
    r->f.use_cuda_graph = c->max_len > 0;
    r->f.is_prompt = 0; /* worked out */
    v06_remake(r);
}

static folio_vllm06_metadata *build(const v06 *r, const built *c)
{
    folio_vllm06_builder *builder = NULL;
    folio_vllm06_metadata *m = NULL;
    folio_vllm06_builder_desc d = FOLIO_WITH(
        folio_vllm06_builder_desc, .block_size = r->block_size, .sliding_window = c->window,
        .max_seq_len_to_capture = c->max_len, .chunked_prefill_enabled = c->chunked);
    CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &builder));
    for (int again = 0; again < 2; again++) { /* the builder is empty again */
        folio_vllm06_metadata_destroy(m);
        for (int i = 0; i < c->real; i++) {
            int32_t tables[2][V06_TOKENS];
            const v06_seq *s = &c->seqs[i];
            int64_t blocks[] = {blocks_of(r, c, i, false), blocks_of(r, c, i, true)};
            for (int k = 0; k < 2; k++)
                for (int64_t b = 0; b < blocks[k]; b++)
                    tables[k][b] =
                        (int32_t)(v06_slot(r, s->id, b * r->block_size, k) / r->block_size);
            const folio_vllm06_seq a =
                FOLIO_WITH(folio_vllm06_seq, .is_prompt = s->prompt, .token_len = s->query_len,
                           .context_len = s->seq_len - s->query_len, .block_table = tables[0],
                           .num_blocks = blocks[0], .encoder_seq_len = s->encoder_len,
                           .encoder_is_new = s->prompt && !c->cached,
                           .cross_block_table = tables[1], .num_cross_blocks = blocks[1]);
            CHECK_OK(folio_vllm06_builder_add(builder, &a));
        }
        if (c->max_len > 0) CHECK_OK(folio_vllm06_builder_pad(builder, c->n - c->real));
        CHECK_OK(folio_vllm06_builder_build(builder, &m));
    }
    folio_vllm06_builder_destroy(builder);
    return m;
}

/* Sequence after sequence becomes a step. The layer has the window; padding is a sequence in block 0, length 1. */
static void check_built(v06 *r, const built *cases, int n)
{
    for (int i = 0; i < n; i++) {
        built c = cases[i];
        if (c.max_len == 0) c.real = c.n;
        expect_built(r, &c);
        folio_vllm06_metadata *m = build(r, &c);
        if (m == NULL) continue;
        int before = test_failures();
        v06_check_fields(m, v06_get(r));
        if (test_failures() != before) printf("  ... in step %d\n", i);
        folio_vllm06_metadata_destroy(r->m);
        r->m = m;
        if (c.run != NULL) v06_run(r, c.run);
    }
}

V06_TEST(metadata_builder)
{
    static const built cases[] = {
        {{{0, true, 6, 6, 11}, {1, true, 8, 8, 28}}, 2, .run = "DEX"}, /* whole: no tables */
        {{{0, true, 6, 6, 11}, {1, true, 9, 17, 28}}, 2, .run = "DEX"},
        {{{0, true, 6, 6, 11}, {1, true, 9, 17, 28}}, 2, .chunked = true, .run = "DEX"},
        {{{1, false, 1, 18, 28}, {0, false, 1, 7, 11}}, 2, .run = "D"},
        {{{0, true, 6, 6, 11}, {1, false, 1, 18, 28}}, 2, .chunked = true, .run = "DX"},
        {{{1, false, 1, 18, 0}, {0, false, 1, 1, 0}}, 2, .run = "D"},
        {{{1, false, 1, 18, 0}, {0, false, 1, 1, 0}}, 2, .chunked = true},
        {{{0, true, 9, 17, 0}, {1, true, 2, 6, 0}},
         2,
         .run = NULL}, /* the longest table is the first */
        {{{0, 0, 0, 0, 0}}, 0, .run = NULL},
        /* new encoders are counted, those that are cached and those of decodes are not */
        {{{0, true, 6, 6, 28}, {1, true, 9, 17, 11}, {2, false, 1, 7, 20}, {3, false, 1, 18, 0}},
         4,
         .run = NULL},
        {{{0, true, 6, 6, 28}, {1, true, 9, 17, 11}, {2, false, 1, 7, 20}, {3, false, 1, 18, 0}},
         4,
         .cached = true},
        {{{0, true, 4, 20, 5}, {1, true, 4, 4, 11}}, 2, .spare = 2}, /* tables are whole */
        /* of a profiling run, and with one kind of blocks: the slots of the other are -1 */
        {{{0, true, 40, 40, 5}}, 1, .no_own = true, .no_cross = true},
        {{{0, true, 4, 4, 5}}, 1, .no_own = true},
        {{{0, true, 4, 4, 5}}, 1, .no_cross = true}};
    check_built(r, cases, COUNT_OF(cases));
}

/* A prompt's first tokens are not stored: the originals hold the window against the new tokens alone. A decode's length
 * and table are clipped to the window, rounded up to blocks, and its context is not. */
V06_TEST(builder_window)
{
    static const built cases[] = {
        {{{0, true, 99, 99, 0}, {1, true, 20, 20, 0}}, 2, .window = 32, .masked = {67}, .run = "D"},
        {{{1, true, 40, 60, 0}}, 1, .window = 32, .run = "D"},
        {{{1, true, 60, 70, 0}}, 1, .window = 32, .masked = {18}},
        {{{0, false, 1, 100, 0}, {1, false, 1, 61, 0}},
         2,
         .window = 32,
         .clipped = {64, 16},
         .run = "D"},
        {{{3, false, 1, 5, 0}}, 1, .window = 32},
        {{{3, false, 1, 32, 0}}, 1, .window = 32},
        {{{3, false, 1, 47, 0}}, 1, .window = 32},
        {{{3, false, 1, 48, 0}}, 1, .window = 32, .clipped = {16}},
        {{{3, false, 1, 96, 0}}, 1, .window = 32, .clipped = {64}},
        {{{3, false, 1, 89, 0}}, 1, .window = 24, .clipped = {48}},
        /* a graph's row has room for the clipped table, not for the 7 blocks of length 100 */
        {{{0, false, 1, 100, 0}, {1, false, 1, 61, 0}},
         2,
         2,
         .window = 32,
         .max_len = 64,
         .clipped = {64, 16},
         .run = "D"}};
    r->block_size = 16;
    r->d.sliding_window = 32;
    check_built(r, cases, COUNT_OF(cases));
}

/* As many sequences as fill the memory of an array: none reaches into the next. */
static void pad_to_16(v06 *r)
{
    static const int32_t table[] = {5, 6};
    folio_vllm06_builder *builder = NULL;
    folio_vllm06_metadata *m = NULL;
    const folio_vllm06_builder_desc d =
        FOLIO_WITH(folio_vllm06_builder_desc, .block_size = 8, .max_seq_len_to_capture = 33);
    const folio_vllm06_seq one = FOLIO_WITH(folio_vllm06_seq, .token_len = 1, .context_len = 8,
                                            .block_table = table, .num_blocks = 2);
    CHECK_OK(folio_vllm06_builder_create(r->state, r->b, &d, &builder));
    CHECK_OK(folio_vllm06_builder_add(builder, &one));
    CHECK_OK(folio_vllm06_builder_pad(builder, 15));
    REJECTED(folio_vllm06_builder_pad(builder, 1), "already");
    REJECTED(folio_vllm06_builder_add(builder, &one), "after the padding");
    CHECK_OK(folio_vllm06_builder_build(builder, &m));
    v06_need(m != NULL);
    const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(m);
    for (int i = 0; i < 16; i++) {
        CHECK(f->seq_lens[i] == (i == 0 ? 9 : 1) && f->context_lens_tensor[i] == (i == 0 ? 8 : 0));
        CHECK(f->query_start_loc[i + 1] == i + 1 && f->seq_start_loc[i + 1] == i + 9);
        CHECK(f->slot_mapping[i] == (i == 0 ? 6 * 8 : -1) && f->block_tables[5 * i + 4] == 0);
    }
    folio_vllm06_metadata_destroy(m);
    folio_vllm06_builder_destroy(builder);
}

/* Decodes padded to a graph's batch, also by 0, in rows of a graph's table; of 60 tokens a window of 16 leaves 3 of its
 * 5 blocks. Padding has an encoder of length 1 in block 0, and is no decode that writes there. */
V06_TEST(builder_pad)
{
    static const built cases[] = {
        {{{0, true, 13, 13, 11}, {1, true, 8, 8, 20}}, 2, .run = "D"},
        {{{1, false, 1, 9, 0}, {0, false, 1, 14, 0}, {0, false, 1, 1, 0}, {0, false, 1, 1, 0}},
         4,
         2,
         .max_len = 33,
         .run = "D"},
        {{{0, false, 1, 4, 0}, {0, false, 1, 1, 0}}, 2, 1, .max_len = 33, .run = "D"},
        {{{1, false, 1, 40, 0}}, 1, 1, .max_len = 33}, /* as many blocks as the row */
        {{{1, false, 1, 60, 0}, {0, false, 1, 1, 0}},
         2,
         1,
         .max_len = 33,
         .window = 16,
         .clipped = {40}},
        {{{1, false, 1, 9, 20}, {0, false, 1, 14, 11}, {0, false, 1, 1, 1}, {0, false, 1, 1, 1}},
         4,
         2,
         .max_len = 33},
        {{{1, false, 1, 5, 5}}, 1, 1, .max_len = 33, .spare = 2}};
    check_built(r, cases, COUNT_OF(cases));
    pad_to_16(r);
}
