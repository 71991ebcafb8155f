"""Pretrained Hugging Face models of any architecture: what model.py asks of them.

A name stands for a model of the hub or a folder. Code that comes with a model is never run, and
nothing is asked on standard input, unless `trust_remote_code` says so.
"""

import json
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import HfApi
from safetensors import SafetensorError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer
from transformers.utils import find_adapter_config_file

from training.distributed.prepare_model import set_rates
from training.distributed.ranks import local_main_first
from training.distributed.wrap import hugging_face_parts
from training.settings.config import FROM_SCRATCH, TrainConfig
from training.settings.errors import UserError

log = logging.getLogger("training")
NO_LIMIT = 10**9


# -- configuration -------------------------------------------------------------------------------


def load_hf_config(config: TrainConfig) -> PreTrainedConfig:
    """The configuration of `config.model`. Errors: UserError if it is not a model to train."""
    name, remote = config.model, config.trust_remote_code
    options: dict[str, Any] = {"local_files_only": True}
    try:
        with local_main_first("configuration", name) as is_cached:
            try:
                content, _ = PreTrainedConfig.get_config_dict(name, **options)
            except OSError:
                if is_cached:
                    raise
                if not Path(name).is_dir():
                    HfApi().model_info(name, timeout=10)  # fails soon; a download retries long
                content, options = {}, {}
            adapter = "model_type" not in content and find_adapter_config_file(name, **options)
            if adapter:
                base = json.loads(Path(adapter).read_text("utf-8")).get("base_model_name_or_path")
                raise UserError(f"{name} is a LoRA adapter of {base}; merge it first")
            content = content or PreTrainedConfig.get_config_dict(name, **options)[0]
            is_known = content.get("model_type") in transformers.CONFIG_MAPPING
            check_trust(config, "AutoConfig" in content.get("auto_map", {}) and not is_known)
            if content.get("quantization_config"):
                problem = f"{name} has quantized weights"
                raise UserError(f"{problem}; give the model that they were made of")
            return transformers.AutoConfig.from_pretrained(
                name, trust_remote_code=remote, **options
            )
    except UserError:
        raise
    except Exception as error:  # of the file system, or any of the network client's kinds
        raise UserError(
            f"model {name!r} is neither a model folder nor a Hugging Face model that can be "
            f"reached from here; check the name and the network ({first_line(error)})"
        ) from None


def check_trust(config: TrainConfig, is_needed: bool) -> None:
    if is_needed and not config.trust_remote_code:
        problem = f"{config.model} needs Python code that comes with it"
        raise UserError(f"{problem}; read it, and give --trust-remote-code if you trust it")


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def longest_input(model_config: PreTrainedConfig) -> int:
    """The most tokens that a model has positions for; NO_LIMIT if any number will do."""
    limit = getattr(model_config.get_text_config(), "max_position_embeddings", None) or 0
    model: nn.Module = nn.Module()
    if type(model_config) in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        with torch.device("meta"):  # no memory, no weights
            model = transformers.AutoModelForSequenceClassification.from_config(model_config)
    for name, module in model.named_modules():
        padding = getattr(module, "padding_idx", None)
        if "position" in name.rpartition(".")[2] and padding is not None and limit > 0:
            # These count positions from behind the padding's.
            limit = min(limit, module.weight.shape[0] - padding - 1)
    return limit if limit > 0 else NO_LIMIT


def set_dropout(model_config: PreTrainedConfig, dropout: float | None) -> None:
    """Set every dropout before the model is built: some types make no layer for a dropout of 0."""
    set_rates(model_config, dropout)


# -- weights -------------------------------------------------------------------------------------


def load_classifier(
    config: TrainConfig, model_config: PreTrainedConfig, tokenizer: Tokenizer, labels: list[str]
) -> PreTrainedModel:
    """The sequence classifier of `model_config` for `labels`, in fp32, with the weights of
    `config.model`. Its head is new if that was trained for other labels. The names of all new
    weights are in `model.config.new_weights`. Errors: UserError if there is no such classifier."""
    name, trained_for = config.model, list(model_config.id2label.values())
    _check_classifier(config, model_config)
    for part in {id(c): c for c in (model_config, model_config.get_text_config())}.values():
        part.id2label = dict(enumerate(labels))
        part.label2id = {label: i for i, label in enumerate(labels)}
        part.pad_token_id = tokenizer.pad_token_id
        kind = "multi" if config.multi_label else "single"
        part.problem_type = f"{kind}_label_classification"
    options = {"dtype": torch.float32, "trust_remote_code": config.trust_remote_code}
    if name == FROM_SCRATCH or not config.pretrained:
        return transformers.AutoModelForSequenceClassification.from_config(model_config, **options)
    try:
        with local_main_first("weights", name) as is_cached:
            model, info = transformers.AutoModelForSequenceClassification.from_pretrained(
                name,
                config=model_config,
                ignore_mismatched_sizes=True,  # another number of labels
                output_loading_info=True,
                local_files_only=is_cached,
                **options,
            )
    except (OSError, SafetensorError) as error:
        raise UserError(f"{name}: its weights cannot be read ({first_line(error)})") from None
    new = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    in_base = {id(p) for p in model.base_model.parameters()}
    head = {key: p for key, p in model.named_parameters() if id(p) not in in_base}
    if all(key in new for key, p in model.named_parameters() if id(p) in in_base):
        kind = type(model).__name__
        raise UserError(f"{name} has no weights of a {kind}, as its config.json says; check both")
    if trained_for != labels and not info["missing_keys"] & head.keys():  # it had a trained head
        _initialize(model, head)
        new |= head.keys()
    shown = sorted({key.rpartition(".")[0] for key in new})
    log.info(
        "new weights, to be trained: %s", ", ".join(shown) or "none, the head has these labels"
    )
    model.config.new_weights = sorted(new)
    return model


def _check_classifier(config: TrainConfig, model_config: PreTrainedConfig) -> None:
    if type(model_config) not in transformers.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING:
        own_classes = getattr(model_config, "auto_map", None) or {}
        if "AutoModelForSequenceClassification" not in own_classes:
            kind = f"{config.model} is a {model_config.model_type!r}"
            raise UserError(f"{kind}, which has no sequence classifier; choose another model")
        check_trust(config, is_needed=True)


def _initialize(model: PreTrainedModel, head: dict[str, nn.Parameter]) -> None:
    """Give these parameters, all of the modules outside the base model, new random values."""
    in_base = set(model.base_model.modules())
    for marked in (*head.values(), *(m for m in model.modules() if m not in in_base)):
        marked._is_hf_initialized = False  # transformers leaves what has this mark as it is
    model.initialize_weights()


# -- switches ------------------------------------------------------------------------------------


def freeze(model: nn.Module, config: TrainConfig) -> None:
    """--freeze-encoder and --freeze-embeddings for the Hugging Face models in `model`, or itself.

    New weights stay trainable: a pooler that the pretrained model did not have, for one.
    """
    for part in hugging_face_parts(model):
        if config.freeze_encoder:
            new = {part.get_parameter(key) for key in getattr(part.config, "new_weights", ())}
            for parameter in part.base_model.parameters():
                parameter.requires_grad_(parameter in new)
        if config.freeze_embeddings:
            part.get_input_embeddings().requires_grad_(False)
