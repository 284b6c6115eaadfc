/* test_main.c: runs the registered tests and ends with a count; a run of none is a failure. */
#include "test.h"

#include <stdarg.h>
#include <stdlib.h>
#include <time.h>

typedef struct {
    const char *suite, *name;
    test_fn fn;
    bool long_only;
} test_entry;

static test_entry entries[2048];
static int num_entries;
static int failures;
static bool skipping;
static bool run_long;

void test_register(const char *suite, const char *name, test_fn fn, bool long_only)
{
    if (num_entries == (int)(sizeof entries / sizeof entries[0])) abort();
    entries[num_entries++] = (test_entry){suite, name, fn, long_only};
}

void test_fail(const char *file, int line, const char *format, ...)
{
    /* The first failures say what is wrong; a loop's thousandth adds nothing. */
    if (++failures > 8) return;
    printf("  %s:%d: ", file, line);
    va_list args;
    va_start(args, format);
    vprintf(format, args);
    va_end(args);
    printf("\n");
}

int test_failures(void) { return failures; }

void test_skip(const char *why)
{
    printf("  skipped: %s\n", why);
    skipping = true;
}

bool test_is_long(void) { return run_long; }

static int by_name(const void *a, const void *b)
{
    const test_entry *x = a, *y = b;
    int c = strcmp(x->suite, y->suite);
    return c ? c : strcmp(x->name, y->name);
}

static bool selected(const test_entry *e, int argc, char **argv)
{
    bool any = false;
    char full[256];
    snprintf(full, sizeof full, "%s.%s", e->suite, e->name);
    for (int i = 1; i < argc; i++) {
        if (argv[i][0] == '-') continue;
        any = true;
        if (strcmp(argv[i], e->suite) == 0 || strcmp(argv[i], full) == 0) return true;
    }
    return !any;
}

int main(int argc, char **argv)
{
    bool list = false, fail_fast = false;
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], "--list") == 0) list = true;
        else if (strcmp(argv[i], "--long") == 0) run_long = true;
        else if (strcmp(argv[i], "--fail-fast") == 0) fail_fast = true;
        else if (argv[i][0] == '-') {
            fprintf(stderr,
                    "usage: folio_tests [--list] [--long] [--fail-fast] [suite[.name]]...\n");
            return 2;
        }
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    qsort(entries, (size_t)num_entries, sizeof entries[0], by_name);
    int passed = 0, failed = 0, skipped = 0;
    for (int i = 0; i < num_entries; i++) {
        const test_entry *e = &entries[i];
        if (!selected(e, argc, argv) || (e->long_only && !run_long && !list)) continue;
        if (list) {
            printf("%s.%s\n", e->suite, e->name);
            passed++;
            continue;
        }
        failures = 0;
        skipping = false;
        struct timespec t0, t1;
        clock_gettime(CLOCK_MONOTONIC, &t0);
        e->fn();
        clock_gettime(CLOCK_MONOTONIC, &t1);
        double s = (double)(t1.tv_sec - t0.tv_sec) + 1e-9 * (double)(t1.tv_nsec - t0.tv_nsec);
        const char *verdict = failures ? "FAIL" : skipping ? "skip" : "ok  ";
        printf("%s %s.%s (%.2f s)\n", verdict, e->suite, e->name, s);
        if (failures) failed++;
        else if (skipping) skipped++;
        else passed++;
        if (failures && fail_fast) break;
    }
    if (list) return 0;
    printf("%d passed, %d failed\n", passed, failed);
    if (passed + failed + skipped == 0) printf("no test was selected\n");
    return failed > 0 || passed + skipped == 0;
}
