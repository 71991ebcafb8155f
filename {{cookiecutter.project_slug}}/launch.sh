#!/usr/bin/env bash
# Train on this machine: one rank per GPU, or two ranks on the CPU where there is no GPU.
#
#   ./launch.sh                                as config.toml says
#   ./launch.sh --epochs 5 --lr 1e-4           any flag of train.py; --help lists them
#   ./launch.sh --nproc-per-node 1             fewer ranks (or NPROC_PER_NODE=1); the same result
#   CUDA_VISIBLE_DEVICES=0,2 ./launch.sh       on some of the GPUs
#   ./launch.sh --max-restarts 3               after a crash, start again from the last checkpoint
#
# Ctrl-C, SIGTERM or SIGUSR1 asks the ranks to save and stop; Ctrl-C again stops them at once.
# Flags with file names are relative to the folder that you call this from.
#
# Exit codes: 0 finished, or stopped and saved; 2 something for you to mend; 3 a rank hung; 1 another
# error; above 128 ended by a signal, or stopped before there was anything to save.
#
# It is `torchrun --nproc-per-node N train.py [flags]` with clearer errors: see training/launch.py.
# torchrun's own settings are given as its variables: PET_TEE=3 shows what every rank prints.
set -euo pipefail
here=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)

# The Python to use: $PYTHON, else an active environment, else this folder's .venv, else PATH's.
candidates=("$here/.venv/bin/python" python python3)
[[ -z ${VIRTUAL_ENV:-} ]] || candidates=(python)
[[ -z ${PYTHON:-} ]] || candidates=("$PYTHON")
for python in "${candidates[@]}"; do
  if "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
    # -P: what lies in the caller's folder shadows no module of ours. `exec`: signals reach Python.
    export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
    exec "$python" -P -m training.launch.launcher "$here/train.py" "$@"
  fi
done
echo "launch.sh: no Python 3.11 or newer (tried ${candidates[*]}); PYTHON=... ./launch.sh names one" >&2
exit 1
