#!/bin/sh
# run.sh: the program's behaviour from outside: exit status, what is said where, stable formats.
# usage: run.sh PROGRAM
. "$(dirname "$0")/lib.sh"

# ---- Help, version, wrong command lines --------------------------------------------------------
expect 0 out '^usage: folio COMMAND' --help
expect 0 out '^usage: folio COMMAND' -h
expect 2 out '^usage: folio COMMAND'
expect 0 out '^folio [0-9]*\.[0-9]*\.[0-9]*$' --version
# habits.sh has what holds for every command.
for command in demo info check; do
    expect 2 err "^folio $command: unexpected argument 'x'" "$command" x
done
expect 2 err "^folio bench: unexpected argument 'pool'" bench --reps 3 pool
expect 2 err "^folio bench: unknown topic 'x'" bench x
expect 2 err "^folio bench pool: unexpected argument 'x'" bench pool x
expect 2 err "^folio: unknown command 'nonsense'" nonsense
check "an unknown command prints nothing on stdout" test ! -s out
expect 2 err "^folio: unknown option '--nonsense'" --nonsense
expect 2 err 'needs a value' check --seed
expect 2 err "whole number from 0 to .*, not 'x'" check --seed x
expect 2 err "whole number from 0 to .*, not '-1'" check --seed=-1
expect 2 err "whole number from 1 to 256, not '0'" check --threads 0
expect 2 err 'one of text|json' check -o xml
expect 2 err 'takes no value' check --full=yes
expect 2 err "unknown backend 'nonsense'" check --backend nonsense
expect 2 err "unknown backend 'nonsense'" demo --backend nonsense
expect 2 err 'names no case' check --case nonsense
expect 2 err 'names no case' check --case gqa.attend/x
expect 2 err 'names no case' check --case gqa.nonsense/1

# ---- info --------------------------------------------------------------------------------------
expect 0 out 'default backend' info
check "info lists cpu" grep -q '^cpu' out
check "info lists reference" grep -q '^reference' out
check "info fits 100 columns" test -z "$(awk 'length > 100' out)"
expect 0 out '"version": "' info -o json
for key in name available reason device levels level levels_here kernels layouts features; do
    check "info -o json has $key" grep -q "\"$key\": " out
done
# Every level that is here gives a context; the default is one of them, FOLIO_CPU caps it.
env -u FOLIO_CPU "$folio" info > out
check "info has one default level of cpu" test "$(grep -c 'the default here' out)" -eq 1
check "info names the kernel of every KV type" test "$(grep -c ' attend_[a-z0-9]*_' out)" -ge 6
check "info: kernels stand in one column" \
    test "$(awk '/ attend_/ { print index($0, " attend_") }' out | sort -u | wc -l)" -eq 1
FOLIO_CPU=scalar "$folio" info > out
check "info says what FOLIO_CPU did" grep -q ' scalar  *the default, limited by FOLIO_CPU$' out
check "info names the kernels of the cap" test "$(grep -c ' attend_[a-z0-9]*_scalar$' out)" -ge 6
check "info names no others" test "$(grep -c ' attend_' out)" -eq "$(grep -c '_scalar$' out)"
for cap in sse9 SCALAR 'scalar ' double; do
    for format in text json; do
        FOLIO_CPU=$cap expect 1 err "^folio info: FOLIO_CPU: level \"$cap\" is unknown; there are scalar" \
            info -o $format
        check "info with a wrong FOLIO_CPU prints nothing on stdout" test ! -s out
    done
done
FOLIO_DEBUG=poison expect 0 out '^FOLIO_DEBUG is poison$' info
FOLIO_DEBUG=poisn expect 1 err '^folio info: FOLIO_DEBUG: "poisn" is unknown; there is poison$' info
check "info with a wrong FOLIO_DEBUG prints nothing on stdout" test ! -s out
expect 0 out '^| feature | what it is | .*cpu | reference |$' info --features
check "rows of the feature table have equal columns" \
    test "$(sed 's/\\|//g' out | awk -F'|' '{ print NF }' | sort -u | wc -l)" -eq 1
check "the feature table names the refused" grep -q '^| `backward` .* | no | no |$' out

# What binds reads sizes, offsets and values here; tests/api/test_abi.c has what they are.
expect 0 out '^struct folio_context_desc: [0-9]* bytes, aligned to 8 (folio.h)$' info --abi
check "info --abi: fields" grep -q '^  *0  *8  size_t struct_size$' out
check "info --abi: values" grep -q '^  *5  FOLIO_ERR_FULL$' out
check "info --abi: constants" grep -q '^  FOLIO_NO_BLOCK = -1 (folio.h)$' out
check "info --abi: functions" grep -q '^  void folio_context_destroy(folio_context \*ctx) (folio.h)$' out
expect 0 out '"pointer_size": 8' info --abi -o json
for key in structs enums constants handles callbacks functions; do
    check "info --abi -o json has $key" grep -q "^  \"$key\": \[\$" out
done
expect 2 err '^folio info: --abi and --features cannot be combined' info --abi --features

# ---- the CUDA backend's library ----------------------------------------------------------------
FOLIO_CUDA_LIBRARY=$dir/none.so
export FOLIO_CUDA_LIBRARY
expect 0 out "^cuda: not available: the CUDA backend's library was not found (.*none.so" info
expect 1 err 'none.so' demo --backend cuda
FOLIO_CUDA_LIBRARY=libm.so.6
expect 0 out '^cuda: not available: FOLIO_CUDA_LIBRARY is "libm.so.6", not an absolute path' info
unset FOLIO_CUDA_LIBRARY

# ---- check -------------------------------------------------------------------------------------
expect 0 out '^[1-9][0-9]* passed, 0 failed' check --filter soft_cap
expect 0 out '^1 passed, 0 failed, .*seed 5$' \
    check --backend cpu --level scalar --threads 2 --seed 5 --case gqa.attend/3
expect 0 out '^[1-9][0-9]* passed, 0 failed' check --backend reference --filter sinks --threads 1
expect 1 out '^nothing ran' check --filter no_such_feature
expect 2 err "^folio check: --level takes one of scalar, .*double, not 'no_such_level'" \
    check --level no_such_level
expect 2 err "^folio check: --level takes one of double, not 'scalar'" \
    check --backend reference --level scalar
export FOLIO_CPU=scalar
expect 0 out '^cpu scalar$' check --filter soft_cap
check "check runs nothing above FOLIO_CPU" test "$(grep -c '^cpu [a-z0-9_]*$' out)" -eq 1
check "check says so" test "$(grep -c '^cpu .*: skipped: ' out)" -eq \
    "$(grep -c '^cpu .*: skipped: above FOLIO_CPU=scalar$' out)"
best=$(env -u FOLIO_CPU "$folio" info | sed -n 's/^ *\(levels\)* *\([a-z0-9_]*\) *the default here.*/\2/p')
expect 0 out "^cpu $best\$" check --filter soft_cap --level "$best"
export FOLIO_CPU=sse9
expect 0 out "^cpu $best\$" check --filter soft_cap --level "$best"
expect 0 out '^reference double$' check --filter soft_cap --backend reference
for backend in '' '--backend cpu'; do
    # shellcheck disable=SC2086 # no word, or two
    expect 1 err '^folio check: .*FOLIO_CPU: level "sse9" is unknown; there are scalar' check $backend
    check "check with a wrong FOLIO_CPU prints nothing on stdout" test ! -s out
done
unset FOLIO_CPU
expect 0 out '^sliding_window *attend' check --list
expect 0 out '^row_invariant *bits' check --list --filter row
expect 0 out '"cases": \[' check -o json --filter lse_merge --seed 3
for key in version seed passed failed skipped backend level feature reason max_error budget; do
    check "check -o json has $key" grep -q "\"$key\": " out
done
grep -v '"seconds"' out >first.json
run check -o json --filter lse_merge --seed 3
grep -v '"seconds"' out >second.json
check "one seed, one result" cmp -s first.json second.json
expect 1 out '"skipped": 1' check -o json --backend reference --filter block_sparse
check "a refused feature says why" grep -q '"reason": "[^"]' out

# One in ten: far fewer cases, and no feature without one.
expect 0 out '^one case in 10 was run; another seed draws others$' check --backend cpu --level scalar --one-in 10
some=$(sed -n 's/^\([0-9]*\) passed, .*/\1/p' out)
check "check --one-in: no feature is left out" sh -c '! grep -q "no case" out'
all=$("$folio" check --list | awk 'NR > 1 { n += $3 } END { print n }')
check "check --one-in: $some of $all" test "$some" -gt $((all / 20)) -a "$some" -lt $((all / 3))
expect 2 err "whole number from 1 to .*, not '0'" check --one-in 0

# The shares of a run are all of its cases, each once.
count() { "$folio" check --backend reference --filter alibi "$@" | sed -n 's/^\([0-9]*\) passed, 0 failed.*/\1/p'; }
check "check --share: three shares are the whole" \
    test $(($(count --share 1/3) + $(count --share 2/3) + $(count --share 3/3))) -eq "$(count)"
expect 0 out '^share 2 of 3 was run$' check --backend reference --filter alibi --share 2/3
for share in 0/3 4/3 1 1/3x; do expect 2 err "K from 1 to N, not '$share'" check --share $share; done

# ---- demo --------------------------------------------------------------------------------------
expect 0 out '^Every number is within its budget' demo
check "the demo says what it timed" sh -c 'grep -A 2 "self-attention in .* ms, cross attention in .* ms: the$" out |
    grep -q "^call of folio_attention_forward only, the fastest of 5 calls after a warm-up"'
check "the demo fits 100 columns" test -z "$(awk 'length > 100' out)"
check "the demo has no colour codes without a terminal" sh -c '! grep -q "$(printf "\\033")" out'
for story in prompt chunk decode 'cross attention'; do
    check "the demo shows: $story" grep -q "^  [A-Z] .*$story.* ok\$" out
done
check "the demo shows the block map" grep -q '^  \([A-Za-z.] \)*[A-Za-z.]$' out
expect 0 out '^Every number is within its budget' demo --backend reference --seed 9
expect 0 out 'threads 1' demo --backend cpu --threads 1

# ---- bench: attention --------------------------------------------------------------------------
for case in '' x q 1q q0 0q1 q1s q1x q1k1 qk q1_ _q1 q1__q1 q1,,q1 q1, q-1 q1K 1.5q1 q17k1s1 q1-33 \
    q1-4* q1-4+ q1-4*1 q1-4+0 q1-4-8 q1- q1-4x q1s4: q1s4:x q1s4:8:9; do
    expect 2 err '^folio bench: --case takes up to 32 of .*, such as 8q1s1k, not' bench --case "$case"
done
# wrong_case CASE SENTENCE: the limit that was passed is named, with the word that passed it.
wrong_case() {
    expect 2 err "^folio bench: --case '$1': $2; try" bench --case "q1,$1,q2"
}
wrong_case q4s3 'SEQ_LEN is at least QUERY_LEN, whose tokens it counts too'
wrong_case 65537q1 'a kind has up to 65536 sequences'
wrong_case 65kq1 'a kind has up to 65536 sequences'
wrong_case q16385k 'a sequence has up to 16384k tokens'
wrong_case q1s99999999999999999999 'a sequence has up to 16384k tokens'
wrong_case q1s64:16385k 'a sequence has up to 16384k tokens'
wrong_case q1s64:64 'lengths go from the smaller number to the larger'
wrong_case q4-2 'a range goes from the smaller number to the larger'
wrong_case q1-2_q1-2 'a word may hold one range, not two'
wrong_case q1_q1_q1_q1_q1_q1_q1_q1_q1_q1_q1_q1_q1_q1_q1_q1_q1 'a case has up to 16 kinds'
wrong_case 10000q1000s10000_10000q1000s1000_10000q1000s1000_10000q1000s1000 'a case has up to 63 characters'
for heads in '' 0 4:0 4:3 2:4 4: :2 4:2x x -4 2048; do
    expect 2 err '^folio bench: --heads takes up to 32 of HEADS:KV_HEADS' bench --heads "$heads"
done
for options in '' x plain+alibi alibi+ +sinks window window: window:0 window:4x soft_cap:0 \
    soft_cap:-1 soft_cap:x soft_cap:nan 'alibi,' full: full+window:4 window:4+full graph graph:0 graph:2k \
    graph:2x invariantly ancestors+alibi \
    latent latent: latent:0 latent:12 latent:584 v_size:7 v_size:8x; do
    expect 2 err '^folio bench: --options takes up to 32 of plain, or' bench --options "$options"
done
expect 2 err '^folio bench: --dtype takes up to 32 of f32, f16, bf16, not' bench --dtype int8
expect 2 err '^folio bench: --kv-dtype takes .*, not .f64' bench --kv-dtype f64
expect 2 err '^folio bench: --layout takes .*, not .native,strided' bench --layout native,strided
for size in 4 12 584 16,0; do
    expect 2 err '^folio bench: --head-size takes up to 32 of multiples of 8 up to 576' \
        bench --head-size "$size"
done
expect 2 err "^folio bench: --level takes up to 32 of scalar, .*, not 'scalar,sse9'" \
    bench --level scalar,sse9
expect 2 err "^folio bench: --level takes up to 32 of scalar, .*, not 'double'" bench --level double
expect 2 err '^folio bench: --block-size takes up to 32 of numbers from 1 to 4096' \
    bench --block-size 16,0
expect 2 err '^folio bench: --threads takes up to 32 of numbers from 1 to 256' bench --threads 255-257
expect 2 err '^folio bench: --cache takes up to 32 of cold, warm, dirty' bench --cache cool
expect 2 err '^folio bench: --cache dirty is for GPUs' bench --cache cold,dirty
expect 2 err '^folio bench: --reps takes a whole number from 1' bench --reps 0
expect 2 err 'one of md|csv|json' bench -o text
expect 2 err "^folio bench: --backend takes one of cpu|cuda, not 'reference'" bench --backend reference
expect 2 err '^folio bench: --section needs --backend cuda' bench --section ancestors,decode
expect 2 err "^folio bench: --section: there is no 'ancestor'" bench --section ancestor
expect 0 out 'attend_f32_scalar' bench --section kernels --level scalar --case q1s2 --reps 1 -o json
check "bench --section kernels has every kernel" \
    test "$(grep -c '"section": "attend_' out)" -eq "$(FOLIO_CPU=scalar "$folio" info | grep -c ' attend_')"
expect 2 err "^folio bench: --section: there is no 'x'" bench --backend cuda --section decode,x
expect 2 err "^folio bench: --section: there is no ''" bench --backend cuda --section decode,
expect 2 err '^folio bench: --options alibi+graph:2: graphs need --backend cuda' bench --options plain,alibi+graph:2
for option in --threads=1 --level=scalar; do
    expect 2 err "^folio bench: --threads and --level are for the CPU only" bench --backend cuda $option
done
expect 2 err '^folio bench: --case takes up to 32 of' bench --backend cuda --section decode --case x
# Where there is no GPU, or none that this build could use.
if ! command -v nvidia-smi >where; then
    expect 1 err '^folio bench: \(this program was built without CUDA\|the first GPU\)' bench --backend cuda
    check "bench without a GPU: one sentence" test "$(wc -l <err)" -eq 1
    check "bench without a GPU: nothing on stdout" test ! -s out
fi
small='--heads 4:2 --head-size 32 --reps 2'
# shellcheck disable=SC2086 # several words
{
    for topic in '' overhead pool; do
        FOLIO_CPU=sse9 expect 1 err '^folio bench: folio_context_create: .*FOLIO_CPU: level "sse9"' bench $topic
        check "bench $topic: one sentence" test "$(wc -l <err)" -eq 1
        check "bench $topic: nothing on stdout" test ! -s out
    done
    expect 0 out '^| q3  *| f32  *| scalar, 1 thread ' \
        bench $small --case q3 --dtype f32 --threads 1,2 --level scalar,scalar
    check "bench: what does not vary stands over the table" \
        grep -q '^cpu, cold, plain, heads 4:2 of 32, block 16, native, 2 reps, seed 1$' out
    # The highest level there is runs, or one below it and a line that says so, once.
    top=$("$folio" bench --level x 2>&1 | sed "s/^.* of //; s/, not 'x'.*//; s/^.*, //")
    expect 0 out '^| q3 ' bench $small --case q3 --dtype f32 --threads 1,2 --level "$top"
    if ! grep -q "^cpu, level $top," out; then
        check "bench says that a lower level runs" \
            test "$(grep -c "^folio bench: --level $top: not on this machine; .* runs instead\$" err)" -eq 1
    fi
    small="$small --threads 2"
    packed='--case q3 --dtype f32 --kv-dtype int8 --layout xpacked' # packs of 16
    expect 1 err '^folio bench: left out: q3, f32 on int8, heads 4:2 of 24, block size 16, xpacked$' \
        bench $small $packed --head-size 24
    check "a bench where nothing ran prints nothing on stdout" test ! -s out
    expect 1 err 'left out: q3, f32 on int8, heads 4:2 of 24' bench $small $packed --head-size 24,32
    check "bench: what can run has run" test "$(grep -c '^| q3 .* heads 4:2 of 32 ' out)" -eq 1
    expect 0 out '^| q20  *| bf16 on fp8_e4m3 | soft_cap:30, interleaved_nhd ' bench $small --case q20,2q1s1k \
        --dtype bf16 --kv-dtype bf16,fp8_e4m3 --options plain,soft_cap:30 --layout native,interleaved_nhd
    expect 0 out '^| 2q1s1k  *| .* latent:8 ' bench $small --case q20,2q1s1k --options latent:8,v_size:24
    check "bench: the columns of a table stand under each other" \
        test "$(grep '^|' out | sed 's/[^|]/ /g' | sort -u | wc -l)" -eq 1
    expect 0 out '^| q20  *| f32  *| .* | .* | .* % | .* | *f32 FMA .* | .* % |  *- |$' \
        bench $small --case q20,2q1s1k,q3s9_2q1s40
    check "bench: both types of all cases" test "$(grep -c '^| .* *| b*f[0-9]*  *|' out)" -eq 6
    check "bench: decodes are held against reading" \
        test "$(grep -c '^| 2q1s1k .* | *read \(>= \)*[0-9.]* | .* % |$' out)" -eq 2
    check "bench: decodes are held against reading their pieces" \
        test "$(grep -c '^- 2q1s1k, .*: reading the same pieces: \(>= \)*[0-9.]* GB/s, by one thread [0-9.]*$' out)" -eq 2
    check "bench: a mixed batch has no ceiling" \
        test "$(grep -c '^| q3s9_2q1s40 .* |  *- |  *- |$' out)" -eq 2
    check "bench: the parts of a mixed batch" \
        test "$(grep -c '^- q3s9_2q1s40, .*: [0-9.]* times its prefills (.*) and its decodes' out)" -eq 2
    check "bench: the machine's ceilings" grep -q '^- ceiling over the whole run: read .* GB/s\(, by a case\)*$' out
    check "bench: a spread above 20 % is called noisy" \
        test "$(grep -c '^- .*: noisy: spread [0-9]* %' out)" -ge \
        "$(awk -F'|' '/^\| q|^\| 2q/ && $6 + 0 > 20' out | wc -l)"
    check "bench: a ceiling that a case set is explained" test "$(grep -c '^| .* >= [0-9.]* |' out)" -eq \
        "$(grep -c '^- .*: its ceiling is its own fastest run; no sample passed ' out)"
    # The same forward again, from the caches: memory is no ceiling of what does not read it.
    expect 0 out '^| 4q1s512 ' bench --case 4q1s512 --heads 8:8 --head-size 64 --dtype f32 --reps 5 --cache warm
    check "bench: no share above 100 % in the table" test -z "$(awk -F'|' '/^\| 4q/ && $(NF - 1) + 0 > 100' out)"
    check "bench fits 100 columns" test -z "$(awk 'length > 100' out)"
    expect 0 out '^q5,prefill,cpu,scalar,2,f16,int8,4,2,32,32,nhd,.*,fma_f32_gflops,' bench $small \
        --case q5,q1s5 --dtype f16 --kv-dtype f16,int8 --block-size 16,32 --layout native,nhd \
        --level scalar -o csv
    check "bench: lists are crossed" test "$(wc -l <out)" -eq 17
    check "rows of the CSV have equal columns" \
        test "$(awk -F, '{ print NF }' out | sort -u | wc -l)" -eq 1
    expect 0 out '"phase": "mixed"' bench $small --case q2_q1s3 --dtype f32 --level scalar -o json
    check "bench -o json: no ceiling" grep -q '"ceiling": null' out
    check "bench -o json: no pieces of a mixed batch" grep -q '"pieces": null' out
    check "bench -o json: no share" grep -q '"share": null' out
    check "bench -o json: a ceiling that was measured" grep -q '"read_gbps": [0-9]' out
    check "bench -o json: one that the level has not" grep -q '"dot_int8_gops": null' out
    check "bench -o json: the parts of a mixed batch" \
        test "$(grep -c '"\(prefill\|decode\)_s": [0-9]' out)" -eq 2
    check "bench -o json: no plain form with a plain one" grep -q '"plain_s": null' out
    check "bench -o json: noisy or not" grep -q '"noisy": \(true\|false\)' out
    check "bench -o json: medians of the ceilings" grep -q '"ceilings_median": {' out
    check "bench -o json: no ancestors" grep -q '"ancestors": {}' out
    check "bench -o json: no peers" grep -q '"peers": {}' out
    check "bench -o json: no peer ran" grep -q '"peers_run": \[\]' out
    # vLLM 0.6's interface: three backends in each case, and two operators where all are decodes.
    kin="--section ancestors $small --dtype f32 --case q5,q3s9_2q1s40,2q1s40"
    expect 0 out '^cpu, .*, cold, ancestors, heads 4:2 of 32, block 16, native, 2 reps, seed 1$' bench $kin
    for kind in native xformers torch-sdpa ipex; do
        check "bench --section ancestors: $kind" \
            test "$(grep -c "^| .* | f32  *| $kind  *| .* | .* | .* % | .* \(GFLOP\|GB\)/s | *[0-9.]* |\$" out)" -eq 3
    done
    check "bench --section ancestors: operators of decodes" \
        test "$(grep -c '^| 2q1s40 .* paged_attention_v[12] .* GB/s |' out)" -eq 2
    expect 0 out '"options": "ancestors"' bench $kin -o json
    check "bench --section ancestors -o json: results" \
        test "$(grep -c '"section": "ancestors"' out)/$(grep -c '"times_native": [0-9]' out)" = 3/11
    mv out kin.json
    expect 0 out '^compared with kin.json' bench --from kin.json --compare kin.json
    expect 0 out '^case,.*,ipex_s,ipex_ratio,' bench $kin --dtype bf16 --kv-dtype fp8_e4m3 -o csv
    check "rows of the CSV have equal columns" \
        test "$(awk -F, '{ print NF }' out | sort -u | wc -l)" -eq 1
    expect 1 err 'kv_cache_dtype "int8" is unknown' bench $kin --case 2q1s40 --kv-dtype int8
    expect 1 err 'a prompt after a decode; prompts come first' bench $kin --case q1s9_q3
}

# column NAME: of the CSV in out, the values of a column, one line.
column() {
    awk -F, -v name="$1" 'NR == 1 { for (i = 1; i <= NF; i++) if ($i == name) c = i; next }
                          { printf "%s%s", (NR > 2 ? " " : ""), $c }' out
}
# doubts: of the CSV in out, no case passes its ceiling, a case is noisy where its spread says so, and who gave a
# ceiling is told.
doubts() {
    awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
        { share = $at["share"]; noisy = $at["noisy"]; by = $at["ceiling_by"]
          if (share != "" && share > 1) bad = bad " share"
          if ((share == "") != (by == "") || (by != "" && by != "sample" && by != "case")) bad = bad " by"
          if (noisy !~ /^[01]$/ || ($at["spread"] > 0.2 && !noisy)) bad = bad " noisy" }
        END { print bad; exit NR < 2 || bad != "" }' out
}
# work: floating-point operations of each row, from its rate and its time.
work() {
    awk -F, 'NR == 1 { for (i = 1; i <= NF; i++) at[$i] = i; next }
             { printf "%s%.0f", (NR > 2 ? " " : ""), $at["gflops"] * $at["median_s"] * 1e7 }' out
}
small='--heads 4:2 --reps 2 --dtype f32 --block-size 16 -o csv'
# shellcheck disable=SC2086 # several words
{
    expect 0 out '^case,' bench $small --case 'q512-1k*2,q1s2-5+3,2-3q1s9' --head-size 16 --threads 1
    check "bench: ranges" test "$(column case)" = "q512 q1k q1s2 q1s5 2q1s9 3q1s9"
    expect 0 out '^case,' bench $small --case q2 --head-size 16-32+16 --threads 1-3 --level scalar
    check "bench: threads change slower" test "$(column threads)" = "1 1 2 2 3 3"
    check "bench: no share above 1, and what is noisy is told: $(doubts)" doubts
    check "bench: than head sizes" test "$(column head_size)" = "16 32 16 32 16 32"
    with=alibi+sinks+window:2+soft_cap:2.5
    expect 0 out '^case,' bench $small --case q8,q1s8 --head-size 64 --threads 1 \
        --options plain,$with --cache cold,warm
    check "bench: options and caches are crossed" test "$(column options) $(column cache)" = \
        "plain plain $with $with plain plain $with $with cold warm cold warm cold warm cold warm"
    check "bench: the plain form runs with options" \
        test "$(column plain_s | sed 's/[0-9.e-]\{1,\}/x/g')" = "  x x   x x"
    # 36 keys seen by 8 rows, 15 of them within windows of 2; 8 and 2 for one row; 1024 operations
    # for each, in units of 100.
    check "bench: keys out of the window are no work" \
        test "$(work)" = "369 369 154 154 82 82 20 20"
    expect 0 out '^case,' bench $small --case q8,q1s8 --head-size 64 --threads 1 --options plain,rotary
    check "bench: rotary runs beside the plain form and beside a separate pass" \
        test "$(for name in plain_s pass_s pass_bytes_s; do column $name; echo; done | sed 's/[0-9.e-]\{1,\}/x/g')" = \
        "$(printf ' x  x\n x  x\n x  x')"
    expect 0 out '^case,' bench $small --case q8 --heads 4:1 --head-size 96 --threads 1 --options rotary+latent:64
    check "bench: rotary of latents runs beside the plain form and beside a separate pass" \
        test "$(for name in plain_s pass_s pass_bytes_s; do column $name; echo; done | sed 's/[0-9.e-]\{1,\}/x/g')" = \
        "$(printf 'x\nx\nx')"
    # All 64 pairs of 8 rows and 8 keys, and of 3 and 8.
    expect 0 out '^case,' bench $small --case q8,q3s8 --head-size 64 --threads 1 --options full
    check "bench: full attention sees all keys" test "$(work)" = "655 246"
    expect 0 out '^case,' bench $small --case q1s64:512,9q1s64:512 --head-size 64 --threads 1
    check "bench: no share above 1" doubts
    check "bench: pieces of ragged decodes" \
        test "$(for name in pieces_gbps pieces_one_gbps pieces_share; do column $name; echo; done | sed 's/[0-9.e-]\{1,\}/x/g')" = \
        "$(printf 'x x\nx x\nx x')"
    ragged=$(work)
    one=${ragged% *} nine=${ragged#* }
    check "bench: ragged lengths lie between the two" test "$nine" -gt 5898 -a "$nine" -lt 47185
    check "bench: and differ" test $((nine / 9 - one)) -gt 100 -o $((one - nine / 9)) -gt 100
    expect 0 out '^case,' bench $small --case q1s64:512,9q1s64:512 --head-size 64 --threads 1 --seed 2
    check "bench: and are the same whatever the seed" test "$(work)" = "$ragged"
}

# ---- bench: peers, played by a shell script ------------------------------------------------------
cat >peers.sh <<'SCRIPT'
echo "$*, $OMP_NUM_THREADS OpenMP threads" >>said
printf '%s\n' "version left 1.2" "something else" "version right 3.4" ready
case=0
while read -r line; do
    echo "$line" >>said
    case $line in
        *'"run": "left"'*) [ $case -ne 3 ] && echo "time 1000" || echo "failed: no luck" ;;
        *'"run": "right"'*) echo "time 3000" ;;
        *)
            case=$((case + 1))
            [ $case -eq 4 ] && exit
            [ $case -eq 2 ] || echo "peer left"
            printf '%s\n' "peer right" ready
            ;;
    esac
done
SCRIPT
FOLIO_PYTHON='sh'
export FOLIO_PYTHON
small='--heads 4:2 --head-size 32 --reps 2 --dtype f32 --threads 2 --peers --peers-script peers.sh'
# shellcheck disable=SC2086 # several words
{
    expect 0 out '^| case .* |  *left 1.2 |  *right 3.4 |$' bench $small --case q3,q4
    check "bench --peers: medians and ratios" \
        grep -q '^| q3 .* |  *1000.00 s ([0-9.]*) |  *3000.00 s ([0-9.]*) |$' out
    check "bench --peers: a peer that does not take a case" \
        grep -q '^| q4 .* |  *- |  *3000.00 s ([0-9.]*) |$' out
    check "bench --peers: threads" \
        grep -q '^--threads 2, 2 OpenMP threads$' said
    check "bench --peers: runs alternate" \
        test "$(sed -n 's/^{"run": "\(.\).*", "warm": false}$/\1/p' said | tr -d '\n')" = lrlrrr
    rm said
    expect 0 out '^q2_5q1s9,.*,1000,[0-9.e+]*,3000,[0-9.e+]*$' bench $small --case q2_5q1s9 --cache warm \
        --options alibi+window:4+soft_cap:30 --seed 7 -o csv
    check "bench --peers: warm" test "$(grep -c '"warm": true}$' said)" -eq 4
    check "bench --peers: the case as it is told" grep -q '^{"case": "q2_5q1s9", "kinds": \[\[1, 2, 2\], '\
'\[5, 1, 9\]\], "dtype": "f32", "kv_dtype": "f32", "heads": 4, "kv_heads": 2, "head_size": 32, '\
'"block_size": 16, "alibi": true, "sinks": false, "window": 4, "soft_cap": 30, "full": false, "seed": 7}$' said
    expect 1 err '^folio bench: --peers: left: failed: no luck$' bench $small --case q3,q4,q5,q6 -o json
    check "bench --peers: a peer that failed is asked no more" test "$(grep -c 'no luck' err)" -eq 1
    check "bench --peers: and has no result" \
        test "$(grep -c '"left": {' out) $(grep -c '"right": {' out)" = "1 3"
    check "bench --peers -o json" \
        test "$(grep -A 3 '"right": {' out | tr -d ' \n' | cut -c 1-58)" = \
        '"right":{"median_s":3000,"min_s":3000,"version":"3.4"--"ri'
    check "bench --peers -o json: who ran" \
        test "$(grep -A 3 '"peers_run": ' out | tr -d ' \n')" = '"peers_run":["left","right"],'
    check "bench --peers: some ran" sh -c '! grep -q "no peer ran" err'
    check "bench --peers: a script that ends is named" \
        grep -q '^folio bench: --peers: peers.sh ended early$' err
    expect 1 err '^folio bench: --peers: there is no nowhere.py; --peers-script says where it is$' \
        bench --peers --peers-script nowhere.py
    FOLIO_PYTHON=./nowhere
    expect 1 err '^folio bench: --peers: ./nowhere cannot be started' bench $small --case q3
}
# Without --peers-script, that beside the program's folder is run; not one that anyone may have put there, nor others.
mkdir -p here/peers here/bin peers
touch here/peers/peers.py here/bin/peers.py peers/peers.py
cp "$folio" here/bin/folio
printf '#!/bin/sh\necho "$@" >../asked\nexit 1\n' >here/python
chmod +x here/python
near() { (cd here && FOLIO_PYTHON=$PWD/python bin/folio bench --case q3 --dtype f32 --heads 2 --head-size 32 --reps 1 --peers) >out 2>err; }
chmod o+w here/peers/peers.py
near
check "bench --peers: a script that anyone may write to" grep -q '^folio bench: --peers: there is no peers/peers.py' err
check "bench --peers: nothing is run" test ! -e asked
chmod o-w here/peers/peers.py
near
check "bench --peers: the script beside the program's folder" grep -q "here/bin/../peers/peers.py" asked
rm -rf peers
# The real script, by a Python that has no packages: it says so, and the bench goes on.
if command -v python3 >python; then
    printf '#!/bin/sh\nexec python3 -B -S "$@"\n' >bare
    chmod +x bare
    FOLIO_PYTHON=./bare
    PYTHONPATH='' expect 0 err '^folio bench: peers: all are left out: No module named' \
        bench --case q3 --dtype f32 --heads 2 --head-size 32 --reps 1 --peers
    check "bench --peers: nobody ran" grep -q '^folio bench: --peers: no peer ran, there is nothing' err
fi
unset FOLIO_PYTHON

# ---- bench overhead ----------------------------------------------------------------------------
expect 2 err "^folio bench overhead: --threads takes up to 8 numbers from 1 to 256" \
    bench overhead --threads 257
expect 2 err '^folio bench overhead: --seconds takes seconds' bench overhead --seconds 0
expect 0 out '^| forward  *|  *- |  *1 thread | .* us | .* us | .* % | call *|' \
    bench overhead --threads 1 --seconds 0.001
check "bench overhead: the forward's figure" grep -q '^- a forward but its kernels: .* us$' out
check "bench overhead: the step's figure" grep -q '^- batch and plan of 256 decodes .* us$' out
check "bench overhead fits 100 columns" test -z "$(awk 'length > 100' out)"

# ---- bench pool --------------------------------------------------------------------------------
for list in '' x 1k, ,1k 1k,,2k 1kk 1.5k -1 255 200M 1e3 99999999999999999999 \
    1k,1k,1k,1k,1k,1k,1k,1k,1k; do
    expect 2 err "^folio bench pool: --blocks takes up to 8 numbers from 256 to 100000000" \
        bench pool --blocks "$list"
done
expect 2 err "^folio bench pool: --threads takes up to 8 numbers from 1 to 64" \
    bench pool --threads 1,0
expect 2 err "^folio bench pool: --block-size takes a whole number from 1 to 256" \
    bench pool --block-size 0
for seconds in '' x 0 -1 nan inf 1s; do
    expect 2 err '^folio bench pool: --seconds takes seconds' bench pool --seconds "$seconds"
done
expect 2 err 'one of md|csv|json' bench pool -o text
expect 1 err '^folio bench pool: nothing ran' bench pool --filter no_such_case
check "a bench where nothing ran prints nothing on stdout" test ! -s out
expect 0 out '^| alloc_free  *|  *1000 |  *- | .* [nu]s | .* [nu]s | .* % | pair *|' \
    bench pool --filter alloc_free --blocks 1k,2500 --threads 1,3 --seconds 0.001
check "bench pool: all sizes" test "$(grep -c '^| alloc_free  *|' out)" -eq 2
check "bench pool: fragmented" test "$(grep -c '^| alloc_free_fragmented  *|' out)" -eq 2
check "bench pool: threads" test "$(grep -c '^| alloc_free_threads  *|.*[13] threads*' out)" -eq 2
check "bench pool: the ceiling" grep -q '^- ceiling: two locks and unlocks: .* ns$' out
check "bench pool: a spread above 20 % is called noisy" test "$(grep -c '^- noisy: .*: spread [0-9]* %$' out)" -ge \
    "$(awk -F'|' '/^\| alloc/ && $7 + 0 > 20.5' out | wc -l)"
check "bench pool: the ratio" grep -q '^- alloc_free: slowest size .* times the fastest$' out
check "bench pool: no other group ran" sh -c '! grep -q "match\|memcpy" out'
check "bench pool fits 100 columns" test -z "$(awk 'length > 100' out)"
expect 0 out '^case,blocks,threads,length,' \
    bench pool --filter commit --seconds 0.001 --block-size 1 -o csv
check "rows of the CSV have equal columns" \
    test "$(awk -F, '{ print NF }' out | sort -u | wc -l)" -eq 1
check "evict and commit come together" \
    test "$(sed 1d out | cut -d, -f1 | tr '\n' ' ')" = 'evict commit '
expect 0 out '"alloc_free_ratio": null' bench pool --filter swap --seconds 0.001 -o json
check "bench -o json: a ceiling that was measured" grep -q '"memcpy_gbps": [0-9]' out
check "bench -o json: one that was not" grep -q '"lock_pair_ns": null' out
check "bench -o json: a number that does not apply" grep -q '"threads": null' out
mkdir tmp
export TMPDIR="$dir/tmp"
expect 0 out '"case": "store_in"' bench pool --filter store --seconds 0.001 -o json
check "the store's file is removed" rmdir tmp
expect 1 err '^folio bench: .*/tmp/.* cannot be made' bench pool --filter store
unset TMPDIR

# ---- A full disk -------------------------------------------------------------------------------
if [ -c /dev/full ]; then
    "$folio" info >/dev/full 2>err
    check "output that cannot be written is a failure" test $? -eq 1
fi

finish
