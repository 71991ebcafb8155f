"""Texts to token ids, the same way in training, evaluation and prediction.

A tokenizer trained on the rows themselves is the same for the same rows, on every machine.
"""

import inspect
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

# Set before tokenizers is used: it would warn of the loader's workers, which do not tokenize.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

import tokenizers
from tokenizers import models, normalizers
from tokenizers.pre_tokenizers import BertPreTokenizer, Metaspace
from tokenizers.pre_tokenizers import Sequence as Steps
from tokenizers.trainers import BpeTrainer
from transformers import AutoTokenizer, BertTokenizer
from transformers import PreTrainedTokenizerBase as Tokenizer

from training.dataset.rows import ReadReport, Row
from training.dataset.source import Source
from training.distributed import watchdog
from training.distributed.shared_folder import build_once, content_key
from training.settings.config import FROM_SCRATCH
from training.settings.errors import UserError

log = logging.getLogger("training")
MAX_ROWS, MAX_CHARACTERS = 1000, 1 << 20  # tokenized at a time; the latter by at most one text more
START = "\u2581"  # marks the beginning of a word while merges are learned
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def prepare_tokenizer(source: Source, build: Callable[..., Tokenizer]) -> Tokenizer:
    """The tokenizer of `build` (of model.py); one trained on the rows of data.py is kept."""
    config = source.config
    if config.model != FROM_SCRATCH:
        return build(config, iter(()))

    def train(folder: Path) -> None:
        log.info("training a tokenizer on the training rows")
        # The trainer would draw rows in a thread of its own, where a database does not answer.
        path = folder / "texts.jsonl"
        with path.open("w", encoding="utf-8") as file:
            for row in chain.from_iterable(chunks(source.draw("train", ReadReport()))):
                texts = (*parts_of(row.text), row.pair)
                file.writelines(json.dumps(text) + "\n" for text in texts if text)
        with path.open(encoding="utf-8") as lines:
            build(config, map(json.loads, lines)).save_pretrained(folder)
        path.unlink()

    key = content_key(inspect.getsource(build), *source.key("train"))
    folder = Path(config.cache_dir) / f"tokenizer-{key}"
    return AutoTokenizer.from_pretrained(build_once(folder, train, "the tokenizer"))


def train_wordpiece(texts: Iterator[str], size: int = 16000) -> Tokenizer:
    """A lower-casing WordPiece tokenizer of these texts; every Chinese character is a token."""
    # The trainer of byte-pair merges chooses the same vocabulary each time; WordPieceTrainer's
    # choice follows the order of a hash table.
    merges = tokenizers.Tokenizer(models.BPE())
    merges.normalizer = normalizers.BertNormalizer(lowercase=True)
    merges.pre_tokenizer = Steps([BertPreTokenizer(), Metaspace(START, split=False)])
    trainer = BpeTrainer(vocab_size=size, min_frequency=2, show_progress=False)
    merges.train_from_iterator(texts, trainer)
    pieces = sorted(merges.get_vocab(), key=merges.get_vocab().__getitem__)
    characters = [piece for piece in pieces if len(piece) == 1 and piece != START]
    words = [p.removeprefix(START) if p.startswith(START) else f"##{p}" for p in pieces]
    vocabulary = dict.fromkeys([*SPECIAL, *characters, *filter(None, words)])
    ids = {token: i for i, token in enumerate(vocabulary)}
    return BertTokenizer(vocab=ids, do_lower_case=True)


def parts_of(text: str | tuple[str, ...]) -> tuple[str, ...]:
    """The texts of a row's text columns."""
    return text if isinstance(text, tuple) else (text,)


def chunks(rows: Iterable[Row]) -> Iterator[list[Row]]:
    """Rows in lists of bounded size: the tokenizer needs a hundred bytes for a token."""
    chunk, characters = [], 0
    for row in rows:
        chunk.append(row)
        characters += sum(map(len, parts_of(row.text))) + len(row.pair or "")
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
    has_tokens: list[bool]  # whether something of each text is left: "\u200b" may become nothing


class Encoder:
    """Tokenizes, cuts to `max_length` (of a pair the longer text first), adds special tokens.

    Several text columns are joined by the separator token, or by a new line if there is none. A
    special token that is written in a text, such as "</s>", is text.
    `truncate`: "head" keeps the beginning, "tail" the end, "head+tail" half of each.
    """

    def __init__(self, tokenizer: Tokenizer, max_length: int, truncate: str = "head"):
        if not tokenizer.is_fast:
            raise UserError(f"{tokenizer.name_or_path} has no fast tokenizer; choose another model")
        self.backend = tokenizer.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.backend.encode_special_tokens = True
        self.separator = self._token_ids(["\n"])[0]
        if tokenizer.sep_token_id is not None:
            self.separator = [tokenizer.sep_token_id]
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

    def _joined_ids(self, texts: Sequence[str | tuple[str, ...]]) -> list[list[int]]:
        """The token ids of texts, or of several text columns; none if no column has any."""
        single = [text for text in texts if isinstance(text, str)]
        if len(single) == len(texts):  # the usual case
            return self._token_ids(single)
        joined, parts = [], iter(self._token_ids(list(chain.from_iterable(map(parts_of, texts)))))
        for text in texts:
            columns = [next(parts) for _ in parts_of(text)]
            ids = list(chain.from_iterable([*self.separator, *column] for column in columns))
            joined.append(ids[len(self.separator) :] if any(columns) else [])
        return joined

    def __call__(
        self, texts: Sequence[str | tuple[str, ...]], pairs: Sequence[str] | None = None
    ) -> Encoded:
        firsts = self._joined_ids(texts)
        seconds = self._token_ids(pairs) if pairs else [[]] * len(texts)
        before, between, after = self.special_of_pairs if pairs else self.special_of_texts
        special = len(before) + len(between) + len(after)
        result = Encoded([], [], [], [])
        for first, second in zip(firsts, seconds, strict=True):
            full_length = special + len(first) + len(second)
            result.has_tokens.append(bool(first and (second or not pairs)))
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
