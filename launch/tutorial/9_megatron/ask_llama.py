"""Writes the configuration of the story's model for transformers, or what the model says of the first sentences.

python ask_llama.py --config FOLDER; python ask_llama.py --logits FILE FOLDER
"""

import argparse
import json
from pathlib import Path

import torch
from lesson import CONFIG, sentences


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", action="store_true")
    parser.add_argument("--logits", type=Path)
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    if options.config:
        options.folder.mkdir()
        (options.folder / "config.json").write_text(json.dumps(CONFIG))
        return
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(options.folder, dtype=torch.float32)
    with torch.no_grad():
        torch.save(model(sentences(0)[:, :-1]).logits, options.logits)


if __name__ == "__main__":
    main()
