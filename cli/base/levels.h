/* levels.h: names of backends and of instruction-set levels, as options and FOLIO_CPU have them. */
#ifndef FOLIO_LEVELS_H
#define FOLIO_LEVELS_H

#include <stdbool.h>
#include <stddef.h>

/* Is this a backend's name? False: a sentence on stderr, of this command. */
bool backend_is_known(const char *command, const char *name);

/* Is this a level of the backend, or of any for NULL? Others than this machine's count too. */
bool levels_has(const char *backend, const char *level);

/* Those there are, as "a, b, c"; returns text. */
const char *levels_text(char *text, size_t size, const char *backend);

/* What FOLIO_CPU says of this backend's level; NULL: nothing. */
const char *levels_cap(const char *backend);

#endif
