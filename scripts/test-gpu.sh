#!/bin/sh
# usage: test-gpu.sh [--build] [report file]
# All tests that need a GPU, on a machine that has one: every feature of the cuda backend against the reference, the
# suites of the vLLM 0.6 layer in device memory, the device's own tests, KV memory on the device, and parts of them under
# compute-sanitizer where that is installed; with FOLIO_PYTHON, a Python that has the package, its tests too. The stages
# run side by side, the measurement after them alone. Writes a report. FOLIO_BUILD names the build directory
# (build-cuda), which may have been built elsewhere; --build builds it first.
set -u
cd "$(dirname "$0")/.."
command -v nvidia-smi > /dev/null || {
    echo "test-gpu needs an NVIDIA card with its driver, and nvcc or a build directory that FOLIO_BUILD names" >&2
    exit 1
}
must_build=no
if [ "${1:-}" = --build ]; then must_build=yes && shift; fi
build=${FOLIO_BUILD:-build-cuda}
report=${1:-gpu-report.txt}
parts=$report.parts
FOLIO_CUDA_LIBRARY=$build/libfolio_cuda.so
case $build in /*) ;; *) FOLIO_CUDA_LIBRARY=$PWD/$FOLIO_CUDA_LIBRARY ;; esac
export FOLIO_CUDA_LIBRARY
rm -rf "$parts" && mkdir -p "$parts" || exit 1
trap 'rm -rf "$parts"' EXIT
: > "$report"

# --- Stages: each writes its output to $parts/<number>, and its verdict ends it --------------------------------------
count=0

run_stage() { # <number> <name> <command...>
    out=$parts/$1
    name=$2
    shift 2
    printf '\n== %s\n$ %s\n' "$name" "$*" > "$out"
    begin=$(date +%s)
    if "$@" >> "$out" 2>&1; then verdict=passed; else verdict=FAILED; fi
    printf '%s: %s, %d s\n' "$name" $verdict $(($(date +%s) - begin)) | tee -a "$out"
}

stage() { # <name> <command...>: starts it
    count=$((count + 1))
    run_stage $count "$@" &
}

shares() { # <name> <shares> <command...>: starts the shares of one `folio check`
    name=$1
    n=$2
    shift 2
    i=0
    while [ $i -lt "$n" ]; do
        i=$((i + 1))
        stage "$name, share $i of $n" "$@" --share $i/"$n"
    done
}

if [ $must_build = yes ] || { [ "$build" = build-cuda ] && [ ! -x $build/folio_cuda_tests ]; }; then
    sh scripts/build.sh cuda || exit 1
fi
nvidia-smi --query-gpu=name,driver_version,clocks.sm,clocks.mem,memory.total --format=csv | tee -a "$report"
stage "what there is" "$build/folio" info
shares "every feature" 6 "$build/folio" check --backend cuda --level mma ${FULL:+--full}
stage "the generic kernel" "$build/folio" check --backend cuda --level generic --one-in 8
stage "vLLM 0.6's layer" "$build/folio_cuda_vllm06_tests"
stage "vLLM 0.6's backends from start to end" "$build/folio" check --lineage --backend cuda
stage "the device's own" "$build/folio_cuda_tests"
stage "KV memory" env FOLIO_TESTS_BACKEND=cuda "$build/tests/folio_tests" swap swap_store generation
if [ -n "${FOLIO_PYTHON:-}" ] && "$FOLIO_PYTHON" -c 'import folio, pytest, torch' 2> /dev/null; then
    stage "the Python package" env FOLIO_TEST_CUDA=1 "$FOLIO_PYTHON" -m pytest -q -p no:cacheprovider -m "not slow" \
        python/tests/test_core*.py python/tests/test_torch*.py python/tests/test_flash*.py python/tests/test_examples.py
else
    echo "FOLIO_PYTHON names no Python with folio, pytest and torch: the Python package was not tested" | tee -a "$report"
fi
if command -v compute-sanitizer > /dev/null; then
    # every kernel: q and KV types over layouts and head sizes, and random combinations of all options
    for tool in memcheck racecheck initcheck synccheck; do
        # decode has barriers in shared memory, more than synccheck keeps track of unasked
        room=$([ $tool = synccheck ] && echo "--num-cuda-barriers 4096")
        shares "$tool, kernels" 3 compute-sanitizer --tool $tool $room --error-exitcode 9 "$build/folio" check --backend cuda --level mma --filter kernels
        stage "$tool, combinations" compute-sanitizer --tool $tool $room --error-exitcode 9 "$build/folio" check --backend cuda --level mma --filter combinations
        stage "$tool, decodes" compute-sanitizer --tool $tool $room --error-exitcode 9 "$build/folio" check --backend cuda --level mma --filter decoder
    done
    stage "memcheck of vLLM 0.6's layer" compute-sanitizer --tool memcheck --error-exitcode 9 "$build/folio_cuda_vllm06_tests" vllm06
    stage "memcheck of the device's own" compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 "$build/folio_cuda_tests" device block_moves
    stage "memcheck of KV memory" env FOLIO_TESTS_BACKEND=cuda compute-sanitizer --tool memcheck --error-exitcode 9 "$build/tests/folio_tests" swap.unused_slots_do_not_reach_the_file
else
    echo "compute-sanitizer is not here: nothing ran under it" | tee -a "$report"
fi
wait
stage "speed" "$build/folio" bench --backend cuda ${FOLIO_PYTHON:+--peers --peers-script peers/peers.py}
wait

failed=0
i=0
while [ $i -lt $count ]; do
    i=$((i + 1))
    cat "$parts/$i" >> "$report"
    tail -n 1 "$parts/$i" | grep -q ': passed, [0-9]* s$' || failed=$((failed + 1))
done
printf '\n%s: %d of %d stages failed; report in %s\n' "$([ $failed -eq 0 ] && echo PASSED || echo FAILED)" $failed $count "$report" |
    tee -a "$report"
[ $failed -eq 0 ]
