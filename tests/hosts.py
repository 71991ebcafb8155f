"""Two hosts on this machine: network namespaces with nothing but a cable between them."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress

ADDRESSES = ("10.77.0.1", "10.77.0.2")


@contextmanager
def two_hosts(rate: str = "") -> Iterator[tuple[str, str]]:
    """The names of two namespaces, joined by a veth pair; `rate` shapes it: 200mbit, 1gbit.

    Errors: OSError or CalledProcessError where this user may not make them.
    """
    names = (f"host-a-{os.getpid()}", f"host-b-{os.getpid()}")
    ends = (f"va{os.getpid()}", f"vb{os.getpid()}")
    try:
        for name in names:
            _ip("netns", "add", name)
        _ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            _ip("link", "set", end, "netns", name)
            _ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            _ip("-n", name, "link", "set", end, "up")
            _ip("-n", name, "link", "set", "lo", "up")
            if rate:
                shape = f"tc qdisc add dev {end} root tbf rate {rate} burst 256kb latency 100ms"
                _ip("netns", "exec", name, *shape.split())
        yield names
    finally:
        for name in names:
            with suppress(OSError):  # there is no `ip`
                _ip("netns", "del", name, check=False)  # and the veth pair with it


def _ip(*words: str, check: bool = True) -> None:
    subprocess.run(["ip", *words], check=check, capture_output=True, encoding="utf-8")
