"""Trains on several processes, each on a part of every batch (data parallel); MindSpore's msrun starts them.

msrun ... train_parallel.py unbroken averaging SHARDS NAME    # all batches; in mid-update every rank saves
msrun ... train_parallel.py rest averaging SHARDS NAME        # loads, and trains what was left

averaging: ranks take the mean of their sums (grad_sum.*). adding: they add them (accu_grads.*). SHARDS: where rank N
has rank_N/checkpoint_N.ckpt. The losses, each over all pictures of a batch, go to NAME.json.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mindspore as ms
import numpy as np
from accumulation import Training
from mindspore import communication, ops
from train import STOP


def main(part: str, way: str, shards: Path, name: str) -> None:
    """Train a part, and save or load this rank's shard."""
    ms.set_context(mode=ms.GRAPH_MODE, device_target="CPU")
    communication.init()
    rank, ranks = communication.get_rank(), communication.get_group_size()
    averages = way == "averaging"
    training = Training(rank, ranks, averages=averages, sums="grad_sum" if averages else "accu_grads")
    shard = shards.absolute() / f"rank_{rank}" / f"checkpoint_{rank}.ckpt"
    if part == "unbroken":
        training.run(stop=STOP)
        shard.parent.mkdir(parents=True)
        ms.save_checkpoint(training.forward, str(shard), append_dict={"batch_num": STOP})
        training.run(start=STOP)
    else:
        training.run(start=training.load(ms.load_checkpoint(str(shard))))
    losses = ops.AllReduce()(ms.Tensor(np.array(training.losses, np.float32))).asnumpy() / ranks
    if rank == 0:
        Path(f"{name}.json").write_text(json.dumps(losses.tolist()))
        print(f"{name}: {way}, {ranks} ranks, {len(losses)} batches, loss {losses[0]:.4f} to {losses[-1]:.4f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]), sys.argv[4])
