"""Prints a strategy of LeNet for any number of ranks, as even as may be.

    python strategy.py 3 >three.toml

Few numbers divide 6, 10, 84 and 120 alike, so slices are of uneven lengths (`sizes = "ceil"`): all as long as the
first, rounded up, but the last ones, of which some are empty with many ranks.
"""

from __future__ import annotations

import sys

print(f"""mesh = {{ card = {int(sys.argv[1])} }}

[[parameter]]
match = "conv2.weight"             # [16, 6, 5, 5], by input channels
split = {{ 1 = ["card"] }}
sizes = "ceil"

[[parameter]]
match = "fc[123].*"                # weights [120, 400], [84, 120], [10, 84], and their biases
split = {{ 0 = ["card"] }}
sizes = "ceil"

[[parameter]]
match = "*"                        # momentum follows its weight; everything else is on every card""")
