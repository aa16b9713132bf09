#!/bin/bash
# The guide's run_retrain_pipeline.sh: loads dst_checkpoints_pipeline and trains on; nothing of it is cut, so one process
# does here. Options go to pipeline_transformation_retrain.py.
. "$(dirname "${BASH_SOURCE[0]}")/ranks.sh"

python "$here/pipeline_transformation_retrain.py" "$@"
