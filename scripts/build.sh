#!/bin/sh
# usage: build.sh <preset> [target...]
# Configures the preset where that is still to be done, then builds the targets (all by default).
set -eu
cd "$(dirname "$0")/.."
preset=$1
shift
dir=build
[ "$preset" = release ] || dir=build-$preset

# A tree that was copied or moved with its build directory is configured afresh.
cache=$dir/CMakeCache.txt
if [ -f "$cache" ]; then
    home=$(sed -n 's/^CMAKE_HOME_DIRECTORY:INTERNAL=//p' "$cache")
    # shellcheck disable=SC3013 # dash, bash and busybox have -ef
    [ "$home" -ef . ] || rm -rf "$dir"
fi
# The Makefile comes last: a configuration that failed leaves a cache, and is tried again.
[ -f "$dir/Makefile" ] || cmake --preset "$preset" > /dev/null

# The inner make gets its own -j, not the outer one's job server.
unset MAKEFLAGS MFLAGS MAKELEVEL
jobs=$(nproc 2> /dev/null || getconf _NPROCESSORS_ONLN)
[ $# -eq 0 ] || set -- --target "$@"
cmake --build "$dir" --parallel "$jobs" "$@"
