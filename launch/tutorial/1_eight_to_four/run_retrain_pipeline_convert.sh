#!/bin/bash
# The guide's run_retrain_pipeline_convert.sh: merges the strategies of the stages, and makes dst_checkpoints_pipeline
# of src_checkpoints_pipeline, by 4 ranks. Options go to pipeline_transformation_retrain.py.
# shellcheck source-path=SCRIPTDIR source=ranks.sh
. "$(dirname "${BASH_SOURCE[0]}")/ranks.sh"

ranks 4 pipeline_transformation_retrain.py --only_compile=1 "$@"
