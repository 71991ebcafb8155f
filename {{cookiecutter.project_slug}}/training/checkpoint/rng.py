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
        name, keys, *rest = np.random.get_state()
        own: dict[str, Any] = {"torch": torch.get_rng_state(), "python": random.getstate()}
        own["numpy"] = str(name), np.asarray(keys).tolist(), *rest
        if self.device.type != "cpu":
            own["device"] = torch.get_device_module(self.device).get_rng_state(self.device)
        return {"ranks": gather(own)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        saved, world_size = state["ranks"], dist.get_world_size()
        if len(saved) != world_size:
            log.warning(
                f"the run had {len(saved)} ranks and now has {world_size}: steps have the same "
                "rows as before, but dropout draws other numbers"
            )
            return
        own = saved[dist.get_rank()]
        random.setstate(own["python"])
        np.random.set_state(own["numpy"])
        torch.set_rng_state(own["torch"])
        if self.device.type != "cpu" and "device" in own:
            torch.get_device_module(self.device).set_rng_state(own["device"], self.device)
