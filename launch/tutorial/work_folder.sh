# shellcheck shell=bash
# What every story's run.sh begins with: . "$(dirname "${BASH_SOURCE[0]}")/../work_folder.sh"
#
# Goes to the folder that is given as the first argument, which must be empty or not be there, or to one that is removed
# at the end. STORY is then the story's own folder, whose scripts find what stories share.
set -euo pipefail
STORY=$(cd "$(dirname "$0")" && pwd)
export STORY PYTHONPATH="${STORY%/*}${PYTHONPATH:+:$PYTHONPATH}"
if [ $# -gt 0 ]; then
    mkdir -p "$1"
    cd "$1"
    if [ -n "$(ls -A)" ]; then
        echo "$0: $PWD is not empty" >&2
        exit 2
    fi
else
    # shellcheck disable=SC2064 # the folder of now
    work=$(mktemp -d) && trap "rm -rf '$work'" EXIT
    cd "$work"
fi
