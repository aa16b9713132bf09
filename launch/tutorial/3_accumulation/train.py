"""Trains in one of several parts; the losses go to PART.json.

python train.py unbroken              # all batches without a break
python train.py first CHECKPOINT      # stops in the middle of an update, and saves
python train.py rest CHECKPOINT       # loads, and trains what was left
python train.py without CHECKPOINT    # the same without the sums: what is lost where they are not saved
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mindspore as ms
from accumulation import BATCHES_AN_UPDATE, Training

STOP = 22  # the sixth update has two of its four batches


def main(part: str, checkpoint: str | None) -> None:
    """Train a part."""
    training = Training()
    if part == "unbroken":
        training.run()
    elif part == "first":
        training.run(stop=STOP)
        if not any(total.asnumpy().any() for total in training.forward.grad_sum):
            raise SystemExit("nothing has been summed: this is not the middle of an update")
        Path(checkpoint).parent.mkdir(parents=True, exist_ok=True)
        ms.save_checkpoint(training.forward, checkpoint, append_dict={"batch_num": STOP})
        print(f"stopped after {STOP} batches, {STOP % BATCHES_AN_UPDATE} into an update")
    else:
        training.run(start=training.load(ms.load_checkpoint(checkpoint), sums_are_lost=part == "without"))
    Path(f"{part}.json").write_text(json.dumps([training.losses, training.scales]))
    print(f"{part}: {len(training.losses)} batches, loss {training.losses[0]:.4f} to {training.losses[-1]:.4f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
