/* registry.c: the list of backends, best first and reference last, and queries about them. */
#include "backends/registry.h"

#include "backends/cuda_library.h"
#include "core/env.h"
#include "plan/attention.h"
#include "plan/judge.h"

#include <stdio.h>
#include <string.h>

const folio_feature folioi_host_features[] = {
#define X(name, summary, refusal, device) {#name, summary, sizeof(refusal) == 1, refusal},
#include "backends/features.def"
#undef X
};
enum { NUM_FEATURES = sizeof folioi_host_features / sizeof folioi_host_features[0] };

/* Best first, reference last. What is in host memory is here; CUDA's is loaded. */
static const char *const names[FOLIOI_NUM_BACKENDS] = {"cuda", "cpu", "reference"};
static const folioi_backend *const host_backends[] = {&folioi_cpu_backend,
                                                      &folioi_reference_backend};
enum { NUM_HOST_BACKENDS = sizeof host_backends / sizeof host_backends[0] };

static const folio_layout all_layouts[FOLIO_NUM_LAYOUTS] = {FOLIO_LAYOUT_NATIVE,
                                                            FOLIO_LAYOUT_NHD,
                                                            FOLIO_LAYOUT_HND,
                                                            FOLIO_LAYOUT_INTERLEAVED_NHD,
                                                            FOLIO_LAYOUT_INTERLEAVED_HND,
                                                            FOLIO_LAYOUT_XPACKED,
                                                            FOLIO_LAYOUT_XPACKED_1,
                                                            FOLIO_LAYOUT_STRIDED};

const folioi_backend *folioi_backend_find(const char *name)
{
    if (strcmp(name, names[0]) == 0) return folioi_cuda_library();
    for (int32_t i = 0; i < NUM_HOST_BACKENDS; i++)
        if (strcmp(name, host_backends[i]->name) == 0) return host_backends[i];
    return NULL;
}

folioi_candidates folioi_backend_candidates(const char *name)
{
    folioi_candidates c = {.any = name == NULL || strcmp(name, "auto") == 0};
    if (c.any) memcpy(c.list, host_backends, sizeof host_backends);
    else c.list[0] = folioi_backend_find(name);
    return c;
}

const char *folioi_level_cap(const folioi_backend *backend)
{
    return backend->level_env != NULL ? folioi_env_get(backend->level_env) : NULL;
}

bool folioi_level_names(const folioi_backend *const *backends, const char *level, char *text,
                        size_t size)
{
    bool found = false;
    size_t length = 0;
    text[0] = '\0';
    for (; *backends != NULL; backends++) {
        const char *const *levels = (*backends)->levels;
        for (int32_t k = 0; levels[k] != NULL; k++) {
            found = found || strcmp(levels[k], level) == 0;
            int n =
                snprintf(text + length, size - length, "%s%s", length > 0 ? ", " : "", levels[k]);
            length += n > 0 && (size_t)n < size - length ? (size_t)n : 0;
        }
    }
    return found;
}

int32_t folio_backend_count(void) { return FOLIOI_NUM_BACKENDS; }

const char *folio_backend_name(int32_t index)
{
    return index >= 0 && index < FOLIOI_NUM_BACKENDS ? names[index] : NULL;
}

static folio_status fail_unknown(const char *name)
{
    FAIL(FOLIO_ERR_ARGUMENT, "backend \"%s\" is unknown; there are cuda, cpu and reference", name);
}

folio_status folio_backend_get_info(const char *name, folio_backend_info *info)
{
    REQUIRE(name != NULL, "the backend's name is NULL");
    const folioi_backend *b = folioi_backend_find(name);
    if (b == NULL) return fail_unknown(name);
    const char *reason = b->unavailable(), *level = "";
    if (reason == NULL) b->kernels(folioi_level_cap(b), &level);
    folio_backend_info i = {
        .name = b->name,
        .available = reason == NULL,
        .reason = reason == NULL ? "" : reason,
        .device = b->device(),
        .levels = b->levels,
        .level = level,
        .layouts = all_layouts,
        .num_layouts = reason == NULL ? FOLIO_NUM_LAYOUTS : 0,
        .features = b->features,
        .num_features = NUM_FEATURES,
        .graph = reason == NULL,
        .max_head_size = b->max_head_size,
    };
    while (b->levels[i.num_levels] != NULL) i.num_levels++;
    return folioi_struct_out(info, &i, sizeof i, "folio_backend_info");
}

folio_status folio_backend_supports(const char *backend, const folio_attention_desc *attention,
                                    uint32_t types, const folio_kv_cache_desc *cache, char *reasons,
                                    size_t size)
{
    folio_attention_desc a;
    folioi_kv_format format;
    REQUIRE(size == 0 || reasons != NULL, "reasons is NULL, but its size is %zu", size);
    TRY(folioi_attention_resolve(attention, &a));
    if (cache != NULL) TRY(folioi_kv_format_init(cache, false, &format));
    REQUIRE(types != 0 && types >> FOLIO_NUM_ATTENTION_TYPES == 0,
            "types 0x%x is empty or has unknown bits", types);
    folioi_request request = {&a, types, cache != NULL ? &format : NULL};
    char text[1024] = "";
    folioi_reasons all = {.text = text, .size = sizeof text};
    folioi_candidates candidates = folioi_backend_candidates(backend);
    if (candidates.list[0] == NULL) return fail_unknown(backend);
    for (int32_t i = 0; candidates.list[i] != NULL; i++) {
        int32_t before = all.count;
        all.prefix = candidates.any ? candidates.list[i]->name : NULL;
        folioi_backend_judge(candidates.list[i], &request, &all);
        if (all.count > before) continue;
        if (size > 0) reasons[0] = '\0';
        return FOLIO_OK;
    }
    if (size > 0) snprintf(reasons, size, "%s", text);
    FAIL(FOLIO_ERR_UNSUPPORTED, "%s", text);
}
