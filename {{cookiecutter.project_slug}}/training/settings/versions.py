"""Which versions of torch and transformers are supported, and what differs between them.

Only what no call can do in all of them stands here. Code asks for a name and not for a number: the
images of clusters have pre-releases such as 2.13.0a0, with or without what 2.13.0 has.
"""

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from typing import Any

OLDEST = {"torch": [2, 8], "transformers": [5, 0]}  # as in pyproject.toml


def check_versions(program: str) -> None:
    """End with one line and exit code 2 if a package is too old. It is not imported for that."""
    for name, oldest in OLDEST.items():
        with suppress(PackageNotFoundError):  # the import says what is missing
            if _release(name) < oldest:
                wanted = ".".join(map(str, oldest))
                command = f"{sys.executable} -m pip install '{name}>={wanted}'"
                problem = f"{name} {version(name)} is older than {wanted}"
                print(f"{program}: {problem}: {command}", file=sys.stderr)
                sys.exit(2)


def collector_spares_tensors() -> bool:
    """Before torch 2.10, garbage collection can break FSDP's gradients: pytorch/pytorch#136358."""
    return _release("torch") >= [2, 10]


def _release(name: str) -> list[int]:
    return [int(n) for n in re.findall("[0-9]+", version(name))[:2]]


def activation_checkpointing(model: Any) -> Callable[[dict[str, Any]], None]:
    """The method of a Hugging Face model that turns it on."""
    new = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.23 on
    return new or model.gradient_checkpointing_enable  # this warns then, and goes with 6
