#!/bin/sh
# usage: test-gpu.sh [report file]
# All tests that need a GPU, on a machine that has one: every feature of the cuda backend against the reference, the
# suites of the vLLM 0.6 layer in device memory, the device's own tests, KV memory on the device, and parts of them under
# compute-sanitizer where that is installed. Writes a report. FOLIO_BUILD names the build directory (build-cuda), which may
# have been built elsewhere.
set -u
cd "$(dirname "$0")/.."
build=${FOLIO_BUILD:-build-cuda}
report=${1:-gpu-report.txt}
failed=0
FOLIO_CUDA_LIBRARY=$build/libfolio_cuda.so
case $build in /*) ;; *) FOLIO_CUDA_LIBRARY=$PWD/$FOLIO_CUDA_LIBRARY ;; esac
export FOLIO_CUDA_LIBRARY
: > "$report"

stage() { # <name> <command...>
    name=$1
    shift
    printf '\n== %s\n$ %s\n' "$name" "$*" | tee -a "$report"
    begin=$(date +%s)
    if "$@" > "$report.part" 2>&1; then verdict=passed; else verdict=FAILED && failed=$((failed + 1)); fi
    cat "$report.part" >> "$report"
    tail -n 3 "$report.part"
    printf '%s: %s, %d s\n' "$name" $verdict $(($(date +%s) - begin)) | tee -a "$report"
    rm -f "$report.part"
}

if [ "$build" = build-cuda ] && [ ! -x $build/folio_cuda_tests ]; then
    sh scripts/build.sh cuda || exit 1
fi
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,memory.total --format=csv | tee -a "$report"
stage "what there is" "$build/folio" info
stage "every feature" "$build/folio" check --backend cuda ${FULL:+--full}
stage "vLLM 0.6's layer" "$build/folio_cuda_vllm06_tests"
stage "lives of vLLM 0.6's backends" "$build/folio" check --lineage --backend cuda
stage "the device's own" "$build/folio_cuda_tests"
stage "KV memory" env FOLIO_TESTS_BACKEND=cuda "$build/tests/folio_tests" swap swap_store generation
if command -v compute-sanitizer > /dev/null; then
    # every kernel: q and KV types over layouts and head sizes, and random combinations of all options
    for tool in memcheck racecheck initcheck synccheck; do
        for feature in kernels combinations; do
            # decode has barriers in shared memory, more than synccheck keeps track of unasked
            room=$([ $tool = synccheck ] && echo "--num-cuda-barriers 4096")
            stage "$tool, $feature" compute-sanitizer --tool $tool $room --error-exitcode 9 "$build/folio" check --backend cuda --filter $feature
        done
    done
    stage "memcheck of vLLM 0.6's layer" compute-sanitizer --tool memcheck --error-exitcode 9 "$build/folio_cuda_vllm06_tests" vllm06_xformers
    stage "memcheck of the device's own" compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 "$build/folio_cuda_tests" device block_moves
    stage "memcheck of KV memory" env FOLIO_TESTS_BACKEND=cuda compute-sanitizer --tool memcheck --error-exitcode 9 "$build/tests/folio_tests" swap.forked_sequences_go_one_by_one
else
    echo "compute-sanitizer is not here: nothing ran under it" | tee -a "$report"
fi
stage "speed" "$build/folio" bench --backend cuda ${FOLIO_PYTHON:+--peers --peers-script bench/peers.py}
printf '\n%s: %d stages failed; report in %s\n' "$([ $failed -eq 0 ] && echo PASSED || echo FAILED)" $failed "$report" | tee -a "$report"
[ $failed -eq 0 ]
