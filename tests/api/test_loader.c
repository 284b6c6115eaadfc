/*
 * test_loader.c: which libfolio_cuda.so is loaded, and when. Programs run in a folder where a stranger has put one of
 * his own, linked with the static library unless it says shared.
 */
#include "api/loader_rig.h"

#include <unistd.h>

#define FROM_STRANGER .program = "home/client", .folder = "stranger"

/* What needs no device: none of these names "cuda". */
static const char *const harmless[] = {
    "names",     "context:cpu",   "context:auto", "context:reference",
    "info:cpu",  "supports:auto", "supports:cpu", "shape:auto",
    "shape:cpu", "context:none",  "info:none",    "supports:none",
};
static const char *const about_cuda[] = {"context:cuda", "info:cuda", "supports:cuda",
                                         "shape:cuda"};

/* A library that would be found, with every right, is left alone until it is asked for by name. */
TEST(loader, nothing_is_loaded_before_cuda_is_named)
{
    loader_rig rig;
    lrig_init(&rig);
    lrig_copy(&rig, LOADER_DECOY, "home/libfolio_cuda.so");
    for (int i = 0; i < COUNT_OF(harmless); i++)
        for (int named = 0; named < 2; named++) {
            lrig_run run = {FROM_STRANGER, .asks = harmless[i]};
            if (named) run.variable = "FOLIO_CUDA_LIBRARY=%s/stranger/libfolio_cuda.so";
            CHECK_MSG(!lrig_loads(&rig, &run), "%s loads it", harmless[i]);
        }
    CHECK(!lrig_loads(&rig, &(lrig_run){FROM_STRANGER, .asks = "names"}));
    SAYS(&rig, "cuda\ncpu\nreference\n");
    for (int i = 0; i < COUNT_OF(about_cuda); i++) {
        CHECK(lrig_loads(&rig, &(lrig_run){FROM_STRANGER, .asks = about_cuda[i]}));
        SAYS(&rig, "this is a decoy");
    }
    lrig_end(&rig);
}

/* It lies in the current folder, and in that of argv[0], and in those where the dynamic linker looks. */
TEST(loader, a_strangers_folder_is_not_searched)
{
    loader_rig rig;
    lrig_init(&rig);
    lrig_copy(&rig, LOADER_CLIENT, "stranger/client"); /* what argv[0] says is there */
    static const lrig_run runs[] = {
        {FROM_STRANGER, .asks = "info:cuda"},
        {FROM_STRANGER, .argv0 = "./client", .asks = "info:cuda"},
        {FROM_STRANGER, .argv0 = "client", .asks = "info:cuda"},
        {FROM_STRANGER, .argv0 = "%s/stranger/client", .asks = "info:cuda"},
        {FROM_STRANGER, .variable = "LD_LIBRARY_PATH=.", .asks = "info:cuda"},
        {FROM_STRANGER, .variable = "LD_LIBRARY_PATH=%s/stranger", .asks = "info:cuda"},
        {.program = "home/client",
         .folder = "home",
         .argv0 = "./client",
         .asks = "in=../stranger info:cuda"},
    };
    for (int i = 0; i < COUNT_OF(runs); i++) {
        CHECK_MSG(!lrig_loads(&rig, &runs[i]), "run %d loads it", i);
        SAYS(
            &rig,
            "info cuda: the CUDA backend's library was not found (libfolio_cuda.so, built by make cuda)");
    }
    lrig_end(&rig);
}

/* A link to the program says nothing about where it lies. */
TEST(loader, the_folder_of_the_real_program_is_searched)
{
    loader_rig rig;
    char link[300], real[300];
    lrig_init(&rig);
    snprintf(link, sizeof link, "%s/stranger/client", rig.dir);
    snprintf(real, sizeof real, "%s/home/client", rig.dir);
    CHECK(symlink(real, link) == 0);
    lrig_run run = {.program = "stranger/client", .folder = "stranger", .asks = "info:cuda"};
    CHECK(!lrig_loads(&rig, &run));
    SAYS(&rig, "was not found");
    lrig_copy(&rig, LOADER_DECOY, "home/libfolio_cuda.so");
    CHECK(lrig_loads(&rig, &run));
    lrig_end(&rig);
}

TEST(loader, the_folder_of_the_shared_library_is_searched)
{
    loader_rig rig;
    lrig_init(&rig);
    lrig_copy(&rig, LOADER_CLIENT_SHARED, "home/shared");
    lrig_copy(&rig, LOADER_LIBRARY, "home/lib/libfolio.so.0");
    lrig_copy(&rig, LOADER_LIBRARY, "stranger/lib/libfolio.so.0");
    lrig_copy(&rig, LOADER_DECOY, "stranger/lib/libfolio_cuda.so");
    lrig_run absolute = {.program = "home/shared",
                         .folder = "stranger",
                         .variable = "LD_LIBRARY_PATH=%s/home/lib",
                         .asks = "info:cuda"};
    lrig_run relative = {.program = "home/shared",
                         .folder = "home",
                         .variable = "LD_LIBRARY_PATH=lib",
                         .asks = "in=../stranger info:cuda"};
    CHECK(!lrig_loads(&rig, &absolute));
    SAYS(&rig, "was not found");
    CHECK(!lrig_loads(&rig, &relative)); /* "lib" is another folder by then */
    SAYS(&rig, "was not found");
    lrig_copy(&rig, LOADER_DECOY, "home/lib/libfolio_cuda.so");
    CHECK(lrig_loads(&rig, &absolute));
    SAYS(&rig, "this is a decoy");
    lrig_end(&rig);
}

TEST(loader, the_environment_names_an_absolute_path)
{
    loader_rig rig;
    lrig_init(&rig);
    static const char *const relative[] = {"libfolio_cuda.so", "./libfolio_cuda.so",
                                           "../stranger/libfolio_cuda.so"};
    for (int i = 0; i < COUNT_OF(relative); i++) {
        char variable[100], words[200];
        snprintf(variable, sizeof variable, "FOLIO_CUDA_LIBRARY=%s", relative[i]);
        snprintf(words, sizeof words, "FOLIO_CUDA_LIBRARY is \"%s\", not an absolute path",
                 relative[i]);
        for (int k = 0; k < COUNT_OF(about_cuda); k++) {
            CHECK(!lrig_loads(
                &rig, &(lrig_run){FROM_STRANGER, .variable = variable, .asks = about_cuda[k]}));
            SAYS(&rig, words);
        }
    }
    lrig_run named = {.program = "home/client",
                      .folder = "home",
                      .variable = "FOLIO_CUDA_LIBRARY=%s/stranger/libfolio_cuda.so",
                      .asks = "info:cuda"};
    CHECK(lrig_loads(&rig, &named));
    SAYS(&rig, "info cuda: this is a decoy");
    /* Where it names none, nothing else is tried; empty is not set. */
    lrig_copy(&rig, LOADER_DECOY, "home/libfolio_cuda.so");
    named.variable = "FOLIO_CUDA_LIBRARY=%s/none.so";
    CHECK(!lrig_loads(&rig, &named));
    SAYS(&rig, "none.so");
    named.variable = "FOLIO_CUDA_LIBRARY=";
    CHECK(lrig_loads(&rig, &named));
    lrig_end(&rig);
}

TEST(loader, a_context_names_an_absolute_path)
{
    loader_rig rig;
    lrig_init(&rig);
    lrig_run run = {FROM_STRANGER, .asks = "path=libfolio_cuda.so context:cuda"};
    static const char *const backends[] = {"cuda", "cpu", "auto"};
    for (int i = 0; i < COUNT_OF(backends); i++) {
        char asks[100];
        snprintf(asks, sizeof asks, "path=libfolio_cuda.so context:%s", backends[i]);
        run.asks = asks;
        CHECK(!lrig_loads(&rig, &run));
        SAYS(
            &rig,
            "FOLIO_ERR_ARGUMENT: context: cuda_library is \"libfolio_cuda.so\", not an absolute path");
    }
    run.asks = "path=%s/stranger/libfolio_cuda.so context:cpu context:auto info:cuda";
    CHECK(!lrig_loads(&rig, &run));
    SAYS(&rig, "context cpu");
    run.asks = "path=%s/stranger/libfolio_cuda.so context:cuda info:cuda";
    run.variable = "FOLIO_CUDA_LIBRARY=%s/none.so"; /* the caller's word counts */
    CHECK(lrig_loads(&rig, &run));
    SAYS(&rig, "FOLIO_ERR_UNSUPPORTED: cuda: this is a decoy\ninfo cuda: this is a decoy");
    run.asks = "info:cuda path=%s/stranger/libfolio_cuda.so context:cuda info:cuda";
    CHECK(lrig_loads(&rig, &run)); /* after a search in vain */
    SAYS(&rig, "info cuda: this is a decoy");
    run.asks = "path=%s/none.so context:cuda";
    CHECK(!lrig_loads(&rig, &run));
    SAYS(&rig, "FOLIO_ERR_UNSUPPORTED: cuda: the CUDA backend's library was not found (");
    lrig_end(&rig);
}

TEST(loader, one_library_is_loaded_and_no_second)
{
    loader_rig rig;
    char link[300], real[300];
    lrig_init(&rig);
    lrig_copy(&rig, LOADER_DECOY, "home/libfolio_cuda.so");
    snprintf(link, sizeof link, "%s/link.so", rig.dir);
    snprintf(real, sizeof real, "%s/home/libfolio_cuda.so", rig.dir);
    CHECK(symlink(real, link) == 0);
    lrig_run run = {FROM_STRANGER,
                    .asks = "info:cuda path=%s/stranger/libfolio_cuda.so context:cuda"};
    CHECK(lrig_loads(&rig, &run));
    SAYS(&rig, "FOLIO_ERR_ARGUMENT: context: cuda_library is");
    SAYS(&rig, "home/libfolio_cuda.so\" is loaded already");
    run.asks = "info:cuda path=%s/link.so context:cuda"; /* the same file */
    CHECK(lrig_loads(&rig, &run));
    SAYS(&rig, "FOLIO_ERR_UNSUPPORTED: cuda: this is a decoy");
    run.variable = "FOLIO_CUDA_LIBRARY=%s/link.so"; /* and the other way round */
    run.asks = "info:cuda path=%s/home/libfolio_cuda.so context:cuda";
    CHECK(lrig_loads(&rig, &run));
    SAYS(&rig, "FOLIO_ERR_UNSUPPORTED: cuda: this is a decoy");
    lrig_end(&rig);
}

/* The same source, compiled so that enums have other sizes, and with them structs: the interface's number follows. */
TEST(loader, a_library_of_another_layout_is_refused)
{
    loader_rig rig;
    lrig_init(&rig);
    lrig_copy(&rig, LOADER_DECOY_OTHER, "other.so");
    lrig_run run = {FROM_STRANGER, .asks = "path=%s/other.so context:cuda info:cuda"};
    CHECK(lrig_loads(&rig, &run));
    SAYS(&rig, "other.so was built for another version of Folio");
    run.asks = "info:cuda";
    run.variable = "FOLIO_CUDA_LIBRARY=%s/other.so";
    CHECK(lrig_loads(&rig, &run));
    SAYS(&rig, "info cuda: ");
    SAYS(&rig, "other.so was built for another version of Folio");
    lrig_end(&rig);
}
