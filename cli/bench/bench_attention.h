/*
 * bench_attention.h: what the files of `folio bench` share: a setting is one case with one choice
 * from each list of options, a rig is what its forward needs, a result is what was measured.
 *
 *     lists -> settings -> rigs -> results -> report
 */
#ifndef FOLIO_BENCH_ATTENTION_H
#define FOLIO_BENCH_ATTENTION_H

#include "bench/bench.h"
#include "bench/bench_bound.h"
#include "bench/bench_ceilings.h"
#include "bench/bench_clocks.h"
#include "bench/bench_device.h"
#include "bench/bench_peers.h"

#include "kit/layer.h"

#include <folio/folio_vllm06.h>

enum { MAX_KINDS = 16, MAX_NAME = 64, MAX_LIST = 32, MAX_SECTIONS = 80 };

typedef struct seq_kind {
    int64_t count, query_len, seq_len;
    int64_t up_to; /* ragged: lengths lie between seq_len and this; 0: all are seq_len */
} seq_kind;

typedef struct batch_case {
    char name[MAX_NAME];
    seq_kind kinds[MAX_KINDS];
    int num_kinds;
    int64_t seqs, rows, longest, longest_query;
    const char *phase; /* "prefill", "decode", "mixed" */
} batch_case;

typedef struct head_count {
    int32_t heads, kv_heads;
} head_count;

/* What a model may ask for beyond plain causal attention. */
typedef struct extras {
    char name[MAX_NAME]; /* "plain", "alibi+window:1024" */
    bool alibi, sinks;
    int64_t window; /* keys that a row sees, its own among them; 0: all */
    double soft_cap;
    int64_t v_size;     /* V's head size; 0: K's */
    bool latent;        /* V is the first v_size numbers of K */
    bool full;          /* rows see the keys after them too */
    bool invariant;     /* bits do not depend on the rest of the batch */
    int64_t graph;      /* layers that a captured graph runs; 0: no graph, one layer */
    bool one_by_one;    /* the graph's forwards without the graph */
    bool rotary;        /* q and new keys rotate in the forward; k and v are given and stored */
    bool stores;        /* k and v are given and stored */
    bool ancestors;     /* the same beside the interface of vLLM 0.6 */
    bool private_slots; /* the same with FOLIO_PLAN_PRIVATE_SLOTS */
    bool note;          /* bad writes are noted; the plain form is the same without */
    bool pass;          /* q and new keys rotate before the forward, in a pass of its own */
} extras;

/* One way to run one case. */
extern const char *const bench_cache_names[]; /* by bench_cache */

typedef struct setting {
    const batch_case *what;
    folio_dtype dtype, kv_dtype;
    head_count heads;
    int32_t head_size, block_size;
    folio_layout layout;
    const extras *with;
    bench_cache cache; /* what the processor's caches hold before */
    int32_t threads;   /* 0: one per processor */
    const char *level; /* NULL: the best */
} setting;

typedef struct lists lists;

/* Interfaces of folio_vllm06.h that run beside the native interface. */
typedef enum bench_ancestor {
    BENCH_XFORMERS, /* forward of a backend */
    BENCH_TORCH_SDPA,
    BENCH_IPEX,
    BENCH_PAGED_V1, /* an operator: decodes only, nothing is stored */
    BENCH_PAGED_V2,
    BENCH_NUM_ANCESTORS
} bench_ancestor;

typedef struct result {
    setting of;
    const lists *in;
    int64_t reps;
    char kernel[MAX_NAME], level[MAX_NAME];
    int32_t threads;
    bench_stats seconds;
    double gflops, gbps;
    int ceiling; /* a bench_ceiling; -1: none */
    bench_bound bound;
    bench_bound pieces; /* GB/s where only the same pieces are read: decodes on the CPU */
    double pieces_one;  /* the same by one thread, the best sample */
    bool cached;        /* K and V came from the processor's caches: reading memory is no ceiling */
    /* Medians of what alternated with it; NAN: did not. */
    double prefill_s, decode_s; /* the phases of a mixed batch, each alone */
    double plain_s, plain_work; /* the same without extras; its multiply-adds over this one's */
    double pass_s;              /* of a rotary forward: with a separate pass instead */
    double pass_bytes_s;        /* what that pass's bytes take where memory is read */
    double read_s;              /* of its K and V, read plainly and no more: decodes on a device */
    bench_stats ancestors[BENCH_NUM_ANCESTORS];
    bench_stats peers[BENCH_MAX_PEERS];
} result;

typedef struct level_name {
    char text[MAX_NAME];
} level_name;

/* All options; lists are crossed. */
struct lists {
    char name[MAX_NAME]; /* of the section; "": there is but one */
    batch_case cases[MAX_LIST];
    folio_dtype dtypes[MAX_LIST], kv_dtypes[MAX_LIST]; /* kv 0: as dtype */
    head_count heads[MAX_LIST];
    int64_t head_sizes[MAX_LIST], block_sizes[MAX_LIST];
    folio_layout layouts[MAX_LIST];
    extras options[MAX_LIST];
    bench_cache caches[MAX_LIST];
    int64_t threads[MAX_LIST];
    level_name levels[MAX_LIST];
    int num_cases, num_dtypes, num_kv_dtypes, num_heads, num_head_sizes, num_block_sizes,
        num_layouts, num_options, num_caches, num_threads, num_levels;
};

typedef struct bench {
    const char *backend; /* "cpu", "cuda" */
    lists sections[MAX_SECTIONS];
    int num_sections;
    int64_t reps, seed; /* reps: at most; slow cases on a device have fewer */
    bench_after after;
    bench_device *device; /* NULL: the CPU */
    char device_name[128];
    double clock_mhz;     /* of the device under load; NAN: not measured */
    bench_clocks *clocks; /* NULL: the CPU, or the driver has no NVML */
    bench_clocks_stats clock_samples;
    bench_peers *peers;        /* NULL: not asked for */
    folio_vllm06_state *state; /* it owns the context */
    folio_context *ctx;
    folio_context_info info;
    const char *noted; /* the last level of which stderr says that another one runs */
    bench_ceilings *ceilings;
    double *samples[BENCH_NUM_CEILINGS]; /* [total] */
    /* Over the whole run: the best sample or case, and the median of a context's samples, the highest of them. */
    double machine[BENCH_NUM_CEILINGS], medians[BENCH_NUM_CEILINGS]; /* NAN: none */
    bool by_case[BENCH_NUM_CEILINGS];                                /* the best was a case */
    double started;
    int64_t done, total;  /* repetitions */
    int64_t at, settings; /* the setting that runs, from 1; all of them */
    result *results;
    int64_t num_results;
} bench;

/* ---- bench_attention_lists.c */

/* The lists as given; NULL: the default, which is what a setting has with 0 there. */
typedef struct list_texts {
    const char *cases, *dtypes, *kv_dtypes, *heads, *head_sizes, *block_sizes, *layouts, *options,
        *cache, *threads, *levels;
} list_texts;

/* False: a sentence on stderr. */
bool bench_parse_lists(lists *to, const list_texts *texts);

/* The length of sequence i of a kind. */
int64_t bench_seq_len(const seq_kind *g, int64_t i);

/* Number of settings, and number i of them; threads and level change slowest, the layout fastest. */
int64_t bench_num_settings(const lists *of);
setting bench_nth_setting(const lists *of, int64_t i);

/* The prefills or the decodes of a batch alone. */
batch_case bench_phase_of(const batch_case *c, bool decode);

/* ---- bench_attention_sections.c */

/*
 * Fills b->sections by backend and options: `names` of sections ("a,b"; NULL: not asked for), and the lists of
 * the command line, which replace those of every section. False: a sentence on stderr.
 */
bool bench_choose_sections(bench *b, const char *names, const list_texts *given);

/* To stdout, for --help. */
void bench_print_sections(void);

/* ---- bench_attention_rig.c */

typedef struct rig {
    setting of;
    folio_context *ctx;
    bench_device *device; /* NULL: the CPU */
    bench_graph *graph;   /* NULL: none */
    int64_t layers;
    kit_layer l;
    int32_t *blocks; /* [num_blocks], shuffled: the block tables, one after another */
    int64_t num_blocks;
    /* Memory of the context. */
    void *q, *out;         /* [rows][heads][head_size] */
    size_t q_bytes;        /* of either */
    float *slopes, *sinks; /* [heads]; NULL: none */
    void *k, *v;           /* [rows][kv_heads][head_size]; NULL: all keys are in the cache */
    size_t kv_bytes;       /* of either */
    folio_rotary *rotary;
    void *q_rotated, *k_rotated; /* of a separate pass */
    float *table;                /* its cosines and sines, [longest][head_size] */
    int32_t num_threads;
} rig;

/*
 * device NULL: the CPU. False: a call failed, and stderr says which. The rig is to be closed
 * either way.
 */
bool bench_rig_open(rig *r, folio_context *ctx, bench_device *device, const setting *s,
                    int64_t seed);
bool bench_rig_forward(const rig *r, double *seconds);
/* What a forward runs. */
bool bench_rig_kernel(const rig *r, folio_plan_info *info);

/* Fills another cache of the rig's shape with the numbers of its own; on a device with any numbers. */
bool bench_rig_fill(const rig *r, folio_kv_cache *cache, int64_t seed);

/* The seconds of a call, by the host's clock; on a device those of its so many launches. launches 0: the call waits for
 * its end, and the host's clock serves there too. False: the call failed. */
bool bench_rig_time(const rig *r, int64_t launches, bool (*call)(const void *, const folio_run *),
                    const void *state, double *seconds);

void bench_rig_close(rig *r);

/* The first dim that rotates, and all from there on: of latents those behind V. */
int32_t bench_first_rotated(const setting *s);

/* The head size of V. */
int32_t bench_v_size(const setting *s);

/* Floating-point operations of a forward, and the bytes of K and V that it has to read. */
double bench_flops(const setting *s);
double bench_kv_bytes(const setting *s);

/* ---- bench_rotate.c */

/* q and k in a pass before the forward, at the positions of the batch. */
bool bench_rotate(const rig *r);

/* ---- bench_ancestors.c */

typedef struct bench_ancestors bench_ancestors;

/* Over the batch and the inputs of a rig, which must outlive it; state is the one of the rig's context. NULL: a call
 * failed, and stderr says which. */
bench_ancestors *bench_ancestors_open(const rig *r, folio_vllm06_state *state, int64_t seed);
void bench_ancestors_close(bench_ancestors *a);
bool bench_ancestors_run(const bench_ancestors *a, bench_ancestor which, double *seconds);

const char *bench_ancestor_name(bench_ancestor which);
/* Does it run this setting? Does it store k and v? */
bool bench_ancestor_takes(bench_ancestor which, const setting *s);
bool bench_ancestor_stores(bench_ancestor which);

/* ---- bench_pieces.c */

typedef struct bench_pieces bench_pieces;

/* What a decode over the rig's cache reads, in the order of so many threads. NULL: not a decode on the CPU over a
 * native cache. The rig must outlive it. */
bench_pieces *bench_pieces_open(const rig *r, int32_t threads);
void bench_pieces_close(bench_pieces *p);

/* The seconds in which so many threads only read it. */
double bench_pieces_read(bench_pieces *p, int32_t threads);

/* Has peer k a result? */
bool bench_peer_ran(const bench *b, int k);

/* ---- bench_attention_help.c, to stdout */

void bench_attention_help(void);

/* ---- bench_attention_report.c */

extern const bench_format bench_attention_format; /* of a bench */

#endif
