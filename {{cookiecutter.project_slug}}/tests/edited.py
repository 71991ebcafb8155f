"""What a user may write in model.py: `build_*` takes the place of build_model."""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel

from model import build_model
from training.settings.config import FROM_SCRATCH, TrainConfig


def build_two_layer_head(config: TrainConfig, tokenizer: Any, labels: list[str]) -> nn.Module:
    """A class of transformers with another head."""
    model: Any = build_model(config, tokenizer, labels)
    width = model.classifier.in_features
    model.classifier = nn.Sequential(
        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, len(labels))
    )
    return model


class Pooled(nn.Module):
    """An encoder of transformers with a mean over its tokens and a head."""

    def __init__(self, encoder: Any, num_labels: int, use_mask: bool = True) -> None:
        super().__init__()
        self.encoder, self.use_mask = encoder, use_mask
        self.head = nn.Linear(encoder.config.hidden_size, num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids, attention_mask).last_hidden_state
        mask = attention_mask if self.use_mask else torch.ones_like(attention_mask)
        mask = mask[:, :, None].to(hidden)
        return self.head((hidden * mask).sum(1) / mask.sum(1))


def build_pooled(
    config: TrainConfig, tokenizer: Any, labels: list[str], use_mask: bool = True
) -> nn.Module:
    if config.model == FROM_SCRATCH or not config.pretrained:
        source = config.model if config.model != FROM_SCRATCH else "bert"
        encoder = AutoModel.from_config(AutoConfig.from_pretrained(source))
    else:
        encoder = AutoModel.from_pretrained(config.model)
    return Pooled(encoder, len(labels), use_mask)


def build_pooled_without_mask(config: TrainConfig, tokenizer: Any, labels: list[str]) -> nn.Module:
    return build_pooled(config, tokenizer, labels, use_mask=False)


class LSTM(nn.Module):
    """Nothing of transformers: embeddings, an LSTM, the state at the last token of each row."""

    def __init__(self, vocabulary: int, num_labels: int, width: int = 24) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(input_ids))
        last = attention_mask.sum(1) - 1
        return self.head(states[torch.arange(len(states), device=states.device), last])


def build_lstm(config: TrainConfig, tokenizer: Any, labels: list[str]) -> nn.Module:
    return LSTM(len(tokenizer), len(labels))


class LastStep(LSTM):
    """Reads the last position, which is padding in all but the longest row."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.head(self.lstm(self.embedding(input_ids))[0][:, -1])


def build_last_step(config: TrainConfig, tokenizer: Any, labels: list[str]) -> nn.Module:
    return LastStep(len(tokenizer), len(labels))


class WithoutMask(LSTM):
    def forward(self, input_ids: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(input_ids, torch.ones_like(input_ids))


def build_without_mask(config: TrainConfig, tokenizer: Any, labels: list[str]) -> nn.Module:
    return WithoutMask(len(tokenizer), len(labels))


class Projected(LSTM):
    """What its logits depend on is not a part of its state."""

    def __init__(self, vocabulary: int, num_labels: int) -> None:
        super().__init__(vocabulary, num_labels)
        self.scale = torch.rand(num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return super().forward(input_ids, attention_mask) * self.scale


def build_projected(config: TrainConfig, tokenizer: Any, labels: list[str]) -> nn.Module:
    return Projected(len(tokenizer), len(labels))


def build_small_table(config: TrainConfig, tokenizer: Any, labels: list[str]) -> nn.Module:
    return LSTM(len(tokenizer) // 2, len(labels))


def build_with_unused_layer(config: TrainConfig, tokenizer: Any, labels: list[str]) -> nn.Module:
    model = build_model(config, tokenizer, labels)
    model.head_of_old = nn.Linear(3, 3)
    return model


class Normalized(LSTM):
    """Its running statistics are those of a rank's own micro-batches."""

    def __init__(self, vocabulary: int, num_labels: int) -> None:
        super().__init__(vocabulary, num_labels)
        self.norm = nn.BatchNorm1d(num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        return self.norm(super().forward(input_ids, attention_mask))


def build_normalized(config: TrainConfig, tokenizer: Any, labels: list[str]) -> nn.Module:
    return Normalized(len(tokenizer), len(labels))


def build_not_logits(config: TrainConfig, tokenizer: Any, labels: list[str]) -> nn.Module:
    class States(LSTM):
        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Any:
            return self.lstm(self.embedding(input_ids))

    return States(len(tokenizer), len(labels))
