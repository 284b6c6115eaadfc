#!/bin/sh
# Proves that an installation works and can be moved: installs into a prefix of its own, moves it, and builds a consumer
# there by find_package (shared and static) and, where pkg-config is present, by folio.pc.
# usage: install.sh <cmake> <cc> <build dir> <consumer dir>
set -eu
cmake=$1 cc=$2 build=$3 consumer=$4
dir=$build/tests/install
rm -rf "$dir"
mkdir -p "$dir"

"$cmake" --install "$build" --prefix "$dir/first" > "$dir/install.log"
mv "$dir/first" "$dir/prefix"
files="bin/folio include/folio/folio.h"
# Sanitized and cross builds have no pages.
[ ! -d "$build/pages" ] || files="$files share/man/man1/folio.1 share/bash-completion/completions/folio
    share/zsh/site-functions/_folio share/fish/vendor_completions.d/folio.fish"
for file in $files; do
    [ -e "$dir/prefix/$file" ] || { echo "not installed: $file"; exit 1; }
done

"$cmake" -G "Unix Makefiles" -S "$consumer" -B "$dir/consumer" -DCMAKE_C_COMPILER="$cc" \
    -DCMAKE_PREFIX_PATH="$dir/prefix" > "$dir/consumer.log" || { cat "$dir/consumer.log"; exit 1; }
(unset MAKEFLAGS MFLAGS; "$cmake" --build "$dir/consumer") >> "$dir/consumer.log" || {
    cat "$dir/consumer.log"
    exit 1
}
for kind in shared static; do
    echo "find_package, $kind: $("$dir/consumer/consumer_$kind")"
done

pc=$(find "$dir/prefix" -name folio.pc)
[ -n "$pc" ] || { echo "not installed: folio.pc"; exit 1; }
# Newer C libraries hold all three, so a link alone would not miss one.
for library in m pthread dl; do
    grep -q "^Libs.private:.* -l$library\( \|\$\)" "$pc" || { echo "folio.pc: static links need -l$library"; exit 1; }
done
if command -v pkg-config > /dev/null; then
    PKG_CONFIG_PATH=${pc%/*}
    export PKG_CONFIG_PATH
    # eval: pkg-config escapes spaces in paths for the shell.
    eval "set -- $(pkg-config --cflags --libs folio)"
    "$cc" "$consumer/consumer.c" -o "$dir/consumer_pc" "$@"
    libdir=$(pkg-config --variable=libdir folio)
    echo "pkg-config: $(LD_LIBRARY_PATH=$libdir "$dir/consumer_pc")"
    # as README has it: the linker takes libfolio.so for -lfolio where both are
    eval "set -- $(pkg-config --cflags folio)"
    "$cc" "$consumer/consumer.c" -o "$dir/consumer_pc_static" "$@" "$libdir/libfolio.a" -lm -lpthread -ldl
    echo "pkg-config, static: $("$dir/consumer_pc_static")"
else
    echo "pkg-config is not here: folio.pc was not tried"
fi
