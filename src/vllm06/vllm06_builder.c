/* vllm06_builder.c: metadata built sequence by sequence, clipped to the window, padded for a graph. Tables of
 * different lengths are padded to the longest when they are handed over. */
#include "vllm06/vllm06.h"

#include <string.h>

/* One sequence as added; its blocks follow those of the one before it. */
typedef struct {
    int64_t token_len, context_len;
    int64_t num_blocks, num_cross_blocks;
    int64_t encoder_seq_len;
    bool is_prompt, encoder_is_new;
    bool padding; /* of a graph */
} entry;

struct folio_vllm06_builder {
    folio_vllm06_state *state;
    const folio_vllm06_backend *backend;
    folio_vllm06_builder_desc desc;
    bool graph; /* the step runs by one */
    int64_t num_entries, num_blocks, num_cross_blocks;
    folioi_array entries;              /* entry */
    folioi_array blocks, cross_blocks; /* int32_t */
};

folio_status folio_vllm06_builder_create(folio_vllm06_state *state,
                                         const folio_vllm06_backend *backend,
                                         const folio_vllm06_builder_desc *desc,
                                         folio_vllm06_builder **out)
{
    REQUIRE(out != NULL, "folio_vllm06_builder_create: out is NULL");
    *out = NULL;
    REQUIRE(state != NULL, "builder_create: state is NULL");
    TRY(folioi_vllm06_check_backend(backend, "builder_create"));
    folio_vllm06_builder_desc d;
    STRUCT_IN(d, desc, "folio_vllm06_builder_desc");
    REQUIRE(d.block_size >= 1 && d.block_size <= 4096, "block_size is %lld, outside [1, 4096]",
            (long long)d.block_size);
    REQUIRE(d.sliding_window >= 0 && d.sliding_window <= INT32_MAX,
            "sliding_window is %lld, outside [0, 2147483647]", (long long)d.sliding_window);
    REQUIRE(d.max_seq_len_to_capture >= 0 && d.max_seq_len_to_capture <= INT32_MAX,
            "max_seq_len_to_capture is %lld, outside [0, 2147483647]",
            (long long)d.max_seq_len_to_capture);
    void *memory;
    TRY(folioi_alloc(&state->ctx->allocator, sizeof **out, "a metadata builder", &memory));
    refs_retain(&state->refs);
    *out = memory;
    **out = (folio_vllm06_builder){.state = state, .backend = backend, .desc = d};
    return FOLIO_OK;
}

void folio_vllm06_builder_destroy(folio_vllm06_builder *b)
{
    if (b == NULL) return;
    folio_vllm06_state *state = b->state;
    folio_allocator a = state->ctx->allocator;
    folioi_array_free(&a, &b->entries);
    folioi_array_free(&a, &b->blocks);
    folioi_array_free(&a, &b->cross_blocks);
    folioi_free(&a, b, sizeof *b);
    folio_vllm06_state_destroy(state);
}

static folio_status check_table(const char *name, const int32_t *table, int64_t num, long long i)
{
    REQUIRE(num >= 0 && num <= INT32_MAX, "sequence %lld: num_%ss is %lld, outside [0, 2147483647]",
            i, name, (long long)num);
    REQUIRE(num == 0 || table != NULL, "sequence %lld: %s_table is NULL, but num_%ss is %lld", i,
            name, name, (long long)num);
    return FOLIO_OK;
}

static folio_status check_seq(const folio_vllm06_builder *b, const folio_vllm06_seq *s)
{
    long long i = b->num_entries;
    const entry *entries = b->entries.data;
    int64_t block_size = b->desc.block_size;
    REQUIRE(!b->graph, "sequence %lld comes after the padding of a graph", i);
    REQUIRE(
        s->token_len >= 1 && s->token_len <= INT32_MAX && s->context_len >= 0 &&
            s->context_len <= INT32_MAX - s->token_len,
        "sequence %lld: token_len %lld must be at least 1, context_len %lld at least 0, and their "
        "sum at most 2147483647",
        i, (long long)s->token_len, (long long)s->context_len);
    int64_t total = s->token_len + s->context_len;
    REQUIRE(s->is_prompt || s->token_len == 1,
            "sequence %lld is a decode with %lld tokens; a decode has 1", i,
            (long long)s->token_len);
    REQUIRE(!s->is_prompt || i == 0 || entries[i - 1].is_prompt,
            "sequence %lld is a prompt after a decode; prompts come first", i);
    TRY(check_table("block", s->block_table, s->num_blocks, i));
    TRY(check_table("cross_block", s->cross_block_table, s->num_cross_blocks, i));
    REQUIRE(!s->encoder_is_new || s->is_prompt,
            "sequence %lld is a decode; its encoder cannot be new", i);
    REQUIRE(s->num_blocks == 0 || s->num_blocks * block_size >= total,
            "sequence %lld: %lld blocks of %lld do not hold %lld tokens", i,
            (long long)s->num_blocks, (long long)block_size, (long long)total);
    REQUIRE(
        s->encoder_seq_len >= 0 && s->encoder_seq_len <= INT32_MAX &&
            (s->num_cross_blocks == 0 || s->num_cross_blocks * block_size >= s->encoder_seq_len),
        "sequence %lld: encoder_seq_len %lld does not fit its %lld cross blocks", i,
        (long long)s->encoder_seq_len, (long long)s->num_cross_blocks);
    return FOLIO_OK;
}

folio_status folio_vllm06_builder_add(folio_vllm06_builder *b, const folio_vllm06_seq *seq)
{
    REQUIRE(b != NULL, "folio_vllm06_builder_add: builder is NULL");
    folio_vllm06_seq s;
    STRUCT_IN(s, seq, "folio_vllm06_seq");
    TRY(check_seq(b, &s));
    const folio_allocator *a = &b->state->ctx->allocator;
    TRY(folioi_array_reserve(a, &b->entries, (b->num_entries + 1) * (int64_t)sizeof(entry),
                             "builder sequences"));
    TRY(folioi_array_reserve(a, &b->blocks, max_i64(b->num_blocks + s.num_blocks, 1) * 4,
                             "builder blocks"));
    TRY(folioi_array_reserve(a, &b->cross_blocks,
                             max_i64(b->num_cross_blocks + s.num_cross_blocks, 1) * 4,
                             "builder cross blocks"));
    if (s.num_blocks > 0)
        memcpy((int32_t *)b->blocks.data + b->num_blocks, s.block_table, (size_t)s.num_blocks * 4);
    if (s.num_cross_blocks > 0)
        memcpy((int32_t *)b->cross_blocks.data + b->num_cross_blocks, s.cross_block_table,
               (size_t)s.num_cross_blocks * 4);
    ((entry *)b->entries.data)[b->num_entries++] =
        (entry){s.token_len,       s.context_len,    s.num_blocks,          s.num_cross_blocks,
                s.encoder_seq_len, s.is_prompt != 0, s.encoder_is_new != 0, false};
    b->num_blocks += s.num_blocks;
    b->num_cross_blocks += s.num_cross_blocks;
    return FOLIO_OK;
}

/* Tokens of a decode that are left out: all before the last window, up to a block. */
static int64_t clipped(const folio_vllm06_builder *b, const entry *e)
{
    int64_t len = e->token_len + e->context_len, block = b->desc.block_size;
    if (e->is_prompt || b->desc.sliding_window == 0) return 0;
    return max_i64(0, len - (ceil_div(b->desc.sliding_window, block) * block + len % block));
}

/* Blocks of its table that a sequence hands over. */
static int64_t table_blocks(const folio_vllm06_builder *b, const entry *e)
{
    if (e->is_prompt && e->context_len == 0 && !b->desc.chunked_prefill_enabled) return 0;
    return max_i64(0, e->num_blocks - clipped(b, e) / b->desc.block_size);
}

folio_status folio_vllm06_builder_pad(folio_vllm06_builder *b, int64_t cuda_graph_pad_size)
{
    REQUIRE(b != NULL, "folio_vllm06_builder_pad: builder is NULL");
    REQUIRE(cuda_graph_pad_size >= 0 && cuda_graph_pad_size <= INT32_MAX - b->num_entries,
            "cuda_graph_pad_size is %lld, outside [0, %lld]", (long long)cuda_graph_pad_size,
            (long long)(INT32_MAX - b->num_entries));
    REQUIRE(b->desc.max_seq_len_to_capture > 0, "the builder has no max_seq_len_to_capture");
    REQUIRE(!b->graph, "the step is padded already");
    int64_t columns = ceil_div(b->desc.max_seq_len_to_capture, b->desc.block_size);
    int64_t total = b->num_entries + cuda_graph_pad_size;
    for (int64_t i = 0; i < b->num_entries; i++) {
        const entry *e = (const entry *)b->entries.data + i;
        REQUIRE(!e->is_prompt, "sequence %lld is a prompt; a graph has decodes only", (long long)i);
        int64_t blocks = table_blocks(b, e);
        REQUIRE(blocks <= columns, "sequence %lld has %lld blocks; a graph's row holds %lld",
                (long long)i, (long long)blocks, (long long)columns);
    }
    TRY(folioi_array_reserve(&b->state->ctx->allocator, &b->entries,
                             max_i64(total, 1) * (int64_t)sizeof(entry), "builder sequences"));
    while (b->num_entries < total)
        ((entry *)b->entries.data)[b->num_entries++] = (entry){.token_len = 1, .padding = true};
    b->graph = true;
    return FOLIO_OK;
}

/* The arrays of the fields, one after another in one piece of memory. */
typedef struct {
    int32_t *seq_lens, *query_start_loc, *seq_start_loc, *context_lens, *tables;
    int32_t *encoder_lens, *cross_tables;
    int64_t *slots, *cross_slots;
} columns;

static columns carve(folioi_arena *arena, const folio_vllm06_metadata_fields *f, int64_t n)
{
    columns c;
    c.seq_lens = arena_take(arena, n * 4);
    c.query_start_loc = arena_take(arena, (n + 1) * 4);
    c.seq_start_loc = arena_take(arena, (n + 1) * 4);
    c.context_lens = arena_take(arena, n * 4);
    c.tables = arena_take(arena, n * f->block_tables_stride * 4);
    c.encoder_lens = arena_take(arena, n * 4);
    c.cross_tables = arena_take(arena, n * f->cross_block_tables_stride * 4);
    c.slots = arena_take(arena, (f->num_prefill_tokens + f->num_decode_tokens) * 8);
    c.cross_slots = arena_take(arena, f->num_encoder_tokens * 8);
    return c;
}

static int64_t slot_of(const int32_t *table, int64_t num_blocks, int64_t token, int64_t block_size)
{
    return num_blocks > 0 ? table[token / block_size] * block_size + token % block_size : -1;
}

/* The slots of sequence e's new tokens. The originals subtract the window from the number of new tokens; a decode's
 * token is always in it. */
static int64_t *fill_slots(const folio_vllm06_builder *b, const entry *e, const int32_t *table,
                           int64_t *slots)
{
    int64_t window = b->desc.sliding_window, first = window > 0 ? e->token_len - window : 0;
    for (int64_t t = e->context_len; t < e->context_len + e->token_len; t++)
        *slots++ = t < first ? -1 : slot_of(table, e->num_blocks, t, b->desc.block_size);
    return slots;
}

static void fill_row(int32_t *row, int64_t stride, const int32_t *table, int64_t n, int32_t rest)
{
    for (int64_t k = 0; k < stride; k++) row[k] = k < n ? table[k] : rest;
}

static void fill(const folio_vllm06_builder *b, const folio_vllm06_metadata_fields *f,
                 const columns *c)
{
    static const int32_t none[1] = {0}; /* of a step of padding: no pointer is NULL + 0 */
    const int32_t *table = b->blocks.data != NULL ? b->blocks.data : none;
    const int32_t *cross = b->cross_blocks.data != NULL ? b->cross_blocks.data : none;
    int64_t *slots = c->slots, *cross_slots = c->cross_slots, block_size = b->desc.block_size;
    /* a sequence with fewer blocks than others has none there, which forward can tell */
    int32_t rest = b->graph ? 0 : FOLIO_NO_BLOCK;
    c->query_start_loc[0] = c->seq_start_loc[0] = 0;
    for (int64_t i = 0; i < b->num_entries; i++) {
        const entry *e = (const entry *)b->entries.data + i;
        int64_t left_out = clipped(b, e), len = e->token_len + e->context_len - left_out;
        c->seq_lens[i] = (int32_t)len;
        c->context_lens[i] = (int32_t)e->context_len;
        c->encoder_lens[i] = e->padding ? 1 : (int32_t)e->encoder_seq_len;
        c->query_start_loc[i + 1] = c->query_start_loc[i] + (int32_t)e->token_len;
        c->seq_start_loc[i + 1] = c->seq_start_loc[i] + (int32_t)len;
        fill_row(c->tables + i * f->block_tables_stride, f->block_tables_stride,
                 table + left_out / block_size, table_blocks(b, e), rest);
        fill_row(c->cross_tables + i * f->cross_block_tables_stride, f->cross_block_tables_stride,
                 cross, e->num_cross_blocks, rest);
        slots = fill_slots(b, e, table, slots);
        for (int64_t t = 0; e->encoder_is_new && t < e->encoder_seq_len; t++)
            *cross_slots++ = slot_of(cross, e->num_cross_blocks, t, block_size);
        table += e->num_blocks;
        cross += e->num_cross_blocks;
    }
}

folio_status folio_vllm06_builder_build(folio_vllm06_builder *b, folio_vllm06_metadata **out)
{
    REQUIRE(out != NULL, "folio_vllm06_builder_build: out is NULL");
    *out = NULL;
    REQUIRE(b != NULL, "folio_vllm06_builder_build: builder is NULL");
    folio_vllm06_metadata_fields f = {.struct_size = sizeof f};
    bool encoder = false, fresh = false, cached = false;
    int64_t tokens = 0;
    for (int64_t i = 0; i < b->num_entries; i++) {
        const entry *e = (const entry *)b->entries.data + i;
        tokens += e->token_len + e->context_len;
        fresh |= e->encoder_is_new;
        cached |= e->is_prompt && !e->encoder_is_new && e->encoder_seq_len > 0;
        f.num_prefills += e->is_prompt;
        *(e->is_prompt ? &f.num_prefill_tokens : &f.num_decode_tokens) += e->token_len;
        f.block_tables_stride = max_i64(f.block_tables_stride, table_blocks(b, e));
        f.cross_block_tables_stride = max_i64(f.cross_block_tables_stride, e->num_cross_blocks);
        if (e->encoder_is_new) f.num_encoder_tokens += e->encoder_seq_len;
        encoder |= e->encoder_seq_len > 0;
    }
    REQUIRE(tokens <= INT32_MAX, "the step's sequences have %lld tokens, more than 2147483647",
            (long long)tokens);
    REQUIRE(!fresh || !cached,
            "some prompts bring new encoders and others do not; vLLM's metadata cannot express "
            "that: make two steps");
    f.use_cuda_graph = b->graph;
    if (b->graph)
        f.block_tables_stride = ceil_div(b->desc.max_seq_len_to_capture, b->desc.block_size);
    folioi_arena arena = {NULL, 0};
    folioi_array memory = {NULL, 0};
    carve(&arena, &f, b->num_entries);
    TRY(folioi_array_reserve(&b->state->ctx->allocator, &memory, arena.used, "metadata fields"));
    arena = (folioi_arena){memory.data, 0};
    columns c = carve(&arena, &f, b->num_entries);
    fill(b, &f, &c);
    f.slot_mapping = c.slots;
    f.seq_lens = f.seq_lens_tensor = c.seq_lens;
    f.query_start_loc = c.query_start_loc;
    f.seq_start_loc = c.seq_start_loc;
    f.context_lens_tensor = c.context_lens;
    f.block_tables = f.block_tables_stride > 0 ? c.tables : NULL;
    f.encoder_seq_lens = f.encoder_seq_lens_tensor = encoder ? c.encoder_lens : NULL;
    f.cross_slot_mapping = encoder ? c.cross_slots : NULL;
    f.cross_block_tables = f.cross_block_tables_stride > 0 ? c.cross_tables : NULL;
    folio_status status = folio_vllm06_make_metadata(b->state, b->backend, &f, out);
    folioi_array_free(&b->state->ctx->allocator, &memory);
    if (status != FOLIO_OK) return status;
    b->num_entries = b->num_blocks = b->num_cross_blocks = 0;
    b->graph = false;
    return FOLIO_OK;
}
