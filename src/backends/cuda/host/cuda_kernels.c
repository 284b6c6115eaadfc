/* cuda_kernels.c: the lines of the kernel lists as a plan sees them: what it chooses by, their names, and a case for each. */
#include "backends/cuda/host/cuda_plan.h"

#include <stdio.h>
#include <string.h>

folioi_cuda_layer folioi_cuda_layer_prototype(const folioi_plan_shape *shape,
                                              const folio_attention_desc *a,
                                              folio_attention_type type)
{
    bool cross = type == FOLIO_ATTENTION_ENCODER_DECODER;
    folio_layout layout = cross ? shape->cross_layout : shape->layout;
    folioi_cuda_layer l;
    memset(&l, 0, sizeof l);
    l.dtype = a->dtype;
    l.kv_dtype = a->kv_dtype;
    l.num_heads = a->num_heads;
    l.num_kv_heads = a->num_kv_heads;
    l.k_dims = a->k_head_size;
    l.v_dims = a->v_head_size;
    l.v_in_k = a->v_in_k;
    l.scale = a->scale;
    l.soft_cap = folioi_cuda_soft_cap(a);
    l.window_left = a->window_left;
    l.window_right = a->window_right;
    l.block_size = shape->desc.block_size;
    l.cached = l.block_size > 0 && (cross || type == FOLIO_ATTENTION_DECODER);
    l.k.scale = l.v.scale = 1.0f;
    l.k.at.token_tile = l.k.at.dim_tile = 1;
    l.k.at.dim_tile_stride = 1;
    if (layout == FOLIO_LAYOUT_NATIVE &&
        kv_has_pages(l.kv_dtype, l.k_dims, l.v_dims, l.block_size)) {
        l.k.at.swizzle = FOLIOI_PAGE_SWIZZLE;
        l.k.at.token_tile_stride =
            FOLIOI_PAGE_TOKENS * (int64_t)(l.k_dims + (l.v_in_k ? 0 : l.v_dims));
    }
    l.v.at = l.k.at;
    if (layout == FOLIO_LAYOUT_XPACKED || layout == FOLIO_LAYOUT_XPACKED_1) {
        int32_t x = layout == FOLIO_LAYOUT_XPACKED ? folioi_cuda_pack(l.kv_dtype) : 1;
        l.v.at.token_tile_stride = l.k.at.dim_stride = 1;
        l.v.at.dim_tile_stride = l.block_size;
        l.k.at.token_tile_stride = l.k.at.dim_tile = x;
        l.k.at.dim_tile_stride = (int64_t)x * l.block_size;
    }
    return l;
}

static void add_name(char *names, size_t size, const char *name)
{
    size_t used = strlen(names);
    snprintf(names + used, size - used, "%s%s", used > 0 ? " " : "", name);
}

/* What a step runs if no line of the plan's first choice takes it. */
static void name_fallbacks(const folioi_cuda_use *use, bool prefills, bool decodes, char *names,
                           size_t size)
{
    const folioi_cuda_choice *const choices[] = {prefills ? &use->prefill : NULL,
                                                 decodes ? &use->decode : NULL};
    for (int f = 0; f < 2; f++)
        for (int i = 1; choices[f] != NULL && i < FOLIOI_CUDA_MOST_LINES; i++)
            if (choices[f]->lines[i] != NULL) add_name(names, size, choices[f]->lines[i]->name);
    add_name(names, size, "generic");
}

void folioi_cuda_name_kernels(folioi_cuda_use *use)
{
    for (int p = 0; p < FOLIOI_CUDA_PICKS; p++)
        for (int d = 0; d < FOLIOI_CUDA_PICKS; d++) {
            const folioi_cuda_line *prefill = p > 0 ? use->prefill.lines[p - 1] : NULL,
                                   *decode = d > 0 ? use->decode.lines[d - 1] : NULL;
            char *names = use->names[p][d];
            if (prefill != NULL) add_name(names, sizeof use->names[0][0], prefill->name);
            if (decode != NULL) add_name(names, sizeof use->names[0][0], decode->name);
            if (p == 0 && d == 0) add_name(names, sizeof use->names[0][0], "generic");
        }
    for (int has = 1; has < 4; has++)
        name_fallbacks(use, has & 1, has & 2, use->fallback[has & 1][has >> 1],
                       sizeof use->fallback[0][0]);
}

typedef enum { NOT_MATCHED, MATCHED, CHOSEN } line_use;

/* What examples of lines differ in, beside what a line is made for. */
typedef struct example_kind {
    folio_layout layout;
    int32_t block_size;
    float soft_cap;
} example_kind;

/* A case for a line, and what a plan does with it: the line cannot run it, could, or is chosen. */
static line_use example_of(const folioi_cuda_line *line, bool decode, const folioi_cuda_sm *sm,
                           const example_kind *kind, folio_context_kernel *info)
{
    *info = (folio_context_kernel){
        .name = line->name,
        .dtype = line->dtype != 0 ? line->dtype : FOLIO_F16,
        .layout = kind->layout,
        .block_size = kind->block_size,
        .head_size = line->k_dims - (line->is_flexible ? 8 : 0), /* one that no fixed line has */
        .min_rows = decode || line->v_in_k ? 1 : FOLIOI_DECODE_MAX_ROWS + 1,
        .v_in_k = line->v_in_k,
        .soft_cap = kind->soft_cap,
    };
    info->v_head_size = line->is_flexible ? info->head_size : line->v_dims;
    info->kv_dtype = line->kv != 0 ? line->kv : info->dtype;
    folioi_plan_shape shape = {.desc.block_size = kind->block_size, .layout = kind->layout};
    folio_attention_desc a = {.num_heads = 1,
                              .num_kv_heads = 1,
                              .k_head_size = info->head_size,
                              .v_head_size = info->v_head_size,
                              .v_in_k = info->v_in_k,
                              .dtype = info->dtype,
                              .kv_dtype = info->kv_dtype,
                              .scale = 1.0f,
                              .soft_cap = kind->soft_cap};
    folioi_cuda_layer prototype = folioi_cuda_layer_prototype(&shape, &a, FOLIO_ATTENTION_DECODER);
    const folioi_cuda_line *prefill =
        folioi_cuda_choose(folioi_cuda_prefill_line, &prototype, sm, 0).lines[0];
    if (decode && prefill != NULL)
        info->max_rows = ((const folioi_prefill_line *)prefill)->decode_rows;
    if (folioi_cuda_choose(decode ? folioi_cuda_decode_line : folioi_cuda_prefill_line, &prototype,
                           sm, info->max_rows)
            .lines[0] == line)
        return CHOSEN;
    return line->matches(line, &prototype, sm, info->max_rows) ? MATCHED : NOT_MATCHED;
}

/* A line that could run a case but is never chosen is listed too: `folio check` then fails and names it. */
static bool is_listed(const folioi_cuda_line *line, bool decode, const folioi_cuda_sm *sm,
                      folio_context_kernel *info)
{
    static const example_kind kinds[] = {
        {FOLIO_LAYOUT_NATIVE, 16, 0},  {FOLIO_LAYOUT_NHD, 16, 0},
        {FOLIO_LAYOUT_XPACKED, 16, 0}, {FOLIO_LAYOUT_XPACKED_1, 16, 0},
        {FOLIO_LAYOUT_NATIVE, 16, 20}, {FOLIO_LAYOUT_NHD, 16, 20},
        {FOLIO_LAYOUT_NATIVE, 8, 0},
    };
    bool taken = false;
    for (size_t i = 0; i < sizeof kinds / sizeof kinds[0]; i++) {
        folio_context_kernel example;
        line_use use = example_of(line, decode, sm, &kinds[i], &example);
        if (use == NOT_MATCHED || (taken && use == MATCHED)) continue;
        *info = example;
        if (use == CHOSEN) return true;
        taken = true;
    }
    return taken;
}

bool folioi_cuda_get_kernel(const folio_context *ctx, int32_t index, folio_context_kernel *info)
{
    const folioi_cuda_sm *sm = &device_of(ctx)->sm;
    const folioi_cuda_line *line;
    for (int decode = folioi_cuda_only_generic(ctx) ? 2 : 0; decode < 2; decode++)
        for (int32_t n = 0;
             (line = decode ? folioi_cuda_decode_line(n) : folioi_cuda_prefill_line(n)) != NULL;
             n++)
            if (is_listed(line, decode, sm, info) && index-- == 0) return true;
    *info = (folio_context_kernel){.name = "generic", /* types that no other kernel takes */
                                   .dtype = FOLIO_F32,
                                   .kv_dtype = FOLIO_BF16,
                                   .head_size = 128,
                                   .v_head_size = 128,
                                   .min_rows = 1};
    return index == 0;
}
