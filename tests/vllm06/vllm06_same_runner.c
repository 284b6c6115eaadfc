/* vllm06_same_runner.c: metadata as vLLM 0.6's own model runners make it, and compat; see vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

#include <math.h>
#include <stdlib.h>
#include <sys/mman.h>

/* The rule of block manager v1, whose blocks were a ring: min(length, window) keys in the last blocks of the table,
 * where the oldest keys stand behind the newest. The row is that of the window. */
static void ring_of_blocks(v06 *r)
{
    static const v06_seq prompt[] = {{0, true, 99, 99, 0}}, decode[] = {{0, false, 1, 100, 0}};
    float rows[2][4 * 32] = {{0}};
    for (int ring = 0; ring < 2; ring++) {
        v06_reset(r);
        r->block_size = 16;
        r->d.sliding_window = 32;
        v06_fields(r, prompt, 1);
        for (int t = 0; ring && t < 99; t++)
            r->slots[t] = t < 67 ? -1 : v06_slot(r, 0, t % 32, false);
        v06_rerun(r, "D");
        v06_fields(r, decode, 1);
        if (ring) { /* blocks 5 and 6 of the table: the ring's second and first */
            int32_t first = r->tables[0];
            r->slots[0] = v06_slot(r, 0, 99 % 32, false);
            r->lens[0] = r->seq_starts[1] = 32;
            r->tables[0] = r->tables[1];
            r->tables[1] = first;
            r->f.block_tables_stride = 2;
        }
        v06_remake(r);
        folio_vllm06_forward_args a = v06_args(r, DECODER);
        CHECK_OK(folio_vllm06_forward(r->impl, &a, NULL));
        memcpy(rows[ring], r->out.data, sizeof rows[ring]);
    }
    for (int k = 0; k < COUNT_OF(rows[0]); k++)
        CHECK(fabs((double)rows[0][k] - (double)rows[1][k]) <= 1e-5);
}

/* A window of 24 by the same rule: 24 keys, and one block of 16. */
static void too_few_blocks(v06 *r)
{
    static const v06_seq decode[] = {{0, false, 1, 24, 0}};
    v06_reset(r);
    r->block_size = 16;
    r->d.sliding_window = 24;
    v06_fields(r, decode, 1);
    r->f.block_tables_stride = 1;
    v06_remake(r);
    V06_REJECTS(r, DECODER, "24 tokens|1 blocks of 16");
}

/* A window of 4 in blocks of 8 by the same rule: no whole block is in it, the table is left as it is, and its first 4
 * keys are read. */
static void tiny_window(v06 *r)
{
    static const v06_seq prompt[] = {{0, true, 13, 13, 0}}, first[] = {{0, false, 1, 4, 0}};
    v06_reset(r);
    r->d.sliding_window = 4;
    v06_play(r, prompt, 1, "D");
    v06_fields(r, first, 1); /* the token at position 13 */
    r->slots[0] = v06_slot(r, 0, 13, false);
    r->f.context_lens_tensor = NULL;
    v06_rerun(r, "D");
}

/* A window of 32 over blocks of 16: the runner makes 36 of length 100, hands over the last three blocks and
 * leaves context_len 99. The window's 32 keys are seen; with compat all 36. */
void v06_same_clipped_window(v06 *r)
{
    static const v06_seq prompt[] = {{0, true, 99, 99, 0}}, decode[] = {{0, false, 1, 100, 0}};
    for (int i = 0; i < 4; i++) {
        v06_reset(r);
        r->block_size = 16;
        r->d.sliding_window = 32;
        r->d.compat = i / 2;
        v06_play(r, prompt, 1, "D");
        r->clipped[0] = 64;
        v06_fields(r, decode, 1);
        CHECK(r->lens[0] == 36 && r->contexts[0] == 99);
        if (i % 2) /* as the CPU runner of 0.6.5 and 0.6.6 */
            r->f.seq_lens = r->f.context_lens_tensor = NULL;
        v06_rerun(r, "D");
    }
    ring_of_blocks(r);
    too_few_blocks(r);
    tiny_window(r);
}

/* A prompt whose first 16 tokens are found in the cache: 0.6.3 hands over their two blocks only, and fills up with
 * zeros next to longer rows; from 0.6.4 on the table is whole. */
void v06_same_prefix_hit(v06 *r)
{
    static const v06_seq prompt[] = {{0, true, 16, 16, 0}}, hit[] = {{0, true, 5, 21, 0}};
    for (int64_t stride = 2; stride <= 6; stride++) { /* 5: the whole table */
        v06_reset(r);
        v06_play(r, prompt, 1, "D");
        v06_fields(r, hit, 1);
        r->f.block_tables_stride = stride == 6 ? 3 : stride;
        if (stride == 3) r->tables[2] = 0;
        if (stride == 6) r->tables[2] = -1; /* no block of this is read */
        if (stride ==
            4) { /* the whole table, by the name that torch-sdpa has for it from 0.6.5 on */
            r->f.prefill_block_tables = r->tables;
            r->f.prefill_block_tables_stride = stride;
            r->f.block_tables = NULL;
        }
        v06_rerun(r, "D");
    }
}

/* A copy behind which memory cannot be read; edge_free gives it back. */
enum { PAGE = 4096 };

static void *edge_copy(const void *from, size_t bytes)
{
    char *base = mmap(NULL, 2 * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base == MAP_FAILED || mprotect(base + PAGE, PAGE, PROT_NONE) != 0) abort();
    return memcpy(base + PAGE - bytes, from, bytes);
}

static void edge_free(const void *copy)
{
    munmap((void *)(((uintptr_t)copy - 1) / PAGE * PAGE), 2 * PAGE); /* it may be empty */
}

/* An encoder-decoder model: the runner gives prompts no cross tables. It counts the encoders' tokens of decodes and
 * gives them no slots. What stands for an empty tensor is NULL, or cannot be read. */
void v06_same_cross_decode_metadata(v06 *r)
{
    static const v06_seq prompts[] = {{0, true, 6, 6, 11}, {1, true, 9, 9, 20}};
    static const v06_seq decodes[] = {{0, false, 1, 7, 11}, {1, false, 1, 10, 20}};
    v06_play(r, prompts, 2, "X");
    r->f.cross_block_tables = NULL; /* prompts have an empty table */
    r->f.cross_block_tables_stride = 0;
    v06_rerun(r, "X");
    v06_fields(r, decodes, 2);
    r->f.cross_slot_mapping = NULL;
    r->no_key = true;
    v06_rerun(r, "X");
    v06_fields(r, decodes, 2);
    r->f.num_encoder_tokens = 31;
    int64_t *slot = edge_copy(r->cross_slots, sizeof *slot);
    r->f.cross_slot_mapping = slot + 1;
    v06_remake(r);
    CHECK_INT(v06_get(r)->num_encoder_tokens, 31);
    CHECK(folio_vllm06_is_all_cross_attn_metadata_set(r->m));
    r->no_key = true;
    v06_run(r, "X");
    /* key and value for decodes would have no slots */
    v06_fields(r, prompts, 2);
    r->no_key = false;
    folio_vllm06_forward_args a = v06_args(r, CROSS);
    a.query.tokens = a.output.tokens = 2;
    V06_REJECTED(r, &a, "0 tokens|31 rows");
    a = v06_args(r, ENCODER); /* the encoders ran with the prompts */
    V06_REJECTED(r, &a, "0 tokens of encoder attention|31 rows");
    edge_free(slot);
}

/* Prefix caching: prompts of one step that begin alike share blocks, all of them write these, and the last one stays.
 * The rig's numbers differ by sequence, so each byte tells who wrote it. */
void v06_same_shared_prefix(v06 *r)
{
    static const v06_seq prompts[] = {
        {0, true, 20, 20, 20}, {1, true, 20, 20, 20}, {2, true, 9, 9, 9}};
    v06_fields(r, prompts, 3);
    for (int t = 0; t < 16; t++) {
        r->slots[20 + t] = r->slots[t];
        r->cross_slots[20 + t] = r->cross_slots[t];
    }
    for (int t = 0; t < 8; t++) r->slots[40 + t] = r->slots[t];
    r->slots[3] = r->slots[4]; /* also within one prompt */
    v06_rerun(r, "DX");
    static const v06_seq before[] = {{3, true, 9, 9, 0}, {4, true, 9, 9, 0}};
    static const v06_seq mixed[] = {{5, true, 9, 9, 0}, {3, false, 1, 9, 0}, {4, false, 1, 9, 0}};
    v06_play(r, before, 2, "D");
    v06_fields(r, mixed, 3); /* a prompt and two decodes */
    r->slots[8] = r->slots[10] = r->slots[9];
    v06_rerun(r, "D");
    v06_fields(r, mixed + 1, 2); /* the decodes alone */
    r->slots[1] = r->slots[0];
    v06_rerun(r, "D");
}

/* ---------------------------------------------------------------------------- fields of one version or another */

static const v06_seq with_encoders[] = {
    {0, true, 6, 6, 11}, {1, true, 9, 17, 20}, {2, false, 1, 19, 3}};

/* Also without chunked_prefill the blocks of a prompt's context may be in prefill_block_tables alone. */
static void prompts_read_prefill_block_tables(v06 *r)
{
    static const v06_seq context[] = {{1, true, 8, 8, 0}};
    v06_play(r, context, 1, "D");
    v06_fields(r, with_encoders, 2);
    r->f.prefill_block_tables = r->f.block_tables;
    r->f.prefill_block_tables_stride = r->f.block_tables_stride;
    r->f.block_tables = NULL;
    r->f.block_tables_stride = 0;
    r->f.multi_modal_placeholder_index_maps = NOWHERE; /* not read */
    v06_rerun(r, "D");
}

/* Every field, copied; maxima worked out; what each view has of them. */
void v06_same_more_fields(v06 *r)
{
    static const int32_t encoder_starts[] = {0, 11, 31, 34}, query_starts[] = {0, 6, 15};
    static const int32_t kv_starts[] = {0, 6, 23};
    int32_t rows[2 * 3];
    int maps = 0;
    v06_fields(r, with_encoders, 3);
    r->f.encoder_seq_start_loc = encoder_starts;
    r->f.multi_modal_placeholder_index_maps = &maps;
    r->f.seqlen_q = query_starts;
    r->f.kv_start_loc = kv_starts;
    r->f.max_seqlen = r->f.max_kv_len = 1;    /* too small */
    memcpy(rows, r->tables, sizeof rows / 2); /* the same rows, of fewer blocks */
    memcpy(rows + 3, r->tables + r->blocks_per_seq, sizeof rows / 2);
    r->f.prefill_block_tables = rows;
    r->f.prefill_block_tables_stride = 3;
    v06_remake(r);
    const folio_vllm06_metadata_fields *f = v06_get(r);
    CHECK_INT(f->max_decode_query_len, 1);
    CHECK(f->max_seqlen == 17 && f->max_kv_len == 17);
    CHECK(f->encoder_seq_start_loc != encoder_starts && f->seqlen_q != query_starts);
    CHECK(f->kv_start_loc != kv_starts && f->prefill_block_tables != rows);
    CHECK(memcmp(f->encoder_seq_start_loc, encoder_starts, sizeof encoder_starts) == 0);
    CHECK(memcmp(f->seqlen_q, query_starts, sizeof query_starts) == 0);
    CHECK(memcmp(f->kv_start_loc, kv_starts, sizeof kv_starts) == 0);
    CHECK(memcmp(f->prefill_block_tables, rows, sizeof rows) == 0);
    CHECK(f->prefill_block_tables_stride == 3 && f->chunked_prefill == 0);
    CHECK(f->multi_modal_placeholder_index_maps == &maps);
    const folio_vllm06_metadata_fields *p =
        folio_vllm06_metadata_get(folio_vllm06_prefill_metadata(r->m));
    CHECK(p->multi_modal_placeholder_index_maps == &maps && p->max_decode_query_len == 0);
    CHECK(p->seqlen_q == f->seqlen_q && p->max_seqlen == 17 && p->max_kv_len == 17);
    CHECK(p->kv_start_loc == f->kv_start_loc);
    CHECK(p->prefill_block_tables == f->prefill_block_tables);
    CHECK(p->encoder_seq_start_loc == f->encoder_seq_start_loc);
    const folio_vllm06_metadata_fields *d =
        folio_vllm06_metadata_get(folio_vllm06_decode_metadata(r->m));
    CHECK(d->multi_modal_placeholder_index_maps == NULL && d->max_decode_query_len == 1);
    CHECK(d->seqlen_q == NULL && d->kv_start_loc == NULL && d->prefill_block_tables == NULL);
    CHECK(d->max_seqlen == 0 && d->max_kv_len == 0 && d->encoder_seq_start_loc == NULL);
    v06_step(r, with_encoders, 2);
    CHECK_INT(v06_get(r)->max_decode_query_len, 0);
    /* the longest is not the last, and a maximum that is larger stays */
    static const v06_seq falling[] = {{1, true, 9, 17, 0}, {0, true, 6, 6, 0}};
    for (int i = 0; i < 2; i++) {
        v06_fields(r, falling, 2);
        *(i == 0 ? &r->f.max_seqlen : &r->f.max_kv_len) = 30;
        v06_remake(r);
        CHECK_INT(v06_get(r)->max_seqlen, i == 0 ? 30 : 17);
        CHECK_INT(v06_get(r)->max_kv_len, i == 0 ? 17 : 30);
    }
    v06_fields(r, with_encoders, 3);
    r->f.max_decode_query_len = 3;
    v06_remake(r);
    const folio_vllm06_metadata *view = folio_vllm06_decode_metadata(r->m);
    CHECK_INT(v06_get(r)->max_decode_query_len, 3);
    CHECK_INT(folio_vllm06_metadata_get(view)->max_decode_query_len, 3);
    prompts_read_prefill_block_tables(r);
}

/* Sums that are not those of the lengths, and arrays that are missing. */
void v06_same_bad_sums(v06 *r)
{
    static const int32_t bad[] = {0, 7, 8, 9}, bad_end[] = {0, 6, 14};
    /* wrong at their last entry only, which is a decode's in those of the whole step */
    static const int32_t seq_end[] = {0, 6, 23, 41}, encoder_end[] = {0, 11, 31, 35};
    static const int32_t kv_end[] = {0, 6, 15}, query_end[] = {0, 6, 15, 17};
    /* wrong at their first entry only */
    static const int32_t seq_first[] = {1, 6, 23, 42}, encoder_first[] = {1, 11, 31, 34};
    static const int32_t kv_first[] = {1, 6, 23}, query_first[] = {1, 6, 15, 16};
    /* of all prompts right: prompt 0 has more new tokens than keys, or less than none */
    static const int32_t query_more[] = {0, 7, 15, 16}, query_less[] = {0, -1, 15, 16};
    folio_vllm06_metadata *m = NOWHERE;
    v06_open(r);
#define BAD_SUM(change, words)                                                                     \
    v06_fields(r, with_encoders, 3);                                                               \
    change;                                                                                        \
    REJECTED(folio_vllm06_make_metadata(r->state, r->b, &r->f, &m), words);                        \
    CHECK(m == NULL)
    BAD_SUM(r->f.encoder_seq_start_loc = bad, "encoder_seq_start_loc[1] is 7|add up to 11");
    BAD_SUM((r->f.encoder_seq_start_loc = bad, r->f.encoder_seq_lens = NULL,
             r->f.num_encoder_tokens = 0),
            "encoder_seq_lens is NULL");
    BAD_SUM(r->f.seq_start_loc = bad, ": seq_start_loc[1] is 7|add up to 6");
    BAD_SUM(r->f.query_start_loc = bad, "prompt 0");
    BAD_SUM((r->f.context_lens_tensor = NULL, r->f.query_start_loc = query_more),
            "prompt 0 has 7 new tokens by query_start_loc, but its seq_len is 6");
    BAD_SUM((r->f.context_lens_tensor = NULL, r->f.query_start_loc = query_less),
            "prompt 0 has -1 new tokens by query_start_loc");
    BAD_SUM(r->f.seqlen_q = bad, "seqlen_q[1] is 7|add up to 6");
    BAD_SUM(r->f.seqlen_q = bad_end, "seqlen_q[2] is 14|add up to 15");
    BAD_SUM(r->f.kv_start_loc = bad, "kv_start_loc[1] is 7|add up to 6");
    BAD_SUM(r->f.seq_start_loc = seq_end, ": seq_start_loc[3] is 41|add up to 42");
    BAD_SUM(r->f.encoder_seq_start_loc = encoder_end,
            "encoder_seq_start_loc[3] is 35|add up to 34");
    BAD_SUM(r->f.kv_start_loc = kv_end, "kv_start_loc[2] is 15|add up to 23");
    BAD_SUM(r->f.query_start_loc = query_end, "decode 2 has 2 new tokens");
    BAD_SUM(r->f.seq_start_loc = seq_first, ": seq_start_loc[0] is 1");
    BAD_SUM(r->f.encoder_seq_start_loc = encoder_first, "encoder_seq_start_loc[0] is 1");
    BAD_SUM(r->f.seqlen_q = query_first, "seqlen_q[0] is 1");
    BAD_SUM(r->f.kv_start_loc = kv_first, "kv_start_loc[0] is 1");
    BAD_SUM(r->f.query_start_loc = query_first, "query_start_loc[0] is 1");
    BAD_SUM(r->f.prefill_block_tables_stride = -1, "prefill_block_tables_stride");
    BAD_SUM(r->f.prefill_block_tables_stride = INT64_MAX,
            "prefill_block_tables_stride 9223372036854775807");
    BAD_SUM(r->f.chunked_prefill = 2, "chunked_prefill is 2");
}

/* The fields of a step as torch-sdpa of 0.6.5 and later splits them; what they end with cannot be read on. The rows of
 * the prompts' table are shorter than those of the decodes'. */
enum { PROMPT_BLOCKS = 3 };

static void split(v06 *r, const void *edges[6])
{
    int32_t rows[V06_SEQS * PROMPT_BLOCKS];
    size_t prompts = (size_t)r->f.num_prefills, decodes = (size_t)r->f.num_decode_tokens;
    size_t row = (size_t)r->blocks_per_seq * sizeof *r->tables;
    edges[0] = edge_copy(r->lens, prompts * 4);
    edges[1] = decodes > 0 ? edge_copy(r->lens + prompts, decodes * 4) : edges[0];
    edges[2] = edge_copy(r->starts, (prompts + 1) * 4);
    edges[3] = edge_copy(r->seq_starts, (prompts + 1) * 4);
    for (size_t i = 0; i < prompts * PROMPT_BLOCKS; i++)
        rows[i] = r->tables[i / PROMPT_BLOCKS * (size_t)r->blocks_per_seq + i % PROMPT_BLOCKS];
    edges[4] = edge_copy(rows, prompts * PROMPT_BLOCKS * 4);
    edges[5] = edge_copy(r->tables + prompts * (size_t)r->blocks_per_seq, decodes * row);
    r->f.chunked_prefill = 1;
    r->f.seq_lens = prompts > 0 ? edges[0] : NULL;
    r->f.seq_lens_tensor = edges[1];
    r->f.query_start_loc = prompts > 0 ? edges[2] : NULL;
    r->f.kv_start_loc = prompts > 0 ? edges[3] : NULL;
    r->f.prefill_block_tables = prompts > 0 ? edges[4] : NULL;
    r->f.prefill_block_tables_stride = PROMPT_BLOCKS;
    r->f.block_tables = decodes > 0 ? edges[5] : NULL;
    r->f.seq_start_loc = r->f.context_lens_tensor = NULL;
}

/* Lengths and tables of the prompts and of the decodes, each from its own arrays; none where there are none. */
static void split_args(const v06 *r, const folio_vllm06_metadata *m, bool prompts, bool decodes)
{
    folio_vllm06_seq_len_block_table_args a;
    CHECK_OK(folio_vllm06_get_seq_len_block_table_args(m, 1, DECODER, &a));
    CHECK_INT(a.max_seq_len, prompts ? 18 : 0);
    CHECK(prompts ? a.seq_lens[1] == 18 : a.seq_lens == NULL);
    CHECK(prompts ? a.block_tables[0] == r->tables[0] : a.block_tables == NULL);
    CHECK_INT(a.block_tables_stride, prompts ? PROMPT_BLOCKS : 0);
    CHECK_OK(folio_vllm06_get_seq_len_block_table_args(m, 1, ENCODER_ONLY, &a));
    CHECK(prompts ? a.seq_lens[1] == 18 : a.seq_lens == NULL);
    CHECK(a.block_tables == NULL && a.block_tables_stride == 0);
    CHECK_OK(folio_vllm06_get_seq_len_block_table_args(m, 0, DECODER, &a));
    CHECK_INT(a.max_seq_len, decodes ? 9 : 0);
    CHECK(decodes ? a.seq_lens[0] == 9 : a.seq_lens == NULL);
    CHECK(decodes ? a.block_tables[0] == r->tables[2 * r->blocks_per_seq] : a.block_tables == NULL);
    CHECK_INT(a.block_tables_stride, decodes ? r->blocks_per_seq : 0);
}

/* Whole prompts, a chunk and decodes; then only decodes, and only prompts. */
static const v06_seq split_steps[] = {{2, true, 7, 7, 0},
                                      {0, true, 5, 18, 0},
                                      {1, false, 1, 9, 0},
                                      {0, false, 1, 19, 0},
                                      {2, true, 3, 10, 0}};

/* The views of a split step: each has its own arrays only. */
static void split_views(v06 *r)
{
    folio_vllm06_metadata *whole_step = r->m;
    const folio_vllm06_metadata *p = folio_vllm06_prefill_metadata(r->m);
    const folio_vllm06_metadata *d = folio_vllm06_decode_metadata(r->m);
    const folio_vllm06_metadata_fields *f = folio_vllm06_metadata_get(p);
    CHECK(f->seq_lens[1] == 18 && f->seq_lens_tensor == NULL && f->chunked_prefill);
    CHECK(f->block_tables == NULL && f->prefill_block_tables[0] == r->tables[0]);
    f = folio_vllm06_metadata_get(d);
    CHECK(f->seq_lens == NULL && f->seq_lens_tensor[0] == 9);
    CHECK(f->block_tables[0] == r->tables[2 * r->blocks_per_seq]);
    split_args(r, r->m, true, true);
    split_args(r, p, true, false);
    split_args(r, d, false, true);
    r->m = (folio_vllm06_metadata *)p;
    v06_fields(r, split_steps, 2);
    v06_run(r, "D");
    r->m = (folio_vllm06_metadata *)d;
    v06_fields(r, split_steps + 2, 1);
    v06_run(r, "D");
    r->m = whole_step;
}

/* A chunk needs a row of prefill_block_tables: those of block_tables are the decodes'. */
static void split_without_table(v06 *r)
{
    v06_fields(r, split_steps, 3);
    r->f.chunked_prefill = 1;
    r->f.seq_lens_tensor = r->lens + 2;
    r->f.seq_start_loc = r->f.context_lens_tensor = NULL;
    v06_remake(r);
    V06_REJECTS(r, DECODER, "block table has 0 blocks");
}

/* Set biases count in a split step too. */
static void split_biases(v06 *r)
{
    static float numbers[3 + 5 * 18];
    const folio_vllm06_bias biases[] = {{numbers, 1, 7, 7}, {numbers + 3, 1, 5, 18}};
    support_fill(numbers, COUNT_OF(numbers), 5, 2.0f);
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, biases));
    v06_check_biases(r, DECODER, biases, 2);
    v06_run(r, "D");
    CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, NULL));
}

/* In an fp8 cache prompts of a split step attend to the K and V they bring, as in other steps. */
static void split_fp8(v06 *r)
{
    static const v06_seq before[] = {{0, true, 13, 13, 0}, {1, true, 8, 8, 0}};
    const void *edges[6];
    v06_reset(r);
    r->d.kv_cache_dtype = "fp8";
    v06_play(r, before, 2, "D");
    v06_fields(r, split_steps, 3);
    split(r, edges);
    v06_rerun(r, "D");
    for (int k = 0; k < 6; k++) edge_free(edges[k]);
}

/* Steps from split arrays. */
void v06_same_split_arrays(v06 *r)
{
    static const v06_seq before[] = {{0, true, 13, 13, 0}, {1, true, 8, 8, 0}};
    static const struct {
        int first, count;
    } parts[] = {{0, 3}, {2, 2}, {4, 1}};
    v06_play(r, before, 2, "D");
    for (int i = 0; i < COUNT_OF(parts); i++) {
        const void *edges[6];
        v06_fields(r, split_steps + parts[i].first, parts[i].count);
        split(r, edges);
        v06_rerun(r, "D");
        if (i == 0) split_biases(r);
        if (i == 0) split_views(r);
        if (i == 2) /* without decodes the tensor has the prompts */
            CHECK_INT(v06_get(r)->seq_lens_tensor[0], 10);
        for (int k = 0; k < 6; k++)
            if (k != 1 || edges[1] != edges[0]) edge_free(edges[k]);
    }
    split_without_table(r);
    split_fp8(r);
}

/* A graph's padding as vLLM makes it: length 1, slot -1 and a table of zeros, and in neither query_start_loc nor
 * context_lens_tensor. It stores nothing, and no other row changes. */
void v06_same_graph_padding(v06 *r)
{
    static const v06_seq before[] = {{0, true, 13, 13, 0}, {1, true, 8, 8, 0}, {5, true, 8, 8, 0}};
    static const v06_seq padded[] = {
        {1, false, 1, 9, 0}, {0, false, 1, 14, 0}, {5, false, 1, 1, 0}, {5, false, 1, 1, 0}};
    v06_play(r, before, 3, "D");
    v06_fields(r, padded, 4);
    r->f.use_cuda_graph = 1;
    r->slots[2] = r->slots[3] = -1;
    const void *starts = edge_copy(r->starts, 3 * sizeof *r->starts);
    const void *contexts = edge_copy(r->contexts, 2 * sizeof *r->contexts);
    r->f.query_start_loc = starts;
    r->f.context_lens_tensor = contexts;
    v06_remake(r);
    const folio_vllm06_metadata_fields *f = v06_get(r);
    for (int i = 0; i < 5; i++) CHECK_INT(f->query_start_loc[i], i);
    CHECK_INT(f->context_lens_tensor[1], 13);
    for (int i = 2; i < 4; i++) CHECK_INT(f->context_lens_tensor[i], 0);
    v06_run(r, "D");
    edge_free(starts);
    edge_free(contexts);
    static const v06_seq both[] = {{0, true, 5, 5, 0}, {5, false, 1, 1, 0}};
    v06_fields(r, both, 2); /* a prompt that stores nothing is no padding */
    r->f.use_cuda_graph = 1;
    for (int i = 0; i < 6; i++) r->slots[i] = -1;
    r->contexts[1] = -1;
    v06_remake(r);
    f = v06_get(r);
    CHECK(f->query_start_loc[1] == 5 && f->query_start_loc[2] == 6);
    CHECK(f->context_lens_tensor[0] == 0 && f->context_lens_tensor[1] == 0);
    v06_fields(r, padded, 2); /* without slots none is padding */
    r->f.use_cuda_graph = 1;
    r->f.slot_mapping = NULL;
    v06_remake(r);
    CHECK_INT(v06_get(r)->context_lens_tensor[1], 13);
}

/* --------------------------------------------------------------------------------------- compat */

static const v06_seq whole[] = {{0, true, 13, 13, 0}, {1, true, 8, 8, 0}};
static const v06_seq chunk[] = {{0, true, 5, 18, 0}};
static const v06_seq decodes[] = {{1, false, 1, 9, 0}, {0, false, 1, 19, 0}};

/* Everything a layer can have, alone and with the others; judged by what habits_of of the rig says. */
void v06_same_compat(v06 *r)
{
    static float numbers[13 * 13];
    support_fill(numbers, COUNT_OF(numbers), 5, 2.0f);
    const folio_vllm06_bias biases[] = {{numbers, 1, 13, 13}, {numbers, 1, 8, 8}};
    for (int set = 0; set < 16; set++) {
        v06_reset(r);
        r->d.compat = 1;
        if (set & 1) r->d.alibi_slopes = r->slopes;
        if (set & 2) r->d.sliding_window = 4;
        if (set & 4) r->d.logits_soft_cap = 0.75f;
        if (set & 8) r->d.scale = 0.4f;
        v06_open(r);
        for (int tables = 0; tables < 2; tables++) {
            v06_fields(r, whole, 2);
            if (!tables) r->f.block_tables = NULL;
            v06_rerun(r, "D");
            CHECK_OK(folio_vllm06_set_attn_bias(r->m, DECODER, biases));
            v06_run(r, "D");
        }
        v06_play(r, chunk, 1, "D");
        v06_play(r, decodes, 2, "D");
        r->no_cache = true; /* a table without a cache: no prefix attention */
        v06_play(r, whole, 2, "D");
    }
}

/* A layer with one thing to differ in, and who differs then with compat. */
enum { XFORMERS = 1, TORCH_SDPA = 2, IPEX = 4, ALL = 7 };
typedef struct {
    bool decode, chunk, slopes, biased, tables, no_cache;
    int64_t window;
    float cap, scale;
    int differs;
} habit;

/* The rows a layer gives for the step of a habit. */
static float *rows_of(const habit *h, v06 *r, int32_t compat, size_t *bytes)
{
    static float numbers[13 * 13];
    const folio_vllm06_bias biases[] = {{numbers, 1, 13, 13}, {numbers, 1, 8, 8}};
    float *rows = NULL;
    support_fill(numbers, COUNT_OF(numbers), 7, 2.0f);
    v06_reset(r);
    r->d.compat = compat;
    if (h->slopes) r->d.alibi_slopes = r->slopes;
    r->d.sliding_window = h->window;
    r->d.logits_soft_cap = h->cap;
    r->d.scale = h->scale;
    v06_play(r, whole, 2, "D");
    if (h->chunk) v06_fields(r, chunk, 1);
    else v06_fields(r, h->decode ? decodes : whole, h->decode ? 1 : 2);
    if (!h->decode && !h->tables) r->f.block_tables = NULL;
    if (h->biased) r->f.attn_bias = biases;
    r->no_cache = h->no_cache;
    v06_rerun(r, "D");
    rows = malloc(*bytes = r->out.bytes);
    if (rows == NULL) abort();
    memcpy(rows, r->out.data, *bytes);
    return rows;
}

/* compat changes what docs/lineage.md says it does, in these originals and no other. */
void v06_same_compat_differs(v06 *r)
{
    static const habit table[] = {
        {.decode = true, .window = 5, .differs = ALL},
        {.slopes = true, .window = 5, .differs = ALL},
        {.slopes = true, .window = 5, .tables = true, .differs = ALL},
        {.chunk = true, .slopes = true, .window = 5, .tables = true, .differs = ALL},
        {.decode = true, .slopes = true, .window = 5, .differs = ALL},
        {.window = 5, .differs = IPEX},
        {.slopes = true, .differs = IPEX},
        {.biased = true, .differs = IPEX},
        {.cap = 0.5f, .differs = 0},
        {.chunk = true, .tables = true, .cap = 0.5f, .differs = 0},
        {.decode = true, .cap = 0.5f, .differs = IPEX},
        {.decode = true, .slopes = true, .differs = 0},
        {.tables = true, .scale = 0.5f, .differs = XFORMERS},
        {.chunk = true, .tables = true, .scale = 0.5f, .differs = XFORMERS},
        {.biased = true, .tables = true, .scale = 0.5f, .differs = XFORMERS | IPEX},
        {.scale = 0.5f, .differs = 0},
        {.tables = true, .no_cache = true, .scale = 0.5f, .differs = 0},
        {.decode = true, .scale = 0.5f, .differs = 0},
    };
    int own = strcmp(r->b->name, "xformers") == 0 ? XFORMERS
              : strcmp(r->b->name, "ipex") == 0   ? IPEX
                                                  : TORCH_SDPA;
    for (int i = 0; i < COUNT_OF(table); i++) {
        size_t bytes = 0;
        float *plain = rows_of(&table[i], r, 0, &bytes);
        float *compat = rows_of(&table[i], r, 1, &bytes);
        if (plain != NULL && compat != NULL)
            CHECK_MSG((memcmp(plain, compat, bytes) != 0) == ((table[i].differs & own) != 0),
                      "habit %d: compat %s", i,
                      table[i].differs & own ? "changes nothing" : "changes the rows");
        free(plain);
        free(compat);
    }
}
