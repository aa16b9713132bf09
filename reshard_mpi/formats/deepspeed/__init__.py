"""Read and write DeepSpeed's ZeRO checkpoints: weights, and the optimizer's state in flat vectors, of all ranks.

A folder, called by a tag, has files of weights and settings (`*_model_states.pt`) and one of each rank's share of the
optimizer (`*_optim_states.pt`); stages 1 to 3, layers of pipelines and experts lay them out in different ways. A file
`latest` beside the folder names the newest one. Facts are of DeepSpeed 0.19.
"""

from __future__ import annotations

from reshard_mpi.formats.deepspeed.packing import packed
from reshard_mpi.formats.deepspeed.reader import NAME, files_of, locate, open_folder
from reshard_mpi.formats.deepspeed.weight_copies import as_read
from reshard_mpi.formats.deepspeed.writer import file_name, index_files, read_back, reserve, seal, size_at_most_bytes
from reshard_mpi.formats.protocol import no_sums as stored_sums
from reshard_mpi.formats.torch.writer import check_crc
