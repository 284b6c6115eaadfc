/* vllm06_metadata.c: a step's fields kept, looked at by attention type, and seen by phase. */
#include "vllm06/vllm06.h"

#include <string.h>

int64_t folioi_vllm06_seq_len(const folio_vllm06_metadata *m, int64_t i)
{
    return m->f.seq_lens != NULL ? m->f.seq_lens[i] : m->f.seq_lens_tensor[i];
}

int64_t folioi_vllm06_query_len(const folio_vllm06_metadata *m, int64_t i)
{
    if (i >= m->f.num_prefills) return 1;
    if (m->f.query_start_loc != NULL)
        return (int64_t)m->f.query_start_loc[i + 1] - m->f.query_start_loc[i];
    int64_t context = m->f.context_lens_tensor != NULL ? m->f.context_lens_tensor[i] : 0;
    return folioi_vllm06_seq_len(m, i) - context;
}

/* *field, an array of count elements, becomes a copy the metadata owns; NULL stays NULL. */
static folio_status keep(folio_vllm06_metadata *m, const void **field, int64_t count, size_t size,
                         const char *name)
{
    if (*field == NULL) return FOLIO_OK;
    int64_t bytes;
    REQUIRE(checked_mul(max_i64(count, 1), (int64_t)size, &bytes),
            "metadata: %s has too many elements", name);
    folioi_array *copy = &m->copies[m->num_copies];
    TRY(folioi_array_reserve(&m->state->ctx->allocator, copy, bytes, name));
    m->num_copies++;
    memcpy(copy->data, *field, (size_t)count * size);
    *field = copy->data;
    return FOLIO_OK;
}

#define KEEP(field, count) keep(m, (const void **)&m->f.field, count, sizeof *m->f.field, #field)

static folio_status check_fields(folio_vllm06_metadata *m)
{
    folio_vllm06_metadata_fields *f = &m->f;
    REQUIRE(f->num_prefills >= 0 && f->num_prefill_tokens >= 0 && f->num_decode_tokens >= 0,
            "metadata: num_prefills %lld, num_prefill_tokens %lld or num_decode_tokens %lld is "
            "negative",
            (long long)f->num_prefills, (long long)f->num_prefill_tokens,
            (long long)f->num_decode_tokens);
    REQUIRE(checked_add(f->num_prefills, f->num_decode_tokens, &m->num_seqs) &&
                m->num_seqs <= INT32_MAX,
            "metadata: %lld prompts and %lld decodes are too many sequences",
            (long long)f->num_prefills, (long long)f->num_decode_tokens);
    REQUIRE(f->block_tables_stride >= 0 && f->cross_block_tables_stride >= 0,
            "metadata: block_tables_stride or cross_block_tables_stride is negative");
    REQUIRE(f->seq_lens != NULL || f->seq_lens_tensor != NULL || m->num_seqs == 0,
            "metadata: seq_lens and seq_lens_tensor are both NULL");
    REQUIRE(m->traits->mixes || f->num_decode_tokens == 0 || !f->is_prompt,
            "metadata: is_prompt is set, yet %lld sequences are decodes",
            (long long)f->num_decode_tokens);
    REQUIRE(f->query_start_loc == NULL || f->query_start_loc[0] == 0,
            "metadata: query_start_loc[0] is %d", f->query_start_loc[0]);
    for (int64_t i = 0; i < m->num_seqs; i++) {
        int64_t len = folioi_vllm06_seq_len(m, i);
        REQUIRE(len >= 0, "metadata: seq_lens[%lld] is %lld", (long long)i, (long long)len);
        REQUIRE(f->seq_lens == NULL || f->seq_lens_tensor == NULL ||
                    f->seq_lens[i] == f->seq_lens_tensor[i],
                "metadata: seq_lens[%lld] is %d and seq_lens_tensor[%lld] %d", (long long)i,
                f->seq_lens[i], (long long)i, f->seq_lens_tensor[i]);
        /* more than len - 1: vLLM clips lengths and tables to the window's blocks, and not this */
        REQUIRE(i < f->num_prefills || f->context_lens_tensor == NULL || len == 0 ||
                    f->context_lens_tensor[i] >= len - 1,
                "metadata: decode %lld has context_len %d, fewer than the keys before it, %lld",
                (long long)i, f->context_lens_tensor[i], (long long)(len - 1));
    }
    int64_t tokens = 0;
    for (int64_t i = 0; i < f->num_prefills; i++) {
        int64_t query = folioi_vllm06_query_len(m, i), len = folioi_vllm06_seq_len(m, i);
        REQUIRE(query >= 0 && query <= len, "metadata: prompt %lld has %lld new tokens of %lld",
                (long long)i, (long long)query, (long long)len);
        REQUIRE(f->context_lens_tensor == NULL || f->context_lens_tensor[i] + query == len,
                "metadata: prompt %lld has context_len %d, %lld new tokens and seq_len %lld",
                (long long)i, f->context_lens_tensor[i], (long long)query, (long long)len);
        tokens += query;
    }
    for (int64_t i = 0, start = 0; f->seq_start_loc != NULL && i <= m->num_seqs; i++) {
        REQUIRE(f->seq_start_loc[i] == start,
                "metadata: seq_start_loc[%lld] is %d, the lengths before it make %lld",
                (long long)i, f->seq_start_loc[i], (long long)start);
        if (i < m->num_seqs) start += folioi_vllm06_seq_len(m, i);
    }
    if (f->num_prefill_tokens == 0) f->num_prefill_tokens = tokens;
    if (f->num_prefills > 0 && f->num_decode_tokens == 0) f->is_prompt = 1;
    REQUIRE(tokens == f->num_prefill_tokens,
            "metadata: the prompts have %lld tokens, num_prefill_tokens is %lld", (long long)tokens,
            (long long)f->num_prefill_tokens);
    return FOLIO_OK;
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
        f->max_query_len = max_i64(f->max_query_len, folioi_vllm06_query_len(m, i));
        if (f->encoder_seq_lens != NULL)
            f->max_encoder_seq_len = max_i64(f->max_encoder_seq_len, f->encoder_seq_lens[i]);
    }
}

static folio_status copy_fields(folio_vllm06_metadata *m)
{
    int64_t n = m->num_seqs, tokens = m->f.num_prefill_tokens + m->f.num_decode_tokens;
    int64_t encoder_tokens = 0;
    for (int64_t i = 0; m->f.encoder_seq_lens != NULL && i < n; i++) {
        REQUIRE(m->f.encoder_seq_lens[i] >= 0, "metadata: encoder_seq_lens[%lld] is %d",
                (long long)i, m->f.encoder_seq_lens[i]);
        encoder_tokens += m->f.encoder_seq_lens[i];
    }
    REQUIRE(m->f.num_encoder_tokens >= 0 && m->f.num_encoder_tokens <= encoder_tokens,
            "metadata: num_encoder_tokens %lld is outside [0, %lld], the sum of encoder_seq_lens",
            (long long)m->f.num_encoder_tokens, (long long)encoder_tokens);
    int64_t tables, cross_tables;
    REQUIRE(
        checked_mul(n, m->f.block_tables_stride, &tables) &&
            checked_mul(n, m->f.cross_block_tables_stride, &cross_tables),
        "metadata: %lld rows of block_tables_stride %lld or cross_block_tables_stride %lld pass "
        "the largest size",
        (long long)n, (long long)m->f.block_tables_stride,
        (long long)m->f.cross_block_tables_stride);
    TRY(KEEP(slot_mapping, tokens));
    TRY(KEEP(seq_lens, n));
    TRY(KEEP(seq_lens_tensor, n));
    TRY(KEEP(query_start_loc, n + 1));
    TRY(KEEP(seq_start_loc, n + 1));
    TRY(KEEP(context_lens_tensor, n));
    TRY(KEEP(block_tables, tables));
    TRY(KEEP(encoder_seq_lens, n));
    TRY(KEEP(encoder_seq_lens_tensor, n));
    /* vLLM counts the encoder tokens of decodes too, and gives them no slots */
    TRY(KEEP(cross_slot_mapping, m->f.num_prefills > 0 ? m->f.num_encoder_tokens : 0));
    return KEEP(cross_block_tables, cross_tables);
}

folio_status folioi_vllm06_make_metadata(folio_vllm06_state *state,
                                         const folioi_vllm06_traits *traits,
                                         const folio_vllm06_metadata_fields *fields,
                                         folio_vllm06_metadata **out)
{
    REQUIRE(out != NULL, "make_metadata: out is NULL");
    *out = NULL;
    REQUIRE(state != NULL, "make_metadata: state is NULL");
    void *memory;
    TRY(folioi_alloc(&state->ctx->allocator, sizeof(folio_vllm06_metadata), "metadata", &memory));
    folio_vllm06_metadata *m = memory;
    refs_retain(&state->refs);
    m->id = ++state->num_metadata;
    m->state = state;
    m->traits = traits;
    folio_status status = folioi_struct_in(&m->f, sizeof m->f, fields, "metadata fields");
    if (status == FOLIO_OK) status = check_fields(m);
    const folio_vllm06_bias *biases[] = {m->f.attn_bias, m->f.encoder_attn_bias,
                                         m->f.cross_attn_bias};
    m->f.attn_bias = m->f.encoder_attn_bias = m->f.cross_attn_bias = NULL;
    if (status == FOLIO_OK) status = copy_fields(m);
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
    folioi_vllm06_biases_free(m);
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
static folio_vllm06_metadata *slice(folio_vllm06_metadata *m, bool prompts)
{
    void *memory;
    if (folioi_alloc(&m->state->ctx->allocator, sizeof *m, "a metadata view", &memory) != FOLIO_OK)
        return NULL;
    folio_vllm06_metadata *v = memory;
    int64_t first = prompts ? 0 : m->f.num_prefills;
    refs_retain(&m->state->refs);
    v->id = ++m->state->num_metadata;
    v->state = m->state;
    v->traits = m->traits;
    v->owner = m;
    v->f = m->f;
    v->f.num_prefills = prompts ? m->f.num_prefills : 0;
    v->f.num_prefill_tokens = prompts ? m->f.num_prefill_tokens : 0;
    v->f.num_decode_tokens = prompts ? 0 : m->f.num_decode_tokens;
    v->f.is_prompt = prompts;
    v->num_seqs = v->f.num_prefills + v->f.num_decode_tokens;
    if (prompts) {
        v->f.max_decode_seq_len = 0;
        v->f.use_cuda_graph = 0;
        return v;
    }
    v->f.max_prefill_seq_len = 0;
    v->f.max_query_len = 1;
    FROM(slot_mapping, m->f.num_prefill_tokens);
    FROM(seq_lens, first);
    FROM(seq_lens_tensor, first);
    FROM(context_lens_tensor, first);
    FROM(block_tables, first * m->f.block_tables_stride);
    FROM(encoder_seq_lens, first);
    FROM(encoder_seq_lens_tensor, first);
    FROM(cross_block_tables, first * m->f.cross_block_tables_stride);
    v->f.query_start_loc = v->f.seq_start_loc = NULL; /* they count from the step's beginning */
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
        m->prefill = !m->traits->mixes && m->f.num_decode_tokens == 0 ? m : slice(m, true);
    return m->prefill;
}

const folio_vllm06_metadata *folio_vllm06_decode_metadata(const folio_vllm06_metadata *metadata)
{
    folio_vllm06_metadata *m = (folio_vllm06_metadata *)metadata;
    if (m == NULL || m->f.num_decode_tokens == 0) return NULL;
    if (m->owner != NULL) return m;
    if (m->decode == NULL)
        m->decode = !m->traits->mixes && m->f.num_prefills == 0 ? m : slice(m, false);
    return m->decode;
}

int folio_vllm06_is_all_encoder_attn_metadata_set(const folio_vllm06_metadata *m)
{
    /* max_encoder_seq_len follows from them where the caller left it out */
    return m != NULL && m->f.encoder_seq_lens != NULL && m->f.encoder_seq_lens_tensor != NULL;
}

int folio_vllm06_is_all_cross_attn_metadata_set(const folio_vllm06_metadata *m)
{
    return folio_vllm06_is_all_encoder_attn_metadata_set(m) && m->f.cross_slot_mapping != NULL &&
           m->f.cross_block_tables != NULL;
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
    if (type == FOLIO_ATTENTION_DECODER || type == FOLIO_ATTENTION_ENCODER_ONLY)
        *out = (folio_vllm06_seq_len_block_table_args){
            f->seq_lens_tensor, is_prompt ? f->max_prefill_seq_len : f->max_decode_seq_len,
            type == FOLIO_ATTENTION_DECODER ? f->block_tables : NULL,
            type == FOLIO_ATTENTION_DECODER ? f->block_tables_stride : 0};
    else
        *out = (folio_vllm06_seq_len_block_table_args){
            f->encoder_seq_lens_tensor, f->max_encoder_seq_len,
            type == FOLIO_ATTENTION_ENCODER_DECODER ? f->cross_block_tables : NULL,
            type == FOLIO_ATTENTION_ENCODER_DECODER ? f->cross_block_tables_stride : 0};
    return FOLIO_OK;
}
