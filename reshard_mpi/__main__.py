"""`python -m reshard_mpi`: the command line."""

from reshard_mpi.cli import command

if __name__ == "__main__":
    command()
