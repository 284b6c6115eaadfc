/*
 * json_read.h: a JSON document as a tree. Values know the line and column they begin at, for those who find one
 * of them wrong.
 */
#ifndef FOLIO_JSON_READ_H
#define FOLIO_JSON_READ_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum json_kind {
    JSON_NULL,
    JSON_BOOL,
    JSON_NUMBER,
    JSON_STRING,
    JSON_ARRAY,
    JSON_OBJECT
} json_kind;

typedef struct json_value {
    json_kind kind;
    char *key;                       /* in an object; else NULL                */
    double number;                   /* of a number; of a bool 0 or 1          */
    const char *digits;              /* of a number: where it stands in the text that was read */
    char *text;                      /* of a string, escapes resolved          */
    struct json_value *first, *next; /* members of this one; the next neighbour */
    int64_t line, column;            /* from 1                                 */
} json_value;

/* "line 3, column 7: ..." or a sentence about the file. */
typedef struct json_error {
    char text[256];
} json_error;

/* The one value a text holds, which begins in that line of a file; NULL: error says why and where. The caller frees it. */
json_value *json_read(const char *text, int64_t line, json_error *error);
/* The text of a file, "-" is standard input; NULL: error says why. The caller frees it. */
char *json_read_text(const char *path, json_error *error);
void json_free(json_value *v);

/* A member of an object; NULL: v is NULL or no object, or has none of this name. */
const json_value *json_member(const json_value *v, const char *key);
/* The string under a key, "" without one; the number, NAN without one. */
const char *json_text(const json_value *v, const char *key);
double json_real(const json_value *v, const char *key);

/* Fills error with a value's place and a sentence; returns false. */
bool json_wrong(const json_value *at, json_error *error, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

/* The end of the JSON number that a text begins with; NULL: it begins with none. */
const char *json_number_end(const char *s);

#endif
