"""Devices and the network between them, and what the ranks of a machine share."""

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any

import machines
import pytest
import torch
from ranks import RankError, Ranks

from training.distributed import ranks as distributed
from training.launch import launcher
from training.settings.errors import HUNG, UserError


def test_a_broken_network_is_met_first(ranks: Ranks) -> None:
    """The first collective is part of `setup`; its failure is one line that says what to check."""
    with pytest.raises(RankError, match="NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME") as error:
        ranks.run(2, machines.broken_network, "unhandled system error\nLast error: no route")
    assert error.value.kinds == ["UserError", "UserError"]
    for rank in (0, 1):
        words = f"the first collective on cpu (rank {rank}, {platform.node()}) failed (unhandled "
        assert words + "system error Last error: no route): check the network" in str(error.value)


def test_a_silent_network_ends_the_rank(ranks: Ranks) -> None:
    assert ranks.run(2, machines.silent_network) == [[HUNG], [HUNG]]


def test_ranks_of_a_machine_share_a_result_or_a_failure(ranks: Ranks) -> None:
    """Each machine its own; a failure of its local rank 0 ends its ranks, and only these."""
    ranks.run(1, machines.shared_results, 1)  # a run before, of fewer ranks
    for one_name in (False, True):
        results = ranks.run(4, machines.shared_results, 2, None, one_name)
        assert results == [["0, 0", "0, 1"]] * 2 + [["1, 0", "1, 1"]] * 2
    with pytest.raises(RankError, match="rank 2: OSError: broken") as error:
        ranks.run(4, machines.shared_results, 2, 1)
    assert error.value.kinds == ["OSError", "MainProcessError"]


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """Make PyTorch see devices; what `setup` gives to init_process_group is kept."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"):
        monkeypatch.delenv(name, raising=False)
    given: dict[str, Any] = {}

    def join(backend: str, **options: Any) -> None:
        given.update(options, backend=backend)

    def make(kind: str, count: int) -> dict[str, Any]:
        found, chosen = torch.device(kind), given.setdefault("index", [])
        monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda **_: found)
        monkeypatch.setattr(torch.accelerator, "device_count", lambda: count)
        monkeypatch.setattr(torch.accelerator, "set_device_index", chosen.append)
        monkeypatch.setattr(torch.distributed, "init_process_group", join)
        monkeypatch.setattr(torch, "ones", lambda *_, device: given.update(first=device))
        monkeypatch.setattr(distributed, "reduce_tensor", lambda _: torch.tensor(1.0))
        return given

    return make


def test_devices_are_connected_in_setup(accelerator: Callable[..., dict[str, Any]]) -> None:
    given = accelerator("cuda", 2)
    device, _ = distributed.setup()
    assert device == given["device_id"] == given["first"] == torch.device("cuda", 0)
    assert given["backend"] == "cpu:gloo,cuda:nccl"
    assert given["index"] == [0]


def test_a_device_without_float64_is_not_used(
    accelerator: Callable[..., dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    """Apple's: ranks compute on the CPU, and say so."""
    given = accelerator("mps", 1)
    with caplog.at_level("WARNING"):
        assert distributed.setup()[0] == torch.device("cpu")
    assert (given["backend"], given["device_id"]) == ("gloo", None)
    assert caplog.messages == ["this machine's GPU has no float64: training on the CPU"]
    assert launcher.default_ranks() <= 2


def test_one_visible_device_for_each_task(
    accelerator: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`srun --gpus-per-task=1`: device 0 whatever the local rank. torchrun's ranks see the same
    devices: there, too many ranks are a mistake."""
    accelerator("cuda", 1)
    assert [distributed.choose_device(rank).index for rank in (0, 3)] == [0, 0]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(UserError, match=r"local_rank 3 has no device: .* --nproc-per-node 1"):
        distributed.choose_device(3)
    accelerator("cuda", 4)
    assert distributed.choose_device(3).index == 3


def test_flight_recorder(ranks: Ranks, tmp_path: Path) -> None:
    """What a rank's last collectives were is written where PyTorch's variable says."""
    for rank, (path, names) in enumerate(
        ranks.run(2, machines.recorded_collectives, str(tmp_path / "x_"))
    ):
        assert path == str(tmp_path / f"x_{rank}")
        # In torch 2.8 only NCCL records its collectives.
        assert "gloo:all_reduce" in names or torch.__version__ < "2.9"
