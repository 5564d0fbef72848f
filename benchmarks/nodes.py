"""Two "nodes" on one machine: network namespaces joined by a link with a rate limit and byte counters.

    with two_nodes() as nodes:
        of_rank_0, of_rank_1 = nodes.run("benchmarks.wire:measure", cases=[...])

     namespace longspan-<pid>-0                        namespace longspan-<pid>-1
     rank 0, 10.77.0.1, veth0 ======================== veth1, 10.77.0.2, rank 1
        tbf limits what rank 0 sends                tbf limits what rank 1 sends

Needs root, `ip` and `tc`. The namespaces reach only each other, and are removed when the block ends, also on errors.
"""

import ctypes
import importlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

ROOT = Path(__file__).parent.parent
HEADER_BYTES = 14 + 20 + 20 + 12
"""Bytes of Ethernet, IPv4 and TCP headers (with timestamps) per packet. The veth carries segments of up to 64 KB."""

_ADDRESSES = ("10.77.0.1", "10.77.0.2")
_PORT = 29500
_NAME = re.compile(r"longspan-(\d+)-[01]")


class NodesError(click.ClickException):
    """The two nodes cannot be created, or a rank on one of the nodes failed."""


def unavailable() -> str | None:
    """Return why this process cannot create two nodes, with a hint, or None if no obstacle is known."""
    if os.geteuid() != 0:
        return (
            f"two nodes need root to make network namespaces, and this is user {os.geteuid()}\n\nhint: run it as root"
        )
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None]
    if missing:
        return f"{' and '.join(missing)} not found\n\nhint: install iproute2"
    return None


@contextmanager
def two_nodes() -> Iterator["Nodes"]:
    """Create the namespaces and an unlimited link, and remove them after the block, an error or SIGTERM."""
    reason = unavailable()
    if reason is not None:
        raise NodesError(reason)
    _remove([name for name in namespaces() if not Path(f"/proc/{_NAME.fullmatch(name)[1]}").exists()])
    names = (f"longspan-{os.getpid()}-0", f"longspan-{os.getpid()}-1")
    with _sigterm_raises():
        try:
            for name in names:
                _call("ip", "netns", "add", name)
            # Create each end inside its namespace, so that nothing appears in the machine's own.
            _call("ip", "link", "add", "veth0", "netns", names[0], "type", "veth", "peer", "veth1", "netns", names[1])
            for rank, name in enumerate(names):
                _bring_up(name, f"veth{rank}", _ADDRESSES[rank])
            yield Nodes(names)
        finally:
            _remove(names)


def namespaces() -> list[str]:
    """List the existing namespaces that any process made with this module."""
    listed = [line.split()[0] for line in _call("ip", "netns", "list").splitlines() if line]
    return [name for name in listed if _NAME.fullmatch(name)]


@dataclass(frozen=True)
class Nodes:
    """The names of the two namespaces."""

    names: tuple[str, str]

    def run(self, function: str, timeout: float = 3600.0, **arguments: Any) -> list[Any]:
        """Call `function`, "module:name", with a `Link` and the arguments on both ranks, and return both results.

        Each rank is a new process with one thread, in a gloo group over the link. Arguments and results are passed as JSON.
        If a rank fails, the other rank is killed. Raises NodesError: a rank failed.
        """
        with tempfile.TemporaryDirectory() as folder:
            files = [Path(folder) / f"{rank}.json" for rank in (0, 1)]
            ranks = [self._start(rank, function, arguments, file) for rank, file in enumerate(files)]
            try:
                _wait_for(ranks, time.monotonic() + timeout)
            finally:
                for rank in ranks:
                    rank.kill()
                    rank.wait()
            answers = [json.loads(file.read_text()) if file.exists() else None for file in files]
        errors = [_describe(*pair) for pair in enumerate(zip(ranks, answers, strict=True))]
        if any(errors):
            raise NodesError(f"{function}: " + "; ".join(filter(None, errors)))
        return [answer["result"] for answer in answers]

    def _start(self, rank: int, function: str, arguments: dict[str, Any], file: Path) -> subprocess.Popen:
        task = {"rank": rank, "function": function, "arguments": arguments, "file": str(file)}
        environment = {
            **os.environ,
            "GLOO_SOCKET_IFNAME": f"veth{rank}",
            "OMP_NUM_THREADS": "1",
            "TORCH_CPP_LOG_LEVEL": "ERROR",  # silences the store's warning about addresses without host names
        }
        command = [sys.executable, "-c", "from benchmarks.nodes import serve; serve()", json.dumps(task, default=vars)]
        return subprocess.Popen(["ip", "netns", "exec", self.names[rank], *command], cwd=ROOT, env=environment)


@dataclass(frozen=True)
class Link:
    """This rank's end of the link, used in the rank's process."""

    device: str

    def limit(self, bits_per_second: float | None) -> None:
        """Set the rate of both directions; None lifts the limit. Collective."""
        dist.barrier()
        if "tbf" in _call("tc", "qdisc", "show", "dev", self.device):
            _call("tc", "qdisc", "del", "dev", self.device, "root")
        if bits_per_second is not None:
            # A burst of one millisecond suffices for timers at high rates, with a small error; below 64 KB the kernel
            # would split segments. The queue holds all bytes that sockets have in flight: no drops, so TCP never backs off.
            burst = max(70_000, int(bits_per_second / 8 * 0.001))
            rate = ("rate", f"{int(bits_per_second)}bit", "burst", str(burst), "limit", str(64 << 20))
            _call("tc", "qdisc", "add", "dev", self.device, "root", "tbf", *rate)
        dist.barrier()

    def sent(self) -> tuple[int, int]:
        """Return the bytes (with headers) and packets sent from this end so far, by the device's counters."""
        folder = Path("/sys/class/net") / self.device / "statistics"
        return int((folder / "tx_bytes").read_text()), int((folder / "tx_packets").read_text())


def transfer(send: int, receive: int) -> float:
    """Return the seconds to send and receive the given bytes, in both directions at once, on the slower rank. Collective."""
    other = 1 - dist.get_rank()
    outgoing, incoming = torch.zeros(send, dtype=torch.uint8), torch.zeros(receive, dtype=torch.uint8)
    dist.barrier()
    began = time.perf_counter()
    # Receives first: gloo signals the sender in the stream that carries data, where the signal would queue behind our data.
    operations = [dist.P2POp(dist.irecv, incoming, other), dist.P2POp(dist.isend, outgoing, other)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    seconds = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def serve() -> None:
    """Run one rank's process: join the group, call the function, write its result or error to the file."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: do not outlive the benchmark
    task = json.loads(sys.argv[1])
    file, rank = Path(task["file"]), task["rank"]
    torch.set_num_threads(1)
    try:
        dist.init_process_group("gloo", f"tcp://{_ADDRESSES[0]}:{_PORT}", timedelta(minutes=5), rank=rank, world_size=2)
        module, _, name = task["function"].partition(":")
        result = getattr(importlib.import_module(module), name)(Link(f"veth{rank}"), **task["arguments"])
        file.write_text(json.dumps({"result": result}, default=vars))
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        file.write_text(json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise


def _wait_for(ranks: list[subprocess.Popen], deadline: float) -> None:
    """Wait until both ranks have ended, or until 2 s after one rank failed: the other rank then raises its own error."""
    while any(rank.poll() is None for rank in ranks):
        if any(rank.poll() for rank in ranks):
            deadline = min(deadline, time.monotonic() + 2.0)
        if time.monotonic() > deadline:
            return
        time.sleep(0.1)


def _describe(rank: int, ended: tuple[subprocess.Popen, dict[str, Any] | None]) -> str | None:
    process, answer = ended
    if answer is not None and "error" in answer:
        return f"rank {rank} failed: {answer['error']}"
    if process.returncode == -signal.SIGKILL:
        return f"rank {rank} was killed"
    return None if process.returncode == 0 and answer is not None else f"rank {rank} exited with {process.returncode}"


def _bring_up(name: str, device: str, address: str) -> None:
    _call("ip", "-n", name, "link", "set", "lo", "up")
    _call("ip", "-n", name, "address", "add", f"{address}/30", "dev", device)
    _call("ip", "-n", name, "link", "set", device, "up")
    # Reno is in every kernel and fills the link, since no packet is lost; BBR, the default of some machines, pauses to probe.
    route = ("10.77.0.0/30", "dev", device, "src", address, "congctl", "reno")
    _call("ip", "-n", name, "route", "replace", *route)


def _remove(names: Any) -> None:
    """Delete the existing namespaces of `names`, and thereby the link."""
    for name in set(names) & set(namespaces()):
        _call("ip", "netns", "del", name)


def _call(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise NodesError(
            f"`{' '.join(command)}` failed: {done.stderr.strip()}\n\n"
            "hint: a container needs the capabilities SYS_ADMIN and NET_ADMIN; the kernel needs netns, veth and sch_tbf"
        )
    return done.stdout


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into SystemExit inside the block, so that the namespaces are removed."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
