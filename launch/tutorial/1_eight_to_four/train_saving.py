"""What the guide has from its page "Model Saving": a checkpoint of 8 cards, and its strategy.

    python train_saving.py                              # known tensors, cut as the guide's 8 cards hold them
    mpirun -n 8 python train_saving.py --sharding=cpu   # really trained, on 8 CPU processes, by run_saving.sh

MindSpore trains the guide's sharding on real cards only. So known tensors stand in for trained ones: wherever an
element goes, it can be told which one it is.
"""

from __future__ import annotations

from pathlib import Path

from arguments import parse_arguments
from checkpoint_files import save
from known_tensors import eight_cards, whole_tensors
from strategies import compile_or_copy, require_same


def main(src_strategy_file: str, src_checkpoints_dir: str) -> None:
    """Write the source: shards that are cut by hand, and that MindSpore's compiler would cut alike."""
    tensors = whole_tensors("moments")
    # Without optimizer sharding one layout holds for all ranks, so it is compiled once.
    compiled = compile_or_copy("src_strategy.ckpt", Path(src_strategy_file), cards=8, rank=0, optimizer_sharding=False)
    for rank in range(8):
        shard = Path(src_checkpoints_dir, f"rank_{rank}", f"checkpoint_{rank}.ckpt")
        slices = {name: eight_cards(name, whole, rank) for name, whole in tensors.items()}
        save(shard, slices)
        if compiled:
            import compile_only

            require_same(slices, compile_only.slices_of(compiled._replace(rank=rank), tensors), shard)
    print("8 ranks saved" + (", sliced as MindSpore's own compiler slices" if compiled else ""))


if __name__ == "__main__":
    options = parse_arguments(__doc__, src_strategy_file="src_strategy.ckpt", src_checkpoints_dir="src_checkpoints")
    if options.sharding == "cpu":
        import cpu_training

        cpu_training.train_and_save(options.src_strategy_file, options.src_checkpoints_dir)
    else:
        main(options.src_strategy_file, options.src_checkpoints_dir)
