/*
 * bench_saved.h: a run of `folio bench`, of any topic and backend, as its JSON tells it: from a file, or of the run
 * just made. What compares runs reads them here, and so never sees anything that a saved run lacks.
 */
#ifndef FOLIO_BENCH_SAVED_H
#define FOLIO_BENCH_SAVED_H

#include "base/json_read.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct saved_case {
    const json_value *of;   /* its entry in "results" */
    double seconds, spread; /* of the medians' operation; interquartile range / median */
    int64_t reps;
    const char *ceiling; /* its key; "": none */
    double ceiling_value, ceiling_spread, share;
    double
        steady; /* the same of the median of the ceiling's samples, which moves with a busy machine */
    uint64_t work, place; /* hashes of its fields of a kind: others are another's */
} saved_case;

enum { SAVED_NUM_FIELDS = 17 };

typedef struct saved_run {
    json_value *tree;
    const char *version, *cpu, *device, *topic;
    saved_case *cases;
    int num_cases;
    bool varies[SAVED_NUM_FIELDS]; /* not all cases have the first one's value */
} saved_run;

/* Takes the tree, which saved_free frees. False: error says what is missing where; nothing needs freeing. */
bool saved_from_tree(saved_run *r, json_value *tree, json_error *error);
/* False: a sentence on stderr that names the file. topic: what the run has to be of. */
bool saved_read(saved_run *r, const char *path, const char *topic);
void saved_free(saved_run *r);

/*
 * What makes a case: the work asked for, and the place it ran at (which of the backends, levels and numbers of threads;
 * of a pool threads are work).
 */
typedef struct saved_field {
    const char *key, *label; /* "head_size", "head size "                                */
    const char *usual;       /* a value that goes without saying, such as "plain"; or "" */
    bool is_place;
} saved_field;

extern const saved_field saved_fields[SAVED_NUM_FIELDS];

bool saved_is_place(const saved_run *r, const saved_field *f);
/* "" where a case has none; returns text. */
const char *saved_value(const saved_case *c, const saved_field *f, char *text, size_t size);

/*
 * What tells a case from the others besides its name: "bf16, threads 2"; usual values and sections go unsaid. The others: those of its run, and of another
 * (NULL: none) as far as work goes, or places too. Returns text.
 */
const char *saved_name(const saved_case *of, const saved_run *own, const saved_run *other,
                       bool other_places, char *text, size_t size);
/* Joins a label to a name by a comma. */
void saved_add_label(char *text, size_t size, const char *label, const char *value);

#endif
