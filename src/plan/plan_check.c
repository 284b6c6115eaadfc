/*
 * plan_check.c: checks a batch against a plan's limits: capacities, block tables, slots. Two new tokens in one
 * slot are an error only in a forward that writes k and v.
 */
#include "plan/plan.h"
#include "plan/row_ranges.h"

static folio_status check_capacities(const folioi_plan_shape *shape, const folio_batch *b)
{
    const folio_plan_desc *d = &shape->desc;
    uint32_t types = folioi_plan_types(shape);
    REQUIRE(b->num_seqs <= d->max_seqs, "the batch has %lld sequences, the plan's max_seqs is %lld",
            (long long)b->num_seqs, (long long)d->max_seqs);
    REQUIRE(b->num_query_tokens <= d->max_query_tokens,
            "the batch has %lld query tokens, the plan's max_query_tokens is %lld",
            (long long)b->num_query_tokens, (long long)d->max_query_tokens);
    REQUIRE(b->num_encoder_tokens <= d->max_encoder_tokens,
            "the batch has %lld new encoder tokens, the plan's max_encoder_tokens is %lld",
            (long long)b->num_encoder_tokens, (long long)d->max_encoder_tokens);
    REQUIRE(d->block_size == 0 || b->desc.block_size == 0 || b->desc.block_size == d->block_size,
            "the batch's block size is %d, the plan's %d", b->desc.block_size, d->block_size);
    for (int64_t i = 0; i < b->num_seqs; i++) {
        const folioi_seq *s = batch_seq(b, i);
        REQUIRE(s->seq_len <= d->max_seq_len, "seq %lld: seq_len %d is above the plan's limit %lld",
                (long long)i, s->seq_len, (long long)d->max_seq_len);
        REQUIRE(s->query_len <= d->max_query_len,
                "seq %lld: query_len %d is above the plan's limit max_query_len %lld", (long long)i,
                s->query_len, (long long)d->max_query_len);
        REQUIRE(s->encoder_len <= d->max_seq_len,
                "seq %lld: encoder_len %d is above the plan's limit %lld", (long long)i,
                s->encoder_len, (long long)d->max_seq_len);
        REQUIRE(
            folioi_plan_most_keys(types, b, i) <= d->max_seq_len,
            "seq %lld: query_len %d is above the plan's limit max_seq_len %lld; as encoder_only each row "
            "sees all of them",
            (long long)i, s->query_len, (long long)d->max_seq_len);
        REQUIRE(
            d->block_size > 0 || (!s->has_table && !s->has_cross_table),
            "seq %lld has a block table, but the plan was made without a cache: set folio_plan_desc.cache",
            (long long)i);
    }
    return FOLIO_OK;
}

/* Keys of a sequence that any row of any attention planned as this type can see; begin is past end where
 * none can. */
static folioi_range visible_keys(const folioi_plan_shape *shape, const folioi_rows *rows,
                                 folio_attention_type type)
{
    folioi_range seen = {rows->key_len, 0};
    for (int32_t i = 0; i < shape->desc.num_attentions && rows->query_len > 0; i++) {
        if (!(shape->types[i] & FOLIO_ATTENTION_BIT(type))) continue;
        folioi_range r = key_range_of(rows, &shape->attentions[i]->desc, 0, rows->query_len);
        if (r.begin == r.end) continue;
        if (r.begin < seen.begin) seen.begin = r.begin;
        if (r.end > seen.end) seen.end = r.end;
    }
    return seen;
}

static folio_status check_table(const folioi_plan_shape *shape, const folioi_rows *rows,
                                folio_attention_type type, int64_t num_blocks, const char *name,
                                int64_t seq)
{
    folioi_range seen = visible_keys(shape, rows, type);
    int64_t bs = shape->desc.block_size;
    for (int32_t k = 0; k < rows->num_blocks; k++) {
        int32_t block = rows->blocks[k];
        REQUIRE(block < num_blocks, "seq %lld: %s[%d] = %d is outside [-1, %lld)", (long long)seq,
                name, k, block, (long long)num_blocks);
        REQUIRE(block >= 0 || (k + 1) * bs <= seen.begin || k * bs >= seen.end,
                "seq %lld: %s[%d] is FOLIO_NO_BLOCK, yet rows of this step see keys [%d, %d)",
                (long long)seq, name, k, seen.begin, seen.end);
    }
    return FOLIO_OK;
}

/* All tables of a type. What the batch found when it copied them tells which need a look. */
static folio_status check_tables(const folioi_plan_shape *shape, const folio_batch *batch,
                                 folio_attention_type type, int64_t num_blocks, const char *name)
{
    bool cross = type == FOLIO_ATTENTION_ENCODER_DECODER;
    bool fits = (cross ? batch->cross_blocks_end : batch->blocks_end) <= num_blocks;
    for (int64_t i = 0; i < batch->num_seqs; i++) {
        const folioi_seq *s = batch_seq(batch, i);
        if (fits && !(cross ? s->has_cross_holes : s->has_holes)) continue;
        folioi_rows rows = folioi_batch_rows(batch, i, type);
        TRY(check_table(shape, &rows, type, num_blocks, name, i));
    }
    return FOLIO_OK;
}

static folio_status check_slots(const folioi_plan_shape *shape, const folio_batch *batch,
                                folio_attention_type type, int64_t num_blocks, const char *name)
{
    int64_t n = folioi_batch_new_rows(batch, type);
    int64_t limit = num_blocks * shape->desc.block_size;
    const int64_t *slots = folioi_batch_slots(batch, type);
    for (int64_t i = 0; i < n; i++)
        REQUIRE(slots[i] < limit, "%s[%lld] = %lld is outside [-1, %lld)", name, (long long)i,
                (long long)slots[i], (long long)limit);
    return FOLIO_OK;
}

int64_t folioi_plan_find_shared_slot(folioi_slotset *set, const folio_batch *batch,
                                     folio_attention_type type)
{
    const int64_t *slots = folioi_batch_slots(batch, type);
    int64_t n = slots != NULL ? folioi_batch_new_rows(batch, type) : 0;
    folioi_slotset_clear(set);
    for (int64_t i = 0; i < n; i++)
        if (slots[i] >= 0 && !folioi_slotset_insert(set, slots[i])) return i;
    return -1;
}

/* The sequence that brings a new row, and which of its new rows it is. */
static int64_t find_owner(const folio_batch *batch, folio_attention_type type, int64_t *row)
{
    for (int64_t i = 0; i < batch->num_seqs; i++) {
        folioi_rows r = folioi_batch_rows(batch, i, type);
        if (*row < r.new_row || *row >= r.new_row + r.new_len) continue;
        *row -= r.new_row;
        return i;
    }
    return -1;
}

folio_status folioi_plan_check_writes(const folio_plan *plan, folio_attention_type type)
{
    int64_t second = plan->facts[type].shared_slot, first = 0;
    if (second < 0) return FOLIO_OK;
    const int64_t *slots = folioi_batch_slots(plan->batch, type), slot = slots[second];
    while (slots[first] != slot) first++;
    long long a = find_owner(plan->batch, type, &first);
    long long b = find_owner(plan->batch, type, &second);
    FAIL(FOLIO_ERR_ARGUMENT,
         "new token %lld of seq %lld and new token %lld of seq %lld both go to slot %lld, in block "
         "%lld",
         (long long)first, a, (long long)second, b, (long long)slot,
         (long long)slot / plan->shape.desc.block_size);
}

/* What can be seen of the promise of FOLIO_PLAN_PRIVATE_SLOTS, in sequences of one new token. */
static folio_status check_private_slots(const folio_plan_desc *d, const folio_batch *batch)
{
    for (int64_t i = 0; i < batch->num_seqs; i++) {
        folioi_rows r = folioi_batch_rows(batch, i, FOLIO_ATTENTION_DECODER);
        if (r.new_len != 1 || r.slots == NULL || r.slots[0] < 0 || r.blocks == NULL) continue;
        int64_t block = r.blocks[r.context_len / d->block_size];
        int64_t place = block * d->block_size + r.context_len % d->block_size;
        REQUIRE(block >= 0,
                "seq %lld: the slot of its new token is %lld, but its block table has no block "
                "there; with FOLIO_PLAN_PRIVATE_SLOTS it must be -1",
                (long long)i, (long long)r.slots[0]);
        REQUIRE(r.slots[0] == place,
                "seq %lld: the slot of its new token is %lld, its place in the block table is slot "
                "%lld; with FOLIO_PLAN_PRIVATE_SLOTS they must be equal",
                (long long)i, (long long)r.slots[0], (long long)place);
    }
    return FOLIO_OK;
}

folio_status folioi_plan_check(const folioi_plan_shape *shape, const folio_batch *batch)
{
    const folio_plan_desc *d = &shape->desc;
    TRY(check_capacities(shape, batch));
    TRY(check_tables(shape, batch, FOLIO_ATTENTION_DECODER, d->num_blocks, "block_table"));
    TRY(check_tables(shape, batch, FOLIO_ATTENTION_ENCODER_DECODER, d->cross_num_blocks,
                     "cross_block_table"));
    TRY(check_slots(shape, batch, FOLIO_ATTENTION_DECODER, d->num_blocks, "slots"));
    if (d->flags & FOLIO_PLAN_PRIVATE_SLOTS && d->block_size > 0)
        TRY(check_private_slots(d, batch));
    return check_slots(shape, batch, FOLIO_ATTENTION_ENCODER_DECODER, d->cross_num_blocks,
                       "cross_slots");
}
