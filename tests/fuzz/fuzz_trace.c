/*
 * fuzz_trace.c: JSON documents and traces: any text, and texts that are made by their grammars, which must be read,
 * with the counts that were written.
 */

#include "fuzz/fuzz.h"
#include "replay/replay_trace.h"

#include <stdarg.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

const char fuzz_name[] = "trace";

typedef struct text {
    char *data;
    size_t size, room;
} text;

__attribute__((format(printf, 2, 3))) static void print(text *t, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(t->data + t->size, t->room - t->size, format, args);
    va_end(args);
    t->size += t->room - t->size > (size_t)n ? (size_t)n : t->room - t->size - 1;
}

static bool has_room(const text *t) { return t->room - t->size > 512; }

/* The rest of the input as text: what no grammar would say. */
static text rest(fuzz_input *in)
{
    text t = {.data = fuzz_zeros(in, (int64_t)in->left + 1, 1), .size = in->left};
    if (in->left > 0) memcpy(t.data, in->at, in->left);
    in->left = 0;
    return t;
}

static void print_string(fuzz_input *in, text *t)
{
    static const char *const parts[] = {"a", "\\n", "\\\"",    "\\u00e9", "\\ud83d\\ude00",
                                        " ", "\\/", "\xc3\xa9"};
    print(t, "\"");
    for (int64_t n = fuzz_int(in, 0, 4); n > 0; n--) print(t, "%s", FUZZ_PICK(in, parts));
    print(t, "\"");
}

static bool one_line; /* a request has no line breaks */

static void print_value(fuzz_input *in, text *t, int depth)
{
    static const char *const words[] = {
        "null", "true", "false", "0", "-1.5e3", "1E-2", "12345678901234567890", "-0"};
    int64_t kind = fuzz_int(in, 0, 9), n = fuzz_int(in, 0, 4);
    if (kind < 4 || depth == 0 || !has_room(t)) {
        print(t, "%s", FUZZ_PICK(in, words));
        return;
    }
    if (kind < 6) {
        print_string(in, t);
        return;
    }
    bool object = kind < 8;
    print(t, object ? "{" : "[");
    for (int64_t i = 0; i < n; i++) {
        if (i > 0) print(t, fuzz_chance(in, 4) ? one_line ? " , " : " ,\n" : ",");
        if (object) print_string(in, t), print(t, ": ");
        print_value(in, t, depth - 1);
    }
    print(t, object ? "}" : "]");
}

/* All of a tree, and each member by its name. */
static int64_t walk(const json_value *v)
{
    int64_t count = 1;
    for (const json_value *m = v->first; m; m = m->next) {
        FUZZ_CHECK(m->line >= 1 && m->column >= 1, "line %lld, column %lld", (long long)m->line,
                   (long long)m->column);
        if (v->kind == JSON_OBJECT) {
            FUZZ_CHECK(json_member(v, m->key) != NULL, "a member without its name");
            count += (int64_t)strlen(json_text(v, m->key));
        }
        count += walk(m);
    }
    return count;
}

static bool read_document(const char *document)
{
    json_error error = {""};
    json_value *v = json_read(document, 1, &error);
    fuzz_took(FOLIO_OK);
    FUZZ_CHECK(v != NULL || error.text[0] != '\0', "refused without a sentence");
    if (v != NULL) walk(v);
    json_free(v);
    return v != NULL;
}

/* Requests of a text; false: refused. */
static bool read_trace(const text *t, int64_t hash_block, replay_trace *trace)
{
    static int fd = -1;
    static char path[64];
    json_error error = {""};
    if (fd < 0) fd = memfd_create("trace", MFD_CLOEXEC);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    if (fd < 0 || ftruncate(fd, 0) != 0 || pwrite(fd, t->data, t->size, 0) != (ssize_t)t->size)
        abort();
    bool ok = replay_trace_read(trace, path, 1000, hash_block, &error);
    fuzz_took(FOLIO_OK);
    FUZZ_CHECK(ok || error.text[0] != '\0', "refused without a sentence");
    for (int64_t i = 0; ok && i < trace->num_requests; i++) {
        const replay_request *r = &trace->requests[i];
        FUZZ_CHECK(r->arrival >= 0 && r->prompt_len >= 1 && r->output_len >= 1, "request %lld",
                   (long long)i);
        replay_token(trace, r, 0);
        replay_token(trace, r, r->prompt_len - 1);
        replay_token(trace, r, r->prompt_len);
    }
    return ok;
}

static void print_json_request(fuzz_input *in, text *t, int64_t prompt, int64_t output,
                               int64_t hash_block)
{
    print(t, "{\"timestamp\": %lld, \"input_length\": %lld, \"output_length\": %lld",
          (long long)fuzz_int(in, 0, 9999), (long long)prompt, (long long)output);
    if (fuzz_chance(in, 2)) {
        print(t, ", \"hash_ids\": [");
        for (int64_t i = 0; i < (prompt + hash_block - 1) / hash_block; i++)
            print(t, "%s%lld", i > 0 ? "," : "", (long long)fuzz_int(in, 0, 300));
        print(t, "]");
    }
    if (fuzz_chance(in, 4)) print(t, ", \"other\": "), print_value(in, t, 2);
    print(t, "}\n");
}

static void print_csv_request(fuzz_input *in, text *t, int64_t prompt, int64_t output)
{
    if (fuzz_chance(in, 2)) print(t, "%lld.25", (long long)fuzz_int(in, 0, 9999));
    else
        print(t, "2023-%02d-%02d 18:%02d:46.5%s", (int)fuzz_int(in, 1, 12),
              (int)fuzz_int(in, 1, 28), (int)fuzz_int(in, 0, 59),
              fuzz_chance(in, 3) ? "+01:30" : "");
    print(t, ", %lld ,\"a,b\", %lld.0\n", (long long)prompt, (long long)output);
}

static void made_trace(fuzz_input *in, text *t)
{
    replay_trace trace;
    bool json = fuzz_chance(in, 2);
    int64_t hash_block = fuzz_int(in, 1, 64), n = fuzz_int(in, 1, 8), prompts = 0, outputs = 0,
            made = 0;
    if (!json) print(t, "arrival,prompt,other,output\r\n");
    for (int64_t i = 0; i < n && has_room(t); i++, made++) {
        int64_t prompt = fuzz_int(in, 1, 40 * hash_block), output = fuzz_int(in, 1, 400);
        prompts += prompt;
        outputs += output;
        if (json) print_json_request(in, t, prompt, output, hash_block);
        else print_csv_request(in, t, prompt, output);
        if (fuzz_chance(in, 6)) print(t, " \n");
    }
    if (!has_room(t)) return; /* cut */
    FUZZ_CHECK(read_trace(t, hash_block, &trace), "a trace is refused:\n%s", t->data);
    FUZZ_CHECK(trace.num_requests == made && trace.prompt_tokens == prompts &&
                   trace.output_tokens == outputs,
               "%lld requests of %lld and %lld tokens; written were %lld, %lld, %lld",
               (long long)trace.num_requests, (long long)trace.prompt_tokens,
               (long long)trace.output_tokens, (long long)made, (long long)prompts,
               (long long)outputs);
    replay_trace_free(&trace);
}

void fuzz_run(fuzz_input *in)
{
    replay_trace trace;
    int64_t how = fuzz_int(in, 0, 7);
    if (how == 0) {
        read_document(rest(in).data);
    } else if (how == 1) {
        int64_t hash_block = fuzz_int(in, 1, 512);
        text t = rest(in);
        if (read_trace(&t, hash_block, &trace)) replay_trace_free(&trace);
    } else {
        enum { ROOM = 16384 };
        text t = {.data = fuzz_zeros(in, ROOM, 1), .room = ROOM};
        one_line = how >= 4;
        if (how < 4) {
            print_value(in, &t, 8);
            FUZZ_CHECK(!has_room(&t) || read_document(t.data), "JSON is refused: %s", t.data);
        } else made_trace(in, &t);
    }
}
