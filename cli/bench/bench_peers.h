/*
 * bench_peers.h: other programs' attention, run by the script peers/peers.py in a process of its
 * own, so that `folio bench` can alternate its repetitions with theirs.
 */
#ifndef FOLIO_BENCH_PEERS_H
#define FOLIO_BENCH_PEERS_H

#include <stdbool.h>
#include <stdint.h>

enum { BENCH_MAX_PEERS = 8 };

typedef struct bench_peers bench_peers;

/*
 * script NULL: peers/peers.py of the tree that the program lies in, or below the directory it was
 * started in. NULL: there is none, and stderr says so.
 */
bench_peers *bench_peers_open(const char *script);
void bench_peers_close(bench_peers *p);

/*
 * Start the script, again if it runs, for so many threads of the CPU or, if not NULL, for a device
 * ("cuda"). False: stderr says why.
 */
bool bench_peers_start(bench_peers *p, int32_t threads, const char *device);

/* Peers seen so far; they keep their places. */
int bench_peers_count(const bench_peers *p);
const char *bench_peers_name(const bench_peers *p, int i);
const char *bench_peers_version(const bench_peers *p, int i);

/* Offer a case, one line of JSON: runs[i] says whether peer i takes it. */
bool bench_peers_offer(bench_peers *p, const char *line, bool runs[BENCH_MAX_PEERS]);

/* What the caches hold when a run begins. */
typedef enum bench_cache {
    BENCH_COLD,  /* other numbers, read before */
    BENCH_WARM,  /* what the same run left there */
    BENCH_DIRTY, /* a GPU's: other numbers that are still to be written to memory */
} bench_cache;

/* One run of the case that was offered last. */
bool bench_peers_time(bench_peers *p, int i, bench_cache cache, double *seconds);

#endif
