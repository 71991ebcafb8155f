"""--strategy: other ways to compute the same steps, with the same checkpoints."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import jobs
import numpy as np
import pytest
import torch
from conftest import lines_of
from ranks import RankError, Ranks

from training.settings.config import TrainConfig

Settings = Callable[..., TrainConfig]


def end_of(config: TrainConfig, step: int = 14) -> dict[str, torch.Tensor]:
    folder = Path(config.runs_dir) / str(config.run_name) / "checkpoints"
    return jobs.weights_of(folder / f"step-{step:08d}")


def test_fsdp_equals_ddp(ranks: Ranks, settings: Settings) -> None:
    """Sharded on 2 ranks, with and without accumulation, as DDP: losses, norms, metrics, weights;
    best/ is whole."""
    ddp = settings(run_name="ddp", precision="fp64", dropout=0.0)
    ranks.run(2, jobs.run, ddp)
    for name, batch_size in (("fsdp", 16), ("accumulated", 5)):
        config = replace(ddp, run_name=name, strategy="fsdp", batch_size=batch_size)
        ranks.run(2, jobs.run, config)
        for value in ("step", "loss", "grad_norm", "lr"):
            expected = [line[value] for line in lines_of(ddp)]
            np.testing.assert_allclose([x[value] for x in lines_of(config)], expected, rtol=1e-9)
        assert lines_of(config, "val")[-1]["accuracy"] == lines_of(ddp, "val")[-1]["accuracy"]
        found, expected_weights = end_of(config), end_of(ddp)
        assert found.keys() == expected_weights.keys()
        for key, weight in expected_weights.items():
            torch.testing.assert_close(found[key], weight, rtol=1e-7, atol=1e-9)
    from transformers import AutoModelForSequenceClassification

    best = Path(ddp.runs_dir) / "fsdp" / "best"
    _, info = AutoModelForSequenceClassification.from_pretrained(best, output_loading_info=True)
    assert not any(info.values())


def test_fsdp_resumes_bit_identical(ranks: Ranks, settings: Settings) -> None:
    """Dropout on, stopped in mid-epoch, a step before that skipped."""
    whole = settings(run_name="whole", strategy="fsdp", batch_size=8)
    ranks.run(2, jobs.run_with_bad_loss, whole, "loss", [3])
    config = replace(whole, run_name="stopped")
    ranks.run(2, jobs.run_with_bad_loss, config, "loss", [3], 4)
    ranks.run(2, jobs.run, config)
    for name in ("step", "loss", "lr", "grad_norm"):
        assert [x[name] for x in lines_of(whole)] == [x[name] for x in lines_of(config)]
    assert lines_of(whole)[2]["loss"] is None
    expected, found = end_of(whole), end_of(config)
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def test_strategies_share_checkpoints(ranks: Ranks, settings: Settings) -> None:
    """Begun with DDP, resumed with FSDP, ended with dp: the losses of one run with DDP."""
    whole = settings(run_name="whole", precision="fp64", dropout=0.0)
    ranks.run(2, jobs.run, whole)
    config = replace(whole, run_name="moved")
    ranks.run(2, jobs.run_stopped_at, config, 4)
    ranks.run(3, jobs.run_stopped_at, replace(config, strategy="fsdp"), 9)
    ranks.run(1, jobs.run, replace(config, strategy="dp"))
    for name in ("step", "loss", "grad_norm"):
        expected = [line[name] for line in lines_of(whole)]
        np.testing.assert_allclose([x[name] for x in lines_of(config)], expected, rtol=1e-9)
    results = Path(config.runs_dir) / "moved" / "results.json"
    assert json.loads(results.read_text("utf-8"))["world_size"] == 1


def test_dp_is_one_process(ranks: Ranks, settings: Settings) -> None:
    with pytest.raises(RankError, match="dp is one process with every GPU: give --nproc-per-node"):
        ranks.run(2, jobs.run, settings(strategy="dp"))


def test_gradient_compression(ranks: Ranks, settings: Settings) -> None:
    """Gradients travel as bf16: other losses in the third digit, and all ranks alike."""
    exact = settings(run_name="exact", dropout=0.0, max_steps=6, evals_per_epoch=7)
    ranks.run(2, jobs.run, exact)
    for strategy in ("ddp", "fsdp"):
        config = replace(exact, run_name=strategy, strategy=strategy, gradient_compression="bf16")
        ranks.run(2, jobs.run, config)
        losses = [[x["loss"] for x in lines_of(c)] for c in (exact, config)]
        np.testing.assert_allclose(losses[0], losses[1], rtol=0.02)
        assert losses[0] != losses[1]


def test_frozen_embeddings(ranks: Ranks, settings: Settings, tiny_model: Path) -> None:
    config = settings(freeze_embeddings=True, max_steps=3)
    ranks.run(2, jobs.run, config)
    name = "bert.embeddings.word_embeddings.weight"
    before, after = jobs.weights_of(tiny_model), end_of(config, 3)
    assert torch.equal(before[name], after[name])
    other = "bert.embeddings.position_embeddings.weight"
    assert not torch.equal(before[other], after[other])


def test_rows_of_word_embeddings(ranks: Ranks, settings: Settings) -> None:
    """Of the word embeddings' gradient only rows in use travel: the numbers are those of all of it,
    accumulated or not, and far less is sent."""
    exact = settings(run_name="exact", dropout=0.0, max_steps=8, precision="fp64", batch_size=4)
    rows = replace(exact, run_name="rows", gradient_compression="rows")
    ranks.run(2, jobs.run, exact)
    share = ranks.run(2, jobs.share_reduced, rows)[0]
    for what in ("loss", "grad_norm"):
        values = [[x[what] for x in lines_of(c)] for c in (exact, rows)]
        np.testing.assert_allclose(values[0], values[1], rtol=1e-12)
    ours, theirs = end_of(rows, 8), end_of(exact, 8)
    assert all(torch.allclose(ours[k], theirs[k], rtol=1e-9, atol=1e-12) for k in ours)
    assert 0.3 < share < 0.9  # the tiny model has few words that a batch does not have


def test_fsdp_in_fp16(ranks: Ranks, settings: Settings) -> None:
    """As DDP in fp16: the loss scale too, which a step with an infinite gradient halves."""
    found = []
    for strategy in ("ddp", "fsdp"):
        config = settings(run_name=strategy, strategy=strategy, precision="fp16", dropout=0.0)
        ranks.run(2, jobs.run_with_bad_loss, config, "gradient", [3])
        found.append([(x["loss"], x["grad_norm"], x["loss_scale"]) for x in lines_of(config)])
    ddp, fsdp = (np.array(rows, float) for rows in found)
    np.testing.assert_allclose(fsdp, ddp, rtol=0.01)
    assert ddp[2, 2] == ddp[1, 2] / 2  # the scale


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_fsdp_memory_of_checkpoints(ranks: Ranks, settings: Settings, precision: str) -> None:
    """On the main process one copy of the checkpoint, and one tensor that is on its way; on others
    no full tensor ever. A resume makes what training holds, sharded: gradients, two moments."""
    config = settings(strategy="fsdp", precision=precision, save_every=1, max_steps=4)
    for run, stop in (("first", 2), ("resumed", 0)):
        main, *others = ranks.run(3, jobs.memory_of_checkpoints, config, stop)
        layer = main["layer"] + (1 << 16)  # the random numbers' state, of each rank
        assert main["checkpoint"] < main["save"][0] < main["checkpoint"] + layer
        for rank in others:
            assert rank["save"][0] < layer
            assert rank["save"][1] == 0
            if run == "resumed":
                assert rank["restore"][0] < 3 * rank["shards"] + layer
                assert rank["restore"][1] == 0
    assert main["restore"][0] < 1.3 * main["checkpoint"] + 3 * main["shards"] + layer


def test_fsdp_in_bf16(ranks: Ranks, settings: Settings) -> None:
    """Weights are gathered in bf16 and gradients reduced in fp32. Losses are those of DDP within
    the rounding of bf16 (2**-8): FSDP rounds embeddings and norms, too."""
    losses = {}
    for strategy, precision in (("ddp", "fp32"), ("ddp", "bf16"), ("fsdp", "bf16")):
        name = f"{strategy}-{precision}"
        config = settings(run_name=name, strategy=strategy, precision=precision, dropout=0.0)
        kinds = ranks.run(2, jobs.kinds_gathered, config)[0]
        losses[name] = np.array([line["loss"] for line in lines_of(config)])
    assert kinds == {"allgather torch.bfloat16", "reduce_scatter torch.float32"}
    np.testing.assert_allclose(losses["fsdp-bf16"], losses["ddp-bf16"], rtol=2**-8)


def test_another_optimizer(ranks: Ranks) -> None:
    """An optimizer gets back all that it keeps, tensors or not. The state of another is refused by
    a sentence on every rank."""
    assert ranks.run(2, jobs.optimizer_moved, "adam", "adam") == [True, True]
    with pytest.raises(RankError, match="has the state of another optimizer") as error:
        ranks.run(2, jobs.optimizer_moved, "adam", "rmsprop")
    assert error.value.kinds == ["UserError", "UserError"]
