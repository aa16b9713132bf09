#!/bin/bash
# The guide's run_pipeline_train.sh: src_pipeline_strategys and src_checkpoints_pipeline, by 8 ranks.
# shellcheck source-path=SCRIPTDIR source=ranks.sh
. "$(dirname "${BASH_SOURCE[0]}")/ranks.sh"

ranks 8 pipeline_train.py
