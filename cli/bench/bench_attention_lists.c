/*
 * bench_attention_lists.c: the options of `folio bench` that take lists: words between commas, each
 * of which may hold a range, and the settings that come of crossing them.
 */
#include "base/args.h"
#include "base/levels.h"
#include "bench/bench_attention.h"
#include "kit/kit.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_COUNT = 1 << 16, MAX_LEN = 1 << 24, MAX_LAYERS = 1 << 10, MAX_HEAD_SIZE = 576 };

/* ---- Numbers and ranges */

enum { NO_NUMBER = -1, TOO_LARGE = -2 };

/* A number from 1 to max, k (1024) after it or not. */
static int64_t parse_number(const char **at, int64_t max)
{
    int64_t n = 0;
    if (**at < '0' || **at > '9') return NO_NUMBER;
    for (; **at >= '0' && **at <= '9'; (*at)++)
        if (n <= max) n = 10 * n + (**at - '0');
    if (**at == 'k') {
        n *= 1024;
        (*at)++;
    }
    return n < 1 ? NO_NUMBER : n <= max ? n : TOO_LARGE;
}

typedef struct range {
    int64_t first, last, step, factor; /* next = value * factor + step */
    size_t start, end;                 /* where it stands in its word */
} range;

/* FIRST-LAST, FIRST-LAST+STEP or FIRST-LAST*FACTOR; false: the word has none. */
static bool find_range(const char *word, range *r)
{
    for (const char *at = word; *at; at++) {
        if (*at < '0' || *at > '9') continue;
        *r = (range){.step = 1, .factor = 1, .start = (size_t)(at - word)};
        r->first = parse_number(&at, MAX_LEN);
        if (*at != '-') {
            at--; /* the loop takes it up again */
            continue;
        }
        at++;
        r->last = parse_number(&at, MAX_LEN);
        char sign = *at;
        if (sign == '+' || sign == '*') {
            at++;
            int64_t by = parse_number(&at, MAX_LEN);
            r->step = sign == '+' ? by : 0;
            r->factor = sign == '*' ? by : 1;
        }
        r->end = (size_t)(at - word);
        return r->first > 0 && r->last > 0 && r->step >= 0 && r->factor + r->step > 1;
    }
    return false;
}

/* How a word was taken: NULL where it was, else what is wrong, "" where the list's own sentence says it. */
typedef const char *verdict;

static verdict wrong_unless(bool right) { return right ? NULL : ""; }

/* A list under way: values of `size` bytes, each parsed from one word. */
typedef struct list {
    verdict (*parse)(const char *word, void *to);
    char *values;
    size_t size;
    int *count;
} list;

static verdict add_word(list *l, const char *word)
{
    if (*l->count == MAX_LIST) return "";
    verdict wrong = l->parse(word, l->values + l->size * (size_t)*l->count);
    if (wrong == NULL) ++*l->count;
    return wrong;
}

/* The word as it stands, or once for each number of its range. */
static verdict add_words(list *l, const char *word)
{
    char one[8 * MAX_NAME];
    range r, other;
    verdict wrong = NULL;
    if (!find_range(word, &r)) return add_word(l, word);
    if (r.first > r.last) return "a range goes from the smaller number to the larger";
    if (find_range(word + r.end, &other)) return "a word may hold one range, not two";
    for (int64_t n = r.first; n <= r.last && wrong == NULL; n = n * r.factor + r.step) {
        bool k = n % 1024 == 0;
        snprintf(one, sizeof one, "%.*s%lld%s%s", (int)r.start, word, (long long)(k ? n / 1024 : n),
                 k ? "k" : "", word + r.end);
        wrong = add_word(l, one);
    }
    return wrong;
}

/* "a,b,c" */
static bool parse_words(const char *option, const char *text, const char *takes, list l)
{
    char word[4 * MAX_NAME];
    const char *at = text;
    verdict wrong = "";
    *l.count = 0;
    for (;;) {
        size_t length = strcspn(at, ",");
        if (length >= sizeof word) break;
        memcpy(word, at, length);
        word[length] = '\0';
        wrong = add_words(&l, word);
        if (wrong != NULL) break;
        at += length;
        if (*at++ == '\0') return true;
    }
    if (*wrong != '\0') args_complain("bench", "--%s '%s': %s", option, word, wrong);
    else
        args_complain("bench", "--%s takes up to %d of %s, not '%s'", option, MAX_LIST, takes,
                      text);
    return false;
}

/* ---- Cases */

/* Of ragged kinds: log-uniform between the two, the same at every run whatever the seed. */
int64_t bench_seq_len(const seq_kind *g, int64_t i)
{
    if (g->up_to == 0) return g->seq_len;
    double at = (double)(kit_random_bits(1, KIT_USER + 1, i, 0, 0, 0) >> 11) * 0x1p-53;
    return llround((double)g->seq_len * pow((double)g->up_to / (double)g->seq_len, at));
}

/* [COUNT]qQUERY_LEN[sSEQ_LEN[:UP_TO]] */
static verdict parse_kind(const char **at, seq_kind *g)
{
    g->count = **at == 'q' ? 1 : parse_number(at, MAX_COUNT);
    if (g->count == TOO_LARGE) return "a kind has up to 65536 sequences";
    if (g->count < 0 || *(*at)++ != 'q') return "";
    g->query_len = g->seq_len = parse_number(at, MAX_LEN);
    if (g->query_len > 0 && **at == 's') {
        (*at)++;
        g->seq_len = parse_number(at, MAX_LEN);
    }
    g->up_to = 0;
    if (g->seq_len > 0 && **at == ':') {
        (*at)++;
        g->up_to = parse_number(at, MAX_LEN);
        if (g->up_to == NO_NUMBER) return "";
        if (g->up_to != TOO_LARGE && g->up_to <= g->seq_len)
            return "lengths go from the smaller number to the larger";
    }
    if (g->up_to == TOO_LARGE || g->query_len == TOO_LARGE || g->seq_len == TOO_LARGE)
        return "a sequence has up to 16384k tokens";
    if (g->query_len < 0 || g->seq_len < 0) return "";
    return g->seq_len >= g->query_len ? NULL
                                      : "SEQ_LEN is at least QUERY_LEN, whose tokens it counts too";
}

static void count_case(batch_case *c)
{
    bool decode = false, prefill = false;
    c->seqs = c->rows = c->longest = c->longest_query = 0;
    for (int i = 0; i < c->num_kinds; i++) {
        const seq_kind *g = &c->kinds[i];
        c->seqs += g->count;
        c->rows += g->count * g->query_len;
        int64_t longest = g->up_to ? g->up_to : g->seq_len;
        if (longest > c->longest) c->longest = longest;
        if (g->query_len > c->longest_query) c->longest_query = g->query_len;
        *(g->query_len == 1 ? &decode : &prefill) = true;
    }
    c->phase = !prefill ? "decode" : !decode ? "prefill" : "mixed";
}

static verdict parse_case(const char *word, void *to)
{
    batch_case *c = to;
    const char *at = word;
    *c = (batch_case){.num_kinds = 0};
    if (strlen(word) >= sizeof c->name) return "a case has up to 63 characters";
    memcpy(c->name, word, strlen(word) + 1);
    do {
        if (c->num_kinds == MAX_KINDS) return "a case has up to 16 kinds";
        verdict wrong = parse_kind(&at, &c->kinds[c->num_kinds++]);
        if (wrong != NULL) return wrong;
    } while (*at++ == '_');
    if (at[-1] != '\0') return "";
    count_case(c);
    return NULL;
}

batch_case bench_phase_of(const batch_case *c, bool decode)
{
    batch_case kept = *c;
    kept.num_kinds = 0;
    for (int i = 0; i < c->num_kinds; i++)
        if ((c->kinds[i].query_len == 1) == decode) kept.kinds[kept.num_kinds++] = c->kinds[i];
    count_case(&kept);
    return kept;
}

/* ---- Other words */

static verdict parse_dtype(const char *word, folio_dtype last, folio_dtype *to)
{
    for (int t = FOLIO_F32; t <= (int)last; t++)
        if (strcmp(word, folio_dtype_name((folio_dtype)t)) == 0) {
            *to = (folio_dtype)t;
            return NULL;
        }
    return "";
}

static verdict parse_q_dtype(const char *word, void *to)
{
    return parse_dtype(word, FOLIO_BF16, to);
}

static verdict parse_kv_dtype(const char *word, void *to)
{
    return parse_dtype(word, FOLIO_INT8, to);
}

static verdict parse_layout(const char *word, void *to)
{
    for (int l = 0; l < FOLIO_LAYOUT_STRIDED; l++) /* that one is the caller's memory */
        if (strcmp(word, folio_layout_name((folio_layout)l)) == 0) {
            *(folio_layout *)to = (folio_layout)l;
            return NULL;
        }
    return "";
}

static verdict parse_heads(const char *word, void *to)
{
    head_count *h = to;
    char *end, *rest;
    if (*word < '1' || *word > '9') return "";
    long heads = strtol(word, &end, 10), kv_heads = heads;
    if (*end == ':' && end[1] >= '1' && end[1] <= '9') {
        kv_heads = strtol(end + 1, &rest, 10);
        end = rest;
    }
    if (*end != '\0' || heads > 1024 || kv_heads > heads || heads % kv_heads != 0) return "";
    *h = (head_count){.heads = (int32_t)heads, .kv_heads = (int32_t)kv_heads};
    return NULL;
}

/* A number up to max that `unit` divides. */
static verdict parse_multiple(const char *word, int64_t unit, int64_t max, int64_t *to)
{
    *to = parse_number(&word, max);
    return wrong_unless(*to > 0 && *to % unit == 0 && *word == '\0');
}

static verdict parse_head_size(const char *word, void *to)
{
    return parse_multiple(word, 8, MAX_HEAD_SIZE, to);
}

static verdict parse_block_size(const char *word, void *to)
{
    return parse_multiple(word, 1, 4096, to);
}

static verdict parse_threads(const char *word, void *to)
{
    return parse_multiple(word, 1, 256, to);
}

static verdict parse_level(const char *word, void *to)
{
    level_name *name = to;
    snprintf(name->text, sizeof name->text, "%s", word);
    return wrong_unless(levels_has("cpu", word));
}

const char *const bench_cache_names[] = {"cold", "warm", "dirty"};

static verdict parse_cache(const char *word, void *to)
{
    int i = 0;
    while (i <= BENCH_DIRTY && strcmp(word, bench_cache_names[i]) != 0) i++;
    *(bench_cache *)to = (bench_cache)i;
    return wrong_unless(i <= BENCH_DIRTY);
}

/* A word without a number. */
static bool parse_flag(const char *at, size_t length, extras *to)
{
    const struct {
        const char *name;
        bool *flag;
    } flags[] = {
        {"alibi", &to->alibi},           {"sinks", &to->sinks},         {"full", &to->full},
        {"invariant", &to->invariant},   {"rotary", &to->rotary},       {"stores", &to->stores},
        {"private", &to->private_slots}, {"ancestors", &to->ancestors}, {"note", &to->note}};
    for (size_t i = 0; i < sizeof flags / sizeof flags[0]; i++)
        if (length == strlen(flags[i].name) && strncmp(at, flags[i].name, length) == 0)
            return *flags[i].flag = true;
    return false;
}

/* One of them: a flag, window:N, soft_cap:X, latent:N, v_size:N, graph:N; `at` is moved past it. */
static bool parse_extra(const char **at, extras *to)
{
    static const char window[] = "window:", soft_cap[] = "soft_cap:", graph[] = "graph:";
    static const char latent[] = "latent:", v_size[] = "v_size:";
    size_t length = strcspn(*at, "+");
    const char *end = *at + length;
    if (parse_flag(*at, length, to)) *at = end;
    else if (strncmp(*at, window, sizeof window - 1) == 0) {
        *at += sizeof window - 1;
        to->window = parse_number(at, MAX_LEN);
        if (*at != end) return false;
    } else if (strncmp(*at, latent, sizeof latent - 1) == 0 ||
               strncmp(*at, v_size, sizeof v_size - 1) == 0) {
        to->latent = **at == 'l'; /* both words are as long */
        *at += sizeof latent - 1;
        to->v_size = parse_number(at, MAX_HEAD_SIZE);
        if (*at != end || to->v_size < 0 || to->v_size % 8 != 0) return false;
    } else if (strncmp(*at, graph, sizeof graph - 1) == 0) {
        *at += sizeof graph - 1;
        to->graph = parse_number(at, MAX_LAYERS);
        if (*at != end || to->graph < 0) return false;
    } else if (strncmp(*at, soft_cap, sizeof soft_cap - 1) == 0) {
        char *rest;
        to->soft_cap = strtod(*at + sizeof soft_cap - 1, &rest);
        if (rest != end || !isfinite(to->soft_cap) || to->soft_cap <= 0) return false;
    } else return false;
    *at = end;
    return to->window >= 0;
}

static verdict parse_extras(const char *word, void *to)
{
    extras *with = to;
    const char *at = word;
    *with = (extras){.window = 0};
    if (strlen(word) >= sizeof with->name) return "";
    memcpy(with->name, word, strlen(word) + 1);
    if (strcmp(word, "plain") == 0) return NULL;
    do {
        if (!parse_extra(&at, with)) return "";
    } while (*at++ == '+');
    if (with->ancestors) {
        with->stores = true; /* as their forward does */
        return wrong_unless(strchr(word, '+') == NULL);
    }
    return wrong_unless(!(with->full && with->window > 0));
}

/* ---- All of them */

#define LIST(parse, of) ((list){parse, (char *)to->of, sizeof to->of[0], &to->num_##of})

static bool parse_shapes(lists *to, const list_texts *t)
{
    return parse_words("heads", t->heads,
                       "HEADS:KV_HEADS up to 1024, the second a divisor of the first",
                       LIST(parse_heads, heads)) &&
           parse_words("head-size", t->head_sizes, "multiples of 8 up to 576",
                       LIST(parse_head_size, head_sizes)) &&
           parse_words("block-size", t->block_sizes, "numbers from 1 to 4096",
                       LIST(parse_block_size, block_sizes)) &&
           parse_words("layout", t->layouts,
                       "native, nhd, hnd, interleaved_nhd, interleaved_hnd, xpacked, xpacked_1",
                       LIST(parse_layout, layouts));
}

bool bench_parse_lists(lists *to, const list_texts *t)
{
    char levels[256];
    levels_text(levels, sizeof levels, "cpu");
    to->num_kv_dtypes = to->num_threads = to->num_levels = 1; /* zeros: the defaults */
    return parse_words("case", t->cases,
                       "[COUNT]qQUERY_LEN[sSEQ_LEN[:UP_TO]] joined by _, such as 8q1s1k",
                       LIST(parse_case, cases)) &&
           parse_words("dtype", t->dtypes, "f32, f16, bf16", LIST(parse_q_dtype, dtypes)) &&
           (t->kv_dtypes == NULL ||
            parse_words("kv-dtype", t->kv_dtypes, "f32, f16, bf16, fp8_e4m3, fp8_e5m2, int8",
                        LIST(parse_kv_dtype, kv_dtypes))) &&
           parse_shapes(to, t) &&
           parse_words(
               "options", t->options,
               "plain, or alibi, sinks, rotary, window:N or full, soft_cap:X, latent:SIZE or "
               "v_size:SIZE, stores, private, note, invariant, graph:LAYERS joined by +, or "
               "ancestors",
               LIST(parse_extras, options)) &&
           parse_words("cache", t->cache, "cold, warm, dirty", LIST(parse_cache, caches)) &&
           (t->threads == NULL || parse_words("threads", t->threads, "numbers from 1 to 256",
                                              LIST(parse_threads, threads))) &&
           (t->levels == NULL ||
            parse_words("level", t->levels, levels, LIST(parse_level, levels)));
}

int64_t bench_num_settings(const lists *of)
{
    int64_t shapes =
        (int64_t)of->num_heads * of->num_head_sizes * of->num_block_sizes * of->num_layouts;
    return shapes * of->num_cases * of->num_dtypes * of->num_kv_dtypes * of->num_options *
           of->num_caches * of->num_threads * of->num_levels;
}

/* The next digit of i, for a list of so many. */
static int64_t digit(int64_t *i, int count)
{
    int64_t value = *i % count;
    *i /= count;
    return value;
}

setting bench_nth_setting(const lists *of, int64_t i)
{
    setting s;
    s.layout = of->layouts[digit(&i, of->num_layouts)];
    s.block_size = (int32_t)of->block_sizes[digit(&i, of->num_block_sizes)];
    s.head_size = (int32_t)of->head_sizes[digit(&i, of->num_head_sizes)];
    s.heads = of->heads[digit(&i, of->num_heads)];
    s.cache = of->caches[digit(&i, of->num_caches)];
    s.with = &of->options[digit(&i, of->num_options)];
    s.kv_dtype = of->kv_dtypes[digit(&i, of->num_kv_dtypes)];
    s.dtype = of->dtypes[digit(&i, of->num_dtypes)];
    if (s.kv_dtype == 0) s.kv_dtype = s.dtype;
    s.what = &of->cases[digit(&i, of->num_cases)];
    s.threads = (int32_t)of->threads[digit(&i, of->num_threads)];
    const level_name *level = &of->levels[digit(&i, of->num_levels)];
    s.level = level->text[0] ? level->text : NULL;
    return s;
}
