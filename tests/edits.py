"""The edits of the matrix: what users change in a project, as they would write it.

Each is a small patch: of each file the places that are replaced, (old, new), or the whole text of a
new file. An `old` that is not there exactly once is an error, so that no patch rots.
`test_edits.py` makes each edit in a new project and checks it; `tools/edits.py` writes the table in
docs/edits.md.
"""

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Patch = Mapping[str, Sequence[tuple[str, str]] | str]


@dataclass(frozen=True)
class Edit:
    title: str  # in docs/edits.md
    readme: str  # the row of "Edit this to change that" in the project's README that names its files
    patch: Patch
    checked: str = ""  # what is checked besides what all edits are checked for
    settings: Mapping[str, str | float] = ()  # type: ignore[assignment]  # keys of config.toml
    rows: str = "rows.tsv"  # what the test writes: rows.tsv, rows.jsonl or rows.db


BUILD = """    set_dropout(model_config, config.dropout)
    model = load_classifier(config, model_config, tokenizer, labels)
"""
BODY = """    if config.model == FROM_SCRATCH:
        size = {"hidden_size": 192, "num_attention_heads": 4, "intermediate_size": 512}
        model_config = AutoConfig.for_model("bert", num_hidden_layers=2, **size)
        model_config.vocab_size = len(tokenizer)
        model_config.max_position_embeddings = max(512, config.max_length)
    else:
        model_config = load_hf_config(config)
    set_dropout(model_config, config.dropout)
    model = load_classifier(config, model_config, tokenizer, labels)
    freeze(model, config)
    return model
"""
IMPORT_NN = ("from torch import Tensor\n", "from torch import Tensor, nn\n")
IMPORT_AUTO_MODEL = (
    "from transformers import AutoConfig, PreTrainedModel\n",
    "from transformers import AutoConfig, AutoModel, PreTrainedModel\n",
)
END_OF_IMPORTS = "\n\ndef build_model("
MEAN = """

class MeanPooling(nn.Module):
    \"\"\"A head over the mean of a row's tokens.\"\"\"

    def __init__(self, encoder: nn.Module, num_labels: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        hidden = self.encoder(input_ids, attention_mask).last_hidden_state
        mask = attention_mask[:, :, None].to(hidden.dtype)
        return self.head((hidden * mask).sum(1) / mask.sum(1))
"""
BUILD_MEAN = """    set_dropout(model_config, config.dropout)
    if config.pretrained and config.model != FROM_SCRATCH:
        encoder = AutoModel.from_pretrained(config.model, config=model_config)
    else:
        encoder = AutoModel.from_config(model_config)
    model = MeanPooling(encoder, len(labels))
"""
MEAN_POOLING = [
    IMPORT_NN,
    IMPORT_AUTO_MODEL,
    (END_OF_IMPORTS, MEAN + END_OF_IMPORTS),
    (BUILD, BUILD_MEAN),
]
ADAMW = "    return torch.optim.AdamW(groups, lr=config.lr, fused=True)\n"
GROUPS = """    trained = [p for p in model.parameters() if p.requires_grad]
    matrices, vectors = [p for p in trained if p.ndim >= 2], [p for p in trained if p.ndim < 2]
    decay = {"name": "decay", "params": matrices, "weight_decay": config.weight_decay}
    no_decay = {"name": "no_decay", "params": vectors, "weight_decay": 0.0}
    groups = [group for group in (decay, no_decay) if group["params"]]
"""
SMOOTHING = """    label_smoothing: float = learning(0.0, "0.1 helps if labels may be wrong", at_least=0, below=1)
"""
ROWS = """    files = {"train": config.train_file, "val": config.val_file, "test": config.test_file}
    return read_files(files[split], split, config)
"""
IMPORT_READER = """from training.dataset.readers import read_files
from training.dataset.rows import Item
"""
IMPORT_ROW = "from training.dataset.rows import Row\n"

EDITS = {
    "two_layer_head": Edit(
        "a head of two layers",
        "the encoder's head, the loss, any nn.Module",
        {
            "model.py": [
                IMPORT_NN,
                (
                    "    freeze(model, config)\n",
                    "    width = model_config.hidden_size\n"
                    "    model.classifier = nn.Sequential(\n"
                    "        nn.Linear(width, width), nn.Tanh(), nn.Linear(width, len(labels))\n"
                    "    )\n"
                    "    freeze(model, config)\n",
                ),
            ]
        },
    ),
    "mean_pooling": Edit(
        "mean pooling: an `nn.Module` around `AutoModel`",
        "the encoder's head, the loss, any nn.Module",
        {"model.py": MEAN_POOLING},
        "without the mask the start check refuses it",
    ),
    "focal_loss": Edit(
        "focal loss, with a setting",
        "the encoder's head, the loss, any nn.Module",
        {
            "training/settings/config.py": [
                (
                    SMOOTHING,
                    SMOOTHING
                    + '    focal_gamma: float = learning(2.0, "focal loss: higher looks more at hard '
                    'rows", at_least=0)\n',
                )
            ],
            "model.py": [
                (
                    "    return F.cross_entropy(logits, labels, reduction=\"none\", "
                    "label_smoothing=config.label_smoothing)\n",
                    "    losses = F.cross_entropy(logits, labels, reduction=\"none\")\n"
                    "    return (1 - torch.exp(-losses)) ** config.focal_gamma * losses\n",
                )
            ],
        },
        "val/loss is the focal loss; another gamma does not resume",
    ),
    "sqlite": Edit(
        "rows from SQLite, chosen by a setting",
        "where rows come from",
        {
            "training/settings/config.py": [
                (
                    '    cache_dir: str = running("cache"',
                    '    database: str = setting("rows.db", "SQLite file", path=True)\n'
                    '    source: str = setting("web", "which rows of the database")\n'
                    '    cache_dir: str = running("cache"',
                )
            ],
            "data.py": [
                ("import sys\n", "import sqlite3\nimport sys\n"),
                (IMPORT_READER, IMPORT_ROW),
                ("Iterable[Item]", "Iterable[Row]"),
                (
                    ROWS,
                    "    database = sqlite3.connect(config.database)\n"
                    '    query = "SELECT text, label FROM messages WHERE split = ? AND source = ? '
                    'ORDER BY id"\n'
                    "    for text, label in database.execute(query, (split, config.source)):\n"
                    "        yield Row(text, label=label)\n",
                ),
            ],
        },
        "another source, and another content of the database, train on other rows",
        rows="rows.db",
    ),
    "lstm": Edit(
        "an LSTM, without transformers",
        "the encoder's head, the loss, any nn.Module",
        {
            "model.py": [
                IMPORT_NN,
                (
                    END_OF_IMPORTS,
                    """

class LSTM(nn.Module):
    \"\"\"A head over the mean of an LSTM's states.\"\"\"

    def __init__(self, vocabulary: int, num_labels: int, width: int = 48) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.lstm = nn.LSTM(width, width, batch_first=True)
        self.head = nn.Linear(width, num_labels)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        states, _ = self.lstm(self.embedding(input_ids))
        mask = attention_mask[:, :, None].to(states.dtype)
        return self.head((states * mask).sum(1) / mask.sum(1))
"""
                    + END_OF_IMPORTS,
                ),
                (BODY, "    return LSTM(len(tokenizer), len(labels))\n"),
            ]
        },
        "with a tokenizer from scratch",
        {"model": "from-scratch"},
    ),
    "layer_wise_lr": Edit(
        "layer-wise learning rates",
        "the optimizer, the learning rate",
        {
            "training/step/optimizer.py": [
                ("import math\n", "import math\nimport re\n"),
                (
                    GROUPS,
                    """    groups: list[dict[str, Any]] = []
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:  # each layer learns 0.8 times as fast as the one above
            layer = re.search(r"layer\\.(\\d+)", name)
            depth = model.config.num_hidden_layers - int(layer[1]) if layer else 0
            decay = config.weight_decay if parameter.ndim >= 2 else 0.0
            lr = config.lr * 0.8**depth
            groups.append({"name": name, "params": [parameter], "lr": lr, "weight_decay": decay})
""",
                ),
            ]
        },
        "every layer has its rate in metrics.jsonl",
    ),
    "mcc": Edit(
        "Matthews' correlation as a metric",
        "what is measured",
        {
            "metrics.py": [
                (
                    '    "log_loss": (log_loss, False),\n',
                    '    "log_loss": (log_loss, False),\n'
                    '    "mcc": (lambda p, truth: sklearn_metrics().matthews_corrcoef(truth, '
                    "predicted(p, truth)), True),\n",
                )
            ]
        },
        "the best checkpoint is that with the highest",
        {"metric": "mcc"},
    ),
    "ece": Edit(
        "calibration error as a metric, lower is better",
        "what is measured",
        {
            "metrics.py": [
                (
                    "\n\nMETRICS:",
                    """

def ece(probabilities: np.ndarray, truth: np.ndarray) -> float:
    \"\"\"Expected calibration error, in ten bins of the likeliest label's probability.\"\"\"
    confidence, right = probabilities.max(1), probabilities.argmax(1) == truth
    bins = np.minimum((confidence * 10).astype(int), 9)
    gaps = [abs((right - confidence)[bins == i].sum()) for i in range(10)]
    return sum(gaps) / len(truth)


METRICS:""",
                ),
                (
                    '    "log_loss": (log_loss, False),\n',
                    '    "log_loss": (log_loss, False),\n    "ece": (ece, False),\n',
                ),
            ]
        },
        "the best checkpoint is that with the lowest",
        {"metric": "ece"},
    ),
    "ema": Edit(
        "a moving average of the weights",
        "a moving average of the weights, or other state",
        {
            "ema.py": '''"""A moving average of the weights, for evaluation and for best/."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn


class EMA:
    """Inside `with ema.average():` the model has the averaged weights; checkpoints hold these, and
    the state has the others."""

    def __init__(self, model: nn.Module, decay: float = 0.8) -> None:
        self.trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
        self.decay, self.other = decay, self.copies()  # the average; inside `average` the weights

    def copies(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.trained.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Call after each step."""
        for name, parameter in self.trained.items():
            self.other[name].lerp_(parameter, 1 - self.decay)

    @torch.no_grad()
    def swap(self) -> None:
        for name, parameter in self.trained.items():
            weight = parameter.clone()
            parameter.copy_(self.other[name])
            self.other[name].copy_(weight)

    @contextmanager
    def average(self) -> Iterator[None]:
        self.swap()
        yield
        self.swap()

    def state_dict(self) -> dict[str, Any]:
        return self.other

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.other = {name: t.to(self.trained[name].device) for name, t in state.items()}
        self.swap()
''',
            "train.py": [
                ("import data\nfrom model", "import data\nfrom ema import EMA\nfrom model"),
                (
                    '    state.parts |= {"monitor": monitor}',
                    "    ema = EMA(model)\n"
                    '    state.parts |= {"monitor": monitor, "ema": ema}',
                ),
                (
                    "        with monitor.throughput.pause():\n",
                    "        with monitor.throughput.pause(), ema.average():\n",
                ),
                (
                    "        schedule.step()\n        optimizer.zero_grad()\n",
                    "        ema.update()\n        schedule.step()\n        optimizer.zero_grad()\n",
                ),
            ],
        },
        "best/ has the averaged weights; a checkpoint without the average is refused",
    ),
    "tags": Edit(
        "a column with a list of tags",
        "where rows come from",
        {
            "data.py": [
                ("import sys\n", "import json\nimport sys\n"),
                (IMPORT_READER, IMPORT_ROW),
                ("Iterable[Item]", "Iterable[Row]"),
                (
                    ROWS,
                    ROWS.splitlines(keepends=True)[0]
                    + "    for file in files[split]:\n"
                    "        with open(file, encoding=\"utf-8\") as lines:\n"
                    "            for number, line in enumerate(lines, 1):\n"
                    "                row = json.loads(line)\n"
                    '                text = " ".join([*row["tags"], row["text"]])\n'
                    '                yield Row(text, label=row["label"], file=file, line=number)\n',
                ),
            ]
        },
        "tokens of the tags are in the store",
        rows="rows.jsonl",
    ),
    "step_hook": Edit(
        "a number of your own, logged after each step",
        "what happens in a step, or after each",
        {
            "train.py": [
                (
                    "        monitor.end_step(loss_sum, grad_norm, skipped)\n",
                    "        monitor.end_step(loss_sum, grad_norm, skipped)\n"
                    "        norm = model.classifier.weight.norm().item()\n"
                    '        tracker.record(progress.step, "weights", {"head_norm": norm})\n',
                )
            ]
        },
        "one line a step in metrics.jsonl, also after resuming",
    ),
    "two_forwards": Edit(
        "two forwards in a step (consistency, R-Drop)",
        "what the loss of a micro-batch is: two forwards, a penalty",
        {
            "training/step/loss.py": [
                ("from torch import Tensor, nn\n", "from torch import Tensor, nn\nfrom torch.nn import functional as F\n"),
                (
                    "        losses = self.loss_per_row(logits, labels, self.config)  # (batch,)\n",
                    """        losses = self.loss_per_row(logits, labels, self.config)  # (batch,)
        fewer = inputs["attention_mask"].clone()
        fewer[:, 2::3] = 0  # without every third token the model should say the same
        with self.autocast():
            again = logits_of(self.model(**inputs | {"attention_mask": fewer}))
        both = logits.log_softmax(1), again.log_softmax(1)
        losses = losses + F.kl_div(*both, reduction="none", log_target=True).sum(1)
""",
                ),
            ]
        },
        "train/loss differs from that of one forward",
    ),
    "sgd": Edit(
        "SGD with momentum",
        "the optimizer, the learning rate",
        {
            "training/step/optimizer.py": [
                (ADAMW, "    return torch.optim.SGD(groups, lr=config.lr, momentum=0.9)\n")
            ]
        },
        settings={"lr": 0.03},
    ),
    "lion": Edit(
        "Lion, from a package",
        "the optimizer, the learning rate",
        {
            "training/step/optimizer.py": [
                ("from torch.optim import Optimizer\n", "from lion import Lion\nfrom torch.optim import Optimizer\n"),
                (ADAMW, "    return Lion(groups, lr=config.lr)\n"),
            ]
        },
        settings={"lr": 0.001},
    ),
    "number": Edit(
        "a number beside the text, for the model",
        "numbers beside the text",
        {
            "data.py": [
                ("import sys\n", "import json\nimport sys\n"),
                (IMPORT_READER, IMPORT_ROW),
                ("Iterable[Item]", "Iterable[Row]"),
                (
                    ROWS,
                    ROWS.splitlines(keepends=True)[0]
                    + "    for file in files[split]:\n"
                    "        with open(file, encoding=\"utf-8\") as lines:\n"
                    "            for row in map(json.loads, lines):\n"
                    '                inputs = {"price": row["price"]}\n'
                    '                yield Row(row["text"], label=row["label"], inputs=inputs)\n',
                ),
            ],
            "model.py": [
                *((old, new.replace("MeanPooling", "WithPrice")
                   .replace("a row's tokens.", "a row's tokens, and its price.")
                   .replace("hidden_size, num", "hidden_size + 1, num")
                   .replace("attention_mask: Tensor)", "attention_mask: Tensor, price: Tensor)")
                   .replace("        return self.head((hidden * mask).sum(1) / mask.sum(1))",
                            "        mean = (hidden * mask).sum(1) / mask.sum(1)\n"
                            "        return self.head(torch.cat([mean, price[:, None]], dim=1))"))
                  for old, new in MEAN_POOLING),
            ],
        },
        "the price is learned from",
        rows="rows.jsonl",
    ),
}
# What comes from elsewhere in the same way in which a package would.
PACKAGES = {
    "lion": '''"""Lion, as a package would have it: https://arxiv.org/abs/2302.06675."""

import torch


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            first, second = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                mean = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(mean.lerp(p.grad, 1 - first).sign_(), alpha=-group["lr"])
                mean.lerp_(p.grad, 1 - second)
'''
}


def patched(text: str, places: Sequence[tuple[str, str]] | str, where: str) -> str:
    """The text of a file after an edit. Errors: ValueError if the patch does not apply."""
    if isinstance(places, str):
        return places
    for old, new in places:
        if (count := text.count(old)) != 1:
            raise ValueError(f"{where}: this is there {count} times, not once:\n{old}")
        text = text.replace(old, new)
    return text


def apply(edit: Edit, project: Path) -> dict[str, tuple[int, int]]:
    """Make the edit in a project; of each file the lines that were added and removed."""
    lines = {}
    for name, places in edit.patch.items():
        file = project / name
        assert file.exists() != isinstance(places, str), f"{name} is there, or is not"
        before = "" if isinstance(places, str) else file.read_text("utf-8")
        after = patched(before, places, f"{edit.title}, {name}")
        file.write_text(after, encoding="utf-8")
        diff = list(difflib.ndiff(before.splitlines(), after.splitlines()))
        lines[name] = tuple(sum(line.startswith(mark) for line in diff) for mark in "+-")
    return lines
