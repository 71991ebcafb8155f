"""The start check: the model is tried on a few rows before the first step.

What cannot work ends the run with one line; it would otherwise show hours later, or never.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from training.dataset.token_store import Batch, Splits
from training.distributed.ranks import on_main
from training.distributed.wrap import HALF, word_embeddings
from training.settings.config import TrainConfig
from training.settings.errors import UserError
from training.step.batch_plan import TOO_LITTLE_MEMORY
from training.step.evaluation import inference
from training.step.loss import ModelWithLoss, check_forward_arguments, logits_of

log = logging.getLogger("training")
Inputs = dict[str, Tensor]
TRIED_ROWS = 4
TOKENS = ("input_ids", "attention_mask", "token_type_ids")  # (rows, length); others: (rows, ...)
MORE_PADDING = 8  # tokens, where all rows are of the same length
ROUNDING = 1e-3  # differences of logits, as a share of the largest, that padding may cause


def check_model(with_loss: ModelWithLoss, splits: Splits, config: TrainConfig) -> Inputs:
    """Try the model on some training rows, from the shortest to the longest; return these rows.

    Parameters that the loss does not depend on are frozen. Call on every rank, before wrapping.
    Errors: UserError for what cannot work.
    """
    model, train = with_loss.model, splits["train"]
    order, device = train.by_length(), next(model.parameters()).device
    few = order[np.linspace(0, len(order) - 1, TRIED_ROWS).astype(int)]
    batch = train.batch(few).to(device)
    check_forward_arguments(model, batch.inputs)

    def try_model() -> list[str]:
        before = [buffer.clone() for buffer in model.buffers()]
        with embeddings_checked(model):
            check_token_ids(model, splits)
            unused = unused_parameters(with_loss, batch, config.precision)
            check_padding(model, batch.inputs, train.pad_id, config.max_length)
        check_buffers(model, batch.inputs, before)
        return unused

    unused = on_main(try_model)
    for name, parameter in model.named_parameters():
        if name in unused:
            parameter.requires_grad_(False)
    if unused:
        shown = ", ".join(unused[:5]) + (f" and {len(unused) - 5} more" if unused[5:] else "")
        log.info(f"frozen, since the loss does not depend on them: {shown}")
    return batch.inputs


def check_token_ids(model: nn.Module, splits: Splits) -> None:
    """Errors: UserError if a row has a token that the model has no embedding for."""
    table = word_embeddings(model)
    largest = max(max(store.meta["largest_id"], store.pad_id) for store in splits.values())
    if table is not None and largest >= len(table):
        raise UserError(
            f"the rows have the token id {largest}, and the model has {len(table)} word embeddings "
            "(ids from 0): the tokenizer does not fit the model, or tokens were added to it; "
            "call model.resize_token_embeddings(len(tokenizer)) in build_model"
        )


@contextmanager
def embeddings_checked(model: nn.Module) -> Iterator[None]:
    """Inside, an index beyond an embedding's table is a UserError; on a GPU it ends the process."""

    def check(module: Any, arguments: tuple[Tensor, ...]) -> None:
        highest = arguments[0].max().item() if arguments and arguments[0].numel() else -1
        if highest >= module.num_embeddings:
            name = next(n for n, m in model.named_modules() if m is module)
            raise UserError(
                f"the model has {module.num_embeddings} rows in {name} and is asked for number "
                f"{highest} (from 0) by its longest rows; for positions, give a lower --max-length"
            )

    # Subclasses may take something else than indices.
    tables = [module for module in model.modules() if type(module) is nn.Embedding]
    hooks = [table.register_forward_pre_hook(check) for table in tables]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def unused_parameters(with_loss: ModelWithLoss, batch: Batch, precision: str) -> list[str]:
    """Names of trained parameters that get no gradient from the loss of these rows."""
    model, half = with_loss.model.train(), len(batch.labels) // 2
    try:
        loss = with_loss.forward(batch.inputs, batch.labels, batch.weight)  # not compiled
        loss.sum().backward()
    except torch.OutOfMemoryError:
        model.zero_grad()
        if not half:
            raise UserError(TOO_LITTLE_MEMORY) from None
        inputs = {name: tensor[half:] for name, tensor in batch.inputs.items()}
        fewer = Batch(inputs, batch.labels[half:], batch.weight[half:], plan=None)
        return unused_parameters(with_loss, fewer, precision)
    except RuntimeError as error:
        if precision in HALF:
            logits_of(model(**batch.inputs))  # fails as well, if the precision is not the reason
            raise UserError(
                f"the model does not work with --precision {precision}: {error}"
            ) from None
        raise
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    unused = [name for name, p in trained if p.grad is None]
    model.zero_grad()
    if len(unused) == len(trained):
        raise UserError("model.py: the loss does not depend on any parameter that is trained")
    return unused


def check_buffers(model: nn.Module, inputs: Inputs, before: list[Tensor]) -> None:
    """Give the buffers the values that they had `before` a forward of training.

    Errors: UserError if these were others and the logits depend on them.
    """
    pairs = list(zip(model.named_buffers(), before, strict=True))
    changed = [name for (name, now), old in pairs if not torch.equal(now, old)]
    with inference(model):
        after = logits_of(model(**inputs)) if changed else None
        for (_, buffer), old in pairs:
            buffer.copy_(old)
        is_same = after is None or torch.equal(after, logits_of(model(**inputs)))
    if not is_same:
        raise UserError(
            f"model.py: training changes the buffers {', '.join(changed[:5])}: every rank and "
            "micro-batch would have its own (running statistics, as BatchNorm has); use LayerNorm, "
            "or a parameter"
        )


def check_padding(model: nn.Module, inputs: Inputs, pad_id: int, max_length: int) -> None:
    """Compare the logits of rows alone and padded. Errors: UserError if they differ.

    A model that is only code of transformers is reported, if other texts still make more of a
    difference than padding does: a few types depend on it by their construction.
    """
    lengths = inputs["attention_mask"].sum(1).tolist()
    padded, longest = inputs, max(lengths)
    if min(lengths) == longest:  # no row is padded yet
        more = max(0, min(MORE_PADDING, max_length - longest))
        fill = {"input_ids": pad_id, "attention_mask": 0, "token_type_ids": 0}
        padded = {
            k: F.pad(t, (0, more), value=fill[k]) if k in fill else t for k, t in inputs.items()
        }
    alone = []
    with inference(model):
        for i, length in enumerate(lengths):
            rows = {k: t[i : i + 1] for k, t in inputs.items()}
            row = {k: t[:, :length] if k in TOKENS else t for k, t in rows.items()}
            alone.append(logits_of(model(**row)))
        logits, together = torch.cat(alone), logits_of(model(**padded))
    change, spread = (logits - together).abs().max(), (logits.amax(0) - logits.amin(0)).max()
    if change <= ROUNDING * logits.abs().max():
        return
    effect = f"the logits of a row change by up to {change:.2g} when padding follows its tokens"
    is_known = all(
        type(m).__module__.startswith(("transformers.", "torch.")) for m in model.modules()
    )
    if is_known and change < spread:
        log.warning(
            f"{effect} (rows differ by {spread:.2g}): with {type(model).__name__}, results depend "
            "a little on batch sizes and on the number of ranks"
        )
        return
    if is_known:
        raise UserError(f"{type(model).__name__} cannot be used: {effect}; choose another model")
    raise UserError(
        f"model.py: {effect}: use attention_mask, which is 0 there (a mean must leave padding out; "
        "the last token of row i is number attention_mask[i].sum() - 1; what reads backwards, such "
        "as a bidirectional LSTM, needs pack_padded_sequence)"
    )
