#!/bin/bash
# Runs a command as one rank of mpirun, of any MPI; what it says goes to log_output/1/rank.N/stdout.
rank=${OMPI_COMM_WORLD_RANK:-${PMIX_RANK:-${PMI_RANK:?mpirun has not started this}}}
mkdir -p "log_output/1/rank.$rank"
export MS_NODE_ID=$rank # which rank it is for MindSpore
exec "$@" >"log_output/1/rank.$rank/stdout" 2>&1
