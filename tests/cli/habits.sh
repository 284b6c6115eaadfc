#!/bin/sh
# habits.sh: what holds for every command: help that names each option, a man page and completion that say the same,
# colour only where it is wanted, exit status as documented.
# usage: habits.sh PROGRAM
. "$(dirname "$0")/lib.sh"

skip() {
    echo "skipped: $*"
}
names=$("$folio" --help | sed -n '/^commands$/,/^$/s/^  \([a-z]*\)  .*/\1/p')
topics=$("$folio" bench --help | sed -n '/^topics$/,/^$/s/^  \([a-z]*\)  .*/bench \1/p')
all=$(printf '%s\n%s' "$names" "$topics" | tr ' ' '/') # "bench/pool"
check "there are commands" test "$(echo "$names" | wc -l)" -ge 7
check "there are topics" test "$(echo "$topics" | wc -l)" -ge 2
"$folio" completion fish >folio.fish
"$folio" completion bash >folio.bash
"$folio" completion zsh >_folio
"$folio" manual >folio.1

# ---- Help: each option of the tables, and no other ------------------------------------------------
for command in $all; do
    words=$(echo "$command" | tr '/' ' ')
    # shellcheck disable=SC2086 # words
    run $words --help
    check "help of $words: exit status $status" test "$status" -eq 0
    check "help of $words: usage" grep -q "^usage: folio $words" out
    check "help of $words: examples" grep -q '^examples$' out
    check "help of $words: exit status" grep -q '^exit status$' out
    check "help of $words fits 100 columns" test -z "$(awk 'length > 100' out)"
    sed -n 's/^  \( *\|-[a-z], \)--\([a-z-]*\)\( .*\|\)$/\2/p' out | sort -u >said
    # Those of its table, by way of the completion made from it.
    # shellcheck disable=SC2086 # words
    "$folio" completion words $words - | sed -n 's/^--\([a-z-]*\)	.*/\1/p' | sort >table
    check "help of $words names its options: $(diff table said | tr '\n' ' ')" cmp -s table said
    check "completion of $words has options" test -s table
    # shellcheck disable=SC2086 # words
    check "and says what they do" test "$("$folio" completion words $words - | grep -c "^--[a-z-]*$(printf '\t')$")" -eq 0
    # shellcheck disable=SC2086 # words
    run help $words
    check "folio help $words" grep -q "^usage: folio $words" out
    # shellcheck disable=SC2086 # words
    expect 2 err "^folio $words: unknown option '--nonsense'; try 'folio $words --help'" $words --nonsense
    check "a wrong option of $words prints nothing on stdout" test ! -s out
done
run --help
for status_line in '^  0  ' '^  1  ' '^  2  ' '^  130  ' '^  143  '; do
    check "help documents the exit status $status_line" grep -q "$status_line" out
done
check "help documents NO_COLOR" grep -q '^  NO_COLOR ' out

# ---- The man page: all that help says -------------------------------------------------------------
# squeezed: words only, so that the two can be compared whatever the layout.
squeeze() {
    tr -s ' \n' '\n\n' | grep .
}
plain() { # roff without its requests
    sed -e '/^\.\(TH\|PP\|EX\|EE\|TP\|br\|nh\|ad\)/d' -e 's/^\.\(B\|SS\|SH\) //' -e 's/\\&//; s/\\-/-/g; s/\\e/\\/g' folio.1
}
plain | squeeze >page
{
    "$folio" --help
    for command in $all; do
        words=$(echo "$command" | tr '/' ' ')
        # shellcheck disable=SC2086 # words
        "$folio" $words --help
    done
} | sed 's/^usage: //' | squeeze | sort -u >said
sort -u page >page.words
check "every word of help is in the man page: $(comm -23 said page.words | head -5 | tr '\n' ' ')" \
    test -z "$(comm -23 said page.words | grep -v -e '^C$' -e '^[0-9.]*:$')"
for command in $all; do
    words=$(echo "$command" | tr '/' ' ')
    check "the man page has folio $words" grep -q "^\.SH folio $words\$" folio.1
done
pages=${folio%/*}/pages
if [ -d "$pages" ]; then
    for file in folio.1 folio.fish _folio; do check "the build made $file" cmp -s $file "$pages/$file"; done
    check "the build made bash's" cmp -s folio.bash "$pages/folio"
else
    skip "this build makes no pages"
fi
if command -v groff >/dev/null; then
    groff -man -ww -z folio.1 2>err
    check "groff has nothing to say: $(head -3 err)" test ! -s err
else
    skip "there is no groff"
fi

# ---- Completion -----------------------------------------------------------------------------------
# complete_bash WORD...: what bash offers for the last word.
PATH=${folio%/*}:$PATH
complete_bash() {
    bash -c '. ./folio.bash; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _folio; printf "%s\n" "${COMPREPLY[@]}"' \
        bash "$@" 2>&1 | tr '\n' ' '
}
# offers EXPECTED WORD...
offers() {
    want=$1
    shift
    got=$(complete_bash "$@")
    check "bash: $*: '$got', expected '$want'" test "$got" = "$want"
}
if command -v bash >/dev/null; then
    mkdir sub
    : >sub/trace.jsonl
    offers 'demo ' folio de
    offers 'bench ' folio b
    offers 'overhead pool ' folio bench ''
    offers '--kv-dtype ' folio bench --kv
    offers 'cpu cuda ' folio bench --backend ''
    offers 'md csv json ' folio bench -o ''
    offers 'json ' folio bench pool --output j
    offers '--filter ' folio bench pool --fi
    offers ' ' folio bench pool --reps
    offers 'sub/trace.jsonl ' folio bench --compare sub/
    offers 'sub/trace.jsonl ' folio replay sub/t
    offers 'recompute swap ' folio replay sub/trace.jsonl --preempt ''
    offers ' ' folio replay --limit ''
    offers 'bash zsh fish ' folio completion ''
    offers 'replay ' folio help r
    offers ' ' folio nonsense ''
    check "bash: it is complete's" bash -c '. ./folio.bash && complete -p folio | grep -q "_folio folio"'
else
    skip "there is no bash"
fi
if command -v zsh >/dev/null; then
    check "zsh reads its script" zsh -n _folio
    check "zsh takes it" zsh -fc 'autoload -U compinit && compinit -D -u && . ./_folio && [[ $_comps[folio] == _folio ]]'
    # offers_zsh EXPECTED WORD...: what it hands to zsh's own functions for the last word.
    offers_zsh() {
        want=$1
        shift
        got=$(zsh -fc '_describe() { print -rl -- "${offers[@]%%:*}" }; _files() { print files }; compdef() { :; }
            . ./_folio; words=("$@"); CURRENT=$#; _folio' zsh "$@" 2>&1 | tr '\n' ' ')
        check "zsh: $*: '$got', expected '$want'" test "$got" = "$want"
    }
    offers_zsh 'overhead pool ' folio bench ''
    offers_zsh 'cpu cuda ' folio bench --backend ''
    offers_zsh 'files ' folio bench pool --from ''
    offers_zsh 'recompute swap ' folio replay x --preempt ''
else
    skip "there is no zsh"
fi
# offers_fish EXPECTED LINE
offers_fish() {
    got=$(HOME=$dir fish -c "source folio.fish; complete -C'$2'" 2>&1 | cut -f 1 | sort | tr '\n' ' ')
    check "fish: $2: '$got', expected '$1'" test "$got" = "$1"
}
if command -v fish >/dev/null; then
    offers_fish 'bench ' 'folio be'
    offers_fish 'overhead pool ' 'folio bench '
    offers_fish 'cpu cuda ' 'folio bench --backend '
    offers_fish '--filter ' 'folio bench pool --fi'
    offers_fish 'recompute swap ' 'folio replay --preempt '
    offers_fish 'bash fish zsh ' 'folio completion '
    offers_fish 'sub/trace.jsonl ' 'folio replay sub/'
else
    skip "there is no fish"
fi
expect 2 err "^folio completion: SHELL is one of bash|zsh|fish, not 'tcsh'" completion tcsh
expect 2 err '^folio completion: which shell?' completion
expect 2 err "^folio completion: unexpected argument 'zsh'" completion bash zsh

expect 2 err '^folio: argument 2 has a control character' bench "$(printf 'x\033[31m')"

# ---- Colour: on a terminal, unless NO_COLOR is set and not empty ------------------------------------
# codes ENV...: how many lines of the demo have colour codes on a terminal.
codes() {
    # shellcheck disable=SC2016 # for the inner shell
    env -u NO_COLOR TERM=xterm "$@" FOLIO="$folio" script -qec '"$FOLIO" demo' /dev/null 2>/dev/null </dev/null |
        grep -c "$(printf '\033')\["
}
if script -qec true /dev/null >/dev/null 2>&1 </dev/null; then
    check "colour on a terminal" test "$(codes)" -gt 5
    check "no colour with NO_COLOR=1" test "$(codes NO_COLOR=1)" -eq 0
    check "NO_COLOR that is empty does not count" test "$(codes NO_COLOR=)" -gt 5
    check "no colour on a dumb terminal" test "$(codes TERM=dumb)" -eq 0
else
    skip "there is no script to be a terminal"
fi

finish
