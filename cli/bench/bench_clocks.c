/* bench_clocks.c: see bench_clocks.h. NVML's few functions are declared here: its header is not needed to build. */
#include "bench/bench_clocks.h"

#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { CLOCK_OF_PROCESSORS = 1, MOST_MHZ = 8192 };
enum { IDLE = 0x1 };
static const struct timespec between = {.tv_nsec = 50 * 1000 * 1000};

static const struct {
    unsigned long long bits; /* NVML's reasons */
    const char *key, *name;
} held[BENCH_NUM_HELD] = {
    [BENCH_HELD_BY_POWER] = {0x4, "power_limit", "the power limit"},
    [BENCH_HELD_BY_TEMPERATURE] = {0x20 | 0x40, "temperature", "temperature"},
    [BENCH_HELD_BY_HARDWARE] = {0x8 | 0x80, "hardware", "a hardware slowdown"},
    [BENCH_HELD_BY_SETTING] = {0x2 | 0x10, "setting", "a clock setting"},
};

struct bench_clocks {
    void *library, *device;
    int (*shutdown)(void);
    int (*get_clock)(void *device, int which, unsigned *mhz);
    int (*get_reasons)(void *device, unsigned long long *reasons);
    pthread_t thread;
    bool is_started;
    atomic_bool must_end;
    int64_t count, held[BENCH_NUM_HELD];
    int64_t at[MOST_MHZ]; /* samples of each clock */
};

/* A function of the library; ISO C has no conversion of what dlsym gives. */
static bool find(const bench_clocks *c, const char *name, void *function)
{
    void *symbol = dlsym(c->library, name);
    memcpy(function, &symbol, sizeof symbol);
    return symbol != NULL;
}

static bool open_device(bench_clocks *c, const char *bus)
{
    int (*init)(void), (*find_device)(const char *, void **);
    if (!find(c, "nvmlInit_v2", &init) || !find(c, "nvmlShutdown", &c->shutdown) ||
        !find(c, "nvmlDeviceGetHandleByPciBusId_v2", &find_device) ||
        !find(c, "nvmlDeviceGetClockInfo", &c->get_clock) ||
        !find(c, "nvmlDeviceGetCurrentClocksThrottleReasons", &c->get_reasons))
        return false;
    if (init() != 0) return false;
    if (find_device(bus, &c->device) == 0) return true;
    (void)c->shutdown();
    return false;
}

bench_clocks *bench_clocks_open(const char *library, const char *bus)
{
    bench_clocks *c = calloc(1, sizeof *c);
    if (c == NULL) return NULL;
    c->library = dlopen(library, RTLD_NOW | RTLD_LOCAL);
    if (c->library && open_device(c, bus)) return c;
    if (c->library) (void)dlclose(c->library);
    free(c);
    return NULL;
}

void bench_clocks_sample(bench_clocks *c)
{
    unsigned mhz = 0;
    unsigned long long reasons = 0;
    if (c->get_clock(c->device, CLOCK_OF_PROCESSORS, &mhz) != 0 || mhz >= MOST_MHZ ||
        c->get_reasons(c->device, &reasons) != 0 || (reasons & IDLE))
        return;
    c->count++;
    c->at[mhz]++;
    for (int k = 0; k < BENCH_NUM_HELD; k++) c->held[k] += (reasons & held[k].bits) != 0;
}

static void *sample_until_end(void *clocks)
{
    bench_clocks *c = clocks;
    for (bench_clocks_sample(c); !atomic_load(&c->must_end); bench_clocks_sample(c))
        (void)nanosleep(&between, NULL);
    return NULL;
}

bool bench_clocks_start(bench_clocks *c)
{
    c->is_started = pthread_create(&c->thread, NULL, sample_until_end, c) == 0;
    return c->is_started;
}

static bench_clocks_stats stats_of(const bench_clocks *c)
{
    const double none = (double)NAN;
    bench_clocks_stats s = {.count = c ? c->count : 0, .median_mhz = none, .lowest_mhz = none};
    int64_t seen = 0;
    for (int mhz = 0; s.count && mhz < MOST_MHZ && isnan(s.median_mhz); mhz++) {
        seen += c->at[mhz];
        if (isnan(s.lowest_mhz) && seen) s.lowest_mhz = mhz;
        if (2 * seen >= s.count) s.median_mhz = mhz;
    }
    for (int k = 0; k < BENCH_NUM_HELD; k++)
        s.held_share[k] = s.count ? (double)c->held[k] / (double)s.count : none;
    return s;
}

void bench_clocks_close(bench_clocks *c, bench_clocks_stats *stats)
{
    if (c && c->is_started) {
        atomic_store(&c->must_end, true);
        (void)pthread_join(c->thread, NULL);
    }
    if (stats) *stats = stats_of(c);
    if (c == NULL) return;
    (void)c->shutdown();
    (void)dlclose(c->library);
    free(c);
}

const char *bench_held_key(bench_held by) { return held[by].key; }
const char *bench_held_name(bench_held by) { return held[by].name; }
