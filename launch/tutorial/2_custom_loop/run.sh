#!/bin/bash
# LeNet in MindSpore with its own cycle, stopped in mid-training, through M and N ranks, and gone on.
#
#   launch/tutorial/2_custom_loop/run.sh [FOLDER [M [N]]]
#
# M and N: any numbers, by default 3 and 4.
# needs: mindspore
# shellcheck source-path=SCRIPTDIR source=../work_folder.sh
. "$(dirname "${BASH_SOURCE[0]}")/../work_folder.sh"
export GLOG_v=3 # MindSpore says errors only
m=${2:-3} n=${3:-4}

echo "=== two epochs without a break"
python "$STORY/train.py" unbroken

echo "=== stopped in the second epoch"
python "$STORY/train.py" first one/lenet-1_25.ckpt

echo "=== 1 -> $m -> $n -> 1"
python "$STORY/strategy.py" "$m" >m.toml
python "$STORY/strategy.py" "$n" >n.toml
reshard-mpi transform one/lenet-1_25.ckpt m --dst-strategy m.toml --verify
reshard-mpi transform m n --src-strategy m.toml --dst-strategy n.toml --verify
reshard-mpi transform n back --src-strategy n.toml --verify
reshard-mpi diff one/lenet-1_25.ckpt back

echo "=== evaluated, and gone on with, from what came back"
python "$STORY/train.py" rest back/rank_0/checkpoint_0.ckpt
python "$STORY/prove.py" "$m" "$n"
