"""launch.sbatch against a stand-in for Slurm: what it asks of srun, and when it requeues itself.

The stand-in's `srun` runs its command once for each node, as Slurm does with one task per node,
and its `scontrol` knows the job's host names.
"""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from conftest import Bake, clean_environment

TIMEOUT_S = 120  # a bound for what hangs, not a promise

# srun: note the options, then run the command on each node, and forward the signals that the real
# one forwards. SIGTERM is not among them: the real one kills its tasks on it.
SRUN = """#!{python}
import json, os, signal, subprocess, sys
from pathlib import Path

notes = Path(os.environ["NOTES"])
options = [a for a in sys.argv[1 : sys.argv.index("bash")]]
(notes / "srun.json").write_text(json.dumps(options))
nodes = int(next(o for o in options if o.startswith("--nodes=")).partition("=")[2])
tasks = [
    subprocess.Popen(sys.argv[sys.argv.index("bash") :],
                     env=os.environ | {{"SLURM_NODEID": str(node), "SLURM_PROCID": str(node)}})
    for node in range(nodes)
]
signal.signal(signal.SIGUSR1, lambda *_: [task.send_signal(signal.SIGUSR1) for task in tasks])
signal.signal(signal.SIGTERM, lambda *_: [task.kill() for task in tasks])
(notes / "srun.ready").touch()
codes = [task.wait() for task in tasks]
sys.exit(max(code if code >= 0 else 128 - code for code in codes))
"""
SCONTROL = """#!/bin/sh
echo "$@" >> "$NOTES/scontrol"
if [ "$1 $2" = "show hostnames" ]; then printf 'node-a7\\nnode-b1\\nnode-b2\\n'; fi
"""
# Instead of Python: notes the launcher's arguments, then does what $ACT says.
PYTHON = """#!{python}
import json, os, signal, sys, time
from pathlib import Path

if sys.argv[1] == "-c":
    sys.exit()  # launch.sh looks at the version
notes, act = Path(os.environ["NOTES"]), os.environ["ACT"]
(notes / f"launcher-{{os.environ['NODE_RANK']}}.json").write_text(json.dumps(sys.argv[1:]))
asked = []
signal.signal(signal.SIGUSR1, lambda *_: asked.append(1))
(notes / f"ready-{{os.environ['NODE_RANK']}}").touch()
while not asked and act in ("stops", "ends just then", "fails to save"):
    time.sleep(0.05)
run = Path(sys.argv[sys.argv.index("--runs-dir") + 1], sys.argv[sys.argv.index("--run-name") + 1])
time.sleep(0.5)
if act in ("stops", "ends just then", "ends"):
    run.mkdir(parents=True, exist_ok=True)
    (run / "results.json").write_text(json.dumps({{"stopped": act == "stops"}}))
sys.exit({{"fails": 3, "fails to save": 1}}.get(act, 0))
"""


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for PATH with `srun`, `scontrol` and a Python that launches nothing."""
    folder = tmp_path_factory.mktemp("slurm")
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        text = text.format(python=sys.executable) if "{python}" in text else text
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)
    return folder


@pytest.fixture(scope="module")
def project(bake: Bake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return bake(output_dir=tmp_path_factory.mktemp("slurm") / "two words ä 项目")


class Job:
    """launch.sbatch under way, as Slurm starts it: a copy from elsewhere, in the submit folder."""

    def __init__(
        self, project: Path, slurm: Path, notes: Path, act: str, *flags: str, **variables: str
    ) -> None:
        self.notes = notes
        (notes / "spool").mkdir(parents=True)
        script = notes / "spool" / "slurm_script"
        script.write_bytes((project / "launch.sbatch").read_bytes())
        environment = clean_environment(
            NOTES=str(notes),
            ACT=act,
            PYTHON=str(slurm / "python"),
            SLURM_JOB_ID="123457",
            SLURM_JOB_NAME="text-classifier",
            SLURM_JOB_NODELIST="node-[a7,b1-b2]",
            SLURM_JOB_NUM_NODES="3",
            SLURM_CPUS_PER_TASK="7",
            SLURM_SUBMIT_DIR=str(project),
            RUNS_DIR=str(notes / "runs"),
        )
        environment["PATH"] = f"{slurm}:{environment['PATH']}"
        self.process = subprocess.Popen(
            ["bash", script, *flags],
            cwd=project,
            env={k: v for k, v in (environment | variables).items() if v},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
        )

    def wait_for(self, *names: str) -> None:
        end = time.monotonic() + TIMEOUT_S
        while not all((self.notes / name).exists() for name in names):
            assert time.monotonic() < end, f"not all of {names}"
            time.sleep(0.05)

    def end(self) -> tuple[int, str]:
        try:
            text, _ = self.process.communicate(timeout=TIMEOUT_S)
        finally:
            self.process.kill()
        return self.process.returncode, text

    def note(self, name: str) -> Any:
        return json.loads((self.notes / name).read_text(encoding="utf-8"))

    def requeued(self) -> bool:
        return "requeue 123457\n" in (self.notes / "scontrol").read_text(encoding="utf-8")


def test_one_launcher_per_node(project: Path, slurm: Path, tmp_path: Path) -> None:
    """Each node gets one launcher with all its cores; addresses and ranks come from Slurm."""
    job = Job(project, slurm, tmp_path / "a", "ends", "--epochs", "2", "--text-column", "two words")
    assert job.end() == (0, "")
    assert {"--nodes=3", "--ntasks=3", "--ntasks-per-node=1", "--cpus-per-task=7"} <= set(
        job.note("srun.json")
    )
    assert (job.notes / "scontrol").read_text() == "show hostnames node-[a7,b1-b2]\n"
    for node in range(3):
        assert job.note(f"launcher-{node}.json") == [
            "-P", "-m", "training.launch.launcher", str(project / "train.py"),
            "--nnodes=3", f"--node-rank={node}", "--master-addr=node-a7", "--master-port=23457",
            "--epochs", "2", "--text-column", "two words",
            "--runs-dir", str(tmp_path / "a" / "runs"), "--run-name", "slurm-123457",
        ]  # fmt: skip
    assert not job.requeued()

    other = Job(project, slurm, tmp_path / "b", "ends", SLURM_JOB_ID="123458", RUN_NAME="mine",
                RUNS_DIR="", SLURM_CPUS_PER_TASK="")  # fmt: skip
    assert other.end() == (0, "")
    arguments = other.note("launcher-0.json")
    assert "--master-port=23458" in arguments  # a port of its own, on the same nodes
    assert arguments[-4:] == ["--runs-dir", str(project / "runs"), "--run-name", "mine"]


@pytest.mark.parametrize(
    ("act", "code", "requeued"),
    [
        ("stops", 0, True),
        ("ends just then", 0, False),  # results.json says that the run is complete
        ("fails to save", 1, True),  # the checkpoint before it stands
    ],
)
def test_out_of_time(
    project: Path, slurm: Path, tmp_path: Path, act: str, code: int, requeued: bool
) -> None:
    """Before the time is up every launcher is asked to stop; the job waits for that, and goes back
    into the queue if the run is not complete, whatever the exit code."""
    job = Job(project, slurm, tmp_path / "notes", act)
    job.wait_for("srun.ready", *(f"ready-{node}" for node in range(3)))
    job.process.send_signal(signal.SIGUSR1)
    ended, text = job.end()
    assert (ended, job.requeued()) == (code, requeued), text
    assert ("back into the queue" in text) == requeued


def test_a_failed_job_is_not_requeued(project: Path, slurm: Path, tmp_path: Path) -> None:
    """A run that fails by itself would fail again: its exit code goes to Slurm, and that is all."""
    job = Job(project, slurm, tmp_path / "notes", "fails")
    assert job.end() == (3, "")
    assert not job.requeued()


def test_the_wrong_folder_is_named(project: Path, slurm: Path, tmp_path: Path) -> None:
    """Submitted from elsewhere, or run without Slurm, the script says so in one line."""
    job = Job(project, slurm, tmp_path / "a", "ends", SLURM_SUBMIT_DIR=str(tmp_path))
    assert job.end() == (1, f"launch.sbatch: no project in {tmp_path}; submit from its folder, or "
                            "set PROJECT_DIR\n")  # fmt: skip
    job = Job(project, slurm, tmp_path / "b", "ends", SLURM_JOB_ID="")
    code, text = job.end()
    assert code == 1
    assert "this is for Slurm: sbatch launch.sbatch" in text
