"""What ranks do in tests about devices, their network, and what the ranks of a machine share."""

import os
import pickle
import platform
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import file_rows
import pyarrow as pa
import torch.distributed as dist
import transformers
from jobs import TIMEOUT, Patch
from transformers import AutoTokenizer, PreTrainedConfig

from training.checkpoint import pretrained
from training.checkpoint.pretrained_tokenizer import load_hf_tokenizer
from training.dataset import files
from training.dataset.source import Source
from training.distributed import ranks, watchdog
from training.settings.config import TrainConfig
from training.settings.errors import UserError


@contextmanager
def two_machines() -> Iterator[None]:
    """Join the process group as one of two ranks of a machine, `machine0` or `machine1`."""
    rank = int(os.environ["RANK"])
    os.environ["LOCAL_RANK"] = str(rank % 2)
    with Patch(platform, "node", lambda: f"machine{rank // 2}"):
        ranks.setup(TIMEOUT)
        yield


@contextmanager
def two_machines_of_one_name() -> Iterator[None]:
    number = str(int(os.environ["RANK"]) // 2)
    with (
        two_machines(),
        Patch(platform, "node", lambda: "localhost"),
        Patch(os, "environ", os.environ | {"GROUP_RANK": number}),  # torchrun sets it
    ):
        yield


def shared_results(calls: int, broken: int | None = None, one_name: bool = False) -> list[str]:
    """What local rank 0 of the machine has given in each of so many calls; one machine fails."""
    machine = int(os.environ["RANK"]) // 2

    def function(number: int) -> str:
        if machine == broken:
            raise OSError("broken")
        return f"{machine}, {number}"

    with two_machines_of_one_name() if one_name else two_machines():
        return [ranks.on_local_main(partial(function, number)) for number in range(calls)]


def hashed_files(config: TrainConfig, recent_ns: int) -> tuple[list[str], list[str]]:
    """Contents of all splits on two machines of two ranks; which files this rank has read."""
    read, digest = [], files.hashlib.file_digest

    def counting(file: Any, kind: str) -> Any:
        read.append(Path(file.name).name)
        return digest(file, kind)

    patches = Patch(files.hashlib, "file_digest", counting), Patch(files, "RECENT_NS", recent_ns)
    with two_machines(), patches[0], patches[1]:
        source = Source(file_rows, config)
        return [source.content(split) for split in ("train", "val", "test")], read


def data_set_requests(config: TrainConfig) -> tuple[list[str], int]:
    """The same for data sets of the hub; how often this rank has asked for one."""
    requests = []
    table = pa.table({"text": ["a", "b"], "label": ["x", "y"]})

    def load_dataset(path: str, name: str | None, split: str, revision: str | None) -> Any:
        requests.append(path)
        part = SimpleNamespace(iter=lambda size: [table])
        part.with_format = lambda kind: part
        features = dict.fromkeys(table.column_names)
        features = type("Features", (dict,), {"arrow_schema": table.schema})(features)
        return SimpleNamespace(
            select_columns=lambda columns: part, features=features, _fingerprint=f"f-{split}"
        )

    sys.modules["datasets"] = SimpleNamespace(load_dataset=load_dataset)  # type: ignore[assignment]
    with two_machines():
        source = Source(file_rows, config)
        return [source.content(split) for split in ("train", "val")], len(requests)


def model_requests(
    config: TrainConfig, folder: str, cache: Path, reachable: bool
) -> tuple[list[tuple[str, bool, bool]], str]:
    """Load "o/m", whose files are in `folder`, on two machines. Of each request: what was asked
    for, whether only of the cache, and whether local rank 0 had it by then; and the error."""
    requests: list[tuple[str, bool, bool]] = []

    def load(what: str, original: Any) -> Any:
        def call(name: str, local_files_only: bool = False, **options: Any) -> Any:
            if name == folder:  # a part of another request
                return original(name, **options)
            there = cache / f"{platform.node()} {what}"
            requests.append((what, local_files_only, there.exists()))
            if local_files_only and not there.exists():
                raise OSError("not in the cache")
            result = original(folder, **options)
            time.sleep(0.0 if local_files_only else 0.2)
            there.touch()
            return result

        return call

    def model_info(name: str, timeout: int) -> None:
        requests.append(("hub", False, True))
        if not reachable:
            raise ConnectionError("no route")

    classifier = transformers.AutoModelForSequenceClassification
    hub = SimpleNamespace(model_info=model_info)
    with two_machines(), ExitStack() as patches:
        for holder, name, what in (
            (PreTrainedConfig, "get_config_dict", "content"),
            (transformers.AutoConfig, "from_pretrained", "config"),
            (AutoTokenizer, "from_pretrained", "tokenizer"),
            (classifier, "from_pretrained", "weights"),
        ):
            patches.enter_context(Patch(holder, name, load(what, getattr(holder, name))))
        patches.enter_context(Patch(pretrained, "HfApi", lambda: hub))
        patches.enter_context(Patch(pretrained, "find_adapter_config_file", lambda *_, **__: None))
        try:
            tokenizer = load_hf_tokenizer(config)
            hf_config = pretrained.load_hf_config(config)
            pretrained.load_classifier(config, hf_config, tokenizer, ["a", "b", "c"])
        except UserError as error:
            return requests, str(error)
    return requests, ""


def broken_network(error: str) -> None:
    """`setup` where the first collective fails."""

    def fail(tensor: Any) -> Any:
        raise dist.DistBackendError(error)

    with Patch(ranks, "reduce_tensor", fail):
        ranks.setup(TIMEOUT)


def silent_network() -> list[int]:
    """`setup` where the first collective does not end: the exit codes that it asks for."""
    ended, codes, reduce_tensor = threading.Event(), [], ranks.reduce_tensor

    def exit_with(code: int) -> None:
        codes.append(code)
        ended.set()

    def hang(tensor: Any) -> Any:
        ended.wait(TIMEOUT)
        return reduce_tensor(tensor)

    with (
        Patch(ranks, "reduce_tensor", hang),
        Patch(ranks, "CONNECT_TIMEOUT_S", 0.1),
        Patch(os, "_exit", exit_with),
    ):
        ranks.setup(TIMEOUT)
    return codes


def recorded_collectives(prefix: str) -> tuple[str, list[str]]:
    """The path of this rank's flight recorder, and which collectives are in it."""
    ranks.setup(TIMEOUT)
    ranks.gather("x")
    with Patch(os, "environ", os.environ | {watchdog.DUMP_VARIABLES[0]: prefix}):
        path = watchdog.dump_flight_recorder()
    entries = pickle.loads(Path(path).read_bytes())["entries"]
    return path, [entry["profiling_name"] for entry in entries]
