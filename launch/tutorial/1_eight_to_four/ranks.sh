# shellcheck shell=bash
# What the guide's run_*.sh begin with: . "$(dirname "${BASH_SOURCE[0]}")/ranks.sh"
#
# They work in the current folder, as the guide's do, and start scripts that lie beside this file by mpirun: `ranks` for
# conversions and for compiling; `cards` for training and predicting, with MindSpore's scheduler beside them, by which
# its processes find each other on CPUs. What rank N says goes to log_output/1/rank.N/stdout, whichever MPI it is.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export GLOG_v=3 # MindSpore says errors only
export PYTHONPATH="${here%/*}${PYTHONPATH:+:$PYTHONPATH}"

# ranks NUMBER SCRIPT [options]
ranks() {
    # By `-m mpi4py` a rank that fails ends the others.
    start "$1" -m mpi4py "$here/$2" "${@:3}"
}

# cards NUMBER SCRIPT [options]
cards() {
    # Below the ports that Linux gives to connections, so that none is given it before the scheduler has it.
    MS_SCHED_PORT=$(python -c 'import random, socket as s
print(s.create_server(("127.0.0.1", random.randrange(20000, 32000))).getsockname()[1])')
    export MS_SCHED_PORT MS_SCHED_HOST=127.0.0.1 MS_WORKER_NUM=$1
    MS_ROLE=MS_SCHED python "$here/$2" "${@:3}" </dev/null >scheduler.log 2>&1 &
    scheduler=$!
    trap 'kill "$scheduler" 2>/dev/null || true' EXIT
    MS_ROLE=MS_WORKER start "$1" "$here/$2" "${@:3}"
    wait "$scheduler"
}

# start NUMBER ARGUMENTS: python with these arguments, so many times
start() {
    local number=$1 mpirun=(mpirun)
    shift
    case $(mpirun --version 2>&1) in
    *"Open MPI"* | *OpenRTE*)
        mpirun+=(--oversubscribe --bind-to none)
        if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
        ;;
    esac
    rm -rf log_output
    "${mpirun[@]}" -n "$number" bash "$here/rank_log.sh" python "$@" </dev/null || show_logs
    grep -v '^\[INFO\] ' log_output/1/rank.0/stdout
}

show_logs() {
    cat log_output/1/rank.*/stdout >&2
    exit 1
}
