"""The same network in MindSpore.

python train_mindspore.py --begin like.ckpt               # saves the network and its optimizer as they begin
python train_mindspore.py --resume FILE --save FILE       # trains the second part
"""

import argparse
from typing import Any

import mindspore as ms
import numpy as np
from lesson import LEARNING_RATE, note, part, test_data
from mindspore import nn, ops


class Network(nn.Cell):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(1, 8, 5, stride=2, pad_mode="valid")
        self.norm = nn.BatchNorm2d(8)
        self.line = nn.Dense(8 * 12 * 12, 64)
        self.layernorm = nn.LayerNorm((64,), epsilon=1e-5)
        self.head = nn.Dense(64, 10, has_bias=False)
        self.flatten = nn.Flatten()

    def construct(self, pictures: ms.Tensor) -> ms.Tensor:
        features = ops.relu(self.norm(self.conv(pictures)))
        return self.head(self.layernorm(ops.relu(self.line(self.flatten(features)))))


class Training:
    def __init__(self) -> None:
        self.network = Network()
        self.optimizer = nn.Adam(self.network.trainable_params(), LEARNING_RATE)

    def save(self, path: str) -> None:
        """Save the parameters of the network and those of its optimizer, each once."""
        parameters = {each.name: each for each in (*self.network.get_parameters(), *self.optimizer.get_parameters())}
        ms.save_checkpoint([{"name": name, "data": value} for name, value in parameters.items()], path)

    def load(self, path: str) -> None:
        loaded = ms.load_checkpoint(path)
        for target in (self.network, self.optimizer):
            missing, _ = ms.load_param_into_net(target, loaded)
            if missing:
                raise SystemExit(f"{path} has nothing for {', '.join(missing)}")

    def outputs(self) -> np.ndarray:
        """Return what the network answers to the test pictures."""
        self.network.set_train(False)
        return self.network(ms.Tensor(test_data()[0])).asnumpy()

    def train(self, number: int) -> list[float]:
        """Train a part; return the losses."""
        step: Any = nn.TrainOneStepCell(nn.WithLossCell(self.network, nn.CrossEntropyLoss()), self.optimizer)
        step.set_train()
        return [float(step(ms.Tensor(pictures), ms.Tensor(shown)).asnumpy()) for pictures, shown in part(number)]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--begin", metavar="FILE")
    parser.add_argument("--resume", metavar="FILE")
    parser.add_argument("--save", metavar="FILE")
    arguments = parser.parse_args()
    ms.set_context(mode=ms.GRAPH_MODE)
    ms.set_device("CPU")
    training = Training()
    if arguments.begin is not None:
        training.save(arguments.begin)
    else:
        training.load(arguments.resume)
        outputs = training.outputs()
        note("mindspore", 1, training.train(1), outputs)
        training.save(arguments.save)
