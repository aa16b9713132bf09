"""Read and write Megatron-Core's checkpoints: weights, and the optimizer's state in any of its forms.

A folder `iter_0000003` has a training in the form torch_dist, or files of each rank in the older form. A file
`latest_checkpointed_iteration.txt` beside it names the newest one. Facts are of Megatron-Core 0.14 to 0.19.
"""

from __future__ import annotations

from reshard_mpi.formats.dcp.writer import seal
from reshard_mpi.formats.megatron.packing import packed
from reshard_mpi.formats.megatron.read_back import as_read
from reshard_mpi.formats.megatron.reader import files_of, open_folder
from reshard_mpi.formats.megatron.training_tree import NAME
from reshard_mpi.formats.megatron.writer import file_name, index_files, locate, read_back, reserve, size_at_most_bytes
from reshard_mpi.formats.protocol import no_crc as check_crc
from reshard_mpi.formats.protocol import no_sums as stored_sums
