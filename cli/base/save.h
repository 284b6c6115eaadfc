/* save.h: a file that is there whole, or as it was before. */
#ifndef FOLIO_SAVE_H
#define FOLIO_SAVE_H

#include <stdbool.h>
#include <stddef.h>

/* Could save_file write there? False: a sentence on stderr that begins with `who`. Writes nothing. */
bool save_possible(const char *who, const char *path);

/*
 * Writes a file that gets its name when it is whole; what fails removes it. A path that is no regular file, such
 * as /dev/stdout, is written to. False: a sentence on stderr that begins with `who`.
 */
bool save_file(const char *who, const char *path, const char *bytes, size_t size);

#endif
