"""Find the other machines before the ranks start; report in one line what prevents it."""

import errno
import fcntl
import os
import socket
import struct
import sys
import time
from contextlib import suppress

from training.settings.errors import UserError

SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of a network interface


def check_interfaces() -> None:
    """Refuse interface names that gloo or NCCL would fail on. Errors: UserError."""
    known = _interfaces()
    listing = ", ".join(known)
    for name in filter(None, os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")):
        if name not in known:
            problem = f"GLOO_SOCKET_IFNAME={name} is not a network interface of this machine"
            raise UserError(f"{problem}; gloo needs the exact name ({listing}), or unset it")
    names = os.environ.get("NCCL_SOCKET_IFNAME", "")  # here a name may be a prefix, or excluded
    prefixes = tuple(names.removeprefix("=").split(","))
    if names and names[0] != "^" and not any(name.startswith(prefixes) for name in known):
        problem = f"NCCL_SOCKET_IFNAME={names} matches no network interface of this machine"
        raise UserError(f"{problem} ({listing}); correct or unset it")


def use_loopback() -> None:
    """Ranks of one machine talk over loopback, whatever the host name resolves to."""
    for name in {"lo", "lo0"}.intersection(_interfaces()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)


def meet(address: str, port: int, node_rank: int, timeout: int) -> str:
    """Wait until the main machine listens; return its `host:port`. Errors: UserError."""
    if not address:
        raise UserError("give the address of node rank 0: --master-addr ADDRESS or MASTER_ADDR=...")
    host = resolve(address)
    endpoint = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    print(f"launch: node {node_rank} connects to {endpoint}", file=sys.stderr)
    if host.startswith("127.") and not address.startswith(("127.", "localhost")):
        problem = f"{address} is the loopback address {host} here"
        advice = "if the other machines cannot connect, give --master-addr as an IP address"
        print(f"launch: {problem}; {advice}", file=sys.stderr)
    elif interface := _interface_towards(host, port):
        # Gloo's own choice, the address of the host name, is often a loopback address.
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
    if node_rank > 0:
        _wait_for(host, port, endpoint, timeout)
        return endpoint
    try:
        socket.create_server(("", port)).close()  # PyTorch's store will listen there
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            problem = f"no rendezvous at {endpoint}: address already in use"
            raise UserError(f"{problem}; give another --master-port") from None
    return endpoint


def resolve(address: str) -> str:
    """The numeric address of a host; IPv4 first, since machines with both often disagree."""
    try:
        entries = socket.getaddrinfo(address.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        advice = "give a name or an IP address that every machine can reach"
        raise UserError(f"--master-addr {address} cannot be resolved ({error}); {advice}") from None
    return str(min(entries, key=lambda entry: entry[0] != socket.AF_INET)[4][0])


def _wait_for(host: str, port: int, endpoint: str, timeout: int) -> None:
    end = time.monotonic() + timeout
    while True:
        try:
            return socket.create_connection((host, port), timeout=5).close()
        except OSError as error:
            if time.monotonic() > end:
                problem = f"nothing answered at {endpoint} in {timeout} s ({error})"
                advice = "start node rank 0 there, check address, port and firewall"
                raise UserError(f"{problem}; {advice}, or set LAUNCH_TIMEOUT (seconds)") from None
        time.sleep(0.5)


def _interfaces() -> list[str]:
    return [name for _, name in socket.if_nameindex()]


def _interface_towards(host: str, port: int) -> str | None:
    """The interface with the IPv4 address that packets to `host` leave from, where known."""
    if ":" in host or sys.platform != "linux":
        return None
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))  # sends nothing
        except OSError as error:
            raise UserError(f"this machine has no route to {host} ({error})") from None
        own_address = socket.inet_aton(probe.getsockname()[0])
        for name in _interfaces():
            with suppress(OSError):  # an interface without an IPv4 address
                answer = fcntl.ioctl(probe, SIOCGIFADDR, struct.pack("16s16x", name.encode()))
                if answer[20:24] == own_address:
                    return name
    return None
