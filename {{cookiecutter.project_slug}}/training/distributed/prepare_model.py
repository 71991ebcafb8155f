"""What the settings ask of any model, whoever built it: device, dtype, dropout, less memory."""

import logging
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.dropout import _DropoutNd

from training.distributed.wrap import hugging_face_parts
from training.settings.config import TrainConfig
from training.settings.errors import UserError

log = logging.getLogger("training")


def prepare_model(model: nn.Module, config: TrainConfig, device: torch.device) -> nn.Module:
    """Return `model`, changed in place. Errors: UserError if it cannot do what is asked."""
    model.to(device, torch.float64 if config.precision == "fp64" else None)
    set_dropout(model, config.dropout)
    is_frozen = not all(parameter.requires_grad for parameter in model.parameters())
    if (config.freeze_encoder or config.freeze_embeddings) and not is_frozen:
        raise UserError("model.py: --freeze-encoder or --freeze-embeddings froze nothing")
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


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


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """For the Hugging Face models in `model`, or itself. Errors: UserError if it cannot be done."""
    if not (parts := hugging_face_parts(model)):
        kind = type(model).__name__
        raise UserError(f"--gradient-checkpointing is for Hugging Face models; {kind} holds none")
    for part in parts:
        if not part.supports_gradient_checkpointing:
            raise UserError(f"{type(part).__name__} does not support --gradient-checkpointing")
        # The first is the name from transformers 6 on; before 5.24 there is only the second.
        names = ("activation_checkpointing_enable", "gradient_checkpointing_enable")
        enable: Callable = next(getattr(part, name) for name in names if hasattr(part, name))
        part.config.get_text_config().use_cache = False  # of decoders: it does not go with this
        enable({"use_reentrant": False})
