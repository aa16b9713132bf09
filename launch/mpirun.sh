#!/bin/bash
# Reshards a checkpoint by N MPI ranks, with the mpirun of Open MPI 4, Open MPI 5 or MPICH:
#
#   launch/mpirun.sh N SRC DST [options of reshard-mpi transform]
#
# More ranks than cores are fine. What every rank says goes to a file of its own, in a folder of this run's under
# log_output/ in the current folder. Another mpirun, or options for it, are named by MPIRUN:
#
#   MPIRUN="mpirun --hostfile hosts" launch/mpirun.sh 16 SRC DST ...
#
# Started again after it was stopped it goes on; what it has completed stays.

# Where reshard-mpi is in an environment of its own, activate it here:
# . /path/to/.venv/bin/activate

if [ $# -lt 3 ]; then
    echo "usage: mpirun.sh N SRC DST [options of reshard-mpi transform]" >&2
    exit 2
fi
ranks=$1
shift
logs=$PWD/log_output/$(date +%Y%m%d-%H%M%S)-$$
read -r -a mpirun <<<"${MPIRUN:-mpirun}"

version=$("${mpirun[0]}" --version 2>&1)
case $version in
*"Open MPI"* | *"OpenRTE"*)
    # --oversubscribe: more ranks than cores. Ranks mostly wait for storage, so none is bound to a core.
    mpirun+=(--oversubscribe --bind-to none)
    case $version in
    *"(Open MPI) 4."*) mpirun+=(--output-filename "$logs" --merge-stderr-to-stdout) ;;
    *) mpirun+=(--output "dir=$logs,merge") ;;
    esac
    # Ranks on other hosts see only the variables that are named.
    for name in $(compgen -e RESHARD_MPI_); do mpirun+=(-x "$name"); done
    if [ "$(id -u)" = 0 ]; then export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1; fi
    ;;
*HYDRA* | *MPICH*)
    mpirun+=(-outfile-pattern "$logs/rank.%r.out" -errfile-pattern "$logs/rank.%r.err")
    ;;
*)
    echo "mpirun.sh: neither Open MPI nor MPICH: ${mpirun[0]} --version says: $version" >&2
    exit 2
    ;;
esac

mkdir -p "$logs" || exit
echo "mpirun.sh: what every rank says is under $logs" >&2
# In the background, so that a signal to this script is passed on at once, and its end waited for.
# One that comes before there is a job is passed on as soon as there is.
job='' stopped=''
trap 'if [ -z "$job" ]; then stopped=1; else kill -TERM "$job"; fi' TERM INT
"${mpirun[@]}" -n "$ranks" reshard-mpi transform --resume --verbose "$@" &
job=$!
[ -z "$stopped" ] || kill -TERM "$job"
while wait "$job"; code=$?; kill -0 "$job" 2>/dev/null; do :; done

# Open MPI 4 has shown it all along; with the others only the file has what rank 0 says for all.
case $version in *"(Open MPI) 4."*) ;; *) find "$logs" -type f -path '*/rank.0[./]*' -exec cat {} + ;; esac
if [ "$code" != 0 ]; then echo "mpirun.sh: exit code $code; what every rank said is under $logs" >&2; fi
exit "$code"
