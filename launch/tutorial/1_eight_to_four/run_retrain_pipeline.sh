#!/bin/bash
# The guide's run_retrain_pipeline.sh: loads dst_checkpoints_pipeline on 4 cards and trains on; nothing is cut.
# Options go to pipeline_transformation_retrain.py.
# shellcheck source-path=SCRIPTDIR source=ranks.sh
. "$(dirname "${BASH_SOURCE[0]}")/ranks.sh"

cards 4 pipeline_transformation_retrain.py "$@"
