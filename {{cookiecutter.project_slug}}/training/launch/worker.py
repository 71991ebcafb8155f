"""The life of a rank's process: its process group, its watchdog, its failure, its exit code."""

import atexit
import ctypes
import gc
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import get_error_handler

from training.distributed import watchdog
from training.distributed.ranks import has_terminal, reduce_tensor, setup
from training.launch.cpus import share_cpus
from training.launch.signals import StoppedEarly
from training.settings.config import TrainConfig
from training.settings.errors import STOPPED_EARLY, USER_ERROR, needs_no_traceback
from training.settings.versions import collector_spares_tensors

CHECKPOINT_TIMEOUT_S = 10.0  # how long a failed rank waits for a checkpoint that is being written


def run(main: Callable[[TrainConfig, torch.device], None], config: TrainConfig) -> None:
    """Call `main(config, device)` in a process group, then leave with the right exit code.

    Python's shutdown is cut short: FSDP's caches keep gloo's threads alive, and it can abort over
    them. A failed rank leaves at once, without another collective that could hang.
    """
    gc.freeze()  # imported objects stay: no collection needs to look at them
    if config.strategy != "fsdp" or collector_spares_tensors():
        gc.enable()  # else Monitor collects, between steps
    os.umask(os.umask(0o077) | 0o002)  # what is written is not for everybody to change
    die_with_launcher()
    get_error_handler().initialize()
    code = 0
    try:
        choose_kernels(config)
        # The watchdog ends a wait first, since it knows more than a collective.
        device, store = setup(config.timeout + watchdog.COLLECTIVE_MARGIN_S)
        thread = watchdog.Watchdog(store, config.timeout, config.step_timeout or config.timeout)
        if dist.get_world_size() > 1:
            thread.start()
        main(config, device)
        thread.stop()
    except Exception as error:
        code = _report(error)
    except KeyboardInterrupt:  # before there was a StopRequest
        code = 130
    except StoppedEarly:
        code = STOPPED_EARLY
    else:
        gc.collect()  # what `main` leaves may hold the group
        reduce_tensor(torch.zeros(1))  # no rank leaves while others still communicate
        dist.destroy_process_group()
        atexit._run_exitfuncs()  # a library that reports a run may rely on them
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def choose_kernels(config: TrainConfig) -> None:
    """Call first. With `--deterministic`, PyTorch refuses operations without such a kernel."""
    if "OMP_NUM_THREADS" not in os.environ:  # not started by a launcher
        share_cpus(int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        torch.set_num_threads(min(torch.get_num_threads(), int(os.environ["OMP_NUM_THREADS"])))
    if config.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read at cuBLAS's first call
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if config.precision == "tf32":  # only matrix products; sums and weights stay fp32
        torch.set_float32_matmul_precision("high")


def _report(error: Exception) -> int:
    """Print and record why this rank fails, let a checkpoint reach the disk; the exit code."""
    if not needs_no_traceback(error):
        error.add_note(f"in: {watchdog.position}")
        if advice := advice_for(error):
            error.add_note(f"hint: {advice}")
        watchdog.write_error("".join(traceback.format_exception(error)))
    elif has_terminal():
        print(f"\ntrain.py: {error}", file=sys.stderr, flush=True)
    get_error_handler().record_exception(error)  # for the launcher
    for thread in threading.enumerate():
        if thread.name == "checkpoint":
            thread.join(CHECKPOINT_TIMEOUT_S)
    return USER_ERROR if needs_no_traceback(error) else 1


def advice_for(error: Exception) -> str:
    """What to do about a failure that has a usual cause, or ""."""
    text = str(error)  # some are plain RuntimeErrors, without a type or a code of their own
    if isinstance(error, torch.OutOfMemoryError | MemoryError) or "can't allocate memory" in text:
        rows, length = watchdog.position.shape
        problem = f"memory ran out with {rows} rows of {length} tokens at a time"
        advice = f"--batch-size {max(1, rows // 2)} needs less and gives the same result"
        others = "--gradient-checkpointing and a shorter --max-length need less too"
        return f"{problem}: {advice} (--eval-batch-size in an evaluation); {others}"
    if re.search(r"DataLoader worker .*(killed|exited unexpectedly)|Bus error", text):
        advice = "--num-workers 0 starts none; in a container, give it more --shm-size"
        return f"a loader process was killed, mostly because memory is short: {advice}"
    if "Expected to have finished reduction" in text:
        advice = "every one must, on every rank, unless requires_grad_(False) freezes it"
        return f"a parameter of model.py did not contribute to the loss: {advice}"
    return ""


def die_with_launcher() -> None:
    """Ask Linux to end this process when the launcher dies, so that no orphan holds a GPU."""
    if sys.platform == "linux" and dist.is_torchelastic_launched():
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
