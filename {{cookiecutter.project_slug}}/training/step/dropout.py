"""`--dropout` for a model that is built already, whoever built it."""

import logging

from torch import nn
from torch.nn.modules.dropout import _DropoutNd

log = logging.getLogger("training")


def set_dropout(model: nn.Module, probability: float | None) -> None:
    """Set every dropout of `model`, if there is a probability, and its layerdrop to 0.

    Layerdrop leaves out whole layers, by chance on each rank, which then get no gradient there.
    """
    layerdrop = 0.0
    for module in model.modules():
        # Where a layer keeps the number itself, or reads it from its configuration.
        for holder in (module, getattr(module, "config", None)):
            for name, value in list(getattr(holder, "__dict__", {}).items()):
                if type(value) not in (int, float):
                    continue
                if "layerdrop" in name and value:
                    layerdrop = max(layerdrop, value)
                    setattr(holder, name, 0.0)
                elif probability is not None and ("dropout" in name or name.endswith("pdrop")):
                    setattr(holder, name, probability)
        if probability is not None and isinstance(module, _DropoutNd):
            module.p = probability
    if layerdrop:
        log.info(f"layerdrop {layerdrop} is set to 0: ranks would train different layers")
