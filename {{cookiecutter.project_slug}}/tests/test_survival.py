"""A run survives: numbers that are not finite, full disks, requests to stop at any moment."""

import json
import os
import pickle
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jobs
import pytest
import torch
from conftest import lines_of
from ranks import RankError, Ranks

from training.checkpoint import checkpoint
from training.checkpoint.model_folder import ModelFolder
from training.checkpoint.saver import Saver
from training.checkpoint.state import TrainState
from training.distributed import watchdog
from training.launch import failure_report, worker
from training.settings.config import TrainConfig
from training.settings.errors import UserError, needs_no_traceback

Settings = Callable[..., TrainConfig]


def run_of(config: TrainConfig) -> Path:
    return Path(config.runs_dir) / str(config.run_name)


def state_of(config: TrainConfig, step: int) -> dict[str, Any]:
    return torch.load(run_of(config) / "checkpoints" / f"step-{step:08d}" / "state.pt")


def weights(config: TrainConfig, step: int) -> dict[str, torch.Tensor]:
    return jobs.weights_of(run_of(config) / "checkpoints" / f"step-{step:08d}")


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a)


def results(config: TrainConfig) -> dict[str, Any]:
    return json.loads((run_of(config) / "results.json").read_text("utf-8"))


# -- numbers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_bad_step_is_skipped_on_all_ranks(ranks: Ranks, settings: Settings, kind: str) -> None:
    """One rank's loss or gradient is not finite in steps 3 and 7: nothing moves in them, the other
    steps go on, and the rows of those global batches are listed."""
    config = settings(save_every=1, keep_checkpoints=20, gradient_accumulation_steps=2,
                      batch_size=8, check_replicas_every=1)  # fmt: skip
    ranks.run(2, jobs.run_with_bad_loss, config, kind, [3, 7])
    for step in (3, 7):
        assert same(weights(config, step - 1), weights(config, step))
        moments = [state_of(config, s)["optimizer"]["state"] for s in (step - 1, step)]
        for name, of_one in moments[0].items():
            assert same(of_one, moments[1][name])
        assert not same(weights(config, step), weights(config, step + 1))
    lines = lines_of(config)
    assert [line["step"] for line in lines if line["loss"] is None] == [3, 7]
    assert [line["step"] for line in lines if line["grad_norm"] is None] == [3, 7]
    # The schedule has not moved on either: the next step but one repeats its learning rate.
    assert state_of(config, 14)["schedule"]["steps_done"] == 12
    bad = (run_of(config) / "bad_batches.jsonl").read_text("utf-8").splitlines()
    found = [json.loads(line) for line in bad]
    assert [(line["step"], line["epoch"], line["in_a_row"]) for line in found] == [
        (3, 0, 1), (7, 0, 1)
    ]  # fmt: skip
    assert [len(set(line["rows"])) for line in found] == [32, 11]
    assert all(0 <= row < 203 for line in found for row in line["rows"])
    assert "step 3 was skipped" in (run_of(config) / "log.txt").read_text("utf-8")
    rarely = replace(config, run_name="rarely", log_every=2, max_steps=4, schedule="constant",
                     warmup_ratio=0.0)  # fmt: skip
    often = replace(rarely, run_name="often", log_every=1)
    for other in (rarely, often):
        ranks.run(2, jobs.run_with_bad_loss, other, kind, [3])
    assert lines_of(rarely)[1]["loss"] == lines_of(often)[3]["loss"]  # only of step 4


def test_fp16_finds_its_loss_scale(ranks: Ranks, settings: Settings) -> None:
    """Overflows at the start, and right after the scale has grown, are no fault of the rows: they
    are skipped, not listed, and do not count as bad steps. Others are, and do."""
    config = settings(max_bad_steps=2)
    ranks.run(2, jobs.run_in_fp16, config, [1, 2, 3, 8, 10], 4)  # it grows after step 7
    lines = (run_of(config) / "bad_batches.jsonl").read_text("utf-8").splitlines()
    assert [json.loads(line)["step"] for line in lines] == [10]
    scales = [line["loss_scale"] for line in lines_of(config)]
    assert [scale / scales[3] for scale in scales[:10]] == [4, 2, 1, 1, 1, 1, 2, 1, 1, 0.5]
    log = (run_of(config) / "log.txt").read_text("utf-8")
    assert "the loss scale is 8192, after 3 steps that overflowed and were skipped" in log
    assert log.count("was skipped: ") == 1
    assert state_of(config, 14)["schedule"]["steps_done"] == 9


def test_fp16_that_never_works_ends(ranks: Ranks, settings: Settings) -> None:
    """A loss scale below 1 is no search any more: the steps are bad ones."""
    config = settings(max_bad_steps=2, epochs=4)
    with pytest.raises(RankError, match="2 steps in a row, the last of them step 17, had a loss"):
        ranks.run(2, jobs.run_in_fp16, config, list(range(1, 30)), 2000)


def test_many_bad_steps_end_the_run(ranks: Ranks, settings: Settings) -> None:
    """--max-bad-steps in a row: all ranks stop with a sentence; the good checkpoint stays, and
    broken weights are never the best."""
    config = settings(save_every=1, max_bad_steps=3, epochs=3, evals_per_epoch=7)
    message = "3 steps in a row, the last of them step 8, had a loss or gradient that is not finite"
    with pytest.raises(RankError, match=message) as error:
        ranks.run(2, jobs.run_with_bad_loss, config, "loss", [4, *range(6, 20)])
    assert error.value.kinds == ["UserError", "UserError"]
    assert checkpoint.newest(run_of(config) / "checkpoints") is not None
    assert checkpoint.problem_of(run_of(config) / "best") is None
    assert all(w.isfinite().all() for w in jobs.weights_of(run_of(config) / "best").values())


def test_broken_weights_are_never_the_best(ranks: Ranks, settings: Settings) -> None:
    """An accuracy from logits that are not finite chooses nothing."""
    config = settings()
    ranks.run(2, jobs.run_with_broken_evaluation, config)
    assert not (run_of(config) / "best").exists()
    assert state_of(config, 14)["progress"]["evaluations_since_best"] == 2


def test_resumed_right_after_a_bad_step(ranks: Ranks, settings: Settings) -> None:
    """What is known of a step one step later is in the checkpoint too."""
    whole = settings(run_name="whole")
    ranks.run(2, jobs.run_with_bad_loss, whole, "loss", [4, 5])
    config = replace(whole, run_name="stopped")
    for stop in (4, 5):
        ranks.run(2, jobs.run_with_bad_loss, config, "loss", [4, 5], stop)
    ranks.run(2, jobs.run, config)
    for a, b in zip(lines_of(whole), lines_of(config), strict=True):
        assert [a[k] for k in ("step", "loss", "lr")] == [b[k] for k in ("step", "loss", "lr")]
    assert same(weights(whole, 14), weights(config, 14))
    bad = (run_of(config) / "bad_batches.jsonl").read_text("utf-8")
    assert bad == (run_of(whole) / "bad_batches.jsonl").read_text("utf-8")


def test_replicas_are_checked_every_n_steps(ranks: Ranks, settings: Settings) -> None:
    """--check-replicas-every: the run stops at that step, and names the rank that went astray."""
    config = settings(check_replicas_every=2, max_steps=6)
    with pytest.raises(RankError, match=r"weights of ranks \[1\] differ from those of the other 2"):
        ranks.run(3, jobs.drift, config)
    assert [line["step"] for line in lines_of(config)] == [1, 2]


def test_replicas_may_differ_if_asked(ranks: Ranks, settings: Settings) -> None:
    """--on-replica-drift warn says so at each check, and off does not look: the run ends."""
    for on_drift, warnings in (("warn", 2), ("off", 0)):
        config = settings(run_name=on_drift, on_replica_drift=on_drift)
        ranks.run(2, jobs.drift, config)
        log = (run_of(config) / "log.txt").read_text("utf-8")
        assert log.count("the replicas diverged: the weights of ranks [1] differ") == warnings
        assert results(config)["stopped"] is False


# -- stopping ------------------------------------------------------------------------------------


def test_many_ranks_agree_less_often(ranks: Ranks) -> None:
    """Every second step, with the answer at the next of these; on all ranks alike."""
    for answers in ranks.run(2, jobs.agreements, 3, 8):
        assert answers == [False] * 5 + [True, False, True]


@pytest.mark.parametrize("phase", ["evaluating", "final val"])
def test_stop_in_an_evaluation(ranks: Ranks, settings: Settings, phase: str) -> None:
    """All ranks leave it together; the run then evaluates what it had left, and ends the same."""
    whole = settings(run_name="whole", eval_batch_size=4)
    ranks.run(2, jobs.run, whole)
    config = replace(whole, run_name="stopped")
    ranks.run(2, jobs.run_stopped_in, config, phase, 3)
    assert results(config)["stopped"] is True
    assert "val" not in results(config)
    if phase == "evaluating":
        assert results(config)["step"] == 7
        assert state_of(config, 7)["progress"]["evaluation_due"] is True
    ranks.run(2, jobs.run, config)
    assert results(config)["stopped"] is False
    assert lines_of(whole, "val") == lines_of(config, "val")
    assert [line["loss"] for line in lines_of(whole)] == [line["loss"] for line in lines_of(config)]
    assert same(weights(whole, 14), weights(config, 14))


def test_max_time(ranks: Ranks, settings: Settings) -> None:
    """--max-time: the run stops, saves, and can be resumed."""
    config = settings(epochs=1000, val_fraction=0.0, val_file=())
    ranks.run(2, jobs.run_until_time_is_up, config, 3.0)
    assert results(config)["stopped"] is True
    step = results(config)["step"]
    assert 0 < step < 7000
    assert checkpoint.newest(run_of(config) / "checkpoints").name == f"step-{step:08d}"  # type: ignore[union-attr]


# -- disks ---------------------------------------------------------------------------------------


def test_full_disk_ends_all_ranks(ranks: Ranks, settings: Settings) -> None:
    """No checkpoint fits any more: all ranks say so, within some steps and not only at the next
    save; the one before is whole, nothing is left."""
    config = settings(save_every=50, evals_per_epoch=0, epochs=20)
    ranks.run(2, jobs.run_stopped_at, config, 4)
    message = r"cannot write .*step-00000050: .*it needs about 0\.\d MiB, [\d,.]+ MiB are free"
    with pytest.raises(RankError, match=message) as error:
        ranks.run(2, jobs.run_with_short_disk, config, 50_000)
    assert error.value.kinds == ["UserError", "UserError"]
    checkpoints = run_of(config) / "checkpoints"
    assert 50 < lines_of(config)[-1]["step"] < 90
    assert [p.name for p in checkpoints.iterdir()] == ["step-00000004"]
    assert checkpoint.newest(checkpoints) == checkpoints / "step-00000004"
    ranks.run(2, jobs.run_stopped_at, config, 9)  # with room again, it resumes


def test_lost_folder_ends_all_ranks(ranks: Ranks, settings: Settings) -> None:
    """The run's folder is removed under it: the path is named, and nothing is made again."""
    config = settings(save_every=3)
    with pytest.raises(RankError, match=r"cannot write .*/run.*: No such file") as error:
        ranks.run(2, jobs.run_and_lose_folder, config, 2)
    assert error.value.kinds == ["UserError", "UserError"]
    assert not run_of(config).exists()


def test_background_save_is_of_its_moment(tmp_path: Path, tiny_model: Path) -> None:
    """What changes after `save` is not in the file; one write at a time; errors come with the
    next call; tied weights stay tied."""
    from transformers import AutoConfig, AutoModelForSequenceClassification, AutoTokenizer

    # Not a loaded one: transformers saves that in another way.
    model = AutoModelForSequenceClassification.from_config(AutoConfig.from_pretrained(tiny_model))
    (tmp_path / "checkpoints").mkdir()
    tokenizer, labels = AutoTokenizer.from_pretrained(tiny_model), ["a", "b"]
    state: Any = TrainState(ModelFolder(model, tokenizer, labels, TrainConfig()))
    state.checked = set(state.parts)  # a check needs a process group
    saver = Saver(tmp_path, state)
    first = {k: v.clone() for k, v in model.state_dict().items()}
    moment = torch.ones(3)
    for step in (1, 2, 3):
        content = {"moment": moment, "nested": [moment, {"a": (1, None)}]}
        saver._save(step, model.state_dict(), content, is_best=step == 1, is_last=False)
        with torch.no_grad():
            model.classifier.bias += 1
        moment += 1
        if step == 1:  # written after best/, with the same weights
            saver._wait()
            written = jobs.weights_of(tmp_path / "checkpoints" / "step-00000001")
            assert written.keys() == first.keys()
            assert same(written, first)
    saver._wait()
    found = {p.name: jobs.weights_of(p) for p in (tmp_path / "checkpoints").iterdir()}
    assert sorted(found) == ["step-00000002", "step-00000003"]
    assert torch.equal(found["step-00000003"]["classifier.bias"], first["classifier.bias"] + 2)
    assert same(jobs.weights_of(tmp_path / "best"), first)
    written_state = torch.load(tmp_path / "checkpoints" / "step-00000003" / "state.pt")
    assert written_state["moment"].tolist() == [3, 3, 3]
    assert written_state["nested"][1] == {"a": (1, None)}
    (tmp_path / "checkpoints").rename(tmp_path / "gone")
    saver._save(4, model.state_dict(), {}, is_best=False, is_last=False)
    with pytest.raises(UserError, match=r"cannot write .*step-00000004: No such file"):
        saver._wait()


# -- resume --------------------------------------------------------------------------------------


def test_resume_anyway(ranks: Ranks, settings: Settings) -> None:
    """--resume-anyway resumes with a changed setting, and says which."""
    config = settings()
    ranks.run(1, jobs.run_stopped_at, config, 5)
    changed = replace(config, lr=1e-4, global_batch_size=16)
    with pytest.raises(RankError, match=r"lr was 0.003, now 0.0001.*insist with --resume-anyway"):
        ranks.run(1, jobs.run, changed)
    ranks.run(1, jobs.run, replace(changed, resume_anyway=True))
    assert "resumed anyway" in (run_of(config) / "log.txt").read_text("utf-8")
    # 5 steps of 32 rows were done, which are 10 of 16, and 13 steps are an epoch now.
    assert lines_of(config)[-1]["step"] == 26
    progress = state_of(config, 26)["progress"]
    assert (progress["epoch"], progress["step_in_epoch"]) == (2, 26 - 5 - 3 - 13)


def test_an_older_checkpoint_in_place(ranks: Ranks, settings: Settings) -> None:
    """Going on from step 2 in a run that was at 6: the later ones are kept, and never taken."""
    config = settings(save_every=2, keep_checkpoints=3)
    ranks.run(1, jobs.run_stopped_at, config, 6)
    checkpoints = run_of(config) / "checkpoints"
    ranks.run(1, jobs.run_stopped_at, replace(config, resume=str(checkpoints / "step-00000002")), 5)
    names = sorted(p.name.split("-")[-1] for p in checkpoints.glob("aside-*"))
    assert names == ["00000004", "00000006"]
    assert [step for step, _ in checkpoint.saved(checkpoints)] == [2, 4, 5]
    ranks.run(1, jobs.run, config)
    assert [line["step"] for line in lines_of(config)] == list(range(1, 15))


def test_pickle_bomb_in_a_run(ranks: Ranks, settings: Settings, tmp_path: Path) -> None:
    """A checkpoint with code in it and a fitting manifest is refused, and nothing runs."""
    config = settings()
    ranks.run(2, jobs.run_stopped_at, config, 3)
    folder = run_of(config) / "checkpoints" / "step-00000003"
    trap = tmp_path / "owned"

    class Evil:
        def __reduce__(self) -> tuple:
            return (Path.touch, (trap,))

    def write(new: Path) -> None:
        for path in folder.iterdir():
            if path.name not in (checkpoint.MANIFEST, "state.pt"):
                (new / path.name).write_bytes(path.read_bytes())
        (new / "state.pt").write_bytes(pickle.dumps(Evil()))

    checkpoint.write_folder(folder, write, 3)
    with pytest.raises(RankError, match=r"state\.pt holds more than data, not loaded") as error:
        ranks.run(2, jobs.run, config)
    assert error.value.kinds == ["UserError", "UserError"]
    assert not trap.exists()


# -- messages ------------------------------------------------------------------------------------


def test_advice() -> None:
    """Failures with a usual cause say what to do."""
    watchdog.report("training", 7, (16, 128))
    try:
        for error in (
            torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
            MemoryError(),
            RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: ..."),
        ):
            text = worker.advice_for(error)
            assert "16 rows of 128 tokens" in text
            assert "--batch-size 8" in text
            assert "--gradient-checkpointing" in text
            assert "--max-length" in text
        for words in ("DataLoader worker (pid 7) is killed by signal: Killed. ",
                      "DataLoader worker (pid(s) 7) exited unexpectedly"):  # fmt: skip
            assert "--num-workers 0" in worker.advice_for(RuntimeError(words))
        assert worker.advice_for(ValueError("boom")) == ""
        assert needs_no_traceback(OSError(28, "No space left on device"))
        assert not needs_no_traceback(OSError(5, "Input/output error"))
    finally:
        watchdog.report(watchdog.START)


def test_the_first_failure_is_not_a_consequence(tmp_path: Path) -> None:
    """Of failures by time, those come last that only repeat the main process's, or that torchrun's
    SIGTERM has caused."""

    def failure(number: int, text: str, code: int = 1) -> Any:
        file = tmp_path / f"{number}.json"
        if text:
            file.touch()
            os.utime(file, (number, number))
        return SimpleNamespace(
            error_file=str(file), timestamp=number, exitcode=code, message={"message": text}
        )

    failures = {
        0: failure(9, "ValueError: boom"),
        1: failure(5, "MainProcessError: boom"),
        2: failure(3, "", -signal.SIGTERM),
    }
    assert min(failures.items(), key=failure_report.failure_order)[0] == 0


def test_who_is_missing() -> None:
    """The message about ranks that are silent, that wait in two places, and all in the same."""
    thread = watchdog.Watchdog.__new__(watchdog.Watchdog)
    thread.start_timeout, thread.step_timeout = 100.0, 10.0
    watchdog.report("training", 7)
    try:
        before = {r: [5, "training, step 7", "train.py:1 in main"] for r in range(4)}
        after = {r: [6 + (r == 3), *state[1:]] for r, state in before.items()}
        moved = thread._describe_wait(before, after)
        assert moved == (
            "no progress for 10 s: all 4 ranks wait in training, step 7, at train.py:1 in main; "
            "no rank is missing: look at the devices and the network between them (NCCL_DEBUG=INFO)"
        )
        after[2] = before[2]
        assert (
            "no answer from rank 2, last seen in training, step 7; waiting: ranks"
            in thread._describe_wait(before, after)
        )
        after[2] = [6, "training, step 7", "model.py:9 in forward"]
        assert "10 s: rank 2 in training, step 7, at model.py:9 in forward; ranks 0, 1, 3 in" in (
            thread._describe_wait(before, after)
        )
    finally:
        watchdog.report(watchdog.START)
