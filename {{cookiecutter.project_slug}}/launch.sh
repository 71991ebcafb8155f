#!/usr/bin/env bash
# Train on this machine: one rank per GPU, or two ranks on the CPU where there is no GPU.
#
#   ./launch.sh                                with the settings of config.toml
#   ./launch.sh --epochs 5 --lr 1e-4           any flag of train.py; --help lists them
#   ./launch.sh --nproc-per-node 1             fewer ranks (or NPROC_PER_NODE=1); the same result
#   CUDA_VISIBLE_DEVICES=0,2 ./launch.sh       on some of the GPUs
#   ./launch.sh --max-restarts 3               after a crash, start again from the last checkpoint
#
# Ctrl-C, SIGTERM or SIGUSR1 asks the ranks to save and stop; Ctrl-C again stops them at once.
# File names in flags are relative to the folder that you call this from.
#
# Exit codes: 0 finished, or stopped and saved; 2 something you need to fix; 3 a rank hung; 1 another
# error; above 128 ended by a signal, or stopped before there was anything to save.
# All of them: training/launch/signals.py.
#
# It is `torchrun --nproc-per-node N train.py [flags]` with clearer errors: see training/launch/.
# Set torchrun's own options as its variables: PET_TEE=3 shows what every rank prints.
set -euo pipefail
script=${BASH_SOURCE[0]}
while [[ -L $script ]]; do # called through a symbolic link: the project is where it leads to
  target=$(readlink -- "$script")
  [[ $target == /* ]] || target=$(dirname -- "$script")/$target
  script=$target
done
here=$(CDPATH='' cd -- "$(dirname -- "$script")" && pwd)
if [[ $here == *:* ]]; then # PYTHONPATH, below, is a list that colons separate
  echo "launch.sh: the path of the project must not have a colon: $here; rename the folder" >&2
  exit 2
fi

# The Python to use: $PYTHON, else an active environment, else this folder's .venv, else PATH's.
candidates=("$here/.venv/bin/python" python python3)
[[ -z ${VIRTUAL_ENV:-} ]] || candidates=(python)
[[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
for python in "${candidates[@]}"; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    # -P: files in the caller's folder hide no module of ours. `exec`: signals reach Python.
    export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
    exec "$python" -P -m training.launch.launcher "$here/train.py" "$@"
  fi
done
echo "launch.sh: no Python 3.11 or newer (tried ${candidates[*]}); set PYTHON=... to use another" >&2
exit 1
