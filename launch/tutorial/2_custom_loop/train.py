"""Trains in one of three parts; losses and accuracies go to PART.json.

python train.py unbroken               # all epochs without a break
python train.py first CHECKPOINT       # stops in the middle of the second epoch, and saves
python train.py rest CHECKPOINT        # loads, and trains what was left
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import mindspore as ms
from lenet import Place, Training

STOP = Place(epoch=1, step=25)


def main(part: str, checkpoint: str | None) -> None:
    """Train a part of the cycle."""
    training = Training()
    if part == "unbroken":
        training.run()
    elif part == "first":
        training.run(stop=STOP)
        Path(checkpoint).parent.mkdir(parents=True, exist_ok=True)
        ms.save_checkpoint(training.step, checkpoint, append_dict={"epoch_num": STOP.epoch, "step_num": STOP.step})
        training.accuracies.append(training.evaluate())
    else:
        saved = ms.load_checkpoint(checkpoint)
        start = Place(int(saved.pop("epoch_num").asnumpy()), int(saved.pop("step_num").asnumpy()))
        missing, left = ms.load_param_into_net(training.step, saved)
        if missing or left:
            raise SystemExit(f"not in the checkpoint: {missing}; not in the network: {left}")
        training.accuracies.append(training.evaluate())
        training.run(start)
        print(f"went on after epoch {start.epoch}, step {start.step}")
    Path(f"{part}.json").write_text(json.dumps({"losses": training.losses, "accuracies": training.accuracies}))
    print(f"{part}: {len(training.losses)} steps, loss {training.losses[0]:.4f} to {training.losses[-1]:.4f},")
    print(f"  of 320 digits right: {', '.join(f'{accuracy:.1%}' for accuracy in training.accuracies)}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else None)
