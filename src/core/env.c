/* env.c: the environment, and whether it can be trusted. */
#include "core/env.h"

#include <stdlib.h>
#include <unistd.h>
#if defined(__linux__)
#include <sys/auxv.h>
#endif

bool folioi_env_is_foreign(void)
{
#if defined(__linux__)
    return getauxval(AT_SECURE) != 0;
#else
    return getuid() != geteuid() || getgid() != getegid();
#endif
}

const char *folioi_env_get(const char *name)
{
#if defined(__GLIBC__)
    const char *value = secure_getenv(name);
#else
    const char *value = folioi_env_is_foreign() ? NULL : getenv(name);
#endif
    return value != NULL && value[0] != '\0' ? value : NULL;
}
