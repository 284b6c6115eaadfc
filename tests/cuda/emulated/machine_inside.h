/* machine_inside.h: what machine.cc and products.cc share. */
#ifndef FOLIO_TESTS_EMULATED_MACHINE_INSIDE_H
#define FOLIO_TESTS_EMULATED_MACHINE_INSIDE_H

#include "machine.h"

#include <setjmp.h>

#include <vector>

enum { LANES = 32, SHARED_AT = 1024 }; /* shared memory begins where the system's share ends */

struct machine_block;

/* A thread. */
struct machine_lane {
    jmp_buf context;
    machine_warp *warp;
    int index;
    bool is_done;
    int64_t issued; /* products */
    const char *waits_for;
    uint64_t key; /* what it waits for */
    uint32_t parity;
    place at;
};

/* A product that is on its way: of each lane its factors in registers. */
struct machine_issued {
    machine_product product;
    const uint32_t *a[LANES];
    uint32_t lanes; /* that issued it */
    int flight;
    place at;
};

/* Sums that products on their way add to, in place of the lanes' registers. */
struct machine_flight {
    float *registers[LANES]; /* NULL: none of this lane */
    int count;               /* numbers of a lane; 0: no flight */
    int64_t past;            /* number of the last product, plus 1 */
    alignas(64) float sums[16][256];
};

struct machine_warp {
    machine_block *block;
    int index;
    uint32_t ready; /* lanes that can run */
    int registers;
    machine_lane *lanes;
    /* a meeting */
    int num_met;
    const char *what;
    place at;
    void *given[LANES];
    /* products: those from number `first` on, of which some have been computed */
    std::vector<machine_issued> issued;
    std::vector<int64_t> groups; /* where each begins that is not awaited yet ends */
    int64_t first, num_computed;
    bool is_fenced;
    machine_flight flights[2];
    uint64_t hash; /* of all products */
};

machine_lane *machine_current(void);

/** What is wrong with a warp's products when it has ended, as they are with those of its warpgroup's first; NULL: nothing. */
const char *products_end(const machine_warp *warp, const machine_warp *first);

#endif
