/* vllm06_metadata.c: the fields of a step, by attention type and by phase. */
#include "vllm06/vllm06.h"

#include <string.h>

int64_t folioi_vllm06_seq_len(const folio_vllm06_metadata *m, int64_t i)
{
    const folio_vllm06_metadata_fields *f = &m->f;
    if (f->chunked_prefill && i >= f->num_prefills) return f->seq_lens_tensor[i - f->num_prefills];
    return f->seq_lens != NULL ? f->seq_lens[i] : f->seq_lens_tensor[i];
}

int64_t folioi_vllm06_query_len(const folio_vllm06_metadata *m, int64_t i)
{
    if (i >= m->f.num_prefills) return 1;
    if (m->f.query_start_loc != NULL)
        return (int64_t)m->f.query_start_loc[i + 1] - m->f.query_start_loc[i];
    int64_t context = m->f.context_lens_tensor != NULL ? m->f.context_lens_tensor[i] : 0;
    return folioi_vllm06_seq_len(m, i) - context;
}

folioi_vllm06_rows folioi_vllm06_table(const folio_vllm06_metadata *m, int64_t i)
{
    const folio_vllm06_metadata_fields *f = &m->f;
    bool prompt = i < f->num_prefills;
    folioi_vllm06_rows rows = {f->block_tables, f->block_tables_stride};
    if (prompt && (f->prefill_block_tables != NULL || f->chunked_prefill))
        rows = (folioi_vllm06_rows){f->prefill_block_tables, f->prefill_block_tables_stride};
    else if (f->chunked_prefill) i -= f->num_prefills;
    if (rows.row == NULL) return (folioi_vllm06_rows){NULL, 0};
    rows.row += i * rows.stride;
    return rows;
}

/* *field, an array of count elements, becomes a copy the metadata owns, with room for `room`; NULL
 * stays NULL. */
static folio_status keep(folio_vllm06_metadata *m, const void **field, int64_t count, int64_t room,
                         size_t size, const char *name)
{
    if (*field == NULL) return FOLIO_OK;
    int64_t bytes;
    REQUIRE(checked_mul(max_i64(room, 1), (int64_t)size, &bytes),
            "metadata: %s has too many elements", name);
    folioi_array *copy = &m->copies[m->num_copies];
    TRY(folioi_array_reserve(&m->state->ctx->allocator, copy, bytes, name));
    m->num_copies++;
    memcpy(copy->data, *field, (size_t)count * size);
    *field = copy->data;
    return FOLIO_OK;
}

#define KEEP_ROOM(field, count, room)                                                              \
    keep(m, (const void **)&m->f.field, count, room, sizeof *m->f.field, #field)
#define KEEP(field, count) KEEP_ROOM(field, count, count)

static int64_t encoder_len(const folio_vllm06_metadata *m, int64_t i)
{
    return m->f.encoder_seq_lens[i];
}

/* starts[0 .. n], if given, is the running sum of n lengths. */
static folio_status check_sum(const folio_vllm06_metadata *m, const int32_t *starts, int64_t n,
                              int64_t (*len)(const folio_vllm06_metadata *, int64_t),
                              const char *name)
{
    int64_t sum = 0;
    for (int64_t i = 0; starts != NULL && i <= n; i++) {
        REQUIRE(starts[i] == sum, "metadata: %s[%lld] is %d; the lengths before it add up to %lld",
                name, (long long)i, starts[i], (long long)sum);
        if (i < n) sum += len(m, i);
    }
    return FOLIO_OK;
}

static folio_status check_sums(const folio_vllm06_metadata *m)
{
    const folio_vllm06_metadata_fields *f = &m->f;
    int64_t n = m->num_seqs, prompts = f->num_prefills;
    REQUIRE(f->encoder_seq_start_loc == NULL || f->encoder_seq_lens != NULL,
            "metadata: encoder_seq_start_loc is given, but encoder_seq_lens is NULL");
    TRY(check_sum(m, f->seq_start_loc, n, folioi_vllm06_seq_len, "seq_start_loc"));
    TRY(check_sum(m, f->encoder_seq_start_loc, n, encoder_len, "encoder_seq_start_loc"));
    TRY(check_sum(m, f->seqlen_q, prompts, folioi_vllm06_query_len, "seqlen_q"));
    return check_sum(m, f->kv_start_loc, prompts, folioi_vllm06_seq_len, "kv_start_loc");
}

/* Sequences before the padding of a graph. */
static int64_t count_real(const folio_vllm06_metadata *m)
{
    const folio_vllm06_metadata_fields *f = &m->f;
    int64_t n = m->num_seqs, last = f->num_prefill_tokens + f->num_decode_tokens - 1;
    if (!f->use_cuda_graph || f->slot_mapping == NULL) return n;
    while (n > f->num_prefills && f->slot_mapping[last - (m->num_seqs - n)] == -1) n--;
    return n;
}

static folio_status check_counts(folio_vllm06_metadata *m)
{
    const folio_vllm06_metadata_fields *f = &m->f;
    REQUIRE(f->num_prefills >= 0 && f->num_prefill_tokens >= 0 && f->num_decode_tokens >= 0,
            "metadata: num_prefills %lld, num_prefill_tokens %lld or num_decode_tokens %lld is "
            "negative",
            (long long)f->num_prefills, (long long)f->num_prefill_tokens,
            (long long)f->num_decode_tokens);
    REQUIRE(checked_add(f->num_prefills, f->num_decode_tokens, &m->num_seqs) &&
                m->num_seqs <= INT32_MAX,
            "metadata: %lld prompts and %lld decodes are too many sequences",
            (long long)f->num_prefills, (long long)f->num_decode_tokens);
    REQUIRE(f->seq_lens != NULL || f->seq_lens_tensor != NULL || m->num_seqs == 0,
            "metadata: seq_lens and seq_lens_tensor are both NULL");
    REQUIRE(f->chunked_prefill == 0 || f->chunked_prefill == 1,
            "metadata: chunked_prefill is %d, neither 0 nor 1", f->chunked_prefill);
    REQUIRE(!f->chunked_prefill || f->num_prefills == 0 || f->seq_lens != NULL,
            "metadata: chunked_prefill is set, but seq_lens, of the prompts, is NULL");
    REQUIRE(!f->chunked_prefill || f->num_decode_tokens == 0 || f->seq_lens_tensor != NULL,
            "metadata: chunked_prefill is set, but seq_lens_tensor, of the decodes, is NULL");
    REQUIRE(f->num_decode_tokens == 0 || !f->is_prompt,
            "metadata: is_prompt is set, yet %lld sequences are decodes",
            (long long)f->num_decode_tokens);
    REQUIRE(f->query_start_loc == NULL || f->query_start_loc[0] == 0,
            "metadata: query_start_loc[0] is %d; it must be 0", f->query_start_loc[0]);
    return FOLIO_OK;
}

/* Rows of no blocks: a stride that was forgotten. An empty tensor is NULL. */
static folio_status check_strides(const folio_vllm06_metadata *m)
{
    const folio_vllm06_metadata_fields *f = &m->f;
    const struct {
        const char *name;
        const int32_t *tables;
        int64_t stride, rows;
    } all[] = {
        {"block_tables", f->block_tables, f->block_tables_stride,
         f->chunked_prefill ? f->num_decode_tokens : m->num_seqs},
        {"cross_block_tables", f->cross_block_tables, f->cross_block_tables_stride, m->num_seqs},
        {"prefill_block_tables", f->prefill_block_tables, f->prefill_block_tables_stride,
         f->num_prefills}};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        REQUIRE(all[i].stride >= 0, "metadata: %s_stride is %lld; it must not be negative",
                all[i].name, (long long)all[i].stride);
        REQUIRE(all[i].tables == NULL || all[i].stride > 0 || all[i].rows == 0,
                "metadata: %s has %lld rows, but %s_stride is 0; pass NULL for rows without blocks",
                all[i].name, (long long)all[i].rows, all[i].name);
    }
    return FOLIO_OK;
}

static folio_status check_lengths(const folio_vllm06_metadata *m)
{
    const folio_vllm06_metadata_fields *f = &m->f;
    bool split = f->chunked_prefill && f->num_decode_tokens > 0;
    bool twice = !split && f->seq_lens != NULL && f->seq_lens_tensor != NULL;
    for (int64_t i = 0; i < m->num_seqs; i++) {
        int64_t len = folioi_vllm06_seq_len(m, i);
        REQUIRE(len >= 0, "metadata: seq_lens[%lld] is %lld; it must be at least 0", (long long)i,
                (long long)len);
        REQUIRE(!twice || f->seq_lens[i] == f->seq_lens_tensor[i],
                "metadata: seq_lens[%lld] is %d, but seq_lens_tensor[%lld] is %d", (long long)i,
                f->seq_lens[i], (long long)i, f->seq_lens_tensor[i]);
    }
    return FOLIO_OK;
}

static folio_status check_prompts(folio_vllm06_metadata *m)
{
    folio_vllm06_metadata_fields *f = &m->f;
    int64_t tokens = 0;
    for (int64_t i = 0; i < f->num_prefills; i++) {
        int64_t query = folioi_vllm06_query_len(m, i), len = folioi_vllm06_seq_len(m, i);
        REQUIRE(query >= 0 && query <= len,
                "metadata: prompt %lld has %lld new tokens by %s, but its seq_len is %lld",
                (long long)i, (long long)query,
                f->query_start_loc != NULL ? "query_start_loc" : "context_lens_tensor",
                (long long)len);
        REQUIRE(f->context_lens_tensor == NULL || f->context_lens_tensor[i] + query == len,
                "metadata: prompt %lld has context_len %d, %lld new tokens and seq_len %lld",
                (long long)i, f->context_lens_tensor[i], (long long)query, (long long)len);
        tokens += query;
    }
    if (f->num_prefill_tokens == 0) f->num_prefill_tokens = tokens;
    if (f->num_prefills > 0 && f->num_decode_tokens == 0) f->is_prompt = 1;
    REQUIRE(tokens == f->num_prefill_tokens,
            "metadata: the prompts have %lld tokens, num_prefill_tokens is %lld", (long long)tokens,
            (long long)f->num_prefill_tokens);
    return FOLIO_OK;
}

/* More context than keys before the query: vLLM clips lengths and tables to the window's blocks, and
 * not this. With chunked_prefill query_start_loc is of prompts only. */
static folio_status check_decodes(const folio_vllm06_metadata *m)
{
    const folio_vllm06_metadata_fields *f = &m->f;
    const int32_t *starts = f->chunked_prefill ? NULL : f->query_start_loc;
    for (int64_t i = f->num_prefills; i < m->num_real; i++) {
        int64_t before = folioi_vllm06_seq_len(m, i) - 1;
        REQUIRE(f->context_lens_tensor == NULL || f->context_lens_tensor[i] >= before,
                "metadata: decode %lld has context_len %d, less than the %lld keys before it",
                (long long)i, f->context_lens_tensor[i], (long long)before);
        REQUIRE(starts == NULL || (int64_t)starts[i + 1] - starts[i] == 1,
                "metadata: decode %lld has %lld new tokens by query_start_loc; it must have 1",
                (long long)i, (long long)starts[i + 1] - starts[i]);
    }
    return FOLIO_OK;
}

/* num_encoder_tokens: vLLM's metadata of decodes counts theirs, and brings no keys of them. */
static folio_status check_encoders(const folio_vllm06_metadata *m)
{
    const folio_vllm06_metadata_fields *f = &m->f;
    const int32_t *lens = f->encoder_seq_lens, *again = f->encoder_seq_lens_tensor;
    int64_t counted = f->num_prefills > 0 ? f->num_prefills : m->num_seqs, tokens = 0;
    for (int64_t i = 0; lens != NULL && i < m->num_seqs; i++) {
        REQUIRE(lens[i] >= 0, "metadata: encoder_seq_lens[%lld] is %d; it must be at least 0",
                (long long)i, lens[i]);
        REQUIRE(again == NULL || lens[i] == again[i],
                "metadata: encoder_seq_lens[%lld] is %d, but encoder_seq_lens_tensor[%lld] is %d",
                (long long)i, lens[i], (long long)i, again[i]);
        if (i < counted) tokens += lens[i];
    }
    REQUIRE(f->num_encoder_tokens == 0 || f->num_encoder_tokens == tokens,
            "metadata: num_encoder_tokens is %lld; it must be 0 or %lld, the sum of "
            "encoder_seq_lens of the %s",
            (long long)f->num_encoder_tokens, (long long)tokens,
            f->num_prefills > 0 ? "prompts" : "decodes");
    return FOLIO_OK;
}

/* Without chunked_prefill both tables have the prompts' rows. */
static folio_status check_tables(const folio_vllm06_metadata *m)
{
    const folio_vllm06_metadata_fields *f = &m->f;
    int64_t n = min_i64(f->block_tables_stride, f->prefill_block_tables_stride);
    bool twice =
        !f->chunked_prefill && f->block_tables != NULL && f->prefill_block_tables != NULL && n > 0;
    for (int64_t i = 0; twice && i < f->num_prefills; i++)
        REQUIRE(memcmp(f->block_tables + i * f->block_tables_stride,
                       f->prefill_block_tables + i * f->prefill_block_tables_stride,
                       (size_t)n * sizeof *f->block_tables) == 0,
                "metadata: prompt %lld has other blocks in prefill_block_tables than in "
                "block_tables",
                (long long)i);
    return FOLIO_OK;
}

static folio_status check_fields(folio_vllm06_metadata *m)
{
    TRY(check_counts(m));
    TRY(check_strides(m));
    TRY(check_lengths(m));
    TRY(check_prompts(m));
    m->num_real = count_real(m);
    TRY(check_decodes(m));
    TRY(check_encoders(m));
    return check_sums(m);
}

/* Maxima and totals that were left 0. */
static void fill_in(folio_vllm06_metadata *m)
{
    folio_vllm06_metadata_fields *f = &m->f;
    for (int64_t i = 0; i < m->num_seqs; i++) {
        bool prompt = i < f->num_prefills;
        int64_t len = folioi_vllm06_seq_len(m, i);
        int64_t *longest = prompt ? &f->max_prefill_seq_len : &f->max_decode_seq_len;
        *longest = max_i64(*longest, len);
        if (!prompt) f->max_decode_query_len = max_i64(f->max_decode_query_len, 1);
        if (prompt) f->max_seqlen = max_i64(f->max_seqlen, len);
        if (prompt) f->max_kv_len = max_i64(f->max_kv_len, len);
        f->max_query_len = max_i64(f->max_query_len, folioi_vllm06_query_len(m, i));
        if (f->encoder_seq_lens != NULL)
            f->max_encoder_seq_len = max_i64(f->max_encoder_seq_len, f->encoder_seq_lens[i]);
    }
}

/* query_start_loc and context_lens_tensor, with the padding that vLLM leaves out of them. */
static folio_status copy_padded(folio_vllm06_metadata *m)
{
    int64_t n = m->num_seqs, real = m->num_real;
    TRY(KEEP_ROOM(context_lens_tensor, real, n)); /* zeros for the padding */
    if (m->f.chunked_prefill) return KEEP(query_start_loc, m->f.num_prefills + 1);
    TRY(KEEP_ROOM(query_start_loc, real + 1, n + 1));
    int32_t *starts = (int32_t *)m->f.query_start_loc; /* ours, from here on */
    for (int64_t i = real; starts != NULL && i < n; i++) starts[i + 1] = starts[i] + 1;
    return FOLIO_OK;
}

static folio_status copy_tables(folio_vllm06_metadata *m)
{
    const folio_vllm06_metadata_fields *f = &m->f;
    int64_t n = m->num_seqs, tables, cross_tables, prefill_tables;
    REQUIRE(checked_mul(n, f->block_tables_stride, &tables) &&
                checked_mul(n, f->cross_block_tables_stride, &cross_tables) &&
                checked_mul(n, f->prefill_block_tables_stride, &prefill_tables),
            "metadata: %lld rows of block_tables_stride %lld, cross_block_tables_stride %lld or "
            "prefill_block_tables_stride %lld exceed the largest size",
            (long long)n, (long long)f->block_tables_stride,
            (long long)f->cross_block_tables_stride, (long long)f->prefill_block_tables_stride);
    TRY(check_tables(m));
    if (f->chunked_prefill) tables = f->num_decode_tokens * f->block_tables_stride;
    TRY(KEEP(block_tables, tables));
    TRY(KEEP(cross_block_tables, cross_tables));
    return KEEP(prefill_block_tables, f->num_prefills * f->prefill_block_tables_stride);
}

static folio_status copy_fields(folio_vllm06_metadata *m)
{
    const folio_vllm06_metadata_fields *f = &m->f;
    int64_t n = m->num_seqs, prompts = f->num_prefills;
    bool split = f->chunked_prefill && f->num_decode_tokens > 0;
    TRY(copy_tables(m));
    TRY(copy_padded(m));
    TRY(KEEP(slot_mapping, f->num_prefill_tokens + f->num_decode_tokens));
    TRY(KEEP(seq_lens, f->chunked_prefill ? prompts : n));
    TRY(KEEP(seq_lens_tensor, split ? f->num_decode_tokens : n));
    TRY(KEEP(seq_start_loc, n + 1));
    TRY(KEEP(encoder_seq_lens, n));
    TRY(KEEP(encoder_seq_lens_tensor, n));
    TRY(KEEP(encoder_seq_start_loc, n + 1));
    TRY(KEEP(seqlen_q, prompts + 1));
    TRY(KEEP(kv_start_loc, prompts + 1));
    /* vLLM counts the encoder tokens of decodes too, and gives them no slots */
    return KEEP(cross_slot_mapping, prompts > 0 ? f->num_encoder_tokens : 0);
}

/* Slots as layers store to them. Equal prompts of one step share blocks, and all of them write these. */
static folio_status keep_slots(folio_vllm06_metadata *m)
{
    const folio_vllm06_metadata_fields *f = &m->f;
    const int64_t *given[] = {f->slot_mapping, f->cross_slot_mapping};
    const int64_t **kept[] = {&m->store_slots, &m->cross_store_slots};
    int64_t n[] = {f->num_prefill_tokens + f->num_decode_tokens,
                   f->num_prefills > 0 ? f->num_encoder_tokens : 0};
    bool repeats[2] = {true, true};
    for (int k = 0; k < 2; k++) {
        if (given[k] == NULL) continue;
        int64_t bytes = max_i64(n[k], 1) * (int64_t)sizeof *given[k];
        TRY(folioi_array_reserve(&m->state->ctx->allocator, &m->stores[k], bytes, "slots"));
        int64_t *slots = m->stores[k].data;
        memcpy(slots, given[k], (size_t)n[k] * sizeof *slots);
        for (int64_t i = f->num_prefills; k == 0 && i < m->num_seqs; i++) /* padding */
            if (folioi_vllm06_seq_len(m, i) == 0) slots[i - m->num_seqs + n[k]] = -1;
        TRY(folioi_slots_keep_last(&m->state->ctx->allocator, slots, n[k], &repeats[k]));
        *kept[k] = slots;
    }
    m->distinct = !repeats[0];
    return FOLIO_OK;
}

folio_status folio_vllm06_make_metadata(folio_vllm06_state *state,
                                        const folio_vllm06_backend *backend,
                                        const folio_vllm06_metadata_fields *fields,
                                        folio_vllm06_metadata **out)
{
    REQUIRE(out != NULL, "make_metadata: out is NULL");
    *out = NULL;
    REQUIRE(state != NULL, "make_metadata: state is NULL");
    TRY(folioi_vllm06_check_backend(backend, "make_metadata"));
    void *memory;
    TRY(folioi_alloc(&state->ctx->allocator, sizeof(folio_vllm06_metadata), "metadata", &memory));
    folio_vllm06_metadata *m = memory;
    refs_retain(&state->refs);
    m->id = ++state->num_metadata;
    m->state = state;
    m->backend = backend;
    folio_status status = folioi_struct_in(&m->f, sizeof m->f, fields, "metadata fields");
    if (status == FOLIO_OK) status = check_fields(m);
    const folio_vllm06_bias *biases[] = {m->f.attn_bias, m->f.encoder_attn_bias,
                                         m->f.cross_attn_bias};
    m->f.attn_bias = m->f.encoder_attn_bias = m->f.cross_attn_bias = NULL;
    if (status == FOLIO_OK) status = copy_fields(m);
    if (status == FOLIO_OK) status = keep_slots(m);
    if (status == FOLIO_OK) fill_in(m);
    static const folio_attention_type types[] = {FOLIO_ATTENTION_DECODER, FOLIO_ATTENTION_ENCODER,
                                                 FOLIO_ATTENTION_ENCODER_DECODER};
    for (int i = 0; i < 3 && status == FOLIO_OK; i++)
        if (biases[i] != NULL) status = folio_vllm06_set_attn_bias(m, types[i], biases[i]);
    if (status != FOLIO_OK) {
        folio_vllm06_metadata_destroy(m);
        return status;
    }
    m->f.struct_size = sizeof m->f;
    *out = m;
    return FOLIO_OK;
}

void folio_vllm06_metadata_destroy(folio_vllm06_metadata *m)
{
    if (m == NULL) return;
    if (m->prefill != m) folio_vllm06_metadata_destroy(m->prefill);
    if (m->decode != m) folio_vllm06_metadata_destroy(m->decode);
    folio_vllm06_state *state = m->state;
    folio_allocator a = state->ctx->allocator;
    for (int i = 0; i < (int)(sizeof m->copies / sizeof m->copies[0]); i++)
        folioi_array_free(&a, &m->copies[i]);
    for (int i = 0; i < 2; i++) folioi_array_free(&a, &m->stores[i]);
    folioi_vllm06_biases_free(m);
    folioi_vllm06_drop_plans(state->ctx, m->plans);
    folioi_slotset_free(&a, &m->slots);
    folioi_free(&a, m, sizeof *m);
    folio_vllm06_state_destroy(state);
}

const folio_vllm06_metadata_fields *folio_vllm06_metadata_get(const folio_vllm06_metadata *m)
{
    return m != NULL ? &m->f : NULL;
}

#define FROM(field, first)                                                                         \
    if (v->f.field != NULL) v->f.field += first

/* Sequences [first, first + n) of m, with tokens from `token` on. The arrays stay m's. */
static folio_vllm06_metadata *view_of(folio_vllm06_metadata *m, bool prompts)
{
    void *memory;
    if (folioi_alloc(&m->state->ctx->allocator, sizeof *m, "a metadata view", &memory) != FOLIO_OK)
        return NULL;
    folio_vllm06_metadata *v = memory;
    int64_t first = prompts ? 0 : m->f.num_prefills;
    refs_retain(&m->state->refs);
    v->id = ++m->state->num_metadata;
    v->state = m->state;
    v->backend = m->backend;
    v->owner = m;
    v->f = m->f;
    v->store_slots = m->store_slots;
    v->cross_store_slots = m->cross_store_slots;
    v->distinct = m->distinct;
    v->f.num_prefills = prompts ? m->f.num_prefills : 0;
    v->f.num_prefill_tokens = prompts ? m->f.num_prefill_tokens : 0;
    v->f.num_decode_tokens = prompts ? 0 : m->f.num_decode_tokens;
    v->f.is_prompt = prompts;
    v->num_seqs = v->f.num_prefills + v->f.num_decode_tokens;
    v->num_real = v->num_seqs;
    bool split = m->f.chunked_prefill && m->f.num_decode_tokens > 0;
    if (prompts) {
        v->f.max_decode_seq_len = v->f.max_decode_query_len = 0;
        v->f.use_cuda_graph = 0;
        if (split) { /* the decodes' */
            v->f.seq_lens_tensor = v->f.block_tables = NULL;
            v->f.block_tables_stride = 0;
        }
        if (m->distinct || keep_slots(v) == FOLIO_OK)
            return v; /* a decode may write over a prompt */
        folio_vllm06_metadata_destroy(v);
        return NULL;
    }
    v->f.max_prefill_seq_len = v->f.max_seqlen = v->f.max_kv_len = 0;
    v->f.max_query_len = 1;
    FROM(slot_mapping, m->f.num_prefill_tokens);
    if (v->store_slots != NULL) v->store_slots += m->f.num_prefill_tokens;
    FROM(seq_lens, first);
    FROM(seq_lens_tensor, split ? 0 : first);
    FROM(context_lens_tensor, first);
    FROM(block_tables, split ? 0 : first * m->f.block_tables_stride);
    FROM(encoder_seq_lens, first);
    FROM(encoder_seq_lens_tensor, first);
    FROM(cross_block_tables, first * m->f.cross_block_tables_stride);
    if (split) v->f.seq_lens = NULL; /* the prompts' */
    /* sums that count from the step's beginning, and what belongs to prompts */
    v->f.query_start_loc = v->f.seq_start_loc = v->f.encoder_seq_start_loc = NULL;
    v->f.seqlen_q = v->f.kv_start_loc = v->f.prefill_block_tables = NULL;
    v->f.prefill_block_tables_stride = 0;
    v->f.multi_modal_placeholder_index_maps = NULL;
    v->f.attn_bias = v->f.encoder_attn_bias = v->f.cross_attn_bias = NULL;
    return v;
}

/* The views are a cache: making them changes nothing a caller can see. */
const folio_vllm06_metadata *folio_vllm06_prefill_metadata(const folio_vllm06_metadata *metadata)
{
    folio_vllm06_metadata *m = (folio_vllm06_metadata *)metadata;
    if (m == NULL || m->f.num_prefills == 0) return NULL;
    if (m->owner != NULL) return m; /* a view of the prompts is its own */
    if (m->prefill == NULL)
        m->prefill = !m->backend->mixes && m->f.num_decode_tokens == 0 ? m : view_of(m, true);
    return m->prefill;
}

const folio_vllm06_metadata *folio_vllm06_decode_metadata(const folio_vllm06_metadata *metadata)
{
    folio_vllm06_metadata *m = (folio_vllm06_metadata *)metadata;
    if (m == NULL || m->f.num_decode_tokens == 0) return NULL;
    if (m->owner != NULL || m->graph_len > 0) return m; /* a graph's are decodes only */
    if (m->decode == NULL)
        m->decode = !m->backend->mixes && m->f.num_prefills == 0 ? m : view_of(m, false);
    return m->decode;
}

int folio_vllm06_is_all_encoder_attn_metadata_set(const folio_vllm06_metadata *m)
{
    /* max_encoder_seq_len follows from them where the caller left it out */
    return m != NULL && m->f.encoder_seq_lens != NULL && m->f.encoder_seq_lens_tensor != NULL;
}

/* Does one of the sequences [first, end) have an encoder? */
static bool any_encoder(const folio_vllm06_metadata *m, int64_t first, int64_t end)
{
    for (int64_t i = first; i < end; i++)
        if (m->f.encoder_seq_lens[i] > 0) return true;
    return false;
}

int folio_vllm06_is_all_cross_attn_metadata_set(const folio_vllm06_metadata *m)
{
    if (!folio_vllm06_is_all_encoder_attn_metadata_set(m)) return 0;
    /* vLLM gives decodes no slots and prompts no tables; the data of an empty tensor is NULL */
    int64_t prompts = m->f.num_prefills;
    bool no_slots = !any_encoder(m, 0, prompts);
    bool no_tables = m->f.cross_block_tables_stride == 0 && !any_encoder(m, prompts, m->num_seqs);
    return (m->f.cross_slot_mapping != NULL || no_slots) &&
           (m->f.cross_block_tables != NULL || no_tables);
}

folio_status folioi_vllm06_check_type(const folio_vllm06_metadata *m, folio_attention_type type)
{
    REQUIRE(m != NULL, "metadata is NULL");
    REQUIRE((unsigned)type < FOLIO_NUM_ATTENTION_TYPES, "attention type %d is unknown", (int)type);
    return FOLIO_OK;
}

folio_status folio_vllm06_get_seq_lens(const folio_vllm06_metadata *m, folio_attention_type type,
                                       const int32_t **seq_lens_q, const int32_t **seq_lens_kv)
{
    TRY(folioi_vllm06_check_type(m, type));
    REQUIRE(seq_lens_q != NULL && seq_lens_kv != NULL, "seq_lens_q or seq_lens_kv is NULL");
    bool encoder_q = type == FOLIO_ATTENTION_ENCODER;
    bool encoder_kv = encoder_q || type == FOLIO_ATTENTION_ENCODER_DECODER;
    *seq_lens_q = encoder_q ? m->f.encoder_seq_lens : m->f.seq_lens;
    *seq_lens_kv = encoder_kv ? m->f.encoder_seq_lens : m->f.seq_lens;
    return FOLIO_OK;
}

folio_status folio_vllm06_get_seq_len_block_table_args(const folio_vllm06_metadata *m,
                                                       int is_prompt, folio_attention_type type,
                                                       folio_vllm06_seq_len_block_table_args *out)
{
    TRY(folioi_vllm06_check_type(m, type));
    REQUIRE(out != NULL, "out is NULL");
    const folio_vllm06_metadata_fields *f = &m->f;
    bool decoder = type == FOLIO_ATTENTION_DECODER, cross = type == FOLIO_ATTENTION_ENCODER_DECODER;
    bool split = is_prompt && f->chunked_prefill; /* prompts have arrays of their own */
    folioi_vllm06_rows tables = {f->block_tables, f->block_tables_stride};
    if (split)
        tables = (folioi_vllm06_rows){f->prefill_block_tables, f->prefill_block_tables_stride};
    if (cross) tables = (folioi_vllm06_rows){f->cross_block_tables, f->cross_block_tables_stride};
    if (!decoder && !cross) tables = (folioi_vllm06_rows){NULL, 0};
    out->seq_lens = split ? f->seq_lens : f->seq_lens_tensor;
    out->max_seq_len = is_prompt ? f->max_prefill_seq_len : f->max_decode_seq_len;
    if (cross || type == FOLIO_ATTENTION_ENCODER) {
        out->seq_lens = f->encoder_seq_lens_tensor;
        out->max_seq_len = f->max_encoder_seq_len;
    }
    out->block_tables = tables.row;
    out->block_tables_stride = tables.stride;
    return FOLIO_OK;
}
