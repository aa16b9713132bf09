"""Deal with the processes of a run and their host: MPI, signals, memory."""
