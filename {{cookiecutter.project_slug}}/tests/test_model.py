"""What model.py asks of pretrained models: new heads, saved tokenizers, limits, refusals."""

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import jobs
import pytest
import torch
from conftest import make_rows
from families import FAMILIES, save_family, tiny_config, train_tokenizer
from ranks import RankError, Ranks
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertForMaskedLM,
)

from training.checkpoint import pretrained
from training.checkpoint.pretrained_tokenizer import load_hf_tokenizer, save_preparation
from training.distributed.prepare_model import enable_gradient_checkpointing, prepare_model
from training.settings.config import TrainConfig
from training.settings.errors import UserError

TEXTS = [text for text, _ in make_rows(300, seed=3)]
LABELS = ["animal", "food", "weather"]


def load(folder: Path, labels: list[str] = LABELS, seed: int = 1, **changes: Any) -> Any:
    config = TrainConfig(model=str(folder), max_length=40, **changes)
    tokenizer = load_hf_tokenizer(config)
    torch.manual_seed(seed)
    hf_config = pretrained.load_hf_config(config)
    model = pretrained.load_classifier(config, hf_config, tokenizer, labels)
    pretrained.freeze(model, config)
    return model


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), "utf-8")


def trained(model: nn.Module) -> set[str]:
    return {name for name, p in model.named_parameters() if p.requires_grad}


@pytest.fixture(scope="module")
def roberta(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A classifier for two other labels, whose head has two layers."""
    return save_family("roberta", tmp_path_factory.mktemp("models") / "roberta", TEXTS)


@pytest.mark.parametrize("labels", [["x", "y"], LABELS], ids=["as many labels", "more labels"])
def test_head_for_other_labels_is_new(
    roberta: Path, labels: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    """All of its layers, by the run's seed; the encoder is kept. The log names them."""
    old = AutoModelForSequenceClassification.from_pretrained(roberta).state_dict()
    with caplog.at_level(logging.INFO, "training"):
        new, again, other = (load(roberta, labels, seed).state_dict() for seed in (1, 1, 2))
    for key, weight in new.items():
        if key.startswith("roberta."):
            assert torch.equal(weight, old[key]), key
        elif key.endswith(".weight"):
            assert weight.shape != old[key].shape or not torch.equal(weight, old[key]), key
            assert not torch.equal(weight, other[key]), key
            assert 0.05 < weight.std() < 0.2, key  # as the architecture begins
        assert torch.equal(weight, again[key]), key
    assert "new weights, to be trained: classifier.dense, classifier.out_proj" in caplog.messages


def test_head_for_these_labels_is_kept(roberta: Path, tmp_path: Path) -> None:
    load(roberta).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(roberta).save_pretrained(tmp_path)
    again = load(tmp_path, seed=2)
    assert again.config.new_weights == []
    old = AutoModelForSequenceClassification.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(old[key], weight) for key, weight in again.state_dict().items())


def test_head_of_language_modeling_is_kept(tmp_path: Path) -> None:
    """ModernBERT's classifier begins with a layer that its masked language model has trained."""
    from transformers import ModernBertForMaskedLM

    folder = save_family("modernbert", tmp_path, TEXTS)
    masked = ModernBertForMaskedLM(AutoConfig.from_pretrained(folder))
    masked.save_pretrained(folder)
    model = load(folder)
    assert torch.equal(model.head.dense.weight, masked.head.dense.weight)
    assert model.config.new_weights == ["classifier.bias", "classifier.weight"]


def test_no_pretrained(roberta: Path, tmp_path: Path) -> None:
    """The architecture alone: there need not be any weights in the folder."""
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((roberta / name).read_bytes())
    first, second = (load(tmp_path, seed=seed, pretrained=False) for seed in (1, 2))
    name = "roberta.encoder.layer.0.output.dense.weight"
    assert not torch.equal(first.state_dict()[name], second.state_dict()[name])
    assert first.config.num_labels == 3


def test_freeze_encoder_leaves_what_is_new(tmp_path: Path) -> None:
    """A masked language model has no pooler: the classifier's is random, and is trained."""
    folder = save_family("bert", tmp_path, TEXTS)
    BertForMaskedLM(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    model = load(folder, freeze_encoder=True)
    pooler = {"bert.pooler.dense.weight", "bert.pooler.dense.bias"}
    assert trained(model) == {*pooler, "classifier.weight", "classifier.bias"}
    words = "bert.embeddings.word_embeddings.weight"
    model = load(folder, freeze_embeddings=True)
    assert {name for name, _ in model.named_parameters()} - trained(model) == {words}


def test_freeze_and_checkpointing_of_any_module(roberta: Path) -> None:
    """An encoder inside a user's module is found; a module without one is refused by a sentence."""
    encoder = AutoModelForSequenceClassification.from_pretrained(roberta).roberta
    model = nn.ModuleDict({"encoder": encoder, "head": nn.Linear(32, 3)})
    pretrained.freeze(model, TrainConfig(freeze_encoder=True))
    assert trained(model) == {"head.weight", "head.bias"}
    enable_gradient_checkpointing(model)
    assert any(getattr(module, "gradient_checkpointing", False) for module in encoder.modules())
    for config in (TrainConfig(freeze_encoder=True), TrainConfig(freeze_embeddings=True)):
        with pytest.raises(UserError, match="--freeze-embeddings froze nothing"):
            prepare_model(nn.LSTM(3, 3), config, torch.device("cpu"))
    with pytest.raises(UserError, match="--gradient-checkpointing is for Hugging Face models"):
        enable_gradient_checkpointing(nn.LSTM(3, 3))


@pytest.mark.filterwarnings("error:.*gradient_checkpointing_enable")
def test_gradient_checkpointing_refused(tmp_path: Path) -> None:
    model = load(save_family("mpnet", tmp_path, TEXTS))
    with pytest.raises(UserError, match=r"MPNet.* does not support --gradient-checkpointing"):
        enable_gradient_checkpointing(model)


# -- configuration -------------------------------------------------------------------------------


def small_config(name: str, **changes: Any) -> Any:
    family = FAMILIES[name]
    return tiny_config(name, family.changes | changes, train_tokenizer(family, TEXTS))


def test_dropout_of_nested_configurations() -> None:
    """Numbers only, wherever they are: ESM has a switch that is called token_dropout."""
    esm = small_config("esm", token_dropout=True)
    pretrained.set_dropout(esm, 0.25)
    assert (esm.token_dropout, esm.hidden_dropout_prob) == (True, 0.25)
    both = AutoConfig.for_model("t5gemma")
    pretrained.set_dropout(both, 0.25)
    assert both.encoder.attention_dropout == both.decoder.dropout_rate == 0.25
    gpt = small_config("gpt2")
    pretrained.set_dropout(gpt, None)
    assert gpt.attn_pdrop == 0.1
    pretrained.set_dropout(gpt, 0.25)
    assert gpt.attn_pdrop == gpt.resid_pdrop == gpt.embd_pdrop == 0.25


def test_dropout_of_a_module_that_keeps_the_settings() -> None:
    """Every dropout of a model of one's own is set; settings that it holds stay as they are."""
    model: Any = nn.Sequential(nn.Dropout(0.5), nn.LSTM(3, 3, 2, dropout=0.5))
    model.config, model.head_dropout = TrainConfig(dropout=0.5), 0.5
    prepare_model(model, TrainConfig(dropout=0.1), torch.device("cpu"))
    assert (model[0].p, model[1].dropout, model.head_dropout) == (0.1, 0.1, 0.1)
    assert model.config == TrainConfig(dropout=0.5)


def test_layerdrop_is_off(caplog: pytest.LogCaptureFixture) -> None:
    bart = small_config("bart")
    with caplog.at_level(logging.INFO, "training"):
        pretrained.set_dropout(bart, None)
    assert bart.encoder_layerdrop == 0
    assert caplog.messages == ["encoder_layerdrop is 0 here, not 0.5: all layers are trained"]


@pytest.mark.parametrize(
    ("name", "limit"),
    [
        ("bert", 96), ("roberta", 94), ("mpnet", 94), ("longformer", 94), ("camembert", 94),
        ("esm", 94), ("opt", 96), ("bart", 96), ("gpt2", 96), ("gemma3", 96),
        ("t5", pretrained.NO_LIMIT), ("xlnet", pretrained.NO_LIMIT), ("bloom", pretrained.NO_LIMIT),
    ],
)  # fmt: skip
def test_longest_input(name: str, limit: int, tmp_path: Path) -> None:
    """Positions behind the padding's do not count. One token more fails in the model itself."""
    small_config(name).save_pretrained(tmp_path)
    model_config = pretrained.load_hf_config(TrainConfig(model=str(tmp_path)))
    assert pretrained.longest_input(model_config) == limit


# -- tokenizer -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bert", "roberta", "gpt2", "t5", "llama"])
def test_saved_tokenizer(name: str, tmp_path: Path) -> None:
    """Loaded again, it cuts and pads as in training, and a text's own special tokens are text."""
    folder = save_family(name, tmp_path, TEXTS)
    names = ["input_ids", "token_type_ids", "attention_mask"]  # also of models without the second
    edit(folder / "tokenizer_config.json", model_input_names=names)
    config = TrainConfig(model=str(folder), truncate="tail", max_length=9)
    tokenizer = save_preparation(load_hf_tokenizer(config), config)
    tokenizer.save_pretrained(tmp_path / "saved")
    saved = AutoTokenizer.from_pretrained(tmp_path / "saved")
    assert (saved.truncation_side, saved.padding_side) == ("left", "right")
    assert (saved.model_max_length, saved.split_special_tokens) == (9, True)
    has_types = name == "bert"
    assert ("token_type_ids" in saved.model_input_names) == has_types
    special = ["<s>", "</s>", "<pad>", "[SEP]", "[CLS]"]
    named = set(saved.all_special_ids) - {saved.unk_token_id}
    plain, full = (saved(text)["input_ids"] for text in ("cat dog", f"cat {' '.join(special)} dog"))
    assert sum(i in named for i in full) == sum(i in named for i in plain)
    text = "cat </s> dog " * 9
    assert tokenizer(text, truncation=True) == saved(text, truncation=True)


def test_several_text_columns_are_separated(tmp_path: Path) -> None:
    config = TrainConfig(model=str(save_family("bert", tmp_path, TEXTS)), text_column=("a", "b"))
    tokenizer = save_preparation(load_hf_tokenizer(replace(config, max_length=9)), config)
    assert not tokenizer.split_special_tokens


# -- refusals ------------------------------------------------------------------------------------


def break_it(folder: Path, kind: str) -> None:
    if kind == "adapter":
        (folder / "config.json").unlink()
        adapter = {"base_model_name_or_path": "some/base", "peft_type": "LORA"}
        (folder / "adapter_config.json").write_text(json.dumps(adapter), "utf-8")
    elif kind == "quantized":
        edit(folder / "config.json", quantization_config={"quant_method": "gptq", "bits": 4})
    elif kind == "own code":
        edit(folder / "config.json", model_type="own", auto_map={"AutoConfig": "own.OwnConfig"})
        (folder / "own.py").write_text("raise SystemExit('foreign code was run')", "utf-8")
    elif kind == "no tokenizer":
        for path in folder.glob("tokenizer*"):
            path.unlink()
    elif kind == "no pad token":
        edit(folder / "tokenizer_config.json", pad_token=None, eos_token=None)
    elif kind == "no weights":
        (folder / "model.safetensors").unlink()
    elif kind == "other weights":
        config = small_config("distilbert")
        AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)
        small_config("roberta").save_pretrained(folder)
    else:
        (folder / "model.safetensors").write_bytes(b"not tensors")


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("adapter", "is a LoRA adapter of some/base; merge it first"),
        ("quantized", "has quantized weights"),
        ("own code", "give --trust-remote-code if you trust it"),
        ("no tokenizer", "tokenizer"),
        ("no pad token", "has no pad token"),
        ("no weights", "its weights cannot be read"),
        ("other weights", "has no weights of a RobertaForSequenceClassification"),
        ("broken weights", "its weights cannot be read"),
    ],
)
def test_refused_in_one_line(kind: str, message: str, tmp_path: Path) -> None:
    folder = save_family("roberta", tmp_path / "model", TEXTS)
    break_it(folder, kind)
    with pytest.raises(UserError, match=message) as raised:
        load(folder)
    assert "\n" not in str(raised.value)


def test_not_a_classifier(tmp_path: Path) -> None:
    from transformers import ViTConfig

    ViTConfig(hidden_size=16, num_hidden_layers=1, num_attention_heads=2).save_pretrained(tmp_path)
    config = TrainConfig(model=str(tmp_path))
    with pytest.raises(UserError, match="which has no sequence classifier; choose another model"):
        pretrained.load_classifier(config, pretrained.load_hf_config(config), None, LABELS)


# -- sharding ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind", ["t5", "albert", "funnel", "squeezebert", "lstm", "lists", "shared weight", "forward"]
)
def test_sharded_equals_unsharded(kind: str, ranks: Ranks) -> None:
    """FSDP of models whose layers are lists of layers, or are not called as `layer(...)`, and of
    flat weights: logits, gradients."""
    for difference, sharded in ranks.run(2, jobs.sharded_difference, kind):
        assert difference < 1e-12
        assert sharded


def test_sharded_layer_by_layer(ranks: Ranks) -> None:
    """At no time more than a layer is whole on the device: prepare_model leaves the model on the
    CPU, and `shard` takes one layer after the other. A layer that shares weights is not one."""
    for kind, layers in (("lists", 4), ("shared weight", 2)):
        *of_layers, rest = ranks.run(2, jobs.whole_at_once, kind)[0]
        assert of_layers == [(8 * 9 * 4, 8 * 9 * 4)] * layers
        assert rest[0] == rest[1]
    meta = torch.device("meta")
    devices = {}
    for strategy in ("ddp", "fsdp"):
        model = prepare_model(torch.nn.Linear(2, 2), TrainConfig(strategy=strategy), meta)
        devices[strategy] = model.weight.device.type
    assert devices == {"ddp": "meta", "fsdp": "cpu"}


def test_scalar_parameter_cannot_be_sharded(ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"UserError: model.py: .* scalar must have the shape"):
        ranks.run(2, jobs.sharded_difference, "scalar")
