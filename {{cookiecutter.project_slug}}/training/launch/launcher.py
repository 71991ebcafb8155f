"""Start the ranks: `torchrun` with clearer errors and a graceful stop.

    python -m training.launch.launcher [torchrun flags] train.py [train.py flags]

A mistyped flag or a missing package is reported once, before PyTorch is imported.
"""

import argparse
import gc
import importlib.util
import logging
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path

from training.launch.cpus import share_cpus, usable_cpus
from training.launch.rendezvous import check_interfaces, meet, use_loopback
from training.settings.config import PROJECT
from training.settings.errors import USER_ERROR, UserError
from training.settings.flags import Parser, parse_args
from training.settings.versions import check_versions

REQUIRED = ("torch", "transformers", "numpy", "sklearn", "pyarrow")


def main(argv: list[str]) -> int:
    """Run the ranks until they end; return the launcher's exit code (table in `signals.py`)."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the ranks run, Ctrl-C just ends this
    gc.disable()  # PyTorch's import leaves little garbage, and looking for it takes time
    os.environ["LAUNCHED_AT"] = str(time.time())  # --max-time counts from here
    try:
        launcher, others = _launcher_flags().parse_known_args(argv)
        position = next((i for i, word in enumerate(others) if word.endswith(".py")), None)
        if position is None:
            raise UserError("no script given; start with ./launch.sh [train.py flags]")
        torchrun, script, flags = others[:position], others[position], others[position + 1 :]
        max_restarts = _integer("--max-restarts", launcher.max_restarts, low=0)
        if Path(script).name == "train.py":
            config = parse_args(flags)  # ends here after --help or a mistake
            if max_restarts and config.run_name is None and config.resume in ("auto", "never"):
                flags += ["--run-name", time.strftime("%Y%m%d-%H%M%S")]  # the same after a restart
        if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
            folder, python = shlex.quote(str(PROJECT)), shlex.quote(sys.executable)
            command = f"cd {folder} && {python} -m pip install -c constraints.txt -e ."
            raise UserError(f"no {', '.join(missing)} in {sys.executable}: {command}")
        check_versions("launch")
        given = launcher.nproc_per_node
        ranks = _integer("--nproc-per-node", given) if given else None
        restarts = [f"--max-restarts={max_restarts}"] if max_restarts else []
        torchrun = [*_rendezvous_flags(launcher), *restarts, *torchrun]
        return run_ranks(ranks or default_ranks(), torchrun, [script, *flags])
    except UserError as error:
        print(f"launch: {error}", file=sys.stderr)
        return USER_ERROR


def _launcher_flags() -> Parser:
    """The launcher's own flags. They may stand anywhere; the rest is torchrun's or train.py's."""
    parser = Parser("launch", add_help=False, allow_abbrev=False)
    defaults = {"nnodes": "1", "node-rank": "", "master-addr": "", "master-port": "29500"}
    defaults["nproc-per-node"] = os.environ.get("NPROC_PER_NODE", "")
    defaults["max-restarts"] = os.environ.get("MAX_RESTARTS", "0")
    for name, default in defaults.items():
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", default=default)
    return parser


def _integer(name: str, text: str, low: int = 1, high: int = 1_000_000) -> int:
    """`text` as an integer. Errors: UserError that names the flag and its limits."""
    if re.fullmatch(r"[0-9]{1,7}", text) and low <= int(text) <= high:
        return int(text)
    variable = name.strip("-").replace("-", "_").upper()
    limits = f"from {low} to {high}" if high < 1_000_000 else f"of at least {low}"
    raise UserError(f"{name} (or {variable}) must be a whole number {limits}, not {text!r}")


def _rendezvous_flags(flags: argparse.Namespace) -> list[str]:
    """torchrun's flags for where the ranks find each other."""
    nnodes = _integer("--nnodes", flags.nnodes)
    check_interfaces()
    if nnodes == 1:
        for name, default in (("PET_NNODES", "1"), ("PET_NODE_RANK", "0")):
            if os.environ.get(name, default) != default:  # torchrun would read it
                text = f"{name} is ignored: launch.sh is for one machine, launch_multinode.sh"
                print(f"launch: {text} (--nnodes, --node-rank) for several", file=sys.stderr)
        use_loopback()  # port 0 is any free one, so that two launches never collide
        where = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    else:
        node_rank = _integer("--node-rank", flags.node_rank, 0, nnodes - 1)
        port = _integer("--master-port", flags.master_port, 1, 65535)
        timeout = _integer("LAUNCH_TIMEOUT", os.environ.get("LAUNCH_TIMEOUT", "600"))
        # static: rank 0 is on the machine that was named, not on the one that came first
        endpoint = meet(flags.master_addr, port, node_rank, timeout)
        where = ["--rdzv-backend=static", f"--rdzv-endpoint={endpoint}"]
        where += [f"--node-rank={node_rank}", f"--rdzv-conf=timeout={timeout}"]
    return [f"--nnodes={nnodes}", *where]


def default_ranks() -> int:
    """One rank per accelerator; without one, two CPU ranks, or one where there is one core."""
    import torch

    from training.distributed.ranks import find_accelerator

    return torch.accelerator.device_count() if find_accelerator() else min(2, usable_cpus())


def run_ranks(ranks: int, torchrun: list[str], command: list[str]) -> int:
    """Run `command` on `ranks` ranks of this machine; return the exit code."""
    share_cpus(ranks)  # torchrun's default is one thread for each
    if "LOGLEVEL" not in os.environ:
        logging.disable()  # the agent's log would repeat at length what is reported here
    from training.launch.agent import run_agent  # imports PyTorch

    gc.enable()
    return run_agent(ranks, torchrun, command)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
