"""What both frameworks train on, and what each notes of its part: three parts of ten steps."""

import json
from pathlib import Path

import numpy as np
from digits import batches, digits

PART_STEPS, PARTS, BATCH_SIZE = 10, 3, 32
LEARNING_RATE = 0.002

Batch = tuple[np.ndarray, np.ndarray]


def part(number: int) -> list[Batch]:
    """Return the batches of a part, from 0."""
    all_batches = batches(PARTS * PART_STEPS, BATCH_SIZE, seed=4)
    return all_batches[number * PART_STEPS : (number + 1) * PART_STEPS]


def test_data() -> Batch:
    """Return pictures that no part is trained on, and the digits that they show."""
    return digits(256, seed=5)


def note(framework: str, number: int, losses: list[float], outputs: np.ndarray) -> None:
    """Keep the losses of a part, and what the network answered to the test pictures before it."""
    folder = Path("notes")
    folder.mkdir(exist_ok=True)
    (folder / f"{framework}_{number}.json").write_text(json.dumps(losses))
    np.save(folder / f"{framework}_{number}.npy", outputs)


def noted(framework: str, number: int) -> tuple[list[float], np.ndarray]:
    folder = Path("notes")
    losses = json.loads((folder / f"{framework}_{number}.json").read_text())
    return losses, np.load(folder / f"{framework}_{number}.npy")
