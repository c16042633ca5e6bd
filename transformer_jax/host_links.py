"""One connection from each process of a run to process 0: who has joined, and who is lost and why.

JAX's own start waits in silence, names nobody, and ends the process when its time is up; and of a lost process it tells
the others only after the heartbeat's time. So the processes meet here first, without JAX, and keep their connections:
the kernel closes those of a process that has died, however that came about, and the others know at once.

Messages are lines of JSON. A process says who it is when it comes; process 0 answers when all are there, or with what
is wrong; whoever leaves says so with its exit code. A process that is stopped, or a machine that is gone, closes
nothing: its silence is reported, and JAX's heartbeat ends the run.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import socket
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

from transformer_jax import exit_codes
from transformer_jax.config import UserError

GRACE = 5.0
"""Seconds that the main thread has to leave by itself once another process is lost."""
_LONGEST = 1 << 16


class JoinError(UserError):
    """Not all processes came. Starting all of them again may help, so a command ends with `exit_codes.RESTART`."""


class Lost(NamedTuple):
    """A process that has left before the end of the run."""

    process: int
    code: int
    """Its exit code, as far as it could still say it; else `exit_codes.RESTART`."""
    why: str


class Links:
    """What one process has of the connections, and the thread that listens to them.

    Args:
      index: which process this is.
      names: the machine of each process.
      connections: process 0 has one to each other process, the others have one to process 0.
      port: where process 0 starts JAX's own service.
      silence: seconds without a word from a process after which that is reported.
      leave: called with an exit code when the main thread has not left by itself after another was lost.
    """

    def __init__(
        self,
        index: int,
        names: list[str],
        connections: dict[int, _Connection],
        port: int,
        silence: float,
        leave: Callable[[int], None] = os._exit,
    ):
        self.index, self.names, self.port = index, names, port
        self.lost: Lost | None = None
        """The first process that was lost."""
        self.known = threading.Event()
        """Set when `lost` is."""
        self._connections, self._silence, self._leave = connections, silence, leave
        self._gone: set[int] = set()
        self._quiet: set[int] = set()
        self._leaving = threading.Event()
        threading.Thread(target=self._watch, name="links", daemon=True).start()

    def name(self, process: int) -> str:
        """Process and machine, for people."""
        return f"process {process} ({self.names[process]})"

    def say_goodbye(self, code: int, why: str = "") -> None:
        """Tell the others that this process leaves, and how."""
        self._leaving.set()
        self._send_all({"left": self.index, "code": code, "why": why[:1000]})

    def _send_all(self, message: dict[str, Any], but: int = -1) -> None:
        for process, connection in self._connections.items():
            if process not in self._gone and process != but:
                with contextlib.suppress(OSError):
                    connection.send(message)

    def _watch(self) -> None:
        with selectors.DefaultSelector() as selector:
            self._listen(selector)
        for connection in self._connections.values():
            connection.close()

    def _listen(self, selector: selectors.BaseSelector) -> None:
        heard = {}
        for process, connection in self._connections.items():
            selector.register(connection.socket, selectors.EVENT_READ, process)
            heard[process] = time.monotonic()
        period = min(self._silence / 6, 5.0)
        spoke = 0.0
        while len(self._gone) < len(self._connections):
            if time.monotonic() - spoke > period:
                spoke = time.monotonic()
                self._send_all({})
            for key, _ in selector.select(period):
                process = key.data
                heard[process] = time.monotonic()
                lines = self._connections[process].receive()
                if process in self._quiet and lines is not None:
                    self._quiet.remove(process)
                    _say(f"{self.name(process)} answers again")
                for message in lines or []:
                    self._hear(process, message)
                if lines is None:
                    selector.unregister(key.fileobj)
                    if process not in self._gone:
                        self._gone.add(process)
                        self._lose(Lost(process, exit_codes.RESTART, "it ended without a word, or its machine did"))
            for process in set(heard) - self._gone - self._quiet:
                if time.monotonic() - heard[process] > self._silence:
                    self._quiet.add(process)
                    _say(f"{self.name(process)} has given no sign of life for {self._silence:.0f} s")

    def _hear(self, process: int, message: dict[str, Any]) -> None:
        if "left" in message:
            left = Lost(int(message["left"]), int(message["code"]), str(message["why"]))
            if left.process == process:
                self._gone.add(process)
            if left.code == exit_codes.DONE:  # at the end, or at a stop that all have agreed on
                return
            self._lose(left)

    def _lose(self, lost: Lost) -> None:
        if self.index == 0:
            self._send_all({"left": lost.process, "code": lost.code, "why": lost.why}, but=lost.process)
        if self.lost is not None or self._leaving.is_set():
            return
        self.lost = lost
        self.known.set()
        _say(f"{self.name(lost.process)} is lost: {lost.why}")
        threading.Thread(target=self._leave_later, args=(lost,), name="leaving", daemon=True).start()

    def _leave_later(self, lost: Lost) -> None:
        if not self._leaving.wait(GRACE):
            code = code_after(lost)
            self.say_goodbye(code, f"{self.name(lost.process)} was lost")
            _say(f"leaving with exit code {code}")
            self._leave(code)


def code_after(lost: Lost) -> int:
    """With what the others end: what is wrong on one host is not mended by starting all of them again."""
    return lost.code if lost.code in (exit_codes.FAULT, exit_codes.MISTAKE) else exit_codes.RESTART


def meet(
    address: str,
    count: int,
    index: int,
    limit: float,
    silence: float,
    say: Callable[[str], None] | None = None,
) -> Links:
    """Wait until all `count` processes are there.

    Args:
      address: HOST:PORT of process 0.
      index: which process this is.
      limit: seconds to wait.
      silence: see `Links`.
      say: told now and then who is missing; by default it goes to standard error.

    Raises:
      JoinError: the time is up; the message says how many have joined, and which are missing.
      UserError: an address that cannot be used, or processes that disagree on who they are.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 2**16:
        raise UserError(
            f"hosts.coordinator is {address!r}; it must be HOST:PORT of process 0, as in 10.0.0.2:8476, with a port of "
            "1 to 65535"
        )
    host = host.strip("[]")
    if index == 0:
        return _gather(address, int(port), count, limit, silence, say or _say)
    return _come(address, host, int(port), count, index, limit, silence)


def _gather(address: str, port: int, count: int, limit: float, silence: float, say: Callable[[str], None]) -> Links:
    """Process 0: take one connection from each other process, then tell all of them to begin."""
    try:
        listener = _listen(port)
    except OSError as e:
        raise UserError(
            f"hosts.coordinator is {address}, and process 0 cannot listen at port {port}: {e.strerror}; is another "
            "run's process 0 on this machine?"
        ) from None
    names = {0: socket.gethostname()}
    connections: dict[int, _Connection] = {}
    deadline, told = time.monotonic() + limit, time.monotonic()
    with listener:
        while len(names) < count:
            missing = _missing(names, count)
            left = deadline - time.monotonic()
            if left <= 0:
                message = f"{len(names)} of {count} processes have joined within {limit:.0f} s; missing: {missing}"
                _refuse(connections, message)
                raise JoinError(
                    f"{message}. See whether they were started, with hosts.coordinator {address}, and reach that port "
                    "(the wait is hosts.join_limit)"
                )
            if time.monotonic() - told > 10:
                told = time.monotonic()
                say(f"{len(names)} of {count} processes have joined; waiting for {missing}")
            listener.settimeout(min(left, 1.0))
            with contextlib.suppress(TimeoutError):
                connection = _Connection(listener.accept()[0])
                who = connection.first(5.0)
                if who is None or not {"process", "processes", "name"} <= set(who):
                    connection.close()  # something else that tries ports
                    continue
                process, name = int(who["process"]), str(who["name"])
                wrong = ""
                if int(who["processes"]) != count:
                    wrong = (
                        f"process {process} ({name}) was told of {who['processes']} processes, and process 0 "
                        f"({names[0]}) of {count}"
                    )
                elif process in names or not 0 < process < count:
                    taken = f"as {names[process]} does" if process in names else f"of {count}, counted from 0"
                    wrong = f"{name} says that it is process {process}, {taken}; each number may be given once"
                if wrong:
                    _refuse({**connections, -1: connection}, wrong)
                    raise UserError(wrong)
                names[process], connections[process] = name, connection
    free = _free_port(port + 1)
    ordered = [names[i] for i in range(count)]
    for connection in connections.values():
        connection.send({"begin": ordered, "port": free})
    return Links(0, ordered, connections, free, silence)


def _come(address: str, host: str, port: int, count: int, index: int, limit: float, silence: float) -> Links:
    """Another process: reach process 0 and wait for its word."""
    deadline = time.monotonic() + limit
    unreached = (
        f"process 0 has not answered at {address} within {limit:.0f} s; this is process {index} of {count}. See "
        "whether it was started, whether hosts.coordinator is its address, and whether hosts can reach that port"
    )
    while True:
        try:
            connection = _Connection(socket.create_connection((host, port), timeout=5.0))
            break
        except socket.gaierror as e:
            error: OSError = e  # a host that is still starting may have no name yet
        except OSError as e:
            error = e
        if time.monotonic() > deadline:
            raise JoinError(f"{unreached} ({error.strerror or error})") from error
        time.sleep(0.25)
    connection.send({"process": index, "processes": count, "name": socket.gethostname()})
    # Process 0 knows more of who is missing, so its word is waited for a little longer.
    answer = connection.first(max(deadline - time.monotonic(), 0) + 5.0)
    if answer is None:
        connection.close()
        raise JoinError(unreached)
    if "begin" not in answer:
        connection.close()
        kind = JoinError if answer.get("again") else UserError
        raise kind(str(answer.get("wrong", "process 0 gave no reason")))
    return Links(index, list(answer["begin"]), {0: connection}, int(answer["port"]), silence)


def _refuse(connections: dict[int, _Connection], message: str) -> None:
    for connection in connections.values():
        with contextlib.suppress(OSError):
            connection.send({"wrong": message, "again": "missing:" in message})
        connection.close()


def _missing(names: dict[int, str], count: int) -> str:
    absent = [i for i in range(count) if i not in names]
    shown = ", ".join(map(str, absent[:20])) + (f" and {len(absent) - 20} more" if len(absent) > 20 else "")
    return f"process {shown}" if len(absent) == 1 else f"processes {shown}"


def _listen(port: int) -> socket.socket:
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True, backlog=512)
    return socket.create_server(("", port), backlog=512)


def _free_port(first: int) -> int:
    """The first port from `first` on that is free on this machine."""
    for port in range(first, min(first + 100, 1 << 16)):
        with contextlib.suppress(OSError), _listen(port):
            return port
    raise UserError(f"ports {first} to {first + 99} are all taken on process 0's machine; name another port")


def _say(text: str) -> None:
    """A line on standard error, from any thread, whatever the main thread holds."""
    os.write(2, f"{text}\n".encode())


class _Connection:
    """Lines of JSON over a socket."""

    def __init__(self, connected: socket.socket):
        self.socket, self._rest = connected, b""
        connected.settimeout(5.0)
        self._lock = threading.Lock()

    def send(self, message: dict[str, Any]) -> None:
        with self._lock:
            self.socket.sendall(json.dumps(message).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What has come; None at the end of the connection."""
        try:
            content = self.socket.recv(_LONGEST)
        except TimeoutError:
            return []
        except OSError:
            return None
        if not content:
            return None
        *lines, self._rest = (self._rest + content).split(b"\n")
        found = []
        for line in lines:
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if isinstance(message, dict):
                    found.append(message)
        return found

    def first(self, limit: float) -> dict[str, Any] | None:
        """The first message that says something, within `limit` seconds."""
        deadline = time.monotonic() + limit
        try:
            while (left := deadline - time.monotonic()) > 0:
                self.socket.settimeout(left)
                found = self.receive()
                if found is None or len(self._rest) > _LONGEST:
                    return None
                for message in found:
                    if message:
                        return message
            return None
        finally:
            self.socket.settimeout(5.0)

    def close(self) -> None:
        self.socket.close()
