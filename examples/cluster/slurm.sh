#!/bin/bash
# sbatch examples/cluster/slurm.sh: one process a GPU, 8 nodes of 8. JAX finds its place from SLURM.
#SBATCH --job-name=jzero
#SBATCH --nodes=8
#SBATCH --ntasks-per-node=8
#SBATCH --gpus-per-node=8
#SBATCH --cpus-per-task=12
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --open-mode=append
set -euo pipefail

# Proxies are for the internet, not for the connection to process 0.
unset http_proxy https_proxy grpc_proxy HTTP_PROXY HTTPS_PROXY

# A task that fails ends all: the processes would end by themselves, one that hangs would not.
# Then the job starts anew, from its newest checkpoint, at most ten times. With --nodes=4-8 it also
# starts where fewer nodes are left.
srun --kill-on-bad-exit=1 --label \
  python train.py --checkpoint "${SCRATCH:-$PWD}/checkpoints/$SLURM_JOB_NAME" && exit
status=$?
if [ "${SLURM_RESTART_COUNT:-0}" -lt 10 ]; then
  scontrol requeue "$SLURM_JOB_ID"
fi
exit "$status"
