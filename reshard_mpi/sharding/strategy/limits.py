"""Bounds on what a strategy may say, far above any real one: a damaged or hostile file must not cost memory."""

from __future__ import annotations

MAX_FILE_BYTES = 256 << 20  # a merged strategy of 64 stages with 10,000 parameters each is about half of this
MAX_SPEC_BYTES = 1 << 19  # people write specs; a larger one is a slip
MAX_RANKS = 1 << 24
MAX_STAGES = 1 << 10
# One operator or parameter of a protobuf strategy: some hundred bytes, unless a dimension is cut into uneven slices.
MAX_ITEM_BYTES = 1 << 20
MAX_SLICES = 1 << 14
MAX_INPUTS = 1 << 10  # of an operator
# What a file may take when it is parsed, in all and for each of its bytes: real ones take four to six times their size,
# one that is nothing but brackets takes forty times its own.
MAX_PARSED_BYTES = 40 << 20
MAX_PARSED_TIMES = 10
MAX_NAME_LENGTH = 4096  # as in every format, and a little more for the stage in a merged file
MAX_RULES = 1 << 10
# Of all patterns together: a pattern is compiled when it is used.
MAX_PATTERNS_LENGTH = 1 << 17
MAX_AXES = 64
MAX_DIMENSIONS = 64
# The factors of a nested map are joined by trying the groupings, whose number grows as two to this power.
MAX_EXPANDED_DIMENSIONS = 16
MAX_LENGTH = (1 << 63) - 1  # of a tensor dimension, as in every format
