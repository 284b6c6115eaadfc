/*
 * fuzz_pool.c: the random calls of tests/pool/fuzz_calls.h, each chosen by the input: pools with all tiers against a
 * model that knows every row of K and V.
 */
#include "fuzz/fuzz.h"
#include "pool/fuzz_calls.h"

#include <unistd.h>

const char fuzz_name[] = "pool";

/* In memory where there is such a folder. */
void gen_store_path(char *path, size_t size)
{
    static const char folder[] = "/dev/shm";
    snprintf(path, size, "%s/folio-fuzz-%d.store", access(folder, W_OK) == 0 ? folder : "/tmp",
             (int)getpid());
    unlink(path);
}

static int64_t draw(void *user, int64_t n) { return fuzz_int(user, 0, n - 1); }

void fuzz_run(fuzz_input *in)
{
    uint64_t seed = (uint64_t)fuzz_int(in, 0, UINT16_MAX);
    fuzz_config c = fuzz_config_of(seed);
    fuzz_totals sum = {0};
    const fuzz_source source = {draw, in};
    if (fuzz_chance(in, 4)) c.hash_bits = (int)fuzz_int(in, 1, 4);
    else c.damage = fuzz_chance(in, 4);
    int64_t num_ops = 1 + (int64_t)in->left / 3;
    fuzz_calls_run(&c, seed, num_ops < 150 ? num_ops : 150, &source, &sum);
    fuzz_took(FOLIO_OK);
}
