/* rotary_desc.c: the description of a rotary embedding, read and checked. */
#include "core/rotary.h"

#define MAX_DIMS 65536

static void fill_defaults(folio_rotary_desc *d)
{
    if (d->theta == 0) d->theta = 10000.0;
    if (d->low_freq_factor == 0) d->low_freq_factor = 1.0;
    if (d->high_freq_factor == 0) d->high_freq_factor = 4.0;
    if (d->beta_fast == 0) d->beta_fast = 32.0;
    if (d->beta_slow == 0) d->beta_slow = 1.0;
    bool yarn = d->scaling == FOLIO_ROTARY_SCALE_YARN;
    if (d->magnitude == 0) d->magnitude = yarn && d->factor > 1 ? 0.1 * log(d->factor) + 1.0 : 1.0;
}

static folio_status check_scaling(const folio_rotary_desc *d)
{
    if (d->scaling == FOLIO_ROTARY_SCALE_NONE) return FOLIO_OK;
    REQUIRE(d->cos == NULL && d->frequencies == NULL,
            "rotary: scaling %d is given with %s; a scaling needs theta", (int)d->scaling,
            d->cos != NULL ? "cos and sin" : "frequencies");
    REQUIRE(isfinite(d->factor) && d->factor > 0,
            "rotary: factor is %g; it must be finite and above 0", d->factor);
    REQUIRE(d->scaling != FOLIO_ROTARY_SCALE_NTK || d->num_dims > 2,
            "rotary: NTK scaling needs num_dims above 2");
    if (d->scaling < FOLIO_ROTARY_SCALE_YARN) return FOLIO_OK;
    REQUIRE(d->original_len >= 1, "rotary: original_len is %lld; YARN and LLAMA3 need at least 1",
            (long long)d->original_len);
    REQUIRE(d->scaling != FOLIO_ROTARY_SCALE_LLAMA3 ||
                (d->low_freq_factor > 0 && d->high_freq_factor > d->low_freq_factor &&
                 isfinite(d->high_freq_factor)),
            "rotary: low_freq_factor is %g, high_freq_factor %g; they must be finite, with "
            "0 < low < high",
            d->low_freq_factor, d->high_freq_factor);
    REQUIRE(d->scaling != FOLIO_ROTARY_SCALE_YARN ||
                (d->beta_slow > 0 && d->beta_fast > d->beta_slow && isfinite(d->beta_fast)),
            "rotary: beta_slow is %g, beta_fast %g; they must be finite, with 0 < slow < fast",
            d->beta_slow, d->beta_fast);
    return FOLIO_OK;
}

static folio_status check_arrays(const folio_rotary_desc *d)
{
    int64_t half = d->num_dims / 2;
    REQUIRE((d->cos == NULL) == (d->sin == NULL), "rotary: %s is given without %s",
            d->cos != NULL ? "cos" : "sin", d->cos != NULL ? "sin" : "cos");
    REQUIRE(d->cos == NULL || d->frequencies == NULL,
            "rotary: cos and sin are given, and frequencies too");
    REQUIRE_ALIGNED(d->cos, "rotary: cos");
    REQUIRE_ALIGNED(d->sin, "rotary: sin");
    REQUIRE_ALIGNED(d->frequencies, "rotary: frequencies");
    for (int64_t i = 0; d->cos != NULL && i < d->num_positions * half; i++)
        REQUIRE(isfinite(d->cos[i]) && isfinite(d->sin[i]),
                "rotary: cos or sin of position %lld, pair %lld is not finite",
                (long long)(i / half), (long long)(i % half));
    for (int64_t i = 0; d->frequencies != NULL && i < half; i++)
        REQUIRE(isfinite(d->frequencies[i]), "rotary: frequencies[%lld] is %g; it must be finite",
                (long long)i, d->frequencies[i]);
    return FOLIO_OK;
}

static folio_status check_desc(const folio_rotary_desc *d)
{
    REQUIRE(d->num_dims >= 2 && d->num_dims <= MAX_DIMS && d->num_dims % 2 == 0,
            "rotary: num_dims is %d; it must be even, in [2, %d]", d->num_dims, MAX_DIMS);
    REQUIRE(d->first_dim >= 0, "rotary: first_dim is %d; it must be at least 0", d->first_dim);
    REQUIRE((unsigned)d->pairing <= FOLIO_ROTARY_PAIRS, "rotary: pairing %d is unknown",
            (int)d->pairing);
    REQUIRE((unsigned)d->scaling <= FOLIO_ROTARY_SCALE_LLAMA3, "rotary: scaling %d is unknown",
            (int)d->scaling);
    REQUIRE(d->num_positions >= 1 && d->num_positions <= INT32_MAX,
            "rotary: num_positions is %lld, outside [1, 2147483647]", (long long)d->num_positions);
    REQUIRE(d->cos != NULL || d->frequencies != NULL || (isfinite(d->theta) && d->theta > 1),
            "rotary: theta is %g; it must be finite, above 1", d->theta);
    REQUIRE(d->exact_bounds == 0 || d->exact_bounds == 1, "rotary: exact_bounds is %d, not 0 or 1",
            d->exact_bounds);
    REQUIRE(isfinite(d->magnitude) && d->magnitude > 0,
            "rotary: magnitude is %g; it must be finite, above 0", d->magnitude);
    TRY(check_scaling(d));
    return check_arrays(d);
}

folio_status folioi_rotary_read(const folio_rotary_desc *desc, folio_rotary_desc *out)
{
    STRUCT_IN(*out, desc, "folio_rotary_desc");
    fill_defaults(out);
    return check_desc(out);
}
