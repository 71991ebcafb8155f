"""Settings: defaults, then the file, then flags; what cannot work is refused in one line."""

import json
import re
import shutil
import subprocess
import sys
import time
import tomllib
from dataclasses import fields, replace
from pathlib import Path

import pytest

from training.settings.batch_sizes import batch_sizes
from training.settings.config import AUTO, PROJECT, TrainConfig
from training.settings.errors import UserError
from training.settings.flags import load_config, parse_args
from training.settings.setting import facts


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    path = tmp_path / "config.toml"
    path.write_text('train_file = "a.tsv"\nval_file = "b.tsv"\nlr = 1\nepochs = 7\n', "utf-8")
    return path


def load(toml: Path, *flags: str) -> TrainConfig:
    return load_config(["--config", str(toml), *flags])


def test_order_of_precedence(toml: Path) -> None:
    """A flag beats the file, the file beats the default; dashes and underscores are one."""
    assert load(toml).epochs == 7
    assert load(toml).lr == 1.0
    assert load(toml).batch_size == 16
    assert load(toml, "--epochs", "2").epochs == 2
    assert load(toml, "--batch_size=4").batch_size == load(toml, "--batch-size=4").batch_size == 4
    assert load(toml, "--no-group-by-length").group_by_length is False
    assert load(toml, "--no_group_by_length").group_by_length is False


def test_paths_in_the_file_are_beside_it(toml: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The project can be run from any folder; flags are relative to where the user is."""
    assert load(toml).train_file == (str(toml.parent / "a.tsv"),)
    assert load(toml, "--train-file", "x.tsv").train_file == ("x.tsv",)
    monkeypatch.chdir(toml.parent)
    assert load(toml).train_file == ("a.tsv",)


def test_batch_size_auto_in_a_file(toml: Path) -> None:
    """As a flag or in a file; the settings of a run can be given to another one."""
    assert load(toml, "--batch-size", "auto").batch_size == AUTO
    toml.write_text(load(toml, "--batch-size", "auto").to_toml(), "utf-8")
    assert 'batch_size = "auto"' in toml.read_text("utf-8")
    assert load(toml).batch_size == AUTO
    for value in ("0", '"many"'):
        toml.write_text(f'train_file = "a.tsv"\nbatch_size = {value}\n', "utf-8")
        with pytest.raises(UserError, match='batch_size must be a number from 1, or "auto"'):
            load(toml)


def test_other_rows_take_the_place_of_all_rows(toml: Path) -> None:
    """--train-file drops the file's validation rows; one way of setting the batch the other's."""
    assert load(toml, "--train-file", "x.tsv").val_file == ()
    assert load(toml, "--train-file", "x.tsv", "--val-file", "y.tsv").val_file == ("y.tsv",)
    toml.write_text('train_file = "a"\nglobal_batch_size = 32\n', "utf-8")
    config = load(toml, "--gradient-accumulation-steps", "4")
    assert batch_sizes(config, 2).global_batch_size == 16 * 4 * 2


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--epoch", "3"], "unknown flag --epoch, did you mean --epochs?"),
        (["--learning-rate", "1"], "unknown flag --learning-rate, did you mean --lr?"),
        (["--train_data=x.tsv"], "unknown flag --train-data, did you mean --train-file?"),
        (["--precision", "pf16"], "invalid choice: 'pf16'"),
        (["--epochs", "two"], "invalid int value: 'two'"),
        (["--epochs", "0"], "epochs must be at least 1, not 0"),
        (["--lr", "nan"], "lr must be a finite number"),
        (["--dropout", "1"], "dropout must be at least 0 and below 1, not 1.0"),
        (["--run-name", "../x"], "must be a plain folder name"),
        (["--run-name", ".."], "must be a plain folder name"),
        (["--run-name", "a\0b"], "must be a plain folder name"),
        (["--max-time", "90"], "max_time must be hours and minutes, as 11:30, not '90'"),
        (["--max-time", "1:75"], "max_time must be hours and minutes"),
        (["--batch-size", "0"], 'must be a number from 1, or "auto", not'),
        (["--batch-size", "auto", "--gradient-accumulation-steps", "2"], "auto goes with global"),
        (["--batch-size", "auto", "--strategy", "fsdp"], "batch_size auto goes with strategy ddp,"),
        (["--gradient-compression", "rows", "--strategy", "fsdp"], "rows goes with strategy ddp,"),
        (["--gradient-compression", "bf16", "--strategy", "dp"], "bf16 goes with strategy ddp or"),
        (["--compile", "--strategy", "dp"], "compile goes with strategy ddp or fsdp, not with dp"),
        (["--max-bad-steps", "0"], "max_bad_steps must be at least 1, not 0"),
        (["--multi-label", "--class-weights", "balanced"], "do not go with multi_label"),
        (["--model", "from-scratch", "--freeze-encoder"], "are for a pretrained model"),
        (["--config", "nowhere.toml"], "no settings file nowhere.toml"),
    ],
)
def test_flags_are_refused(toml: Path, flags: list[str], message: str) -> None:
    with pytest.raises(UserError, match=re.sub(r"[?(]", r"\\\g<0>", message)):
        load(toml, *flags)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("epoch = 3", "unknown setting 'epoch', did you mean epochs?"),
        ("num_train_epochs = 3", "did you mean epochs? (settings are declared in training/"),
        ("epochs = 1.5", "epochs must be of type int, not 1.5"),
        ('epochs = "1"', "epochs must be of type int"),
        ("header = 1", "header must be of type bool"),
        ("train_file = [1]", "must be a text or a list of texts"),
        ("epochs = ", "not valid TOML"),
    ],
)
def test_settings_files_are_refused(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "c.toml"
    path.write_text(line, "utf-8")
    with pytest.raises(UserError, match=re.sub(r"[?(]", r"\\\g<0>", message)):
        load(path, *([] if "train_file" in line else ["--train-file", "a"]))


def test_metric_is_one_of_those_of_the_project(toml: Path) -> None:
    """train.py gives the names that metrics.py has; without them, any name may be right."""
    metrics = {"accuracy": (len, True)}
    flags = ["--config", str(toml), "--metric"]
    assert load_config([*flags, "loss"], metrics).metric == "loss"
    assert load_config([*flags, "acuracy"]).metric == "acuracy"
    with pytest.raises(UserError, match=r"accuracy, loss, not 'acuracy', did you mean accuracy\?"):
        load_config([*flags, "acuracy"], metrics)


def test_batch_sizes() -> None:
    """The micro-batch shrinks where ranks are many; three numbers must agree."""
    config = TrainConfig(train_file=("a",), batch_size=16)
    assert vars(batch_sizes(config, 1)) == {
        "global_batch_size": 32, "batch_size": 16, "gradient_accumulation_steps": 2,
    }  # fmt: skip
    assert batch_sizes(config, 8).batch_size == 4
    assert batch_sizes(replace(config, global_batch_size=100), 3).gradient_accumulation_steps == 3
    familiar = replace(config, gradient_accumulation_steps=4, batch_size=8)
    assert batch_sizes(familiar, 2).global_batch_size == 64
    with pytest.raises(UserError, match=r"100 is not batch_size 8 x .* 4 x world size 2 = 64"):
        batch_sizes(replace(familiar, global_batch_size=100), 2)


def test_resolved_settings_read_back(toml: Path, tmp_path: Path) -> None:
    """What a run writes as its config.toml gives the same settings again."""
    config = load(toml, "--text-column", "a", 'b "c\\', "--delimiter", ";", "--dropout", "0")
    path = tmp_path / "again.toml"
    path.write_text(config.to_toml(), "utf-8")
    tomllib.loads(config.to_toml())
    again = load(path)
    assert Path(again.cache_dir).is_absolute()
    assert again.to_toml() == config.to_toml()
    paths = {f.name: getattr(config, f.name) for f in fields(TrainConfig) if facts(f).path}
    assert replace(again, **paths) == config


def test_a_byte_order_mark_is_read(toml: Path) -> None:
    """Some Windows editors begin a file with one."""
    toml.write_text(toml.read_text("utf-8"), "utf-8-sig")
    assert load(toml).epochs == 7


def test_facts_name_real_settings() -> None:
    names = {f.name for f in fields(TrainConfig)}
    for about in map(facts, fields(TrainConfig)):
        assert about.replaced_by in {None, *names}
        assert not names & set(about.aliases)


ADDED = """\
    focal_gamma: float = setting(2.0, "focal loss: higher looks more at hard rows", at_least=0)
    focal_alpha: float = 2.0
    focal_labels: tuple[str, ...] = ("a", "b")

"""
SEE_ADDED = """
import json
from pathlib import Path
from types import SimpleNamespace

from torch.utils.tensorboard import SummaryWriter

import rows
from training.checkpoint.state import check_same_run
from training.dataset.source import Source
from training.settings.errors import UserError
from training.settings.flags import load_config
from training.tracking.tracker import Tracker

key = load_config(["--config", "c.toml"])
flag = load_config(["--config", "c.toml", "--focal-gamma", "3", "--focal-alpha", "3"])
steps = {"total_steps": 1}
try:
    check_same_run(flag.resume_settings() | steps, key.resume_settings() | steps, False)
    resumed = ""
except UserError as error:
    resumed = str(error)
tracker = SimpleNamespace(writer=SummaryWriter("board"), config=flag)
Tracker.hyperparameters(tracker, {"accuracy": 1.0})
print(json.dumps({
    "flag": vars(flag), "key": vars(key), "saved": flag.to_toml(), "resumed": resumed,
    "store_keys": [Source(rows, config).key("train")[-1] for config in (flag, key)],
    "tensorboard": str(next(Path("board").iterdir()).read_bytes()),
}))
"""


def test_a_new_setting_takes_one_line(tmp_path: Path) -> None:
    """In a copy of `training/`, fields are added to TrainConfig, and nothing else is changed."""
    shutil.copytree(PROJECT / "training", tmp_path / "training")
    path, end = tmp_path / "training" / "settings" / "config.py", "    def resume_settings("
    path.write_text(path.read_text("utf-8").replace(end, ADDED + end), "utf-8")
    settings = 'train_file = "a"\nfocal_gamma = 4\nfocal_alpha = 4\n'
    (tmp_path / "c.toml").write_text(settings, "utf-8")
    (tmp_path / "rows.py").write_text("def rows(split, config): return ()\n", "utf-8")
    command = [sys.executable, "-c", SEE_ADDED]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    for name in ("focal_gamma", "focal_alpha"):
        assert seen["flag"][name] == 3.0
        assert seen["key"][name] == 4.0
        assert f"{name} = 3.0\n" in seen["saved"]
        assert f"{name} was 3.0, now 4.0" in seen["resumed"]
        assert [key[name] for key in seen["store_keys"]] == [3.0, 4.0]
        assert name in seen["tensorboard"]
    assert "focal_labels" in seen["tensorboard"]


def test_help_and_typos_answer_before_the_slow_imports(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Parsing imports neither torch nor transformers; every flag has a line of help."""
    slow = "'torch' in sys.modules or 'numpy' in sys.modules"
    code = f"import sys, training.settings.flags; sys.exit({slow})"
    subprocess.run([sys.executable, "-c", code], cwd=PROJECT, check=True)
    script = [sys.executable, str(PROJECT / "train.py")]
    began = time.perf_counter()
    shown = subprocess.run([*script, "--help"], capture_output=True, text=True, check=True).stdout
    assert time.perf_counter() - began < 20  # seconds; 0.1 where the machine is idle
    for f in fields(TrainConfig):
        assert (
            f"--{f.name.replace('_', '-')} " in shown or f"--{f.name.replace('_', '-')}," in shown
        )
    with pytest.raises(SystemExit) as stop:
        parse_args(["--epoch"])
    assert stop.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_the_projects_own_settings_are_valid() -> None:
    load_config([])
