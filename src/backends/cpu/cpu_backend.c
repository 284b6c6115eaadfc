/* cpu_backend.c: the cpu backend's entry in the registry, and its plans: a schedule for each attention
 * of the list and each type it is planned as. */
#include "backends/cpu/cpu_forward.h"
#include "backends/host_merge.h"
#include "backends/registry.h"
#include "cache/kv_host.h"
#include "core/host_memory.h"

#include <pthread.h>
#include <string.h>
#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

/* 64 MiB of partial results in all; where a step would want more, fewer tiles are shared out */
#define PARTIAL_FLOATS ((int64_t)16 << 20)

typedef struct {
    folioi_plan_shape shape;
    folioi_schedule *schedules; /* [num_attentions][FOLIO_NUM_ATTENTION_TYPES] */
    int64_t bytes;
} cpu_plan;

static folioi_schedule_limits limits_of(const folioi_plan_shape *shape, int32_t attention, int type)
{
    const folio_plan_desc *d = &shape->desc;
    const folio_attention_desc *a = &shape->attentions[attention]->desc;
    int64_t queries = type == FOLIO_ATTENTION_ENCODER ? d->max_encoder_tokens : d->max_query_tokens;
    int64_t budget =
        PARTIAL_FLOATS / ((int64_t)a->num_kv_heads * (folioi_out_stride(a->v_head_size) + 2));
    return folioi_schedule_size(a, d->max_seqs, queries, d->max_seq_len, shape->ctx->num_threads,
                                FOLIOI_TILE_ROWS, FOLIOI_SPLIT_LEN, budget);
}

/* The plan and its schedules in one piece of memory; the same code sizes and fills it. */
static cpu_plan *carve(const folioi_plan_shape *shape, folioi_arena *arena, size_t *workspace_size)
{
    cpu_plan *plan = arena_take(arena, sizeof *plan);
    int64_t n = (int64_t)shape->desc.num_attentions * FOLIO_NUM_ATTENTION_TYPES;
    folioi_schedule *schedules = arena_take(arena, n * (int64_t)sizeof *schedules);
    int64_t workspace = 0;
    for (int64_t i = 0; i < n; i++) {
        int32_t attention = (int32_t)(i / FOLIO_NUM_ATTENTION_TYPES);
        int type = (int)(i % FOLIO_NUM_ATTENTION_TYPES);
        if (!(shape->types[attention] & FOLIO_ATTENTION_BIT(type))) continue;
        folioi_schedule s = {.limits = limits_of(shape, attention, type)};
        s.items = arena_take(arena, s.limits.max_items * (int64_t)sizeof *s.items);
        s.scratch = arena_take(arena, s.limits.max_items * (int64_t)sizeof *s.scratch);
        s.weights = arena_take(arena, s.limits.max_items);
        s.chains = arena_take(arena, s.limits.max_chains * (int64_t)sizeof *s.chains);
        if (arena->base != NULL) schedules[i] = s;
        folioi_cpu_memory m =
            folioi_cpu_memory_of(&s.limits, &shape->attentions[attention]->desc, NULL);
        workspace = max_i64(workspace, m.bytes);
    }
    if (arena->base != NULL)
        *plan = (cpu_plan){.shape = *shape, .schedules = schedules, .bytes = arena->used};
    *workspace_size = (size_t)workspace;
    return plan;
}

static folio_status plan_create(const folioi_plan_shape *shape, void **state,
                                size_t *workspace_size)
{
    folioi_arena arena = {NULL, 0};
    void *memory;
    carve(shape, &arena, workspace_size);
    TRY(folioi_alloc(&shape->ctx->allocator, arena.used, "a plan's schedules", &memory));
    arena = (folioi_arena){memory, 0};
    *state = carve(shape, &arena, workspace_size);
    return FOLIO_OK;
}

static void plan_destroy(const folioi_plan_shape *shape, void *state)
{
    cpu_plan *plan = state;
    folioi_free(&shape->ctx->allocator, plan, plan->bytes);
}

static folio_status plan_update(void *state, const folio_batch *batch, void *stream)
{
    (void)stream;
    cpu_plan *plan = state;
    for (int32_t i = 0; i < plan->shape.desc.num_attentions; i++)
        for (int t = 0; t < FOLIO_NUM_ATTENTION_TYPES; t++)
            if (plan->shape.types[i] & FOLIO_ATTENTION_BIT(t))
                folioi_schedule_fill(&plan->schedules[i * FOLIO_NUM_ATTENTION_TYPES + t],
                                     &plan->shape.attentions[i]->desc, batch,
                                     (folio_attention_type)t);
    return FOLIO_OK;
}

static void plan_describe(const void *state, int32_t attention, folio_attention_type type,
                          const folioi_call *call, folio_plan_info *info)
{
    const cpu_plan *plan = state;
    const folio_attention_desc *a = &plan->shape.attentions[attention]->desc;
    const folioi_schedule *s = &plan->schedules[attention * FOLIO_NUM_ATTENTION_TYPES + (int)type];
    const folioi_cpu_kernels *kernels = plan->shape.ctx->kernels;
    bool pairs = call == NULL || folioi_cpu_takes_pairs(call);
    enum folioi_attend_instance kernel = folioi_attend_choose(a, pairs),
                                fallback = folioi_attend_choose(a, false);
    info->kernel = kernels->attend[kernel].name;
    if (fallback != kernel && call == NULL) info->fallback = kernels->attend[fallback].name;
    info->num_items = s->num_items * a->num_kv_heads;
    for (int64_t i = 0; i < s->num_chains; i++)
        info->num_split_items += (int64_t)s->chains[i].num_items * a->num_kv_heads;
    info->split_len = FOLIOI_SPLIT_LEN;
}

static folio_status forward(const folioi_call *call)
{
    const cpu_plan *plan = call->plan_state;
    folioi_kv_tensors rows = call_new_rows(call);
    if (call->slots != NULL)
        folioi_cpu_write(call->shape->ctx, &call->layer, &rows, call->slots, call->num_slots, NULL);
    int64_t index = (int64_t)call->attention_index * FOLIO_NUM_ATTENTION_TYPES + (int)call->type;
    folioi_cpu_attend(call, &plan->schedules[index]);
    return FOLIO_OK;
}

static const char *unavailable(void) { return NULL; }

static char cpu_name[49] = "host CPU";
static pthread_once_t cpu_name_once = PTHREAD_ONCE_INIT;

static void read_cpu_name(void)
{
#if defined(__x86_64__) || defined(__i386__)
    unsigned r[12];
    for (unsigned i = 0; i < 3; i++)
        if (!__get_cpuid(0x80000002u + i, &r[4 * i], &r[4 * i + 1], &r[4 * i + 2], &r[4 * i + 3]))
            return;
    const char *name = (const char *)r;
    while (*name == ' ') name++;
    size_t n = strnlen(name, sizeof r - (size_t)(name - (const char *)r));
    while (n > 0 && name[n - 1] == ' ') n--;
    if (n == 0) return;
    memcpy(cpu_name, name, n);
    cpu_name[n] = '\0';
#endif
}

static const char *device(void)
{
    pthread_once(&cpu_name_once, read_cpu_name);
    return cpu_name;
}

static const void *kernels(const char *cap, const char **level)
{
    const folioi_cpu_kernels *table = folioi_cpu_table(cap);
    if (table != NULL) *level = table->level;
    return table;
}

const folioi_backend folioi_cpu_backend = {
    .name = "cpu",
    .unavailable = unavailable,
    .device = device,
    .levels = folioi_cpu_level_names,
    .level_env = "FOLIO_CPU",
    .kernels = kernels,
    .get_kernel = folioi_cpu_get_kernel,
    .max_head_size = FOLIOI_MAX_HEAD_SIZE,
    .features = folioi_host_features,
    .alloc = folioi_host_alloc,
    .free = folioi_host_free,
    .copy = folioi_host_copy,
    .fill = folioi_host_fill,
    .wait = folioi_host_wait,
    .write = folioi_cpu_write,
    .gather = folioi_host_gather,
    .move_blocks = folioi_host_move_blocks,
    .plan_create = plan_create,
    .plan_destroy = plan_destroy,
    .plan_update = plan_update,
    .plan_describe = plan_describe,
    .forward = forward,
    .merge = folioi_host_merge,
};
