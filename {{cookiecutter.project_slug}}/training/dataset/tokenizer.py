"""Texts to token ids, the same way in training, evaluation and prediction."""

import os
from collections.abc import Sequence
from typing import NamedTuple

# Said before tokenizers is used: it would warn of the loader's workers, which do not tokenize.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "true")

from transformers import PreTrainedTokenizerBase

from training.settings.errors import UserError


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
        self.frames = {1: self._frame("a"), 2: self._frame("a", "a")}

    def _frame(self, *texts: str) -> list[list[int]]:
        """Special tokens before, between and after one or two texts."""
        bare = self.backend.encode(texts[0], add_special_tokens=False).ids
        ids = self.backend.encode(*texts).ids
        frame: list[list[int]] = [[]]
        while ids:
            if ids[: len(bare)] == bare and len(frame) <= len(texts):
                frame.append([])
                ids = ids[len(bare) :]
            else:
                frame[-1].append(ids.pop(0))
        if len(frame) != len(texts) + 1:
            raise UserError("this tokenizer does not put special tokens around the text alone")
        return frame

    def __call__(self, texts: Sequence[str], pairs: Sequence[str] | None = None) -> Encoded:
        encode = self.backend.encode_batch_fast
        contents = [[e.ids for e in encode(list(texts), add_special_tokens=False)]]
        if pairs is not None:
            contents.append([e.ids for e in encode(list(pairs), add_special_tokens=False)])
        frame = self.frames[len(contents)]
        special = sum(map(len, frame))
        room = self.max_length - special
        if pairs is None:  # the same as below, but faster
            before, after = frame
            kept = (s if len(s) <= room else self._cut(s, room) for s in contents[0])
            framed = [[*before, *s, *after] for s in kept]
            return Encoded(framed, list(map(len, framed)), [special + len(s) for s in contents[0]])
        result = Encoded([], [], [])
        for segments in zip(*contents, strict=True):
            rooms = self._rooms([len(s) for s in segments], room)
            ids = list(frame[0])
            for number, (segment, most, after) in enumerate(
                zip(segments, rooms, frame[1:], strict=True)
            ):
                ids += segment if len(segment) <= most else self._cut(segment, most)
                ids += after
                if number == 0:
                    result.first.append(len(ids))
            result.ids.append(ids)
            result.full_length.append(special + sum(map(len, segments)))
        return result

    @staticmethod
    def _rooms(lengths: list[int], room: int) -> list[int]:
        """Tokens kept of each text of a pair: the shorter one keeps up to half the room."""
        if sum(lengths) <= room:
            return lengths
        shorter = min(min(lengths), room // 2)
        return [shorter, room - shorter] if lengths[0] <= lengths[1] else [room - shorter, shorter]

    def _cut(self, ids: list[int], room: int) -> list[int]:
        if self.truncate == "head":
            return ids[:room]
        tail = room if self.truncate == "tail" else room // 2
        return ids[: room - tail] + ids[len(ids) - tail :]
