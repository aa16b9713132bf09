#!/bin/bash
# The guide's run_infer_convert.sh: makes dst_strategy.ckpt, and dst_checkpoints of src_checkpoints, by 4 ranks.
# Options go to model_transformation_infer.py.
# shellcheck source-path=SCRIPTDIR source=ranks.sh
. "$(dirname "${BASH_SOURCE[0]}")/ranks.sh"

ranks 4 model_transformation_infer.py --only_compile=1 "$@"
