"""Faults done to real runs of the project on two ranks, for `test_faults.py` and the benchmark.

`Lab` holds a copy of the project whose `model.py` and `data.py` do the fault that the environment
names, a tiny model, a few rows, and the weights of a run that nothing happened to. Each function in
`FAULTS` does one fault, checks how the run ended and what it printed, and returns the number of
steps that had to be done again.
"""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from conftest import ROOT, clean_environment, template_files
from forked import TIMEOUT_S, Forked, Launcher

SLOW = "slow:0:0.05"  # a fault that only takes time: seconds in each micro-batch
STEPS = 60  # of a whole run: 10 epochs of 6
PROJECT = "{{cookiecutter.project_slug}}/"

# What a fault does in the ranks. FAULT is "what:rank:step"; most are done once: a marker is left.
INJECTED = """

import multiprocessing as _mp, os as _os, signal as _signal, time as _time
from pathlib import Path as _Path
from training.distributed import watchdog as _watchdog



def _fault():
    return (_os.environ.get("FAULT") or "none:0:0").split(":")


def _now(asked):
    what, rank, step = _fault()
    marker = _Path(_os.environ.get("MARKER", "/nowhere"))
    due = what == asked and _os.environ.get("RANK") == rank and _watchdog.position.step >= int(step)
    if not due or marker.exists():
        return False
    marker.touch()
    return True


def _at(asked):
    what, rank, step = _fault()
    here = what == asked and _os.environ.get("RANK") == rank
    return here and _watchdog.position.step == int(step)


_loss_per_row, _build_model = loss_per_row, build_model


def loss_per_row(logits, labels, config):
    if _now("error"):
        raise ValueError("boom on purpose")
    if _now("memory"):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")
    if _now("kill"):
        _os.kill(_os.getpid(), _signal.SIGKILL)
    if _now("freeze"):
        _os.kill(_os.getpid(), _signal.SIGSTOP)
    if _now("endless"):
        while True:
            _time.sleep(0.1)
    if _now("loader"):
        _mp.active_children()[0].kill()
    losses = _loss_per_row(logits, labels, config)
    if _at("nan"):
        losses = losses + torch.nan
    if _fault()[0] == "slow":
        _time.sleep(float(_fault()[2]))
    return losses


def build_model(config, tokenizer, labels):
    if _now("freeze at start"):
        _os.kill(_os.getpid(), _signal.SIGSTOP)
    model = _build_model(config, tokenizer, labels)
    if _fault()[0] == "slow evaluation":
        model.register_forward_pre_hook(lambda m, _: None if m.training else _time.sleep(1.0))
    if _fault()[0] == "drift":
        def drift(module, _):
            if _at("drift"):
                module.classifier.bias.data[0] += 1e-4
        model.register_forward_pre_hook(drift)
    return model
"""
SLOW_ROWS = """

import os as _os, time as _time
_rows = rows


def rows(*arguments):
    for row in _rows(*arguments):
        if _os.environ.get("FAULT", "").startswith("slow rows"):
            _time.sleep(0.2)
        yield row
"""
TINY = """
sys.path.append({project!r} + "/tests")
from tiny import save_tiny
lines = open({rows!r}, encoding="utf-8").read().splitlines()[1:]
save_tiny({model!r}, [line.split("\\t")[0] for line in lines])
"""


class Run:
    """One launch of a run of the lab: the real launcher and its ranks.

    They are forked from a process that has imported all that they need, unless `real`: then
    `launch.sh` starts them, which takes some seconds longer.
    """

    def __init__(
        self, lab: "Lab", name: str, *flags: str, fault: str = "", umask: int = 0o022,
        real: bool = False,
    ) -> None:  # fmt: skip
        self.lab, self.name, self.folder = lab, name, lab.runs / name
        self.output = lab.folder / f"output-{name}-{time.monotonic_ns()}.txt"
        flags = (*lab.flags, "--run-name", name, *flags)
        self.process: Launcher | subprocess.Popen[bytes]
        variables = {"FAULT": fault, "MARKER": str(lab.folder / f"done-{name}")}
        if not real:
            self.process = lab.forked.start(flags, variables, self.output, umask=umask)
            return
        with self.output.open("wb") as file:
            self.process = subprocess.Popen(
                [str(lab.project / "launch.sh"), *flags], env=lab.environment | variables,
                stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT,
                preexec_fn=lambda: _prepare(umask), start_new_session=True,
            )  # fmt: skip

    def text(self) -> str:
        return self.output.read_text("utf-8", "replace")

    def lines(self, split: str = "train") -> list[dict[str, Any]]:
        """Whole lines of metrics.jsonl."""
        file = self.folder / "metrics.jsonl"
        text = file.read_text("utf-8") if file.exists() else ""
        whole = [json.loads(line) for line in text.split("\n")[:-1]]
        return [line for line in whole if line["split"] == split]

    def step(self) -> int:
        """The last step of which there is a line."""
        lines = self.lines()
        return lines[-1]["step"] if lines else 0

    def until(self, true: Callable[[], bool]) -> None:
        """Wait until something is so. Errors: AssertionError when the run ends before."""
        end = time.monotonic() + TIMEOUT_S
        while not true():
            assert self.process.poll() is None, self.text()
            assert time.monotonic() < end, f"nothing came of it\n{self.text()}"
            time.sleep(0.02)

    def ranks(self) -> list[int]:
        """The ranks' processes: the launcher's children."""
        return [pid for pid in children(self.process.pid) if "train.py" in command(pid)]

    def end(self, timeout: float = TIMEOUT_S) -> int:
        """The exit code. Errors: AssertionError when it takes longer."""
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"it hangs\n{self.text()}") from None

    def kill(self) -> None:
        for pid in [self.process.pid, *self.ranks()]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def results(self) -> dict[str, Any]:
        return json.loads((self.folder / "results.json").read_text("utf-8"))

    def saved(self) -> list[int]:
        """Steps of the whole checkpoints."""
        return self.saved_in(self.folder)

    @staticmethod
    def saved_in(folder: Path) -> list[int]:
        return sorted(int(p.name[5:]) for p in (folder / "checkpoints").glob("step-*"))


class Lab:
    def __init__(self, folder: Path, thorough: bool) -> None:
        self.thorough = thorough
        self.folder, self.project, self.runs = folder, folder / "project", folder / "runs"
        for name in template_files():
            if name.startswith(PROJECT):
                target = self.project / name.removeprefix(PROJECT)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, target)
        for name, more in (("model.py", INJECTED), ("data.py", SLOW_ROWS)):
            with (self.project / name).open("a", encoding="utf-8") as file:
                file.write(more)
        rows = (self.project / "sample" / "val.tsv").read_text("utf-8").splitlines()
        for name, part in (("train", rows[1:190]), ("val", rows[190:290])):
            text = "\n".join([rows[0], *part]) + "\n"
            (folder / f"{name}.tsv").write_text(text, encoding="utf-8")
        (folder / "empty.toml").touch()
        self.environment = clean_environment(
            PYTHON=sys.executable, OMP_NUM_THREADS="1", CUDA_VISIBLE_DEVICES="",
            HF_HUB_OFFLINE="1", TMPDIR=str(folder),
        )  # fmt: skip
        tiny = TINY.format(
            project=str(self.project), rows=f"{folder}/train.tsv", model=f"{folder}/tiny"
        )
        self.forked = Forked(self.project, self.environment, fork_ranks=True, first=tiny)
        self.flags = [
            "--nproc-per-node=2", f"--config={folder}/empty.toml", f"--model={folder}/tiny",
            f"--train-file={folder}/train.tsv", f"--val-file={folder}/val.tsv", "--lr=3e-3",
            f"--cache-dir={folder}/cache", f"--runs-dir={self.runs}", "--max-length=48",
            "--epochs=10", "--save-every=3", "--log-every=1",
        ]  # fmt: skip
        whole = Run(self, "whole")
        assert whole.end() == 0, whole.text()
        self.weights = self.file_of("whole").read_bytes()
        self.losses = [line["loss"] for line in whole.lines()]
        assert len(self.losses) == STEPS

    def file_of(self, name: str, step: int = STEPS) -> Path:
        return self.runs / name / "checkpoints" / f"step-{step:08d}" / "model.safetensors"

    def finish(self, name: str, *flags: str, always: bool = False) -> None:
        """Resume a run from its newest checkpoint, to the end: its weights and curves are those of
        the whole run. Only if `always`, or if the lab is thorough."""
        if not (always or self.thorough):
            return
        newest = Run.saved_in(self.runs / name)[-1:]
        run = Run(self, name, *flags)
        assert run.end() == 0, run.text()
        assert not newest or f"resuming after step {newest[0]} " in run.text()
        self.check(run)

    def check(self, run: Run) -> None:
        assert run.results()["stopped"] is False
        assert [line["step"] for line in run.lines()] == list(range(1, STEPS + 1))
        assert [line["loss"] for line in run.lines()] == self.losses
        assert [line["step"] for line in run.lines("val")] == list(range(6, STEPS + 1, 6))
        assert self.file_of(run.name).read_bytes() == self.weights, "other weights"
        left = [p.name for p in run.folder.rglob(".writing-*")]
        assert not left, left
        points = curves(run.folder / "tensorboard")
        assert points["train/loss"] == list(range(1, STEPS + 1))
        assert points["val/loss"] == list(range(6, STEPS + 1, 6))


def curves(folder: Path) -> dict[str, list[int]]:
    """The steps of each of TensorBoard's curves, as it shows them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), {"scalars": 0})
    events.Reload()
    return {tag: [e.step for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def _prepare(umask: int) -> None:
    os.umask(umask)
    # Tests in the background of a script are started with SIGINT ignored.
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def children(pid: int) -> list[int]:
    with suppress(FileNotFoundError, ProcessLookupError):
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    return []


def command(pid: int) -> str:
    with suppress(FileNotFoundError, ProcessLookupError):
        return Path(f"/proc/{pid}/cmdline").read_text()
    return ""


def lives(pid: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        stat = Path(f"/proc/{pid}/stat").read_text()
        return stat.rpartition(")")[2].split()[0] != "Z"  # the dead that nobody has waited for
    return False


def gone(pids: list[int], timeout: float) -> None:
    """Wait until these processes have ended. Errors: AssertionError when they live on."""
    end = time.monotonic() + timeout
    while alive := [pid for pid in pids if lives(pid)]:
        assert time.monotonic() < end, f"processes {alive} live on"
        time.sleep(0.05)


def last_lines(run: Run) -> str:
    return "\n".join(run.text().splitlines()[-30:])


# -- faults --------------------------------------------------------------------------------------


def killed_in_a_step(lab: Lab, name: str) -> int:
    run = Run(lab, name, fault="kill:1:20", umask=0, real=True)
    assert run.end(30 + TIMEOUT_S) == 128 + signal.SIGKILL
    assert_private(run.folder)
    words = "launch: rank 1 failed first, killed by SIGKILL: probably out of memory (killed by"
    assert words in last_lines(run)
    lost = run.step() - run.saved()[-1]
    assert lost <= 4  # saved every 3 steps, and one may have been on its way
    lab.finish(name, always=True)
    return lost


def launcher_killed(lab: Lab, name: str) -> int:
    run = Run(lab, name, fault="slow:0:0.02")
    run.until(lambda: run.step() >= 10)
    pids = run.ranks()
    assert len(pids) == 2
    run.process.kill()
    gone(pids, 10)
    lost = run.step() - run.saved()[-1]
    lab.finish(name)
    return lost


def asked(number: signal.Signals, who: str) -> Callable[[Lab, str], int]:
    def fault(lab: Lab, name: str) -> int:
        run = Run(lab, name, fault=SLOW)
        run.until(lambda: run.step() >= 8)
        targets = {"launcher": [run.process.pid], "one rank": run.ranks()[1:]}.get(who, run.ranks())
        before = run.step()
        for pid in targets:
            os.kill(pid, number)
        assert run.end(60) == 0, run.text()
        step = run.results()["step"]
        assert run.results()["stopped"] is True
        assert run.saved()[-1] == step == run.step()
        assert step - before <= 4  # a step or two while the signal is on its way
        lab.finish(name, always=True)
        return 0

    return fault


def asked_twice(lab: Lab, name: str) -> int:
    run = Run(lab, name, "--evals-per-epoch=0", fault="slow:0:3")
    run.until(lambda: "training to step" in run.text())
    pids = run.ranks()
    run.process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    run.process.send_signal(signal.SIGINT)
    assert run.end(20) == 128 + signal.SIGINT
    assert run.text().endswith("launch: stopped at once; what was saved before is kept\n")
    gone(pids, 10)
    return 0


def asked_in_evaluation(lab: Lab, name: str) -> int:
    run = Run(lab, name, "--eval-batch-size=2", fault="slow evaluation:0:0")  # 25 s a rank
    run.until(lambda: "training to step" in run.text())
    first = run.lines("val")
    run.until(lambda: run.step() == 6)
    time.sleep(1.0)
    began = time.monotonic()
    run.process.send_signal(signal.SIGUSR1)
    assert run.end(60) == 0, run.text()
    assert time.monotonic() - began < 15  # the rest of it would have taken 23
    assert run.lines("val") == first
    assert run.saved()[-1] == run.results()["step"] == 6
    lab.finish(name, always=True)
    return 0


def asked_while_tokenizing(lab: Lab, name: str) -> int:
    flags = ("--max-restarts=2", f"--cache-dir={lab.folder}/cache-{name}")
    run = Run(lab, name, *flags, fault="slow rows:0:0")
    run.until(lambda: "tokenizing train rows" in run.text())
    began = time.monotonic()
    run.process.send_signal(signal.SIGTERM)
    assert run.end(30) == 128 + signal.SIGTERM, run.text()
    assert time.monotonic() - began < 15  # the rest of it would have taken 40
    assert last_lines(run).endswith("launch: stopped while starting; there was nothing to save")
    assert "start again" not in run.text()
    assert "Traceback" not in run.text()
    assert not run.folder.exists()
    assert not list((lab.folder / f"cache-{name}").glob(".building-*"))
    lab.finish(name, f"--cache-dir={lab.folder}/cache-{name}", always=True)
    return 0


def asked_while_importing(lab: Lab, name: str) -> int:
    run = Run(lab, name, real=True)
    run.until(lambda: len(run.ranks()) == 2)
    os.kill(run.ranks()[1], signal.SIGUSR1)
    assert run.end(60) > 128, run.text()
    assert last_lines(run).endswith("launch: stopped while starting; there was nothing to save")
    lab.finish(name)
    return 0


def error_on_a_rank(lab: Lab, name: str) -> int:
    run = Run(lab, name, fault="error:1:11")
    run.until(lambda: len(run.ranks()) == 2)
    pids = run.ranks()
    assert run.end(60) == 1
    last = last_lines(run)
    assert "launch: rank 1 failed first, exit code 1: ValueError: boom on purpose\n" in last
    assert re.search(r"  at .*/model\.py:\d+ in loss_per_row\n  in: training, step 11\n", last)
    gone(pids, 10)
    (file,) = (run.folder / "errors").glob("rank1.txt")
    kept = file.read_text("utf-8")
    assert "Traceback (most recent call last)" in kept
    assert "ValueError: boom on purpose" in kept
    lost = run.step() - run.saved()[-1]
    lab.finish(name)
    return lost


def memory_runs_out(lab: Lab, name: str) -> int:
    run = Run(lab, name, fault="memory:1:11")
    assert run.end(60 + TIMEOUT_S) == 1
    hint = r"  hint: memory ran out with \d+ rows of \d+ tokens at a time: --batch-size \d+ needs"
    assert re.search(hint, last_lines(run)), run.text()
    assert "--gradient-checkpointing" in last_lines(run)
    lost = run.step() - run.saved()[-1]
    lab.finish(name)
    return lost


def loader_killed(lab: Lab, name: str) -> int:
    run = Run(lab, name, "--num-workers=1", fault="loader:1:11")
    assert run.end(60 + TIMEOUT_S) == 1
    assert (
        "  hint: a loader process was killed, mostly because memory is short: --num-workers 0 "
        in (last_lines(run))
    )
    lost = run.step() - run.saved()[-1]
    lab.finish(name)
    return lost


def rank_frozen(lab: Lab, name: str) -> int:
    run = Run(lab, name, "--step-timeout=4", fault="freeze:1:11")
    run.until(lambda: run.step() >= 10)
    began = time.monotonic()
    assert run.end(60) == 3, run.text()
    assert time.monotonic() - began < 30
    assert "no progress for 4 s: no answer from rank 1, last seen in " in (last_lines(run))
    lost = run.step() - run.saved()[-1]
    lab.finish(name)
    return lost


def rank_frozen_at_start(lab: Lab, name: str) -> int:
    run = Run(lab, name, "--timeout=6", "--step-timeout=1", fault="freeze at start:1:0")
    assert run.end(90) == 3, run.text()
    words = "no progress for 6 s: no answer from rank 1, last seen in start-up; waiting: rank 0 "
    assert words in last_lines(run), run.text()
    lab.finish(name)
    return 0


def endless_loop(lab: Lab, name: str) -> int:
    run = Run(lab, name, "--step-timeout=4", fault="endless:1:11")
    assert run.end(90) == 3, run.text()
    words = r"no progress for 4 s: rank \d in training, step \d+, at \S+:\d+ in .*; rank \d in"
    assert re.search(words, last_lines(run)), run.text()
    assert re.search(r"rank 1 in training, step 11, at model\.py:\d+ in loss_per_row", run.text())
    assert "model.py" in (run.folder / "errors" / "rank1.txt").read_text("utf-8")  # its stack
    lost = run.step() - run.saved()[-1]
    lab.finish(name)
    return lost


def restarts(lab: Lab, name: str) -> int:
    run = Run(lab, name, "--max-restarts=2", fault="kill:1:20")
    assert run.end() == 0, run.text()
    assert "all ranks start again from the last checkpoint (1 restarts left)" in run.text()
    resumed = re.findall(r"resuming after step (\d+) ", run.text())
    assert len(resumed) == 1
    lab.check(run)
    return 20 - 1 - int(resumed[0])


def mistakes_do_not_restart(lab: Lab, name: str) -> int:
    run = Run(lab, name, "--max-restarts=2", "--text-column=txt")
    assert run.end() == 2
    assert run.text().count("txt") == 1, run.text()
    return 0


def disk(lab: Lab, what: str, name: str) -> int:
    """`what`: "full", "read-only" or "gone" becomes the disk with the runs, in mid-run."""
    with tmpfs(lab.folder / "disk", "8m") as place:
        run = Run(lab, name, f"--runs-dir={place}", "--keep-checkpoints=3", fault="slow:0:0.02")
        run.folder = place / name
        run.until(lambda: run.step() >= 10)
        before = run.saved()
        pids = run.ranks()
        if what == "full":
            (place / "other").write_bytes(b"")
            with suppress(OSError), (place / "other").open("ab", buffering=0) as file:
                while True:
                    file.write(bytes(4096))
        elif what == "read-only":
            frozen(run.folder / "checkpoints", True)
        else:
            shutil.rmtree(run.folder)
        assert run.end(30) == 2, run.text()
        gone(pids, 10)
        reason = {"full": "No space left", "read-only": "ermi", "gone": "No such file"}[what]
        assert re.search(rf"train.py: cannot write {place}/{name}.*{reason}", last_lines(run)), (
            run.text()
        )
        assert "Traceback" not in run.text()
        if what == "gone":
            assert not run.folder.exists()
            return 0
        assert not list(run.folder.rglob(".writing-*"))
        assert set(before[-1:]) <= set(run.saved())
        lost = run.step() - run.saved()[-1]
        if what == "read-only":
            frozen(run.folder / "checkpoints", False)
        (place / "other").unlink(missing_ok=True)
        again = Run(lab, name, f"--runs-dir={place}", "--keep-checkpoints=3")
        again.folder = place / name
        assert again.end() == 0, again.text()
        last = again.folder / "checkpoints" / f"step-{STEPS:08d}" / "model.safetensors"
        assert last.read_bytes() == lab.weights
        return lost


def frozen(folder: Path, yes: bool) -> None:
    """Nobody may write in `folder`: file modes do not stop root. Errors: PermissionError."""
    if os.getuid() != 0:
        folder.chmod(0o555 if yes else 0o755)
        return
    command = ["chattr", "+i" if yes else "-i", str(folder)]
    done = subprocess.run(command, capture_output=True, encoding="utf-8")
    if done.returncode:
        raise PermissionError(done.stderr.strip())


@contextmanager
def tmpfs(place: Path, size: str) -> Iterator[Path]:
    """A small disk. Errors: PermissionError where this user may not mount one."""
    place.mkdir(exist_ok=True)
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(place)], capture_output=True,
        encoding="utf-8",
    )  # fmt: skip
    if done.returncode:
        raise PermissionError(done.stderr.strip())
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", str(place)], check=True)


def damaged(how: str) -> Callable[[Lab, str], int]:
    def fault(lab: Lab, name: str) -> int:
        run = Run(lab, name, fault="kill:0:20")
        assert run.end() == 128 + signal.SIGKILL
        newest = lab.file_of(name, run.saved()[-1])
        content = newest.read_bytes()
        if how == "truncated":
            newest.write_bytes(content[: len(content) // 2])
        elif how == "bit flipped":
            middle = len(content) // 2
            newest.write_bytes(
                content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]
            )
        else:
            newest.unlink()
        good = run.saved()[-2]
        lost = run.step() - good
        again = Run(lab, name)
        assert again.end() == 0, again.text()
        assert f"passing over the damaged checkpoint {newest.parent}: model.saf" in again.text()
        assert f"resuming after step {good} " in again.text()
        lab.check(again)
        return lost

    return fault


def numbers_not_finite(lab: Lab, name: str) -> int:
    run = Run(lab, name, fault="nan:1:20")
    assert run.end() == 0, run.text()
    (line,) = (run.folder / "bad_batches.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line)["step"] == 20
    assert [line["step"] for line in run.lines() if line["loss"] is None] == [20]
    assert run.lines("val")[-1]["loss"] < run.lines("val")[0]["loss"]
    return 0


def replicas_diverge(lab: Lab, name: str) -> int:
    run = Run(lab, name, "--check-replicas-every=1", fault="drift:1:20")
    assert run.end() == 1
    assert "the replicas diverged: the weights of ranks [1] differ" in last_lines(run)
    return run.step() - run.saved()[-1]


def everybody_may_write(lab: Lab, name: str) -> int:
    run = Run(lab, name, "--max-steps=6", f"--cache-dir={lab.folder}/cache-{name}", umask=0)
    assert run.end() == 0, run.text()
    assert_private(run.folder)
    assert_private(lab.folder / f"cache-{name}")
    return 0


def assert_private(folder: Path) -> None:
    """Nothing in it may be changed by everybody."""
    loose = [p for p in folder.rglob("*") if p.stat().st_mode & 0o002]
    assert not loose, loose


SIGTERM, SIGINT, SIGUSR1 = signal.SIGTERM, signal.SIGINT, signal.SIGUSR1
# (fault, where): how it is done
FAULTS: dict[tuple[str, str], Callable[[Lab, str], int]] = {
    ("SIGKILL of a rank", "in a step"): killed_in_a_step,
    ("SIGKILL of the launcher", "in a step"): launcher_killed,
    ("SIGTERM to the launcher", "in a step"): asked(SIGTERM, "launcher"),
    ("SIGINT to the launcher", "in a step"): asked(SIGINT, "launcher"),
    ("SIGUSR1 to one rank", "in a step"): asked(SIGUSR1, "one rank"),
    ("SIGTERM to all ranks", "in a step"): asked(SIGTERM, "all ranks"),
    ("SIGINT twice", "in a step"): asked_twice,
    ("SIGUSR1 to the launcher", "in an evaluation"): asked_in_evaluation,
    ("SIGTERM to the launcher", "while tokenizing"): asked_while_tokenizing,
    ("SIGUSR1 to one rank", "while importing"): asked_while_importing,
    ("Python error on a rank", "in a step"): error_on_a_rank,
    ("out of memory on a rank", "in a step"): memory_runs_out,
    ("SIGKILL of a loader worker", "in a step"): loader_killed,
    ("SIGSTOP of a rank", "in a step"): rank_frozen,
    ("SIGSTOP of a rank", "in start-up"): rank_frozen_at_start,
    ("endless loop on a rank", "in a step"): endless_loop,
    ("SIGKILL of a rank, --max-restarts", "in a step"): restarts,
    ("mistake in a flag, --max-restarts", "in start-up"): mistakes_do_not_restart,
    ("disk full", "in training"): lambda lab, name: disk(lab, "full", name),
    ("disk read-only", "in training"): lambda lab, name: disk(lab, "read-only", name),
    ("run folder removed", "in training"): lambda lab, name: disk(lab, "gone", name),
    ("checkpoint truncated", "after a kill"): damaged("truncated"),
    ("checkpoint with a bit flipped", "after a kill"): damaged("bit flipped"),
    ("checkpoint half deleted", "after a kill"): damaged("half deleted"),
    ("loss not finite on a rank", "in a step"): numbers_not_finite,
    ("weights of a rank changed", "in a step"): replicas_diverge,
    ("umask 0", "whole run"): everybody_may_write,
}


# Only the benchmark does these: the project's own tests (test_survival.py and others) do the same
# to ranks in less time, or another fault of this file is similar.
ALSO_ELSEWHERE = (
    "endless loop on a rank", "disk read-only", "umask 0",
    "run folder removed", "checkpoint truncated", "checkpoint with a bit flipped",
    "checkpoint half deleted", "loss not finite on a rank", "weights of a rank changed",
)  # fmt: skip


def soak(lab: Lab, kills: int, seed: int, say: Callable[[str], None]) -> list[tuple[str, int]]:
    """Kill one run again and again at random moments, and let it end: the weights are those of the
    run that nothing happened to. Returns, for each kill, who was killed and the steps lost."""
    draw = random.Random(seed)
    killed: list[tuple[str, int]] = []
    name, resumed = f"soak-{seed}", 0
    while len(killed) < kills or resumed < STEPS:
        last = len(killed) >= kills or resumed >= STEPS - 6  # let it end; then a new run begins
        run = Run(lab, name, "--save-every=2", fault="" if last else "slow:0:0.05")
        if last:
            assert run.end() == 0, run.text()
            lab.check(run)
            name, resumed = f"soak-{seed}.{len(killed)}", STEPS if len(killed) >= kills else 0
            continue
        run.until(lambda run=run: len(run.ranks()) == 2)  # type: ignore[misc]
        pids = run.ranks()
        if draw.random() < 0.8:  # mostly when it has come to its steps, where it saves
            while "training to step" not in run.text() and any(map(lives, pids)):
                time.sleep(0.01)
        time.sleep(draw.uniform(0, 1.5))
        who = draw.choice(("a rank", "all ranks", "the launcher"))
        victims = {"a rank": draw.sample(pids, 1), "all ranks": pids, "the launcher": []}[who]
        for pid in victims or [run.process.pid]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        code = run.end()
        gone(pids, 20)
        reached = run.step()
        assert code != 0 or reached == STEPS, run.text()
        found = run.saved() if (run.folder / "checkpoints").exists() else []
        resumed = found[-1] if found else 0
        lost = max(0, reached - resumed)
        assert lost <= 4, f"{lost} steps lost"
        killed.append((who, lost))
        say(f"kill {len(killed)}: {who}, at step {reached}, resumes from {resumed}")
    return killed
