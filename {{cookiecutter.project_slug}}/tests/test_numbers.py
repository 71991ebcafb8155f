"""Promise 1 to 3 and 6, 7: the numbers are right, whatever the hardware."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
import torch
from conftest import lines_of
from ranks import RankError, Ranks

from training.distributed import replicas
from training.settings.config import TrainConfig

# (ranks, most rows in a forward): 32 is 1 x 32, 2 x 16, 2 x 2 x 8, 4 x 4 x 2; 3 does not divide it
LAYOUTS = [(1, 32), (2, 16), (2, 8), (3, 16), (3, 4), (4, 2)]
Settings = Callable[..., TrainConfig]
VARIANTS: list[dict[str, Any]] = [
    {"precision": "fp32", "max_steps": 10},
    {"precision": "fp64"},
    {"precision": "fp64", "epochs": 1, "class_weights": "balanced", "label_smoothing": 0.1},
    {"precision": "fp64", "epochs": 1, "group_by_length": False},
    {"precision": "fp64", "epochs": 1, "group_by_length": False, "class_weights": "balanced"},
]


def test_same_numbers_for_every_layout(ranks: Ranks, settings: Settings) -> None:
    """Promise 1: losses, gradient norms and learning rates are those of one rank."""
    reference: dict[int, list[dict]] = {}
    for world_size, batch_size in LAYOUTS:
        configs = [
            settings(
                dropout=0.0,
                batch_size=batch_size,
                run_name=f"{world_size}x{batch_size}-{i}",
                val_file=(),
                val_fraction=0.0,
            )
            for i in range(len(VARIANTS))
        ]
        configs = [replace(c, **v) for c, v in zip(configs, VARIANTS, strict=True)]
        ranks.run(world_size, jobs.many_runs, configs)
        for i, config in enumerate(configs):
            lines = lines_of(config)
            assert len(lines) == (config.max_steps or 7 * config.epochs)  # of 203 rows
            expected = reference.setdefault(i, lines)
            tolerance = 1e-5 if config.precision == "fp32" else 1e-9
            for name in ("loss", "grad_norm"):
                np.testing.assert_allclose(
                    [line[name] for line in lines], [line[name] for line in expected],
                    rtol=tolerance, err_msg=f"{name} of {config.run_name}, {VARIANTS[i]}",
                )  # fmt: skip
            assert [line["lr"] for line in lines] == [line["lr"] for line in expected]


def test_class_weights_and_grouping_change_the_losses(ranks: Ranks, settings: Settings) -> None:
    """The variants above are different runs: no flag is without effect."""
    configs = [settings(run_name=str(i), dropout=0.0, max_steps=2) for i in range(len(VARIANTS))]
    configs = [replace(c, **v | {"max_steps": 2}) for c, v in zip(configs, VARIANTS, strict=True)]
    ranks.run(1, jobs.many_runs, configs)
    losses = [lines_of(c)[1]["loss"] for c in configs]
    assert len({round(loss, 5) for loss in losses[1:]}) == len(VARIANTS) - 1


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("class_weights", ["none", "balanced"])
def test_gradient_equals_the_full_batch(
    ranks: Ranks, settings: Settings, world_size: int, class_weights: str
) -> None:
    """Promise 2: DDP's gradient is the textbook all-reduce and that of the whole batch."""
    config = settings(
        dropout=0.0, precision="fp64", batch_size=5, class_weights=class_weights, max_grad_norm=0.0
    )
    for kept in ranks.run(world_size, jobs.first_gradients, config):
        for ddp, by_hand, full in zip(kept["ddp"], kept["by hand"], kept["full"], strict=True):
            torch.testing.assert_close(ddp, full, rtol=1e-9, atol=1e-12)
            torch.testing.assert_close(by_hand, full, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_nothing_waits_off_the_logging_step(
    ranks: Ranks, settings: Settings, micro_batches: int
) -> None:
    """Between two lines of the log a step prints nothing, and has one collective besides that of
    the gradients: the agreement on stopping, on the CPU. It reads one value: whether the step
    before was skipped, which a device has copied to the host meanwhile.

    transformers looks once in each forward whether a batch has padding, since only
    without a mask there is flash attention; for that the host waits for a device. Where the device
    is what limits the speed, it then has nothing to do for about as long as starting one kernel
    takes; a mask for all batches would cost those without padding more.
    """
    size = 16 // micro_batches
    config = settings(log_every=6, max_steps=12, evals_per_epoch=0, batch_size=size)
    expected = {"reads": 1, "reads of the mask": micro_batches, "allreduce_": 2}
    for counts in ranks.run(2, jobs.syncs_per_step, config):
        assert [counts[step - 1] for step in (3, 4, 5, 9, 10)] == [expected] * 5


def test_one_all_reduce_per_step(ranks: Ranks, settings: Settings) -> None:
    """Promise 3: gradients cross the network once per optimizer step, four micro-batches or one."""
    config = settings(batch_size=4, epochs=1)
    for counts in ranks.run(2, jobs.all_reduces_per_step, config):
        assert counts == [1] * 7


def test_ranks_agree(ranks: Ranks, settings: Settings) -> None:
    """Promise 6: same first weights and label ids on every rank, other dropout on each."""
    results = ranks.run(3, jobs.dropout_and_weights, settings(max_steps=1))
    masks, weights, labels = zip(*results, strict=True)
    assert masks[0] != masks[1] != masks[2] != masks[0]
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))
    assert labels[0] == labels[1] == labels[2] == ["animal", "food", "weather"]


def test_bits_of_any_tensor_are_summed() -> None:
    """Of odd sizes, half precision, and parts of a larger tensor; another bit is another sum."""
    for kind in (torch.float32, torch.bfloat16, torch.float64):
        whole = torch.arange(1, 14).to(kind)
        for part in (whole, whole[1:], whole[3:8], whole[4:5], whole[0]):
            before = int(replicas.checksum(part))
            assert int(replicas.checksum(part.clone())) == before
            changed = part.clone()
            changed.view(-1)[-1] += 1
            assert int(replicas.checksum(changed)) != before


def test_replicas_that_diverge_stop_the_run(ranks: Ranks, settings: Settings) -> None:
    """Promise 6: weights that differ between ranks are found at the next evaluation."""
    with pytest.raises(RankError, match=r"weights of ranks \[1\] differ"):
        ranks.run(2, jobs.drift, settings(max_steps=2))


def test_every_precision_trains(ranks: Ranks, settings: Settings) -> None:
    """Promise 7: bf16 and fp16 follow fp32, and checkpointing changes no gradient."""
    changes: list[dict[str, Any]] = [
        {},
        {"gradient_checkpointing": True},
        {"precision": "bf16"},
        {"precision": "fp16"},
    ]
    configs = [settings(run_name=str(i), dropout=0.0, epochs=1) for i in range(len(changes))]
    configs = [replace(c, **v) for c, v in zip(configs, changes, strict=True)]
    configs[2] = replace(configs[2], gradient_checkpointing=True, batch_size=4)
    ranks.run(2, jobs.many_runs, configs)
    plain, checkpointed, bf16, fp16 = (
        np.array([[line["loss"], line["grad_norm"]] for line in lines_of(c)]) for c in configs
    )
    np.testing.assert_array_equal(plain, checkpointed)
    for half in (bf16, fp16):
        assert np.isfinite(half).all()
        np.testing.assert_allclose(half[:, 0], plain[:, 0], rtol=0.05)
        np.testing.assert_allclose(half[:, 1], plain[:, 1], rtol=0.3)  # unscaled before clipping


def test_loader_workers_change_nothing(ranks: Ranks, settings: Settings) -> None:
    """Bit-identical numbers with worker processes, and no warning about forks."""
    configs = [settings(run_name=str(n), num_workers=n, epochs=1) for n in (0, 2)]
    ranks.run(1, jobs.many_runs, configs)
    losses = [[line["loss"] for line in lines_of(c)] for c in configs]
    assert losses[0] == losses[1]
    assert "forked" not in (ranks.folder / "rank0.log").read_text("utf-8")


def test_dropout_trains_and_differs(ranks: Ranks, settings: Settings) -> None:
    """--dropout reaches the model: another loss, in every architecture that names it otherwise."""
    configs = [settings(run_name=str(p), dropout=p, max_steps=1) for p in (0.0, 0.5)]
    ranks.run(1, jobs.many_runs, configs)
    assert lines_of(configs[0])[0]["loss"] != lines_of(configs[1])[0]["loss"]


def test_frozen_encoder(ranks: Ranks, settings: Settings, tiny_model: Path) -> None:
    """--freeze-encoder leaves the encoder's weights and trains the head."""
    config = settings(freeze_encoder=True, max_steps=3)
    ranks.run(2, jobs.run, config)
    before = jobs.weights_of(tiny_model)
    after = jobs.weights_of(Path(config.runs_dir) / "run" / "checkpoints" / "step-00000003")
    changed = {
        name for name in after if not torch.equal(after[name], before.get(name, after[name]))
    }
    assert not any(name.startswith("bert.") for name in changed)
