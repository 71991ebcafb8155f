"""Small rows, a tiny model and rank processes for the tests. Nothing is downloaded."""

import json
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

from ranks import Ranks

from training.settings.config import TrainConfig

WORDS = {
    "animal": "cat dog horse cow sheep goat mouse fox wolf bear".split(),
    "food": "bread rice soup apple pear cheese noodle bean cake egg".split(),
    "weather": "rain snow wind storm sun cloud fog ice heat frost".split(),
}
SHARED = "the a very some old new big small today again and but with under 猫 狗".split()


QUICK = ("test_gradient_equals_the_full_batch", "test_one_all_reduce_per_step")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests on several ranks are slow, but for two that say most in little time."""
    for item in items:
        if "ranks" in getattr(item, "fixturenames", ()) and not item.name.startswith(QUICK):
            item.add_marker(pytest.mark.slow)


def make_rows(count: int, seed: int) -> list[tuple[str, str]]:
    """Texts of 2 to 24 words with their class; classes have about 6 : 3 : 1 rows."""
    rng = random.Random(seed)
    rows = []
    for number in range(count):
        label = rng.choices(list(WORDS), [6, 3, 1])[0] if number >= 3 else list(WORDS)[number]
        words = [rng.choice(WORDS[label] if rng.random() < 0.4 else SHARED)
                 for _ in range(rng.choice([2, 3, 5, 8, 13, 24]))]  # fmt: skip
        rows.append((" ".join([*words, str(number)]), label))
    return rows


def write_tsv(path: Path, rows: list[tuple[str, str]]) -> Path:
    lines = ["text\tlabel", *("\t".join(row) for row in rows)]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ranks]:
    pool = Ranks(tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """203 training rows: seven steps of 32, the last one of 11. 45 validation rows."""
    folder = tmp_path_factory.mktemp("rows")
    return {
        "train": write_tsv(folder / "train.tsv", make_rows(203, seed=1)),
        "val": write_tsv(folder / "val.tsv", make_rows(45, seed=2)),
    }


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A BERT of 30,000 parameters in a folder, as it would come from the hub."""
    from tiny import save_tiny

    texts = [text for text, _ in make_rows(300, seed=3)]
    return save_tiny(tmp_path_factory.mktemp("tiny") / "model", texts)


@pytest.fixture
def settings(
    files: dict[str, Path], tiny_model: Path, tmp_path: Path, tmp_path_factory: Any
) -> Callable[..., TrainConfig]:
    """A factory of settings for a short run of the tiny model in the test's own folder."""

    def make(**changes: Any) -> TrainConfig:
        values: dict[str, Any] = {
            "model": str(tiny_model), "max_length": 48, "train_file": (str(files["train"]),),
            "val_file": (str(files["val"]),), "epochs": 2, "lr": 3e-3, "log_every": 1,
            "runs_dir": str(tmp_path / "runs"), "run_name": "run", "timeout": 20.0,
            "cache_dir": str(tmp_path_factory.getbasetemp() / "cache"),
        } | changes  # fmt: skip
        return TrainConfig(**values)

    return make


def lines_of(config: TrainConfig, split: str = "train") -> list[dict[str, Any]]:
    """The lines of a run's metrics.jsonl."""
    path = Path(config.runs_dir) / str(config.run_name) / "metrics.jsonl"
    lines = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [line for line in lines if line["split"] == split]
