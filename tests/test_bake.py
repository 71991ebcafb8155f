"""The template bakes what it says, for every answer, and refuses the answers that cannot work."""

import ast
import json
import os
import re
import shutil
import sys
import sysconfig
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest
from conftest import ROOT, Bake, Run, template_files
from cookiecutter.exceptions import FailedHookException, OutputDirExistsException
from cookiecutter.main import cookiecutter

FOLDER = "{{cookiecutter.project_slug}}"
QUESTIONS = json.loads((ROOT / "cookiecutter.json").read_text(encoding="utf-8"))
MODELS = [model for model in QUESTIONS["model"] if model != "other"]

# What was answered, by a readable name. Every choice of every question occurs.
OPTION_SETS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "minimal": {"license": "none", "include_slurm": False},
    "apache": {"license": "Apache-2.0"},
    "no-slurm-as-text": {"include_slurm": "no"},
    "bf16": {"precision": "bf16"},
    "fp16": {"precision": "fp16"},
    "own-model": {"model": "other", "model_name": " some-org/a_model-v1.5 "},
    "own-folder": {"model": "other", "model_name": "~/my models/模型-1"},
    **{model: {"model": model} for model in MODELS},
}
# The files that are not in every project: their names in the template, and when they are baked.
CONDITIONAL = {
    "{% if cookiecutter.license == 'MIT' %}LICENSE{% endif %}": "LICENSE",
    "{% if cookiecutter.license == 'Apache-2.0' %}LICENSE{% endif %}": "LICENSE",
    "{% if cookiecutter.__slurm == 'yes' %}launch.sbatch{% endif %}": "launch.sbatch",
}
# One file or more of each subject of the layout.
LAYOUT = """
    README.md config.toml model.py data.py metrics.py train.py predict.py benchmark.py launch.sh
    launch_multinode.sh
    pyproject.toml constraints.txt .gitignore .gitattributes sample/train.tsv sample/val.tsv
    sample/test.tsv training/settings/config.py training/distributed/ranks.py
    training/dataset/readers.py training/dataset/token_store.py training/step/batch_plan.py
    training/step/optimizer.py training/step/evaluation.py training/checkpoint/checkpoint.py
    training/tracking/tracker.py training/launch/launcher.py
""".split()
HOSTILE = {
    "quotes": 'Ken "Elf" S',
    "apostrophe": "O'Neil",
    "backslash": "back\\slash\\",
    "newline": "two\nlines",
    "colon-and-hash": "a: b # c",
    "emoji": "Zoë 🦜",
    "chinese": "李雷",
    "python": '"+__import__("os").system("touch pwned")+"',
    "triple-quotes": '""" + open("pwned", "w").write("") + """',
    "shell": "$(touch pwned) `touch pwned`; touch pwned",
    "markup": "[bold]<b>&amp;</b>[/bold]",
}
GOOD_SLUGS = ["a", "x1", "my-project", "my_project", "nlp-2026_v2", "refused", "a" * 64]
BAD_SLUGS = {
    "escapes": "../evil",
    "escapes-deep": "../not/yet/there",
    "inside-a-new-folder": "some/folder",
    "windows-path": "..\\evil",
    "here": ".",
    "parent": "..",
    "hidden": ".hidden",
    "option": "-rf",
    "underscore": "_private",
    "trailing-dash": "name-",
    "two-dashes": "my--project",
    "digit-first": "1abc",
    "upper-case": "MyProject",
    "space": "my project",
    "unicode": "李雷",
    "emoji": "a🦜",
    "dot": "my.project",
    "quote": 'a"b',
    "newline": "a\nb",
    "home": "~",
    "variable": "$HOME",
    "empty": "",
    "blank": " ",
    "too-long": "a" * 65,
    "much-too-long": "a" * 5000,
    "keyword": "class",
    "soft-keyword": "match",
    "standard-library": "code",
    "standard-library-dash": "concurrent",
    "dependency": "torch",
    "dependency-dash": "scikit-learn",
    "own-module": "train",
    "own-folder": "training",
    "windows-device": "com1",
    "windows-device-nul": "nul",
}
BAD_MODEL_NAMES = {
    "nothing": "",
    "blank": "  ",
    "quote": 'a"b',
    "apostrophe": "a'b",
    "backslash": "C:\\models\\x",
    "newline": 'x"\nlr = 5\ny = "',
    "code": '"+__import__("os").system("touch pwned")+"',
    "braces": "a}b",
    "comment": "a # b",
    "shell": "$(touch pwned)",
    "option": "--help",
    "control": "a\x07b",
}


def rendered_names(answers: dict[str, Any]) -> set[str]:
    """The files that these answers should give, worked out without Jinja."""
    license = answers.get("license", "MIT")
    slurm = str(answers.get("include_slurm", True)).lower() not in ("no", "false", "0", "n", "off")
    wanted = {
        f"{{% if cookiecutter.license == '{license}' %}}LICENSE{{% endif %}}",
        *([name for name in CONDITIONAL if "slurm" in name] if slurm else []),
    }
    names = set()
    for name in template_files():
        if name.startswith(FOLDER + "/"):
            inner = name.removeprefix(FOLDER + "/")
            if inner not in CONDITIONAL:
                assert "{" not in inner, f"{inner}: a conditional file that this test does not know"
                names.add(inner)
            elif inner in wanted:
                names.add(CONDITIONAL[inner])
    return names


def tree(folder: Path) -> dict[str, tuple[int, bytes]]:
    """Every file of a folder: its mode and its content. Empty folders count as well."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mode & 0o777,
            path.read_bytes() if path.is_file() else b"",
        )
        for path in folder.rglob("*")
    }


def file_names(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}


def rendered_files(project: Path) -> list[Path]:
    """The files that cookiecutter rendered; all others are copied as they are."""
    copied = QUESTIONS["_copy_without_render"]
    return [
        path
        for path in project.rglob("*")
        if path.is_file() and not any(path.match(pattern) for pattern in copied)
    ]


def scripts(project: Path) -> list[Path]:
    return sorted([*project.glob("*.sh"), *project.glob("*.sbatch")])


# -- what is baked -----------------------------------------------------------------------------


@pytest.fixture(scope="module", params=list(OPTION_SETS.values()), ids=list(OPTION_SETS))
def option_set(request: pytest.FixtureRequest, bake: Bake) -> tuple[dict[str, Any], Path]:
    return request.param, bake(**request.param)


Baked = tuple[dict[str, Any], Path]


def test_the_files_are_exactly_those_of_the_answers(option_set: Baked) -> None:
    """Nothing is missing and nothing strays in, whatever was answered."""
    answers, project = option_set
    assert file_names(project) == rendered_names(answers)
    assert set(LAYOUT) <= file_names(project)
    assert [path for path in project.rglob("*") if path.is_dir() and not any(path.iterdir())] == []


def test_nothing_is_left_unrendered(option_set: Baked) -> None:
    """No trace of the template's language is left in what was rendered."""
    _, project = option_set
    for path in rendered_files(project):
        text = path.read_text(encoding="utf-8")
        for mark in ("{{", "}}", "{%", "%}", "{#", "#}", "#%", "cookiecutter."):
            assert mark not in text, f"{mark} in {path.name}"
        assert text.endswith("\n") and not text.endswith("\n\n"), path.name


def test_code_is_copied_byte_for_byte(option_set: Baked) -> None:
    """A question never changes code: what is tested in the folder is what the user gets."""
    _, project = option_set
    copied = [p for p in project.rglob("*") if p.suffix in (".py", ".sh", ".tsv")]
    assert copied
    for path in copied:
        assert path.read_bytes() == (ROOT / FOLDER / path.relative_to(project)).read_bytes()


def test_python_compiles_and_toml_holds_the_answers(option_set: Baked, run: Run) -> None:
    """The answers are in config.toml and the name in pyproject.toml, and nothing else differs."""
    answers, project = option_set
    for path in project.rglob("*.py"):
        ast.parse(path.read_text(encoding="utf-8"), str(path))
    model = answers.get("model", "from-scratch")
    model = answers["model_name"].strip() if model == "other" else model
    expected = tomllib.loads((ROOT / FOLDER / "config.toml").read_text(encoding="utf-8"))
    expected["model"] = model
    expected["precision"] = answers.get("precision", "fp32")
    expected["lr"] = 1e-3 if model == "from-scratch" else 5e-5
    assert tomllib.loads((project / "config.toml").read_text(encoding="utf-8")) == expected
    # The project's own reader takes it as well.
    read = "from training.settings.flags import load_config as c; print(repr(c([]).model))"
    name = ast.literal_eval(run(project, sys.executable, "-Bc", read).stdout)
    assert name.endswith(model.removeprefix("~"))

    metadata = tomllib.loads((project / "pyproject.toml").read_text(encoding="utf-8"))
    in_place = tomllib.loads((ROOT / FOLDER / "pyproject.toml").read_text(encoding="utf-8"))
    assert metadata["project"].pop("name") == project.name == "text-classifier"
    assert in_place["project"].pop("name") == "{{ cookiecutter.project_slug }}"
    assert metadata == in_place


def test_the_settings_in_place_are_those_of_the_default_project(baked: Path) -> None:
    """The template's folder is a working project, with the settings that most users will get."""
    lines = (ROOT / FOLDER / "config.toml").read_text(encoding="utf-8").splitlines()
    assert [line for line in lines if not line.startswith("#%")] == (
        (baked / "config.toml").read_text(encoding="utf-8").splitlines()
    )


def test_the_license_is_the_chosen_one(bake: Bake) -> None:
    """A license names the author, and no year that would age or differ between two bakes."""
    mit = (bake(author="A. Author") / "LICENSE").read_text(encoding="utf-8")
    apache = (bake(author="A. Author", license="Apache-2.0") / "LICENSE").read_text("utf-8")
    assert mit.startswith("MIT License\n\nCopyright (c) A. Author\n")
    assert "Apache License\n                           Version 2.0" in apache
    assert "\n   Copyright A. Author\n" in apache


@pytest.mark.parametrize("answer", [False, "no", "false", "0", "n", "off", "False"])
def test_a_no_is_a_no_however_it_is_written(bake: Bake, answer: Any) -> None:
    """Switches hold when they are given as text, as on the command line."""
    assert not (bake(include_slurm=answer) / "launch.sbatch").exists()


@pytest.mark.parametrize("answer", [True, "yes", "true", "1", "y", "on", "True"])
def test_a_yes_is_a_yes_however_it_is_written(bake: Bake, answer: Any) -> None:
    """Switches hold when they are given as text, as on the command line."""
    assert (bake(include_slurm=answer) / "launch.sbatch").exists()


@pytest.mark.parametrize("question", ["license", "model", "precision"])
def test_a_choice_that_is_not_offered_is_refused(bake: Bake, tmp_path: Path, question: str) -> None:
    """A mistyped choice stops the bake before anything is written."""
    with pytest.raises(ValueError, match="none-of-these"):
        bake(output_dir=tmp_path, **{question: "none-of-these"})
    assert list(tmp_path.iterdir()) == []


def test_every_question_has_a_prompt_in_words() -> None:
    """People are asked in words, and every choice that has a label is a choice."""
    asked = [key for key in QUESTIONS if not key.startswith("_")]
    prompts = QUESTIONS["__prompts__"]
    assert list(prompts) == asked
    for key, prompt in prompts.items():
        if isinstance(QUESTIONS[key], list):
            assert list(prompt) == ["__prompt__", *QUESTIONS[key]]


# -- scripts -----------------------------------------------------------------------------------


def test_scripts_are_sound(baked: Path, run: Run) -> None:
    """Every script parses, passes shellcheck, can be executed and has no trap of Jinja's in it."""
    found = scripts(baked)
    assert [path.name for path in found] == ["launch.sbatch", "launch.sh", "launch_multinode.sh"]
    for path in found:
        run(baked, "bash", "-n", path)
        assert path.stat().st_mode & 0o111 == 0o111, f"{path.name} is not executable"
        assert path.read_bytes().startswith(b"#!"), path.name
    run(baked, Path(sys.executable).parent / "shellcheck", *found, ROOT / ".ci" / "run")


def test_rendered_scripts_hold_no_jinja_comment() -> None:
    """In a rendered shell file `${#array[@]}` would open a comment of Jinja's."""
    for name in template_files():
        if name.startswith(FOLDER) and ".sbatch" in name:
            assert "{#" not in (ROOT / name).read_text(encoding="utf-8")


def test_line_ends_are_those_of_unix(baked: Path) -> None:
    """A carriage return breaks scripts and strays into rows: none is baked, none will be."""
    for path in baked.rglob("*"):
        if path.is_file():
            assert b"\r" not in path.read_bytes(), path
    for name in template_files():
        assert name.endswith(".png") or b"\r" not in (ROOT / name).read_bytes(), name
    for folder in (ROOT, baked):
        assert "* text=auto eol=lf" in (folder / ".gitattributes").read_text().splitlines()


# -- hostile answers ---------------------------------------------------------------------------


@pytest.mark.parametrize("license", ["MIT", "Apache-2.0"])
@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE.keys())
def test_answers_are_data(bake: Bake, baked: Path, tmp_path: Path, text: str, license: str) -> None:
    """Whatever is typed lands in README and LICENSE letter by letter, and is never run."""
    project = bake(output_dir=tmp_path, project_name=text, author=text, license=license)
    assert f" {text}\n" in (project / "LICENSE").read_text(encoding="utf-8")
    assert text in (project / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in tmp_path.rglob("pwned")] == []
    assert not Path("pwned").exists()
    assert {path.name for path in tmp_path.iterdir()} == {project.name}
    for name in rendered_names({}) - {"README.md", "LICENSE"}:
        with_it = (project / name).read_bytes()
        assert with_it.replace(project.name.encode(), b"NAME") == (
            (baked / name).read_bytes().replace(baked.name.encode(), b"NAME")
        ), f"{name} depends on free text"


def typed(template: Path, settings: Path, out: Path, *lines: str, run: Run) -> str:
    """Answer the questions as a person does; the rest are left at their defaults."""
    command = [sys.executable, "-m", "cookiecutter", str(template), "-o", str(out)]
    command += ["--config-file", str(settings)]
    done = run(out, *command, input="\n".join(lines) + "\n" * 20, TMPDIR=str(settings.parent))
    return done.stdout


@pytest.mark.parametrize(
    "text",
    ["{{7*7}} {{ cycler.__init__.__globals__ }}", "{% raw %} {# no #} {%", "#% set x = 1", "}}{{"],
)
def test_typed_answers_are_not_rendered(
    template: Path, settings: Path, tmp_path: Path, run: Run, text: str
) -> None:
    """Template language in an answer is text as well: it is neither run nor evaluated."""
    output = typed(template, settings, tmp_path, text, "a-slug", text, "2", run=run)
    project = tmp_path / "a-slug"
    assert f"Copyright {text}\n" in (project / "LICENSE").read_text(encoding="utf-8")
    assert text in (project / "README.md").read_text(encoding="utf-8")
    assert "Project name" in output and "a small BERT, no download" in output


def test_the_default_slug_comes_from_the_name(bake: Bake) -> None:
    """Names in any script, with a digit first or with no letter at all give a folder name."""
    assert bake(project_name="Ticket Triage: DE/FR").name == "ticket-triage-de-fr"
    assert bake(project_name="李雷").name == "li-lei"
    assert bake(project_name="20 Newsgroups").name == "project-20-newsgroups"
    assert bake(project_name="🦜").name == "text-classifier"
    assert bake(project_name="../../evil").name == "evil"
    assert len(bake(project_name="word " * 100).name) <= 64


# -- names that are refused --------------------------------------------------------------------


@pytest.mark.parametrize("slug", GOOD_SLUGS)
def test_good_folder_names(bake: Bake, tmp_path: Path, slug: str) -> None:
    """A plain name is taken as it is."""
    assert bake(output_dir=tmp_path, project_slug=slug) == tmp_path / slug
    metadata = tomllib.loads((tmp_path / slug / "pyproject.toml").read_text(encoding="utf-8"))
    assert metadata["project"]["name"] == slug


def refusal(capfd: pytest.CaptureFixture[str]) -> str:
    """The one line that the hook said."""
    said = [line for line in capfd.readouterr().err.splitlines() if "is refused" in line]
    assert len(said) == 1
    return said[0]


@pytest.mark.parametrize("slug", BAD_SLUGS.values(), ids=BAD_SLUGS.keys())
def test_bad_folder_names(
    bake: Bake, tmp_path: Path, capfd: pytest.CaptureFixture[str], slug: str
) -> None:
    """One line says why, and nothing is on disk afterwards, inside or outside the folder."""
    out = tmp_path / "sub" / "out"
    out.mkdir(parents=True)
    before = tree(tmp_path)
    with pytest.raises(FailedHookException):
        bake(output_dir=out, project_slug=slug)
    assert tree(tmp_path) == before
    line = refusal(capfd)
    assert line.startswith(f"project_slug {slug[:80]!r} is refused: ")
    assert "use " in line


def test_an_absolute_folder_name_is_refused(
    bake: Bake, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """A project goes into the output folder and nowhere else."""
    out = tmp_path / "out"
    out.mkdir()
    with pytest.raises(FailedHookException):
        bake(output_dir=out, project_slug=f"{tmp_path}/elsewhere/project")
    assert list(tree(tmp_path)) == ["out"]
    assert "is refused" in refusal(capfd)


def test_every_name_in_the_project_is_taken(tmp_path: Path) -> None:
    """No project can be named after a module, a folder or a dependency of its own."""
    hook = (ROOT / "hooks" / "pre_gen_project.py").read_text(encoding="utf-8")
    taken = set(re.findall(r'TAKEN = """(.*?)"""', hook, re.DOTALL)[0].split())
    project = tomllib.loads((ROOT / FOLDER / "pyproject.toml").read_text(encoding="utf-8"))
    wanted = [*project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    names = {re.split(r"[<>=!~\[ ]", line)[0].replace("-", "_") for line in wanted}
    for name in template_files():
        inner = name.removeprefix(FOLDER + "/")
        if inner != name and not inner.startswith((".", "{")):
            names.add(inner.split("/")[0].removesuffix(".py"))
    assert {name for name in names if name.isidentifier()} <= taken


@pytest.mark.parametrize("name", BAD_MODEL_NAMES.values(), ids=BAD_MODEL_NAMES.keys())
def test_bad_model_names(
    bake: Bake, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    """A model name is a name or a path; nothing else can get into config.toml through it."""
    with pytest.raises(FailedHookException):
        bake(output_dir=tmp_path, model="other", model_name=name)
    assert list(tmp_path.iterdir()) == []
    assert refusal(capfd).startswith(f"model_name {name!r} is refused: ")


def test_a_model_name_that_would_be_ignored_is_refused(
    bake: Bake, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """An answer is used or refused, never silently dropped."""
    with pytest.raises(FailedHookException):
        bake(output_dir=tmp_path, model_name="some/model")
    assert list(tmp_path.iterdir()) == []
    assert "model=other" in refusal(capfd)


# -- where it is baked from and to -------------------------------------------------------------


@pytest.mark.parametrize("force", [False, True], ids=["plain", "overwrite"])
@pytest.mark.parametrize("model_name", ["", "fine/name"], ids=["refused", "fine"])
def test_an_existing_folder_of_the_user_stays(
    template: Path, settings: Path, tmp_path: Path, model_name: str, force: bool
) -> None:
    """What the user has in a folder of that name survives a refusal, and -f as well."""
    mine = tmp_path / "my-project" / "notes.txt"
    mine.parent.mkdir()
    mine.write_text("mine")

    def again() -> None:
        cookiecutter(
            str(template),
            no_input=True,
            config_file=str(settings),
            output_dir=str(tmp_path),
            overwrite_if_exists=force,
            extra_context={
                "project_slug": "my-project",
                "model": "other",
                "model_name": model_name,
            },
        )

    if force and model_name:
        again()
        assert (mine.parent / "train.py").exists()
    else:
        with pytest.raises(FailedHookException if force else OutputDirExistsException):
            again()
        assert file_names(tmp_path) == {"my-project/notes.txt"}
    assert mine.read_text() == "mine"


def test_two_bakes_are_identical(bake: Bake, baked: Path) -> None:
    """No time and no chance in the output: `cruft update` sees only the template's changes."""
    first, second = bake(author="X"), bake(author="X")
    assert tree(first) == tree(second)
    for name in template_files():
        if name.startswith(FOLDER) and not name.endswith((".py", ".png")):
            text = (ROOT / name).read_text(encoding="utf-8")
            assert not re.search(r"\{%-? *now\b|random_ascii_string|uuid4", text), name


def test_from_a_zip(bake: Bake, template: Path, tmp_path: Path) -> None:
    """A template that came as a zip gives the same project; unpacking loses executable bits."""
    archive = tmp_path / "ddp-template.zip"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("ddp-template-main/", "")
        for path in template.rglob("*"):
            if path.is_file():
                file.writestr(f"ddp-template-main/{path.relative_to(template)}", path.read_bytes())
    project, plain = bake(source=archive), bake()
    assert {k: v[1] for k, v in tree(project).items()} == {k: v[1] for k, v in tree(plain).items()}
    for path in scripts(project):
        assert path.stat().st_mode & 0o100, f"{path.name} is not executable"


def test_replay(template: Path, settings: Path, bake: Bake, tmp_path: Path) -> None:
    """The answers of an earlier bake give the same project again, without a question."""
    answers = {"project_name": 'A "B"', "license": "Apache-2.0", "include_slurm": "no"}
    first = bake(**answers, model="other", model_name="org/name", precision="bf16")
    saved = settings.parent / "replay" / f"{template.name}.json"
    kept = tmp_path / "answers.json"
    shutil.copy(saved, kept)
    again = cookiecutter(
        str(template), replay=str(kept), config_file=str(settings), output_dir=str(tmp_path / "out")
    )
    assert tree(Path(again)) == tree(first)


@pytest.mark.parametrize("folder", ["with some spaces", "naïve 李雷 🦜", "it's $HOME; & more"])
def test_odd_folders(
    bake: Bake,
    baked: Path,
    template: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    run: Run,
    folder: str,
) -> None:
    """Template and project may lie under names with spaces, quotes and any script."""
    here = tmp_path / folder
    shutil.copytree(template, here / "the template")
    project = bake(source=here / "the template", output_dir=here / "out")
    assert file_names(project) == rendered_names({})
    said = capfd.readouterr().out.splitlines()
    steps = [line.strip() for line in said if line.startswith("  ")]
    assert [step.split()[0] for step in steps] == ["cd", "python3", "./launch.sh"]
    # The first of the three commands leads into the project, as it is printed.
    where = run(tmp_path, "bash", "-ec", f"{steps[0]} && pwd -P").stdout.rstrip("\n")
    assert Path(where) == project.resolve()
    assert "--global-batch-size" in run(project, sys.executable, "train.py", "--help").stdout


# -- what the template needs -------------------------------------------------------------------


def test_the_environment_has_all_that_the_project_needs() -> None:
    """The project is tested in place, in the template's environment."""
    project = tomllib.loads((ROOT / FOLDER / "pyproject.toml").read_text(encoding="utf-8"))
    needs = project["project"]["dependencies"] + project["project"]["optional-dependencies"]["dev"]
    root = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert set(needs) <= set(root["dependency-groups"]["test"])


@pytest.mark.parametrize("folder", [".", FOLDER])
def test_every_dependency_is_pinned(folder: str) -> None:
    """constraints.txt holds an exact version of all that is asked for by name."""
    pins = (ROOT / folder / "constraints.txt").read_text() + (
        ROOT / FOLDER / "constraints.txt"
    ).read_text()
    pinned = dict(line.split("==") for line in pins.splitlines() if "==" in line)
    project = tomllib.loads((ROOT / FOLDER / "pyproject.toml").read_text(encoding="utf-8"))
    root = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    if folder == ".":
        needs = root["dependency-groups"]["test"]
    else:
        extras = project["project"]["optional-dependencies"]
        needs = project["project"]["dependencies"] + extras["dev"] + extras["hub"]
    for line in needs:
        assert re.split(r"[<>=]", line)[0] in pinned, line


def test_what_is_baked_is_clean(bake: Bake, tmp_path: Path, run: Run) -> None:
    """The user's first `ruff check` and `ruff format` find nothing, in a project of any name."""
    project = bake(output_dir=tmp_path, project_slug="my_reviews", author="O'Neil")
    run(project, sys.executable, "-m", "ruff", "check", "--no-cache", ".")
    run(project, sys.executable, "-m", "ruff", "format", "--no-cache", "--check", ".")


# What depends on a project's place and answers: its settings, its files' imports, its ranks. All
# files are imported. The launch is in the printed commands, also in a folder with a space.
DEPENDS_ON_PLACE = "test_settings or test_gradient_equals or test_command or test_mistakes"


@pytest.mark.slow
@pytest.mark.parametrize(
    "tests", [DEPENDS_ON_PLACE, pytest.param("not slow", marks=pytest.mark.long)]
)
def test_a_baked_project_passes_its_own_tests(
    bake: Bake, tmp_path: Path, run: Run, tests: str
) -> None:
    """The promises hold in what a user gets, wherever it lies, not only in the template."""
    project = bake(output_dir=tmp_path / "my projects", model="jhu-clsp/mmBERT-base")
    option = "-m" if tests == "not slow" else "-k"
    run(project, sys.executable, "-m", "pytest", "-q", "-ra", option, tests, timeout=1800)


# `python3 -m venv` as always, and then the packages of the environment that runs these tests are
# found first in the new one, so that pip has only the project itself to install.
PYTHON3 = """#!/bin/sh
'{python}' "$@" || exit
if [ "$1 $2" = "-m venv" ]; then
  echo 'import site, sys; sys.path.insert(0, "{packages}"); site.addsitedir("{packages}")' \\
    > "$(echo "$3"/lib/python*/site-packages)/tested.pth"
fi
"""


@pytest.mark.slow
@pytest.mark.parametrize("packages", ["tested", pytest.param("new", marks=pytest.mark.long)])
def test_the_printed_commands_work(
    bake: Bake, tmp_path: Path, capfd: pytest.CaptureFixture[str], run: Run, packages: str
) -> None:
    """The three commands that a new project starts with, as printed, end in a trained model."""
    project = bake(output_dir=tmp_path / "my projects")
    steps = [line for line in capfd.readouterr().out.splitlines() if line.startswith("  ")]
    commands = "\n".join([*steps[:-1], steps[-1] + " --max-steps 3 --run-name first"])
    variables = {}
    if packages == "tested":
        wrapper = tmp_path / "bin" / "python3"
        wrapper.parent.mkdir()
        text = PYTHON3.format(python=sys.executable, packages=sysconfig.get_path("purelib"))
        wrapper.write_text(text, encoding="utf-8")
        wrapper.chmod(0o755)
        variables["PATH"] = f"{wrapper.parent}:{os.environ['PATH']}"
        # pip takes the variable of a flag that begins with "no" for the value behind the flag.
        variables |= {"PIP_NO_INDEX": "1", "PIP_NO_BUILD_ISOLATION": "0"}
    else:
        download = ["-m", "pip", "download", "--no-deps", "-d", tmp_path / "wheels", "filelock"]
        if run(tmp_path, sys.executable, *download, check=False).returncode:
            pytest.skip("no package index can be reached")
    try:
        run(tmp_path, "bash", "-ec", commands, timeout=1800, **variables)
        assert (project / "runs" / "first" / "best" / "config.json").exists()
        # The dependencies are installed, and nothing of ours that could hide another's module.
        (installed,) = (project / ".venv").glob("lib/python*/site-packages/text_classifier-*")
        assert (installed / "top_level.txt").read_text().strip() == ""
    finally:
        shutil.rmtree(project / ".venv", ignore_errors=True)
