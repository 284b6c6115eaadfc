/* rotary.c: creates rotary embeddings: frequencies by theta and a scaling, then the table of cosines and sines. */
#include "core/rotary.h"

#include "core/alloc.h"
#include "core/checked.h"

#define TWO_PI 6.283185307179586476925

/* ---- frequencies ---- */

/* The pair that makes so many rotations within original_len, as a fraction. */
static double pair_of_rotations(const folio_rotary_desc *d, double rotations)
{
    return d->num_dims * log((double)d->original_len / (rotations * TWO_PI)) /
           (2.0 * log(d->theta));
}

/* 1: the pair keeps its frequency, 0: it is divided by the factor. */
static double yarn_share(const folio_rotary_desc *d, int64_t pair)
{
    double low = pair_of_rotations(d, d->beta_fast), high = pair_of_rotations(d, d->beta_slow);
    if (!d->exact_bounds) {
        low = floor(low);
        high = ceil(high);
    }
    low = fmax(low, 0.0);
    high = fmin(high, d->num_dims - 1.0);
    if (low == high) high += 0.001;
    return 1.0 - fmin(fmax(((double)pair - low) / (high - low), 0.0), 1.0);
}

static double llama3_share(const folio_rotary_desc *d, double frequency)
{
    double rotations = (double)d->original_len * frequency / TWO_PI;
    double share = (rotations - d->low_freq_factor) / (d->high_freq_factor - d->low_freq_factor);
    return fmin(fmax(share, 0.0), 1.0);
}

static double frequency_of(const folio_rotary_desc *d, int64_t pair)
{
    double n = d->num_dims, theta = d->theta, s = d->factor, share = 1.0;
    if (d->frequencies != NULL) return d->frequencies[pair];
    if (d->scaling == FOLIO_ROTARY_SCALE_NTK) theta *= pow(s, n / (n - 2.0));
    double f = 1.0 / pow(theta, 2.0 * (double)pair / n);
    if (d->scaling == FOLIO_ROTARY_SCALE_LINEAR) share = 0.0;
    if (d->scaling == FOLIO_ROTARY_SCALE_YARN) share = yarn_share(d, pair);
    if (d->scaling == FOLIO_ROTARY_SCALE_LLAMA3) share = llama3_share(d, f);
    return share == 1.0 ? f : f / s * (1.0 - share) + f * share;
}

/* ---- table ---- */

/* Is every number of the table finite? Angles grow with positions, and cos and sin lie within [-1, 1]. */
static folio_status check_table(const folio_rotary_desc *d, const double *frequencies)
{
    int64_t half = d->num_dims / 2;
    for (int64_t i = 0; frequencies != NULL && i < half; i++)
        REQUIRE(
            isfinite(frequencies[i] * (double)d->num_positions),
            "rotary: the frequency of pair %lld is %g; the angle of position %lld is not finite",
            (long long)i, frequencies[i], (long long)d->num_positions - 1);
    REQUIRE(frequencies == NULL || isfinite((float)d->magnitude),
            "rotary: magnitude is %g; cos and sin times it exceed f32", d->magnitude);
    for (int64_t i = 0; frequencies == NULL && i < d->num_positions * half; i++)
        REQUIRE(isfinite((float)(d->cos[i] * d->magnitude)) &&
                    isfinite((float)(d->sin[i] * d->magnitude)),
                "rotary: cos or sin of position %lld, pair %lld times magnitude %g exceeds f32",
                (long long)(i / half), (long long)(i % half), d->magnitude);
    return FOLIO_OK;
}

/* Positions are shared out to threads, some at a time. */
typedef struct {
    const folio_rotary_desc *d;
    const double *frequencies; /* NULL: cos and sin are given */
    float *table;
    int64_t workers;
} table_job;

static void fill_rows(void *task, int64_t worker)
{
    const table_job *j = task;
    const folio_rotary_desc *d = j->d;
    int64_t half = d->num_dims / 2, share = ceil_div(d->num_positions, j->workers);
    for (int64_t p = worker * share; p < min_i64((worker + 1) * share, d->num_positions); p++) {
        float *row = j->table + p * d->num_dims;
        for (int64_t i = 0; i < half; i++) {
            bool given = j->frequencies == NULL;
            double angle = given ? 0.0 : (double)p * j->frequencies[i];
            double c = given ? (double)d->cos[p * half + i] : cos(angle);
            double s = given ? (double)d->sin[p * half + i] : sin(angle);
            row[i] = (float)(c * d->magnitude);
            row[half + i] = (float)(s * d->magnitude);
        }
    }
}

static folio_status fill_table(const folio_context *ctx, const folio_rotary_desc *d, float *table)
{
    int64_t half = d->num_dims / 2;
    void *memory = NULL;
    table_job j = {.d = d, .table = table, .workers = min_i64(ctx->num_threads, d->num_positions)};
    if (d->cos == NULL) {
        TRY(folioi_alloc(&ctx->allocator, half * (int64_t)sizeof(double), "frequencies", &memory));
        double *frequencies = memory;
        for (int64_t i = 0; i < half; i++) frequencies[i] = frequency_of(d, i);
        j.frequencies = frequencies;
    }
    folio_status status = check_table(d, j.frequencies);
    if (status == FOLIO_OK) folioi_parallel(ctx, j.workers, fill_rows, &j);
    folioi_free(&ctx->allocator, memory, half * (int64_t)sizeof(double));
    return status;
}

/* The table's copy on the device. */
static folio_status send_table(folio_rotary *rotary, const void *host)
{
    const folio_context *ctx = rotary->ctx;
    const folioi_backend *b = ctx->backend;
    void *memory;
    TRY(b->alloc(ctx, FOLIO_MEMORY_DEVICE, (size_t)rotary->bytes, "a rotary's table", &memory));
    rotary->rotation.table = memory;
    TRY(b->copy(ctx, memory, host, (size_t)rotary->bytes, NULL));
    return b->wait(ctx, NULL);
}

/* The table where the context's tensors lie. */
static folio_status make_table(folio_rotary *rotary, const folio_rotary_desc *d)
{
    const folio_context *ctx = rotary->ctx;
    void *host;
    TRY(folioi_alloc_untouched(&ctx->allocator, rotary->bytes, "a rotary's table", &host));
    folio_status status = fill_table(ctx, d, host);
    if (status == FOLIO_OK && !ctx->backend->on_device) {
        rotary->rotation.table = host;
        return FOLIO_OK;
    }
    if (status == FOLIO_OK) status = send_table(rotary, host);
    folioi_free(&ctx->allocator, host, rotary->bytes);
    return status;
}

folio_status folio_rotary_create(folio_context *ctx, const folio_rotary_desc *desc,
                                 folio_rotary **out)
{
    REQUIRE(out != NULL, "folio_rotary_create: out is NULL");
    *out = NULL;
    REQUIRE(ctx != NULL, "folio_rotary_create: ctx is NULL");
    folio_rotary_desc d;
    TRY(folioi_rotary_read(desc, &d));
    void *memory;
    TRY(folioi_alloc(&ctx->allocator, sizeof(folio_rotary), "a rotary", &memory));
    folio_rotary *rotary = memory;
    refs_init(&rotary->refs);
    refs_retain(&ctx->refs);
    rotary->ctx = ctx;
    rotary->bytes = d.num_positions * d.num_dims * (int64_t)sizeof(float); /* below 2^50 */
    rotary->rotation = (folioi_rotation){.num_positions = d.num_positions,
                                         .first_dim = d.first_dim,
                                         .num_dims = d.num_dims,
                                         .pairs = d.pairing == FOLIO_ROTARY_PAIRS};
    folio_status status = make_table(rotary, &d);
    if (status != FOLIO_OK) {
        folio_rotary_destroy(rotary);
        return status;
    }
    *out = rotary;
    return FOLIO_OK;
}

void folio_rotary_destroy(folio_rotary *rotary)
{
    if (rotary == NULL || !refs_release(&rotary->refs)) return;
    folio_context *ctx = rotary->ctx;
    void *table = (void *)(uintptr_t)rotary->rotation.table;
    ctx->backend->free(ctx, FOLIO_MEMORY_DEVICE, table, (size_t)rotary->bytes);
    folioi_free(&ctx->allocator, rotary, sizeof *rotary);
    folio_context_destroy(ctx);
}
