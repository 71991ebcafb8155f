"""Refuse answers that cannot work, with one line, before any file is written.

cookiecutter renders this file and runs it. Answers come in only as JSON inside string literals,
never as code. `cookiecutter.json` has already set the folder to "refused" where the asked name
might lead out of the output folder, so that nothing is made there before this hook speaks.
"""

import json
import keyword
import re
import sys

ASKED_SLUG = json.loads(
    r"""
{{ cookiecutter.__asked_slug | tojson }}
""".strip()
)
FOLDER = json.loads(
    r"""
{{ cookiecutter.project_slug | tojson }}
""".strip()
)
MODEL = json.loads(
    r"""
{{ cookiecutter.model | tojson }}
""".strip()
)
MODEL_NAME = json.loads(
    r"""
{{ cookiecutter.model_name | tojson }}
""".strip()
)

SLUG = re.compile(r"[a-z](?:[a-z0-9_-]{0,62}[a-z0-9])?")
# Names of the project's own parts, and of the packages that it needs or works with.
TAKEN = """
    benchmark benchmarks cache config data launch launch_multinode metrics model predict runs sample
    test tests tools train training
    accelerate cookiecutter datasets filelock huggingface_hub hypothesis matplotlib mypy numpy
    packaging pandas pip pyarrow pytest ruff safetensors scikit_learn scipy setuptools sklearn
    tensorboard tokenizers torch torchaudio torchrun torchvision tqdm transformers triton
    venv wheel
""".split()
WINDOWS = "con prn aux nul".split() + [port + str(n) for port in ("com", "lpt") for n in range(10)]
# A Hugging Face name or a path. Quotes, backslashes and control characters have no place in either.
MODEL_PATTERN = re.compile(r"[\w.~/][\w.~/:+@ -]{0,249}")


def slug_error(slug: str) -> str:
    """Why this folder name cannot be used; empty if it can."""
    if not SLUG.fullmatch(slug) or slug != FOLDER:
        return (
            "use 1 to 64 lower-case letters, digits, - and _ (no two - in a row), from a letter "
            "to a letter or digit, such as 'my-project'"
        )
    name = slug.replace("-", "_")
    modules = {m.lower() for m in sys.stdlib_module_names} | set(TAKEN)
    if name in modules or keyword.iskeyword(name) or keyword.issoftkeyword(name):
        return f"a Python module or a part of the project has this name; use 'my-{slug}' say"
    if name in WINDOWS:
        return f"Windows keeps this name for a device; use 'my-{slug}' say"
    return ""


def model_error(model: str, name: str) -> str:
    """Why this `model_name` cannot be used; empty if it can."""
    if model != "other" and name.strip():
        return "it is only used with model=other; choose that, or leave model_name empty"
    if model == "other" and not name.strip():
        return "model=other needs a Hugging Face name such as 'org/name', or a folder"
    if name.strip() and not MODEL_PATTERN.fullmatch(name.strip()):
        return "use letters, digits, spaces and . _ - / : + @ ~, as in 'org/name' or 'some/folder'"
    return ""


if error := slug_error(ASKED_SLUG):
    sys.exit(f"project_slug {ASKED_SLUG[:80]!r} is refused: {error}")
if error := model_error(MODEL, MODEL_NAME):
    sys.exit(f"model_name {MODEL_NAME[:80]!r} is refused: {error}")
