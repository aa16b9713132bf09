"""What both frameworks train on: 20 steps, of which MindSpore takes the first ten."""

import numpy as np
from digits import batches

STEPS, BATCH_SIZE = 20, 64
LEARNING_RATE = 0.002


def lesson(first_step: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the batches from a step on, counted from 0."""
    return batches(STEPS, BATCH_SIZE, seed=9)[first_step:]
