"""Read and write Megatron-Core's checkpoints: weights, and the optimizer's state in any of its forms.

A folder `iter_0000003` has a training in the form torch_dist, or files of each rank in the older form. A file
`latest_checkpointed_iteration.txt` beside it names the newest one. Facts are of Megatron-Core 0.14 to 0.19.

Names are those of a whole training state: `model.<key>`, `optimizer.state.<key>.exp_avg` and so on, with
`optimizer.state.<key>.fp32_param` where the model has a parameter in another type, by the keys of torch_dist.
A weight that lies both in the model and, in float32, in the optimizer is listed as two pieces, so that both are
compared as copies are.
"""

from __future__ import annotations

from reshard_mpi.formats.dcp.writer import seal
from reshard_mpi.formats.manifest import Manifest
from reshard_mpi.formats.megatron.legacy import read_legacy
from reshard_mpi.formats.megatron.packing import as_read, packed
from reshard_mpi.formats.megatron.rank_folders import files_of_ranks
from reshard_mpi.formats.megatron.torch_dist import files_of_torch_dist, is_torch_dist, read_training
from reshard_mpi.formats.megatron.training_tree import NAME, arranged
from reshard_mpi.formats.megatron.writer import file_name, index_files, locate, read_back, reserve, size_at_most_bytes
from reshard_mpi.formats.protocol import no_crc as check_crc
from reshard_mpi.formats.protocol import no_sums as stored_sums
from reshard_mpi.formats.torch.unpickler import without_collections


def files_of(folder: str) -> tuple[str, ...]:
    """Return the paths of the checkpoint's files. Raises ShardError if it is damaged."""
    return files_of_torch_dist(folder) if is_torch_dist(folder) else files_of_ranks(folder)


def open_folder(folder: str) -> dict[int, Manifest]:
    """Return the whole tensors of the checkpoint, and everything else that it has as the text of a nest.

    Raises ShardError if a file is missing, not sound, or contradicts others; DisagreementError if files are of several
    saves.
    """
    with without_collections():
        read = read_training(folder) if is_torch_dist(folder) else read_legacy(folder)
        return {0: arranged(read, folder)}
