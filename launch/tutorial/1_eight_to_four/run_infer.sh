#!/bin/bash
# The guide's run_infer.sh: loads dst_checkpoints on 4 cards and predicts. Without cards: --sharding=cpu.
# Options go to model_transformation_infer.py.
# shellcheck source-path=SCRIPTDIR source=ranks.sh
. "$(dirname "${BASH_SOURCE[0]}")/ranks.sh"

cards 4 model_transformation_infer.py "$@"
