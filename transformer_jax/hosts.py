"""A run's processes on several hosts: how they are found, how they join, and how each of them ends.

`joined` is the one way in: it starts `jax.distributed` before any other use of JAX, and sees to it that no exception
leaves the process waiting for others: with several processes it ends by `os._exit`, since an ordinary exit waits for
all of them, and a process that has died does not come.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from transformer_jax import allocator, exit_codes, host_links
from transformer_jax.config import ConfigError, HostsConfig, UserError
from transformer_jax.host_links import Links

ENVIRONMENT = {
    "coordinator": "JAX_COORDINATOR_ADDRESS",
    "processes": "JAX_NUM_PROCESSES",
    "process": "JAX_PROCESS_ID",
}
CPU_PATIENCE = "--xla_cpu_collective_timeout_seconds=1800 --xla_cpu_collective_call_terminate_timeout_seconds=1800"
START_LIMIT = 120
"""Seconds that `jax.distributed` may take once all processes have met."""
_REMOTE_FAULTS = ("Gloo", "UNAVAILABLE", "DEADLINE_EXCEEDED", "coordination service", "heartbeat", "NCCL", "megascale")
_links: Links | None = None


class Place(NamedTuple):
    """Which of the processes this is, and where they meet."""

    coordinator: str
    processes: int
    process: int
    devices: list[int] | None = None
    """Of this machine, where a scheduler gives each process its own."""


def place(config: HostsConfig, environment: Mapping[str, str]) -> Place | None:
    """What run file, command line and environment say, without asking any cluster; None for one process.

    Raises:
      ConfigError: some of the three are missing, or are not numbers.
    """
    if config.mode != "environment":
        return None
    said = {"coordinator": config.coordinator, "processes": config.processes or "", "process": config.process}
    said["process"] = "" if config.process < 0 else config.process
    found = {key: said[key] if said[key] != "" else environment.get(name, "") for key, name in ENVIRONMENT.items()}
    if all(value == "" for value in found.values()):
        return None
    missing = [f"hosts.{key} (or {ENVIRONMENT[key]})" for key, value in found.items() if value == ""]
    if missing:
        known = ", ".join(f"{key} {value}" for key, value in found.items() if value != "")
        raise ConfigError(f"several processes are asked for ({known}), and what is missing is {' and '.join(missing)}")
    for key in ("processes", "process"):
        if not str(found[key]).isdigit():
            raise ConfigError(f"{ENVIRONMENT[key]} is {found[key]!r}; it must be a number")
    processes, process = int(found["processes"]), int(found["process"])
    if not process < processes:
        raise ConfigError(
            f"hosts.process is {process} of {processes} processes; they are counted from 0 to {processes - 1}"
        )
    return Place(str(found["coordinator"]), processes, process) if processes > 1 else None


def several_asked_for(config: HostsConfig) -> bool:
    """Whether this process may be one of several; nothing is asked and JAX is not imported."""
    return config.mode == "auto" or place(config, os.environ) is not None


def find(config: HostsConfig) -> Place:
    """As JAX's own detection finds it: Cloud TPU, Slurm, Kubernetes, MPI.

    Raises:
      ConfigError: it finds nothing.
    """
    from jax._src.clusters import ClusterEnv  # there is no public way to ask without joining

    try:
        address, processes, process, devices = ClusterEnv.auto_detect_unset_distributed_params(
            None, None, None, None, None, int(config.join_limit)
        )
    except Exception as e:
        raise ConfigError(f'hosts.mode is "auto", and asking the cluster failed: {e}') from e
    if address is None or processes is None or process is None:
        raise ConfigError(
            'hosts.mode is "auto", and JAX finds no Cloud TPU, Slurm, Kubernetes or MPI around this process; set '
            "hosts.coordinator, hosts.processes and hosts.process"
        )
    return Place(address, processes, process, list(devices) if devices else None)


def join(config: HostsConfig) -> Links | None:
    """Meet the other processes and start `jax.distributed`; None where there is one process alone.

    Raises:
      JoinError: not all processes came within `join_limit`.
      UserError: settings that cannot be.
    """
    global _links
    here = find(config) if config.mode == "auto" else place(config, os.environ)
    if here is None or here.processes == 1:
        return None
    began = time.monotonic()
    if allocator.on_cpu():
        # Else a collective fails when the other process has compiled for half a minute longer.
        os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {CPU_PATIENCE}".strip()
    import jax

    # JAX counts from the last sign that it had, half a heartbeat before at the most; who is silent is to be said first.
    silence = max(config.heartbeat / 3, 1.5)
    links = host_links.meet(here.coordinator, here.processes, here.process, config.join_limit, silence)
    jax.config.update("jax_enable_recoverability", False)  # it would keep the others waiting for a host that hangs
    jax.config.update("jax_enable_preemption_service", False)  # it takes SIGTERM, which is `transformer_jax.signals`'
    address = f"{here.coordinator.rpartition(':')[0]}:{links.port}"
    # What is to end a process that waits in the runtime must not wait for Python.
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        jax.distributed.initialize(
            address,
            here.processes,
            here.process,
            local_device_ids=here.devices,
            cluster_detection_method="deactivate",
            initialization_timeout=START_LIMIT,
            heartbeat_timeout_seconds=config.heartbeat,
        )
    finally:
        signal.signal(signal.SIGINT, before)
    if here.process == 0:
        shown = ", ".join(f"{i} on {name}" for i, name in enumerate(links.names[:16]))
        more = f" and {here.processes - 16} more" if here.processes > 16 else ""
        seconds = time.monotonic() - began
        print(f"{here.processes} processes joined in {seconds:.1f} s: {shown}{more}", file=sys.stderr, flush=True)
    _links = links
    return links


def links() -> Links | None:
    """The connections to the other processes of this run; None where there are none."""
    return _links


@contextlib.contextmanager
def joined(config: HostsConfig) -> Iterator[Links | None]:
    """Join, then train inside; an exception ends the process at once if there are several, after saying why."""
    try:
        found = join(config)
    except host_links.JoinError as e:
        print(f"error: {e}", file=sys.stderr, flush=True)
        _exit(exit_codes.RESTART)
    if found is None:
        yield None
        return
    with leaving_at_once():
        yield found
    found.say_goodbye(exit_codes.DONE)


@contextlib.contextmanager
def leaving_at_once() -> Iterator[None]:
    """Of several processes: an exception ends this one here, before any clean-up that would wait for the others."""
    try:
        yield
    except BaseException as error:
        import jax

        if _links is not None or jax.process_count() > 1:
            leave(_links, error)
        raise


def leave(links: Links | None, error: BaseException) -> None:
    """Say what has happened here and to whom, and end this process without waiting for any other."""
    remote, known = is_remote(error), None
    if remote and links is not None:
        links.known.wait(2.0)  # who it was is told within this time
    if links is not None:
        known = links.lost
    if isinstance(error, SystemExit):
        code, why = error.code if isinstance(error.code, int) else exit_codes.FAULT, "it has left"
    elif isinstance(error, KeyboardInterrupt):
        code, why = exit_codes.of_signal(signal.SIGINT), "it was interrupted"
    elif isinstance(error, UserError) and not remote:
        code, why = exit_codes.MISTAKE, f"error: {error}"
        print(why, file=sys.stderr)
    elif remote or known is not None:
        code = host_links.code_after(known) if known is not None else exit_codes.RESTART
        lost = links.name(known.process) if links is not None and known is not None else "another process"
        why = f"{lost} is lost: {_first_line(error)}"
        print(f"{why}\nleaving with exit code {code}", file=sys.stderr)
    else:
        code, why = exit_codes.FAULT, _first_line(error)
        traceback.print_exception(error)
    if links is not None:
        links.say_goodbye(code, why)
    _exit(code)


def is_remote(error: BaseException | None) -> bool:
    """Whether an error, or one that it comes from, is of a collective or of the coordination service."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if not isinstance(error, UserError) and any(text in str(error) for text in _REMOTE_FAULTS):
            return True
        error = error.__cause__ or error.__context__
    return False


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"[:300]


def _exit(code: int) -> Any:
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
