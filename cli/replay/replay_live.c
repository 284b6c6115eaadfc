/*
 * replay_live.c: a replay's live display; see replay_live.h.
 *
 *     ▓▓▓▓▓██▓▓▓▓▓▓▓▓▓▓▓▓▓░░░░░░░░░░····      a glyph per block, or for several: what most of them are
 *     ▓ used 812  █ shared 64  ...            how many blocks are what
 *     running 12  waiting 84  ...
 *     tokens/s: prefill 28220, ...
 *     [#######.................] 34 of 128  12345 tokens/s, 3 s left
 */
#include "replay/replay_live.h"

#include "base/term.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

enum {
    MAP_LINES = 8,
    MAP_COLUMNS = 160,
    OTHER_LINES = 4 /* of the display, besides the map */
};

typedef struct kind {
    folio_block_state state;
    const char *name, *ascii, *utf8;
    term_colour colour;
} kind;

/* The more it holds, the later: where a glyph's blocks are equally many of two, the later is shown. */
static const kind kinds[] = {
    {FOLIO_BLOCK_FREE, "free", ".", "·", TERM_DIM},
    {FOLIO_BLOCK_CACHED, "cached", "-", "░", TERM_CYAN},
    {FOLIO_BLOCK_USED, "used", "o", "▓", TERM_GREEN},
    {FOLIO_BLOCK_SHARED, "shared", "#", "█", TERM_MAGENTA},
};
enum { NUM_KINDS = sizeof kinds / sizeof kinds[0] };

/* The display's text, as it grows. */
typedef struct page {
    char text[(MAP_LINES * MAP_COLUMNS + MAP_COLUMNS) * 16];
    size_t length;
} page;

static void add(page *p, const char *format, ...) __attribute__((format(printf, 2, 3)));

static void add(page *p, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    int n = vsnprintf(p->text + p->length, sizeof p->text - p->length, format, args);
    va_end(args);
    if (n > 0) p->length += (size_t)n;
    if (p->length >= sizeof p->text) p->length = sizeof p->text - 1;
}

/* ---- The map */

/* Does the terminal show more than ASCII? */
static bool is_utf8(void)
{
    static const char *const names[] = {"LC_ALL", "LC_CTYPE", "LANG"};
    const char *value = NULL;
    for (int i = 0; i < 3 && (value == NULL || *value == '\0'); i++) value = getenv(names[i]);
    const char *set = value ? strchr(value, '.') : NULL;
    return set && (strncasecmp(set, ".utf-8", 6) == 0 || strncasecmp(set, ".utf8", 5) == 0);
}

static const char *glyph(const kind *k) { return is_utf8() ? k->utf8 : k->ascii; }

/* What most of blocks [first, first + n) are. */
static const kind *kind_of(folio_pool *pool, int64_t first, int64_t n)
{
    enum { CHUNK = 4096 };
    uint8_t states[CHUNK];
    int64_t counts[FOLIO_NUM_BLOCK_STATES] = {0};
    for (int64_t count; n > 0; first += count, n -= count) {
        count = n < CHUNK ? n : CHUNK;
        if (folio_pool_get_block_states(pool, FOLIO_TIER_DEVICE, first, count, states) != FOLIO_OK)
            break;
        for (int64_t i = 0; i < count; i++) counts[states[i]]++;
    }
    const kind *most = &kinds[0];
    for (int i = 1; i < NUM_KINDS; i++)
        if (counts[kinds[i].state] >= counts[most->state]) most = &kinds[i];
    return most;
}

/* Returns how many blocks a glyph stands for. */
static int64_t add_map(page *p, folio_pool *pool, int64_t blocks, int columns, int lines)
{
    int64_t width = columns - 1 < MAP_COLUMNS ? columns - 1 : MAP_COLUMNS;
    int64_t each = (blocks + width * lines - 1) / (width * lines);
    const kind *last = NULL;
    for (int64_t first = 0, at = 0; first < blocks; first += each) {
        const kind *k = kind_of(pool, first, blocks - first < each ? blocks - first : each);
        if (k != last) add(p, "%s%s", term_live_start(TERM_PLAIN), term_live_start(k->colour));
        add(p, "%s", glyph(k));
        last = k;
        if (++at == width || first + each >= blocks) {
            add(p, "\n");
            at = 0;
            last = NULL; /* lines end their colours */
        }
    }
    return each;
}

/* ---- Counters */

static void add_legend(page *p, const folio_pool_stats *s, int64_t each)
{
    const int64_t counts[FOLIO_NUM_BLOCK_STATES] = {[FOLIO_BLOCK_FREE] = s->num_free,
                                                    [FOLIO_BLOCK_CACHED] = s->num_cached,
                                                    [FOLIO_BLOCK_USED] =
                                                        s->num_used - s->num_shared,
                                                    [FOLIO_BLOCK_SHARED] = s->num_shared};
    for (int i = NUM_KINDS - 1; i >= 0; i--)
        add(p, "%s%s%s %s %lld  ", term_live_start(kinds[i].colour), glyph(&kinds[i]),
            term_live_start(TERM_PLAIN), kinds[i].name, (long long)counts[kinds[i].state]);
    if (each > 1) add(p, "(a glyph: %lld blocks)", (long long)each);
    add(p, "\n");
}

static void add_counters(page *p, const replay_view *view, const folio_pool_stats *pool)
{
    const replay_stats *s = view->stats;
    add(p, "running %lld  waiting %lld  preempted %lld, %lld in all  prefix hits %.1f %%\n",
        (long long)view->running, (long long)view->waiting, (long long)view->paused,
        (long long)s->preemptions, 100 * replay_stats_hit_rate(s));
    add(p, "tokens/s: prefill %.0f, decode %.0f  evicted %lld",
        replay_rate(s->prefill_tokens, s->prefill_seconds),
        replay_rate(s->decode_tokens, s->decode_seconds), (long long)s->evictions);
    if (pool->host_blocks > 0)
        add(p, "  host %lld of %lld", (long long)(pool->host_used + pool->host_cached),
            (long long)pool->host_blocks);
    add(p, "\n");
}

/* ---- The display */

static const char *short_left(char *text, size_t size, double seconds)
{
    if (seconds < 100) snprintf(text, size, "%.0f s", seconds);
    else if (seconds < 6000) snprintf(text, size, "%.0f min", seconds / 60);
    else snprintf(text, size, "%.1f h", seconds / 3600);
    return text;
}

/* "12345 tokens/s, 3 s left" */
static void pace(char *text, size_t size, const replay_view *view, double passed)
{
    char left[16];
    double done = (double)view->done_tokens, total = (double)view->total_tokens;
    snprintf(text, size, "%.0f tokens/s, %s left", done / passed,
             short_left(left, sizeof left, done > 0 ? passed * (total - done) / done : 0));
}

static void draw(const replay_view *view, const folio_pool_stats *pool, const char *pace_text)
{
    static page p; /* large */
    char bar[160];
    int columns, rows;
    p.length = 0;
    p.text[0] = '\0';
    term_size(&columns, &rows);
    int lines = rows - 1 - OTHER_LINES < MAP_LINES ? rows - 1 - OTHER_LINES : MAP_LINES;
    if (lines > 0 && columns > 1) {
        add_legend(&p, pool, add_map(&p, view->pool, pool->num_blocks, columns, lines));
        add_counters(&p, view, pool);
    }
    term_bar(bar, sizeof bar, view->stats->requests, view->stats->total_requests, pace_text);
    add(&p, "%s", bar);
    term_draw(p.text);
}

void replay_live_start(replay_live *live) { *live = (replay_live){.started = term_seconds()}; }

void replay_live_show(replay_live *live, const replay_view *view)
{
    bool lines = !term_is_live();
    double now = term_seconds(), passed = now - live->started;
    if (passed < (lines ? 1 : 0.3) || now - live->shown < (lines ? 10 : 0.1)) return;
    live->shown = now;
    char text[64];
    folio_pool_stats pool = {.struct_size = sizeof pool};
    if (folio_pool_get_stats(view->pool, &pool) != FOLIO_OK) return;
    pace(text, sizeof text, view, passed);
    if (!lines) {
        draw(view, &pool, text);
        return;
    }
    fprintf(stderr,
            "%lld of %lld requests, %s; running %lld, waiting %lld, preempted %lld; %lld of %lld "
            "blocks used\n",
            (long long)view->stats->requests, (long long)view->stats->total_requests, text,
            (long long)view->running, (long long)view->waiting, (long long)view->paused,
            (long long)pool.num_used, (long long)pool.num_blocks);
}
