/* vllm06_builder.c: metadata built sequence by sequence. Tables of different lengths are padded to the
 * longest when they are handed over. */
#include "vllm06/vllm06.h"

#include <string.h>

/* One sequence as added; its blocks follow those of the one before it. */
typedef struct {
    int64_t token_len, context_len;
    int64_t num_blocks, num_cross_blocks;
    int64_t encoder_seq_len;
    bool is_prompt, encoder_is_new;
} entry;

struct folio_vllm06_builder {
    folio_vllm06_state *state;
    const folio_vllm06_backend *backend;
    int64_t block_size;
    int64_t num_entries, num_blocks, num_cross_blocks;
    folioi_array entries;              /* entry */
    folioi_array blocks, cross_blocks; /* int32_t */
};

folio_status folio_vllm06_builder_create(folio_vllm06_state *state,
                                         const folio_vllm06_backend *backend, int64_t block_size,
                                         folio_vllm06_builder **out)
{
    REQUIRE(out != NULL, "folio_vllm06_builder_create: out is NULL");
    *out = NULL;
    REQUIRE(state != NULL && backend != NULL, "state or backend is NULL");
    REQUIRE(block_size >= 1 && block_size <= 4096, "block_size is %lld, outside [1, 4096]",
            (long long)block_size);
    void *memory;
    TRY(folioi_alloc(&state->ctx->allocator, sizeof **out, "a metadata builder", &memory));
    refs_retain(&state->refs);
    *out = memory;
    **out = (folio_vllm06_builder){.state = state, .backend = backend, .block_size = block_size};
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

static folio_status check_seq(const folio_vllm06_builder *b, const folio_vllm06_seq *s)
{
    long long i = b->num_entries;
    const entry *entries = b->entries.data;
    REQUIRE(s->token_len >= 1 && s->token_len <= INT32_MAX && s->context_len >= 0 &&
                s->context_len <= INT32_MAX - s->token_len,
            "sequence %lld: token_len %lld and context_len %lld", i, (long long)s->token_len,
            (long long)s->context_len);
    int64_t total = s->token_len + s->context_len;
    REQUIRE(s->is_prompt || s->token_len == 1, "sequence %lld is a decode with %lld tokens", i,
            (long long)s->token_len);
    REQUIRE(!s->is_prompt || i == 0 || entries[i - 1].is_prompt,
            "sequence %lld is a prompt after a decode; prompts come first", i);
    REQUIRE(s->num_blocks >= 0 && s->num_blocks <= INT32_MAX && s->num_cross_blocks >= 0 &&
                s->num_cross_blocks <= INT32_MAX &&
                (s->num_blocks == 0 || s->block_table != NULL) &&
                (s->num_cross_blocks == 0 || s->cross_block_table != NULL),
            "sequence %lld: a block table is NULL or its count no count", i);
    REQUIRE(!s->encoder_is_new || s->is_prompt,
            "sequence %lld is a decode; its encoder cannot be new", i);
    REQUIRE(s->num_blocks == 0 || s->num_blocks * b->block_size >= total,
            "sequence %lld: %lld blocks of %lld do not hold %lld tokens", i,
            (long long)s->num_blocks, (long long)b->block_size, (long long)total);
    REQUIRE(
        s->encoder_seq_len >= 0 && s->encoder_seq_len <= INT32_MAX &&
            (s->num_cross_blocks == 0 || s->num_cross_blocks * b->block_size >= s->encoder_seq_len),
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
        (entry){s.token_len,       s.context_len,    s.num_blocks,         s.num_cross_blocks,
                s.encoder_seq_len, s.is_prompt != 0, s.encoder_is_new != 0};
    b->num_blocks += s.num_blocks;
    b->num_cross_blocks += s.num_cross_blocks;
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

static void fill(const folio_vllm06_builder *b, const folio_vllm06_metadata_fields *f,
                 const columns *c)
{
    const int32_t *table = b->blocks.data, *cross = b->cross_blocks.data;
    int64_t slot = 0, cross_slot = 0;
    /* a sequence with fewer blocks than others has none there, which forward can tell */
    for (int64_t i = 0; i < b->num_entries * f->block_tables_stride; i++)
        c->tables[i] = FOLIO_NO_BLOCK;
    for (int64_t i = 0; i < b->num_entries * f->cross_block_tables_stride; i++)
        c->cross_tables[i] = FOLIO_NO_BLOCK;
    c->query_start_loc[0] = c->seq_start_loc[0] = 0;
    for (int64_t i = 0; i < b->num_entries; i++) {
        const entry *e = (const entry *)b->entries.data + i;
        int64_t len = e->token_len + e->context_len;
        c->seq_lens[i] = (int32_t)len;
        c->context_lens[i] = (int32_t)e->context_len;
        c->encoder_lens[i] = (int32_t)e->encoder_seq_len;
        c->query_start_loc[i + 1] = c->query_start_loc[i] + (int32_t)e->token_len;
        c->seq_start_loc[i + 1] = c->seq_start_loc[i] + (int32_t)len;
        for (int64_t k = 0; k < e->num_blocks; k++)
            c->tables[i * f->block_tables_stride + k] = table[k];
        for (int64_t k = 0; k < e->num_cross_blocks; k++)
            c->cross_tables[i * f->cross_block_tables_stride + k] = cross[k];
        for (int64_t t = e->context_len; t < len; t++)
            c->slots[slot++] = slot_of(table, e->num_blocks, t, b->block_size);
        for (int64_t t = 0; e->encoder_is_new && t < e->encoder_seq_len; t++)
            c->cross_slots[cross_slot++] = slot_of(cross, e->num_cross_blocks, t, b->block_size);
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
        f.block_tables_stride = max_i64(f.block_tables_stride, e->num_blocks);
        f.cross_block_tables_stride = max_i64(f.cross_block_tables_stride, e->num_cross_blocks);
        if (e->encoder_is_new) f.num_encoder_tokens += e->encoder_seq_len;
        encoder |= e->encoder_seq_len > 0;
    }
    REQUIRE(tokens <= INT32_MAX, "the step's sequences have %lld tokens, more than 2147483647",
            (long long)tokens);
    REQUIRE(
        !fresh || !cached,
        "some prompts bring new encoders and others do not; the ancestors' metadata has no word "
        "for that: make two steps");
    f.is_prompt = f.num_decode_tokens == 0;
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
    folio_status status = b->backend->make_metadata(b->state, &f, out);
    folioi_array_free(&b->state->ctx->allocator, &memory);
    if (status == FOLIO_OK) b->num_entries = b->num_blocks = b->num_cross_blocks = 0;
    return status;
}
