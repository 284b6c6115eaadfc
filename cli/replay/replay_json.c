/*
 * replay_json.c: one line of a trace in JSON: {"timestamp": ms, "input_length": n,
 * "output_length": n, "hash_ids": [...]}. hash_ids may be missing; other members are skipped.
 */
#include "base/json_read.h"
#include "replay/replay_trace.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 64, NAME = 32 };

typedef struct reader {
    const replay_line *line;
    const char *at;
} reader;

/* What of a request was read. */
typedef struct fields {
    double timestamp;
    int64_t input, output;
    uint64_t *ids;
    int64_t num_ids, capacity;
    const char *ids_at;
    bool has_timestamp, has_input, has_output;
} fields;

static void skip_space(reader *r)
{
    while (*r->at == ' ' || *r->at == '\t') r->at++;
}

static bool wrong(const reader *r, const char *what)
{
    if (*r->at == '\0')
        return replay_line_wrong(r->line, r->at, "%s expected, the line ends", what);
    unsigned char c = (unsigned char)*r->at;
    if (c < ' ' || c > '~') /* nothing that a terminal would obey */
        return replay_line_wrong(r->line, r->at, "%s expected, not the byte 0x%02x", what, c);
    return replay_line_wrong(r->line, r->at, "%s expected, not '%c'", what, c);
}

static bool take(reader *r, char c, const char *what)
{
    skip_space(r);
    if (*r->at != c) return wrong(r, what);
    r->at++;
    return true;
}

/* A string; of its text the first bytes, escapes as they are written, go to `to`. */
static bool read_string(reader *r, char *to, size_t size, const char *what)
{
    size_t n = 0;
    if (!take(r, '"', what)) return false;
    for (; *r->at != '"'; r->at++) {
        if ((unsigned char)*r->at < 0x20) return wrong(r, "the end of a string, '\"',");
        if (n + 1 < size) to[n++] = *r->at;
        if (*r->at == '\\' && r->at[1] != '\0') r->at++;
    }
    if (size > 0) to[n] = '\0';
    r->at++;
    return true;
}

static bool read_number(reader *r, double *value)
{
    skip_space(r);
    const char *end = json_number_end(r->at);
    if (end == NULL) return wrong(r, "a number");
    *value = strtod(r->at, NULL);
    r->at = end;
    return true;
}

static bool read_timestamp(reader *r, double *ms)
{
    skip_space(r);
    const char *start = r->at;
    if (!read_number(r, ms)) return false;
    if (*ms >= -1e18 && *ms <= 1e18) return true;
    return replay_line_wrong(r->line, start, "a timestamp is milliseconds, from -1e18 to 1e18");
}

static bool read_tokens(reader *r, const char *name, int64_t min, int64_t *value)
{
    skip_space(r);
    const char *start = r->at;
    double number = 0;
    if (!read_number(r, &number)) return false;
    if (number < (double)min || number > REPLAY_MAX_TOKENS || number != (double)(int64_t)number)
        return replay_line_wrong(r->line, start, "%s is a whole number from %lld to %d", name,
                                 (long long)min, REPLAY_MAX_TOKENS);
    *value = (int64_t)number;
    return true;
}

static bool read_ids(reader *r, fields *f)
{
    skip_space(r);
    f->ids_at = r->at;
    f->num_ids = 0;
    if (!take(r, '[', "'[' of hash_ids")) return false;
    skip_space(r);
    if (*r->at == ']') return r->at++, true;
    for (;;) {
        skip_space(r);
        const char *start = r->at, *end = json_number_end(start);
        char *stop;
        if (end == NULL) return wrong(r, "a hash id");
        errno = 0;
        uint64_t id = *start == '-' ? (uint64_t)strtoll(start, &stop, 10)
                                    : (uint64_t)strtoull(start, &stop, 10);
        if (stop != end || errno != 0)
            return replay_line_wrong(r->line, start, "a hash id is a whole number of 64 bits");
        if (f->num_ids == f->capacity) {
            f->capacity = f->capacity > 0 ? 2 * f->capacity : 64;
            uint64_t *grown = replay_alloc(f->capacity, sizeof *grown);
            if (f->num_ids > 0) memcpy(grown, f->ids, (size_t)f->num_ids * sizeof *grown);
            free(f->ids);
            f->ids = grown;
        }
        f->ids[f->num_ids++] = id;
        r->at = end;
        skip_space(r);
        if (*r->at == ']') return r->at++, true;
        if (!take(r, ',', "',' or ']' after a hash id")) return false;
    }
}

static bool skip_value(reader *r, int depth);

/* An object's or array's members behind its opening bracket. */
static bool skip_members(reader *r, char closing, int depth)
{
    skip_space(r);
    if (*r->at == closing) return r->at++, true;
    for (;;) {
        if (closing == '}' &&
            (!read_string(r, NULL, 0, "a name in quotes") || !take(r, ':', "':' after a name")))
            return false;
        if (!skip_value(r, depth)) return false;
        skip_space(r);
        if (*r->at == closing) return r->at++, true;
        if (!take(r, ',', closing == '}' ? "',' or '}'" : "',' or ']'")) return false;
    }
}

static bool skip_value(reader *r, int depth)
{
    static const char *const words[] = {"true", "false", "null"};
    double number;
    skip_space(r);
    if (depth == MAX_DEPTH) return replay_line_wrong(r->line, r->at, "nested too deeply");
    if (*r->at == '"') return read_string(r, NULL, 0, "a string");
    if (*r->at == '{') return r->at++, skip_members(r, '}', depth + 1);
    if (*r->at == '[') return r->at++, skip_members(r, ']', depth + 1);
    for (int i = 0; i < 3; i++)
        if (strncmp(r->at, words[i], strlen(words[i])) == 0) return r->at += strlen(words[i]), true;
    if (json_number_end(r->at) == NULL) return wrong(r, "a value");
    return read_number(r, &number);
}

static bool read_member(reader *r, fields *f)
{
    char name[NAME];
    if (!read_string(r, name, sizeof name, "a name in quotes") || !take(r, ':', "':' after a name"))
        return false;
    if (strcmp(name, "timestamp") == 0)
        return f->has_timestamp = true, read_timestamp(r, &f->timestamp);
    if (strcmp(name, "input_length") == 0)
        return f->has_input = true, read_tokens(r, name, 1, &f->input);
    if (strcmp(name, "output_length") == 0)
        return f->has_output = true, read_tokens(r, name, 0, &f->output);
    if (strcmp(name, "hash_ids") == 0) return read_ids(r, f);
    return skip_value(r, 0);
}

static bool read_request(reader *r, fields *f, int64_t hash_block)
{
    if (!take(r, '{', "'{'")) return false;
    skip_space(r);
    while (*r->at != '}') {
        if (!read_member(r, f)) return false;
        skip_space(r);
        if (*r->at == '}') break;
        if (!take(r, ',', "',' or '}'")) return false;
        skip_space(r);
        if (*r->at == '}') return wrong(r, "a name in quotes");
    }
    const char *missing = !f->has_timestamp ? "timestamp"
                          : !f->has_input   ? "input_length"
                          : !f->has_output  ? "output_length"
                                            : NULL;
    if (missing) return replay_line_wrong(r->line, r->at, "the request has no %s", missing);
    r->at++;
    skip_space(r);
    if (*r->at != '\0') return wrong(r, "the end of the line");
    int64_t spans = (f->input + hash_block - 1) / hash_block;
    if (f->num_ids > 0 && f->num_ids != spans)
        return replay_line_wrong(
            r->line, f->ids_at,
            "%lld hash ids for %lld tokens; with %lld tokens per id (--hash-block), %lld are needed",
            (long long)f->num_ids, (long long)f->input, (long long)hash_block, (long long)spans);
    return true;
}

bool replay_json_line(const replay_line *line, replay_trace *t)
{
    reader r = {.line = line, .at = line->text};
    fields f = {0};
    bool ok = read_request(&r, &f, t->hash_block);
    if (ok)
        replay_trace_add(t, f.timestamp * 1e-3, f.input, f.output > 0 ? f.output : 1, f.ids,
                         f.num_ids);
    free(f.ids);
    return ok;
}
