/* bias.c: writes the additive matrix of ALiBi, window and causality, for people and for tests. */
#include "batch/batch.h"
#include "core/checked.h"
#include "plan/attention.h"
#include "plan/row_ranges.h"

#include <math.h>

folio_status folio_bias_write(const folio_attention *attention, const folio_batch *batch,
                              folio_attention_type type, int64_t seq, const float *slopes,
                              float *out, int64_t capacity)
{
    REQUIRE(attention != NULL && batch != NULL, "folio_bias_write: attention or batch is NULL");
    REQUIRE((unsigned)type < FOLIO_NUM_ATTENTION_TYPES, "attention type %d is unknown", (int)type);
    REQUIRE(seq >= 0 && seq < batch->num_seqs, "seq %lld is outside [0, %lld)", (long long)seq,
            (long long)batch->num_seqs);
    const folio_attention_desc *a = &attention->desc;
    if (type == FOLIO_ATTENTION_ENCODER_DECODER &&
        (slopes != NULL || a->window_left >= 0 || a->window_right >= 0))
        FAIL(FOLIO_ERR_UNSUPPORTED, "cross attention has neither ALiBi nor window");
    folioi_rows rows = folioi_batch_rows(batch, seq, type);
    int64_t need = (int64_t)rows.query_len * rows.key_len;
    REQUIRE(checked_mul(need, a->num_heads, &need),
            "%d heads x %d queries x %d keys exceed the largest size", a->num_heads, rows.query_len,
            rows.key_len);
    REQUIRE(need <= capacity, "capacity is %lld, %d heads x %d queries x %d keys need %lld",
            (long long)capacity, a->num_heads, rows.query_len, rows.key_len, (long long)need);
    REQUIRE(out != NULL || need == 0, "folio_bias_write: out is NULL");
    for (int32_t h = 0; slopes != NULL && h < a->num_heads; h++)
        REQUIRE(isfinite(slopes[h]), "slopes[%d] is %g; it must be finite", h, (double)slopes[h]);
    for (int32_t h = 0; h < a->num_heads; h++) {
        for (int32_t i = 0; i < rows.query_len; i++) {
            folioi_range seen = key_range(&rows, a, i);
            for (int32_t j = 0; j < rows.key_len; j++) {
                int64_t distance = rows.first_query_pos + i - rows.first_key_pos - j;
                float alibi = slopes == NULL ? 0.0f : 0.0f - slopes[h] * fabsf((float)distance);
                *out++ = j >= seen.begin && j < seen.end ? alibi : -INFINITY;
            }
        }
    }
    return FOLIO_OK;
}
