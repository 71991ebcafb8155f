#!/usr/bin/env bash
# Train on several machines. Run this on each, with the same project and data, and its own rank:
#
#   machine a:  ./launch_multinode.sh --nnodes 2 --node-rank 0 --master-addr a [train.py flags]
#   machine b:  ./launch_multinode.sh --nnodes 2 --node-rank 1 --master-addr a [train.py flags]
#
# Or the same as variables: NNODES=2 NODE_RANK=1 MASTER_ADDR=a ./launch_multinode.sh [flags].
# Flags win over variables; every other flag goes to train.py.
#
#   --nnodes          NNODES           how many machines
#   --node-rank       NODE_RANK        which one this is, from 0
#   --master-addr     MASTER_ADDR      name or IP address of machine 0, as the others reach it
#   --master-port     MASTER_PORT      a free port there, open to the others      [29500]
#   --nproc-per-node  NPROC_PER_NODE   ranks on this machine                      [every GPU]
#
# Start them in any order: each waits for the others, at most LAUNCH_TIMEOUT seconds [600].
# Machine 0 writes the run's folder.
#
# It is `torchrun --nnodes N --node-rank R --master-addr A --master-port P train.py [flags]`, and
# launch.sh with more flags: it documents signals and exit codes.
set -euo pipefail
script=${BASH_SOURCE[0]}
while [[ -L $script ]]; do # called through a symbolic link: the project is where it leads to
  target=$(readlink -- "$script")
  [[ $target == /* ]] || target=$(dirname -- "$script")/$target
  script=$target
done
here=$(CDPATH='' cd -- "$(dirname -- "$script")" && pwd)

exec bash "$here/launch.sh" --nnodes="${NNODES:-}" --node-rank="${NODE_RANK:-}" \
  --master-addr="${MASTER_ADDR:-}" --master-port="${MASTER_PORT:-29500}" "$@"
