"""Where settings come from: defaults, then `config.toml`, then command-line flags."""

import argparse
import re
import sys
import tomllib
import typing
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from training.settings.config import AUTO, PROJECT, TrainConfig, resolve_path
from training.settings.errors import UserError, did_you_mean
from training.settings.setting import facts
from training.settings.versions import check_versions

FACTS = {f.name: facts(f) for f in fields(TrainConfig)}
ALIASES = {alias: name for name, about in FACTS.items() for alias in about.aliases}
HINTS = typing.get_type_hints(TrainConfig)
# The type of one value: int for `int | None`, str for `tuple[str, ...]`.
TYPES: dict[str, type] = {name: (*typing.get_args(hint), hint)[0] for name, hint in HINTS.items()}
LISTS = [name for name, hint in HINTS.items() if typing.get_origin(hint) is tuple]


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise UserError(message)


def build_parser() -> Parser:
    """One flag per field of TrainConfig, in the fields' groups."""
    parser = Parser(
        usage="./launch.sh [--nproc-per-node N] [flags]   or   python train.py [flags]",
        description="Settings come from these defaults, then from config.toml, then from flags.",
        allow_abbrev=False,
        formatter_class=lambda prog: argparse.HelpFormatter(prog, max_help_position=34, width=100),
        argument_default=argparse.SUPPRESS,
    )
    parser.add_argument("--config", metavar="FILE", help="default: config.toml beside train.py")
    group: Any = parser
    for f in fields(TrainConfig):
        about, kind = FACTS[f.name], TYPES[f.name]
        if about.group:
            group = parser.add_argument_group(about.group)
        default = " ".join(f.default) if isinstance(f.default, tuple) else f.default
        text = about.help + (f" (default: {default})" if default not in (None, "") else "")
        options: dict[str, Any] = {"help": text.strip().replace("%", "%%")}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        elif about.choices:
            options["choices"] = about.choices
        else:
            options["type"] = number_or_auto if about.auto else kind
            options["metavar"] = {str: "TEXT", int: "N", float: "X"}[kind]
        if f.name in LISTS:
            options["nargs"] = "+"
        group.add_argument(_flag(f.name), **options)
    return parser


def number_or_auto(text: str) -> int:
    """A number from 1, or AUTO for "auto". Errors: ArgumentTypeError."""
    if text != "auto" and not re.fullmatch("[1-9][0-9]*", text):
        raise argparse.ArgumentTypeError(f'must be a number from 1, or "auto", not {text!r}')
    return AUTO if text == "auto" else int(text)


def read_settings(path: Path) -> dict[str, Any]:
    """Read and check a settings file. Errors: UserError that names the key and the closest one."""
    try:
        values = tomllib.loads(path.read_text(encoding="utf-8-sig"))  # Windows editors add a BOM
    except FileNotFoundError:
        raise UserError(f"no settings file {path}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not valid TOML: {error}") from None
    is_here = path.parent.resolve() == Path.cwd()  # then relative paths stay as they are
    for key, value in values.items():
        if key not in FACTS:
            hint = did_you_mean(ALIASES.get(key, key), FACTS)
            hint += " (settings are declared in training/settings/config.py)"
            raise UserError(f"{path}: unknown setting {key!r}{hint}")
        values[key] = _typed(path, key, value)
        if FACTS[key].path and not is_here:
            values[key] = resolve_path(values[key], FACTS[key], path.parent)
    return values


def _typed(path: Path, key: str, value: Any) -> Any:
    """A value of a settings file as its field has it. Errors: UserError for another type."""
    kind = TYPES[key]
    if FACTS[key].auto and type(value) in (int, str):
        try:
            return number_or_auto(str(value))
        except argparse.ArgumentTypeError as error:
            raise UserError(f"{path}: {key} {error}") from None
    if key in LISTS:
        texts = [value] if isinstance(value, str) else value
        if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
            return tuple(texts)
        raise UserError(f"{path}: {key} must be a text or a list of texts, not {value!r}")
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise UserError(f"{path}: {key} must be of type {kind.__name__}, not {value!r}")
    return value


def load_config(argv: list[str], metrics: Mapping[str, Any] | None = None) -> TrainConfig:
    """Defaults, then the settings file, then flags. Errors: UserError.

    `metrics`: METRICS of metrics.py, which `--metric` must be one of; None: it is not checked.
    """
    parser = build_parser()
    # --batch_size=8 is --batch-size=8
    argv = [re.sub("^--[^=]*", lambda flag: flag[0].replace("_", "-"), word) for word in argv]
    namespace, unknown = parser.parse_known_args(argv)
    if unknown:
        flag = unknown[0].partition("=")[0]
        alias = ALIASES.get(flag.removeprefix("--").replace("-", "_"))
        hint = did_you_mean(_flag(alias) if alias else flag, parser._option_string_actions)
        raise UserError(f"unknown flag {flag}{hint}")
    given = vars(namespace).items()
    flags: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in given}
    values = read_settings(Path(flags.pop("config", PROJECT / "config.toml")))
    # A flag for one way of setting the batch takes the place of the other way in the file, and
    # --train-file that of all the file's rows: its validation rows would not fit other ones.
    values = {k: v for k, v in values.items() if FACTS[k].replaced_by not in flags}
    config = TrainConfig(**(values | flags))
    config.check()
    if metrics is not None:
        config.check_metric(metrics)
    return config


def parse_args(
    argv: list[str] | None = None, metrics: Mapping[str, Any] | None = None
) -> TrainConfig:
    """`load_config`, with errors as one line on the screen and exit code 2."""
    check_versions("train.py")
    try:
        return load_config(sys.argv[1:] if argv is None else argv, metrics)
    except UserError as error:
        print(f"train.py: {error}  (--help lists every flag)", file=sys.stderr)
        sys.exit(2)
