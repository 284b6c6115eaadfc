/* test_setuid.c: a program with more rights than its user takes nothing from the user. Needs root, to make one. */
#include "api/loader_rig.h"

#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OWNER = 1, NOBODY = 65534 };

TEST(setuid, a_program_with_raised_privileges_trusts_neither_environment_nor_folder)
{
    loader_rig rig;
    if (geteuid() != 0) {
        test_skip("no set-uid program here: only root can make one for another user");
        return;
    }
    lrig_init(&rig);
    char path[300];
    lrig_copy(&rig, LOADER_CLIENT, "hers/client");
    lrig_copy(&rig, LOADER_DECOY, "hers/libfolio_cuda.so");
    snprintf(path, sizeof path, "%s/hers/client", rig.dir);
    CHECK(chown(path, OWNER, OWNER) == 0);
    CHECK(chmod(path, 04755) == 0);
    lrig_run run = {.program = "hers/client",
                    .folder = "stranger",
                    .user = NOBODY,
                    .asks = "context:cpu info:cuda context:cuda"};
    bool beside = lrig_loads(&rig, &run);
    if (strstr(rig.output, "privileged") == NULL) {
        test_skip("no set-uid program here: the file system of the temporary folder knows none");
        lrig_end(&rig);
        return;
    }
    CHECK_MSG(!beside, "it loads what lies next to it");
    SAYS(&rig, "info cuda: the CUDA backend's library was not found");
    static const char *const variables[] = {"FOLIO_CUDA_LIBRARY=%s/stranger/libfolio_cuda.so",
                                            "FOLIO_CUDA_LIBRARY=libfolio_cuda.so",
                                            "LD_LIBRARY_PATH=%s/stranger"};
    for (int i = 0; i < COUNT_OF(variables); i++) {
        run.variable = variables[i];
        CHECK_MSG(!lrig_loads(&rig, &run), "%s loads it", variables[i]);
        SAYS(&rig, "info cuda: the CUDA backend's library was not found (libfolio_cuda.so, built");
    }
    static const char *const wrong[] = {"FOLIO_CPU=no_such_level", "FOLIO_DEBUG=no_such_word"};
    for (int i = 0; i < COUNT_OF(wrong); i++) {
        run.variable = wrong[i];
        CHECK(!lrig_loads(&rig, &run));
        SAYS(&rig, "context cpu: ");
    }

    /* Its own word counts, and without the rights so does its user's: the decoy can leave its mark. */
    run.asks = "path=%s/stranger/libfolio_cuda.so context:cuda";
    CHECK(lrig_loads(&rig, &run));
    CHECK(chmod(path, 0755) == 0);
    run.asks = "info:cuda";
    run.variable = variables[0];
    CHECK(lrig_loads(&rig, &run));
    run.variable = NULL;
    CHECK(lrig_loads(&rig, &run));
    lrig_end(&rig);
}
