/* vllm06_same_runner.c: metadata as vLLM 0.6's own model runners make it, and compat; see vllm06_rig.h. */
#include "vllm06_rig.h"

#include <stdlib.h>
#include <sys/mman.h>

/* Metadata from the fields as a test has changed them. */
static bool remake(v06 *r)
{
    folio_vllm06_metadata_destroy(r->m);
    r->m = NULL;
    CHECK_OK(r->b->make_metadata(r->state, &r->f, &r->m));
    return r->m != NULL;
}

/* A window of 32 over blocks of 16: the runner makes 36 of length 100, hands over the last three blocks and
 * leaves context_len 99. The window's 32 keys are seen; with compat all 36. */
void v06_same_clipped_window(const char *ancestor, const char *compute)
{
    static const v06_seq prompt[] = {{0, true, 99, 99, 0}}, decode[] = {{0, false, 1, 100, 0}};
    for (int i = 0; i < 4; i++) {
        v06 r;
        v06_init(&r, ancestor, compute);
        r.block_size = 16;
        r.d.sliding_window = 32;
        r.d.compat = i / 2;
        if (v06_open(&r) && v06_step(&r, prompt, 1)) {
            v06_run(&r, FOLIO_ATTENTION_DECODER);
            r.clipped[0] = 64;
            v06_fields(&r, decode, 1);
            CHECK(r.lens[0] == 36 && r.contexts[0] == 99);
            if (i % 2) r.f.context_lens_tensor = NULL;
            if (remake(&r)) v06_run(&r, FOLIO_ATTENTION_DECODER);
        }
        v06_close(&r);
    }
}

/* Decodes of an encoder-decoder model: the runner counts their encoders' tokens and gives no slots. What stands
 * for its empty slot mapping cannot be read. */
void v06_same_cross_decode_metadata(const char *ancestor, const char *compute)
{
    static const v06_seq prompts[] = {{0, true, 6, 6, 11}, {1, true, 9, 9, 20}};
    static const v06_seq decodes[] = {{0, false, 1, 7, 11}, {1, false, 1, 10, 20}};
    enum { PAGE = 4096 };
    void *empty = mmap(NULL, PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (empty == MAP_FAILED) abort();
    v06 r;
    v06_init(&r, ancestor, compute);
    if (v06_open(&r) && v06_step(&r, prompts, 2)) {
        v06_run(&r, FOLIO_ATTENTION_ENCODER_DECODER);
        v06_fields(&r, decodes, 2);
        r.f.num_encoder_tokens = 31;
        r.f.cross_slot_mapping = empty;
        if (remake(&r)) {
            CHECK_INT(folio_vllm06_metadata_get(r.m)->num_encoder_tokens, 31);
            CHECK(folio_vllm06_is_all_cross_attn_metadata_set(r.m));
            r.no_key = true;
            v06_run(&r, FOLIO_ATTENTION_ENCODER_DECODER);
            /* key and value for decodes would have no slots */
            v06_fields(&r, prompts, 2);
            r.no_key = false;
            folio_vllm06_forward_args a = v06_args(&r, FOLIO_ATTENTION_ENCODER_DECODER);
            a.query.tokens = a.output.tokens = 2;
            V06_REFUSED(&r, &a, FOLIO_ERR_ARGUMENT, "0 tokens|31 rows");
        }
    }
    v06_close(&r);
    munmap(empty, PAGE);
}

/* --------------------------------------------------------------------------------------- compat */

static const v06_seq whole[] = {{0, true, 13, 13, 0}, {1, true, 8, 8, 0}};
static const v06_seq chunk[] = {{0, true, 5, 18, 0}};
static const v06_seq decodes[] = {{1, false, 1, 9, 0}, {0, false, 1, 19, 0}};

/* Everything a layer can have, alone and with the others; judged by what habits_of of the rig says. */
void v06_same_compat(const char *ancestor, const char *compute)
{
    static float numbers[13 * 13];
    support_fill(numbers, COUNT_OF(numbers), 5, 2.0f);
    const folio_vllm06_bias biases[] = {{numbers, 1, 13, 13}, {numbers, 1, 8, 8}};
    for (int set = 0; set < 16; set++) {
        v06 r;
        v06_init(&r, ancestor, compute);
        r.d.compat = 1;
        if (set & 1) r.d.alibi_slopes = r.slopes;
        if (set & 2) r.d.sliding_window = 4;
        if (set & 4) r.d.logits_soft_cap = 0.75f;
        if (set & 8) r.d.scale = 0.4f;
        if (v06_open(&r)) {
            for (int tables = 0; tables < 2; tables++) {
                v06_fields(&r, whole, 2);
                if (!tables) r.f.block_tables = NULL;
                if (!remake(&r)) break;
                v06_run(&r, FOLIO_ATTENTION_DECODER);
                CHECK_OK(folio_vllm06_set_attn_bias(r.m, FOLIO_ATTENTION_DECODER, biases));
                v06_run(&r, FOLIO_ATTENTION_DECODER);
            }
            if (v06_step(&r, chunk, 1)) v06_run(&r, FOLIO_ATTENTION_DECODER);
            if (v06_step(&r, decodes, 2)) v06_run(&r, FOLIO_ATTENTION_DECODER);
        }
        v06_close(&r);
    }
}

/* A layer with one thing to differ in, and who differs then with compat. */
enum { XFORMERS = 1, TORCH_SDPA = 2, IPEX = 4, ALL = 7 };
typedef struct {
    bool decode, slopes, biased, tables;
    int64_t window;
    float cap, scale;
    int differs;
} habit;

/* The rows a layer gives for the step of a habit. */
static float *rows_of(const habit *h, const char *ancestor, const char *compute, int32_t compat,
                      size_t *bytes)
{
    static const float zeros[13 * 13];
    const folio_vllm06_bias biases[] = {{zeros, 1, 13, 13}, {zeros, 1, 8, 8}};
    float *rows = NULL;
    v06 r;
    v06_init(&r, ancestor, compute);
    r.d.compat = compat;
    if (h->slopes) r.d.alibi_slopes = r.slopes;
    r.d.sliding_window = h->window;
    r.d.logits_soft_cap = h->cap;
    r.d.scale = h->scale;
    if (v06_open(&r) && v06_step(&r, whole, 2)) {
        v06_run(&r, FOLIO_ATTENTION_DECODER);
        v06_fields(&r, h->decode ? decodes : whole, h->decode ? 1 : 2);
        if (!h->decode && !h->tables) r.f.block_tables = NULL;
        if (h->biased) r.f.attn_bias = biases;
        if (remake(&r)) {
            v06_run(&r, FOLIO_ATTENTION_DECODER);
            rows = malloc(*bytes = r.out.bytes);
            if (rows == NULL) abort();
            memcpy(rows, r.out.data, *bytes);
        }
    }
    v06_close(&r);
    return rows;
}

/* compat changes what docs/lineage.md says it does, in these ancestors and no other. */
void v06_same_compat_differs(const char *ancestor, const char *compute)
{
    static const habit table[] = {
        {.decode = true, .window = 5, .differs = ALL},
        {.slopes = true, .window = 5, .differs = ALL},
        {.slopes = true, .window = 5, .tables = true, .differs = ALL},
        {.window = 5, .differs = IPEX},
        {.slopes = true, .differs = IPEX},
        {.biased = true, .differs = IPEX},
        {.cap = 0.5f, .differs = 0},
        {.decode = true, .cap = 0.5f, .differs = IPEX},
        {.decode = true, .slopes = true, .differs = 0},
        {.tables = true, .scale = 0.5f, .differs = XFORMERS},
        {.scale = 0.5f, .differs = 0},
        {.decode = true, .scale = 0.5f, .differs = 0},
    };
    int own = strcmp(ancestor, "xformers") == 0 ? XFORMERS
              : strcmp(ancestor, "ipex") == 0   ? IPEX
                                                : TORCH_SDPA;
    for (int i = 0; i < COUNT_OF(table); i++) {
        size_t bytes = 0;
        float *plain = rows_of(&table[i], ancestor, compute, 0, &bytes);
        float *compat = rows_of(&table[i], ancestor, compute, 1, &bytes);
        if (plain != NULL && compat != NULL)
            CHECK_MSG((memcmp(plain, compat, bytes) != 0) == ((table[i].differs & own) != 0),
                      "habit %d: compat %s", i,
                      table[i].differs & own ? "changes nothing" : "changes the rows");
        free(plain);
        free(compat);
    }
}
