#!/bin/bash
# The guide's run_retrain_pipeline.sh: loads dst_checkpoints_pipeline and trains on; nothing of it is cut, so one
# process does here. Options go to pipeline_transformation_retrain.py.
# shellcheck source-path=SCRIPTDIR source=ranks.sh
. "$(dirname "${BASH_SOURCE[0]}")/ranks.sh"

python "$here/pipeline_transformation_retrain.py" "$@"
