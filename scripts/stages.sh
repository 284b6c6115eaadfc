# stages.sh: what the tiers test-full and test-long share: headings with times, and options of the sanitizers.
# shellcheck shell=sh
begin=$(date +%s)
stage_begin=$begin
stage_name=

stage() { # <name>: begins; the one before it is done
    now=$(date +%s)
    [ -z "$stage_name" ] || printf '== %s: %d s\n' "$stage_name" $((now - stage_begin))
    stage_name=$1
    stage_begin=$now
    printf '\n== %s\n' "$1"
}

finish() { # <tier>
    printf '== %s: %d s\n' "$stage_name" $(($(date +%s) - stage_begin))
    printf '\n%s: all stages passed in %d s\n' "$1" $(($(date +%s) - begin))
}

# ThreadSanitizer of older compilers cannot start where the kernel randomises addresses widely.
calm() {
    if setarch "$(uname -m)" -R true 2> /dev/null; then setarch "$(uname -m)" -R "$@"; else "$@"; fi
}

export ASAN_OPTIONS="${ASAN_OPTIONS:-detect_leaks=1:strict_string_checks=1:detect_stack_use_after_return=1}"
export UBSAN_OPTIONS="${UBSAN_OPTIONS:-print_stacktrace=1}"
export TSAN_OPTIONS="${TSAN_OPTIONS:-halt_on_error=1}"
