/*
 * emulate_prefill.cc: the wgmma prefill kernels and that of f32 on the machine (machine.h), in random problems: each is a
 * step of some sequences, whose list of tiles the backend's own code makes, and its out and lse are compared with double
 * precision.
 *
 *   emulate_prefill [--seed N] [--cases N] [--filter part of an instance's name] [--verbose]
 *
 * The first seed is FOLIO_SEED, or 1.
 */
#include "machine.h"

#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <algorithm>
#include <initializer_list>
#include <string>
#include <vector>

#include "core/checked.h"
#include "core/dtype.h"
extern "C" { /* they are for C alone */
#include "cache/kv_layout.h"
#include "core/status.h"
}
#include "backends/cuda/prefill/prefill.h"

enum { GUARD = 64 }; /* numbers before and after what kernels write */

/* Words of 16 bits: an f32 number has two. */
typedef std::vector<uint16_t> numbers;

/* The machine's cuTensorMapEncodeTiled: emulated_hopper.cc. */
void *emulated_describe_tensor(void);

/* One case. */
struct problem {
    const folioi_prefill_line *line;
    folioi_cuda_layer layer;
    folioi_cuda_sm sm;
    folioi_kv_format format;
    std::vector<folioi_cuda_seq> seqs;
    std::vector<int32_t> table;
    numbers q, out;
    std::vector<char> cache;
    std::vector<bool> is_anyones; /* bytes of it that hold a sequence's numbers */
    std::vector<float> lse, sinks, slopes, head_scales;
    int64_t rows, num_blocks;
    int32_t batch_invariant;
    bool is_graph, is_in_place, has_odd, from_rows;
    float scale_by;
    uint16_t unseen; /* what slots hold that are nobody's: of 8-bit numbers its lower byte, and of their scales */
};

/* What a run is told to do, and what its cases were like. */
static struct {
    uint64_t seed = 1;
    int cases = 100;
    const char *filter = "";
    bool is_verbose = false;
} options;

static struct {
    int whole, cut, merged_in_4, merged_in_8, merged_in_more, windows, sinks, in_place, odd;
    int64_t tiles, items;
} seen;

/* ---- draws ---- */

static int32_t one_of(std::initializer_list<int32_t> choices)
{
    return choices.begin()[machine_draw((uint32_t)choices.size())];
}

static bool one_in(uint32_t n) { return machine_draw(n) == 0; }

/* Nearly normal, with variance 1. */
static float draw_number(void)
{
    uint32_t sum = 0;
    for (int i = 0; i < 3; i++) sum += machine_draw(1 << 16);
    return ((float)sum - 98304.0f) * (1.0f / 32768.0f);
}

static bool is_f32(const problem *p) { return p->line->line.dtype == FOLIO_F32; }

/* Words of a number of q and out. */
static int words_of(const problem *p) { return is_f32(p) ? 2 : 1; }

static uint16_t to_bits(const problem *p, float x)
{
    return p->layer.dtype == FOLIO_BF16 ? f32_to_bf16(x) : f32_to_f16(x);
}

/* Number n of q or of out. */
static void put(const problem *p, void *to, int64_t n, float x)
{
    if (is_f32(p)) ((float *)to)[n] = x;
    else ((uint16_t *)to)[n] = to_bits(p, x);
}

static float get(const problem *p, const void *from, int64_t n)
{
    if (is_f32(p)) return ((const float *)from)[n];
    uint16_t bits = ((const uint16_t *)from)[n];
    return p->layer.dtype == FOLIO_BF16 ? bf16_to_f32(bits) : f16_to_f32(bits);
}

static const uint16_t NAN_BITS = 0x7fff; /* in all types */

/* Words of NaN, with guards. */
static numbers no_numbers(const problem *p, int64_t count)
{
    return numbers((size_t)((count + 2 * GUARD) * words_of(p)), NAN_BITS);
}

/* ---- a problem: heads, sequences ---- */

/* A soft cap, ALiBi or both. */
static void draw_options(problem *p)
{
    folioi_cuda_layer *l = &p->layer;
    int32_t kind = one_of({1, 2, 3});
    if (kind & 1) l->soft_cap = (float)one_of({1, 5, 30});
    for (int i = 0; i < l->num_heads && (kind & 2); i++) p->slopes.push_back(draw_number() * 0.2f);
    if (kind & 2) l->slopes = p->slopes.data();
}

/* fp8: of each cache, or of each kv head. */
static void draw_scales(problem *p)
{
    folioi_cuda_layer *l = &p->layer;
    l->k.scale = (float)one_of({1, 3, 16}) / 4.0f;
    l->v.scale = (float)one_of({1, 4, 100}) / 4.0f;
    if (one_in(2)) return;
    for (int i = 0; i < 2 * l->num_kv_heads; i++)
        p->head_scales.push_back((float)one_of({1, 2, 3, 5}) / 3.0f);
    l->k.head_scales = p->head_scales.data();
    l->v.head_scales = l->k.head_scales + l->num_kv_heads;
    l->k.scale = l->v.scale = 1.0f;
}

static void draw_heads(problem *p)
{
    folioi_cuda_layer *l = &p->layer;
    int32_t group =
        one_of({1, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 12, 16, 17, 32, 64, 71, 128, 150, 200});
    l->dtype = p->line->line.dtype;
    l->kv_dtype = p->line->line.kv;
    l->k_dims = p->line->line.k_dims;
    l->v_dims = p->line->line.v_dims;
    l->num_kv_heads = group > 32 ? 1 : one_of({1, 1, 2, 3, 4});
    l->num_heads = group * l->num_kv_heads;
    p->scale_by = (float)one_of({1, 1, 2, 4, 12});
    l->scale = p->scale_by / sqrtf((float)l->k_dims);
    l->window_left = one_in(3) ? one_of({0, 1, 15, 16, 40, 127, 128, 200, 500}) : -1;
    l->window_right = one_in(5) ? one_of({0, 1, 17, 100}) : -1;
    l->block_size = 16 * one_of({1, 1, 2, 3, 4, 5, 8, 16});
    if (is_f32(p) && one_in(3)) l->block_size = one_of({1, 3, 4, 8, 24, 33});
    l->cached = 1;
    l->v_in_k = p->line->line.v_in_k;
    l->k.scale = l->v.scale = 1.0f;
    if (dtype_is_fp8(l->kv_dtype)) draw_scales(p);
    p->sm.capability = 90;
    p->sm.count = (int32_t)(1 + machine_draw(5));
    p->sm.shared_of_block = 227 << 10;
    p->sm.describe_tensor = emulated_describe_tensor();
    p->from_rows = strstr(p->line->line.name, "_rows_") != NULL;
    if (strstr(p->line->line.name, "_options_") != NULL) draw_options(p);
    p->batch_invariant = one_in(8);
    p->is_graph = one_in(4);
}

/* Lengths of queries and keys. */
static void draw_seq(problem *p, folioi_cuda_seq *s, int32_t most_rows, int32_t most_keys)
{
    int32_t group = p->layer.num_heads / p->layer.num_kv_heads,
            most = std::max(1, most_rows / group);
    s->query_len =
        p->seqs.size() > 1 && one_in(10) ? 0 : (int32_t)(1 + machine_draw((uint32_t)most));
    if (one_in(4)) s->query_len = one_of({1, 2, most, std::max(1, most / 2)});
    s->context_len =
        one_in(most_keys >= 1000 ? 10 : 3) ? 0 : (int32_t)machine_draw((uint32_t)most_keys);
    if (s->context_len > 80 && one_in(2)) { /* about where key tiles end */
        int32_t keys = one_of({80, 96, 128});
        s->context_len = (s->context_len / keys + 1) * keys + (int32_t)machine_draw(5) - 2;
    }
    s->key_len = s->context_len + s->query_len;
    s->causal = !one_in(4);
    s->first_key_pos = one_in(4) ? machine_draw(5000) : 0;
    s->first_query_pos = s->first_key_pos + s->context_len;
    if (one_in(8)) s->first_query_pos += (int64_t)machine_draw(80) - 40; /* given positions */
    if (one_in(10) && !s->causal) s->key_len = (int32_t)machine_draw((uint32_t)most_keys);
}

/* Key tiles that the kernel goes through, times the warpgroups' rows: what a case costs. */
static int64_t cost_of(const problem *p)
{
    int64_t rows = 0, group = p->layer.num_heads / p->layer.num_kv_heads;
    for (const folioi_cuda_seq &s : p->seqs)
        rows += round_up(s.query_len * group, p->line->rows) * (s.key_len + 64);
    return rows * p->layer.num_kv_heads * (p->layer.k_dims + p->layer.v_dims);
}

/* One prompt, several sequences, or few rows of long ones on a large device: their tiles are cut. */
static void draw_seqs(problem *p)
{
    int32_t kind = one_of({0, 0, 1, 2, 2}), count = kind == 2 ? (int32_t)(2 + machine_draw(5)) : 1;
    int64_t most = (kind == 0 ? 250 : one_of({20, 60, 200})) * (int64_t)1000000;
    if (is_f32(p)) most = std::max<int64_t>(most / 8, 20000000); /* its products are many */
    int32_t units = p->layer.num_kv_heads;
    if (kind == 0) p->sm.count = std::min((int32_t)(3 + machine_draw(18)) * units, 40);
    if (kind == 0 && one_in(2)) p->layer.window_left = -1;
    do {
        int32_t most_rows = kind == 0 ? 130 : 800, most_keys = kind == 1 ? 100 : 600;
        p->seqs.assign((size_t)count, folioi_cuda_seq{});
        for (folioi_cuda_seq &s : p->seqs)
            draw_seq(p, &s, most_rows, kind == 0 ? one_of({1000, 2000, 5000}) : most_keys);
    } while (cost_of(p) > most);
    p->rows = 0;
    for (folioi_cuda_seq &s : p->seqs) {
        s.query_row = p->rows;
        p->rows += s.query_len;
    }
}

/* ---- its memory ---- */

/* Rows of heads, dense or with gaps, heads or rows outermost. Numbers that they take. */
static int64_t draw_rows(const problem *p, folioi_cuda_rows *rows, int32_t dims)
{
    int64_t heads = p->layer.num_heads, all = std::max<int64_t>(p->rows, 1);
    int64_t step = dims + (one_in(3) ? 8 * (int64_t)machine_draw(5) : 0);
    if (one_in(4)) *rows = {NULL, step, step * all};
    else *rows = {NULL, step * heads + (one_in(3) ? 8 : 0), step};
    return (all - 1) * rows->token + (heads - 1) * rows->head + dims;
}

static void make_rows(problem *p)
{
    folioi_cuda_layer *l = &p->layer;
    int64_t size = draw_rows(p, &l->q, l->k_dims);
    l->q_rows = p->rows;
    p->q = no_numbers(p, size);
    l->q.data = p->q.data() + GUARD * words_of(p);
    for (int64_t row = 0; row < p->rows; row++)
        for (int64_t i = 0; i < (int64_t)l->num_heads * l->k_dims; i++)
            put(p, l->q.data, row * l->q.token + i / l->k_dims * l->q.head + i % l->k_dims,
                draw_number());
    p->is_in_place = l->k_dims == l->v_dims && one_in(4);
    if (p->is_in_place) {
        l->out = l->q;
        p->out = p->q; /* what it was, for the reference */
    } else {
        size = draw_rows(p, &l->out, l->v_dims);
        p->out = no_numbers(p, size);
        l->out.data = p->out.data() + GUARD * words_of(p);
    }
    if (!one_in(8)) {
        l->lse_token = one_in(2) ? l->num_heads : 1;
        l->lse_head = l->lse_token == 1 ? std::max<int64_t>(p->rows, 1) : 1;
        p->lse.assign((size_t)(p->rows * l->num_heads + 2 * GUARD), NAN);
        l->lse = p->lse.data() + GUARD;
    }
    if (one_in(3)) {
        for (int i = 0; i < l->num_heads; i++) p->sinks.push_back(3.0f * draw_number());
        l->sinks = p->sinks.data();
    }
}

/* Tables of shuffled blocks, of sequences in any order; between them are numbers of a block that is nobody's. */
static void make_table(problem *p)
{
    int32_t size = p->layer.block_size;
    std::vector<int32_t> blocks;
    p->num_blocks = 2;
    for (const folioi_cuda_seq &s : p->seqs) p->num_blocks += ceil_div(s.key_len, size);
    for (int32_t i = 0; i < p->num_blocks; i++) blocks.push_back(i);
    for (size_t i = blocks.size(); i > 1; i--)
        std::swap(blocks[i - 1], blocks[machine_draw((uint32_t)i)]);
    int32_t nobodys = blocks.back();
    for (size_t i = 0, next = 0; i < p->seqs.size(); i++) {
        folioi_cuda_seq *s = &p->seqs[i];
        p->table.resize(p->table.size() + machine_draw(4), nobodys);
        s->table = (int64_t)p->table.size();
        for (int64_t j = 0; j < ceil_div(s->key_len, size); j++) p->table.push_back(blocks[next++]);
    }
    p->table.resize(p->table.size() + 64, nobodys);
}

/* A number of the cache, at an index from `base`, and whose scale is another's. */
static void put_number(problem *p, const void *base, folio_dtype dtype, int64_t index, float x)
{
    int64_t size = dtype == FOLIO_F32 ? 4 : dtype_is_16_bit(dtype) ? 2 : 1;
    int64_t at = (const char *)base - p->cache.data() + index * size;
    store_f32(p->cache.data() + at, dtype, 0, x);
    for (int64_t i = 0; i < size; i++) p->is_anyones[(size_t)(at + i)] = true;
}

/* Where a token's row begins, by its address. */
static int64_t place_in_cache(const problem *p, const folioi_address *at, const folioi_cuda_seq *s,
                              int64_t head, int64_t key)
{
    int32_t size = p->layer.block_size;
    int64_t block = p->table[(size_t)(s->table + key / size)];
    return address_token(at, block, head, key % size);
}

/* An odd key has NaN in some places, or for its scale. */
static void fill_key(problem *p, const folioi_cuda_side *side, int32_t dims,
                     const folioi_cuda_seq *s, int64_t head, int64_t key, bool is_odd)
{
    folio_dtype dtype = p->layer.kv_dtype;
    float by = dtype == FOLIO_INT8 ? 40.0f : 1.0f;
    int64_t row = place_in_cache(p, &side->at, s, head, key);
    for (int32_t d = 0; d < dims; d++) {
        float x = is_odd && d % 7 == 0 ? NAN : by * draw_number();
        put_number(p, side->base, dtype,
                   row + address_dim(&side->at, key % p->layer.block_size, d), x);
    }
    if (dtype != FOLIO_INT8) return;
    float scale = is_odd ? NAN : (0.5f + (float)machine_draw(64) / 64.0f) / 40.0f;
    put_number(p, side->scales, FOLIO_F32, place_in_cache(p, &side->scales_at, s, head, key),
               scale);
}

static void fill_side(problem *p, const folioi_cuda_side *side, int32_t dims, bool has_odd)
{
    for (const folioi_cuda_seq &s : p->seqs)
        for (int64_t head = 0; head < p->layer.num_kv_heads; head++)
            for (int64_t key = 0; key < s.key_len; key++)
                fill_key(p, side, dims, &s, head, key, has_odd && one_in(200));
}

/* A layout of rows; K and V of interleaved ones have one head size. */
static folio_layout rows_of(const folioi_cuda_layer *l)
{
    return (folio_layout)one_of({FOLIO_LAYOUT_NHD, FOLIO_LAYOUT_HND,
                                 l->k_dims == l->v_dims ? FOLIO_LAYOUT_INTERLEAVED_NHD : FOLIO_LAYOUT_NHD,
                                 l->k_dims == l->v_dims ? FOLIO_LAYOUT_INTERLEAVED_HND : FOLIO_LAYOUT_HND});
}

/* What nobody's slots hold. */
static void fill_unseen(problem *p)
{
    char both[2];
    memcpy(both, &p->unseen, 2);
    bool is_wide = dtype_is_16_bit(p->layer.kv_dtype);
    for (size_t i = 0; i < p->cache.size(); i++)
        if (!p->is_anyones[i]) p->cache[i] = both[is_wide ? i % 2 : 0];
}

/* NaN, or large numbers. Of bytes: NaN of fp8 and large scales of int8, or NaN of all. */
static uint16_t draw_unseen(const problem *p)
{
    if (!dtype_is_16_bit(p->layer.kv_dtype)) return one_in(2) ? 0x7f : 0xff;
    return one_in(2) ? NAN_BITS : to_bits(p, one_in(2) ? INFINITY : 1000.0f);
}

static folio_layout layout_of(const problem *p)
{
    bool is_wide = dtype_is_16_bit(p->layer.kv_dtype);
    return p->from_rows || (!is_wide && one_in(2)) ? rows_of(&p->layer) : FOLIO_LAYOUT_NATIVE;
}

/* NaN, or large numbers, but for the sequences' keys; NaN in some of these too. False: the format is none. */
static bool make_cache(problem *p)
{
    folioi_cuda_layer *l = &p->layer;
    folio_kv_cache_desc desc = {};
    desc.struct_size = sizeof desc;
    desc.num_blocks = p->num_blocks;
    desc.num_layers = 1;
    desc.block_size = l->block_size;
    desc.num_kv_heads = l->num_kv_heads;
    desc.k_head_size = l->k_dims;
    desc.v_head_size = l->v_dims;
    desc.dtype = l->kv_dtype;
    desc.layout = layout_of(p);
    desc.v_in_k = l->v_in_k;
    if (folioi_kv_format_init(&desc, true, &p->format) != FOLIO_OK) return false;
    p->unseen = draw_unseen(p);
    p->cache.resize((size_t)p->format.layer_bytes);
    p->is_anyones.assign(p->cache.size(), false);
    l->num_blocks = p->num_blocks;
    l->k.base = (const char *)p->cache.data();
    l->v.base = l->k.base + p->format.v.offset_bytes;
    l->k.at = p->format.k_at;
    l->v.at = p->format.v_at;
    l->k.scales = (const float *)(l->k.base + p->format.k_scales.offset_bytes);
    l->v.scales = (const float *)(l->k.base + p->format.v_scales.offset_bytes);
    l->k.scales_at = p->format.k_scales_at;
    l->v.scales_at = p->format.v_scales_at;
    p->has_odd = one_in(p->is_in_place ? 3 : 8);
    fill_side(p, &l->k, l->k_dims, p->has_odd && l->v_in_k);
    if (!l->v_in_k) fill_side(p, &l->v, l->v_dims, p->has_odd);
    fill_unseen(p);
    return true;
}

/* ---- a run ---- */

/* A failure of the case at hand, in words; empty: there was none. */
static std::string failure;

static void fail(const char *format, ...) __attribute__((format(printf, 1, 2)));
static void fail(const char *format, ...)
{
    char text[4096];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof text, format, arguments);
    va_end(arguments);
    if (failure.empty()) failure = text;
}

static folioi_cuda_limits limits_of(const problem *p)
{
    folioi_cuda_limits limits = {};
    limits.prototype = p->layer;
    limits.sm = p->sm;
    limits.batch_invariant = p->batch_invariant;
    limits.max_query_tokens = p->rows;
    limits.max_seqs = (int64_t)p->seqs.size();
    for (const folioi_cuda_seq &s : p->seqs) {
        limits.max_query_len = std::max<int64_t>(limits.max_query_len, s.query_len);
        limits.max_seq_len = std::max<int64_t>(limits.max_seq_len, s.key_len);
    }
    return limits;
}

/* As cuda_lists.c has it: the head, where the host knows that no tile is cut. */
static folioi_prefill_head whole_of(const problem *p, const folioi_prefill_shape *shape)
{
    folioi_prefill_head whole = {};
    int64_t tiles = 0, seqs = 0, keys = 0;
    for (const folioi_cuda_seq &s : p->seqs) {
        if (prefill_leaves(shape, &s)) continue;
        seqs++;
        tiles += ceil_div(s.query_len, shape->queries);
        keys += s.key_len;
    }
    if (p->is_graph) return whole;
    whole.num_keys = (int32_t)keys;
    if (prefill_are_whole(shape, tiles, seqs) && prefill_are_chunks(tiles, seqs))
        whole.num_items = (int32_t)tiles;
    return whole;
}

static void print_problem(const problem *p)
{
    const folioi_cuda_layer *l = &p->layer;
    printf(
        "  %d heads, %d kv heads, blocks of %d, window %lld, %lld, scale %g, q strides %lld, %lld, "
        "out %lld, %lld%s%s%s%s\n",
        l->num_heads, l->num_kv_heads, l->block_size, (long long)l->window_left,
        (long long)l->window_right, l->scale, (long long)l->q.token, (long long)l->q.head,
        (long long)l->out.token, (long long)l->out.head, p->is_in_place ? ", in place" : "",
        p->is_graph ? ", graph" : "", l->sinks != NULL ? ", sinks" : "",
        p->has_odd ? ", NaN in V" : "");
    for (const folioi_cuda_seq &s : p->seqs)
        printf("  sequence: %d queries at %lld, %d keys at %lld%s\n", s.query_len,
               (long long)s.first_query_pos, s.key_len, (long long)s.first_key_pos,
               s.causal ? ", causal" : "");
}

/* Note what the list is like. */
static void note(const problem *p, const folioi_cuda_prefill_plan *plan, bool is_whole)
{
    int32_t parts = 1, count = folioi_cuda_prefill_head(plan)->num_items;
    const folioi_prefill_item *items = folioi_cuda_prefill_items(plan);
    for (int32_t i = 0; i < count; i++) parts = std::max(parts, items[i].num_parts);
    bool windows = p->layer.window_left >= 0 || p->layer.window_right >= 0;
    seen.whole += is_whole && !windows;
    seen.cut += parts > 1;
    seen.merged_in_4 += parts > 1 && parts <= 4;
    seen.merged_in_8 += parts > 4 && parts <= 8;
    seen.merged_in_more += parts > 8;
    seen.windows += windows;
    seen.sinks += !p->sinks.empty();
    seen.in_place += p->is_in_place;
    seen.odd += p->has_odd;
    seen.items += count;
    if (options.is_verbose) print_problem(p);
    if (options.is_verbose)
        printf("  %d items, %d parts at most, %d multiprocessors%s\n", count, parts, p->sm.count,
               is_whole ? ", whole" : "");
}

/* Does a row of some item see no key of it? Such rows are computed by the slow way, like those that meet NaN. */
static bool has_empty_rows(const problem *p, const folioi_cuda_prefill_plan *plan)
{
    const folioi_prefill_item *items = folioi_cuda_prefill_items(plan);
    for (int32_t i = 0; i < folioi_cuda_prefill_head(plan)->num_items; i++)
        for (int32_t query = 0; query < items[i].num_queries; query++) {
            folioi_range seen_keys = seq_keys(&items[i].sequence, p->layer.window_left,
                                              p->layer.window_right, items[i].first_query + query);
            if (std::max(seen_keys.begin, items[i].begin) >= std::min(seen_keys.end, items[i].end))
                return true;
        }
    return false;
}

/* What the backend does in a step: the plan, its list, and a launch. */
static void run(problem *p, folioi_cuda_prefill_plan *plan)
{
    folioi_cuda_limits limits = limits_of(p);
    folioi_cuda_choice choice =
        folioi_cuda_choose(folioi_cuda_prefill_line, &limits.prototype, &p->sm, 0);
    if (choice.lines[0] != &p->line->line) return fail("the plan chooses another kernel");
    folioi_cuda_prefill_init(plan, &limits);
    std::vector<folioi_prefill_item> list((size_t)plan->room.items + 1);
    plan->list = (char *)list.data() + sizeof list[0] - sizeof(folioi_prefill_head);
    folioi_cuda_counts counts = {(int32_t)p->seqs.size(), 0, p->rows};
    static folioi_prefill_sort sort;
    folioi_prefill_list job = {p->seqs.data(),
                               &counts,
                               plan->shape,
                               folioi_cuda_prefill_head(plan),
                               folioi_cuda_prefill_items(plan),
                               plan->room};
    prefill_list_make(&job, &sort);
    folioi_prefill_head whole = whole_of(p, &plan->shape);
    note(p, plan, whole.num_items > 0);
    std::vector<int32_t> counters(plan->counter_bytes / 4 + GUARD, 0);
    std::vector<float> workspace(plan->workspace_bytes / 4 + GUARD, NAN);
    folioi_cuda_step step = {&counts, p->seqs.data(), p->table.data(), p->rows, 0};
    folioi_cuda_run run = {&p->layer, &step, (char *)workspace.data(), counters.data(), NULL};
    machine_last = {};
    cudaError_t error = p->line->launch(p->line, &run, plan, &whole);
    if (error != cudaSuccess) return fail("the launch is refused: %d", (int)error);
    if (machine_last.failure[0] != '\0') return fail("%s", machine_last.failure);
    for (size_t i = 0; i < counters.size(); i++)
        if (counters[i] != 0) return fail("counter %zu is %d at the end", i, counters[i]);
    for (size_t i = workspace.size() - GUARD; i < workspace.size(); i++)
        if (workspace[i] == workspace[i]) return fail("the workspace was written past its end");
    if (!p->has_odd && !has_empty_rows(p, plan) && machine_last.slow_ways > 0)
        return fail("rows were computed by the slow way");
}

/* ---- double precision ---- */

/* What a key's numbers are multiplied with. */
static double scale_at(const problem *p, const folioi_cuda_side *side, const folioi_cuda_seq *s,
                       int64_t head, int64_t key)
{
    if (p->layer.kv_dtype == FOLIO_INT8)
        return side->scales[place_in_cache(p, &side->scales_at, s, head, key)];
    return folioi_cuda_scale(side, (int32_t)head);
}

/* K or V of a sequence and a kv head. */
static std::vector<double> side_of(const problem *p, const folioi_cuda_side *side, int32_t dims,
                                   const folioi_cuda_seq *s, int64_t head)
{
    std::vector<double> x((size_t)s->key_len * (size_t)dims);
    for (int64_t key = 0; key < s->key_len; key++) {
        double scale = scale_at(p, side, s, head, key);
        int64_t row = place_in_cache(p, &side->at, s, head, key);
        for (int32_t d = 0; d < dims; d++) {
            int64_t at = row + address_dim(&side->at, key % p->layer.block_size, d);
            x[(size_t)(key * dims + d)] = scale * load_f32(side->base, p->layer.kv_dtype, at);
        }
    }
    return x;
}

/* Four sums, so that none waits for the one before it. */
static double dot(const double *x, const double *y, int32_t dims)
{
    double sums[4] = {0, 0, 0, 0};
    for (int32_t d = 0; d < dims; d += 4)
        for (int i = 0; i < 4; i++) sums[i] += x[d + i] * y[d + i];
    return sums[0] + sums[1] + sums[2] + sums[3];
}

/* What a row should come to, and how far from it rounding may lead. */
struct expected_row {
    std::vector<double> out, slack;
    double lse;
};

static expected_row expect(const problem *p, const folioi_cuda_seq *s, int64_t query, int32_t head,
                           const std::vector<double> &q, const std::vector<double> &k,
                           const std::vector<double> &v)
{
    const folioi_cuda_layer *l = &p->layer;
    /* by how much, at most, weights and out are rounded; weights independently of one another */
    double unit = is_f32(p) ? 1.0 / 65536 : l->dtype == FOLIO_BF16 ? 1.0 / 256 : 1.0 / 2048;
    folioi_range keys = seq_keys(s, l->window_left, l->window_right, query);
    size_t dims = (size_t)l->v_dims;
    expected_row row = {std::vector<double>(dims), std::vector<double>(dims), 0};
    double sink = l->sinks != NULL ? l->sinks[head] : -INFINITY, top = sink, sum = 0;
    std::vector<double> scores;
    for (int32_t j = keys.begin; j < keys.end; j++) {
        double score = l->scale * dot(q.data(), &k[(size_t)j * (size_t)l->k_dims], l->k_dims);
        double distance = (double)(s->first_query_pos + query - s->first_key_pos - j);
        if (l->soft_cap > 0) score = l->soft_cap * tanh(score / l->soft_cap);
        if (l->slopes != NULL) score -= l->slopes[head] * fabs(distance);
        scores.push_back(score);
        top = std::max(top, scores.back());
    }
    if (scores.empty()) {
        row.lse = sink;
        return row;
    }
    for (double &x : scores) sum += x = exp(x - top);
    row.lse = top + log(sum + exp(sink - top));
    for (size_t j = 0; j < scores.size(); j++) {
        const double *from = &v[((size_t)keys.begin + j) * dims];
        double weight = scores[j] / (sum + exp(sink - top));
        for (size_t d = 0; d < dims; d++) {
            row.out[d] += weight * from[d];
            row.slack[d] += weight * weight * from[d] * from[d];
        }
    }
    for (size_t d = 0; d < dims; d++)
        row.slack[d] = unit * (1.01 * fabs(row.out[d]) + 3 * sqrt(row.slack[d])) + 1e-6;
    return row;
}

/* ---- what came out ---- */

static void compare_row(problem *p, const folioi_cuda_seq *s, size_t seq, int64_t query,
                        int32_t head, const expected_row &row)
{
    const folioi_cuda_layer *l = &p->layer;
    int64_t at = s->query_row + query;
    int64_t first = at * l->out.token + head * l->out.head;
    for (int32_t d = 0; d < l->v_dims; d++) {
        double is = get(p, l->out.data, first + d), should = row.out[(size_t)d];
        bool ok = should != should ? is != is : fabs(is - should) <= row.slack[(size_t)d];
        if (!ok)
            return fail("sequence %zu row %lld head %d dim %d: out is %g, should be %g +- %.2g",
                        seq, (long long)query, head, d, is, should, row.slack[(size_t)d]);
        uint16_t *words = (uint16_t *)l->out.data + (first + d) * words_of(p);
        for (int i = 0; i < words_of(p); i++) words[i] = NAN_BITS; /* what is left is nobody's */
    }
    if (l->lse == NULL) return;
    float *lse = &l->lse[at * l->lse_token + head * l->lse_head];
    bool ok = row.lse != row.lse
                  ? *lse != *lse
                  : *lse == row.lse || fabs(*lse - row.lse) <= 2e-5 * (1 + fabs(row.lse));
    if (!ok)
        return fail("sequence %zu row %lld head %d: lse is %.7g, should be %.7g", seq,
                    (long long)query, head, *lse, row.lse);
    *lse = NAN;
}

static void compare_seq(problem *p, const folioi_cuda_seq *s, size_t seq, const numbers &q)
{
    const folioi_cuda_layer *l = &p->layer;
    int32_t group = l->num_heads / l->num_kv_heads;
    for (int32_t kv_head = 0; kv_head < l->num_kv_heads; kv_head++) {
        std::vector<double> k = side_of(p, &l->k, l->k_dims, s, kv_head),
                            v = side_of(p, &l->v, l->v_dims, s, kv_head), row((size_t)l->k_dims);
        for (int32_t head = kv_head * group; head < (kv_head + 1) * group; head++)
            for (int64_t query = 0; query < s->query_len && failure.empty(); query++) {
                int64_t at = (s->query_row + query) * l->q.token + head * l->q.head + GUARD;
                for (int32_t d = 0; d < l->k_dims; d++)
                    row[(size_t)d] = get(p, q.data(), at + d);
                compare_row(p, s, seq, query, head, expect(p, s, query, head, row, k, v));
            }
    }
}

/* All rows of sequences that are not decode's, and nothing else. */
static void compare(problem *p, const folioi_prefill_shape *shape)
{
    numbers &out = p->is_in_place ? p->q : p->out;
    const numbers q = p->is_in_place ? p->out : p->q;
    for (size_t i = 0; i < p->seqs.size() && failure.empty(); i++)
        if (!prefill_leaves(shape, &p->seqs[i])) compare_seq(p, &p->seqs[i], i, q);
    for (size_t i = 0; i < out.size() && !p->is_in_place; i++)
        if (out[i] != NAN_BITS) return fail("out was written at %zu, where no row is", i);
    for (size_t i = 0; i < p->lse.size(); i++)
        if (p->lse[i] == p->lse[i]) return fail("lse was written at %zu, where no row is", i);
}

/* Tells which case a crash was in. */
static char crash_line[256];

static void crash(int)
{
    if (write(STDOUT_FILENO, crash_line, strlen(crash_line)) >= 0) _exit(1);
    _exit(2);
}

static void watch_for_crashes(void)
{
    static char stack[65536];
    stack_t on = {};
    on.ss_sp = stack;
    on.ss_size = sizeof stack;
    sigaltstack(&on, NULL);
    struct sigaction action = {};
    action.sa_handler = crash;
    action.sa_flags = SA_ONSTACK;
    for (int number : {SIGSEGV, SIGBUS, SIGABRT, SIGFPE}) sigaction(number, &action, NULL);
}

/* The same once more, with other numbers in slots that are nobody's: the bits must be the same. */
static void run_again(problem *p, folioi_cuda_prefill_plan *plan)
{
    const numbers out = p->out;
    const std::vector<float> lse = p->lse;
    if (!dtype_is_16_bit(p->layer.kv_dtype)) p->unseen ^= 0x80;
    else p->unseen = to_bits(p, p->unseen == NAN_BITS ? 500.0f : NAN);
    fill_unseen(p);
    p->out.assign(out.size(), NAN_BITS);
    p->lse.assign(lse.size(), NAN);
    run(p, plan);
    bool is_same = p->out == out && memcmp(p->lse.data(), lse.data(), lse.size() * 4) == 0;
    if (failure.empty() && !is_same) fail("bits depend on slots that nobody sees");
}

static bool run_case(const folioi_prefill_line *line, uint64_t seed)
{
    problem p = {};
    folioi_cuda_prefill_plan plan;
    const char *name = line->line.name;
    char repeat[200];
    snprintf(repeat, sizeof repeat, "FAILED emulate_prefill --filter %s --seed %llu --cases 1",
             name, (unsigned long long)seed);
    snprintf(crash_line, sizeof crash_line, "%s\n  it crashed\n", repeat);
    failure.clear();
    machine_seed(seed);
    p.line = line;
    draw_heads(&p);
    draw_seqs(&p);
    make_rows(&p);
    make_table(&p);
    if (!make_cache(&p)) fail("no such cache");
    else run(&p, &plan);
    if (failure.empty() && !p.is_in_place && !p.has_odd && one_in(4)) run_again(&p, &plan);
    if (failure.empty()) compare(&p, &plan.shape);
    if (failure.empty()) return true;
    printf("%s\n  %s\n", repeat, failure.c_str());
    return false;
}

static void read_options(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        std::string name = argv[i];
        const char *value = i + 1 < argc ? argv[i + 1] : "";
        if (name == "--verbose") options.is_verbose = true;
        else if (name == "--seed") options.seed = strtoull(value, NULL, 10), i++;
        else if (name == "--cases") options.cases = atoi(value), i++;
        else if (name == "--filter") options.filter = value, i++;
        else {
            fprintf(stderr, "emulate_prefill: unknown option %s\n", argv[i]);
            exit(2);
        }
    }
}

int main(int argc, char **argv)
{
    const char *given = getenv("FOLIO_SEED");
    if (given != NULL) options.seed = strtoull(given, NULL, 10);
    read_options(argc, argv);
    watch_for_crashes();
    std::vector<const folioi_prefill_line *> lines;
    const folioi_cuda_line *line;
    for (int32_t n = 0; (line = folioi_cuda_prefill_line(n)) != NULL; n++)
        if (strstr(line->name, options.filter) != NULL)
            lines.push_back((const folioi_prefill_line *)line);
    int failed = 0;
    for (int i = 0; i < options.cases && !lines.empty(); i++) {
        uint64_t seed = options.seed + (uint64_t)i;
        const folioi_prefill_line *line = lines[seed % lines.size()];
        if (options.is_verbose) printf("%s seed %llu\n", line->line.name, (unsigned long long)seed);
        failed += !run_case(line, seed);
        fflush(stdout);
    }
    printf("%d cases of %zu instances, seeds from %llu: %d failed\n", options.cases, lines.size(),
           (unsigned long long)options.seed, failed);
    printf(
        "%lld items; %d cases whole, %d cut (%d in up to 4, %d in up to 8, %d in more parts), %d "
        "with windows, %d with sinks, %d in place, %d with NaN among V\n",
        (long long)seen.items, seen.whole, seen.cut, seen.merged_in_4, seen.merged_in_8,
        seen.merged_in_more, seen.windows, seen.sinks, seen.in_place, seen.odd);
    return failed > 0 || lines.empty();
}
