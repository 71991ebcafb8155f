"""A tokenizer trained on the rows themselves: the same rows give the same one, on every machine."""

from collections.abc import Iterator

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers.trainers import BpeTrainer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

START = "\u2581"  # marks the beginning of a word while merges are learned
SPECIAL = {"pad": "[PAD]", "unk": "[UNK]", "cls": "[CLS]", "sep": "[SEP]", "mask": "[MASK]"}


def train_wordpiece(texts: Iterator[str], size: int = 16000) -> PreTrainedTokenizerBase:
    """A lower-casing WordPiece tokenizer of these texts; every Chinese character is a token."""
    # The trainer of byte-pair merges chooses the same vocabulary each time; WordPieceTrainer's
    # choice follows the order of a hash table.
    normalizer = normalizers.BertNormalizer(lowercase=True)
    merges = Tokenizer(models.BPE())
    merges.normalizer = normalizer
    merges.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.BertPreTokenizer(), pre_tokenizers.Metaspace(START, split=False)]
    )
    trainer = BpeTrainer(vocab_size=size, min_frequency=2, show_progress=False)
    merges.train_from_iterator(texts, trainer)
    pieces = sorted(merges.get_vocab(), key=merges.get_vocab().__getitem__)
    characters = [piece for piece in pieces if len(piece) == 1 and piece != START]
    words = [p.removeprefix(START) if p.startswith(START) else f"##{p}" for p in pieces]
    vocabulary = dict.fromkeys([*SPECIAL.values(), *characters, *filter(None, words)])
    ids = {token: i for i, token in enumerate(vocabulary)}

    tokenizer = Tokenizer(models.WordPiece(ids, unk_token=SPECIAL["unk"]))
    tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.decoder = decoders.WordPiece()
    cls, sep = SPECIAL["cls"], SPECIAL["sep"]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{cls} $A {sep}",
        pair=f"{cls} $A {sep} $B:1 {sep}:1",
        special_tokens=[(token, ids[token]) for token in (cls, sep)],
    )
    names = {f"{name}_token": token for name, token in SPECIAL.items()}
    inputs = ["input_ids", "token_type_ids", "attention_mask"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=inputs, **names)
