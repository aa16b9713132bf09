"""Read and write torch's distributed checkpoints (DCP): a folder of files, and `.metadata`.

A file is archives of torch one after another, each of one piece of a tensor or of one object. The metadata is a pickle;
neither is executed. Written are a file a rank, with the pieces of that rank, and the metadata when all are complete.
Facts of the layout are of torch 2.13.
"""

from __future__ import annotations

from reshard_mpi.formats.dcp.metadata_writer import index_files
from reshard_mpi.formats.dcp.reader import NAME, files_of, open_folder
from reshard_mpi.formats.dcp.writer import check_crc, file_name, locate, read_back, reserve, seal, size_at_most_bytes
from reshard_mpi.formats.protocol import no_sums as stored_sums
