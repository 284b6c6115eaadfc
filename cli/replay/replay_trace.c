/* replay_trace.c: requests and the identity of their tokens; see replay_trace.h. */
#define _GNU_SOURCE /* getline */
#include "replay/replay_trace.h"

#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void *replay_alloc(int64_t count, size_t size)
{
    void *memory = calloc(count > 0 ? (size_t)count : 1, size);
    if (memory == NULL) {
        fprintf(stderr, "folio replay: out of memory\n");
        exit(EXIT_FAILURE);
    }
    return memory;
}

/* ---- Requests */

/* Of a request's own tokens; odd, so that they are far from those of hash ids. */
static const uint64_t OWN = 0xa0761d6478bd642fu;

uint64_t replay_token(const replay_trace *t, const replay_request *r, int64_t position)
{
    if (position < r->prompt_len && r->num_chain > 0)
        return kit_mix(r->chain[position / t->hash_block] ^ (uint64_t)(position % t->hash_block));
    return kit_mix(kit_mix(OWN ^ (uint64_t)r->index) ^ (uint64_t)position);
}

void replay_trace_add(replay_trace *t, double arrival, int64_t prompt_len, int64_t output_len,
                      const uint64_t *hash_ids, int64_t num_ids)
{
    if (t->num_requests == t->capacity) {
        t->capacity = t->capacity > 0 ? 2 * t->capacity : 64;
        replay_request *grown = replay_alloc(t->capacity, sizeof *grown);
        if (t->num_requests > 0)
            memcpy(grown, t->requests, (size_t)t->num_requests * sizeof *grown);
        free(t->requests);
        t->requests = grown;
    }
    replay_request *r = &t->requests[t->num_requests];
    *r = (replay_request){.index = t->num_requests++,
                          .arrival = arrival,
                          .prompt_len = prompt_len,
                          .output_len = output_len,
                          .num_chain = num_ids};
    if (num_ids > 0) r->chain = replay_alloc(num_ids, sizeof *r->chain);
    uint64_t chain = 0;
    for (int64_t i = 0; i < num_ids; i++) r->chain[i] = chain = kit_mix(chain ^ hash_ids[i]);
}

static int by_arrival(const void *a, const void *b)
{
    const replay_request *x = a, *y = b;
    if (x->arrival != y->arrival) return x->arrival < y->arrival ? -1 : 1;
    return x->index < y->index ? -1 : x->index > y->index;
}

void replay_trace_finish(replay_trace *t)
{
    if (t->num_requests == 0) return;
    qsort(t->requests, (size_t)t->num_requests, sizeof *t->requests, by_arrival);
    double first = t->requests[0].arrival;
    for (int64_t i = 0; i < t->num_requests; i++) {
        replay_request *r = &t->requests[i];
        r->index = i;
        r->arrival -= first;
        t->prompt_tokens += r->prompt_len;
        t->output_tokens += r->output_len;
        if (r->prompt_len + r->output_len > t->longest) t->longest = r->prompt_len + r->output_len;
    }
}

void replay_trace_free(replay_trace *t)
{
    for (int64_t i = 0; i < t->num_requests; i++) free(t->requests[i].chain);
    free(t->requests);
    free(t->name);
    *t = (replay_trace){0};
}

/* ---- Files */

bool replay_line_wrong(const replay_line *line, const char *at, const char *format, ...)
{
    char why[160];
    va_list args;
    va_start(args, format);
    vsnprintf(why, sizeof why, format, args);
    va_end(args);
    snprintf(line->error->text, sizeof line->error->text, "line %lld, column %lld: %s",
             (long long)line->number, (long long)(at - line->text + 1), why);
    return false;
}

bool replay_whole(double number, int64_t min, int64_t *value)
{
    if (!(number >= (double)min && number <= REPLAY_MAX_TOKENS && number == floor(number)))
        return false;
    *value = (int64_t)number;
    return true;
}

static bool is_blank(const char *s) { return s[strspn(s, " \t\r")] == '\0'; }

/* By the first line that is not blank: '{' begins JSON lines, anything else the head of a CSV. */
static bool read_lines(FILE *file, replay_trace *t, int64_t limit, json_error *error)
{
    enum { UNKNOWN, JSON, CSV } format = UNKNOWN;
    replay_columns columns = {0};
    char *text = NULL;
    size_t size = 0;
    ssize_t length;
    bool ok = true;
    for (int64_t n = 1; ok && t->num_requests < limit; n++) {
        length = getline(&text, &size, file);
        if (length < 0) break;
        replay_line line = {.text = text, .number = n, .error = error};
        if (strlen(text) < (size_t)length) {
            ok = replay_line_wrong(&line, text + strlen(text), "a zero byte: not a text file");
            break;
        }
        while (length > 0 && (text[length - 1] == '\n' || text[length - 1] == '\r'))
            text[--length] = '\0';
        if (n == 1 && strncmp(text, "\xef\xbb\xbf", 3) == 0) line.text += 3;
        if (is_blank(line.text)) continue;
        if (format == UNKNOWN && line.text[strspn(line.text, " \t")] != '{') {
            format = CSV;
            ok = replay_csv_head(&line, &columns);
            continue;
        }
        if (format == UNKNOWN) format = JSON;
        ok = format == JSON ? replay_json_line(&line, t) : replay_csv_line(&line, &columns, t);
    }
    free(text);
    return ok;
}

bool replay_trace_read(replay_trace *t, const char *path, int64_t limit, int64_t hash_block,
                       json_error *error)
{
    bool standard = strcmp(path, "-") == 0, ok = false;
    FILE *file = standard ? stdin : fopen(path, "r");
    const char *slash = strrchr(path, '/');
    *t = (replay_trace){.hash_block = hash_block};
    t->name = strdup(standard ? "standard input" : slash && slash[1] ? slash + 1 : path);
    if (file == NULL) {
        snprintf(error->text, sizeof error->text, "%s", strerror(errno));
    } else {
        ok = read_lines(file, t, limit, error);
        if (ok && ferror(file)) {
            snprintf(error->text, sizeof error->text, "it cannot be read: %s", strerror(errno));
            ok = false;
        } else if (ok && t->num_requests == 0) {
            snprintf(error->text, sizeof error->text, "there is no request in it");
            ok = false;
        }
    }
    if (file != NULL && !standard) fclose(file);
    if (ok) replay_trace_finish(t);
    else replay_trace_free(t);
    return ok;
}
