/*
 * test_levels.c: the instruction-set levels of the cpu backend: which one a context gets, by name, by
 * environment and by default; and the error of the functions its softmax is made of, over their range.
 */
#include "backends/cpu/cpu_kernels.h"
#include "core/dtype.h"
#include "support.h"

#include <math.h>
#include <stdlib.h>

enum { CHUNK = 4096 };

/* Runs body for each level this machine has; says which one where it fails. */
static void each_level(void (*body)(const folioi_cpu_kernels *table))
{
    for (int i = 0; folioi_cpu_level_names[i] != NULL; i++) {
        const folioi_cpu_kernels *table = folioi_cpu_table(folioi_cpu_level_names[i]);
        if (strcmp(table->level, folioi_cpu_level_names[i]) != 0) continue; /* not here */
        int before = test_failures();
        body(table);
        if (test_failures() > before) printf("  that was on %s\n", table->level);
    }
}

static double ulp_of(double x)
{
    int e;
    frexp(x, &e);
    return ldexp(1.0, (e < -125 ? -125 : e) - 24);
}

/* Every 61st float of [-150, 8]. */
static void exp2_error(const folioi_cpu_kernels *table)
{
    static float x[CHUNK], y[CHUNK];
    double worst = 0;
    for (int sign = 0; sign < 2; sign++) {
        uint32_t bits = 0, end = bits_of_f32(sign ? 150.0f : 8.0f);
        while (bits < end) {
            for (int i = 0; i < CHUNK; i++, bits += 61)
                x[i] = y[i] = f32_of_bits((bits < end ? bits : end) | (uint32_t)sign << 31);
            table->exp2(y, CHUNK);
            for (int i = 0; i < CHUNK; i++) {
                double exact = exp2((double)x[i]), error = fabs((double)y[i] - exact);
                if (x[i] >= -126.0f) worst = fmax(worst, error / ulp_of(exact));
                else CHECK_MSG(error <= exact, "2^%g is %g", (double)x[i], (double)y[i]);
            }
        }
    }
    CHECK_MSG(worst <= 2.0, "2^x is off by %.2f ulp", worst);
}

TEST(levels, exp2_is_within_two_ulp) { each_level(exp2_error); }

static void exp2_edges(const folioi_cpu_kernels *table)
{
    float x[16] = {0.0f, -0.0f, -INFINITY, NAN, -151.0f, -1e30f, -1.0f, -126.0f, 8.0f, 1.0f};
    table->exp2(x, 16);
    CHECK(x[0] == 1.0f && x[1] == 1.0f && x[6] == 0.5f && x[8] == 256.0f && x[9] == 2.0f);
    CHECK(x[2] == 0.0f && x[4] == 0.0f && x[5] == 0.0f);
    CHECK(isnan(x[3]));
    CHECK(fabs((double)x[7] / 0x1p-126 - 1.0) < 1e-6);
}

TEST(levels, exp2_at_its_ends) { each_level(exp2_edges); }

/* The worst error in ulp, of all scores and of those beyond three quarters of the cap. */
static void soft_cap_error(const folioi_cpu_kernels *table)
{
    static const float caps[] = {1.0f, 30.0f, 50.0f, 1e-30f, 1e30f};
    static float x[CHUNK], y[CHUNK];
    bool three_roundings = strcmp(table->level, "scalar") == 0; /* cap * tanhf(x / cap) */
    for (int c = 0; c < 5; c++) {
        folioi_soft_cap cap = folioi_soft_cap_of(caps[c]);
        double worst = 0, worst_large = 0;
        for (uint32_t bits = bits_of_f32(1e-6f); bits < bits_of_f32(20.0f);) {
            for (int i = 0; i < CHUNK; i++, bits += 61)
                x[i] = y[i] = caps[c] * (i % 2 ? f32_of_bits(bits) : -f32_of_bits(bits));
            table->soft_cap(y, CHUNK, &cap);
            for (int i = 0; i < CHUNK; i++) {
                double exact = (double)caps[c] * tanh((double)x[i] / (double)caps[c]);
                double error = fabs((double)y[i] - exact) / ulp_of(exact);
                worst = fmax(worst, error);
                if (fabsf(x[i]) > 0.75f * caps[c]) worst_large = fmax(worst_large, error);
            }
        }
        CHECK_MSG(worst <= 4.5, "cap %g: off by %.2f ulp", (double)caps[c], worst);
        CHECK_MSG(worst_large <= (three_roundings ? 3.5 : 2.0),
                  "cap %g: a large score is off by %.2f ulp", (double)caps[c], worst_large);
    }
}

TEST(levels, soft_caps_are_within_two_ulp_where_scores_are_large) { each_level(soft_cap_error); }

static void soft_cap_edges(const folioi_cpu_kernels *table)
{
    static const float caps[] = {1e-45f, 1e-37f, 0.25f, 50.0f, 1e36f, 5e36f};
    for (int c = 0; c < 6; c++) {
        folioi_soft_cap cap = folioi_soft_cap_of(caps[c]);
        float x[16] = {0.0f, 1e38f, -1e38f, INFINITY, -INFINITY, NAN};
        table->soft_cap(x, 16, &cap);
        CHECK(x[0] == 0.0f && x[1] == cap.cap && x[2] == -cap.cap);
        CHECK(x[3] == cap.cap && x[4] == -cap.cap && isnan(x[5]));
    }
}

TEST(levels, soft_caps_at_their_ends) { each_level(soft_cap_edges); }

static const char *level_of(const folio_context_desc *desc, folio_context **ctx)
{
    folio_context_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_context_create(desc, ctx));
    if (*ctx == NULL) return "";
    CHECK_OK(folio_context_get_info(*ctx, &info));
    return info.level;
}

/* FOLIO_CPU as it was, so that a test can leave it so. */
typedef struct saved_cap {
    bool set;
    char text[64];
} saved_cap;

static saved_cap save_cap(void)
{
    const char *now = getenv("FOLIO_CPU");
    saved_cap saved = {.set = now != NULL};
    snprintf(saved.text, sizeof saved.text, "%s", saved.set ? now : "");
    return saved;
}

static void restore_cap(const saved_cap *saved)
{
    if (saved->set) setenv("FOLIO_CPU", saved->text, 1);
    else unsetenv("FOLIO_CPU");
}

/* A name in the desc wins over the environment, the environment over the machine's best. */
TEST(levels, chosen_by_name_and_environment)
{
    saved_cap before = save_cap();
    folio_context_desc d = {.struct_size = sizeof d, .backend = "cpu", .num_threads = 1};
    folio_context *ctx = NULL;
    unsetenv("FOLIO_CPU");
    const char *best = level_of(&d, &ctx);
    CHECK(strcmp(best, folioi_cpu_table(NULL)->level) == 0);
    folio_context_destroy(ctx);
    setenv("FOLIO_CPU", "scalar", 1);
    CHECK(strcmp(level_of(&d, &ctx), "scalar") == 0);
    folio_context_destroy(ctx);
    d.level = best;
    CHECK(strcmp(level_of(&d, &ctx), best) == 0);
    folio_context_destroy(ctx);
    d.level = NULL;
    setenv("FOLIO_CPU", "", 1);
    CHECK(strcmp(level_of(&d, &ctx), best) == 0);
    folio_context_destroy(ctx);
    restore_cap(&before);
}

/* A cap that names no level is refused, never passed by on the way to another backend. */
TEST(levels, an_environment_that_names_none_is_refused)
{
    static const char *const wrong[] = {
        "sse9",
        "SCALAR",
        "scalar ",
        " scalar",
        "scala",
        "double",
#if defined(__x86_64__)
        "neon"
#else
        "avx2"
#endif
    };
    static const char *const backends[] = {NULL, "auto", "cpu"};
    saved_cap before = save_cap();
    for (int i = 0; i < 3 * (int)(sizeof wrong / sizeof wrong[0]); i++) {
        folio_context_desc d = {.struct_size = sizeof d, .backend = backends[i % 3]};
        folio_context *ctx = NOWHERE;
        char said[96];
        setenv("FOLIO_CPU", wrong[i / 3], 1);
        snprintf(said, sizeof said, "FOLIO_CPU: level \"%s\" is unknown; there are scalar",
                 wrong[i / 3]);
        REFUSED(folio_context_create(&d, &ctx), FOLIO_ERR_ARGUMENT, said);
        CHECK(ctx == NULL);
        for (int k = 0; folioi_cpu_level_names[k] != NULL; k++)
            CHECK(strstr(folio_last_error(), folioi_cpu_level_names[k]) != NULL);
    }
    folio_backend_info info = {.struct_size = sizeof info};
    CHECK_OK(folio_backend_get_info("cpu", &info));
    CHECK(strcmp(info.level, "") == 0);
    /* Who names a level, or another backend, does not ask the environment. */
    folio_context *ctx = NULL;
    folio_context_desc d = {.struct_size = sizeof d, .backend = "cpu", .level = "scalar"};
    CHECK(strcmp(level_of(&d, &ctx), "scalar") == 0);
    folio_context_destroy(ctx);
    d = (folio_context_desc){.struct_size = sizeof d, .backend = "reference"};
    CHECK(strcmp(level_of(&d, &ctx), "double") == 0);
    folio_context_destroy(ctx);
    restore_cap(&before);
}

/* A level that this machine lacks is a cap: the best one up to it runs. */
TEST(levels, an_environment_names_a_cap)
{
    saved_cap before = save_cap();
    for (int i = 0; folioi_cpu_level_names[i] != NULL; i++) {
        folio_context_desc d = {.struct_size = sizeof d, .num_threads = 1};
        folio_context *ctx = NULL;
        folio_backend_info info = {.struct_size = sizeof info};
        setenv("FOLIO_CPU", folioi_cpu_level_names[i], 1);
        const char *want = folioi_cpu_table(folioi_cpu_level_names[i])->level;
        CHECK(strcmp(level_of(&d, &ctx), want) == 0);
        CHECK_OK(folio_backend_get_info("cpu", &info));
        CHECK(strcmp(info.level, want) == 0);
        folio_context_destroy(ctx);
    }
    restore_cap(&before);
}
