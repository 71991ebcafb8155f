"""Texts to token ids, the same way in training, evaluation and prediction."""

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

# Set before tokenizers is used: it would warn of the loader's workers, which do not tokenize.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

from transformers import AutoTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from training.dataset.rows import ReadReport, Row, what_rows_depend_on
from training.distributed import watchdog
from training.distributed.shared_folder import build_once, content_key
from training.settings.config import FROM_SCRATCH, TrainConfig
from training.settings.errors import UserError

log = logging.getLogger("training")
MAX_ROWS, MAX_CHARACTERS = 1000, 1 << 20  # tokenized at a time; the latter by at most one text more


def separator_of(tokenizer: Tokenizer) -> str:
    """What joins several text columns: the tokenizer's separator token, else a new line."""
    return f" {tokenizer.sep_token} " if tokenizer.sep_token else "\n"


def prepare_tokenizer(
    config: TrainConfig, source: ModuleType, build: Callable[..., Tokenizer]
) -> Tokenizer:
    """The tokenizer of `build` (of model.py); one trained on the rows of data.py is kept."""
    if config.model != FROM_SCRATCH:
        return build(config, iter(()))

    def train(folder: Path) -> None:
        log.info("training a tokenizer on the training rows")
        rows = source.rows("train", config, "\n", ReadReport())
        texts = (text for c in chunks(rows) for row in c for text in (row.text, row.pair) if text)
        build(config, texts).save_pretrained(folder)

    key = content_key(inspect.getsource(build), *what_rows_depend_on("train", config, source))
    folder = Path(config.cache_dir) / f"tokenizer-{key}"
    return AutoTokenizer.from_pretrained(build_once(folder, train, "the tokenizer"))


def chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows in lists of bounded size: the tokenizer needs a hundred bytes for a token."""
    chunk, characters = [], 0
    for row in rows:
        text, label = getattr(row, "text", None), getattr(row, "label", None)
        if type(text) is not str or type(label) not in (str, tuple):
            kinds = "the text a str, the label a str (with --multi-label a tuple of them)"
            rule = f"data.py must yield Row(text, pair, label, file, line), {kinds}"
            raise UserError(f"{rule}, not {row!r:.200}")
        chunk.append(row)
        characters += len(text) + len(row.pair or "")
        if len(chunk) == MAX_ROWS or characters >= MAX_CHARACTERS:
            watchdog.heartbeat()
            yield chunk
            chunk, characters = [], 0
    if chunk:
        yield chunk


class Encoded(NamedTuple):
    ids: list[list[int]]  # token ids of each text, special tokens included
    first: list[int]  # tokens of its first segment; the rest is the second text of a pair
    full_length: list[int]  # tokens that it would have had uncut


class Encoder:
    """Tokenizes, cuts to `max_length` (of a pair the longer text first), adds special tokens.

    `truncate`: "head" keeps the beginning, "tail" the end, "head+tail" half of each.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int, truncate: str = "head"):
        if not tokenizer.is_fast:
            raise UserError(f"{tokenizer.name_or_path} has no fast tokenizer; choose another model")
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.max_length, self.truncate = max_length, truncate
        self.special_of_texts = [*self._special_tokens("a"), []]  # a pair without a second text
        self.special_of_pairs = self._special_tokens("a", "a")

    def _special_tokens(self, *texts: str) -> list[list[int]]:
        """Those before, between and after one or two texts."""
        [text_ids], rest = self._token_ids(texts[:1]), self.backend.encode(*texts).ids
        special = []
        for _ in texts:
            starts = [i for i in range(len(rest)) if rest[i : i + len(text_ids)] == text_ids]
            if not starts:
                problem = "this tokenizer changes a text when it adds special tokens"
                raise UserError(f"{problem}; choose another model")
            special.append(rest[: starts[0]])
            rest = rest[starts[0] + len(text_ids) :]
        return [*special, rest]

    def _token_ids(self, texts: Sequence[str]) -> list[list[int]]:
        encodings = self.backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Encoded:
        firsts = self._token_ids(texts)
        seconds = self._token_ids(pairs) if pairs else [[]] * len(texts)
        before, between, after = self.special_of_pairs if pairs else self.special_of_texts
        special = len(before) + len(between) + len(after)
        result = Encoded([], [], [])
        for first, second in zip(firsts, seconds, strict=True):
            full_length = special + len(first) + len(second)
            if full_length > self.max_length:
                first, second = self._cut(first, second, self.max_length - special)
            begin = [*before, *first, *between]
            result.ids.append([*begin, *second, *after])
            result.first.append(len(begin))
            result.full_length.append(full_length)
        return result

    def _cut(self, first: list[int], second: list[int], room: int) -> tuple[list[int], list[int]]:
        """`room` tokens of two texts: the shorter text keeps up to half of them."""
        shorter = min(len(first), len(second), room // 2)
        kept = shorter if len(first) <= len(second) else room - shorter
        return self._keep(first, kept), self._keep(second, room - kept)

    def _keep(self, ids: list[int], room: int) -> list[int]:
        """`room` of these token ids, which are at least as many."""
        tail = {"head": 0, "tail": room, "head+tail": room // 2}[self.truncate]
        return ids[: room - tail] + ids[len(ids) - tail :]
