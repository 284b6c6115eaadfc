#!/bin/sh
# usage: setup.sh [--full | --fuzz]
# What the build needs: a C compiler that works, xxHash's header and CMake 3.22; with --full also what test-full needs: a
# compiler for aarch64 and qemu-user, and what tests can do without: Chromium, Python and clang with its sanitizers; with
# --fuzz of these only clang. Says nothing where all are there. Where one is missing, says so and installs it through
# apt-get, if that is allowed without asking; otherwise, and with SETUP=no, says what to install, and fails, but for what
# tests can do without.
set -eu

min_minor=22
full=
fuzz=
case ${1:-} in
    --full) full=yes && fuzz=yes ;;
    --fuzz) fuzz=yes ;;
esac

compiles() { # <compiler, perhaps with options>
    $1 "$dir/a.c" -o "$dir/a" -lm -lpthread 2> /dev/null
}

compiler_works() { # <header>
    dir=$(mktemp -d)
    printf '#include <stdio.h>\n#include <%s>\nint main(void) { return puts("") < 0; }\n' "$1" > "$dir/a.c"
    works=1
    if [ -n "${CC:-}" ]; then
        compiles "$CC" && works=0
    else
        for cc in cc gcc clang; do
            if compiles $cc; then works=0 && break; fi
        done
    fi
    rm -rf "$dir"
    return $works
}

cmake_works() {
    version=$(cmake --version 2> /dev/null | sed -n '1s/[^0-9]*\([0-9]*\)\.\([0-9]*\).*/\1 \2/p')
    # shellcheck disable=SC2086 # two words
    set -- ${version:-0 0}
    [ "$1" -gt 3 ] || { [ "$1" -eq 3 ] && [ "$2" -ge $min_minor ]; }
}

missing() {
    packages=
    # A configured build directory proves compiler and header.
    if ! { [ -f build/Makefile ] && grep -q '^XXHASH_INCLUDE_DIR:PATH=/' build/CMakeCache.txt; }; then
        compiler_works math.h || packages="gcc libc6-dev"
        compiler_works xxhash.h || packages="$packages libxxhash-dev"
    fi
    cmake_works || packages="$packages cmake"
    command -v make > /dev/null || packages="$packages make"
    # scripts/test-emulated.sh runs on x86-64 only.
    if [ -n "$full" ] && [ "$(uname -m)" = x86_64 ]; then
        CC=aarch64-linux-gnu-gcc compiler_works math.h ||
            packages="$packages gcc-aarch64-linux-gnu libc6-dev-arm64-cross"
        { command -v qemu-aarch64 && command -v qemu-x86_64; } > /dev/null || packages="$packages qemu-user"
    fi
}

# Without these a test says so, and is not counted.
wanted() {
    wishes=
    # A version of clang has its sanitizers and libFuzzer in a package of their own.
    if [ -n "$fuzz" ] && ! CC="clang -fsanitize=address" compiler_works math.h; then
        version=$(clang -dumpversion 2> /dev/null | cut -d. -f1)
        wishes="clang libclang-rt-${version:-14}-dev"
    fi
    [ -n "$full" ] || return 0
    { command -v chromium || command -v chromium-browser || command -v google-chrome; } > /dev/null ||
        wishes="$wishes chromium"
    command -v python3 > /dev/null || wishes="$wishes python3"
}

give_up() {
    [ -z "$full" ] || more=", its long tests a compiler for aarch64 and qemu-user"
    echo "Folio needs a C11 compiler, make, CMake 3.$min_minor or newer and xxHash's header${more:-}; missing here:$packages." >&2
    echo "$1" >&2
    exit 1
}

may_install() {
    sudo=
    [ "${SETUP:-}" != no ] || return 1
    command -v apt-get > /dev/null || return 1
    [ "$(id -u)" -ne 0 ] || return 0
    sudo="sudo -n"
    sudo -n true 2> /dev/null
}

install() { # <package...>: what went wrong is in $log
    $sudo apt-get update > "$log" 2>&1 &&
        $sudo apt-get install -y --no-install-recommends "$@" >> "$log" 2>&1
}

cd "$(dirname "$0")/.."
export DEBIAN_FRONTEND=noninteractive
missing
wanted
[ -n "$packages$wishes" ] || exit 0
log=$(mktemp)
trap 'rm -f "$log"' EXIT
if [ -n "$wishes" ] && may_install; then
    echo "setting up: apt-get installs $wishes (SETUP=no installs nothing)"
    # shellcheck disable=SC2086 # words
    install $wishes || echo "setting up: could not install $wishes; the tests that need it are not counted"
fi
[ -n "$packages" ] || exit 0
packages=" ${packages# }"

by_hand="Install them and run the same command again; on Debian or Ubuntu: sudo apt-get install$packages"
may_install || give_up "$by_hand"
echo "setting up: apt-get installs$packages (SETUP=no installs nothing)"
# shellcheck disable=SC2086 # words
if ! install $packages; then
    tail -n 20 "$log" >&2
    give_up "apt-get could not install them. $by_hand"
fi
missing
[ -z "$packages" ] || give_up "The packages of this system do not provide them; install newer ones by hand."
