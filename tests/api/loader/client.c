/*
 * client.c: a program that asks Folio the questions of its command line, one after another, and prints an answer to
 * each. "in=FOLDER" changes the current folder, "path=FILE" sets cuda_library for the contexts after it.
 */
#include <folio/folio.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>
#include <sys/auxv.h>
#include <unistd.h>

/* Where AddressSanitizer is built in: its search for leaks cannot look into a set-uid process, and ends it. */
const char *__asan_default_options(void);
const char *__asan_default_options(void) { return "detect_leaks=0"; }

static folio_context_desc desc;

static void context(const char *backend)
{
    folio_context *ctx;
    folio_context_info info = FOLIO_INIT(folio_context_info);
    desc.backend = backend;
    folio_status status = folio_context_create(&desc, &ctx);
    if (status == FOLIO_OK) status = folio_context_get_info(ctx, &info);
    if (status == FOLIO_OK) printf("context %s: %s\n", info.backend, info.level);
    else printf("%s: %s\n", folio_status_name(status), folio_last_error());
    folio_context_destroy(ctx);
}

static void names(void)
{
    for (int32_t i = 0; i < folio_backend_count(); i++) printf("%s\n", folio_backend_name(i));
}

static void info(const char *backend)
{
    folio_backend_info i = FOLIO_INIT(folio_backend_info);
    if (folio_backend_get_info(backend, &i) != FOLIO_OK) printf("%s\n", folio_last_error());
    else printf("info %s: %s\n", i.name, i.available ? "available" : i.reason);
}

static void supports(const char *backend)
{
    folio_attention_desc a =
        FOLIO_WITH(folio_attention_desc, .num_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32);
    folio_status status = folio_backend_supports(backend, &a, 1, NULL, NULL, 0);
    printf("supports: %s\n", status == FOLIO_OK ? "yes" : folio_last_error());
}

static void shape(const char *backend)
{
    folio_kv_cache_shape s = FOLIO_INIT(folio_kv_cache_shape);
    folio_kv_cache_desc d =
        FOLIO_WITH(folio_kv_cache_desc, .num_blocks = 1, .num_layers = 1, .block_size = 16,
                   .num_kv_heads = 1, .k_head_size = 8, .dtype = FOLIO_F32);
    folio_status status = folio_kv_cache_get_shape(backend, &d, &s);
    printf("shape: %s\n", status == FOLIO_OK ? s.layout_id : folio_last_error());
}

int main(int argc, char **argv)
{
    static const struct {
        const char *word;
        void (*ask)(const char *backend);
    } questions[] = {
        {"context:", context}, {"info:", info}, {"supports:", supports}, {"shape:", shape}};
    desc = FOLIO_INIT(folio_context_desc);
    desc.num_threads = 1;
    if (getauxval(AT_SECURE) != 0) printf("privileged\n");
    for (int i = 1; i < argc; i++) {
        bool known = false;
        if (strncmp(argv[i], "path=", 5) == 0) known = true, desc.cuda_library = argv[i] + 5;
        if (strncmp(argv[i], "in=", 3) == 0) known = chdir(argv[i] + 3) == 0;
        if (strcmp(argv[i], "names") == 0) known = true, names();
        for (int k = 0; k < 4; k++)
            if (strncmp(argv[i], questions[k].word, strlen(questions[k].word)) == 0)
                known = true, questions[k].ask(argv[i] + strlen(questions[k].word));
        if (!known) return printf("what is %s?\n", argv[i]), 2;
    }
    return 0;
}
