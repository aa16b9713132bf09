"""What the metadata of a file says: MindSpore's entries, and strings.

Metadata is text by text. MindSpore takes an entry that is called as a tensor for that tensor's type, and fails where it
is no type; so a shard has no entry called as one of its tensors but for that.
"""

from __future__ import annotations

METADATA = "__metadata__"
# Who wrote the file. MindSpore and transformers look at it.
FORMAT, MINDSPORE, TORCH = "format", "ms", "pt"
# The decimal CRC-32 of names and contents that `save_checkpoint(crc_check=True)` adds.
CRC = "crc_num"
# In an entry with the name of a tensor: one value a byte, stored as I8.
INT4_TAG = "Int4"
# "True" where what several ranks hold is in the file of one of them.
REMOVED = "remove_redundancy"
# In files of torch's distributed checkpoints: where each tensor lies in the whole one, as JSON (see `torch_dcp`).
SHARDING = "DCP_SHARDING_INFO"
# A string of a shard, behind this prefix. Other entries of foreign files are not kept.
STRING_PREFIX = "__reshard_mpi__:"
