/* levels.c: see levels.h. */
#include "base/levels.h"

#include "base/args.h"

#include <folio/folio.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

bool backend_is_known(const char *command, const char *name)
{
    for (int32_t i = 0; i < folio_backend_count(); i++)
        if (strcmp(folio_backend_name(i), name) == 0) return true;
    args_complain(command, "unknown backend '%s'; 'folio info' lists them", name);
    return false;
}

/* Writes the names to text, up to size; is `level` one of them? */
static bool walk(const char *backend, const char *level, char *text, size_t size)
{
    bool found = false;
    size_t used = 0;
    for (int32_t i = 0; i < folio_backend_count(); i++) {
        folio_backend_info info = {.struct_size = sizeof info};
        if (folio_backend_get_info(folio_backend_name(i), &info) != FOLIO_OK) continue;
        if (backend != NULL && strcmp(backend, info.name) != 0) continue;
        for (int32_t k = 0; k < info.num_levels; k++) {
            found = found || strcmp(info.levels[k], level) == 0;
            if (used < size)
                used += (size_t)snprintf(text + used, size - used, "%s%s", used ? ", " : "",
                                         info.levels[k]);
        }
    }
    return found;
}

bool levels_has(const char *backend, const char *level) { return walk(backend, level, NULL, 0); }

const char *levels_text(char *text, size_t size, const char *backend)
{
    text[0] = '\0';
    (void)walk(backend, "", text, size);
    return text;
}

const char *levels_cap(const char *backend)
{
    const char *cap = strcmp(backend, "cpu") == 0 ? getenv("FOLIO_CPU") : NULL;
    return cap != NULL && cap[0] != '\0' ? cap : NULL;
}
