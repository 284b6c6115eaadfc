/* registry.h: the backends by name, and their levels. */
#ifndef FOLIOI_REGISTRY_H
#define FOLIOI_REGISTRY_H

#include "core/backend.h"

/** The backend of this name, also one that is not available; NULL: there is no such name. The CUDA
 * backend's library is loaded when its name is asked for, and only then. */
const folioi_backend *folioi_backend_find(const char *name);

/** Who may serve a name, best first, NULL at the end: the backend itself; for "auto" and NULL all in host
 * memory; nobody where the name is unknown. */
#define FOLIOI_NUM_BACKENDS 3
typedef struct folioi_candidates {
    const folioi_backend *list[FOLIOI_NUM_BACKENDS + 1];
    bool any; /* "auto" */
} folioi_candidates;
folioi_candidates folioi_backend_candidates(const char *name);

/** What the environment says of a backend's level; NULL: nothing. It may name none. */
const char *folioi_level_cap(const folioi_backend *backend);
/** Is this a level of one of these backends (NULL at the end)? `names` gets those there are. */
bool folioi_level_names(const folioi_backend *const *backends, const char *level, char *names,
                        size_t size);

/** What every host backend answers: they differ in speed, not in what they can do. */
extern const folio_feature folioi_host_features[];

extern const folioi_backend folioi_reference_backend;
extern const folioi_backend folioi_cpu_backend;

#endif
