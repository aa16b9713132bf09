"""`python -m reshard_mpi`: the command line."""

from reshard_mpi.start import command

if __name__ == "__main__":
    command()
