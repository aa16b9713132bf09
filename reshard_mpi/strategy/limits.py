"""Bounds on what a strategy may say, far above any real one: a damaged or hostile file must not cost memory."""

from __future__ import annotations

MAX_FILE_BYTES = 256 << 20  # a merged strategy of 64 stages with 10,000 parameters each is about half of this
MAX_RANKS = 1 << 24
MAX_AXES = 64
MAX_DIMENSIONS = 64
# The factors of a nested map are joined by trying the groupings, whose number grows as two to this power.
MAX_EXPANDED_DIMENSIONS = 16
MAX_LENGTH = (1 << 63) - 1  # of a tensor dimension, as in every format
