"""What differs between the supported versions of torch and transformers, each with its version.

Code asks for a name, not for a number: images of clusters have pre-releases such as 2.13.0a0, with
or without what 2.13.0 has. Torch is imported inside functions: settings are read before it is.
"""

import inspect
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
            installed = version(name)
            if [int(n) for n in re.findall("[0-9]+", installed)[:2]] < oldest:
                wanted = ".".join(map(str, oldest))
                command = f"{sys.executable} -m pip install '{name}>={wanted}'"
                problem = f"{name} {installed} is older than {wanted}"
                print(f"{program}: {problem}: {command}", file=sys.stderr)
                sys.exit(2)


def make_ddp(module: Any, **options: Any) -> Any:
    """DDP that takes rank 0's buffers at the start, not in each forward."""
    from torch.nn.parallel import DistributedDataParallel as DDP

    if "forward_sync_buffers" in inspect.signature(DDP).parameters:  # from torch 2.13 on
        return DDP(module, forward_sync_buffers=False, **options)
    ddp = DDP(module, **options)
    ddp.broadcast_buffers = False  # given to DDP, it would leave out the start as well
    return ddp


def allow_tf32() -> None:
    """In matrix products; sums and weights stay fp32."""
    from torch.backends.cuda import matmul

    if hasattr(matmul, "fp32_precision"):  # from torch 2.9 on
        matmul.fp32_precision = "tf32"
    else:
        matmul.allow_tf32 = True


def activation_checkpointing(model: Any) -> Callable[[dict[str, Any]], None]:
    """The method of a Hugging Face model that turns it on."""
    new = getattr(model, "activation_checkpointing_enable", None)  # from transformers 5.23 on
    return new or model.gradient_checkpointing_enable  # this warns then, and goes with 6
