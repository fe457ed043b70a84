#!/usr/bin/env bash
# Train on one or more nodes, with one launcher per node:
#   PREFECT_API_URL=http://login-node:4200/api sbatch --nodes=2 deployments/work-pools/slurm.sh \
#       train --preset production run.name=first
# or run a worker of a process work pool for as long as the job lasts:
#   PREFECT_API_URL=… sbatch --nodes=1 deployments/work-pools/slurm.sh worker POOL
# Submit it from the checkout, on a file system that all nodes share. Options given to sbatch override
# those below: partition, account, time, numbers of GPUs and cores.
#SBATCH --job-name=infini
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=64
#SBATCH --exclusive
# A job that is preempted, loses a node or reaches its time limit is requeued and resumes from the
# newest checkpoint.
#SBATCH --requeue
#SBATCH --open-mode=append
# Signal the launchers early enough to finish a step and write a checkpoint, which takes a minute.
#SBATCH --signal=TERM@120
set -euo pipefail

# With one server per node, all of them would write to one database over a network file system.
: "${PREFECT_API_URL:?must name a Prefect server that the nodes can reach}"
cd "$SLURM_SUBMIT_DIR"
source .venv/bin/activate

if [[ "${1:-}" == worker ]]; then
    exec srun --ntasks-per-node=1 prefect worker start --type process --pool "${2:?which work pool}"
fi
[[ "${1:-}" == train ]] || { echo "usage: slurm.sh train OPTIONS… | worker POOL" >&2; exit 2; }
shift

options=()
if [[ -n "${SLURM_GPUS_ON_NODE:-}" && " $* " != *" --no-gpu "* ]]; then
    options+=(launch.gpus=all)
fi
if ((SLURM_NNODES > 1)); then
    # All launchers must name the same run, so run.name has to be given.
    [[ " $* " == *" run.name="* ]] || { echo "several nodes need run.name=…" >&2; exit 2; }
    master=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
    # Where Slurm itself reaches the node: its name need not be one that the network knows.
    address=$(scontrol show node --oneliner "$master" | grep --only-matching --perl-regexp '(?<=NodeAddr=)\S+')
    # Jobs that share a node have different IDs, and therefore different ports.
    options+=(
        "launch.num_nodes=$SLURM_NNODES"
        "launch.rdzv_endpoint=$address:$((20000 + SLURM_JOB_ID % 10000))"
    )
fi

# With --ntasks-per-node among the options above, Slurm would allocate the fewest nodes of a range.
# Only the shell that srun starts knows its node, so it sets node_rank.
# shellcheck disable=SC2016
srun --ntasks-per-node=1 --kill-on-bad-exit=1 bash -c '
    rank=()
    ((SLURM_NNODES == 1)) || rank=("launch.node_rank=$SLURM_NODEID")
    exec infini train "$@" "${rank[@]}"
' infini "${options[@]}" "$@" && exit
status=$?

# A training that saved its checkpoint in time ends before Slurm ends the job, which would then have
# failed. One that was cancelled is no longer running and stays cancelled.
if ((status == 130 || status == 143)) && [[ $(squeue --noheader --jobs "$SLURM_JOB_ID" --format %T) == RUNNING ]]; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
