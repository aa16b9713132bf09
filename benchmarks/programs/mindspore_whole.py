"""Reshards a checkpoint with MindSpore: `mindspore_whole.py PROCESSES FORMAT SRC DST SRC_STRATEGY DST_STRATEGY`."""

import sys

import mindspore

if __name__ == "__main__":  # its processes import this file again
    processes, kind, source, target, src_strategy, dst_strategy = sys.argv[1:]
    mindspore.transform_checkpoints(
        source, target, "checkpoint_", src_strategy, dst_strategy, process_num=int(processes), output_format=kind
    )
