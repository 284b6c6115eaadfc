#!/bin/sh
# replay_live.sh: `folio replay` on terminals: its live display, sizes, colours, and however it ends.
# usage: ON_PTY=... KILLS=N replay_live.sh PROGRAM
. "$(dirname "$0")/lib.sh"
unset NO_COLOR COLUMNS LINES LANG LC_CTYPE
export TERM=xterm LC_ALL=C

if "$ON_PTY" true 2>&1 | grep -q posix_openpt; then
    echo "no pseudo-terminals here: the live display is not tested"
    exit 0
fi

# Longer than any test waits: each is ended by a signal.
long='replay --layers 200 --heads 2:1 --head-size 8 --budget 64 --blocks 1000'
# on_terminal ON_PTY_OPTIONS -- ARGUMENTS: the rows go to screen, the state to state; stdout goes to out.
on_terminal() {
    options=
    while [ "$1" != -- ]; do
        options="$options $1"
        shift
    done
    shift
    # shellcheck disable=SC2086 # words
    "$ON_PTY" $options sh -c 'exec "$0" "$@" >out' "$folio" "$@" >pty
    sed '/^-- /d; /^$/d' pty >screen
    sed -n 's/^-- //p' pty >state
}
# said NAME: of the state.
said() {
    sed "s/.*\<$1 \([^,]*\).*/\1/" state
}
untouched='colour 0, hidden 0, alternate 0, modes kept'

# ---- The display -----------------------------------------------------------------------------------
# display BLOCKS SIZE GLYPHS [OPTION]: there, so many glyphs stand for the blocks.
display() {
    # shellcheck disable=SC2086 # words
    on_terminal -s "$2" -a 2:FILE=frame -a 0:INT -- $long --blocks "$1" ${4:-}
    check "$1 blocks at $2: the map, $(grep -c '^[.o#-]*$' frame) lines" \
        test "$(grep '^[.o#-][.o#-]*$' frame | tr -d '\n' | wc -c)" -eq "$3"
    check "$1 blocks at $2: at most 8 lines of map" test "$(grep -c '^[.o#-][.o#-]*$' frame)" -le 8
    check "$1 blocks at $2: the bar" grep -q '^\[[#.]*' frame
    check "$1 blocks at $2: nothing is folded ($(cat state))" test "$(said folds)" -eq 0
    check "$1 blocks at $2: it ends with the summary" grep -q '^| requests  *| [0-9]* of 128 in ' out
    check "$1 blocks at $2: and without the display" test ! -s screen
}
display 600 80x24 600
legend='^# shared \([0-9]*\)  o used \([0-9]*\)  - cached \([0-9]*\)  \. free \([0-9]*\) *$'
check "what blocks are" grep -q "$legend" frame
map=$(grep '^[.o#-][.o#-]*$' frame | tr -d '\n')
# shown GLYPH: how many of them the map has.
shown() { printf %s "$map" | tr -dc "$1" | wc -c | tr -d ' '; }
check "the map has as many of each as its legend says" \
    test "$(shown '#') $(shown o) $(shown -) $(shown .)" = "$(sed -n "s/$legend/\1 \2 \3 \4/p" frame)"
check "some are held" test "$(shown o)" -gt 0
check "counters" grep -q '^running [1-9][0-9]*  waiting [0-9]*  preempted [0-9]*, [0-9]* in all  prefix hits [0-9.]* %$' frame
check "rates" grep -q '^tokens/s: prefill [1-9][0-9]*, decode [0-9]*  evicted [0-9]*$' frame
check "rate and time left" grep -q '  [1-9][0-9]* tokens/s, [0-9.]* [a-z]* left$' frame
check "colours" test "$(said colours)" -gt 0
display 1000 80x24 500
check "a glyph for two blocks" grep -q '(a glyph: 2 blocks)$' frame
held=$(($(sed -n 's/^# shared \([0-9]*\)  o used \([0-9]*\) .*/\1 + \2/p' frame)))
map=$(grep '^[.o#-][.o#-]*$' frame | tr -d '\n')
check "it is held if one of them is: $(shown '#o') glyphs for $held blocks" \
    test $(((2 * $(shown '#o') >= held) * ($(shown '#o') <= held))) -eq 1
display 1000 40x12 250
display 20000 200x50 1250 --layers=20
display 1000 30x6 29
display 1000 25x5 0
# shellcheck disable=SC2086 # words
on_terminal -a 2:FILE=frame -a 0:INT -- $long --preempt swap
check "host memory" grep -q '  host [0-9]* of 1000$' frame
# shellcheck disable=SC2086 # words
on_terminal -a 2:FILE=frame -a 0:INT -- $long --speed 0.001
check "requests that have not come do not wait" grep -q '^running 1  waiting 0 ' frame
# shellcheck disable=SC2086 # words
LC_ALL=C.UTF-8 on_terminal -a 2:FILE=frame -a 0:INT -- $long
check "glyphs beyond ASCII" grep -q '^█ shared .*▓ used .*░ cached .*· free' frame
check "they are as wide" test "$(said folds)" -eq 0

# ---- Sizes that change -------------------------------------------------------------------------------
# shellcheck disable=SC2086 # words
on_terminal -a 2:45x24 -a 2:120x40 -a 1:60x24 -a 1:80x24 -a 2:FILE=frame -a 0:^C -- $long
check "other sizes leave one display" test "$(grep -c '^\[' frame) $(grep -c '^running ' frame)" = '1 1'
check "and nothing at the end" test ! -s screen
check "Ctrl-C ends it with 130" test "$(said status)" -eq 130

# ---- Without colours, without a terminal -----------------------------------------------------------------
# shellcheck disable=SC2086 # words
NO_COLOR=1 on_terminal -a 2:FILE=frame -a 0:TERM -- $long
check "NO_COLOR: a display" grep -q '^running ' frame
check "NO_COLOR: no colours" test "$(said colours)" -eq 0
check "a terminated replay ends with 143" test "$(said status)" -eq 143
# shellcheck disable=SC2086 # words
TERM=dumb on_terminal -a 1rows:INT -- $long
check "TERM=dumb: lines" grep -q \
    '^[0-9]* of 128 requests, [0-9]* tokens/s, [0-9.]* [a-z]* left; running [0-9]*, waiting [0-9]*, pree' screen
check "TERM=dumb: no sequences" test "$(said draws) $(said colours) $(said unknown)" = '0 0 0'
"$ON_PTY" sh -c 'set -m; "$0" "$@" >out & wait' "$folio" replay --limit 20 --layers 20 --heads 2:1 --head-size 8 >pty
check "nothing is drawn from the background: $(tail -n 1 pty)" grep -q '^-- status 0, draws 0,' pty
check "it serves all the same" grep -q '^| requests  *| 20 of 20 in ' out
# shellcheck disable=SC2086 # words
"$folio" $long >out 2>err &
job=$!
while [ ! -s err ] && kill -0 $job; do sleep 0.1; done
kill -INT $job
wait $job
check "piped: plain lines" grep -q '^[0-9]* of 128 requests, .* of 1000 blocks used$' err
check "piped: no sequences" sh -c '! grep -q "$(printf "\\033")" err'

# ---- A message while the display stands ------------------------------------------------------------------
# shellcheck disable=SC2086 # words
"$ON_PTY" -s 120x30 sh -c 'trap "" XFSZ; ulimit -f 20000; exec "$0" "$@" >out' "$folio" $long --rows rows >pty
check "a file that cannot grow is a failure: $(tail -n 1 pty)" grep -q '^-- status 1,' pty
check "the sentence is all that is left" test "$(grep -v '^-- ' pty | grep .)" = \
    "folio replay: rows cannot be written: File too large"
check "and the file is gone" test ! -e rows

# ---- Killed at random ------------------------------------------------------------------------------------
mkdir tmp work
export TMPDIR="$dir/tmp"
# kill_once WITH SIGNAL MS: the terminal is as it was.
kill_once() {
    # shellcheck disable=SC2086 # words
    (cd work && "$ON_PTY" -a "$3ms:$2" "$folio" $long $1) >pty
    case $2 in INT) want=130 ;; TERM) want=143 ;; *) want=137 ;; esac
    check "$2 after $3 ms, $1: $(tail -n 1 pty)" grep -q "^-- status $want,.* unknown 0, $untouched$" pty
    [ "$2" = KILL ] || check "$2 after $3 ms, $1: nothing of the display is left" sh -c '! grep -q "^\[[#.]*\]" pty'
}
awk -v n="$KILLS" -v seed="$(date +%s)" 'BEGIN {
    srand(seed)
    for (i = 0; i < n; i++)
        printf "%s %d %d\n", substr("INT TERMKILL", 1 + 4 * (i % 3), 4), rand() * 900, int(rand() * 4)
}' >kills
while read -r signal ms which; do
    case $which in
    1) with='--preempt swap --admit chunk --blocks 700' ;;
    2) with='--verify 2' ;;
    3) with='-o json --policy prefill-first' ;;
    *) with= ;;
    esac
    kill_once "$with" "$signal" "$ms"
done <kills
check "all of them: $(wc -l <kills) of $KILLS" test "$(wc -l <kills)" -eq "$KILLS"
check "no file is left by $KILLS kills" rmdir work tmp

finish
