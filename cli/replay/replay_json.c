/*
 * replay_json.c: one line of a trace in JSON: {"timestamp": ms, "input_length": n,
 * "output_length": n, "hash_ids": [...]}. hash_ids may be missing; other members are skipped.
 */
#include "replay/replay_trace.h"

#include <errno.h>
#include <stdlib.h>

/* A member that every request has; NULL: error says that this one has it not. */
static const json_value *required(const json_value *request, const char *name, json_error *error)
{
    const json_value *v = json_member(request, name);
    if (v == NULL) json_wrong(request, error, "the request has no %s", name);
    return v;
}

static bool read_timestamp(const json_value *request, double *ms, json_error *error)
{
    const json_value *v = required(request, "timestamp", error);
    if (v == NULL) return false;
    *ms = json_real(request, "timestamp");
    return (*ms >= -1e18 && *ms <= 1e18) ||
           json_wrong(v, error, "a timestamp is milliseconds, from -1e18 to 1e18");
}

static bool read_tokens(const json_value *request, const char *name, int64_t min, int64_t *value,
                        json_error *error)
{
    const json_value *v = required(request, name, error);
    if (v == NULL) return false;
    return replay_whole(json_real(request, name), min, value) ||
           json_wrong(v, error, REPLAY_WHOLE, name, (long long)min, REPLAY_MAX_TOKENS);
}

static bool read_id(const json_value *v, uint64_t *id, json_error *error)
{
    char *end = NULL;
    errno = 0;
    if (v->kind == JSON_NUMBER)
        *id = *v->digits == '-' ? (uint64_t)strtoll(v->digits, &end, 10)
                                : (uint64_t)strtoull(v->digits, &end, 10);
    return (end != NULL && end == json_number_end(v->digits) && errno == 0) ||
           json_wrong(v, error, "a hash id is a whole number of 64 bits");
}

/* The request's hash ids, to be freed; one for each hash_block tokens of the prompt, or none at all. */
static bool read_ids(const json_value *request, int64_t prompt, int64_t hash_block, uint64_t **ids,
                     int64_t *count, json_error *error)
{
    const json_value *list = json_member(request, "hash_ids");
    int64_t spans = (prompt + hash_block - 1) / hash_block;
    if (list == NULL) return true;
    if (list->kind != JSON_ARRAY) return json_wrong(list, error, "hash_ids is a list");
    for (const json_value *v = list->first; v; v = v->next) ++*count;
    *ids = replay_alloc(*count, sizeof **ids);
    uint64_t *to = *ids;
    for (const json_value *v = list->first; v; v = v->next)
        if (!read_id(v, to++, error)) return false;
    return *count == 0 || *count == spans ||
           json_wrong(
               list, error,
               "%lld hash ids for %lld tokens; with %lld tokens per id (--hash-block), %lld are needed",
               (long long)*count, (long long)prompt, (long long)hash_block, (long long)spans);
}

bool replay_json_line(const replay_line *line, replay_trace *t)
{
    double ms;
    int64_t prompt, output, num_ids = 0;
    uint64_t *ids = NULL;
    json_value *request = json_read(line->text, line->number, line->error);
    bool ok = request && (request->kind == JSON_OBJECT ||
                          json_wrong(request, line->error, "a request is an object"));
    ok = ok && read_timestamp(request, &ms, line->error) &&
         read_tokens(request, "input_length", 1, &prompt, line->error) &&
         read_tokens(request, "output_length", 0, &output, line->error) &&
         read_ids(request, prompt, t->hash_block, &ids, &num_ids, line->error);
    if (ok) replay_trace_add(t, ms * 1e-3, prompt, output > 0 ? output : 1, ids, num_ids);
    free(ids);
    json_free(request);
    return ok;
}
