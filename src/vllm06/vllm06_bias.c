/* vllm06_bias.c: the biases of a step's prompts: kept in host memory for callers, and copied to the device for
 * kernels. */
#include "vllm06/vllm06.h"

#include <string.h>

static int list_of(folio_attention_type type)
{
    return type == FOLIO_ATTENTION_ENCODER ? 1 : type == FOLIO_ATTENTION_ENCODER_DECODER ? 2 : 0;
}

static const folio_vllm06_bias **field_of(folio_vllm06_metadata *m, folio_attention_type type)
{
    const folio_vllm06_bias **fields[] = {&m->f.attn_bias, &m->f.encoder_attn_bias,
                                          &m->f.cross_attn_bias};
    return fields[list_of(type)];
}

const float *folioi_vllm06_bias_numbers(const folio_vllm06_metadata *m, folio_attention_type type,
                                        int64_t i)
{
    const folio_vllm06_metadata *owner = m->owner != NULL ? m->owner : m;
    const folioi_vllm06_biases *b = &owner->biases[list_of(type)];
    const folio_vllm06_bias *list = b->list.data;
    if (b->placed == NULL) return list[i].data;
    return (const float *)b->placed + (list[i].data - list[0].data);
}

static void drop(folio_context *ctx, folioi_vllm06_biases *b)
{
    folioi_array_free(&ctx->allocator, &b->list);
    folio_memory_destroy(ctx, FOLIO_MEMORY_DEVICE, b->placed, (size_t)b->placed_bytes);
    *b = (folioi_vllm06_biases){.placed = NULL};
}

void folioi_vllm06_biases_free(folio_vllm06_metadata *m)
{
    for (int i = 0; i < FOLIOI_VLLM06_BIAS_LISTS; i++) drop(m->state->ctx, &m->biases[i]);
}

folio_status folio_vllm06_get_attn_bias(const folio_vllm06_metadata *m, folio_attention_type type,
                                        const folio_vllm06_bias **out)
{
    TRY(folioi_vllm06_check_type(m, type));
    REQUIRE(out != NULL, "out is NULL");
    *out = *field_of((folio_vllm06_metadata *)m, type);
    return FOLIO_OK;
}

/* The bytes of a list of n biases with their numbers. */
static folio_status measure(const folio_vllm06_bias *biases, int64_t n, int64_t *bytes)
{
    *bytes = n * (int64_t)sizeof *biases;
    for (int64_t i = 0; i < n; i++) {
        const folio_vllm06_bias *b = &biases[i];
        int64_t numbers;
        REQUIRE(b->data != NULL, "attn_bias[%lld]: data is NULL", (long long)i);
        REQUIRE(b->num_heads >= 1 && b->query_len >= 0 && b->key_len >= 0 &&
                    checked_mul(b->query_len, b->key_len, &numbers) &&
                    checked_mul(numbers, b->num_heads, &numbers) && numbers < INT64_MAX / 16,
                "attn_bias[%lld]: num_heads %lld is below 1, query_len %lld or key_len %lld is "
                "negative, or they exceed the largest size",
                (long long)i, (long long)b->num_heads, (long long)b->query_len,
                (long long)b->key_len);
        *bytes += numbers * 4;
    }
    return FOLIO_OK;
}

static folio_status keep(folio_context *ctx, const folio_vllm06_bias *biases, int64_t n,
                         folioi_vllm06_biases *out)
{
    int64_t bytes;
    TRY(measure(biases, n, &bytes));
    TRY(folioi_array_reserve(&ctx->allocator, &out->list, max_i64(bytes, 1), "attn_bias"));
    folio_vllm06_bias *list = out->list.data;
    float *numbers = (float *)(list + n);
    for (int64_t i = 0; i < n; i++) {
        size_t count = (size_t)(biases[i].num_heads * biases[i].query_len * biases[i].key_len);
        list[i] = biases[i];
        list[i].data = memcpy(numbers, biases[i].data, count * sizeof *numbers);
        numbers += count;
    }
    out->placed_bytes = bytes - n * (int64_t)sizeof *list;
    if (!ctx->backend->on_device || out->placed_bytes == 0) return FOLIO_OK;
    return folioi_vllm06_place(ctx, list + n, out->placed_bytes, &out->placed);
}

/* A view of the prompts shows the biases its metadata has now. */
static void show_biases(folio_vllm06_metadata *m)
{
    if (m->prefill == NULL || m->prefill == m) return;
    m->prefill->f.attn_bias = m->f.attn_bias;
    m->prefill->f.encoder_attn_bias = m->f.encoder_attn_bias;
    m->prefill->f.cross_attn_bias = m->f.cross_attn_bias;
}

folio_status folio_vllm06_set_attn_bias(folio_vllm06_metadata *m, folio_attention_type type,
                                        const folio_vllm06_bias *attn_bias)
{
    TRY(folioi_vllm06_check_type(m, type));
    REQUIRE(m->owner == NULL, "set_attn_bias: a view's biases are its metadata's; set them there");
    folio_context *ctx = m->state->ctx;
    folioi_vllm06_biases kept = {.placed = NULL};
    if (attn_bias != NULL) {
        folio_status status = keep(ctx, attn_bias, m->f.num_prefills, &kept);
        if (status != FOLIO_OK) {
            drop(ctx, &kept);
            return status;
        }
    }
    drop(ctx, &m->biases[list_of(type)]);
    m->biases[list_of(type)] = kept;
    *field_of(m, type) = kept.list.data;
    show_biases(m);
    return FOLIO_OK;
}
