#!/bin/bash
# Reshards a checkpoint by processes on this machine, without MPI:
#
#   launch/local.sh SRC DST [options of reshard-mpi transform]
#
# There is one process a core, up to 8 or the number of targets; --jobs N says otherwise. Started again after it was
# stopped it goes on; what it has completed stays.

# Where reshard-mpi is in an environment of its own, activate it here:
# . /path/to/.venv/bin/activate

if [ $# -lt 2 ]; then
    echo "usage: local.sh SRC DST [options of reshard-mpi transform]" >&2
    exit 2
fi
exec reshard-mpi transform --resume "$@"
