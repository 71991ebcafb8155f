"""Start the ranks: `torchrun`, with the manners that this project wants.

    python -m training.launch.launcher [torchrun flags] train.py [train.py flags]

`launch.sh`, `launch_multinode.sh` and `launch.sbatch` end here. What is added to `torchrun`:
a mistyped flag or a missing package is told at once and once, before PyTorch is imported; the
CPU's cores are shared out among the ranks; the other machines are looked for; a signal asks the
ranks to save and stop; a failure is told in a few lines, the first error last.
"""

import argparse
import contextlib
import gc
import importlib.util
import logging
import os
import re
import shlex
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from training.launch.failure_report import describe_exit, failure_order, report_failures
from training.launch.rendezvous import check_interfaces, meet, use_loopback
from training.settings.config import PROJECT
from training.settings.errors import USER_ERROR, UserError
from training.settings.flags import Parser, parse_args

SHUTDOWN_TIMEOUT_S = (
    5  # seconds that the other ranks have to end by themselves after one has failed
)
REQUIRED = ("torch", "transformers", "numpy", "sklearn", "pyarrow")


def main(argv: list[str]) -> int:
    """Run the ranks to their end; return the exit code of the whole."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # until the ranks run, Ctrl-C just ends this
    gc.disable()  # PyTorch's import leaves little garbage, and looking for it takes time
    os.environ["LAUNCHED_AT"] = str(time.time())  # --max-time counts from here
    try:
        launcher, rest = _launcher_flags().parse_known_args(argv)
        at = next((i for i, argument in enumerate(rest) if argument.endswith(".py")), None)
        if at is None:
            raise UserError(
                "which script? python -m training.launch.launcher [flags] train.py [flags]"
            )
        torchrun, script, flags = rest[:at], rest[at], rest[at + 1 :]
        restarts = int(_whole("--max-restarts", launcher.max_restarts, 0))
        if Path(script).name == "train.py":
            config = parse_args(flags)  # ends here after --help or a mistake
            if restarts and config.run_name is None and config.resume in ("auto", "never"):
                flags += ["--run-name", time.strftime("%Y%m%d-%H%M%S")]  # for all attempts
        if missing := [name for name in REQUIRED if importlib.util.find_spec(name) is None]:
            raise UserError(f"no {', '.join(missing)} in {sys.executable}: {_how_to_install()}")
        ranks = launcher.nproc_per_node and _whole("--nproc-per-node", launcher.nproc_per_node)
        again = [f"--max-restarts={restarts}"] if restarts else []
        torchrun = [*_rendezvous(launcher), *again, *torchrun]
        return run_ranks(int(ranks or default_ranks()), torchrun, [script, *flags])
    except UserError as error:
        print(f"launch: {error}", file=sys.stderr)
        return USER_ERROR


# -- flags ---------------------------------------------------------------------------------------


def _launcher_flags() -> Parser:
    """The launcher's own flags. They may stand anywhere; the rest is torchrun's or train.py's."""
    parser = Parser("launch", add_help=False, allow_abbrev=False)
    for name, default in (
        ("nproc-per-node", os.environ.get("NPROC_PER_NODE", "")),
        ("nnodes", "1"),
        ("node-rank", ""),
        ("master-addr", ""),
        ("master-port", "29500"),
        ("max-restarts", os.environ.get("MAX_RESTARTS", "0")),
    ):
        parser.add_argument(f"--{name}", f"--{name.replace('-', '_')}", default=default)
    return parser


def _whole(name: str, text: str, low: int = 1, high: int = 1_000_000) -> int:
    """`text` as a whole number. Errors: UserError that says which flag to give."""
    if re.fullmatch(r"[0-9]{1,7}", text) and low <= int(text) <= high:
        return int(text)
    variable = name.strip("-").replace("-", "_").upper()
    limits = f"from {low} to {high}" if high < 1_000_000 else f"of at least {low}"
    raise UserError(f"{name} (or {variable}) must be a whole number {limits}, not {text!r}")


def _rendezvous(flags: argparse.Namespace) -> list[str]:
    """torchrun's flags for where the ranks find each other."""
    nnodes = _whole("--nnodes", flags.nnodes)
    if nnodes > 1:
        node_rank = _whole("--node-rank", flags.node_rank, 0, nnodes - 1)
        port = _whole("--master-port", flags.master_port, 1, 65535)
        patience = _whole("LAUNCH_TIMEOUT", os.environ.get("LAUNCH_TIMEOUT", "600"))
    check_interfaces()
    if nnodes == 1:  # port 0: whichever is free, so that two launches never collide
        use_loopback()
        where = ["--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", "--local-addr=127.0.0.1"]
    else:  # static: rank 0 is on the machine that was named, not on the one that came first
        endpoint = meet(flags.master_addr, port, node_rank, patience)
        where = ["--rdzv-backend=static", f"--rdzv-endpoint={endpoint}"]
        where += [f"--node-rank={node_rank}", f"--rdzv-conf=timeout={patience}"]
    return [f"--nnodes={nnodes}", *where]


def _how_to_install() -> str:
    folder, python = shlex.quote(str(PROJECT)), shlex.quote(sys.executable)
    return f"cd {folder} && {python} -m pip install -c constraints.txt -e ."


def usable_cpus() -> int:
    """CPUs that this process may run on, which in a container or under Slurm are not all."""
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def default_ranks() -> int:
    """One rank per accelerator; without one, two CPU ranks, or one where there is one core."""
    import torch

    if torch.accelerator.is_available():
        return torch.accelerator.device_count()
    return min(2, usable_cpus())


# -- the ranks -----------------------------------------------------------------------------------


def run_ranks(ranks: int, torchrun: list[str], command: list[str]) -> int:
    """Run `command` as so many ranks of this machine; return the exit code.

    Local rank 0 has the terminal. What the others print goes to a file each, and on the screen
    only when one of them is the first to fail.
    """
    # Before PyTorch is imported in the ranks: left to itself, torchrun gives each one thread.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, usable_cpus() // ranks)))
    if "LOGLEVEL" not in os.environ:
        logging.disable()  # the agent's own log repeats at length what is told here

    import torch.distributed as dist
    from torch.distributed import run
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher import api

    gc.enable()
    asked: list[int] = []  # signals that asked for a stop
    pids: list[int] = []

    def pass_on() -> None:
        # To the rank alone, not to its process group: its data loaders must live till it has saved.
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)

    def on_signal(number: int, frame: Any) -> None:
        asked.append(number)
        if number == signal.SIGINT and len(asked) > 1:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise SignalException("stop now", signal.SIGINT)  # the agent ends the ranks
        pass_on()

    class Agent(LocalElasticAgent):
        """torchrun's agent, which on a signal would end the ranks and fail, asks them instead."""

        def _start_workers(self, worker_group: Any) -> dict[int, Any]:
            for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP):
                if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup wants it
                    signal.signal(number, on_signal)
            workers = super()._start_workers(worker_group)
            pids[:] = workers.values()
            context: Any = self._pcontext
            close = context.close  # it would give ranks that hang half a minute
            context.close = lambda number=None, timeout=SHUTDOWN_TIMEOUT_S: close(
                number, min(timeout, SHUTDOWN_TIMEOUT_S)
            )
            if asked:
                pass_on()
            return workers

        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            codes = [failure.exitcode for failure in result.failures.values()]
            if asked or USER_ERROR in codes:  # what the user must mend fails each time
                self._remaining_restarts = 0
            if codes and self._remaining_restarts > 0:
                rank, first = min(result.failures.items(), key=failure_order)
                print(f"launch: rank {rank} failed, {describe_exit(first)}; all start again from the "
                      f"last checkpoint ({self._remaining_restarts - 1} restarts left)",
                      file=sys.stderr, flush=True)  # fmt: skip
            return result

    vars(api)["LocalElasticAgent"] = Agent  # the agent that elastic_launch makes
    options = ["--log-dir", tempfile.mkdtemp(prefix="ranks-"), "--signals-to-handle=SIGQUIT"]
    options += [*torchrun, f"--nproc-per-node={ranks}"]
    args = run.parse_args([*options, *command])
    config, python, python_args = run.config_from_args(args)
    if args.redirects == args.tee == "0":
        files = dict.fromkeys(range(1, ranks), Std.ALL)
        config.logs_specs = DefaultLogsSpecs(args.log_dir, redirects=files)
    code, keep_logs = 0, False
    try:
        api.elastic_launch(config, python)(*python_args)
    except ChildFailedError as error:
        code = report_failures(error.failures, asked, args.log_dir)
        keep_logs = code != USER_ERROR
    except SignalException as error:
        print("launch: stopped at once; the last checkpoint stands", file=sys.stderr)
        code = 128 + error.sigval
    except (dist.DistError, RendezvousError) as error:
        reason = str(error).partition("\n")[0]
        if "EADDRINUSE" in reason:
            reason += "; give another --master-port"
        print(f"launch: no rendezvous at {config.rdzv_endpoint}: {reason}", file=sys.stderr)
        code = 1
    if not keep_logs:
        shutil.rmtree(args.log_dir, ignore_errors=True)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
