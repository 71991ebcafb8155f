"""Texts to token ids, the same way in training, evaluation and prediction."""

import inspect
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

# Set before tokenizers is used: it would warn of the loader's workers, which do not tokenize.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

from transformers import AutoTokenizer, PreTrainedTokenizerBase

from training.dataset.rows import ReadReport, Row
from training.distributed import watchdog
from training.distributed.shared_folder import build_once, content_key
from training.settings.config import FROM_SCRATCH, TrainConfig
from training.settings.errors import UserError

log = logging.getLogger("training")
MAX_ROWS, MAX_CHARACTERS = 1000, 1 << 20  # tokenized at a time; the latter by at most one text more


def separator_of(tokenizer: PreTrainedTokenizerBase) -> str:
    """What joins several text columns: the tokenizer's separator token, else a new line."""
    return f" {tokenizer.sep_token} " if tokenizer.sep_token else "\n"


def prepare_tokenizer(
    config: TrainConfig,
    source: ModuleType,
    build: Callable[[TrainConfig, Iterator[str]], PreTrainedTokenizerBase],
) -> PreTrainedTokenizerBase:
    """The tokenizer of `model.py`; one that is trained on the rows is trained once and kept.

    `source`: the user's `data.py`. `build`: `build_tokenizer` of `model.py`.
    """
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


def what_rows_depend_on(split: str, config: TrainConfig, source: ModuleType) -> list[Any]:
    """The files, the code of `data.py` and the settings, for the name of what is made of rows."""
    code = inspect.getsource(source)
    return [split, source.fingerprint(split, config), code, config.row_settings()]


def chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows in lists of bounded size: the tokenizer needs a hundred bytes for a token.

    Errors: UserError that says what an edited `data.py` must yield.
    """
    chunk: list[Row] = []
    characters = 0
    for row in rows:
        text = getattr(row, "text", None)
        label = getattr(row, "label", None)
        if type(text) is not str or type(label) not in (str, tuple):
            raise UserError(
                "data.py must yield Row(text, pair, label, file, line), the text a str, the label "
                f"a str (with --multi-label a tuple of them), not {row!r:.200}"
            )
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
    """Tokenizes with the fast tokenizer, cuts to `max_length`, and adds the special tokens.

    `truncate`: "head" keeps the beginning, "tail" the end, "head+tail" half of each. Of a pair, the
    longer text is cut first. Errors: UserError where the tokenizer cannot be used like that.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, max_length: int, truncate: str = "head"):
        if not tokenizer.is_fast:
            raise UserError(f"{tokenizer.name_or_path} has no fast tokenizer; choose another model")
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.max_length = max_length
        self.truncate = truncate
        self.special_tokens = {1: self._special_tokens("a"), 2: self._special_tokens("a", "a")}

    def _special_tokens(self, *texts: str) -> list[list[int]]:
        """Those before, between and after one or two texts."""
        text_ids = self.backend.encode(texts[0], add_special_tokens=False).ids
        ids = self.backend.encode(*texts).ids
        special: list[list[int]] = [[]]
        while ids:
            if ids[: len(text_ids)] == text_ids and len(special) <= len(texts):
                special.append([])
                ids = ids[len(text_ids) :]
            else:
                special[-1].append(ids.pop(0))
        if len(special) != len(texts) + 1:
            raise UserError(
                "this tokenizer changes a text when it adds special tokens; choose another model"
            )
        return special

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Encoded:
        encode = self.backend.encode_batch_fast
        firsts = [e.ids for e in encode(list(texts), add_special_tokens=False)]
        if pairs is None:
            return self._single(firsts)
        seconds = [e.ids for e in encode(list(pairs), add_special_tokens=False)]
        before, between, after = self.special_tokens[2]
        special = len(before) + len(between) + len(after)
        result = Encoded([], [], [])
        for first, second in zip(firsts, seconds, strict=True):
            rooms = self._rooms(len(first), len(second), self.max_length - special)
            begin = [*before, *self._cut(first, rooms[0]), *between]
            result.ids.append([*begin, *self._cut(second, rooms[1]), *after])
            result.first.append(len(begin))
            result.full_length.append(special + len(first) + len(second))
        return result

    def _single(self, texts: list[list[int]]) -> Encoded:
        before, after = self.special_tokens[1]
        special = len(before) + len(after)
        room = self.max_length - special
        kept = (ids if len(ids) <= room else self._cut(ids, room) for ids in texts)
        framed = [[*before, *ids, *after] for ids in kept]
        return Encoded(framed, list(map(len, framed)), [special + len(ids) for ids in texts])

    @staticmethod
    def _rooms(first: int, second: int, room: int) -> tuple[int, int]:
        """Tokens kept of each text of a pair: the shorter one keeps up to half the room."""
        if first + second <= room:
            return first, second
        shorter = min(first, second, room // 2)
        return (shorter, room - shorter) if first <= second else (room - shorter, shorter)

    def _cut(self, ids: list[int], room: int) -> list[int]:
        if len(ids) <= room:
            return ids
        if self.truncate == "head":
            return ids[:room]
        tail = room if self.truncate == "tail" else room // 2
        return ids[: room - tail] + ids[len(ids) - tail :]
