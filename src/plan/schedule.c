/* schedule.c: tiles, chains and their order. */
#include "plan/schedule.h"

#include <string.h>

#define ITEMS_PER_WORKER 4 /* finer items even out the ends; each costs a little */
#define ROW_STEP 12        /* rows that kernels like to take together */

/* Multiplications that one thread has done before others are at work: 3 us in vectors. */
#define SMALL_WORK ((int64_t)1 << 17)

static bool is_small(const folioi_schedule_limits *l, const folio_attention_desc *a, int64_t work)
{
    int64_t per_key =
        (int64_t)l->heads_per_kv * l->num_kv_heads * (a->k_head_size + a->v_head_size);
    return work <= SMALL_WORK / max_i64(per_key, 1);
}

/* Items the whole step should at least be cut into, per kv head. */
static int64_t wanted_items(const folioi_schedule_limits *l)
{
    return l->num_workers == 1
               ? 1
               : ceil_div((int64_t)ITEMS_PER_WORKER * l->num_workers, l->num_kv_heads);
}

folioi_schedule_limits folioi_schedule_size(const folio_attention_desc *a, int64_t max_seqs,
                                            int64_t max_queries, int64_t max_keys,
                                            int32_t num_workers, int32_t tile_rows,
                                            int32_t split_len, int64_t partial_budget)
{
    folioi_schedule_limits l = {
        .heads_per_kv = a->num_heads / a->num_kv_heads,
        .num_kv_heads = a->num_kv_heads,
        .num_workers = num_workers,
        .split_len = split_len,
    };
    l.tile_queries = l.heads_per_kv < tile_rows ? tile_rows / l.heads_per_kv : 1;
    l.least_queries = l.heads_per_kv < tile_rows / 3 ? tile_rows / 3 / l.heads_per_kv : 1;
    int64_t wanted = wanted_items(&l);
    /* every sequence may end in a tile that is not full; chains add less than `wanted` items in all */
    l.max_items = max_queries / l.least_queries + max_seqs + wanted;
    if (num_workers == 1) return l;
    l.max_chains = wanted;
    int64_t rows = (int64_t)l.heads_per_kv * min_i64(l.tile_queries, max_queries);
    l.max_partials = min_i64(wanted * rows * ceil_div(max_keys, split_len), partial_budget);
    return l;
}

/* Queries of a tile in a step of `queries`: as many as there may be, but where workers would have too few tiles to
 * share. */
static int32_t choose_tile(const folioi_schedule_limits *l, int64_t queries)
{
    int64_t step = ROW_STEP; /* queries that make whole steps of rows */
    while (step > 1 && step * l->heads_per_kv / 2 % ROW_STEP == 0 && step % 2 == 0) step /= 2;
    while (step > 1 && step * l->heads_per_kv / 3 % ROW_STEP == 0 && step % 3 == 0) step /= 3;
    int64_t tile = ceil_div(queries, 2 * wanted_items(l));
    tile = ceil_div(tile, step) * step;
    return (int32_t)max_i64(l->least_queries, min_i64(tile, l->tile_queries));
}

/* One tile's keys and the work in them. */
typedef struct {
    folioi_range keys;
    int64_t work;
} tile;

static tile tile_of(const folioi_schedule *s, const folioi_rows *rows,
                    const folio_attention_desc *a, int64_t first)
{
    int64_t n = min_i64(s->tile_queries, rows->query_len - first);
    folioi_range keys = key_range_of(rows, a, first, n);
    return (tile){keys, n * max_i64(keys.end - keys.begin, 1)};
}

static void put(folioi_schedule *s, int64_t i, folioi_item item, int64_t work)
{
    s->weights[i] = (uint8_t)(63 - __builtin_clzll((unsigned long long)max_i64(work, 1)));
    s->items[i] = item;
}

/* Item i, a whole tile, becomes a chain where it is more than `share` of work and partials have room. */
static void cut_item(folioi_schedule *s, int64_t i, const tile *t, int64_t share)
{
    const folioi_schedule_limits *l = &s->limits;
    folioi_item whole = s->items[i];
    int64_t splits = whole.split_end - whole.split_begin;
    int64_t items = min_i64(ceil_div(t->work, share), splits);
    int64_t partials = splits * whole.num_queries * l->heads_per_kv;
    if (items < 2 || l->max_chains == s->num_chains || s->num_partials + partials > l->max_partials)
        return;
    s->chains[s->num_chains] =
        (folioi_chain){whole.split_begin, whole.split_end, (int32_t)items, s->num_partials};
    for (int64_t p = 0; p < items; p++) {
        folioi_item item = whole;
        item.split_begin = (int32_t)(whole.split_begin + splits * p / items);
        item.split_end = (int32_t)(whole.split_begin + splits * (p + 1) / items);
        item.chain = (int32_t)s->num_chains;
        put(s, p == 0 ? i : s->num_items++, item, t->work / items);
    }
    s->num_chains++;
    s->num_partials += partials;
}

/* Largest first, by powers of two; items of equal weight keep their order. */
static void sort_items(folioi_schedule *s)
{
    int64_t start[65] = {0};
    for (int64_t i = 0; i < s->num_items; i++) start[64 - s->weights[i]]++;
    for (int w = 1; w <= 64; w++) start[w] += start[w - 1];
    for (int64_t i = 0; i < s->num_items; i++)
        s->scratch[start[63 - s->weights[i]]++] = s->items[i];
    folioi_item *sorted = s->scratch;
    s->scratch = s->items;
    s->items = sorted;
}

/* Every tile of a sequence as one item; returns their work. */
static int64_t put_sequence(folioi_schedule *s, const folio_attention_desc *a,
                            const folioi_rows *rows, int64_t seq)
{
    const folioi_schedule_limits *l = &s->limits;
    int64_t work = 0;
    for (int64_t q = 0; q < rows->query_len; q += s->tile_queries) {
        tile t = tile_of(s, rows, a, q);
        bool empty = t.keys.begin >= t.keys.end;
        folioi_item whole = {
            .seq = (int32_t)seq,
            .first_query = (int32_t)q,
            .num_queries = (int32_t)min_i64(s->tile_queries, rows->query_len - q),
            .split_begin = empty ? 0 : t.keys.begin / l->split_len,
            .split_end = empty ? 0 : (int32_t)ceil_div(t.keys.end, l->split_len),
            .chain = -1,
        };
        put(s, s->num_items++, whole, t.work);
        work += t.work;
    }
    return work;
}

void folioi_schedule_fill(folioi_schedule *s, const folio_attention_desc *a,
                          const folio_batch *batch, folio_attention_type type)
{
    const folioi_schedule_limits *l = &s->limits;
    int64_t total = 0;
    s->num_items = s->num_chains = s->num_partials = 0;
    s->tile_queries = choose_tile(l, type == FOLIO_ATTENTION_ENCODER ? batch->num_encoder_tokens
                                                                     : batch->num_query_tokens);
    for (int64_t i = 0; i < batch->num_seqs; i++) {
        folioi_rows rows = folioi_batch_rows(batch, i, type);
        total += put_sequence(s, a, &rows, i);
    }
    int64_t share = max_i64(ceil_div(total, wanted_items(l)), 1), tiles = s->num_items;
    for (int64_t i = 0; i < tiles && l->max_chains > 0; i++) {
        if ((INT64_C(2) << s->weights[i]) <= share) continue; /* its work is below that */
        folioi_rows rows = folioi_batch_rows(batch, s->items[i].seq, type);
        tile t = tile_of(s, &rows, a, s->items[i].first_query);
        cut_item(s, i, &t, share);
    }
    s->num_workers = is_small(l, a, total) ? 1 : l->num_workers;
    sort_items(s);
}
