/*
 * case_rotary.c: rotary embedding of cases: where tokens stand, the library's object for it, and the
 * rotation by the formula. It shares no code with the library.
 */
#include "kit/kit.h"

#include "kit/kit_internal.h"

#include <math.h>
#include <stdlib.h>

enum { LEAST_POSITIONS = 64 };

/* With positions given, tokens stand in no order, some of them in one place. */
int64_t kit_token_position(const kit_case *h, int64_t token)
{
    return h->spec.positions ? (token * 7 + 3) % (LEAST_POSITIONS - 3) : token;
}

int64_t kit_row_position(const kit_case *h, const kit_seq *s, folio_attention_type type, int64_t i)
{
    int64_t first = type == FOLIO_ATTENTION_DECODER ? kit_first_token(s) : 0;
    if (type == FOLIO_ATTENTION_DECODER && s->positions_given && !h->spec.positions)
        return s->first_query_pos + i;
    return kit_token_position(h, first + i);
}

int64_t *kit_row_positions(const kit_case *h, const step *st)
{
    if (!h->spec.rotary || h->spec.rotary_before || !h->spec.positions) return NULL;
    int64_t *positions = kit_alloc((size_t)st->rows, sizeof *positions);
    for (int64_t i = 0; i < st->rows; i++) positions[i] = -7; /* of padding */
    for (int64_t n = 0; n < st->num_seqs; n++)
        for (int64_t i = 0; st->seqs[n].seq_len > 0 && i < st->row_start[n + 1] - st->row_start[n];
             i++)
            positions[st->row_start[n] + i] = kit_row_position(h, &st->seqs[n], st->type, i);
    return positions;
}

folio_rotary *kit_rotary(kit_case *h, folio_context *ctx)
{
    const kit_spec *s = &h->spec;
    folio_rotary **made = &h->rotary[kit_is_device(ctx)];
    if (s->rotary == 0 || s->rotary_before || *made != NULL) return *made;
    folio_rotary_desc desc =
        FOLIO_WITH(folio_rotary_desc, .num_dims = s->rotary, .first_dim = s->rotary_first,
                   .pairing = s->rotary_pairing, .num_positions = h->num_positions);
    folio_status status = folio_rotary_create(ctx, &desc, made);
    if (status != FOLIO_OK) kit_refused("rotary", status);
    return *made;
}

void kit_rotary_open(kit_case *h, const kit_seq *seqs, int64_t num_seqs)
{
    h->num_positions = LEAST_POSITIONS;
    for (int64_t i = 0; i < num_seqs; i++) {
        const kit_seq *s = &seqs[i];
        int64_t end = s->positions_given ? s->first_query_pos + s->query_len : s->seq_len;
        int64_t longest[] = {end, s->first_key_pos + s->seq_len, s->seq_len, s->encoder_len};
        for (int n = 0; n < 4; n++)
            if (longest[n] > h->num_positions) h->num_positions = longest[n];
    }
}

/* The nearest number of a type. */
static double nearest(folio_dtype dtype, float x)
{
    return kit_decode(dtype, kit_encode(dtype, (double)x));
}

void kit_rotate(const kit_case *h, folio_dtype dtype, int64_t position, double *x)
{
    const kit_spec *s = &h->spec;
    int32_t n = s->rotary;
    for (int32_t i = 0; i < n / 2; i++) {
        bool pairs = s->rotary_pairing == FOLIO_ROTARY_PAIRS;
        double *a = x + s->rotary_first + (pairs ? 2 * i : i), *b = a + (pairs ? 1 : n / 2);
        double angle = (double)position * (1.0 / pow(10000.0, 2.0 * i / n));
        float c = (float)cos(angle), t = (float)sin(angle), u = (float)*a, v = (float)*b;
        float uc = u * c, vt = v * t, vc = v * c, ut = u * t;
        *a = nearest(dtype, uc - vt);
        *b = nearest(dtype, vc + ut);
    }
}

void kit_rotate_stored(const kit_case *h, folio_dtype dtype, int64_t position, void *data,
                       int64_t at)
{
    int64_t n = h->spec.k_head_size;
    double *x = kit_alloc((size_t)n, sizeof *x);
    for (int64_t d = 0; d < n; d++) x[d] = kit_load(dtype, data, at + d);
    kit_rotate(h, dtype, position, x);
    for (int64_t d = 0; d < n; d++) kit_store(dtype, data, at + d, x[d]);
    kit_free(x);
}
