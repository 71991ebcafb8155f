"""A model's folder, `best/` or a checkpoint: all that is needed to build the model and use it.

Weights come back in one way, to resume, for the best weights and in predict.py: `build_model` of
model.py builds the model with the settings of the folder, and each weight must find its place.
"""

import json
import tempfile
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedTokenizerBase,
)

from training.distributed.full_state import load_weights
from training.distributed.prepare_model import prepare_model
from training.distributed.ranks import on_main
from training.distributed.wrap import hugging_face_parts
from training.settings.config import TrainConfig
from training.settings.errors import UserError, explain_disk_errors
from training.settings.flags import read_settings

WEIGHTS = "model.safetensors"
SETTINGS = "config.toml"
FACTS = "training.json"  # label names in the order of their ids, and names of frozen parameters
TOLERANCE = 1e-4  # of logits, as a share of the largest: rounding on another path
Weights = dict[str, Tensor]
BuildModel = Callable[[TrainConfig, PreTrainedTokenizerBase, list[str]], nn.Module]


@dataclass
class ModelFolder:
    """Writes and reads folders of `model`. Make it before FSDP splits the parameters."""

    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    labels: list[str]
    config: TrainConfig
    tied: dict[str, str] = field(init=False)  # other names of a parameter, and its first name
    readme: str = field(init=False)

    def __post_init__(self) -> None:
        self.tied = tied_names(self.model)
        self.readme = describe(self.model, self.labels, self.config)

    def weights(self) -> Weights:
        """All of the model's, sharded if they are, and those with several names once."""
        tensors = self.model.state_dict().items()
        return {name: tensor for name, tensor in tensors if name not in self.tied}

    def write(self, folder: Path, weights: Weights) -> None:
        """Fill the existing `folder`. `weights` are those of `weights()`, as full tensors."""
        for part in hugging_face_parts(self.model)[:1]:  # config.json, and the model's own code
            part.save_pretrained(folder, state_dict={}, save_original_format=False)
        contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(contiguous, folder / WEIGHTS, metadata={"format": "pt"})
        self.tokenizer.save_pretrained(folder)
        frozen = [name for name, p in self.model.named_parameters() if not p.requires_grad]
        facts = json.dumps({"labels": self.labels, "frozen": frozen}, ensure_ascii=False, indent=1)
        texts = {SETTINGS: self.config.to_toml(), FACTS: facts, "README.md": self.readme}
        for name, text in texts.items():
            (folder / name).write_text(text, encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Give the model of every rank the weights of `folder`, which the main process reads."""
        load_weights(self.model, partial(read_weights, folder, self.model, self.tied))

    def freeze_as_in(self, folder: Path) -> None:
        """Freeze what was frozen in the run that wrote `folder`. Call on every rank."""
        frozen = on_main(lambda: saved_facts(folder)["frozen"])
        for name, parameter in self.model.named_parameters():
            parameter.requires_grad_(name not in frozen)

    def check_round_trip(self, build_model: BuildModel, inputs: dict[str, Tensor]) -> None:
        """Write the model, build it again as predict.py will, and compare the logits of `inputs`.

        Call on every rank. Errors: UserError if it cannot be saved or built again, or is another
        model then.
        """
        on_main(lambda: self._check_round_trip(build_model, inputs))

    def _check_round_trip(self, build_model: BuildModel, inputs: dict[str, Tensor]) -> None:
        Path(self.config.cache_dir).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".trial-", dir=self.config.cache_dir) as name:
            try:
                with explain_disk_errors(Path(name)):
                    self.write(Path(name), self.weights())
                again = load_model(Path(name), build_model, self.config.trust_remote_code).model
            except UserError:
                raise
            except Exception as error:  # of any library, or of the user's own code
                place = traceback.extract_tb(error.__traceback__)[-1]
                raise UserError(
                    f"model.py: the model cannot be saved and built again as predict.py will "
                    f"({type(error).__name__}: {error}, {Path(place.filename).name}:{place.lineno})"
                ) from error
        device = next(self.model.parameters()).device
        with torch.no_grad():
            outputs = [m.to(device).eval()(**inputs) for m in (self.model, again)]
        self.model.train()
        now, then = (getattr(output, "logits", output) for output in outputs)
        difference = (now - then).abs().max().item()
        if not difference <= TOLERANCE * now.abs().max().item():
            raise UserError(
                f"model.py: saved and built again, the model gives other logits (by up to "
                f"{difference:.2g}); what they depend on must be a parameter, a buffer or a setting"
            )


class LoadedModel(NamedTuple):
    model: nn.Module
    tokenizer: PreTrainedTokenizerBase
    labels: list[str]
    config: TrainConfig  # of the training, for this folder


def load_model(folder: Path, build_model: BuildModel, trust_remote_code: bool) -> LoadedModel:
    """The model of a folder that a run wrote, on the CPU. Errors: UserError."""
    if not (folder / FACTS).is_file():
        raise UserError(f"{folder} is not a model folder of a run; give --model runs/NAME/best")
    config = TrainConfig(**read_settings(folder / SETTINGS)).from_folder(folder)
    if config.trust_remote_code and not trust_remote_code:
        raise UserError(
            f"{folder} has Python code of its own; if you trust it: --trust-remote-code"
        )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    labels = saved_facts(folder)["labels"]
    model = prepare_model(build_model(config, tokenizer, labels), config, torch.device("cpu"))
    model.load_state_dict(read_weights(folder, model, tied_names(model)))
    return LoadedModel(model, tokenizer, labels, config)


def read_weights(folder: Path, model: nn.Module, tied: dict[str, str]) -> Weights:
    """The weights that are saved in `folder`, `tied` ones under all their names. Errors: UserError
    if they are another model's."""
    saved = load_file(folder / WEIGHTS)
    expected = model.state_dict()
    saved |= {name: saved[first] for name, first in tied.items() if first in saved}
    missing, unknown = sorted(expected.keys() - saved), sorted(saved.keys() - expected)
    other = [f"{name} is {tuple(saved[name].shape)} there and {tuple(tensor.shape)} now"
             for name, tensor in expected.items()
             if name in saved and saved[name].shape != tensor.shape]  # fmt: skip
    lists = {"other shapes": other, "only there": unknown, "only in model.py": missing}
    found = [f"{what}: {', '.join(names[:3])}{', ...' if names[3:] else ''}"
             for what, names in lists.items() if names]  # fmt: skip
    if found:
        raise UserError(
            f"the weights in {folder} are not those of the model that model.py builds now "
            f"({'; '.join(found)}); undo the change of model.py, or train in another run"
        )
    return saved


def saved_facts(folder: Path) -> dict[str, list[str]]:
    """The "labels" of a model's folder, and the names of its "frozen" parameters."""
    return json.loads((folder / FACTS).read_text(encoding="utf-8"))


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names of weights that are the same tensor as an earlier one, with the earlier name."""
    first: dict[int, str] = {}
    names = {
        name: first.setdefault(id(t), name) for name, t in model.state_dict(keep_vars=True).items()
    }
    return {name: earlier for name, earlier in names.items() if name != earlier}


def is_stock(model: Any) -> bool:
    """Whether transformers builds this model from its config.json: `pipeline` then loads it."""
    if not type(model).__module__.startswith("transformers.models."):
        return False
    try:
        with torch.device("meta"):  # no memory, no time
            twin = AutoModelForSequenceClassification.from_config(model.config)
    except ValueError:  # not a sequence classifier
        return False
    kinds, twins = ([(n, type(m)) for n, m in each.named_modules()] for each in (model, twin))
    return kinds == twins and not any("forward" in vars(m) for m in model.modules())


def describe(model: nn.Module, labels: list[str], config: TrainConfig) -> str:
    """The README.md of a model's folder: how to load it."""
    text = (
        f"A text classifier: {type(model).__name__} with {len(labels)} labels.\n\n"
        "In the project's folder:\n\n```bash\npython predict.py --model THIS_FOLDER TEXT\n```\n\n"
    )
    if is_stock(model) and config.truncate != "head+tail" and len(config.text_column) == 1:
        return text + (
            "Without the project:\n\n```python\nfrom transformers import pipeline\n\n"
            'classify = pipeline("text-classification", "THIS_FOLDER")\n'
            "classify(TEXTS, truncation=True)\n```\n"
        )
    return text + (
        "`transformers.pipeline` does not give the same labels: the model, or how its texts are\n"
        "prepared, is the project's own.\n"
    )
