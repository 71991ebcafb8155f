"""The model: which encoder and tokenizer, the head, and the loss. EDIT ME to try another model.

Nothing here knows about ranks: train.py runs the same model on one process or on many.
"""

import logging
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from huggingface_hub import HfApi
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers import (
    PreTrainedTokenizerBase as Tokenizer,
)

from training.dataset.tokenizer import train_wordpiece
from training.settings.config import FROM_SCRATCH, TrainConfig
from training.settings.errors import UserError

log = logging.getLogger("training")


def build_model(config: TrainConfig, tokenizer: Tokenizer, labels: list[str]) -> PreTrainedModel:
    """A sequence classifier for these labels, in fp32; fp16 and bf16 come from autocast."""
    from_scratch = config.model == FROM_SCRATCH
    if from_scratch:
        size = {"hidden_size": 192, "num_attention_heads": 4, "intermediate_size": 512}
        model_config = AutoConfig.for_model("bert", num_hidden_layers=2, **size)
        model_config.vocab_size = len(tokenizer)
        model_config.max_position_embeddings = max(512, config.max_length)
    else:
        model_config = load_hf_config(config)
    trained_for = list(model_config.id2label.values())
    columns = {"text_column": list(config.text_column), "text_pair_column": config.text_pair_column}
    head = {
        "id2label": dict(enumerate(labels)),
        "label2id": {label: i for i, label in enumerate(labels)},
        "problem_type": f"{'multi' if config.multi_label else 'single'}_label_classification",
        "pad_token_id": tokenizer.pad_token_id,
        "preprocessing": {"truncate": config.truncate, **columns},  # predict.py does the same
    }
    model_config.update(head)
    set_dropout(model_config, config.dropout)
    if from_scratch or not config.pretrained:
        return AutoModelForSequenceClassification.from_config(model_config)
    model, info = AutoModelForSequenceClassification.from_pretrained(
        config.model,
        config=model_config,
        dtype=torch.float32,
        ignore_mismatched_sizes=True,  # another number of labels: a new head, said below
        output_loading_info=True,
        trust_remote_code=config.trust_remote_code,
    )
    new = sorted({*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])})
    if not new and trained_for != labels:  # a head for other labels of the same number
        for name, module in model.named_children():
            if name != model.base_model_prefix:
                module.apply(model._init_weights)
                new.append(name)
    log.info("new weights, to be trained: %s", ", ".join(new) or "none, the head has these labels")
    if config.freeze_embeddings:
        model.get_input_embeddings().requires_grad_(False)
    if config.freeze_encoder:
        model.base_model.requires_grad_(False)
    return model


def build_tokenizer(config: TrainConfig, texts: Iterator[str]) -> Tokenizer:
    """The model's tokenizer, or a WordPiece vocabulary trained on `texts` (from scratch)."""
    if config.model == FROM_SCRATCH:
        tokenizer = train_wordpiece(texts)
    else:
        known = load_hf_config(config)
        remote = config.trust_remote_code
        tokenizer = AutoTokenizer.from_pretrained(config.model, trust_remote_code=remote)
        limit = min(longest_input(known), tokenizer.model_max_length)
        if config.max_length > limit:
            too_long = f"max_length {config.max_length} is more than {config.model} can read"
            raise UserError(f"{too_long}; give --max-length {limit} or less")
        if len(tokenizer) < known.vocab_size / 2:  # transformers silently makes an empty one
            raise UserError(f"{config.model} has no tokenizer of its own; add its files")
        if tokenizer.pad_token is None:  # decoders
            tokenizer.pad_token = tokenizer.eos_token
    # Saved with the tokenizer, so that texts are cut where training cut them.
    tokenizer.model_max_length = config.max_length
    tokenizer.truncation_side = "left" if config.truncate == "tail" else "right"
    return tokenizer


def loss_per_row(logits: Tensor, labels: Tensor, config: TrainConfig) -> Tensor:
    """The loss of each row, which train.py weights: (batch, num_labels), (batch,) -> (batch,)."""
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if labels.ndim == 2:  # multi-label: (batch, num_labels) of 0 and 1
        losses = F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none")
        return losses.mean(dim=1)
    smoothing = config.label_smoothing
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)


def load_hf_config(config: TrainConfig) -> PreTrainedConfig:
    """The configuration of a pretrained model. Errors: UserError if there is no such model."""
    options = {"trust_remote_code": config.trust_remote_code}
    try:
        try:
            return AutoConfig.from_pretrained(config.model, local_files_only=True, **options)
        except OSError:
            HfApi().model_info(config.model, timeout=10)  # fails soon; a download would retry long
            return AutoConfig.from_pretrained(config.model, **options)
    except Exception as error:  # of the file system, or any of the network client's kinds
        reason = str(error).strip().splitlines()[0]
        raise UserError(
            f"model {config.model!r} is neither a model folder nor a Hugging Face model that can "
            f"be reached from here; check the name and the network ({reason})"
        ) from None


def longest_input(model_config: PreTrainedConfig) -> int:
    """The most tokens that a pretrained model has positions for."""
    positions = getattr(model_config, "max_position_embeddings", None) or 10**9
    if "roberta" in model_config.model_type or model_config.model_type == "camembert":
        positions -= model_config.pad_token_id + 1  # these count positions from behind the padding
    return positions


def set_dropout(model_config: PreTrainedConfig, dropout: float | None) -> None:
    """Set every dropout of the model; each architecture has its own names for them."""
    for name, value in model_config.to_dict().items():
        is_dropout = "dropout" in name or name.endswith("pdrop")
        if dropout is not None and is_dropout and isinstance(value, float | int | None):
            setattr(model_config, name, dropout)
