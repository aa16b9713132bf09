"""Puts the slices of all ranks together with MindSpore: `mindspore_unified.py PROCESSES SRC SRC_STRATEGY DST`."""

import sys

import mindspore

if __name__ == "__main__":  # its processes import this file again
    processes, source, src_strategy, target = sys.argv[1:]
    mindspore.unified_safetensors(source, src_strategy, target, max_process_num=int(processes))
