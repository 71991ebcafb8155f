"""A BERT with random weights, for tests: made in a second, trained in a few."""

from collections.abc import Iterable
from pathlib import Path

import torch
from transformers import BertConfig, BertForSequenceClassification

from training.dataset.tokenizer import train_wordpiece


def save_tiny(folder: Path, texts: Iterable[str], **shape: int) -> Path:
    """Make `folder`, as it would come from the hub, with a vocabulary for `texts`.

    It has some ten thousands of parameters, if `shape` does not say otherwise.
    """
    tokenizer = train_wordpiece(iter(texts))
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
        "intermediate_size": 48, "max_position_embeddings": 64,
    }  # fmt: skip
    config = BertConfig(vocab_size=len(tokenizer), **sizes | shape)
    torch.manual_seed(0)  # the same in every session
    tokenizer.model_max_length = config.max_position_embeddings
    BertForSequenceClassification(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder
