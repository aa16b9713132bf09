#!/bin/bash
# Runs the stories of this folder, one after another, and prints what each has proved:
#
#   launch/tutorial/run_all.sh [FOLDER [STORY...]]
#
# What they write goes to FOLDER, by default one that is removed again: in it each story has a folder of its own, and
# STORY.log beside it holds all that it printed. `python`, `reshard-mpi` and what belongs to them must be on the PATH:
# activate their environment first. A story says which frameworks it needs (`# needs: torch` in its run.sh); without
# them it is skipped. The exit code is 1 if a story has proved nothing.

set -u
tutorial=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
if [ $# -gt 0 ]; then
    mkdir -p "$1" && work=$(cd "$1" && pwd) || exit
    shift
else
    work=$(mktemp -d) || exit
    trap 'rm -rf "$work"' EXIT
fi

# Prints those of the frameworks that cannot be found.
missing_of() {
    python -P -c 'import sys; from importlib.util import find_spec
print(*(name for name in sys.argv[1:] if find_spec(name) is None))' "$@"
}

stories=("$@")
if [ $# = 0 ]; then
    for script in "$tutorial"/[0-9]*_*/run.sh; do stories+=("$(basename "$(dirname "$script")")"); done
fi

failed=0
for story in "${stories[@]}"; do
    script=$tutorial/$story/run.sh
    if [ ! -f "$script" ]; then
        echo "run_all.sh: there is no story $story" >&2
        exit 2
    fi
    read -r -a needed <<<"$(sed -n 's/^# needs: *//p' "$script")"
    missing=$(missing_of ${needed[@]+"${needed[@]}"}) || exit
    if [ -n "$missing" ]; then
        echo "skipped: $story needs $missing"
        continue
    fi
    log=$work/$story.log
    bash "$script" "$work/$story" >"$log" 2>&1 </dev/null
    code=$?
    closing=$(grep '^proved: ' "$log" | tail -n 1)
    if [ "$code" = 0 ] && [ -n "$closing" ]; then
        echo "$closing"
    else
        cat "$log" >&2
        echo "not proved: $story (exit code $code)"
        failed=1
    fi
done
exit "$failed"
