#!/bin/bash
# MindSpore's guide "Model Transformation": 8 cards to 4, for training and for inference, and a pipeline of 8 to 4.
#
#   launch/tutorial/1_eight_to_four/run.sh [FOLDER]
#
# shellcheck source-path=SCRIPTDIR source=../work_folder.sh
. "$(dirname "${BASH_SOURCE[0]}")/../work_folder.sh"

echo "=== 8 cards have saved"
bash "$STORY/run_saving.sh"

echo "=== for 4 cards that train: transform_checkpoints, mpirun -n 4"
bash "$STORY/run_retrain_convert.sh"
python "$STORY/check.py" dst_checkpoints four_cards moments

echo "=== for 4 cards that predict: transform_checkpoint_by_rank, mpirun -n 4"
mkdir infer && cp -r src_strategy.ckpt src_checkpoints infer
(cd infer && bash "$STORY/run_infer_convert.sh")
python "$STORY/check.py" infer/dst_checkpoints four_cards

echo "=== a pipeline of 8 cards in two stages, for 4 cards that train"
bash "$STORY/run_pipeline_train.sh"
bash "$STORY/run_retrain_pipeline_convert.sh"
python "$STORY/check.py" dst_checkpoints_pipeline replicated moments

compiled=$(python "$STORY/strategies.py")
if [ "$compiled" = no ]; then
    echo "not run: compiling and training, which need MindSpore 2.10"
    echo "proved: 8 cards to 4 by MindSpore's strategy files, for training, for inference and from a pipeline:" \
        "all 120 slices are those of the whole tensors"
    exit
fi

echo "=== from the pipeline's checkpoint 4 cards train on, and one"
bash "$STORY/run_retrain_pipeline.sh"
python "$STORY/pipeline_transformation_retrain.py"
python "$STORY/compare_losses.py" losses_4.json losses_1.json

echo "=== an experiment: 8 CPU processes train, 4 go on, and one"
mkdir cpu
cd cpu || exit
bash "$STORY/run_saving.sh" --sharding=cpu
cmp src_strategy.ckpt "$STORY/strategies/cpu/src_strategy.ckpt"
cp "$STORY/strategies/cpu/dst_strategy.ckpt" .
bash "$STORY/run_retrain_convert.sh" --sharding=cpu
bash "$STORY/run_retrain.sh" --sharding=cpu
bash "$STORY/run_infer.sh" --sharding=cpu
reshard-mpi transform src_checkpoints whole --src-strategy src_strategy.ckpt
python "$STORY/model_transformation_retrain.py" --sharding=cpu --dst_checkpoints_dir=whole
python "$STORY/model_transformation_infer.py" --sharding=cpu --dst_checkpoints_dir=whole
cmp predicted_4.json predicted_1.json
python "$STORY/compare_losses.py" losses_8.json losses_4.json losses_1.json

echo "proved: 8 cards to 4 for training, for inference and from a pipeline: all 120 slices are those that MindSpore's" \
    "compiler cuts; what 8 CPU processes had trained, 4 and 1 train on with the same losses, and predict by alike"
