"""The tokenizer of a pretrained model, checked against it, and saved with what a run does."""

from typing import Any

from tokenizers.models import Unigram
from tokenizers.normalizers import Replace, Sequence
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from transformers import PreTrainedTokenizerBase as Tokenizer

from training.checkpoint.pretrained import check_trust, first_line, load_hf_config, longest_input
from training.distributed.ranks import local_main_first
from training.settings.config import TrainConfig
from training.settings.errors import UserError

NAMED = Tokenizer.SPECIAL_TOKENS_ATTRIBUTES  # bos_token, eos_token, pad_token, ...


def load_hf_tokenizer(config: TrainConfig) -> Tokenizer:
    """The tokenizer of `config.model`. Errors: UserError if it does not go with the model."""
    name, model_config = config.model, load_hf_config(config)
    text_config = model_config.get_text_config()
    options = {"trust_remote_code": config.trust_remote_code}
    try:
        with local_main_first("tokenizer", name) as is_cached:
            tokenizer = AutoTokenizer.from_pretrained(name, local_files_only=is_cached, **options)
    except Exception as error:  # tokenizers raises bare ones
        check_trust(config, "custom code" in str(error))
        raise UserError(f"{name}: its tokenizer cannot be read ({first_line(error)})") from None
    limit = min(longest_input(model_config), tokenizer.model_max_length)
    if config.max_length > limit:
        too_long = f"max_length {config.max_length} is more than {name} can read"
        raise UserError(f"{too_long}; give --max-length {limit} or less")
    if len(tokenizer) < getattr(text_config, "vocab_size", 0) / 2:  # an empty one was made
        raise UserError(f"{name} has no tokenizer of its own; add its files")
    if tokenizer.pad_token is None:  # decoders
        if tokenizer.eos_token is None:
            raise UserError(f"the tokenizer of {name} has no pad token; set tokenizer.pad_token")
        tokenizer.pad_token = tokenizer.eos_token
    types = getattr(text_config, "type_vocab_size", 0) or 0
    if types < 2 or any(tokenizer("a").get("token_type_ids", [])):  # Funnel's begin with a 2
        names = [name for name in tokenizer.model_input_names if name != "token_type_ids"]
        _set_and_save(tokenizer, model_input_names=names)
    return tokenizer


def save_preparation(tokenizer: Tokenizer, config: TrainConfig) -> Tokenizer:
    """Save with the tokenizer how texts become rows here, for whoever loads the model later."""
    one_text = len(config.text_column) == 1  # else special tokens separate the texts
    if one_text and tokenizer.is_fast:
        tokenizer = _take_special_tokens_as_text(tokenizer)
    tokenizer.model_max_length = config.max_length
    side = "left" if config.truncate == "tail" else "right"
    _set_and_save(
        tokenizer, truncation_side=side, padding_side="right", split_special_tokens=one_text
    )
    return tokenizer


def _take_special_tokens_as_text(tokenizer: Tokenizer) -> Tokenizer:
    """A text's own special tokens, such as </s>, are text."""
    backend = tokenizer.backend_tokenizer
    backend.encode_special_tokens = True
    if not isinstance(backend.model, Unigram) or tokenizer.split_special_tokens:
        return tokenizer  # the latter: it was saved by a run, and has what follows already
    # Here they are pieces of the vocabulary as well: they are taken apart before it is asked.
    named = {key: token for key, token in tokenizer.special_tokens_map.items() if key in NAMED}
    apart = [
        Replace(token, f"{token[0]} {token[1:]}")
        for token in dict.fromkeys(named.values())
        if token[1:]
    ]
    before = [] if backend.normalizer is None else [backend.normalizer]
    backend.normalizer = Sequence([*apart, *before])
    names = tokenizer.model_input_names  # other classes would drop the normalizer when loaded
    return PreTrainedTokenizerFast(tokenizer_object=backend, model_input_names=names, **named)


def _set_and_save(tokenizer: Tokenizer, **settings: Any) -> None:
    for name, value in settings.items():
        setattr(tokenizer, name, value)
    tokenizer.init_kwargs.update(settings)  # what save_pretrained writes
