#!/usr/bin/env bash
# A search on Slurm: Redis, scheduler and driver on the first node of the job, workers on all its nodes.
#
#   sbatch slurm.sh python search.py                            # after you have adapted the #SBATCH lines
#   sbatch --nodes=4 --gpus-per-node=8 slurm.sh python search.py
#
# It needs `hpstage` (with its extra "tls") and `redis-server` on the PATH of all nodes (activate an environment before
# sbatch), and a folder that all nodes share: HPSTAGE_FOLDER, by default "hpstage" in the folder of sbatch. All progress
# is stored there: after the time limit, submit the same line again to resume the search.
#
# search.py reads its settings from environment variables:
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
# Two Redis servers would corrupt the log. The lock is held until the last process started below has ended.
exec 9> "$folder/lock"
if ! flock --nonblock 9; then
    echo "another job uses $folder; wait for its end, or set HPSTAGE_FOLDER to another folder" >&2
    exit 1
fi
# Sockets do not work on every shared disk. This folder is local, and closed to other accounts.
local=$(mktemp -d)
# A socket's path has at most 107 bytes: redis-server cuts off the rest.
if ((${#local} > 100)); then
    rmdir "$local"
    local=$(mktemp -d --tmpdir=/tmp)
fi
scheduler_file=$folder/scheduler-$SLURM_JOB_ID.json
rm -f "$scheduler_file"

tls='' redis='' scheduler='' workers='' driver=''
end() {
    # In this order, waiting for each: every process needs those after it.
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

# await PROCESS FILE: wait until the process has created the file.
await() {
    until [[ -e $2 ]]; do
        if ! kill -0 "$1" 2> /dev/null; then
            echo "the process that creates $2 has ended; see the messages above" >&2
            exit 1
        fi
        sleep 0.2
    done
}

redis-server --port 0 --unixsocket "$local/redis" --unixsocketperm 700 --dir "$folder/redis" \
    --appendonly yes --appendfsync always --save '' &
redis=$!
# Without TLS, anybody with an account on these nodes could run code through the scheduler. srun passes the variables on.
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
