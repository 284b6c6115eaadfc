/* json_read.c: see json_read.h. Text is read as RFC 8259 has it; bytes above 127 pass as they are. */
#include "base/json_read.h"

#include <ctype.h>
#include <errno.h>
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_DEPTH = 64 };

typedef struct reader {
    const char *at, *line_start;
    int64_t line;
    json_error *error;
} reader;

/* ---- Failing */

static void *must(void *memory)
{
    if (memory == NULL) abort();
    return memory;
}

static void place(const reader *r, json_value *v)
{
    v->line = r->line;
    v->column = r->at - r->line_start + 1;
}

bool json_wrong(const json_value *at, json_error *error, const char *format, ...)
{
    int used = snprintf(error->text, sizeof error->text,
                        "line %lld, column %lld: ", (long long)at->line, (long long)at->column);
    va_list args;
    va_start(args, format);
    vsnprintf(error->text + used, sizeof error->text - (size_t)used, format, args);
    va_end(args);
    return false;
}

static bool wrong(const reader *r, const char *what)
{
    json_value here = {.kind = JSON_NULL};
    unsigned char c = (unsigned char)*r->at;
    place(r, &here);
    if (c == '\0') return json_wrong(&here, r->error, "%s expected, the text ends", what);
    if (c == '\n') return json_wrong(&here, r->error, "%s expected, the line ends", what);
    if (c < 0x20 || c > 0x7e)
        return json_wrong(&here, r->error, "%s expected, not byte %d", what, c);
    return json_wrong(&here, r->error, "%s expected, not '%c'", what, c);
}

/* ---- Tokens */

static void skip_space(reader *r)
{
    for (; *r->at == ' ' || *r->at == '\t' || *r->at == '\r' || *r->at == '\n'; r->at++) {
        if (*r->at != '\n') continue;
        r->line++;
        r->line_start = r->at + 1;
    }
}

static bool take(reader *r, char c, const char *what)
{
    skip_space(r);
    if (*r->at != c) return wrong(r, what);
    r->at++;
    return true;
}

const char *json_number_end(const char *s)
{
    if (*s == '-') s++;
    if (*s == '0') s++;
    else if (isdigit((unsigned char)*s)) s += strspn(s, "0123456789");
    else return NULL;
    if (*s == '.') {
        if (!isdigit((unsigned char)s[1])) return NULL;
        s += 1 + strspn(s + 1, "0123456789");
    }
    if (*s != 'e' && *s != 'E') return s;
    s += s[1] == '+' || s[1] == '-' ? 2 : 1;
    return isdigit((unsigned char)*s) ? s + strspn(s, "0123456789") : NULL;
}

/* Four hexadecimal digits; -1: there are not four. */
static long hex4(const char *s)
{
    char digits[5] = {0};
    for (int i = 0; i < 4; i++) {
        if (!isxdigit((unsigned char)s[i])) return -1;
        digits[i] = s[i];
    }
    return strtol(digits, NULL, 16);
}

static char *put_utf8(char *to, unsigned long code)
{
    static const unsigned char lead[] = {0, 0, 0xc0, 0xe0, 0xf0};
    int bytes = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (int i = bytes - 1; i > 0; i--, code >>= 6) to[i] = (char)(0x80 | (code & 0x3f));
    to[0] = (char)(bytes == 1 ? code : lead[bytes] | code);
    return to + bytes;
}

/* Behind a backslash. Half of a surrogate pair stands for no character: U+FFFD takes its place. */
static char *read_escape(reader *r, char *to)
{
    static const char from[] = "\"\\/bfnrt", means[] = "\"\\/\b\f\n\r\t";
    const char *known = *r->at ? strchr(from, *r->at) : NULL;
    if (known) return r->at++, *to = means[known - from], to + 1;
    long code = *r->at == 'u' ? hex4(r->at + 1) : -1;
    if (code < 0) return wrong(r, "one of \"\\/bfnrt or u and four digits"), NULL;
    r->at += 5;
    long low = code >> 10 == 0x36 && r->at[0] == '\\' && r->at[1] == 'u' ? hex4(r->at + 2) : -1;
    if (low >> 10 == 0x37) {
        r->at += 6;
        return put_utf8(to, 0x10000 + (unsigned long)(((code & 0x3ff) << 10) | (low & 0x3ff)));
    }
    return put_utf8(to, code >> 11 == 0x1b ? 0xfffd : (unsigned long)code);
}

/* A string, its memory the caller's; NULL: wrong. What it means is never longer than what is written. */
static char *read_string(reader *r, const char *what)
{
    if (!take(r, '"', what)) return NULL;
    const char *end = r->at;
    while (*end != '"' && (unsigned char)*end >= 0x20) end += *end == '\\' && end[1] ? 2 : 1;
    char *text = must(malloc((size_t)(end - r->at) + 1)), *to = text;
    while (*r->at != '"') {
        if ((unsigned char)*r->at < 0x20) wrong(r, "the end of a string, '\"',"), to = NULL;
        else if (*r->at != '\\') *to++ = *r->at++;
        else r->at++, to = read_escape(r, to);
        if (to == NULL) return free(text), NULL;
    }
    *to = '\0';
    r->at++;
    return text;
}

/* ---- Values */

static bool read_value(reader *r, json_value *v, int depth);

/* Members behind the opening bracket. */
static bool read_members(reader *r, json_value *v, int depth)
{
    bool object = v->kind == JSON_OBJECT;
    char closing = object ? '}' : ']';
    json_value **last = &v->first;
    r->at++;
    skip_space(r);
    if (*r->at == closing) return r->at++, true;
    for (;;) {
        json_value *m = *last = must(calloc(1, sizeof *m));
        last = &m->next;
        if (object && ((m->key = read_string(r, "a name in quotes")) == NULL ||
                       !take(r, ':', "':' after a name")))
            return false;
        if (!read_value(r, m, depth + 1)) return false;
        skip_space(r);
        if (*r->at == closing) return r->at++, true;
        if (!take(r, ',', object ? "',' or '}'" : "',' or ']'")) return false;
    }
}

static bool read_word(reader *r, json_value *v)
{
    static const struct {
        const char *text;
        json_kind kind;
        double number;
    } words[] = {{"null", JSON_NULL, 0}, {"true", JSON_BOOL, 1}, {"false", JSON_BOOL, 0}};
    for (int i = 0; i < 3; i++) {
        size_t length = strlen(words[i].text);
        if (strncmp(r->at, words[i].text, length) != 0) continue;
        v->kind = words[i].kind;
        v->number = words[i].number;
        r->at += length;
        return true;
    }
    return wrong(r, "a value");
}

static bool read_value(reader *r, json_value *v, int depth)
{
    skip_space(r);
    place(r, v);
    if (depth > MAX_DEPTH) return json_wrong(v, r->error, "nested too deeply");
    if (*r->at == '"') {
        v->kind = JSON_STRING;
        return (v->text = read_string(r, "a string")) != NULL;
    }
    if (*r->at == '{' || *r->at == '[') {
        v->kind = *r->at == '{' ? JSON_OBJECT : JSON_ARRAY;
        return read_members(r, v, depth);
    }
    const char *end = json_number_end(r->at);
    if (end == NULL) return read_word(r, v);
    v->kind = JSON_NUMBER;
    v->number = strtod(r->at, NULL);
    v->digits = r->at;
    r->at = end;
    return true;
}

json_value *json_read(const char *text, int64_t line, json_error *error)
{
    reader r = {.at = text, .line_start = text, .line = line, .error = error};
    json_value *v = must(calloc(1, sizeof *v));
    bool ok = read_value(&r, v, 0);
    if (ok) skip_space(&r);
    if (ok && *r.at != '\0') ok = wrong(&r, "the end of the text");
    if (ok) return v;
    json_free(v);
    return NULL;
}

/* ---- Files */

/* All of a stream, terminated; NULL: it cannot be read. */
static char *read_all(FILE *in, size_t *length)
{
    size_t capacity = 1 << 16, got;
    char *text = must(malloc(capacity));
    *length = 0;
    while ((got = fread(text + *length, 1, capacity - *length - 1, in)) > 0) {
        *length += got;
        if (*length + 1 == capacity) text = must(realloc(text, capacity *= 2));
    }
    text[*length] = '\0';
    if (!ferror(in)) return text;
    free(text);
    return NULL;
}

char *json_read_text(const char *path, json_error *error)
{
    size_t length = 0;
    bool standard = strcmp(path, "-") == 0;
    FILE *in = standard ? stdin : fopen(path, "r");
    char *text = in ? read_all(in, &length) : NULL;
    if (text == NULL)
        snprintf(error->text, sizeof error->text, "it cannot be read: %s", strerror(errno));
    if (in && !standard) fclose(in);
    if (text == NULL || strlen(text) == length) return text;
    snprintf(error->text, sizeof error->text, "it is not JSON: it contains a zero byte");
    free(text);
    return NULL;
}

void json_free(json_value *v)
{
    while (v) {
        json_value *next = v->next;
        json_free(v->first);
        free(v->key);
        free(v->text);
        free(v);
        v = next;
    }
}

/* ---- Looking up */

const json_value *json_member(const json_value *v, const char *key)
{
    if (v == NULL || v->kind != JSON_OBJECT) return NULL;
    for (const json_value *m = v->first; m; m = m->next)
        if (strcmp(m->key, key) == 0) return m;
    return NULL;
}

const char *json_text(const json_value *v, const char *key)
{
    const json_value *m = json_member(v, key);
    return m && m->kind == JSON_STRING ? m->text : "";
}

double json_real(const json_value *v, const char *key)
{
    const json_value *m = json_member(v, key);
    return m && m->kind == JSON_NUMBER ? m->number : (double)NAN;
}
