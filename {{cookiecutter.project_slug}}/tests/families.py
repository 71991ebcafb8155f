"""Tiny models with random weights, of every family that people train as a classifier, each in the
form in which it comes from the hub, with a tokenizer of its kind."""

import inspect
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import transformers
from tokenizers import (
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from training.dataset.tokenizer import train_wordpiece

# Given to a configuration as far as it has fields of these names.
SMALL = dict.fromkeys(
    "hidden_size d_model n_embd dim emb_dim embedding_size input_embedding_size embd_dim "
    "word_embed_proj_dim output_embedding_size".split(), 32
) | dict.fromkeys(
    "num_hidden_layers num_layers n_layer n_layers encoder_layers decoder_layers "
    "num_decoder_layers num_attention_heads n_head n_heads num_heads encoder_attention_heads "
    "decoder_attention_heads num_key_value_heads num_experts_per_tok".split(), 2
) | dict.fromkeys(
    "intermediate_size d_ff encoder_ffn_dim decoder_ffn_dim ffn_dim d_inner hidden_dim".split(), 48
) | dict.fromkeys("d_kv head_dim d_head".split(), 16) | dict.fromkeys(
    "num_experts num_local_experts".split(), 4
) | {"max_position_embeddings": 96, "n_positions": 96, "moe_intermediate_size": 32,
     "initializer_range": 0.1, "init_std": 0.1}  # fmt: skip
SPECIAL = ["<s>", "<pad>", "</s>", "<unk>", "<mask>", "<sep>", "<cls>"]


class Family(NamedTuple):
    tokens: str = "wordpiece"  # or "bytes" (byte-level BPE), "unigram"
    template: str = ""  # of a text $A, for the last two
    changes: dict[str, Any] = {}  # to SMALL  # noqa: RUF012
    padding_side: str = "right"


ROBERTA: dict[str, Any] = {"tokens": "bytes", "template": "<s> $A </s>"}
XLM_R: dict[str, Any] = {"tokens": "unigram", "template": "<s> $A </s>"}
GPT: dict[str, Any] = {"tokens": "bytes", "padding_side": "left"}
LLAMA: dict[str, Any] = {"tokens": "unigram", "template": "<s> $A", "padding_side": "left"}
T5: dict[str, Any] = {
    "tokens": "unigram",
    "template": "$A </s>",
    "changes": {"decoder_start_token_id": 1},
}
FAMILIES = {
    "bert": Family(),
    "roberta": Family(**ROBERTA, changes={"type_vocab_size": 1}),
    "xlm-roberta": Family(**XLM_R, changes={"type_vocab_size": 1}),
    "camembert": Family(**XLM_R, changes={"type_vocab_size": 1}),
    "distilbert": Family(),
    "modernbert": Family(**ROBERTA),
    "electra": Family(),
    "albert": Family(**XLM_R),
    "deberta": Family(**ROBERTA),
    "deberta-v2": Family(**XLM_R),
    "mpnet": Family(),
    "longformer": Family(**ROBERTA, changes={"attention_window": [8, 8]}),
    "big_bird": Family(**XLM_R),
    "eurobert": Family(**ROBERTA),
    "nomic_bert": Family(),
    "jina_embeddings_v3": Family(**XLM_R),
    "esm": Family(**XLM_R),
    "gpt2": Family(**GPT),
    "gpt_neo": Family(**GPT, changes={"attention_types": [[["global", "local"], 1]]}),
    "opt": Family(**GPT),
    "gpt_neox": Family(**GPT),
    "bloom": Family(**GPT),
    "falcon": Family(**GPT),
    "llama": Family(**LLAMA),
    "mistral": Family(**LLAMA),
    "mixtral": Family(**LLAMA),
    "qwen2": Family(**GPT),
    "qwen3": Family(**GPT),
    "gemma": Family(**LLAMA),
    "gemma2": Family(**LLAMA),
    "gemma3_text": Family(**LLAMA),
    "phi": Family(**GPT),
    "phi3": Family(**LLAMA),
    "olmo2": Family(**GPT),
    "smollm3": Family(**GPT),
    "bart": Family(**ROBERTA, changes={"encoder_layerdrop": 0.5}),
    "mbart": Family("unigram", "$A </s>"),
    "t5": Family(**T5),
    "mt5": Family(**T5),
    "umt5": Family(**T5),
    "funnel": Family(changes={"block_sizes": [1, 1], "num_decoder_layers": 1}),
    "convbert": Family(),
    "xlnet": Family("unigram", "$A <sep> <cls>", padding_side="left"),
    "fnet": Family(**XLM_R),
    "nystromformer": Family(**XLM_R),
    "rembert": Family(**XLM_R),
    "squeezebert": Family(),
    "mobilebert": Family(),
    "roformer": Family(),
    "ernie": Family(),
    "gemma3": Family(
        **LLAMA,
        changes={
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "num_hidden_layers": 1,
                "num_attention_heads": 2,
                "image_size": 8,
                "patch_size": 4,
            },
            "mm_tokens_per_image": 4,
        },
    ),
    "qwen3_5": Family(
        **GPT,
        changes={
            "vision_config": {
                "hidden_size": 16,
                "intermediate_size": 16,
                "depth": 1,
                "num_heads": 2,
                "out_hidden_size": 32,
                "num_position_embeddings": 16,
            },
        },
    ),
    "xlm": Family(**XLM_R),
    "flaubert": Family(**XLM_R),
    "ibert": Family(**ROBERTA, changes={"type_vocab_size": 1}),
    "data2vec-text": Family(**ROBERTA, changes={"type_vocab_size": 1}),
}


TEXT_CHANGES = {
    "qwen3_5_text": {
        "layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 2,
        "linear_num_value_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8,
    },
}  # fmt: skip


def save_family(name: str, folder: Path, texts: Iterable[str]) -> Path:
    """Make `folder`, with a vocabulary for `texts`. The head is one for two other labels."""
    family = FAMILIES[name]
    tokenizer = train_tokenizer(family, list(texts))
    config = tiny_config(name, family.changes, tokenizer)
    torch.manual_seed(0)  # the same in every session
    model = transformers.AutoModelForSequenceClassification.from_config(config)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def tiny_config(kind: str, changes: dict[str, Any], tokenizer: PreTrainedTokenizerBase) -> Any:
    build = transformers.CONFIG_MAPPING[kind]
    known = {*inspect.signature(build.__init__).parameters, *build().to_dict()}
    tokens = {
        "vocab_size": len(tokenizer), "pad_token_id": tokenizer.pad_token_id,
        "bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id,
        "decoder_start_token_id": tokenizer.eos_token_id,
    }  # fmt: skip
    sizes = {key: value for key, value in (SMALL | tokens).items() if key in known}
    if "text_config" in known:  # of a model for texts and images
        text = f"{kind}_text"
        sizes["text_config"] = tiny_config(text, TEXT_CHANGES.get(text, {}), tokenizer).to_dict()
    return build(**sizes | changes)


def train_tokenizer(family: Family, texts: list[str]) -> PreTrainedTokenizerBase:
    if family.tokens == "wordpiece":
        return train_wordpiece(iter(texts))
    if family.tokens == "bytes":
        tokenizer = Tokenizer(models.BPE())
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = pre_tokenizers.ByteLevel.alphabet()
        trainer: Any = trainers.BpeTrainer(
            vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
        )
    else:
        tokenizer = Tokenizer(models.Unigram())
        tokenizer.normalizer = normalizers.NFKC()
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
        tokenizer.decoder = decoders.Metaspace()
        trainer = trainers.UnigramTrainer(
            vocab_size=200, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False
        )
    tokenizer.train_from_iterator(texts, trainer)
    if family.template:
        used = [(t, tokenizer.token_to_id(t)) for t in SPECIAL if t in family.template]
        pair = f"{family.template} {family.template.replace('$A', '$B:1')}"
        tokenizer.post_processor = processors.TemplateProcessing(family.template, pair, used)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, padding_side=family.padding_side, bos_token="<s>",
        pad_token="<pad>", eos_token="</s>", unk_token="<unk>", mask_token="<mask>",
    )  # fmt: skip
