"""Say what to do next. A template that came as a zip has lost its executable bits: set them."""

import shlex
from pathlib import Path

HERE = Path.cwd()

for script in [*HERE.glob("*.sh"), *HERE.glob("*.sbatch")]:
    mode = script.stat().st_mode
    script.chmod(mode | (mode & 0o444) >> 2)  # who may read it may run it

print(f"""
Your project is ready. Next:

  cd {shlex.quote(str(HERE))}
  python3 -m venv .venv && . .venv/bin/activate && pip install -c constraints.txt -e '.[dev]'
  ./launch.sh

On Linux, pip's torch brings CUDA; for a CPU-only one, see pytorch.org/get-started first.
""")
