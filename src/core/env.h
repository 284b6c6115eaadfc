/* env.h: the environment. A process with raised privileges ignores it. */
#ifndef FOLIOI_ENV_H
#define FOLIOI_ENV_H

#include <stdbool.h>

/** Was the process given rights at its start (set-uid, set-gid, file capabilities)? */
bool folioi_env_is_foreign(void);

/** A variable's value; NULL where it is not set or empty, or the environment is foreign. */
const char *folioi_env_get(const char *name);

#endif
