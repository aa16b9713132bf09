#!/bin/bash
# Gradient accumulation in MindSpore, stopped in the middle of an update, and gone on: from 4 slices and back, by one
# process; and data-parallel ranks with sums of their own, 4 of them and 2.
#
#   launch/tutorial/3_accumulation/run.sh [FOLDER]
#
# needs: mindspore
# shellcheck source-path=SCRIPTDIR source=../work_folder.sh
. "$(dirname "${BASH_SOURCE[0]}")/../work_folder.sh"
export GLOG_v=3 # MindSpore says errors only

# cards NUMBER ARGUMENTS: train_parallel.py on so many processes
cards() {
    local number=$1 port
    shift
    # Below the ports that Linux gives to connections, so that none is given it before the scheduler has it.
    port=$(python -c 'import random, socket as s
print(s.create_server(("127.0.0.1", random.randrange(20000, 32000))).getsockname()[1])')
    msrun --worker_num="$number" --local_worker_num="$number" --master_port="$port" --log_dir="log_$4" --join=True \
        "$STORY/train_parallel.py" "$@" </dev/null >"$4.log" 2>&1 || { cat "$4.log" "log_$4"/* >&2; exit 1; }
    grep -h "^$4: " "log_$4"/*
}

echo "=== 40 batches, 10 updates, without a break; and stopped in the sixth update"
python "$STORY/train.py" unbroken
python "$STORY/train.py" first one/accumulation.ckpt

echo "=== through 4 ranks, and back"
reshard-mpi transform one/accumulation.ckpt four --dst-strategy "$STORY/four_ranks.toml" --verify
reshard-mpi transform four back --src-strategy "$STORY/four_ranks.toml" --verify
reshard-mpi diff one/accumulation.ckpt back

echo "=== gone on with what came back, and without the sums"
python "$STORY/train.py" rest back/rank_0/checkpoint_0.ckpt
python "$STORY/train.py" without back/rank_0/checkpoint_0.ckpt

for way in averaging adding; do
    joined=$([ $way = averaging ] && echo mean || echo sum)
    echo "=== 4 data-parallel ranks, $way their sums: unbroken, and saved in the sixth update"
    cards 4 unbroken $way $way/saved "$way"

    echo "=== their sums differ: refused, unless it is said that they are joined ($joined)"
    source=("$way/saved" --src-strategy "$STORY/replicas_4.toml")
    if reshard-mpi transform "${source[0]}" refused "${source[@]:1}" --dst-strategy "$STORY/replicas_4.toml"; then
        echo "not proved: sums that differ were not refused" >&2
        exit 1
    fi
    for ranks in 4 2; do
        target=("$way/for_$ranks" --dst-strategy "$STORY/replicas_$ranks.toml" --accumulated "$joined")
        reshard-mpi transform "${source[0]}" "${target[@]}" "${source[@]:1}" --verify
        reshard-mpi verify "${source[0]}" "${target[@]}" "${source[@]:1}"
        reshard-mpi diff "${source[0]}" "${target[@]}" "${source[@]:1}"
        cards "$ranks" rest $way "$way/for_$ranks" "${way}_$ranks"
    done
done

echo "=== what would come of one rank's sums for all"
for rank in 0 1 2 3; do
    mkdir -p "of_one/rank_$rank"
    cp averaging/saved/rank_0/checkpoint_0.ckpt "of_one/rank_$rank/checkpoint_$rank.ckpt"
done
cards 4 rest averaging of_one averaging_of_one

python "$STORY/prove.py"
