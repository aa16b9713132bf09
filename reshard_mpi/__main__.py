"""`python -m reshard_mpi`: the command line."""

from reshard_mpi.cli import main

if __name__ == "__main__":
    main()
