"""What the settings ask of any model, whoever built it: device, dtype, dropout, less memory; and
the backend that compiles it."""

import logging
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassFieldValidationError
from torch import nn
from torch.nn.modules.dropout import _DropoutNd
from transformers import PreTrainedConfig

from training.distributed.wrap import hugging_face_parts
from training.settings.config import TrainConfig
from training.settings.errors import UserError
from training.settings.versions import activation_checkpointing

log = logging.getLogger("training")


def prepare_model(model: nn.Module, config: TrainConfig, device: torch.device) -> nn.Module:
    """Return `model`, changed in place: on `device`, or for FSDP on the CPU, since the device may
    not hold all of it. Errors: UserError if it cannot do what is asked."""
    home = torch.device("cpu") if config.strategy == "fsdp" else device
    model.to(home, torch.float64 if config.precision == "fp64" else None)
    set_dropout(model, config.dropout)
    is_frozen = not all(parameter.requires_grad for parameter in model.parameters())
    if (config.freeze_encoder or config.freeze_embeddings) and not is_frozen:
        raise UserError("model.py: --freeze-encoder or --freeze-embeddings froze nothing")
    if config.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    return model


def set_dropout(model: nn.Module, dropout: float | None) -> None:
    """Set every dropout of a model that is built, unless it is None, and its layerdrop to 0."""
    for module in model.modules():
        set_rates(module, dropout)  # where a layer keeps the number, or its configuration does
        if dropout is not None and isinstance(module, _DropoutNd):
            module.p = dropout


def set_rates(holder: nn.Module | PreTrainedConfig, dropout: float | None) -> None:
    """Set the dropouts among the numbers of a module or a configuration, unless it is None, and
    layerdrop to 0. Each architecture has its own names.

    Layerdrop leaves out whole layers: ranks would leave out different ones. Errors: UserError if an
    architecture takes no such value.
    """
    is_open = isinstance(holder, PreTrainedConfig)  # there None stands for a number
    for name, value in list(vars(holder).items()):
        if isinstance(value, PreTrainedConfig):  # composite models: a text model, encoder, decoder
            set_rates(value, dropout)
        elif type(value) not in (int, float) and not (is_open and value is None):
            continue  # a switch, such as ESM's token_dropout
        elif "layerdrop" in name and value:
            log.info("%s is 0 here, not %s: all layers are trained", name, value)
            setattr(holder, name, 0.0)
        elif dropout not in (None, value) and ("dropout" in name or name.endswith("pdrop")):
            try:
                setattr(holder, name, dropout)
            except StrictDataclassFieldValidationError:  # MPT declares a whole number
                raise UserError(f"dropout {dropout}: this model's {name} must be {value}") from None


def enable_gradient_checkpointing(model: nn.Module) -> None:
    """For the Hugging Face models in `model`, or itself. Errors: UserError if it cannot be done."""
    if not (parts := hugging_face_parts(model)):
        kind = type(model).__name__
        raise UserError(f"--gradient-checkpointing is for Hugging Face models; {kind} holds none")
    for part in parts:
        if not part.supports_gradient_checkpointing:
            raise UserError(f"{type(part).__name__} does not support --gradient-checkpointing")
        part.config.get_text_config().use_cache = False  # of decoders: it does not go with this
        activation_checkpointing(part)({"use_reentrant": False})


class CompileCounter:
    """torch.compile's default backend, which also counts graphs: one a step, or with DDP one for
    each bucket of gradients."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        from torch._dynamo import lookup_backend  # takes seconds to import

        self.graphs += 1
        log.info(f"torch.compile: compiling graph {self.graphs}")
        return lookup_backend("inductor")(graph, inputs)
