/*
 * generation_rig.h: a toy engine over a pool, for tests from end to end. q, k and v of a token are
 * a function of layer, token id and position; the next token is a hash of the bits its last row
 * came out with, so that one wrong bit changes the whole future. What a request must compute is
 * recorded by running it alone in a fresh pool; every other way to run it is compared with that,
 * row by row. Slots that must not be read hold NaN. On a device, what calls are given lies in host
 * memory that it reaches, and everything runs on one stream.
 */
#ifndef FOLIO_TESTS_GENERATION_RIG_H
#define FOLIO_TESTS_GENERATION_RIG_H

#include "support.h"

#include <folio/folio_pool.h>

enum {
    GEN_GROUPS = 2,        /* group 0 sees all keys, group 1 a window                           */
    GEN_LAYERS = 5,        /* at most 2 a group, and one of cross attention                     */
    GEN_TOKENS = 128,      /* of one request                                                    */
    GEN_SEQS = 16,         /* of one step                                                       */
    GEN_ROWS = 256,        /* of one step                                                       */
    GEN_ENCODER_ROWS = 96, /* of one step                                                       */
    GEN_VOCABULARY = 997
};

typedef struct gen_geometry {
    const char
        *backend; /* "fake": fake_device.h. FOLIO_TESTS_BACKEND in the environment stands for all */
    int32_t block_size;
    folio_dtype kv_dtype;
    int32_t num_layer_groups; /* 1 or 2 */
    int64_t window;           /* of group 1 */
    bool encoder;             /* cross attention as well */
    bool one_memory;          /* the caches of both groups lie over each other */
    bool v_in_k;              /* latent attention: V is half of K */
} gen_geometry;

/* On the cpu in blocks of 4: one group in F32; two in INT8, one with a window of 9; BF16 and an encoder; and INT8
 * without V. */
extern const gen_geometry gen_small, gen_windowed, gen_translating, gen_quantised,
    gen_over_each_other, gen_latent;

/* A context and the attentions; several pools, one after another or at once, may use it. */
typedef struct gen_model {
    gen_geometry g;
    folio_context *ctx;
    folio_attention *attention[GEN_GROUPS + 1]; /* the last one: cross attention */
    int32_t num_layers;                         /* over all groups and the encoder */
    bool device;                                /* has memory of its own */
    folio_run run;                              /* where its calls run */
} gen_model;

/* allocator NULL: the default one. False, with a failed check, where something is refused. */
bool gen_model_open(gen_model *m, const gen_geometry *g, int32_t num_threads,
                    const folio_allocator *allocator);
void gen_model_close(gen_model *m);
const char *gen_model_name(const gen_model *m);

/* What one sequence is to compute. Rows exist for all tokens but the last. */
typedef struct gen_request {
    int64_t shared_len; /* first tokens it may share with others */
    int64_t prompt_len, len;
    int32_t tokens[GEN_TOKENS];
    uint64_t rows[GEN_TOKENS][GEN_LAYERS]; /* hashes of out and lse bits, by position and layer */
    int64_t encoder_len;
    uint64_t encoder_seed; /* names the encoder's tokens; the salt of its prefixes */
} gen_request;

/* A prompt whose first shared_len tokens are those of shared_seed. */
void gen_request_make(gen_request *r, uint64_t shared_seed, int64_t shared_len, uint64_t seed,
                      int64_t prompt_len, int64_t len);
/* Run it alone: fills in tokens and rows. */
bool gen_request_alone(gen_model *m, gen_request *r);

/* A pool with its caches. The desc's groups and cross cache are the rig's; block size too. */
typedef struct gen_pool {
    gen_model *m;
    folio_pool *pool;
    folio_kv_cache *caches[GEN_GROUPS + 1];
    void *ones, *rows; /* reached by the device: 0xFF for all blocks of a layer; a step's rows */
    folio_batch *batch[GEN_GROUPS];
    folio_plan *plan[GEN_GROUPS];
    int64_t num_blocks;
} gen_pool;

/* The largest size of a file of so many frames. */
int64_t gen_store_bytes(const gen_model *m, int64_t num_frames);
/* A name for a store's file that no other test uses; nothing is there. The caller removes it. */
void gen_store_path(char *path, size_t size);

/* Caches full of NaN, and a pool; *status (may be NULL) is folio_pool_create's: no check fails. */
bool gen_pool_open(gen_pool *p, gen_model *m, const folio_pool_desc *desc, folio_status *status);
/* The pool must be in order, with nothing held. */
void gen_pool_close(gen_pool *p);
folio_pool_stats gen_stats(gen_pool *p);
folio_sequence_info gen_info(const folio_sequence *s);
/* NaN to every free block, and to the sequences' blocks in the caches of other groups. No copy may
 * be waiting to be run. */
void gen_poison(gen_pool *p, folio_sequence *const *sequences, int64_t num_sequences);

/* One sequence of a step: what it reserved and has not committed is computed. */
typedef struct gen_item {
    folio_sequence *sequence;
    const gen_request *request;
    const int32_t *tokens; /* ids from its first token on, drafts included */
    int64_t first, n;      /* out: positions of its rows */
    uint64_t rows[GEN_ROWS / 2][GEN_LAYERS];
    int32_t next[GEN_ROWS / 2]; /* what each row says the next token is */
} gen_item;

/* Copies, poison, one forward per layer. Commits nothing. */
bool gen_step(gen_pool *p, gen_item *const *items, int64_t num_items);
/* Rows first .. first + n - 1 of the item are those of its request, next tokens too. */
bool gen_rows_right(const gen_pool *p, const gen_item *item, int64_t n);
folio_tokens gen_tokens(const gen_request *r, int64_t num_tokens);

/* Reserve, step, compare, commit, until the sequence has `len` tokens committed. The status is that
 * of the reserve or the commit, ERR_INTERNAL where a row differs. */
folio_status gen_feed(gen_pool *p, folio_sequence *s, const gen_request *r, int64_t len);
/* The same without attention: only K and V of its own slots are written, so that several threads
 * may do it at once, each with its sequence. Runs no copies. */
folio_status gen_write(gen_pool *p, folio_sequence *s, const gen_request *r, int64_t len);
/* Change one number of K in a slot of a layer of group 0. */
void gen_nudge(gen_pool *p, int32_t layer, int64_t slot);
/* The sequence's K and V, all that its next token may see, are those of its request. */
bool gen_contents_right(gen_pool *p, const folio_sequence *s, const gen_request *r);
/* Its contents are right, it generates to its end, token 39, and is destroyed. */
void gen_end(gen_pool *p, folio_sequence *s, const gen_request *r);

/* ------------------------------------------------------------------------------------- a world */

enum { GEN_REQUESTS = 4 };

/* A model with a pool, requests of 40 tokens, of which 0 and 1 share 20, and a store's name. */
typedef struct gen_world {
    gen_model m;
    gen_pool p;
    gen_request r[GEN_REQUESTS];
    char store[256];
} gen_world;

bool gen_world_model(gen_world *w, const gen_geometry *g, const folio_allocator *allocator);
/* What gen_world_pool creates: checked, of model "toy"; frames 0: without a store. */
folio_pool_desc gen_world_desc(const gen_world *w, int64_t blocks, int64_t host, int64_t frames);
bool gen_world_pool(gen_world *w, int64_t blocks, int64_t host, int64_t frames);
bool gen_world_open(gen_world *w, const gen_geometry *g, int64_t blocks, int64_t host,
                    int64_t frames);
/* Closes pool and model, removes the store's file. */
void gen_world_close(gen_world *w);

/* A test on a world that is opened with these before the body and closed after it. */
typedef void (*gen_body)(gen_world *w);
void gen_world_run(const gen_geometry *g, int64_t blocks, int64_t host, int64_t frames,
                   gen_body body);
#define GEN_TEST(suite, name, geometry, blocks, host, frames)                                      \
    static void in_world_##name(gen_world *w);                                                     \
    TEST(suite, name) { gen_world_run(&(geometry), blocks, host, frames, in_world_##name); }       \
    static void in_world_##name(gen_world *w)

/* An empty sequence with the request's salt; one with its first `len` tokens. */
folio_sequence *gen_sequence(gen_world *w, const gen_request *r);
folio_sequence *gen_filled(gen_world *w, const gen_request *r, int64_t len);
/* Match its first num_tokens; how many the sequence has then. */
int64_t gen_match(gen_world *w, folio_sequence *s, const gen_request *r, int64_t num_tokens);
/* Send cached blocks down; how many went. */
int64_t gen_lower(gen_world *w, folio_tier tier, int64_t max_blocks);
/* NaN to all free blocks: what comes back cannot have been there all the time. */
void gen_poison_free(gen_world *w);
/* A sequence is where and as long as it is said to be. */
void gen_check_at(const folio_sequence *s, folio_sequence_state state, folio_tier tier,
                  int64_t len);

#endif
