#!/bin/sh
# usage: build_and_run.sh COMPILER SOURCE WORK_DIR LIBRARY PROGRAM
# Compiles a client in another language against the headers and the shared library, and runs it.
set -eu
compiler=$1 source=$2 work=$3 library=$4 program=$5
include=$(cd "$(dirname "$0")/../../../include" && pwd)
folder=$(dirname "$library")
mkdir -p "$work"
client=$work/client_${source##*.}

case $source in
    *.rs)
        "$compiler" --edition 2021 -D warnings -L "$folder" -l folio -C "link-arg=-Wl,-rpath,$folder" "$source" -o "$client"
        ;;
    *.go)
        GO111MODULE=off GOFLAGS='' GOCACHE="$work/go" CGO_ENABLED=1 CGO_CFLAGS="-I$include" \
            CGO_LDFLAGS="-L$folder -lfolio -Wl,-rpath,$folder" "$compiler" build -o "$client" "$source"
        ;;
    *.cc) # the last one is run below
        for flags in '-std=c++20 -Wno-missing-field-initializers' -std=c++17; do
            # shellcheck disable=SC2086 # two words
            "$compiler" -Wall -Wextra -Wpedantic -Wshadow -Werror $flags -I "$include" "$source" -L "$folder" -lfolio \
                -Wl,-rpath,"$folder" -o "$client"
            [ "$flags" = -std=c++17 ] || "$client" "$program"
        done
        ;;
esac
"$client" "$program"
