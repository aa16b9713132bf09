"""Read and write files of torch.save (`.pt`, `.pth`, `.bin`) without executing them.

A file is a zip archive of members as they are: a pickle of one object, in which each tensor is a name, a shape and a
place in a storage, and the bytes of every storage. Files of torch before 1.6 are pickles in a row, and are read too.
Facts of the layout are of torch 2.13.
"""

from __future__ import annotations

from reshard_mpi.formats.protocol import no_sums as stored_sums
from reshard_mpi.formats.torch.reader import NAME, locate, read_back
from reshard_mpi.formats.torch.writer import check_crc, reserve, seal, size_at_most_bytes
