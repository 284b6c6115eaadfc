/* cpu_levels.c: instruction-set levels, which of them this machine has, and their function tables. */
#include "backends/cpu/cpu_kernels.h"

#include <pthread.h>
#include <string.h>
#if defined(__x86_64__)
#include <cpuid.h>
#endif

static const struct {
    bool (*present)(void), (*wanted)(void);
    void (*fill)(folioi_cpu_kernels *table);
} levels[] = {
#define X(level) {folioi_cpu_has_##level, folioi_cpu_wants_##level, folioi_cpu_fill_##level},
    FOLIOI_CPU_LEVELS(X)
#undef X
};
enum { NUM_LEVELS = sizeof levels / sizeof levels[0] };

const char *const folioi_cpu_level_names[NUM_LEVELS + 1] = {
#define X(level) #level,
    FOLIOI_CPU_LEVELS(X)
#undef X
        NULL};

static folioi_cpu_kernels tables[NUM_LEVELS];
static pthread_once_t tables_once = PTHREAD_ONCE_INIT;

/*
 * Where few rows fetch what they read next. One Zen 5 core reads 29 GB/s with lines fetched to L1 and less through L2. A
 * Zen 4 core has 24 lines under way in L1, 12 GB/s at its memory's latency, and reads 20 GB/s through L2, which waits for
 * more of them. Other CPUs have
 * fewer lines under way in L1 than in L2 too.
 */
static bool has_deep_l1(void)
{
#if defined(__x86_64__)
    unsigned a, b, c, d;
    if (!__builtin_cpu_is("amd") || !__get_cpuid(1, &a, &b, &c, &d)) return false;
    return (a >> 8 & 0xf) + (a >> 20 & 0xff) >= 0x1a; /* the family: Zen 5 */
#else
    return false;
#endif
}

/* Each level's fill overrides what the ones below it put in the table. It is compiled for its level: a machine
 * that lacks the level may not even run that. */
static void fill_tables(void)
{
    for (int i = 0; i < NUM_LEVELS; i++) {
        for (int k = 0; k <= i; k++)
            if (levels[k].present()) levels[k].fill(&tables[i]);
        tables[i].deep_l1 = has_deep_l1();
    }
}

const folioi_cpu_kernels *folioi_cpu_table(const char *cap)
{
    pthread_once(&tables_once, fill_tables);
    const folioi_cpu_kernels *best = NULL;
    for (int i = 0; i < NUM_LEVELS; i++) {
        bool asked = cap != NULL && strcmp(cap, folioi_cpu_level_names[i]) == 0;
        if (levels[i].present() && (asked || levels[i].wanted())) best = &tables[i];
        if (asked) return best;
    }
    return cap == NULL ? best : NULL;
}

static const struct {
    folio_dtype kv;
    bool bf16_queries;
} instances[FOLIOI_NUM_ATTEND] = {
#define X(name, kv, bf16_queries) {kv, bf16_queries},
#include "backends/cpu/attend_instances.def"
#undef X
};

enum folioi_attend_instance folioi_attend_choose(const folio_attention_desc *a, bool pairs)
{
    int best = 0; /* lines for bf16 queries come last */
    for (int i = 0; i < FOLIOI_NUM_ATTEND; i++)
        if (instances[i].kv == a->kv_dtype &&
            (!instances[i].bf16_queries || (pairs && a->dtype == FOLIO_BF16)))
            best = i;
    return (enum folioi_attend_instance)best;
}

bool folioi_cpu_get_kernel(const folio_context *ctx, int32_t index, folio_context_kernel *info)
{
    const folioi_cpu_kernels *kernels = ctx->kernels;
    if (index >= FOLIOI_NUM_ATTEND) return false;
    *info = (folio_context_kernel){.name = kernels->attend[index].name,
                                   .dtype = instances[index].bf16_queries ? FOLIO_BF16 : FOLIO_F32,
                                   .kv_dtype = instances[index].kv,
                                   .head_size = 128,
                                   .v_head_size = 128,
                                   .min_rows = 1};
    return true;
}
