"""Holds the losses of the later steps against those of the run without a break, and both models' answers together."""

import json
import sys
from pathlib import Path

import torch

TAKEN = 20
MOST_APART = LOGITS_APART = 1e-4


if __name__ == "__main__":
    unbroken, later = (json.loads(Path(f"losses_{name}.json").read_text()) for name in ("four", "one"))
    if len(later) != TAKEN:
        sys.exit(f"{len(later)} losses instead of {TAKEN}")
    apart = max(abs(got - expected) for got, expected in zip(later, unbroken[-TAKEN:], strict=True))
    if not apart <= MOST_APART:
        sys.exit(f"the loss of a step is {apart} from that of the run without a break")
    answers = [torch.load(f"{name}.pt") for name in ("megatron", "llama")]
    logits_apart = (answers[0] - answers[1]).abs().max().item()
    if not logits_apart <= LOGITS_APART:
        sys.exit(f"transformers' logits are {logits_apart} from Megatron-Core's")
    print(
        "proved: 9_megatron: from tensor parallelism 2 and 2 stages to one process, later losses are those of the run"
        f" without a break (at most {apart:.0e} apart), and transformers' logits Megatron's ({logits_apart:.0e} apart)"
    )
