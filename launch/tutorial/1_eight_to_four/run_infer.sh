#!/bin/bash
# The guide's run_infer.sh: loads dst_checkpoints and predicts. Without cards: --sharding=cpu, in one process.
# Options go to model_transformation_infer.py.
# shellcheck source-path=SCRIPTDIR source=ranks.sh
. "$(dirname "${BASH_SOURCE[0]}")/ranks.sh"

python "$here/model_transformation_infer.py" "$@"
