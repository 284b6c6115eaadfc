/*
 * replay_trace.h: the requests a replay serves: from a file of JSON lines or CSV, or made here.
 *
 * A token's identity is one number: what makes its K and V. Two prompts' tokens have the same
 * identity exactly as far as their leading hash ids agree; a token of an answer, or of a prompt
 * without hash ids, belongs to its request only.
 */
#ifndef FOLIO_REPLAY_TRACE_H
#define FOLIO_REPLAY_TRACE_H

#include "base/json_read.h"
#include "kit/kit.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Longest prompt and answer: a block table of more would not fit the library's 32-bit lengths. */
enum { REPLAY_MAX_TOKENS = 16 * 1024 * 1024 };

typedef struct replay_request {
    int64_t index;      /* its place in the trace, from 0                                  */
    double arrival;     /* seconds after the trace's first                                 */
    int64_t prompt_len; /* >= 1                                                            */
    int64_t output_len; /* >= 1                                                            */
    uint64_t *chain;    /* [num_chain]: entry i stands for hash ids 0 .. i together        */
    int64_t num_chain;  /* 0, or prompt_len / hash_block rounded up                        */
} replay_request;

typedef struct replay_trace {
    char *name;
    replay_request *requests; /* [num_requests], by arrival */
    int64_t num_requests, capacity;
    int64_t hash_block;                            /* tokens a hash id stands for */
    int64_t prompt_tokens, output_tokens, longest; /* sums, and the largest of prompt + output */
} replay_trace;

/*
 * Up to `limit` requests of a file ("-": standard input). False: error->text says why, with line and
 * column; nothing needs freeing.
 */
bool replay_trace_read(replay_trace *t, const char *path, int64_t limit, int64_t hash_block,
                       json_error *error);
/* The built-in one: conversations that share system prompts and grow turn by turn. */
void replay_trace_make(replay_trace *t, int64_t limit, uint64_t seed);
void replay_trace_free(replay_trace *t);

/* Appends a request; its hash ids (num_ids of them, 0: none) become its chain. */
void replay_trace_add(replay_trace *t, double arrival, int64_t prompt_len, int64_t output_len,
                      const uint64_t *hash_ids, int64_t num_ids);
/* Sorts by arrival, counts from the first, sums up. */
void replay_trace_finish(replay_trace *t);

uint64_t replay_token(const replay_trace *t, const replay_request *r, int64_t position);

/* Memory that is there, or the program ends. Zeros. */
void *replay_alloc(int64_t count, size_t size);

/* ---- The two formats (replay_json.c, replay_csv.c): one line of a file each. */

typedef struct replay_line {
    const char *text; /* without its end; terminated */
    int64_t number;   /* from 1 */
    json_error *error;
} replay_line;

/* Fills error with "line L, column C: ..."; returns false. at: a place in the line. */
bool replay_line_wrong(const replay_line *line, const char *at, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* Is this a number of tokens, from min to REPLAY_MAX_TOKENS? What is said of others: name, min and most. */
bool replay_whole(double number, int64_t min, int64_t *value);
#define REPLAY_WHOLE "%s is a whole number from %lld to %d"

/* A line's request is added to the trace. */
bool replay_json_line(const replay_line *line, replay_trace *t);

/* Which column holds what. */
typedef struct replay_columns {
    int arrival, prompt, output, count;
} replay_columns;

bool replay_csv_head(const replay_line *line, replay_columns *columns);
bool replay_csv_line(const replay_line *line, const replay_columns *columns, replay_trace *t);

#endif
