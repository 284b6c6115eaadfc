/* main.c: the installed library answers, and is the version of the installed header. */
#include <folio/folio.h>
#include <stdio.h>
#include <string.h>

int main(void)
{
    folio_context *ctx = NULL;
    if (folio_context_create(NULL, &ctx) != FOLIO_OK) {
        fprintf(stderr, "%s\n", folio_last_error());
        return 1;
    }
    folio_context_info info = FOLIO_INIT(folio_context_info);
    folio_status status = folio_context_get_info(ctx, &info);
    if (status == FOLIO_OK) printf("folio %s, backend %s\n", folio_version(), info.backend);
    folio_context_destroy(ctx);
    return status != FOLIO_OK || strcmp(folio_version(), FOLIO_VERSION_STRING) != 0;
}
