#!/bin/bash
# Megatron-Core: a training on 4 processes, saved as no other layout can load it, goes on in one, and becomes a Llama.
#
#   launch/tutorial/9_megatron/run.sh [FOLDER]
#
# needs: torch megatron
# shellcheck source-path=SCRIPTDIR source=../work_folder.sh
. "$(dirname "${BASH_SOURCE[0]}")/../work_folder.sh"
export OMP_NUM_THREADS=1 # else torchrun says that it does this

echo "=== tensor parallelism 2 and 2 stages: 30 steps without a break, saved after 10"
torchrun --standalone --nproc-per-node 4 "$STORY/train_megatron.py" losses_four.json --tp 2 --pp 2 \
    --save four --after 10

echo "=== one process: 20 steps"
reshard-mpi transform four for_one --to megatron --verify
reshard-mpi diff four for_one
torchrun --standalone --nproc-per-node 1 "$STORY/train_megatron.py" losses_one.json --load for_one \
    --save one --after 30 --logits megatron.pt

echo "=== transformers: the trained model as a Llama"
python "$STORY/ask_llama.py" --config llama
reshard-mpi transform one llama --to hf --map hf-llama-megatron-dist --config llama/config.json
python "$STORY/ask_llama.py" --logits llama.pt llama

python "$STORY/prove.py"
