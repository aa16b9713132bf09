"""The command line `reshard-mpi`."""
