# shellcheck shell=bash
# What the guide's run_*.sh begin with: . "$(dirname "${BASH_SOURCE[0]}")/ranks.sh"
#
# They work in the current folder, as the guide's do, and start scripts that lie beside this file. `ranks` starts them
# by mpirun, for conversions and for compiling; `cards` by MindSpore's own launcher, for training. What rank N says goes
# to log_output/1/rank.N/stdout, whichever MPI it is.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
export GLOG_v=3 # MindSpore says errors only
export PYTHONPATH="${here%/*}${PYTHONPATH:+:$PYTHONPATH}"

# ranks NUMBER SCRIPT [options]
ranks() {
    local number=$1 script=$2 mpirun=(mpirun)
    shift 2
    case $(mpirun --version 2>&1) in
    *"Open MPI"* | *OpenRTE*)
        mpirun+=(--oversubscribe --bind-to none)
        if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
        ;;
    esac
    rm -rf log_output
    # By `-m mpi4py` a rank that fails ends the others.
    "${mpirun[@]}" -n "$number" bash "$here/rank_log.sh" python -m mpi4py "$here/$script" "$@" </dev/null || show_logs
    cat log_output/1/rank.0/stdout
}

# cards NUMBER SCRIPT [options]
cards() {
    local number=$1 script=$2 port rank
    shift 2
    port=$(python -c 'import socket; s = socket.socket(); s.bind(("127.0.0.1", 0)); print(s.getsockname()[1])')
    rm -rf log_output
    msrun --worker_num="$number" --local_worker_num="$number" --master_port="$port" --log_dir=log_output --join=True \
        "$here/$script" "$@" </dev/null >msrun.log 2>&1 || { cat msrun.log >&2; exit 1; }
    for ((rank = 0; rank < number; rank++)); do
        mkdir -p "log_output/1/rank.$rank"
        mv "log_output/worker_$rank.log" "log_output/1/rank.$rank/stdout"
    done
    grep -v '^\[' log_output/1/rank.0/stdout
}

show_logs() {
    cat log_output/1/rank.*/stdout >&2
    exit 1
}
