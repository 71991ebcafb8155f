"""Random numbers: one seed for what ranks share, a state per rank for what they do not."""

import logging
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from training.distributed.ranks import gather

log = logging.getLogger("training")


def seed_everything(seed: int) -> None:
    """Seed Python, numpy, and PyTorch on every device."""
    random.seed(seed)
    np.random.seed(seed % 2**32)
    torch.manual_seed(seed)


class RankRng:
    """The random state of every rank, as a part of a checkpoint."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def state_dict(self) -> dict[str, Any]:
        """Call on every rank."""
        return {"ranks": gather(rng_state(self.device))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved, world_size = state["ranks"], dist.get_world_size()
        if len(saved) == world_size:
            set_rng_state(saved[dist.get_rank()], self.device)
        else:
            log.warning(
                "the run had %d ranks and now has %d: steps have the same rows as before, but "
                "dropout draws other numbers",
                len(saved),
                world_size,
            )


def rng_state(device: torch.device) -> dict[str, Any]:
    """This rank's random state, as plain types."""
    state: dict[str, Any] = {"python": random.getstate(), "torch": _bytes(torch.get_rng_state())}
    name, keys, *rest = np.random.get_state()
    state["numpy"] = [str(name), np.asarray(keys).tolist(), *rest]
    if device.type != "cpu":
        state["device"] = _bytes(torch.get_device_module(device).get_rng_state(device))
    return state


def set_rng_state(state: dict[str, Any], device: torch.device) -> None:
    """Restore what `rng_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, np.uint32), *rest))
    torch.set_rng_state(_tensor(state["torch"]))
    if device.type != "cpu" and "device" in state:
        torch.get_device_module(device).set_rng_state(_tensor(state["device"]), device)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.numpy().tobytes()


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
