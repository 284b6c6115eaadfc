/* json.h: a writer of JSON. Keys are NULL inside arrays. Numbers that JSON lacks become null. */
#ifndef FOLIO_JSON_H
#define FOLIO_JSON_H

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>

enum { JSON_MAX_DEPTH = 16 };

typedef struct json {
    FILE *out;
    int depth;
    bool filled[JSON_MAX_DEPTH]; /* has this level a member already? */
    char closing[JSON_MAX_DEPTH];
} json;

void json_object(json *j, const char *key);
void json_array(json *j, const char *key);
/* Closes the innermost object or array; the outermost ends the line. */
void json_close(json *j);
void json_string(json *j, const char *key, const char *value);
void json_integer(json *j, const char *key, int64_t value);
void json_number(json *j, const char *key, double value);
void json_bool(json *j, const char *key, bool value);
/* An array in one line, to six digits. */
void json_numbers(json *j, const char *key, const double *values, int64_t count);

#endif
