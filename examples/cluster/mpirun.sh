#!/bin/sh
# examples/cluster/mpirun.sh train.py ...: two CPU processes of four devices each, by Open MPI.
# On several hosts: mpirun --hostfile hosts -n 16 -N 8 ...
set -eu

# Open MPI 4 is known to JAX itself. Open MPI 5 needs `pip install mpi4py` and jax >= 0.12.
exec mpirun -n "${PROCESSES:-2}" --tag-output \
  -x JAX_NUM_CPU_DEVICES="${DEVICES:-4}" -x JAX_PLATFORMS="${JAX_PLATFORMS:-cpu}" \
  python "$@"
