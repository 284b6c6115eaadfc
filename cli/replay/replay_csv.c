/*
 * replay_csv.c: a trace in CSV. The head names the columns: arrival (seconds, or a date and time),
 * prompt and output (tokens), or as the Azure traces have them: TIMESTAMP, ContextTokens,
 * GeneratedTokens. Other columns are skipped.
 */
#include "replay/replay_trace.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

/* One field: [start, end) without quotes and blanks; next is the following one's, or NULL. */
typedef struct field {
    const char *start, *end, *next;
} field;

static bool is_edge(char c) { return c == ' ' || c == '\t' || c == '"'; }

static field field_at(const char *s)
{
    field f = {.start = s};
    bool quoted = false;
    for (; *s != '\0' && (quoted || *s != ','); s++)
        if (*s == '"') quoted = !quoted;
    f.next = *s == ',' ? s + 1 : NULL;
    f.end = s;
    while (f.start < f.end && is_edge(*f.start)) f.start++;
    while (f.end > f.start && is_edge(f.end[-1])) f.end--;
    return f;
}

static bool is_named(const field *f, const char *const *names)
{
    for (; *names; names++)
        if (strlen(*names) == (size_t)(f->end - f->start) &&
            strncasecmp(*names, f->start, strlen(*names)) == 0)
            return true;
    return false;
}

bool replay_csv_head(const replay_line *line, replay_columns *columns)
{
    static const char *const arrival[] = {"arrival", "timestamp", NULL};
    static const char *const prompt[] = {"prompt", "input_length", "ContextTokens", NULL};
    static const char *const output[] = {"output", "output_length", "GeneratedTokens", NULL};
    *columns = (replay_columns){-1, -1, -1, 0};
    for (const char *s = line->text; s; columns->count++) {
        field f = field_at(s);
        int *which = is_named(&f, arrival)  ? &columns->arrival
                     : is_named(&f, prompt) ? &columns->prompt
                     : is_named(&f, output) ? &columns->output
                                            : NULL;
        if (which && *which >= 0) return replay_line_wrong(line, f.start, "duplicate column");
        if (which) *which = columns->count;
        s = f.next;
    }
    const char *missing = columns->arrival < 0  ? "arrival (or TIMESTAMP)"
                          : columns->prompt < 0 ? "prompt (or ContextTokens)"
                          : columns->output < 0 ? "output (or GeneratedTokens)"
                                                : NULL;
    if (missing == NULL) return true;
    return replay_line_wrong(line, line->text,
                             "neither JSON nor the header of a CSV file: there is no column %s",
                             missing);
}

/* Days from 1970-01-01 in the Gregorian calendar. */
static int64_t days_of(int64_t year, int64_t month, int64_t day)
{
    year -= month <= 2;
    int64_t era = year / 400, of_era = year - era * 400;
    int64_t of_year = (153 * (month + (month > 2 ? -3 : 9)) + 2) / 5 + day - 1;
    return era * 146097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719468;
}

/* What is behind a time: nothing, Z, or +01:30, in seconds. */
static bool read_zone(const char *s, const char *end, double *seconds)
{
    int hour, minute, used = 0;
    *seconds = 0;
    if (s == end || (*s == 'Z' && s + 1 == end)) return true;
    if (*s != '+' && *s != '-') return false;
    if (sscanf(s + 1, "%2d:%2d%n", &hour, &minute, &used) != 2 || s + 1 + used != end) return false;
    *seconds = (*s == '-' ? -60.0 : 60.0) * (hour * 60 + minute);
    return true;
}

/* Seconds, or "2023-11-16 18:15:46.680" with or without a zone. */
static bool read_arrival(const replay_line *line, const field *f, double *seconds)
{
    char *end;
    int year, month, day, hour, minute, used = 0;
    double second, zone;
    *seconds = strtod(f->start, &end);
    if (end == f->end && end > f->start && *seconds >= -1e15 && *seconds <= 1e15) return true;
    if (sscanf(f->start, "%4d-%2d-%2d%*1[ T]%2d:%2d:%lf%n", &year, &month, &day, &hour, &minute,
               &second, &used) != 6 ||
        month < 1 || month > 12 || day < 1 || day > 31 || hour < 0 || hour > 23 || minute < 0 ||
        minute > 59 || !(second >= 0 && second < 61) || !read_zone(f->start + used, f->end, &zone))
        return replay_line_wrong(line, f->start,
                                 "an arrival is seconds, or a date and time such as "
                                 "2023-11-16 18:15:46.68");
    *seconds = (double)days_of(year, month, day) * 86400.0 + hour * 3600.0 + minute * 60.0 + second;
    *seconds -= zone;
    return true;
}

static bool read_tokens(const replay_line *line, const field *f, const char *name, int64_t min,
                        int64_t *value)
{
    char *end;
    double number = strtod(f->start, &end); /* some tools write 12.0 */
    return (end == f->end && end > f->start && replay_whole(number, min, value)) ||
           replay_line_wrong(line, f->start, REPLAY_WHOLE, name, (long long)min, REPLAY_MAX_TOKENS);
}

bool replay_csv_line(const replay_line *line, const replay_columns *columns, replay_trace *t)
{
    double arrival = 0;
    int64_t prompt = 0, output = 0;
    int count = 0;
    for (const char *s = line->text; s; count++) {
        field f = field_at(s);
        if (count == columns->arrival && !read_arrival(line, &f, &arrival)) return false;
        if (count == columns->prompt && !read_tokens(line, &f, "prompt", 1, &prompt)) return false;
        if (count == columns->output && !read_tokens(line, &f, "output", 0, &output)) return false;
        s = f.next;
    }
    if (count != columns->count)
        return replay_line_wrong(line, line->text, "%d fields, but the header has %d", count,
                                 columns->count);
    replay_trace_add(t, arrival, prompt, output > 0 ? output : 1, NULL, 0);
    return true;
}
