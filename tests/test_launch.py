"""The launch files: what they pass on, what they refuse, how they stop and how they fail.

A stand-in for `train.py`, which needs no PyTorch, notes what a rank was given. The project's path
has spaces and letters beyond ASCII, and the scripts are called from another folder.
"""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from conftest import Bake, Run, clean_environment
from forked import TIMEOUT_S, Forked, Launcher

CPUS = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1

STAND_IN = '''
import json, os, signal, subprocess, sys, time
from pathlib import Path

RANK, OUT, ACT = os.environ["RANK"], Path(os.environ["OUT"]), os.environ.get("ACT", "")
signals = []


def note(name, **facts):
    """Write them to a file for the test, atomically."""
    (OUT / f"{RANK}.tmp").write_text(json.dumps(facts), encoding="utf-8")
    (OUT / f"{RANK}.tmp").rename(OUT / f"{name}-{RANK}.json")


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, lambda number, frame: signals.append(number))
note("given", argv=sys.argv[1:], cwd=os.getcwd(), env=dict(os.environ))
if ACT in ("stop", "stop at once"):
    loader = subprocess.Popen(["sleep", "60"])
    note("ready", pid=os.getpid())
    while not signals or (ACT == "stop at once" and signal.SIGINT not in signals):
        time.sleep(0.05)
    time.sleep(0.5)
    note("stopped", signals=signals, loader_lives=loader.poll() is None)
    loader.kill()
    sys.exit(0 if ACT == "stop" else 130)
if ACT == "exception":
    from torch.distributed.elastic.multiprocessing.errors import record

    @record
    def fail():
        if RANK == "1":
            raise ValueError("\\n  boom on purpose")
        own_file = Path(os.environ["TORCHELASTIC_ERROR_FILE"])
        other = own_file.parent.parent / "1" / own_file.name
        while not other.exists() or not other.stat().st_size:
            time.sleep(0.05)
        raise RuntimeError("connection closed by peer")

    fail()
if ACT.startswith("mistake of"):
    if RANK == ACT[-1]:  # the rank that reports it
        print(f"train.py: rank {RANK} reports what is wrong", file=sys.stderr, flush=True)
        sys.exit(2)
    if ACT == "mistake of all, reported by 0":
        while not (OUT / "given-0.json").exists():
            time.sleep(0.05)
        sys.exit(2)
if ACT == "killed" and RANK == "1":
    os.kill(os.getpid(), signal.SIGKILL)
if ACT == "orphan":
    from training.launch.worker import die_with_launcher

    die_with_launcher()
    note("ready", pid=os.getpid())
while ACT and not signals:
    time.sleep(0.05)
'''

# Instead of Python: prints what `run_ranks` would get, and imports no PyTorch.
RECORDER = """
import json, os, sys
from training.launch import launcher

def record(ranks, torchrun, command):
    print(json.dumps({"ranks": ranks, "torchrun": torchrun, "command": command}))
    print(os.environ.get("GLOO_SOCKET_IFNAME"))
    return 0

launcher.run_ranks = record
sys.exit(launcher.main(sys.argv[1:]))
"""
PYTHON_WRAPPER = """#!/bin/sh
[ "$1" = -c ] && exec {python} "$@"
shift 3  # -P -m training.launch.launcher
exec {python} -P {recorder} "$@"
"""


@pytest.fixture(scope="module")
def project(bake: Bake, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A baked project with the stand-in for `train.py`, at an awkward path."""
    folder = bake(output_dir=tmp_path_factory.mktemp("launch") / "two words ä 项目")
    (folder / "train.py").write_text(STAND_IN, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def forked(project: Path) -> Iterator[Forked]:
    """Starts launches that need no imports."""
    forked = Forked(project, clean_environment(), fork_ranks=False)
    yield forked
    forked.close()


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A $PYTHON that launches nothing."""
    folder = tmp_path_factory.mktemp("recorder")
    (folder / "recorder.py").write_text(RECORDER, encoding="utf-8")
    wrapper = folder / "python"
    text = PYTHON_WRAPPER.format(python=sys.executable, recorder=folder / "recorder.py")
    wrapper.write_text(text, encoding="utf-8")
    wrapper.chmod(0o755)
    return wrapper


def set_signals(ignored: Sequence[int]) -> None:
    """Tests in the background of a script are started with SIGINT ignored, by nohup SIGHUP."""
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)


ASKED = "launch: asked to stop: the ranks save after this step; Ctrl-C again: at once\n"


class Launch:
    """A running launch, called from another folder; its ranks write notes to `out`.

    By `script`, or by a fork of the launcher, which saves the time for its imports.
    """

    def __init__(
        self, script: Path | Forked, folder: Path, *flags: str, ignored: Sequence[int] = (),
        **variables: str,
    ) -> None:  # fmt: skip
        self.out, self.output = folder / "out", folder / "output.txt"
        self.out.mkdir(parents=True)
        variables |= {"OUT": str(self.out), "CUDA_VISIBLE_DEVICES": ""}
        self.process: Launcher | subprocess.Popen[bytes]
        if isinstance(script, Forked):
            self.process = script.start(flags, variables, self.output, folder, ignored=ignored)
            return
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [str(script), *flags], cwd=folder, env=clean_environment(**variables),
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                preexec_fn=lambda: set_signals(ignored),
            )  # fmt: skip

    def notes(self, name: str, ranks: int = 2) -> list[dict[str, Any]]:
        """Each rank's note of this name; waits until all are written."""
        end = time.monotonic() + TIMEOUT_S
        files = [self.out / f"{name}-{rank}.json" for rank in range(ranks)]
        while not all(file.exists() for file in files):
            assert time.monotonic() < end, f"no {name} of all ranks"
            time.sleep(0.05)
        return [json.loads(file.read_text(encoding="utf-8")) for file in files]

    def end(self) -> tuple[int, str]:
        """(exit code, all that was printed)"""
        try:
            code = self.process.wait(TIMEOUT_S)
        finally:
            self.process.kill()
        return code, self.output.read_text("utf-8")


def wait_for_end(pids: list[int]) -> None:
    """Wait until these processes, which are not our children, have ended."""
    end = time.monotonic() + TIMEOUT_S
    while any(_lives(pid) for pid in pids):
        assert time.monotonic() < end, "a rank is still running"
        time.sleep(0.05)


def _lives(pid: int) -> bool:
    try:
        os.kill(pid, 0)
        status = Path(f"/proc/{pid}/stat")  # the dead that nobody has waited for are Z
        return not status.exists() or status.read_text().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False


def links_to(script: Path, folder: Path) -> Path:
    """A symbolic link to a relative link to `script`."""
    inner = folder / "some" / "other" / "inner"
    inner.parent.mkdir(parents=True)
    inner.symlink_to(os.path.relpath(script, inner.parent))
    (folder / "train").symlink_to(inner)
    return folder / "train"


# -- before the ranks ----------------------------------------------------------------------------


def test_scripts_are_sound(baked: Path) -> None:
    """Every shell file passes shellcheck and bash -n, is executable, and has no carriage return."""
    scripts = [*sorted(baked.glob("*.sh")), baked / "launch.sbatch"]
    assert len(scripts) == 3
    subprocess.run(["shellcheck", *scripts], env=clean_environment(), check=True)
    for script in scripts:
        subprocess.run(["bash", "-n", script], check=True)
        assert os.access(script, os.X_OK)
        assert b"\r" not in script.read_bytes()
        assert "set -euo pipefail" in script.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("flags", "code", "expected"),
    [
        (["--help"], 0, "usage: ./launch.sh [--nproc-per-node N]"),
        (["--batch_sise", "8"], 2, "--batch-sise, did you mean --batch-size?"),
        (["--nproc-per-node", "8", "--lr", "fast"], 2, "--lr: invalid float value: 'fast'"),
        (["--nproc-per-node", "none"], 2, "--nproc-per-node (or NPROC_PER_NODE) must be a whole"),
        (["--nproc-per-node=0"], 2, "must be a whole number of at least 1, not '0'"),
        (["--nproc-per-node"], 2, "--nproc-per-node"),
    ],
)
def test_help_and_mistakes_are_answered_once(
    project: Path, tmp_path: Path, run: Run, flags: list[str], code: int, expected: str
) -> None:
    """--help and a mistake are answered once, in one line, before PyTorch is imported."""
    (tmp_path / "torch.py").write_text("raise SystemExit('PyTorch was imported')")
    # On PYTHONPATH it would be found before the real one.
    done = run(tmp_path, project / "launch.sh", *flags, check=False, PYTHONPATH=str(tmp_path))
    assert done.returncode == code, done.stderr
    assert (done.stdout + done.stderr).count(expected) == 1
    assert code == 0 or (done.stdout, done.stderr.count("\n")) == ("", 1)


def test_what_is_missing_is_named(project: Path, tmp_path: Path, run: Run) -> None:
    """Missing packages are named with the command that installs them; so is a missing Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "bare"], check=True)
    python = tmp_path / "bare" / "bin" / "python"
    done = run(tmp_path, project / "launch.sh", check=False, PYTHON=str(python))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert "no torch, transformers, numpy, sklearn, pyarrow" in done.stderr
    assert f"cd '{project}' && {python} -m pip install -c constraints.txt -e ." in done.stderr
    # The environment in the project's folder is found without being active.
    shutil.copytree(project, tmp_path / "own")
    subprocess.run(
        [sys.executable, "-m", "venv", "--without-pip", tmp_path / "own" / ".venv"], check=True
    )
    done = run(tmp_path, tmp_path / "own" / "launch.sh", check=False)
    assert f"{tmp_path / 'own' / '.venv' / 'bin' / 'python'} -m pip install" in done.stderr
    # An old Python does not count; and where one was named, no other is taken.
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in ("bash", "dirname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    (tools / "python").write_text("#!/bin/sh\nexit 1\n")
    (tools / "python").chmod(0o755)
    for variables in ({"PATH": str(tools)}, {"PYTHON": "/no/such/python"}):
        done = run(tmp_path, project / "launch.sh", check=False, **variables)
        assert done.returncode == 1
        assert done.stderr.count("\n") == 1
        assert "no Python 3.11 or newer (tried " in done.stderr


# -- several machines ----------------------------------------------------------------------------

PLACE = ["--rdzv-backend=static", "--rdzv-endpoint=127.0.0.1:29500"]
FIRST = ["--nnodes=3", *PLACE, "--node-rank=0", "--rdzv-conf=timeout=600"]


@pytest.mark.parametrize(
    ("flags", "variables", "torchrun", "command"),
    [
        ("--nnodes 3 --node-rank 0 --master-addr 127.0.0.1", {}, FIRST, ""),
        ("--nnodes=3 --node-rank=0 --master-addr=127.0.0.1", {}, FIRST, ""),
        ("--nnodes 3 --node_rank 0 --master_addr 127.0.0.1", {}, FIRST, ""),
        ("", {"NNODES": "3", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1"}, FIRST, ""),
        # flags win over variables, and stand wherever they like among those of train.py
        (
            "--lr 1 --nnodes 3 --batch_size 4 --node-rank 0 --epochs 2",
            {"NNODES": "5", "NODE_RANK": "4", "MASTER_ADDR": "127.0.0.1"},
            FIRST,
            "--lr 1 --batch_size 4 --epochs 2",
        ),
        # IPv4, where a name has both; and the port of one's choice
        (
            "--nnodes 2 --node-rank 0 --master-addr localhost --master-port 1234",
            {"MASTER_PORT": "4321", "LAUNCH_TIMEOUT": "7"},
            ["--nnodes=2", PLACE[0], "--rdzv-endpoint=127.0.0.1:1234", "--node-rank=0",
             "--rdzv-conf=timeout=7"],
            "",
        ),
        (
            "--nnodes 2 --node-rank 0 --master-addr [::1]",
            {"MASTER_PORT": "4321"},
            ["--nnodes=2", PLACE[0], "--rdzv-endpoint=[::1]:4321", "--node-rank=0",
             "--rdzv-conf=timeout=600"],
            "",
        ),
        (
            "--nnodes 2 --node-rank 0 --master-addr ::1",
            {"MASTER_PORT": "4321"},
            ["--nnodes=2", PLACE[0], "--rdzv-endpoint=[::1]:4321", "--node-rank=0",
             "--rdzv-conf=timeout=600"],
            "",
        ),
        # restarts after a crash: the flags of train.py stay the same, with a run name
        (
            "--nnodes 3 --node-rank 0 --master-addr 127.0.0.1 --max-restarts 2 --run-name a",
            {},
            [*FIRST, "--max-restarts=2"],
            "--run-name a",
        ),
    ],
)  # fmt: skip
def test_multinode_flags_become_torchruns(
    project: Path, tmp_path: Path, run: Run, recorder: Path,
    flags: str, variables: dict[str, str], torchrun: list[str], command: str,
) -> None:  # fmt: skip
    """launch_multinode.sh takes flags or variables, and passes the rest to train.py unchanged."""
    given = [*flags.split(), "--text-column", "two words", "--nproc-per-node", "3"]
    variables = {"PYTHON": str(recorder), **variables}
    done = run(tmp_path, project / "launch_multinode.sh", *given, **variables)
    recorded, interface = done.stdout.splitlines()
    assert json.loads(recorded) == {
        "ranks": 3,
        "torchrun": torchrun,
        "command": [str(project / "train.py"), *command.split(), "--text-column", "two words"],
    }
    endpoint = torchrun[2].removeprefix("--rdzv-endpoint=")
    assert f"node 0 connects to {endpoint}\n" in done.stderr
    assert interface == ("None" if "[" in endpoint else "lo")


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ({"NNODES": ""}, "--nnodes (or NNODES) must be a whole number of at least 1, not ''"),
        ({"NNODES": "two"}, "--nnodes (or NNODES) must be a whole number of at least 1, not 'two'"),
        ({"NODE_RANK": ""}, "--node-rank (or NODE_RANK) must be a whole number from 0 to 1"),
        ({"NODE_RANK": "2"}, "must be a whole number from 0 to 1, not '2'"),
        ({"MASTER_ADDR": ""}, "the address of node rank 0: --master-addr ADDRESS or MASTER_ADDR="),
        ({"MASTER_PORT": "x"}, "--master-port (or MASTER_PORT) must be a whole number from 1 to"),
        ({"MASTER_ADDR": "no.such.host"}, "--master-addr no.such.host cannot be resolved"),
        ({"GLOO_SOCKET_IFNAME": "^lo"}, "GLOO_SOCKET_IFNAME=^lo is not a network interface of"),
        ({"GLOO_SOCKET_IFNAME": "10.0.0.1"}, "10.0.0.1 is not a network interface of this machine"),
        ({"NCCL_SOCKET_IFNAME": "10.0.0.1"}, "NCCL_SOCKET_IFNAME=10.0.0.1 matches no network"),
        ({"NODE_RANK": "1"}, "nothing answered at 127.0.0.1:9 in 1 s"),
    ],
)
def test_multinode_refuses(
    project: Path, tmp_path: Path, run: Run, variables: dict[str, str], expected: str
) -> None:
    """What is missing or cannot work is reported in one line before PyTorch is imported."""
    (tmp_path / "torch.py").write_text("raise SystemExit('PyTorch was imported')")
    good = {"NNODES": "2", "NODE_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "9"}
    good |= {"LAUNCH_TIMEOUT": "1", "PYTHONPATH": str(tmp_path)}
    script = project / "launch_multinode.sh"
    done = run(tmp_path, script, "--nproc-per-node=1", check=False, **good | variables)
    lines = [line for line in done.stderr.splitlines() if " connects to " not in line]
    assert done.returncode == 2
    assert len(lines) == 1
    assert expected in lines[0]


def test_a_worker_waits_for_the_main_machine(
    project: Path, tmp_path: Path, run: Run, recorder: Path
) -> None:
    """The order in which machines start does not matter: a worker waits until rank 0 listens.
    The script is called through symbolic links."""
    with socket.socket() as later:
        later.bind(("127.0.0.1", 0))
        timer = threading.Timer(1, later.listen)
        timer.start()
        flags = "--nnodes 2 --node-rank 1 --master-addr 127.0.0.1 --nproc-per-node 1".split()
        port = str(later.getsockname()[1])
        script = links_to(project / "launch_multinode.sh", tmp_path)
        done = run(tmp_path, script, *flags, "--master-port", port, PYTHON=str(recorder))
        assert not timer.is_alive()  # it did not go on before
    assert "--node-rank=1" in done.stdout


def test_ipv4_is_preferred(project: Path, tmp_path: Path, run: Run) -> None:
    """A name with addresses of both kinds becomes the IPv4 one, in whatever order they come."""
    code = """
import socket
from training.launch.rendezvous import resolve
six, four = (socket.AF_INET6, ("fd00::1", 0)), (socket.AF_INET, ("10.0.0.1", 0))
for found in ([six, four], [four, six], [six]):
    entries = [(family, socket.SOCK_STREAM, 6, "", address) for family, address in found]
    socket.getaddrinfo = lambda *_, **__: entries
    print(resolve("name"))
"""
    done = run(tmp_path, sys.executable, "-P", "-c", code, PYTHONPATH=str(project))
    assert done.stdout.split() == ["10.0.0.1", "10.0.0.1", "fd00::1"]


# -- the ranks -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_ranks_get_their_environment(project: Path, tmp_path: Path) -> None:
    """Launches at once do not collide; ranks, threads, flags and folder are as asked for.
    One is called through symbolic links. torchrun's PET_NNODES is ignored, with a line about it."""
    flags = ["--nproc_per_node", "2", "--text-column", "two  words", "--val-file=Ä.tsv"]
    stray = {"PET_NNODES": "2", "MASTER_ADDR": "no.such.host", "RANK": "7", "WORLD_SIZE": "9"}
    (tmp_path / "two").mkdir()
    for name in ("train.py", "torch.py", "argparse.py"):  # the caller's files
        (tmp_path / "two" / name).write_text("raise SystemExit('the wrong one')")
    link = links_to(project / "launch.sh", tmp_path)
    two = Launch(link, tmp_path / "two", *flags, ignored=(), **stray)
    script = project / "launch.sh"
    one = Launch(script, tmp_path / "one", NPROC_PER_NODE="1", OMP_NUM_THREADS="3")
    default = Launch(script, tmp_path / "default")
    code, text = two.end()
    assert (code, text.count("\n")) == (0, 1)
    assert text.startswith("launch: PET_NNODES is ignored: launch.sh is for one machine, launch_mu")
    assert [launch.end() for launch in (one, default)] == [(0, "")] * 2

    ranks = two.notes("given")
    for rank, given in enumerate(ranks):
        assert given["argv"] == flags[2:]
        assert given["cwd"] == str(tmp_path / "two")
        environment = given["env"]
        assert environment["RANK"] == environment["LOCAL_RANK"] == str(rank)
        assert environment["WORLD_SIZE"] == environment["LOCAL_WORLD_SIZE"] == "2"
        assert environment["MASTER_ADDR"] == "127.0.0.1"
        assert environment["OMP_NUM_THREADS"] == str(max(1, CPUS // 2))
        assert "TORCHELASTIC_RUN_ID" in environment  # it is torchrun
    (single,) = one.notes("given", ranks=1)
    assert (single["env"]["WORLD_SIZE"], single["env"]["OMP_NUM_THREADS"]) == ("1", "3")
    expected = min(2, CPUS)
    (first, *_) = default.notes("given", ranks=expected)
    assert first["env"]["WORLD_SIZE"] == str(expected)
    assert first["env"]["MASTER_PORT"] != ranks[0]["env"]["MASTER_PORT"]


@pytest.mark.skipif(sys.platform != "linux", reason="there is no taskset")
def test_ranks_fit_the_cores(project: Path, tmp_path: Path, run: Run) -> None:
    """Where only one core may be used, there is one CPU rank, however many the machine has."""
    code = """
from training.launch.launcher import default_ranks, usable_cpus
print(default_ranks(), usable_cpus())
"""
    core = str(min(os.sched_getaffinity(0)))
    done = run(
        tmp_path, "taskset", "-c", core, sys.executable, "-P", "-c", code,
        PYTHONPATH=str(project), CUDA_VISIBLE_DEVICES="",
    )  # fmt: skip
    assert done.stdout.split() == ["1", "1"]


@pytest.mark.slow
def test_signals_ask_the_ranks_to_stop(project: Path, forked: Forked, tmp_path: Path) -> None:
    """SIGTERM, SIGUSR1, SIGINT and SIGHUP let the ranks save and end well; a second SIGINT ends
    them. Each rank is asked once, and its data loaders get no signal."""
    script = project / "launch.sh"  # under nohup, and with SIGINT: a signal has to get through it
    requests = {
        name: Launch(start, tmp_path / name, "--nproc-per-node=2", ignored=ignored, ACT="stop")
        for name, start, ignored in (
            ("SIGTERM", forked, []), ("SIGUSR1", forked, []), ("SIGINT", script, []),
            ("SIGHUP", forked, []), ("nohup", script, [signal.SIGHUP]),
        )
    }  # fmt: skip
    now = Launch(forked, tmp_path / "now", "--nproc-per-node=2", ACT="stop at once")
    for name, launched in requests.items():
        launched.notes("ready")
        if name == "SIGTERM":  # the alarm of a launcher that was suspended and continued: no rank
            launched.process.send_signal(signal.SIGALRM)  # has failed, so none is killed
            time.sleep(0.2)
        number = signal.SIGHUP if name == "nohup" else signal.Signals[name]
        launched.process.send_signal(number)
    now_ranks = now.notes("ready")
    now.process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert now.process.poll() is None
    now.process.send_signal(signal.SIGINT)
    for name, launched in requests.items():
        if name == "nohup":  # SIGHUP is ignored
            time.sleep(0.5)
            assert not list(launched.out.glob("stopped*"))
            launched.process.send_signal(signal.SIGTERM)
        assert launched.end() == (0, ASKED), name
        for rank in launched.notes("stopped"):
            assert rank == {"signals": [signal.SIGTERM], "loader_lives": True}, name
    code, text = now.end()
    assert code == 128 + signal.SIGINT
    assert text == f"{ASKED}launch: stopped at once; what was saved before is kept\n"
    wait_for_end([rank["pid"] for rank in now_ranks])


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux ends the children of the dead")
def test_no_rank_outlives_the_launcher(project: Path, tmp_path: Path) -> None:
    """A launcher that was killed leaves no rank behind to hold a GPU."""
    launched = Launch(
        project / "launch.sh", tmp_path / "orphan", "--nproc-per-node=2", ACT="orphan"
    )
    pids = [rank["pid"] for rank in launched.notes("ready")]
    launched.process.kill()
    wait_for_end(pids)


@pytest.mark.slow
def test_failures_are_reported_in_a_few_lines(
    project: Path, forked: Forked, tmp_path: Path
) -> None:
    """The rank that failed first is reported last, with its error and where it was raised, instead
    of torchrun's report; and a mistake that a rank has reported is not reported again."""

    def start(act: str) -> Launch:
        return Launch(forked, tmp_path / act, "--nproc-per-node=2", ACT=act, TMPDIR=str(tmp_path))

    exception, killed = start("exception"), start("killed")
    mistakes = [start(f"mistake of {who}") for who in ("all, reported by 0", "only 0", "only 1")]

    code, text = exception.end()
    last = "\n".join(text.splitlines()[-30:])
    assert code == 1, text
    assert "launch: rank 1 failed first, exit code 1: ValueError: boom on purpose\n" in last, text
    line = 1 + STAND_IN.splitlines().index('            raise ValueError("\\n  boom on purpose")')
    assert f"  at {project / 'train.py'}:{line} in fail\n" in last
    assert "  ended because of that: rank 0\n" in last
    assert text.count("Traceback") == 2, text  # of each rank, none of ours
    (folder,) = re.findall(r"first of this machine: (.*)", last)
    (log,) = Path(folder).glob("*/*/1/stderr.log")
    assert "boom on purpose" in log.read_text()

    code, text = killed.end()
    assert code == 128 + signal.SIGKILL
    assert text.startswith("launch: rank 1 failed first, killed by SIGKILL")

    for launched, rank in zip(mistakes, "001", strict=True):
        assert launched.end() == (2, f"train.py: rank {rank} reports what is wrong\n"), launched.out
    assert len(list(tmp_path.glob("ranks-*"))) == 2  # logs are kept only of real failures


def test_a_busy_port_is_named(project: Path, tmp_path: Path, run: Run) -> None:
    """A port that another program listens on is named in one line, with the way out."""
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = str(other.getsockname()[1])
        flags = "--nnodes 2 --node-rank 0 --master-addr 127.0.0.1 --nproc-per-node 1".split()
        script = project / "launch_multinode.sh"
        done = run(tmp_path, script, *flags, f"--master-port={port}", check=False)
    assert done.returncode == 2
    assert f"no rendezvous at 127.0.0.1:{port}: " in done.stderr
    assert "address already in use; give another --master-port\n" in done.stderr
    assert "Traceback" not in done.stderr
