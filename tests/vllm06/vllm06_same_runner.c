/* vllm06_same_runner.c: metadata as vLLM 0.6's own model runners make it; see vllm06_rig.h. */
#include "vllm06/vllm06_rig.h"

#include <stdlib.h>
#include <sys/mman.h>

/* A window of 32 over blocks of 16: the runner makes 36 of length 100, hands over the last three blocks and
 * leaves context_len 99. The window's 32 keys are seen; with compat all 36. */
V06_TEST(clipped_window)
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
}

/* A prompt whose first 16 tokens are found in the cache: 0.6.3 hands over their two blocks only, and fills up with
 * zeros next to longer rows; from 0.6.4 on the table is whole. */
V06_TEST(prefix_hit)
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

/* Of an encoder-decoder model the runner counts the encoders' tokens of decodes and gives them no slots: what stands for
 * the empty tensor cannot be read. Key and value for decodes would have no slots. */
V06_TEST(cross_decode_metadata)
{
    static const v06_seq prompts[] = {{0, true, 6, 6, 11}, {1, true, 9, 9, 20}};
    static const v06_seq decodes[] = {{0, false, 1, 7, 11}, {1, false, 1, 10, 20}};
    v06_play(r, prompts, 2, "X");
    v06_fields(r, decodes, 2);
    r->f.num_encoder_tokens = 31;
    int64_t *slot = edge_copy(r->cross_slots, sizeof *slot);
    r->f.cross_slot_mapping = slot + 1;
    v06_remake(r);
    CHECK_INT(v06_get(r)->num_encoder_tokens, 31);
    r->no_key = true;
    v06_run(r, "X");
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
V06_TEST(shared_prefix)
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

/* Whole prompts, a chunk and decodes; then only decodes, and only prompts. */
static const v06_seq split_steps[] = {{2, true, 7, 7, 0},
                                      {0, true, 5, 18, 0},
                                      {1, false, 1, 9, 0},
                                      {0, false, 1, 19, 0},
                                      {2, true, 3, 10, 0}};

/* Steps from split arrays, in an fp8 cache too. A chunk needs a row of prefill_block_tables: those of block_tables are
 * the decodes'. */
V06_TEST(split_arrays)
{
    static const v06_seq before[] = {{0, true, 13, 13, 0}, {1, true, 8, 8, 0}};
    static const struct {
        int first, count;
    } parts[] = {{0, 3}, {2, 2}, {4, 1}, {0, 3}};
    for (int i = 0; i < COUNT_OF(parts); i++) {
        const void *edges[6];
        if (i % 3 == 0) {
            v06_reset(r);
            r->d.kv_cache_dtype = i == 3 ? "fp8" : "auto";
            v06_play(r, before, 2, "D");
        }
        v06_fields(r, split_steps + parts[i].first, parts[i].count);
        split(r, edges);
        v06_rerun(r, "D");
        if (i == 2) /* without decodes the tensor has the prompts */
            CHECK_INT(v06_get(r)->seq_lens_tensor[0], 10);
        for (int k = 0; k < 6; k++)
            if (k != 1 || edges[1] != edges[0]) edge_free(edges[k]);
    }
    v06_fields(r, split_steps, 3);
    r->f.chunked_prefill = 1;
    r->f.seq_lens_tensor = r->lens + 2;
    r->f.seq_start_loc = r->f.context_lens_tensor = NULL;
    v06_remake(r);
    V06_REJECTS(r, DECODER, "block table has 0 blocks");
}

/* A graph's padding as vLLM makes it: length 1, slot -1 and a table of zeros, and in neither query_start_loc nor
 * context_lens_tensor. It stores nothing, and no other row changes. */
V06_TEST(graph_padding)
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
