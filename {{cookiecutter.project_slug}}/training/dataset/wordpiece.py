"""A tokenizer trained on the rows themselves: the same rows give the same one, on every machine."""

from collections.abc import Iterator

from tokenizers import Tokenizer, models, normalizers
from tokenizers.pre_tokenizers import BertPreTokenizer, Metaspace, Sequence
from tokenizers.trainers import BpeTrainer
from transformers import BertTokenizer, PreTrainedTokenizerBase

START = "\u2581"  # marks the beginning of a word while merges are learned
SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def train_wordpiece(texts: Iterator[str], size: int = 16000) -> PreTrainedTokenizerBase:
    """A lower-casing WordPiece tokenizer of these texts; every Chinese character is a token."""
    # The trainer of byte-pair merges chooses the same vocabulary each time; WordPieceTrainer's
    # choice follows the order of a hash table.
    merges = Tokenizer(models.BPE())
    merges.normalizer = normalizers.BertNormalizer(lowercase=True)
    merges.pre_tokenizer = Sequence([BertPreTokenizer(), Metaspace(START, split=False)])
    trainer = BpeTrainer(vocab_size=size, min_frequency=2, show_progress=False)
    merges.train_from_iterator(texts, trainer)
    pieces = sorted(merges.get_vocab(), key=merges.get_vocab().__getitem__)
    characters = [piece for piece in pieces if len(piece) == 1 and piece != START]
    words = [p.removeprefix(START) if p.startswith(START) else f"##{p}" for p in pieces]
    vocabulary = dict.fromkeys([*SPECIAL, *characters, *filter(None, words)])
    ids = {token: i for i, token in enumerate(vocabulary)}
    return BertTokenizer(vocab=ids, do_lower_case=True)
