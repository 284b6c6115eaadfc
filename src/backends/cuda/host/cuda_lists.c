/* cuda_lists.c: the work lists of a plan: which it keeps, and how much of each a step uses. */
#include "backends/cuda/host/cuda_plan.h"
#include "core/dtype.h"

#include <string.h>

static int64_t longest_query(const folio_plan_desc *d, folio_attention_type type)
{
    return type == FOLIO_ATTENTION_ENCODER ? min_i64(d->max_encoder_tokens, d->max_seq_len)
                                           : d->max_query_len;
}

static folioi_cuda_list list_of(const folioi_plan_shape *shape, const folioi_cuda_layer *prototype,
                                folio_attention_type type)
{
    const folio_plan_desc *d = &shape->desc;
    int32_t heads_per_kv = prototype->num_heads / prototype->num_kv_heads;
    folioi_cuda_list list;
    memset(&list, 0, sizeof list); /* limits are compared as bytes */
    folioi_cuda_limits *l = &list.limits;
    list.type = type;
    l->prototype = *prototype;
    l->prototype.scale = 1.0f; /* attentions of one shape share lists, whatever their options */
    l->prototype.soft_cap = 0.0f;
    l->max_query_tokens =
        type == FOLIO_ATTENTION_ENCODER ? d->max_encoder_tokens : d->max_query_tokens;
    l->max_seqs = d->max_seqs;
    l->max_query_len = longest_query(d, type);
    l->max_seq_len = d->max_seq_len;
    l->sm = device_of(shape->ctx)->sm;
    l->batch_invariant = (d->flags & FOLIO_PLAN_BATCH_INVARIANT) != 0;
    folioi_cuda_prefill_init(&list.prefill, l);
    /* a graph is launched alike for steps of one sequence and of more */
    if (prototype->soft_cap == 0.0f && (!(d->flags & FOLIO_PLAN_GRAPH) || d->max_seqs == 1))
        folioi_cuda_decode_clusters(l);
    /* with fewer blocks the second fragment of rows takes longer than prefill */
    if (decode_is_clustered(l->cluster_seqs, d->max_seqs, d->max_seq_len))
        list.prefill.shape.decode_rows =
            l->cluster < 16 && heads_per_kv <= 8 ? 8 : (int32_t)max_i64(heads_per_kv, 16);
    l->decode_rows = list.prefill.shape.decode_rows;
    list.limit.query_len = l->max_query_len;
    list.limit.prefills = l->max_query_len * heads_per_kv > l->decode_rows;
    folioi_cuda_decode_init(&list.decode, l);
    if (l->decode_rows > 0) list.limit.decode_rows = list.decode.max_rows;
    list.limit.clustered = decode_is_clustered(l->cluster_seqs, d->max_seqs, d->max_seq_len);
    return list;
}

static bool is_same(const folioi_cuda_list *a, const folioi_cuda_list *b)
{
    return a->type == b->type && memcmp(&a->limits, &b->limits, sizeof a->limits) == 0;
}

/* All lists, and prefill and decode of each, use one workspace, one after another. Where counters of one end, those of all do: else one's sums would be another's
 * counters. */
static void share_counters(folioi_cuda_plan *p)
{
    size_t most = 0;
    for (int32_t i = 0; i < p->num_lists; i++) {
        const folioi_cuda_list *list = &p->lists[i];
        if (list->decode.counter_bytes > most) most = list->decode.counter_bytes;
        if (list->limit.prefills && list->prefill.counter_bytes > most)
            most = list->prefill.counter_bytes;
    }
    for (int32_t i = 0; i < p->num_lists; i++) {
        folioi_cuda_decode_plan *decode = &p->lists[i].decode;
        folioi_cuda_prefill_plan *prefill = &p->lists[i].prefill;
        decode->workspace_bytes += most - decode->counter_bytes;
        decode->counter_bytes = most;
        if (!p->lists[i].limit.prefills) continue;
        prefill->workspace_bytes += most - prefill->counter_bytes;
        prefill->counter_bytes = most;
    }
}

/* Other layers run on the generic kernel, which needs none. */
static bool has_lists(const folioi_cuda_plan *p, const folioi_cuda_layer *prototype)
{
    const folioi_cuda_sm *sm = &device_of(p->shape.ctx)->sm;
    if (folioi_cuda_only_generic(p->shape.ctx)) return false;
    if (prototype->dtype != FOLIO_F32 && !prototype->v_in_k) return true;
    return folioi_cuda_choose(folioi_cuda_prefill_line, prototype, sm, 0).lines[0] != NULL ||
           (!prototype->v_in_k &&
            folioi_cuda_choose(folioi_cuda_decode_line, prototype, sm, FOLIOI_DECODE_MAX_ROWS)
                    .lines[0] != NULL);
}

void folioi_cuda_lists_init(folioi_cuda_plan *p)
{
    const folioi_plan_shape *shape = &p->shape;
    for (int32_t i = 0; i < shape->desc.num_attentions; i++) {
        const folio_attention_desc *a = &shape->attentions[i]->desc;
        for (int t = 0; t < FOLIO_NUM_ATTENTION_TYPES; t++) {
            folioi_cuda_use *use = folioi_cuda_use_of(p, i, (folio_attention_type)t);
            use->list = -1;
            folioi_cuda_layer prototype =
                folioi_cuda_layer_prototype(shape, a, (folio_attention_type)t);
            if ((shape->types[i] & FOLIO_ATTENTION_BIT(t)) && has_lists(p, &prototype)) {
                folioi_cuda_list list = list_of(shape, &prototype, (folio_attention_type)t);
                for (use->list = 0; use->list < p->num_lists; use->list++)
                    if (is_same(&p->lists[use->list], &list)) break;
                if (use->list == p->num_lists) p->lists[p->num_lists++] = list;
                use->prefill =
                    folioi_cuda_choose(folioi_cuda_prefill_line, &prototype, &list.limits.sm, 0);
                use->decode = folioi_cuda_choose(folioi_cuda_decode_line, &prototype,
                                                 &list.limits.sm, list.decode.max_rows);
            }
            folioi_cuda_name_kernels(use);
        }
    }
    share_counters(p);
}

static folioi_decode_rule rule_of(const folioi_cuda_plan *p, const folioi_cuda_list *list)
{
    const folioi_cuda_layer *l = &list->limits.prototype;
    int64_t key_bytes = (int64_t)(l->k_dims + l->v_dims) * (dtype_is_16_bit(l->kv_dtype) ? 2 : 1);
    return (folioi_decode_rule){.heads_per_kv = list->prefill.shape.heads_per_kv,
                                .max_rows = list->decode.max_rows,
                                .num_shares = list->decode.num_shares,
                                .split_len = list->decode.split_len,
                                .item_cost = decode_item_cost(key_bytes),
                                .cluster = list->decode.cluster,
                                .cluster_seqs = list->decode.cluster_seqs,
                                .window_left = list->prefill.shape.window_left,
                                .window_right = list->prefill.shape.window_right,
                                .block_size = p->shape.desc.block_size};
}

folio_status folioi_cuda_lists_start(folioi_cuda_plan *p)
{
    for (int32_t i = 0; i < p->num_lists; i++) {
        folioi_cuda_list *list = &p->lists[i];
        folioi_cuda_job job = {
            .list = {.seqs = folioi_cuda_at(p, p->seqs[list->type]),
                     .counts = folioi_cuda_at(p, p->counts[list->type]),
                     .shape = list->prefill.shape,
                     .room = list->prefill.room},
            .rule = rule_of(p, list),
        };
        list->prefill.list = folioi_cuda_at(p, list->items);
        if (list->limit.prefills) /* items may be read before it is known that they are none */
            TRY_CUDA(cudaMemset(list->prefill.list, 0, list->prefill.list_bytes), "filling memory");
        job.list.head = folioi_cuda_prefill_head(&list->prefill);
        job.list.items = folioi_cuda_prefill_items(&list->prefill);
        list->decode.schedule = folioi_cuda_at(p, list->schedule);
        job.table = folioi_cuda_decode_table(&list->decode);
        bool cross = list->type == FOLIO_ATTENTION_ENCODER_DECODER;
        bool cached = cross || list->type == FOLIO_ATTENTION_DECODER;
        if (cached && job.rule.block_size % 16 == 0 && job.rule.block_size > 0)
            job.table.blocks = folioi_cuda_at(p, cross ? p->cross_blocks : p->blocks);
        if (list->type == FOLIO_ATTENTION_DECODER && has_private_slots(p))
            job.table.slots = folioi_cuda_at(p, p->slots);
        folioi_cuda_job *jobs = folioi_cuda_at(p, p->jobs);
        for (int decode = 0; decode <= 1; decode++) {
            if (decode ? list->limit.decode_rows == 0 : !list->limit.prefills) continue;
            job.is_decode = decode;
            TRY_CUDA(cudaMemcpy(&jobs[p->num_jobs++], &job, sizeof job, cudaMemcpyHostToDevice),
                     "copying a plan");
        }
    }
    return FOLIO_OK;
}

static folioi_cuda_work work_of(const folioi_prefill_shape *shape, const folioi_cuda_seq *seqs,
                                int64_t num_seqs)
{
    folioi_cuda_work work = {0, 0, false, false, {0, 0, 0, 0}};
    int64_t num_prefills = 0, tiles = 0, keys = 0;
    for (int64_t i = 0; i < num_seqs; i++) {
        int32_t rows =
            (int32_t)min_i64((int64_t)seqs[i].query_len * shape->heads_per_kv, INT32_MAX);
        work.query_len = max_i64(work.query_len, seqs[i].query_len);
        if (rows > shape->decode_rows) {
            work.prefills = true;
            num_prefills++;
            tiles += ceil_div(seqs[i].query_len, shape->queries);
            keys += seqs[i].key_len;
        } else if (rows > work.decode_rows) work.decode_rows = rows;
    }
    work.whole.num_keys = (int32_t)min_i64(keys, INT32_MAX);
    if (tiles <= INT32_MAX && prefill_are_whole(shape, tiles, num_prefills) &&
        prefill_are_chunks(tiles, num_prefills))
        work.whole.num_items = (int32_t)tiles;
    return work;
}

/* A graph is launched for all that may come, and a batch-invariant plan never chooses by the batch. */
void folioi_cuda_lists_update(folioi_cuda_plan *p, folio_attention_type type,
                              const folioi_cuda_seq *seqs, int64_t num_seqs)
{
    for (int32_t i = 0; i < p->num_lists; i++) {
        folioi_cuda_list *list = &p->lists[i];
        if (list->type != type) continue;
        list->now = list->limit;
        if (folioi_cuda_is_graph(p)) continue;
        list->now.clustered = decode_is_clustered(list->decode.cluster_seqs, num_seqs, p->longest);
        if (seqs == NULL) continue;
        folioi_cuda_work work = work_of(&list->prefill.shape, seqs, num_seqs);
        list->now.query_len = work.query_len;
        list->now.prefills = work.prefills;
        list->now.whole = work.whole;
        if (work.decode_rows == 0 || !list->limits.batch_invariant)
            list->now.decode_rows = work.decode_rows;
    }
}

void folioi_cuda_lists_count(const folioi_cuda_plan *p, const folioi_cuda_list *list,
                             const folioi_cuda_seq *seqs, int64_t *items, int64_t *split_items)
{
    folioi_decode_rule all = rule_of(p, list);
    folioi_decode_rule rule = decode_rule_for(&all, p->num_seqs, p->longest);
    int64_t stretch;
    folioi_decode_count decodes = {0, 0};
    if (list->limit.decode_rows > 0)
        decodes = decode_count_host(&rule, seqs, (int32_t)p->num_seqs, &stretch);
    folioi_prefill_sort sort;
    folioi_prefill_head head = {0};
    folioi_cuda_counts counts = {.num_seqs = (int32_t)p->num_seqs};
    folioi_prefill_list prefills = {seqs, &counts, list->prefill.shape, &head, NULL, {0, 0, 0}};
    prefill_list_make(&prefills, &sort); /* without room it only counts */
    int64_t heads = list->limits.prototype.num_kv_heads;
    *items = (decodes.items + head.num_items) * heads;
    *split_items = (decodes.stores + head.num_items - (sort.tiles - head.num_cut_tiles)) * heads;
}
