#!/usr/bin/env bash
# Train on one node or several, one launcher a node:
#   PREFECT_API_URL=http://login-node:4200/api sbatch --nodes=2 deployments/work-pools/slurm.sh \
#       train --preset production run.name=first
# or keep a worker of a process work pool up for as long as the job lasts:
#   PREFECT_API_URL=… sbatch --nodes=1 deployments/work-pools/slurm.sh worker POOL
# Submit it from the checkout, on a file system that all nodes share. Options of sbatch come before
# what is written here: partition, account, time, and other numbers of GPUs and cores.
#SBATCH --job-name=infini
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
# A job that is preempted starts again, and goes on from the newest checkpoint; one whose time is
# over is submitted again by hand and does the same.
#SBATCH --requeue
#SBATCH --open-mode=append
# The launchers hear of it in time: to end a step and write a checkpoint takes a minute.
#SBATCH --signal=TERM@120
set -euo pipefail

# A server for each node would have them write one database over a network file system.
: "${PREFECT_API_URL:?names no Prefect server that the nodes reach}"
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate

if [[ "${1:-}" == worker ]]; then
    exec srun prefect worker start --type process --pool "${2:?which work pool}"
fi
[[ "${1:-}" == train ]] || { echo "usage: slurm.sh train OPTIONS… | worker POOL" >&2; exit 2; }
shift

options=(launch.gpus=all)
if ((SLURM_NNODES > 1)); then
    # All launchers must name one run: let run.name stand among the options.
    [[ " $* " == *" run.name="* ]] || { echo "several nodes need run.name=…" >&2; exit 2; }
    master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    # Jobs that share a node differ in their number, and so in the port.
    options+=(
        "launch.num_nodes=$SLURM_NNODES"
        "launch.rdzv_endpoint=$master:$((20000 + SLURM_JOB_ID % 10000))"
    )
fi

# Only srun knows which node it is on, so node_rank is filled in by the shell that it starts.
# shellcheck disable=SC2016
exec srun --kill-on-bad-exit=1 bash -c '
    rank=()
    ((SLURM_NNODES == 1)) || rank=("launch.node_rank=$SLURM_NODEID")
    exec infini train "$@" "${rank[@]}"
' infini "${options[@]}" "$@"
