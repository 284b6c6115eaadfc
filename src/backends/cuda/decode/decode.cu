/*
 * decode.cu: the host's side of the decode family: sizes of a plan, shared memory of an instance, the choice of an instance
 * and its launch. The kernel is in decode_kernel.h. decode_schedule.h decides which block computes which keys.
 */
#include "backends/cuda/decode/decode_kernel.h"
#include "backends/cuda/host/launch.h"
#include "core/dtype.h"

typedef void decode_fn(decode_args);
typedef void noted_fn(noted_args);

/* ---- the list ---- */

typedef struct decode_line {
    folioi_cuda_line line;
    int32_t q_forms;            /* see block_shared                                         */
    int32_t warps[2];           /* of up to 8 rows, of up to 16                             */
    folioi_cuda_form form;      /* of fixed lines: rows stands for pages too                */
    bool options;               /* of fixed lines: scores may have a soft cap and ALiBi      */
    decode_fn *kernels[2][2];   /* the same, for the form and for pages; NULL: is none      */
    int32_t cluster_warps[2];   /* the same, for clusters of blocks; pages only             */
    decode_fn *clustered[2][2]; /* the same; without new rows to store, and with them */
    /* the last two, but they note bad writes: of 16 bits in pages, heads of 64 and 128 */
    noted_fn *noted[2], *noted_clustered[2][2];
} decode_line;

/* Fixed 16-bit instances know pages from rows too. */
template <int DIMS, int NT, int KV, int WARPS, folioi_cuda_form FORM, bool CLUSTERED = false,
          bool STORES = true, bool OPTIONS = false>
static constexpr decode_fn *kernel_of(void)
{
    constexpr bool NO_PAGES =
        FORM == FOLIOI_FORM_PAGES && (DIMS % 64 != 0 || (KV != FOLIO_F16 && KV != FOLIO_BF16));
    constexpr folioi_cuda_form OWN = NO_PAGES ? FOLIOI_FORM_ROWS : FORM;
    constexpr bool STORING = OWN == FOLIOI_FORM_PAGES && STORES;
    if constexpr (WARPS > 0)
        return decode_kernel<DIMS, NT, KV, WARPS, OWN, CLUSTERED, STORING, OPTIONS>;
    else return nullptr;
}

template <int DIMS, int NT, int KV, int WARPS, bool CLUSTERED = false, bool STORES = true>
static constexpr noted_fn *noted_of(void)
{
    if constexpr (WARPS > 0 && (KV == FOLIO_F16 || KV == FOLIO_BF16) && (DIMS == 64 || DIMS == 128))
        return decode_kernel<DIMS, NT, KV, WARPS, FOLIOI_FORM_PAGES, CLUSTERED, STORES, false,
                             noted_args>;
    else return nullptr;
}

static bool matches(const folioi_cuda_line *line, const folioi_cuda_layer *y,
                    const folioi_cuda_sm *sm, int32_t rows);

/* What all lines begin with. */
#define LINE(name, kv, dims, few, many, form, options)                                             \
    {"decode_" name "_d" #dims,                                                                    \
     kv_size(kv) > 1 ? (folio_dtype)kv : (folio_dtype)0,                                           \
     (folio_dtype)kv,                                                                              \
     dims,                                                                                         \
     dims,                                                                                         \
     kv == 0,                                                                                      \
     matches},                                                                                     \
        decode_instance<dims, 1, kv, form, false>::Q_FORMS, {few, many}, form, options
#define KERNELS(kv, dims, few, many, ...)                                                          \
    {                                                                                              \
        kernel_of<dims, 1, kv, few, __VA_ARGS__>(), kernel_of<dims, 2, kv, many, __VA_ARGS__>()    \
    }
#define XPACKED_LINE(name, kv, dims, few, many, form)                                              \
    {LINE(name, kv, dims, few, many, form, false),                                                 \
     {KERNELS(kv, dims, few, many, form), {}},                                                     \
     {},                                                                                           \
     {}},

static const decode_line lines[] = {
#define X(name, kv, dims, few, many, cluster_few, cluster_many)                                    \
    {LINE(#name, kv, dims, few, many, FOLIOI_FORM_ROWS, false),                                    \
     {KERNELS(kv, dims, few, many, FOLIOI_FORM_ROWS),                                              \
      KERNELS(kv, dims, few, many, FOLIOI_FORM_PAGES)},                                            \
     {cluster_few, cluster_many},                                                                  \
     {{kernel_of<dims, 1, kv, cluster_few, FOLIOI_FORM_PAGES, true, false>(),                      \
       kernel_of<dims, 1, kv, cluster_few, FOLIOI_FORM_PAGES, true>()},                            \
      {kernel_of<dims, 2, kv, cluster_many, FOLIOI_FORM_PAGES, true, false>(),                     \
       kernel_of<dims, 2, kv, cluster_many, FOLIOI_FORM_PAGES, true>()}},                          \
     {noted_of<dims, 1, kv, few>(), noted_of<dims, 2, kv, many>()},                                \
     {{noted_of<dims, 1, kv, cluster_few, true, false>(),                                          \
       noted_of<dims, 1, kv, cluster_few, true>()},                                                \
      {noted_of<dims, 2, kv, cluster_many, true, false>(),                                         \
       noted_of<dims, 2, kv, cluster_many, true>()}}},
#define OPTIONS(name, kv, dims, few, many)                                                         \
    {LINE("options_" #name, kv, dims, few, many, FOLIOI_FORM_ROWS, true),                          \
     {KERNELS(kv, dims, few, many, FOLIOI_FORM_ROWS, false, true, true),                           \
      KERNELS(kv, dims, few, many, FOLIOI_FORM_PAGES, false, true, true)},                         \
     {},                                                                                           \
     {}},
#define XPACKED(name, kv, dims, few, many)                                                         \
    XPACKED_LINE("x_" #name, kv, dims, few, many, FOLIOI_FORM_XPACKED)
#define XPACKED_1(name, kv, dims, few, many)                                                       \
    XPACKED_LINE("x1_" #name, kv, dims, few, many, FOLIOI_FORM_XPACKED_1)
#include "backends/cuda/decode/decode_instances.def"
#undef X
#undef OPTIONS
#undef XPACKED
#undef XPACKED_1
};
enum { NUM_LINES = sizeof lines / sizeof lines[0] };

extern "C" const folioi_cuda_line *folioi_cuda_decode_line(int32_t n)
{
    return n < NUM_LINES ? &lines[n].line : NULL;
}

/* ---- how an instance fits a multiprocessor ---- */

/* How an instance lies in shared memory. */
typedef struct block_fit {
    decode_fn *kernel;
    noted_fn *noted; /* NULL: there is none */
    int num_warps, num_stages, blocks_per_sm, row_blocks, rows, q_forms;
    int k_stride, v_stride, stage_bytes, q_stride, out_stride, out_copies;
    int out_bytes; /* of one copy; of a cluster what the warps of one number send to a block */
    int cluster, owned_slices; /* blocks of one, 0: none; see decode_cluster.h */
    bool scales, f32;
    size_t shared_bytes;
} block_fit;

/* With an odd number of 16-byte chunks per row, ldmatrix has no bank conflicts. */
static int row_stride(int dims, int bytes) { return ((dims * bytes + 15) / 16 | 1) * 16; }

static size_t fit_bytes(const block_fit *f)
{
    size_t bytes = (size_t)f->out_copies * f->out_bytes + sizeof(folioi_cuda_counts) +
                   sizeof(folioi_decode_share) + ROW_FLOATS * sizeof(float) +
                   (size_t)f->q_forms * 16 * f->q_stride * sizeof(uint16_t) +
                   (f->q_forms == 3 ? 16 * sizeof(row_option) : 0) +
                   (f->f32 ? f->num_warps * WEIGHT_FLOATS * sizeof(float) : 0) + STAGE_ALIGN;
    size_t stage = f->stage_bytes + sizeof(tile_note) + sizeof(uint64_t) +
                   (f->scales ? 32 * sizeof(float) : 0);
    return bytes + stage * f->num_warps * f->num_stages;
}

static bool fits(block_fit *f, const folioi_cuda_sm *sm, int blocks, int warps, int stages)
{
    f->blocks_per_sm = blocks;
    f->num_warps = warps;
    f->num_stages = stages;
    f->shared_bytes = fit_bytes(f);
    /* the device keeps 1 KB of every block for itself */
    size_t room = (size_t)sm->shared_bytes / (size_t)blocks - 1024;
    return f->shared_bytes <= room && f->shared_bytes <= (size_t)sm->shared_of_block;
}

/*
 * Blocks of half the warps, twice as many: items of few keys end sooner, as more of them are computed at once. Their warps
 * add up in one round.
 */
static bool fit_few_keys(block_fit *f, const folioi_cuda_sm *sm, int most)
{
    f->out_copies = most / 2;
    for (int stages = 4; stages >= 2; stages--)
        if (fits(f, sm, 4, most / 2, stages)) return true;
    return false;
}

/* stage_elem: bytes of the widest number a stage may hold. few_keys: no sequence sees more than FOLIOI_DECODE_WHOLE or so. */
static block_fit fit_block(const decode_line *line, const folioi_cuda_sm *sm, bool paged,
                           int k_dims, int v_dims, int stage_elem, int rows, bool scales,
                           bool few_keys)
{
    block_fit f = {};
    int many = line->warps[0] == 0 || (rows > 8 && line->warps[1] > 0);
    int kv_bytes = kv_size(line->line.kv), most = line->warps[many];
    bool fixed = !line->line.is_flexible;
    f.kernel = line->kernels[paged][many];
    f.noted = paged ? line->noted[many] : nullptr;
    f.scales = scales;
    f.f32 = line->line.kv == FOLIO_F32;
    f.rows = many ? 16 : 8;
    f.row_blocks = line->warps[1] == 0 ? 2 : 1;
    f.q_forms = line->q_forms;
    /* fragments have 16 dims: what is read past the head size must be the row's own zeros */
    f.k_stride = row_stride((int)round_up(k_dims, 16), stage_elem);
    f.v_stride = row_stride((int)round_up(v_dims, 16), stage_elem);
    if (fixed) f.k_stride = f.v_stride = k_dims * kv_bytes;
    f.stage_bytes = 16 * (f.k_stride + f.v_stride);
    f.q_stride = (int)round_up(k_dims, 16) + 8;
    f.out_stride = (int)round_up(v_dims, 32) + 4;
    f.out_bytes = f.rows * f.out_stride * (int)sizeof(float);
    if (few_keys && fixed && !many && most % 2 == 0 && fit_few_keys(&f, sm, most)) return f;
    f.out_copies = !fixed || many ? 1 : k_dims * kv_bytes == 256 ? 3 : 2;
    for (int warps = most; warps >= 4; warps--)
        for (int stages = 6; stages >= (warps > 4 ? 2 : 3); stages--)
            if (fits(&f, sm, 2, warps, stages)) return f;
    for (int stages = 6; stages >= 2; stages--)
        if (fits(&f, sm, 1, most, stages)) return f;
    for (int warps = most; warps >= 1; warps--)
        for (int stages = 2; stages >= 1; stages--)
            if (fits(&f, sm, 1, warps, stages)) return f;
    f.num_warps = 0;
    return f;
}

/* The same of a block of a cluster: it has room for what all warps send of the slices it owns. */
static block_fit fit_cluster(const decode_line *line, const folioi_cuda_sm *sm, int dims, int rows,
                             int cluster, bool stores)
{
    int many = rows > 8;
    block_fit f = fit_block(line, sm, true, dims, dims, 2, rows, false, false);
    f.kernel = line->clustered[many][stores];
    f.noted = line->noted_clustered[many][stores];
    f.cluster = cluster;
    f.rows = rows <= 4 ? 4 : rows <= 8 ? 8 : 16;
    f.owned_slices = dims / 8 / cluster;
    f.out_bytes = cluster * f.rows * (8 * f.owned_slices + 2) * (int)sizeof(float); /* of a warp */
    f.out_copies = line->cluster_warps[many]; /* at least one for each quad of add_sums */
    for (int stages = 3; stages >= 2; stages--)
        if (fits(&f, sm, 1, f.out_copies, stages)) return f;
    f.num_warps = 0;
    return f;
}

/* ---- what a layer allows ---- */

/*
 * Of one kv head with more than 16 query heads, 8 at a time are computed like a kv head of their own that has the same keys.
 * Returns how many such slices there are; 0: decode does not compute it.
 */
static int slices_of(const folioi_cuda_layer *y)
{
    int heads = y->num_heads / y->num_kv_heads;
    if (heads <= FOLIOI_DECODE_MAX_ROWS) return 1;
    return y->num_kv_heads == 1 && heads % 8 == 0 && !y->k.head_scales && !y->v.head_scales
               ? heads / 8
               : 0;
}

/* A layer with a kv head for each slice. */
static folioi_cuda_layer slice_layer(const folioi_cuda_layer *y)
{
    folioi_cuda_layer sliced = *y;
    if (slices_of(y) <= 1) return sliced;
    sliced.num_kv_heads = slices_of(y);
    sliced.k.at.head = sliced.k.scales_at.head = sliced.new_k.head = 0;
    sliced.v.at.head = sliced.v.scales_at.head = sliced.new_v.head = 0;
    return sliced;
}

/* Bytes by which all rows of K and V can be copied; below 4 they are copied number by number. */
static int widest_copy(const folioi_cuda_layer *y, int elem)
{
    for (int bytes = 16; bytes >= 4; bytes /= 2) {
        bool fit = y->k_dims * elem % bytes == 0 && y->v_dims * elem % bytes == 0;
        if (y->cached && !folioi_cuda_is_xpacked(y))
            fit = fit && folioi_cuda_side_aligned(&y->k, elem, bytes) &&
                  folioi_cuda_side_aligned(&y->v, elem, bytes);
        /* beside an 8-bit cache new rows are copied slowly */
        if ((!y->cached || y->append) && elem == 2)
            fit = fit && folioi_cuda_rows_aligned(&y->new_k, 2, bytes) &&
                  folioi_cuda_rows_aligned(&y->new_v, 2, bytes);
        if (fit) return bytes;
    }
    return elem;
}

static bool scales_alike(const folioi_address *k, const folioi_address *v)
{
    return k->block == v->block && k->head == v->head &&
           k->token_tile_stride == v->token_tile_stride;
}

/* Is the layer one for a fixed line? */
static bool is_fixed(const folioi_cuda_line *line, const folioi_cuda_layer *y)
{
    if (!y->cached || y->append || y->kv_dtype != line->kv) return false;
    folioi_cuda_form form = folioi_cuda_form_of(y);
    if (form == FOLIOI_FORM_PAGES) form = FOLIOI_FORM_ROWS;
    if (form != ((const decode_line *)line)->form) return false;
    if (line->dtype != 0 && y->dtype != line->dtype) return false;
    if (y->k_dims != line->k_dims || y->v_dims != line->v_dims) return false;
    if (y->kv_dtype == FOLIO_INT8 && !scales_alike(&y->k.scales_at, &y->v.scales_at)) return false;
    bool has_options = y->soft_cap > 0.0f || y->slopes != NULL;
    if (y->bias.data != NULL || (has_options && !((const decode_line *)line)->options))
        return false;
    if (y->k.head_scales != NULL || y->v.head_scales != NULL)
        return false; /* no register is left */
    int size = kv_size(line->kv);
    bool aligned = size < 4 ? folioi_cuda_rows_aligned(&y->q, 2, 4)
                            : folioi_cuda_rows_aligned(&y->q, 4, 16) &&
                                  folioi_cuda_rows_aligned(&y->out, 4, 16);
    return aligned && widest_copy(y, size) == 16;
}

/* Does one new token see so few keys that they are not cut? */
static bool has_few_keys(const folioi_cuda_layer *y)
{
    return y->window_left >= 0 && y->window_left < FOLIOI_DECODE_WHOLE && y->window_right <= 0;
}

/* How a layer's block lies in shared memory; 0 warps: the device has too little of it. */
static block_fit fit_layer(const folioi_cuda_line *line, const folioi_cuda_layer *y,
                           const folioi_cuda_sm *sm, int rows)
{
    bool wide = !y->cached || dtype_is_16_bit(y->kv_dtype) || (line->is_flexible && y->append);
    return fit_block((const decode_line *)line, sm, y->cached && folioi_cuda_has_pages(&y->k),
                     y->k_dims, y->v_dims, wide ? 2 : 1, rows,
                     y->cached && y->kv_dtype == FOLIO_INT8, has_few_keys(y));
}

static bool matches(const folioi_cuda_line *line, const folioi_cuda_layer *y,
                    const folioi_cuda_sm *sm, int32_t rows)
{
    if (!folioi_cuda_new_rows_fit(y)) return false;
    if (y->k_dims > 512 || slices_of(y) == 0) return false;
    /* f32 with f32 alone */
    if (line->kv == FOLIO_F32 ? y->dtype != FOLIO_F32 : !dtype_is_16_bit(y->dtype)) return false;
    if (y->cached && (y->kv_dtype == FOLIO_F32) != (line->kv == FOLIO_F32)) return false;
    if (y->cached && folioi_cuda_form_of(y) == FOLIOI_FORM_OTHER) return false;
    /* probabilities are of the cache's type, and bf16 ones too coarse for f16 results */
    if (y->cached && y->dtype == FOLIO_F16 && y->kv_dtype == FOLIO_BF16) return false;
    if (line->is_flexible ? y->v_dims > line->v_dims : !is_fixed(line, y)) return false;
    return fit_layer(line, y, sm, rows).num_warps > 0;
}

extern "C" bool folioi_cuda_decode_stores(const folioi_cuda_line *line, const folioi_cuda_layer *y)
{
    return !line->is_flexible && dtype_is_16_bit(line->kv) && folioi_cuda_has_pages(&y->k) &&
           slices_of(y) == 1 && y->new_k_dtype == y->kv_dtype && y->new_v_dtype == y->kv_dtype &&
           folioi_cuda_rows_aligned(&y->new_k, 2, 16) && folioi_cuda_rows_aligned(&y->new_v, 2, 16);
}

extern "C" bool folioi_cuda_decode_notes(const folioi_cuda_line *line, const folioi_cuda_layer *y)
{
    return ((const decode_line *)line)->noted[0] != nullptr && folioi_cuda_has_pages(&y->k);
}

/* ---- clusters ---- */

static const decode_line *clustered_line(const folioi_cuda_layer *y, const folioi_cuda_sm *sm,
                                         int rows)
{
    const decode_line *line =
        (const decode_line *)folioi_cuda_choose(folioi_cuda_decode_line, y, sm, rows).lines[0];
    return line != NULL && line->cluster_warps[0] > 0 && y->cached && folioi_cuda_has_pages(&y->k)
               ? line
               : NULL;
}

/* Once for each kernel: clusters of more than 8 blocks are allowed, and all shared memory. */
static bool prepare_cluster(const folioi_cuda_sm *sm, const void *kernel)
{
    return folioi_cuda_prepare(sm->ready, kernel, sm->shared_of_block, true) == cudaSuccess &&
           cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) ==
               cudaSuccess;
}

/* Clusters of a size that run at once. */
static int clusters_at_once(const decode_line *line, const folioi_cuda_sm *sm, int dims, int size)
{
    int least = 0;
    for (int n = 0; n < 4; n++) { /* every kernel there is */
        block_fit f = fit_cluster(line, sm, dims, n / 2 ? 16 : 4, size, n % 2);
        const void *kernel = (const void *)f.kernel;
        int number = 0;
        if (f.num_warps == 0 || !prepare_cluster(sm, kernel) ||
            !prepare_cluster(sm, (const void *)f.noted))
            return 0;
        launch_shape shape = {dim3(1, size), 32u * f.num_warps, f.shared_bytes, size, false};
        launch_config c(shape, 0);
        if (cudaOccupancyMaxActiveClusters(&number, kernel, &c.config) != cudaSuccess) number = 0;
        if (n == 0 || number < least) least = number;
    }
    (void)cudaGetLastError(); /* a size that the device does not have */
    return least;
}

/* The sizes that there are; each divides the slices of out, which have 8 dims. */
static const int cluster_sizes[] = {16, 8};

extern "C" void folioi_cuda_decode_clusters(folioi_cuda_limits *l)
{
    const folioi_cuda_layer y = slice_layer(&l->prototype);
    const decode_line *line = clustered_line(&y, &l->sm, 1);
    if (!l->sm.overlaps || l->batch_invariant || line == NULL) return;
    /* without clusters prefill is faster than slices, each of which reads the keys */
    if (slices_of(&l->prototype) > 1 && !decode_is_clustered(1, l->max_seqs, l->max_seq_len))
        return;
    for (int size : cluster_sizes) {
        if (y.num_kv_heads * size > l->sm.count ||
            clusters_at_once(line, &l->sm, y.v_dims, size) < y.num_kv_heads)
            continue;
        l->cluster = size;
        l->cluster_seqs = 1;
        return;
    }
}

/* ---- a plan's numbers ---- */

extern "C" void folioi_cuda_decode_init(folioi_cuda_decode_plan *plan, const folioi_cuda_limits *l)
{
    const folioi_cuda_layer *prototype = &l->prototype;
    int heads_per_kv = prototype->num_heads / prototype->num_kv_heads;
    bool is_sliced = l->cluster > 0 && slices_of(prototype) > 1;
    int heads = is_sliced ? slices_of(prototype) : prototype->num_kv_heads;
    *plan = {};
    int64_t rows =
        min_i64(l->max_query_len, max_i64(l->decode_rows / heads_per_kv, 1)) * heads_per_kv;
    plan->max_rows = (int32_t)(rows > 16 && !is_sliced ? 16 : round_up(rows, 2));
    plan->sm = l->sm;
    plan->cluster = l->cluster;
    plan->cluster_seqs = l->cluster_seqs;
    const folioi_cuda_line *line =
        folioi_cuda_choose(folioi_cuda_decode_line, prototype, &l->sm, plan->max_rows).lines[0];
    if (line == NULL) line = &lines[NUM_LINES - 1].line; /* nothing will be launched */
    block_fit f = fit_layer(line, prototype, &l->sm, plan->max_rows);
    int64_t shares = (int64_t)l->sm.count * f.blocks_per_sm / heads;
    plan->num_shares = (int32_t)(shares < 1 ? 1 : shares);
    plan->max_items = l->max_seqs + plan->num_shares;
    plan->max_stores = 2 * (int64_t)plan->num_shares;
    if (l->batch_invariant) {
        int64_t len = round_up(ceil_div(l->max_seq_len, 64), 64); /* at most 64 parts */
        plan->split_len = (int32_t)(len < 1024 ? 1024 : len);
        plan->max_items = l->max_seqs * (ceil_div(l->max_seq_len, plan->split_len) + 1);
        plan->max_stores = plan->max_items;
    }
    plan->schedule_bytes = (size_t)(plan->num_shares * (int64_t)sizeof(folioi_decode_share) +
                                    plan->max_items * (int64_t)sizeof(folioi_decode_item));
    plan->counter_bytes = (size_t)round_up(l->max_seqs * heads * 2 * 4, 256);
    plan->workspace_bytes =
        plan->counter_bytes + (size_t)(plan->max_stores * prototype->num_kv_heads * plan->max_rows *
                                       (prototype->v_dims + 2) * 4);
}

extern "C" folioi_decode_table folioi_cuda_decode_table(const folioi_cuda_decode_plan *plan)
{
    folioi_decode_share *shares = (folioi_decode_share *)plan->schedule;
    return {shares, (folioi_decode_item *)(shares + plan->num_shares), NULL, NULL};
}

/* ---- a launch ---- */

/* Can bulk copies take the scales of 16 tokens? Their places need 31 bits. Those of V lie as K's do: is_fixed. */
static bool scales_in_bulk(decode_boxes *b, const folioi_cuda_layer *y)
{
    const folioi_address *at = &y->k.scales_at;
    int64_t starts = (int64_t)(intptr_t)y->k.scales | (int64_t)(intptr_t)y->v.scales;
    if (at->token_tile_stride != 1 || (at->block | at->head) % 4 != 0 || starts % 16 != 0 ||
        at->block < 0 || at->head < 0 || at->block > INT32_MAX / (y->num_blocks + 1) ||
        at->head > INT32_MAX / y->num_kv_heads ||
        at->block * y->num_blocks + at->head * y->num_kv_heads > INT32_MAX)
        return false;
    b->scale_block = (int32_t)at->block;
    b->scale_head = (int32_t)at->head;
    return true;
}

/* Boxes for layers of a fixed line whose K and V are rows of 16 or of 8 bits. */
static bool describe_boxes(decode_boxes *b, const decode_line *line, const folioi_cuda_layer *y,
                           const folioi_cuda_sm *sm, int bytes)
{
    if (line->line.is_flexible ||
        line->line.kv == FOLIO_F32 || /* whose rows come by plain copies */
        line->form != FOLIOI_FORM_ROWS || sm->capability < 90 || sm->describe_tensor == NULL ||
        !y->cached || y->block_size % 16 != 0 || folioi_cuda_has_pages(&y->k))
        return false;
    if (y->kv_dtype == FOLIO_INT8 && !scales_in_bulk(b, y)) return false;
    bool has_panels = fixed_form(y->k_dims, bytes, FOLIOI_FORM_ROWS) == PANELED_TILE;
    int panel = has_panels ? 128 : 0;
    return describe_box(&b->k, y, sm, &y->k, y->k_dims, bytes, panel) &&
           describe_box(&b->v, y, sm, &y->v, y->v_dims, bytes, panel);
}

static void fill_args(decode_args *a, const folioi_cuda_run *run,
                      const folioi_cuda_decode_plan *plan)
{
    const folioi_cuda_layer sliced = slice_layer(run->layer), *y = &sliced;
    const folioi_cuda_step *step = run->step;
    a->layer = *y;
    if (!y->cached) a->layer.kv_dtype = y->dtype;
    if (a->layer.kv_dtype != FOLIO_INT8) a->layer.k.scales = a->layer.v.scales = NULL;
    if (!dtype_is_fp8(a->layer.kv_dtype)) a->layer.k.scale = a->layer.v.scale = 1.0f;
    folioi_decode_table table = folioi_cuda_decode_table(plan);
    a->blocks = step->blocks;
    a->stores = step->decode_stores;
    a->counts = step->counts;
    a->seqs = step->seqs;
    a->shares = table.shares;
    a->items = table.items;
    a->out_quads = y->v_dims % 4 == 0 && folioi_cuda_rows_aligned(&y->out, 2, 8);
    a->counters = run->counters;
    a->partials = (float *)(run->workspace + plan->counter_bytes);
    a->out_rows = step->out_rows;
    a->max_rows = plan->max_rows / slices_of(run->layer);
    a->heads_per_kv = y->num_heads / y->num_kv_heads;
    a->kv_bytes = kv_size(a->layer.kv_dtype);
    a->copy_bytes = widest_copy(&a->layer, a->kv_bytes);
    a->k_copies = y->k_dims * a->kv_bytes / a->copy_bytes;
    a->v_copies = y->v_dims * a->kv_bytes / a->copy_bytes;
    a->block_shift = -1;
    for (int shift = 0; shift < 31; shift++)
        if (y->block_size == 1 << shift) a->block_shift = shift;
    a->one_block_tiles = y->block_size % 16 == 0;
    a->paged = y->cached && folioi_cuda_has_pages(&y->k);
    a->xpacked = folioi_cuda_is_xpacked(y);
    a->k_by_dims = a->xpacked && folioi_cuda_by_dims(&y->k);
    a->k_unit = a->paged ? 0 : a->xpacked ? 16 * y->block_size : 16;
    a->bulk = a->xpacked
                  ? y->block_size == 16
                  : a->one_block_tiles && (a->paged || (y->k.at.token_tile_stride == y->k_dims &&
                                                        y->v.at.token_tile_stride == y->v_dims));
    a->k_inverse = ((1u << 22) + a->k_copies - 1) / a->k_copies;
    a->v_inverse = ((1u << 22) + a->v_copies - 1) / a->v_copies;
}

extern "C" cudaError_t folioi_cuda_decode(const folioi_cuda_line *line, const folioi_cuda_run *run,
                                          const folioi_cuda_decode_plan *plan, int32_t rows,
                                          bool clustered, folioi_cuda_early early,
                                          const folioi_cuda_noting *noting)
{
    decode_args a = {};
    a.early = early;
    fill_args(&a, run, plan);
    const decode_line *l = (const decode_line *)line;
    rows /= slices_of(run->layer);
    a.has_boxes = describe_boxes(&a.boxes, l, &a.layer, &plan->sm, a.kv_bytes);
    clustered = clustered && a.paged && l->cluster_warps[0] > 0;
    block_fit f = clustered ? fit_cluster(l, &plan->sm, line->v_dims, rows, plan->cluster, a.stores)
                            : fit_layer(line, &a.layer, &plan->sm, rows);
    a.cluster = f.cluster;
    a.owned_slices = f.owned_slices;
    a.num_warps = f.num_warps;
    a.warps_inverse = f.num_warps > 1 ? UINT32_MAX / f.num_warps + 1 : UINT32_MAX;
    a.num_stages = f.num_stages;
    a.row_blocks = f.row_blocks;
    a.k_stride = f.k_stride;
    a.v_stride = f.v_stride;
    a.stage_bytes = f.stage_bytes;
    a.q_stride = f.q_stride;
    a.out_stride = f.out_stride;
    a.out_copies = f.out_copies;
    a.out_size = f.out_bytes / (int)sizeof(float);
    /* always the most: other layers launch the same kernel with more than this one */
    bool notes = noting->notes != nullptr && f.noted != nullptr;
    const void *kernel = notes ? (const void *)f.noted : (const void *)f.kernel;
    cudaError_t error = folioi_cuda_prepare(plan->sm.ready, kernel, plan->sm.shared_of_block, true);
    if (error != cudaSuccess) return error;
    int shares = clustered ? f.cluster * plan->cluster_seqs : plan->num_shares;
    /* clusters that wait for a write beside the decode before it begin later than without overlap */
    bool overlaps = plan->sm.overlaps != 0 && (!clustered || early == FOLIOI_EARLY_KEYS);
    launch_shape shape = {dim3(a.layer.num_kv_heads, shares, f.row_blocks), 32u * f.num_warps,
                          f.shared_bytes, f.cluster, overlaps};
    if (!notes) return launch_kernel(f.kernel, shape, a, run->stream);
    noted_args n = {};
    static_cast<decode_args &>(n) = a;
    n.noting = *noting;
    return launch_kernel(f.noted, shape, n, run->stream);
}
