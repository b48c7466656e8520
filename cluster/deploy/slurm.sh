#!/usr/bin/env bash
# A search on Slurm: Redis, scheduler and driver on the job's first node, workers on all of its nodes.
#
#   sbatch slurm.sh python search.py                            # after the lines below were fitted to your cluster
#   sbatch --nodes=4 --gpus-per-node=8 slurm.sh python search.py
#
# Needs `hpstage` (with its extra "tls") and `redis-server` on the PATH of all nodes (activate an environment before
# sbatch), and a folder that all nodes share: HPSTAGE_FOLDER, by default "hpstage" where the job was submitted. What was
# reached stays there: the same line resumes the search after the time is up.
#
# search.py takes all it needs from its environment:
#   hpstage.optimize(study, ..., executor=distributed.Client(), store=os.environ["HPSTAGE_STORE"],
#                    checkpoints=os.environ["HPSTAGE_CHECKPOINTS"])
#
#SBATCH --job-name=hpstage
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=8
#SBATCH --time=24:00:00
#SBATCH --signal=B:TERM@120
#SBATCH --output=hpstage-%j.log
##SBATCH --gpus-per-node=4
set -euo pipefail

if [[ $# == 0 || -z ${SLURM_JOB_ID:-} ]]; then
    echo "use: sbatch $0 COMMAND-OF-THE-DRIVER..." >&2
    exit 2
fi
folder=${HPSTAGE_FOLDER:-$SLURM_SUBMIT_DIR/hpstage}
mkdir -p "$folder/redis" "$folder/checkpoints"
# Two servers on one log would ruin it. The lock lasts as long as the last process that was started below.
exec 9> "$folder/lock"
if ! flock --nonblock 9; then
    echo "another job works in $folder" >&2
    exit 1
fi
# Sockets do not work on every shared disk; this one is open to nobody else.
local=$(mktemp -d)
scheduler_file=$folder/scheduler-$SLURM_JOB_ID.json
rm -f "$scheduler_file"

tls='' redis='' scheduler='' workers='' driver=''
end() {
    # In this order, and each to its end: those that come later are still needed by those before.
    for process in "$driver" "$workers" "$scheduler" "$redis"; do
        if [[ -n $process ]]; then
            kill "$process" 2> /dev/null || true
            wait "$process" || true
        fi
    done
    rm -rf "$local" "$scheduler_file" "$tls"
}
trap end EXIT
trap 'exit 143' TERM INT

# await PROCESS FILE: until the process has made the file.
await() {
    until [[ -e $2 ]]; do
        if ! kill -0 "$1" 2> /dev/null; then
            echo "$2 did not come: see the messages above" >&2
            exit 1
        fi
        sleep 0.2
    done
}

redis-server --port 0 --unixsocket "$local/redis" --unixsocketperm 700 --dir "$folder/redis" \
    --appendonly yes --appendfsync always --save '' &
redis=$!
# Whoever has an account on these nodes could otherwise run code by way of the scheduler. The variables reach all nodes.
tls=$folder/tls-$SLURM_JOB_ID
variables=$(hpstage certificates "$tls")
eval "$variables"
hpstage scheduler --port 0 --scheduler-file "$scheduler_file" &
scheduler=$!
await "$redis" "$local/redis"
await "$scheduler" "$scheduler_file"

srun --ntasks="$SLURM_JOB_NUM_NODES" --ntasks-per-node=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" \
    hpstage worker --scheduler-file "$scheduler_file" &
workers=$!

export DASK_SCHEDULER_ADDRESS HPSTAGE_STORE="unix://$local/redis" HPSTAGE_CHECKPOINTS="$folder/checkpoints"
DASK_SCHEDULER_ADDRESS=$(python -c 'import json, sys; print(json.load(open(sys.argv[1]))["address"])' "$scheduler_file")
"$@" &
driver=$!
wait "$driver"
