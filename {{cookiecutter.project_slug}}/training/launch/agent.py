"""Run the ranks of this machine with torchrun's agent, and return the launcher's exit code.

`Agent` is the one that torchrun uses, with other answers to signals and to failed ranks. The
methods that it overrides begin with an underscore, but they are the documented way to extend an
agent: https://docs.pytorch.org/docs/stable/elastic/agent.html, "Extending the Agent".
"""

import contextlib
import dataclasses
import os
import shutil
import signal
import sys
import tempfile
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import run
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException, Std
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.launcher.api import LaunchConfig

from training.distributed import watchdog
from training.launch.failure_report import describe_exit, failure_order, report_failures
from training.settings.errors import USER_ERROR

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
SHUTDOWN_TIMEOUT_S = 5  # how long ranks may take to end once another rank has failed


class Agent(LocalElasticAgent):
    """Asks the ranks to save and stop on a signal; torchrun's agent would end them and fail.

    Errors of `run`: ChildFailedError if ranks failed for good; SignalException at a second SIGINT.
    """

    def __init__(self, config: LaunchConfig, python: Any, arguments: list[str]) -> None:
        # As `torch.distributed.launcher.api.launch_agent` does it, which offers no other agent.
        where = config.rdzv_backend, config.rdzv_endpoint, config.run_id
        nodes = config.min_nodes, config.max_nodes, config.local_addr
        rendezvous = RendezvousParameters(*where, *nodes, **config.rdzv_configs)
        # By name, since PyTorch adds settings with each version.
        names = {field.name for field in dataclasses.fields(WorkerSpec)}
        settings = {name: value for name, value in vars(config).items() if name in names}
        settings |= {"entrypoint": python, "args": tuple(arguments)}
        handler = get_rendezvous_handler(rendezvous)
        spec = WorkerSpec(local_world_size=config.nproc_per_node, rdzv_handler=handler, **settings)
        logs: Any = config.logs_specs
        super().__init__(spec, logs, log_line_prefix_template=config.log_line_prefix_template)
        self.stop_signals: list[int] = []  # those received so far
        self.restarts_left = spec.max_restarts
        self.pids: list[int] = []
        self.is_stopping = False
        # Those that stay ignored, as nohup wants it for SIGHUP.
        self.ignored = [n for n in STOP_SIGNALS if signal.getsignal(n) is signal.SIG_IGN]

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self.is_stopping = False
        self._set_handlers()
        workers = super()._start_workers(worker_group)
        self._set_handlers()  # PyTorch has set its own
        self.pids = list(workers.values())
        if self.stop_signals:
            self._send(signal.SIGTERM)
        return workers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        signal.alarm(SHUTDOWN_TIMEOUT_S)  # it returns at once, unless ranks have to end
        result = super()._monitor_workers(worker_group)
        signal.alarm(0)
        if not result.failures:
            return result
        self.pids = []
        self._add_late_failures(worker_group, result.failures)
        codes = [failure.exitcode for failure in result.failures.values()]
        # A mistake of the user's would fail again each time.
        if self.stop_signals or USER_ERROR in codes or self.restarts_left == 0:
            raise ChildFailedError(worker_group.spec.get_entrypoint_name(), result.failures)
        self.restarts_left -= 1
        rank, failure = min(result.failures.items(), key=failure_order)
        problem = f"launch: rank {rank} failed, {describe_exit(failure)}"
        action = f"start again from the last checkpoint ({self.restarts_left} restarts left)"
        print(f"{problem}; all ranks {action}", file=sys.stderr)
        return result

    def _add_late_failures(self, worker_group: WorkerGroup, failures: dict[int, Any]) -> None:
        """Add ranks that were on their way out when another one's end was noticed.

        One of them may have failed first. Before torch 2.10, PyTorch left them out.
        """
        context: Any = self._pcontext
        for worker in worker_group.workers:
            local_rank, rank = worker.local_rank, worker.global_rank
            code = context.subprocess_handlers[local_rank].proc.poll()
            if code and rank not in failures:
                error_file = context.error_files[local_rank]
                failures[rank] = ProcessFailure(local_rank, worker.id, code, error_file)

    def _shutdown(self, *args: Any, **options: Any) -> None:
        self.is_stopping = True
        signal.alarm(SHUTDOWN_TIMEOUT_S)
        super()._shutdown(*args, **options)
        signal.alarm(0)

    def _on_alarm(self, number: int, frame: Any) -> None:
        """Kill ranks that do not end. PyTorch waits 30 s for them: `--shutdown-timeout` is new, and
        ignored after a rank's failure."""
        # While all ranks exist, only the launcher took long: it was suspended by Ctrl-Z, say.
        if self.is_stopping or self._send(0) < len(self.pids):
            self._send(signal.SIGKILL)

    def _set_handlers(self) -> None:
        for number in STOP_SIGNALS:
            signal.signal(number, signal.SIG_IGN if number in self.ignored else self._on_signal)
        signal.signal(signal.SIGALRM, self._on_alarm)

    def _on_signal(self, number: int, frame: Any) -> None:
        self.stop_signals.append(number)
        if number == signal.SIGINT and len(self.stop_signals) > 1:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise SignalException("stop now", signal.SIGINT)  # `run` ends the ranks
        if len(self.stop_signals) == 1:
            text = "launch: asked to stop: the ranks save after this step; Ctrl-C again: at once\n"
            os.write(2, text.encode())  # a handler must not use Python's buffered streams
        self._send(signal.SIGTERM)

    def _send(self, number: int) -> int:
        """Signal the ranks, but not their loaders, which a rank still needs; how many exist."""
        existing = 0
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
                existing += 1
        return existing


def set_device_defaults(log_dir: str) -> None:
    """Set what PyTorch reads in the ranks, where the user has not set it under any of its names."""
    defaults = [
        ("2000", "TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"),  # collectives to keep
        ("1", "TORCH_NCCL_DUMP_ON_TIMEOUT"),
        (f"{log_dir}/collectives_rank_", *watchdog.DUMP_VARIABLES),
    ]
    if torch.version.cuda and torch.cuda.is_available():  # less memory is lost between tensors
        names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
        names = names if torch.__version__ >= "2.11" else names[::-1]  # which ignore the new name
        defaults.append(("expandable_segments:True", *names))
    for value, *names_of_one in defaults:
        if not any(name in os.environ for name in names_of_one):
            os.environ[names_of_one[0]] = value


def run_agent(ranks: int, torchrun: list[str], command: list[str]) -> int:
    """Run `command` on `ranks` ranks of this machine; return the launcher's exit code.

    Local rank 0 has the terminal. What another prints is shown only if it is the first to fail.
    """
    log_dir = tempfile.mkdtemp(prefix="ranks-")
    set_device_defaults(log_dir)
    args = run.parse_args(["--log-dir", log_dir, *torchrun, f"--nproc-per-node={ranks}", *command])
    config, python, arguments = run.config_from_args(args)
    if args.redirects == args.tee == "0":
        redirects = dict.fromkeys(range(1, ranks), Std.ALL)
        config.logs_specs = DefaultLogsSpecs(args.log_dir, redirects=redirects)
    # From 2.10 on PyTorch sets handlers only for these, so that no signal is lost at the start.
    # Before, one that comes in the milliseconds in which it creates the ranks ends them at once.
    os.environ.setdefault("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGQUIT")
    code = 0
    try:
        agent = Agent(config, python, arguments)
        try:
            agent.run()
        finally:
            agent.get_worker_group().spec.rdzv_handler.shutdown()
    except ChildFailedError as error:
        code = report_failures(error.failures, agent.stop_signals, args.log_dir)
        if code != USER_ERROR:
            return code  # what the ranks have printed is kept
    except SignalException as error:
        print("launch: stopped at once; what was saved before is kept", file=sys.stderr)
        code = 128 + error.sigval
    except (dist.DistError, RendezvousError) as error:
        reason = str(error).partition("\n")[0]
        print(f"launch: no rendezvous at {config.rdzv_endpoint}: {reason}", file=sys.stderr)
        code = 1
    shutil.rmtree(log_dir, ignore_errors=True)
    return code
