#!/bin/sh
# ZONE=us-east5-a TPU=my-pod examples/cluster/cloud_tpu.sh: one process on each host of a TPU pod.
# JAX finds its place from the machine's metadata; several slices by their environment. The folder of
# the checkpoints is one that all hosts have mounted, such as a Filestore share.
set -eu
: "${ZONE:?the zone of the TPU}" "${TPU:?the name of the TPU VM}"

gcloud compute tpus tpu-vm scp --recurse --worker=all --zone="$ZONE" . "$TPU:train"
gcloud compute tpus tpu-vm ssh "$TPU" --worker=all --zone="$ZONE" --command="
  cd train && pip install -q '.[tpu,checkpoint]' &&
  python train.py --checkpoint /mnt/checkpoints/run"
