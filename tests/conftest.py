"""Bake projects from a clean copy of the template, and run commands in them."""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from cookiecutter.main import cookiecutter

ROOT = Path(__file__).resolve().parent.parent
Bake = Callable[..., Path]
Run = Callable[..., subprocess.CompletedProcess[str]]


def template_files() -> list[str]:
    """The template's files as git sees them: tools run in place leave others in the folder."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"],
        cwd=ROOT,
        check=True,
        capture_output=True,
        encoding="utf-8",
    )
    return sorted(name for name in listed.stdout.split("\0") if name and (ROOT / name).is_file())


def clean_environment(**changes: str) -> dict[str, str]:
    """This process's environment without what another Python or another launch left in it."""
    dropped = (
        "VIRTUAL_ENV PYTHONPATH PYTHONHOME RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE "
        "MASTER_ADDR MASTER_PORT OMP_NUM_THREADS"
    ).split()
    kept = {
        name: value
        for name, value in os.environ.items()
        if name not in dropped and not name.startswith(("SLURM_", "TORCHELASTIC_", "PYTEST_"))
    }
    # `python` and `torchrun` are those that run these tests.
    kept["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    return kept | changes


@pytest.fixture(scope="session", autouse=True)
def temporary_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """cookiecutter leaves rendered hooks in the folder for temporary files: give it one of ours."""
    before, tempfile.tempdir = tempfile.tempdir, str(tmp_path_factory.mktemp("temporary"))
    yield
    tempfile.tempdir = before


@pytest.fixture(scope="session")
def template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A clean copy of the template."""
    copy = tmp_path_factory.mktemp("template") / "ddp-template"
    for name in template_files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, copy / name)
    return copy


@pytest.fixture(scope="session")
def settings(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """cookiecutter's user settings: its own defaults, with nothing written to the home folder."""
    folder = tmp_path_factory.mktemp("cookiecutter")
    file = folder / "settings.yaml"
    file.write_text(f"replay_dir: '{folder}/replay'\ncookiecutters_dir: '{folder}/templates'\n")
    return file


@pytest.fixture(scope="session")
def bake(template: Path, settings: Path, tmp_path_factory: pytest.TempPathFactory) -> Bake:
    """`bake(output_dir=..., source=..., **answers)`: the folder of a new project."""

    def make(output_dir: Path | None = None, source: Path | None = None, **answers: Any) -> Path:
        return Path(
            cookiecutter(
                str(source or template),
                no_input=True,
                config_file=str(settings),
                output_dir=str(output_dir or tmp_path_factory.mktemp("baked")),
                extra_context=answers,
            )
        )

    return make


@pytest.fixture(scope="session")
def baked(bake: Bake) -> Path:
    """A project with the default answers. Shared: read it, run in it, but do not change it."""
    return bake()


@pytest.fixture(scope="session")
def run() -> Run:
    """`run(folder, *command, check=True, timeout=600, input=None, **variables)`, output as text."""

    def start(
        folder: Path,
        *command: str | Path,
        check: bool = True,
        timeout: float = 600,
        input: str | None = None,
        **variables: str,
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run(
            [str(part) for part in command],
            cwd=folder,
            env=clean_environment(**variables),
            input=input or "",
            capture_output=True,
            encoding="utf-8",
            timeout=timeout,
        )
        if check and done.returncode:
            pytest.fail(f"{command} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")
        return done

    return start
