#!/bin/bash
# The run_saving.sh of the guide's page "Model Saving": src_strategy.ckpt and src_checkpoints of 8 ranks.
# With --sharding=cpu it trains, on 8 CPU processes.
# shellcheck source-path=SCRIPTDIR source=ranks.sh
. "$(dirname "${BASH_SOURCE[0]}")/ranks.sh"

case " $* " in
*" --sharding=cpu "*) cards 8 train_saving.py "$@" ;;
*) python "$here/train_saving.py" "$@" ;;
esac
