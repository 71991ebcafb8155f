"""The model: which encoder and tokenizer, the head, and the loss. EDIT ME to try another model.

Nothing here knows about ranks: train.py runs the same model on one process or on many.
"""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoConfig, PreTrainedModel
from transformers import PreTrainedTokenizerBase as Tokenizer

from training.checkpoint.pretrained import freeze, load_classifier, load_hf_config, set_dropout
from training.checkpoint.pretrained_tokenizer import load_hf_tokenizer, save_preparation
from training.dataset.tokenizer import train_wordpiece
from training.settings.config import FROM_SCRATCH, TrainConfig


def build_model(config: TrainConfig, tokenizer: Tokenizer, labels: list[str]) -> PreTrainedModel:
    """A classifier for these labels, in fp32; fp16 and bf16 come from autocast.

    Any nn.Module will do. Its forward takes the tensors of a batch by name (`input_ids`,
    `attention_mask`, both (batch, length)) and returns logits (batch, num_labels), or an object
    that has them as `.logits`. With `config.pretrained` False no weights may be read here: saved
    ones are loaded into what this returns.
    """
    if config.model == FROM_SCRATCH:
        size = {"hidden_size": 192, "num_attention_heads": 4, "intermediate_size": 512}
        model_config = AutoConfig.for_model("bert", num_hidden_layers=2, **size)
        model_config.vocab_size = len(tokenizer)
        model_config.max_position_embeddings = max(512, config.max_length)
    else:
        model_config = load_hf_config(config)
    set_dropout(model_config, config.dropout)
    model = load_classifier(config, model_config, tokenizer, labels)
    freeze(model, config)
    return model


def loss_per_row(logits: Tensor, labels: Tensor, config: TrainConfig) -> Tensor:
    """The loss of each row, in training and evaluation: (batch, num_labels), (batch,) -> (batch,).

    Rows are weighted and averaged elsewhere. A setting of yours is a field of TrainConfig.
    """
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if labels.ndim == 2:  # multi-label: (batch, num_labels) of 0 and 1
        losses = F.binary_cross_entropy_with_logits(logits, labels.to(logits), reduction="none")
        return losses.mean(dim=1)
    return F.cross_entropy(logits, labels, reduction="none", label_smoothing=config.label_smoothing)


def build_tokenizer(config: TrainConfig, texts: Iterator[str]) -> Tokenizer:
    """The model's tokenizer, or a WordPiece vocabulary trained on `texts` (from scratch)."""
    from_scratch = config.model == FROM_SCRATCH
    tokenizer = train_wordpiece(texts) if from_scratch else load_hf_tokenizer(config)
    return save_preparation(tokenizer, config)
