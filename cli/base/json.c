/* json.c: see json.h. */
#include "base/json.h"

#include <math.h>

/* Escapes what RFC 8259 asks for; other bytes pass, so UTF-8 stays UTF-8. */
static void write_string(FILE *out, const char *s)
{
    static const char *const named[256] = {
        ['"'] = "\\\"", ['\\'] = "\\\\", ['\n'] = "\\n", ['\r'] = "\\r",
        ['\t'] = "\\t", ['\b'] = "\\b",  ['\f'] = "\\f"};
    fputc('"', out);
    for (; *s; s++) {
        unsigned char c = (unsigned char)*s;
        if (named[c]) fputs(named[c], out);
        else if (c < 0x20) fprintf(out, "\\u%04x", c);
        else fputc(c, out);
    }
    fputc('"', out);
}

static void begin_member(json *j, const char *key)
{
    if (j->depth > 0) {
        if (j->filled[j->depth - 1]) fputc(',', j->out);
        j->filled[j->depth - 1] = true;
        fprintf(j->out, "\n%*s", 2 * j->depth, "");
    }
    if (key) {
        write_string(j->out, key);
        fputs(": ", j->out);
    }
}

static void open_level(json *j, const char *key, char opening, char closing)
{
    begin_member(j, key);
    fputc(opening, j->out);
    if (j->depth == JSON_MAX_DEPTH) return;
    j->filled[j->depth] = false;
    j->closing[j->depth++] = closing;
}

void json_object(json *j, const char *key) { open_level(j, key, '{', '}'); }

void json_array(json *j, const char *key) { open_level(j, key, '[', ']'); }

void json_close(json *j)
{
    if (j->depth == 0) return;
    j->depth--;
    if (j->filled[j->depth]) fprintf(j->out, "\n%*s", 2 * j->depth, "");
    fputc(j->closing[j->depth], j->out);
    if (j->depth == 0) fputc('\n', j->out);
}

void json_string(json *j, const char *key, const char *value)
{
    begin_member(j, key);
    write_string(j->out, value);
}

void json_integer(json *j, const char *key, int64_t value)
{
    begin_member(j, key);
    fprintf(j->out, "%lld", (long long)value);
}

void json_number(json *j, const char *key, double value)
{
    begin_member(j, key);
    if (isfinite(value)) fprintf(j->out, "%.9g", value);
    else fputs("null", j->out);
}

void json_numbers(json *j, const char *key, const double *values, int64_t count)
{
    begin_member(j, key);
    fputc('[', j->out);
    for (int64_t i = 0; i < count; i++) {
        if (i > 0) fputs(", ", j->out);
        if (isfinite(values[i])) fprintf(j->out, "%.6g", values[i]);
        else fputs("null", j->out);
    }
    fputc(']', j->out);
}

void json_bool(json *j, const char *key, bool value)
{
    begin_member(j, key);
    fputs(value ? "true" : "false", j->out);
}
