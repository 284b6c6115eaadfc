/*
 * golden_file.h: reads a golden file (tests/data/golden/README.md has the format), a case at a time.
 * Part of test_golden.c; test_vllm06_torch.c uses its parser too.
 */
#ifndef FOLIO_GOLDEN_FILE_H
#define FOLIO_GOLDEN_FILE_H

#include "test.h"

#include <stdlib.h>

#ifndef FOLIO_TESTS_DIR
#define FOLIO_TESTS_DIR "tests"
#endif
#ifndef FOLIO_GOLDEN_FILE
#define FOLIO_GOLDEN_FILE FOLIO_TESTS_DIR "/data/golden/attention.golden"
#endif
#define MAX_SEQS 16

/* ---------------------------------------------------------------------------------------------- */
/* Memory of one case: separate blocks, so that a sanitizer sees every overrun                    */
/* ---------------------------------------------------------------------------------------------- */

typedef struct {
    void *blocks[512];
    int count;
} arena;

static void *take(arena *a, size_t bytes, int fill)
{
    void *p = a->count == 512 ? NULL : aligned_alloc(64, (bytes + 64) / 64 * 64);
    if (p == NULL) {
        fprintf(stderr, "test_golden: out of memory\n");
        exit(2);
    }
    a->blocks[a->count++] = p;
    return memset(p, fill, bytes);
}

static void drop(arena *a)
{
    for (int i = 0; i < a->count; i++) free(a->blocks[i]);
    a->count = 0;
}

/* ---------------------------------------------------------------------------------------------- */
/* The file                                                                                       */
/* ---------------------------------------------------------------------------------------------- */

typedef struct {
    int64_t q, s, phase, causal, enc, enc_new;
    int64_t pos[2], seen[2]; /* first positions; the keys some row sees */
    bool pos_given;
    int64_t num_blocks, num_cross_blocks;
    int32_t *table, *cross_table; /* NULL: not given */
    int64_t *slots, *cross_slots; /* NULL: not given */
} golden_seq;

typedef struct {
    arena mem;
    const char *line;
    int64_t id;
    uint64_t seed;
    folio_attention_type type;
    folio_attention_desc attention;
    folio_kv_cache_desc cache;        /* num_blocks 0: none */
    folio_dtype new_dtype, ctx_dtype; /* of k and v; of what the context is written from */
    const char *form, *memory;        /* not terminated: compare with is() */
    int64_t layer, block_pad, graph;
    bool zeros, append, kv_given, no_lens, no_starts;
    int64_t q_strides[2], k_strides[2], v_strides[2], out_strides[2], lse_strides[2];
    int64_t kv_strides[12]; /* STRIDED: block, token, head of k, v, k_scales, v_scales */
    float *slopes, *sinks;  /* NULL: none */
    folio_dtype bias_dtype; /* 0: none    */
    int64_t bias_dims[4], bias_strides[4], bias_hide, bias_blind;
    float scales[2];
    float *head_scales[2]; /* of K and V, [num_kv_heads]; NULL: the one above */
    int64_t num_seqs;
    golden_seq seqs[MAX_SEQS];
    int64_t query_rows, encoder_rows; /* sums of q and enc_new                          */
    int64_t rows, new_rows;           /* of q and out, of k and v; padding of graphs not */
    /* PyTorch's: the largest |out|; for each row and head the sum of out times weights, and lse */
    double largest;
    float *sums, *lse; /* lse NULL: not computed */
} golden_case;

/* The value of a "key=value" word of a line, or NULL. It ends at a space or the line's end. */
static const char *field(const char *line, const char *key)
{
    size_t n = strlen(key);
    for (const char *p = strchr(line, ' '); p != NULL; p = strchr(p + 1, ' '))
        if (strncmp(p + 1, key, n) == 0 && p[1 + n] == '=') return p + n + 2;
    return NULL;
}

static bool is(const char *value, const char *word)
{
    size_t n = strlen(word);
    return value != NULL && strncmp(value, word, n) == 0 && (value[n] == ' ' || value[n] == '\0');
}

static int64_t int_field(const char *line, const char *key)
{
    const char *p = field(line, key);
    return p ? (int64_t)strtoll(p, NULL, 10) : 0;
}

static float float_of(uint32_t bits)
{
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

/* Numbers of a comma-separated value: how many there are; up to `capacity` go to out. */
static int64_t ints_field(const char *line, const char *key, int64_t *out, int64_t capacity)
{
    const char *p = field(line, key);
    int64_t n = 0;
    while (p != NULL && *p != ' ' && *p != '\0') {
        char *end;
        long long x = strtoll(p, &end, 10);
        if (end == p) return -1;
        if (n < capacity) out[n] = (int64_t)x;
        n++;
        p = *end == ',' ? end + 1 : end;
    }
    return n;
}

/* Floats as eight hexadecimal digits each; NULL where the key is absent. */
static float *floats_field(arena *a, const char *line, const char *key, int64_t count)
{
    const char *p = field(line, key);
    if (p == NULL) return NULL;
    float *x = take(a, (size_t)count * sizeof *x, 0);
    for (int64_t i = 0; i < count; i++, p += 9) x[i] = float_of((uint32_t)strtoul(p, NULL, 16));
    return x;
}

static float float_field(const char *line, const char *key)
{
    const char *p = field(line, key);
    return p ? float_of((uint32_t)strtoul(p, NULL, 16)) : 0.0f;
}

static folio_dtype dtype_field(const char *line, const char *key)
{
    for (int d = FOLIO_F32; d <= FOLIO_F64; d++)
        if (is(field(line, key), folio_dtype_name((folio_dtype)d))) return (folio_dtype)d;
    return (folio_dtype)0;
}

static int64_t *slots_field(arena *a, const char *line, const char *key, int64_t count)
{
    if (field(line, key) == NULL) return NULL;
    int64_t *x = take(a, (size_t)count * sizeof *x, 0);
    return ints_field(line, key, x, count) == count ? x : NULL;
}

static int32_t *table_field(arena *a, const char *line, const char *key, int64_t *count)
{
    if (field(line, key) == NULL) return NULL;
    *count = ints_field(line, key, NULL, 0);
    int64_t *wide = slots_field(a, line, key, *count);
    int32_t *x = take(a, (size_t)*count * sizeof *x, 0);
    for (int64_t i = 0; i < *count; i++) x[i] = (int32_t)wide[i];
    return x;
}

static void parse_seq(golden_case *c, const char *line)
{
    golden_seq *s = &c->seqs[c->num_seqs++];
    memset(s, 0, sizeof *s);
    s->q = int_field(line, "q");
    s->s = int_field(line, "s");
    s->phase = int_field(line, "phase");
    s->causal = int_field(line, "causal");
    s->enc = int_field(line, "enc");
    s->enc_new = int_field(line, "enc_new");
    s->pos_given = ints_field(line, "pos", s->pos, 2) == 2;
    s->seen[1] = s->s;
    ints_field(line, "seen", s->seen, 2);
    s->table = table_field(&c->mem, line, "table", &s->num_blocks);
    s->cross_table = table_field(&c->mem, line, "ctable", &s->num_cross_blocks);
    s->slots = slots_field(&c->mem, line, "slots", s->q);
    s->cross_slots = slots_field(&c->mem, line, "cslots", s->enc_new);
    c->query_rows += s->q;
    c->encoder_rows += s->enc_new;
    c->rows = c->type == FOLIO_ATTENTION_ENCODER ? c->encoder_rows : c->query_rows;
    c->new_rows = c->type == FOLIO_ATTENTION_ENCODER_DECODER ? c->encoder_rows : c->rows;
}

static void parse_attention(golden_case *c, const char *line)
{
    for (int t = 0; t < FOLIO_NUM_ATTENTION_TYPES; t++)
        if (is(field(line, "type"), folio_attention_type_name((folio_attention_type)t)))
            c->type = (folio_attention_type)t;
    folio_attention_desc *a = &c->attention;
    a->struct_size = sizeof *a;
    a->num_heads = (int32_t)int_field(line, "heads");
    a->num_kv_heads = (int32_t)int_field(line, "kv_heads");
    a->k_head_size = (int32_t)int_field(line, "dk");
    a->v_head_size = (int32_t)int_field(line, "dv");
    a->dtype = dtype_field(line, "q");
    a->kv_dtype = dtype_field(line, "kv");
    a->scale = float_field(line, "scale");
    a->soft_cap = float_field(line, "cap");
    int64_t window[2];
    a->windowed = ints_field(line, "window", window, 2) == 2;
    a->window_left = a->windowed ? window[0] : 0;
    a->window_right = a->windowed ? window[1] : 0;
}

static void parse_case(golden_case *c, const char *line)
{
    memset(c, 0, sizeof *c);
    c->line = line;
    c->id = int_field(line, "id");
    const char *seed = field(line, "seed");
    c->seed = seed ? strtoull(seed, NULL, 16) : 0;
    parse_attention(c, line);
    const folio_attention_desc *a = &c->attention;
    c->new_dtype = dtype_field(line, "new");
    c->ctx_dtype = dtype_field(line, "ctx");
    c->form = field(line, "form");
    c->memory = field(line, "mem");
    c->zeros = int_field(line, "zeros") != 0;
    c->append = int_field(line, "append") != 0;
    c->kv_given = int_field(line, "kv_given") != 0;
    c->no_lens = int_field(line, "no_lens") != 0;
    c->no_starts = int_field(line, "no_starts") != 0;
    c->graph = int_field(line, "graph");
    c->slopes = floats_field(&c->mem, line, "slopes", a->num_heads);
    c->sinks = floats_field(&c->mem, line, "sinks", a->num_heads);
    c->bias_dtype = dtype_field(line, "bias");
    ints_field(line, "bias_dims", c->bias_dims, 4);
    ints_field(line, "bias_strides", c->bias_strides, 4);
    c->bias_hide = int_field(line, "bias_hide");
    c->bias_blind = int_field(line, "bias_blind");
    ints_field(line, "q_strides", c->q_strides, 2);
    ints_field(line, "k_strides", c->k_strides, 2);
    ints_field(line, "v_strides", c->v_strides, 2);
    ints_field(line, "out_strides", c->out_strides, 2);
    ints_field(line, "lse_strides", c->lse_strides, 2);
    ints_field(line, "kv_strides", c->kv_strides, 12);
    float *scales = floats_field(&c->mem, line, "scales", 2);
    if (scales != NULL) memcpy(c->scales, scales, sizeof c->scales);
    c->head_scales[0] = floats_field(&c->mem, line, "k_head_scales", a->num_kv_heads);
    c->head_scales[1] = floats_field(&c->mem, line, "v_head_scales", a->num_kv_heads);
    folio_kv_cache_desc *k = &c->cache;
    k->struct_size = sizeof *k;
    k->num_blocks = int_field(line, "num_blocks");
    k->num_layers = (int32_t)int_field(line, "layers");
    k->block_size = (int32_t)int_field(line, "bs");
    k->num_kv_heads = a->num_kv_heads;
    k->k_head_size = a->k_head_size;
    k->v_head_size = a->v_head_size;
    k->dtype = a->kv_dtype;
    for (int l = 0; l < FOLIO_NUM_LAYOUTS; l++)
        if (is(field(line, "layout"), folio_layout_name((folio_layout)l)))
            k->layout = (folio_layout)l;
    c->layer = int_field(line, "layer");
    c->block_pad = int_field(line, "block_pad");
}

typedef struct {
    char *text, *next;
    int64_t promised; /* cases, by the header */
    bool committed;   /* the repository's file, not one of FOLIO_GOLDEN */
} golden_file;

static char *next_line(golden_file *f)
{
    char *line = f->next, *end = strchr(line, '\n');
    if (*line == '\0') return NULL;
    if (end != NULL) *end = '\0';
    f->next = end != NULL ? end + 1 : line + strlen(line);
    return line;
}

static bool open_golden(golden_file *f)
{
    const char *path = getenv("FOLIO_GOLDEN");
    f->committed = path == NULL || path[0] == '\0';
    if (f->committed) path = FOLIO_GOLDEN_FILE;
    FILE *in = fopen(path, "rb");
    CHECK_MSG(in != NULL, "cannot open %s", path);
    if (in == NULL) return false;
    size_t size = 0, capacity = 1 << 20, got;
    f->text = malloc(capacity + 1);
    while (f->text != NULL && (got = fread(f->text + size, 1, capacity - size, in)) > 0) {
        size += got;
        if (size == capacity) f->text = realloc(f->text, (capacity *= 2) + 1);
    }
    fclose(in);
    if (f->text == NULL) return false;
    f->text[size] = '\0';
    f->next = f->text;
    const char *header = next_line(f);
    bool known = header != NULL && strncmp(header, "folio-golden 2 ", 15) == 0;
    CHECK_MSG(known, "%s is not a golden file of version 2", path);
    f->promised = known ? int_field(header, "cases") : 0;
    if (!known) free(f->text);
    return known;
}

/* Hexadecimal floats after an "out" or "lse" line, on as many lines as they take. */
static float *parse_numbers(golden_file *f, golden_case *c, int64_t count)
{
    float *x = take(&c->mem, (size_t)count * sizeof *x, 0);
    const char *line = "";
    for (int64_t i = 0; i < count; i++, line += 8) {
        if (*line == '\0') line = next_line(f);
        if (line == NULL || strlen(line) < 8) return NULL;
        char digits[9] = {0};
        memcpy(digits, line, 8);
        x[i] = float_of((uint32_t)strtoul(digits, NULL, 16));
    }
    return x;
}

/* 1: a case was read; 0: the file has ended; -1: it is malformed. */
static int next_case(golden_file *f, golden_case *c)
{
    char *line = next_line(f);
    if (line == NULL) return 0;
    if (strncmp(line, "case ", 5) != 0) return -1;
    parse_case(c, line);
    while ((line = next_line(f)) != NULL && strcmp(line, "end") != 0) {
        int64_t count = (int64_t)strtoll(line + 4, NULL, 10), heads = c->attention.num_heads;
        if (strncmp(line, "seq ", 4) == 0 && c->num_seqs < MAX_SEQS) {
            parse_seq(c, line);
        } else if (strncmp(line, "out ", 4) == 0 && count == c->rows * heads) {
            c->largest = (double)float_field(line, "largest");
            c->sums = parse_numbers(f, c, count);
        } else if (strncmp(line, "lse ", 4) == 0 && count == c->rows * heads) {
            c->lse = parse_numbers(f, c, count);
        } else {
            return -1;
        }
    }
    return line != NULL && c->sums != NULL && c->num_seqs > 0 ? 1 : -1;
}

#endif
