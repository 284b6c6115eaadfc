/*
 * vllm06_on_device.c: calls of vLLM 0.6's interface with what they are given brought to the device; see the header.
 *
 *     device:  guard | piece | guard | piece | ... | guard      each piece aligned as the host's memory is
 *
 * Pieces arrive in the call's stream, after a pause: work that went to another stream finds guards in their places,
 * and its numbers are wrong. The guards must be whole when the call is done. Three calls of four run on a stream that
 * the default stream does not wait for, the fourth on the default stream.
 */
#include "vllm06_on_device.h"

#include "test.h"
#include "vllm06/vllm06.h" /* a layer's shape */

#include <cuda_runtime_api.h>
#include <stdlib.h>
#include <time.h>

enum { GUARD = 256, GUARD_BYTE = 0xA5, MAX_PIECES = 16 };
#define ARENA ((size_t)96 << 20)

typedef struct {
    char *host;
    size_t at, bytes;
} piece;

static char *device, *pinned, *received;
static cudaStream_t side;   /* of most calls */
static cudaStream_t stream; /* this call's */
static unsigned num_calls;
static size_t used;
static piece pieces[MAX_PIECES];
static int num_pieces;

static void must(cudaError_t error, const char *what)
{
    if (error == cudaSuccess) return;
    fprintf(stderr, "%s: %s\n", what, cudaGetErrorString(error));
    exit(1);
}
#define MUST(call) must((call), #call)

static void begin(void)
{
    if (device == NULL) {
        MUST(cudaMalloc((void **)&device, ARENA));
        MUST(cudaHostAlloc((void **)&pinned, ARENA, cudaHostAllocPortable));
        MUST(cudaHostAlloc((void **)&received, ARENA, cudaHostAllocPortable));
        MUST(cudaStreamCreateWithFlags(&side, cudaStreamNonBlocking));
    }
    stream = num_calls++ % 4 == 3 ? NULL : side;
    num_pieces = 0;
    used = GUARD;
}

/* Where host memory will be on the device. What is NULL or has no size stays as it is: the library refuses it. */
static void *bring(const void *host, int64_t bytes)
{
    if (host == NULL || bytes <= 0 || (size_t)bytes > ARENA / 4) return (void *)(uintptr_t)host;
    for (int i = 0; i < num_pieces; i++)
        if (pieces[i].host == host && pieces[i].bytes >= (size_t)bytes)
            return device + pieces[i].at;
    /* the same calls bring the same memory to the same place: states remember caches by their addresses */
    size_t from = (used + 63) / 64 * 64, at = from + (uintptr_t)host % 64;
    used = from + 64 + (size_t)bytes + GUARD;
    if (num_pieces == MAX_PIECES || used > ARENA) abort();
    pieces[num_pieces++] = (piece){(char *)(uintptr_t)host, at, (size_t)bytes};
    return device + at;
}

static void pause_stream(void *nothing)
{
    struct timespec t = {0, 1500000}; /* longer than the host takes for a call */
    (void)nothing;
    nanosleep(&t, NULL);
}

/* After the last bring, before the call. */
static void send(void)
{
    MUST(cudaMemset(device, GUARD_BYTE, used));
    MUST(cudaDeviceSynchronize());
    MUST(cudaLaunchHostFunc(stream, pause_stream, NULL));
    for (int i = 0; i < num_pieces; i++) {
        const piece *p = &pieces[i];
        memcpy(pinned + p->at, p->host, p->bytes);
        MUST(cudaMemcpyAsync(device + p->at, pinned + p->at, p->bytes, cudaMemcpyHostToDevice,
                             stream));
    }
}

/* Bytes [from, to) outside all pieces. */
static void check_guard(size_t from, size_t to)
{
    for (size_t i = from; i < to; i++)
        if ((unsigned char)received[i] != GUARD_BYTE) {
            test_fail(__FILE__, __LINE__, "a byte outside what the call was given was written");
            return;
        }
}

/*
 * After the call. What a refused call was given must be as it was; it does not go back, since it may be said to be
 * longer than the host's memory is.
 */
static folio_status finish(folio_status status)
{
    bool refused = status == FOLIO_ERR_ARGUMENT || status == FOLIO_ERR_UNSUPPORTED;
    size_t checked = 0;
    MUST(cudaStreamSynchronize(stream));
    MUST(cudaMemcpy(received, device, used, cudaMemcpyDeviceToHost));
    for (int i = 0; i < num_pieces; i++) {
        const piece *p = &pieces[i];
        check_guard(checked, p->at);
        checked = p->at + p->bytes;
        if (!refused) memcpy(p->host, received + p->at, p->bytes);
        else if (memcmp(pinned + p->at, received + p->at, p->bytes) != 0)
            test_fail(__FILE__, __LINE__, "the refused call has written");
    }
    check_guard(checked, used);
    return status;
}

/* Where calls run: the stream in use, or without a run. */
static const folio_run *on_stream(void)
{
    static folio_run run;
    run = (folio_run){.struct_size = sizeof run, .stream = stream};
    return stream != NULL ? &run : NULL;
}

static int64_t size_of(folio_dtype dtype) { return (int64_t)folio_dtype_size(dtype); }

static folio_vllm06_kv_cache bring_kv(const folio_vllm06_kv_cache *c)
{
    folio_vllm06_kv_cache r = *c;
    int64_t bytes = c->num_blocks * c->block_size * c->num_kv_heads * c->head_size;
    bytes *= size_of(c->dtype) * (c->value_cache == NULL ? 2 : 1);
    r.key_cache = bring(c->key_cache, bytes);
    r.value_cache = bring(c->value_cache, bytes);
    return r;
}

/* ---------------------------------------------------------------------------- layers and their blocks */

static folio_tensor bring_tensor(const folio_tensor *t, const folio_attention_desc *d,
                                 int64_t heads)
{
    folio_tensor r = *t;
    int64_t head = t->head_stride > 0 ? t->head_stride : d->k_head_size;
    int64_t row = t->token_stride > 0 ? t->token_stride : heads * head;
    int64_t elements = (t->tokens - 1) * row + (heads - 1) * head + d->k_head_size;
    r.data = bring(t->data, t->tokens > 0 ? elements * size_of(t->dtype ? t->dtype : d->dtype) : 0);
    return r;
}

folio_status on_device_forward(folio_vllm06_impl *impl, const folio_vllm06_forward_args *args,
                               const folio_run *run)
{
    if (impl == NULL || args == NULL || args->struct_size != sizeof *args)
        return folio_vllm06_forward(impl, args, run);
    const folio_attention_desc *d = &impl->desc;
    folio_vllm06_forward_args a = *args;
    folio_vllm06_kv_cache kv;
    begin();
    a.query = bring_tensor(&args->query, d, d->num_heads);
    a.key = bring_tensor(&args->key, d, d->num_kv_heads);
    a.value = bring_tensor(&args->value, d, d->num_kv_heads);
    a.output = bring_tensor(&args->output, d, d->num_heads);
    if (args->kv_cache != NULL) {
        kv = bring_kv(args->kv_cache);
        a.kv_cache = &kv;
    }
    send();
    return finish(folio_vllm06_forward(impl, &a, on_stream()));
}

folio_status on_device_copy_blocks(folio_vllm06_state *state,
                                   const folio_vllm06_kv_cache *kv_caches, int64_t num_caches,
                                   const folio_block_pair *pairs, int64_t num_pairs,
                                   const folio_run *run)
{
    folio_vllm06_kv_cache placed[MAX_PIECES / 2];
    if (kv_caches == NULL || num_caches < 0 || num_caches > MAX_PIECES / 2)
        return folio_vllm06_copy_blocks(state, kv_caches, num_caches, pairs, num_pairs, run);
    begin();
    for (int64_t i = 0; i < num_caches; i++) placed[i] = bring_kv(&kv_caches[i]);
    send();
    return finish(
        folio_vllm06_copy_blocks(state, placed, num_caches, pairs, num_pairs, on_stream()));
}

folio_status on_device_swap_blocks(folio_vllm06_state *state, const folio_vllm06_kv_cache *src,
                                   const folio_vllm06_kv_cache *dst, const folio_block_pair *pairs,
                                   int64_t num_pairs, const folio_run *run)
{
    if (src == NULL || dst == NULL)
        return folio_vllm06_swap_blocks(state, src, dst, pairs, num_pairs, run);
    begin();
    folio_vllm06_kv_cache from = bring_kv(src), to = bring_kv(dst);
    send();
    return finish(folio_vllm06_swap_blocks(state, &from, &to, pairs, num_pairs, on_stream()));
}

/* ------------------------------------------------------------------------------------ the operators */

folio_status on_device_reshape_and_cache(folio_vllm06_state *state,
                                         const folio_vllm06_reshape_and_cache_args *args,
                                         const folio_vllm06_kv_cache *cache, const folio_run *run)
{
    if (cache == NULL || args == NULL || args->struct_size != sizeof *args)
        return folio_vllm06_reshape_and_cache(state, args, cache, run);
    begin();
    folio_vllm06_kv_cache c = bring_kv(cache);
    folio_vllm06_reshape_and_cache_args a = *args;
    int64_t row = (int64_t)c.num_kv_heads * c.head_size, elem = size_of(a.dtype);
    int64_t before = a.num_tokens - 1; /* rows before the last one */
    int64_t key = before * (a.key_stride ? a.key_stride : row) + row;
    int64_t value = before * (a.value_stride ? a.value_stride : row) + row;
    a.key = bring(args->key, before >= 0 ? key * elem : 0);
    a.value = bring(args->value, before >= 0 ? value * elem : 0);
    send();
    return finish(folio_vllm06_reshape_and_cache(state, &a, &c, on_stream()));
}

static folio_status paged(folio_vllm06_state *state, const folio_vllm06_paged_attention_args *args,
                          const folio_vllm06_kv_cache *cache, bool v2)
{
    folio_vllm06_paged_attention_args a = *args;
    begin();
    folio_vllm06_kv_cache c = bring_kv(cache);
    int64_t rows = a.num_seqs * a.num_heads, row = c.head_size * size_of(a.dtype);
    int64_t query = rows * row;
    if (a.num_seqs > 0 && a.query_stride > 0 &&
        (size_t)a.query_stride < ARENA / 4) /* else refused */
        query = (a.num_seqs - 1) * a.query_stride * size_of(a.dtype) + a.num_heads * row;
    a.query = bring(args->query, query);
    a.out = bring(args->out, rows * row);
    a.alibi_slopes = bring(args->alibi_slopes, a.num_heads * (int64_t)sizeof(float));
    send();
    return finish(v2 ? folio_vllm06_paged_attention_v2(state, &a, &c, NULL, NULL, NULL, on_stream())
                     : folio_vllm06_paged_attention_v1(state, &a, &c, on_stream()));
}

folio_status on_device_paged_attention_v1(folio_vllm06_state *state,
                                          const folio_vllm06_paged_attention_args *args,
                                          const folio_vllm06_kv_cache *cache, const folio_run *run)
{
    if (args == NULL || cache == NULL || args->struct_size != sizeof *args)
        return folio_vllm06_paged_attention_v1(state, args, cache, run);
    return paged(state, args, cache, false);
}

folio_status on_device_paged_attention_v2(folio_vllm06_state *state,
                                          const folio_vllm06_paged_attention_args *args,
                                          const folio_vllm06_kv_cache *cache, float *exp_sums,
                                          float *max_logits, void *tmp_out, const folio_run *run)
{
    if (args == NULL || cache == NULL || args->struct_size != sizeof *args)
        return folio_vllm06_paged_attention_v2(state, args, cache, exp_sums, max_logits, tmp_out,
                                               run);
    return paged(state, args, cache, true);
}
