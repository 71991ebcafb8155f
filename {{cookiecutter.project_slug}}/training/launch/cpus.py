"""How many CPUs this process may use, and how many threads follow from that."""

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path


def usable_cpus(root: Path = Path("/")) -> int:
    """CPUs that this process may use, which in a container or under Slurm are not all."""
    count = len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1
    return max(1, min([count, *map(int, _quotas(root))]))


def _quotas(root: Path) -> Iterator[float]:
    """CPUs that this process's control groups and those around them allow (`docker --cpus=4`)."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text("utf-8").splitlines() if groups.exists() else []:
        _, controllers, group = line.split(":", 2)  # "4:cpu,cpuacct:/a/b"; of version 2 "0::/a/b"
        if controllers and "cpu" not in controllers.split(","):
            continue
        names = ("cpu.cfs_quota_us", "cpu.cfs_period_us") if controllers else ("cpu.max",)
        mount = root / "sys/fs/cgroup" / ("cpu" if controllers else "")
        inner = mount / group.lstrip("/")  # in a container it may not exist; `mount` then is ours
        for folder in (inner, *inner.parents):
            with suppress(OSError, ValueError):  # no such file; no limit is "max" or -1
                quota, period = " ".join((folder / n).read_text("utf-8") for n in names).split()
                if int(quota) > 0:
                    yield int(quota) / int(period)


def share_cpus(ranks: int) -> None:
    """Set the threads of each of this machine's `ranks`, where the user has not: call before
    PyTorch is imported in them. Tokenizing uses all CPUs, since only one rank does it."""
    cpus = usable_cpus()
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cpus // ranks)))
    os.environ.setdefault("RAYON_NUM_THREADS", str(cpus))
