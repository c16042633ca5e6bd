"""The training step of a run, compiled ahead of time for a pod that is not there, in a process of its own.

The TPU compiler (libtpu) works without a TPU, but it ends its process over some mistakes, keeps much memory, and reads
the environment when JAX is imported. So each compilation is a child process: `figures` starts it, `main` is what it
runs. The child builds the run's own `Engine` over the pod's devices and lowers `Engine.train_step`, the same function
object that training calls, on abstract arrays: nothing is a copy that could differ.

For GPUs there is no such compiler: the child builds the engine over as many simulated devices, and only adds up bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import importlib
import importlib.metadata
import importlib.util
import json
import math
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from transformer_jax import config as core
from transformer_jax import hlo_text, supervisor
from transformer_jax.config import UserError
from transformer_jax.hlo_text import Schedule, Shortage
from transformer_jax.topologies import Pod

if TYPE_CHECKING:
    from transformer_jax.engine import Engine

ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5e-4",
    # There is no TPU to guard, and several compilations may run at once.
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    # The compiler's warnings go to standard error, where they are read, and not to files of its own.
    "TPU_STDERR_LOG_LEVEL": "1",
    "TPU_MIN_LOG_LEVEL": "1",
    "TPU_LOG_DIR": "disabled",
    # The cache of programs cannot read what is compiled for other devices than there are, and warns.
    "JAX_ENABLE_COMPILATION_CACHE": "false",
}
READER = 1
"""Raised when the same program would be read differently; part of the key under which figures are kept."""
LISTED = 12
"""Operations that are listed with their cycles."""
CRASH_NOISE = re.compile(r"RAW: |thread\.cc|process_state|coredump|symbolize|^\s*@ |Collective matmul V1")
"""What the compiler writes of its own process when it crashes, and a notice that is always there."""


class PlannedStep(NamedTuple):
    """What a program gives for a plan."""

    engine: Engine
    batch: dict[str, Any]
    """A global batch of `jax.ShapeDtypeStruct`, with shardings."""
    counts: dict[str, float]
    """What `Task.flops` needs, of a whole batch; `tokens` among them."""


Maker = Callable[[Mapping[str, Any], list[Any]], PlannedStep]
"""(the resolved configuration as builtins, the devices) -> the step. A function at the top of a module, since the child
finds it by its name."""


@dataclasses.dataclass(frozen=True)
class StepFigures:
    """What is known of one step on one device. Bytes and cycles are those of a device, FLOPs those of all."""

    mesh: dict[str, int]
    parameters: int
    """Numbers in the parameters, padding rows included."""
    parameter_bytes: float
    optimizer_bytes: float
    batch_bytes: float
    flops: float
    """Model FLOPs of a step: three times the forward products over real tokens, no recomputation."""
    tokens: float
    kept_bytes: float = 0.0
    """For GPUs: what differentiation keeps from the forward to the backward pass, before any compiler merges it."""
    peak_bytes: float = 0.0
    argument_bytes: float = 0.0
    temporary_bytes: float = 0.0
    shortage: Shortage | None = None
    schedule: Schedule | None = None
    rematerializations: tuple[str, ...] = ()
    cpu_seconds: float = 0.0
    """Of the compilation, when it was made."""
    rss_bytes: float = 0.0
    """The most memory that the compiling process held."""
    cached: bool = False
    key: str = ""
    """SHA-256 of the program before compilation, of the pod and of the compiler's version."""
    versions: dict[str, str] = dataclasses.field(default_factory=dict)


def figures(
    make: Maker,
    config: Any,
    pod: Pod,
    *,
    compile_step: bool = True,
    cache: Path | None = None,
    known: str = "",
    timeout: float | None = None,
) -> StepFigures:
    """Compile the step of a resolved configuration for a pod, or take its figures from the cache.

    Args:
      make: builds the step; it must be importable by its name.
      compile_step: False only adds up bytes (always so for GPUs).
      cache: a folder of figures of programs that were compiled before, by `StepFigures.key`.
      known: a key at which nothing need be compiled: figures come without a schedule when the program is that one.
      timeout: seconds of wall time.

    Raises:
      UserError: what the configuration does wrong on this pod, libtpu is not installed, or the compiler failed; the
        last lines of what it said are in the message. A program that does not fit is no error: see `shortage`.
    """
    if pod.chip.kind == "tpu":
        check_compiler()
    request = {
        "make": f"{make.__module__}:{make.__qualname__}",
        "config": core.to_builtins(config),
        "kind": pod.chip.kind,
        "topology": pod.topology,
        "arguments": pod.arguments,
        "devices": pod.devices,
        "compile": compile_step and pod.chip.kind == "tpu",
        "cache": str(cache) if cache else "",
        "known": known,
    }
    with tempfile.TemporaryDirectory(prefix="plan-") as folder:
        answer = Path(folder) / "answer.json"
        request |= {"answer": str(answer), "parent": os.getpid()}
        environment = {**os.environ, **ENVIRONMENT}
        environment.pop("XLA_FLAGS", None)  # flags of a CPU or of tests; they would change the program
        environment["PYTHONPATH"] = os.pathsep.join(p for p in sys.path if p)
        try:
            done = subprocess.run(
                [sys.executable, "-m", "transformer_jax.compiled_step"],
                input=json.dumps(request),
                env=environment,
                capture_output=True,
                text=True,
                errors="replace",
                timeout=timeout,
            )
        except subprocess.TimeoutExpired:
            raise UserError(f"compiling for {pod.name} took longer than {timeout:.0f} s and was ended") from None
        if not answer.exists():
            raise UserError(_failure(done.returncode, done.stderr, pod))
        found = json.loads(answer.read_text())
    if "error" in found:
        raise UserError(found["error"])
    result = msgspec.convert(found, StepFigures)
    if not result.cached:
        result = dataclasses.replace(result, rematerializations=tuple(hlo_text.rematerializations(done.stderr)))
        if cache and (result.schedule or result.shortage):
            _keep(cache, result)
    return result


def check_compiler() -> None:
    """Refuse to go on without the TPU compiler.

    Raises:
      UserError: names the extra that installs it.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise UserError(
            "planning for a TPU needs its compiler, libtpu, which is not installed (Linux on x86-64 only): install the "
            'extra "tpu", as in pip install "bert-transformer-jax[tpu]"; for GPUs nothing more is needed'
        )


def cache_folder() -> Path:
    """Where figures of compiled programs are kept."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "transformer-jax" / "plans"


def _keep(cache: Path, result: StepFigures) -> None:
    with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
        cache.mkdir(parents=True, exist_ok=True)
        temporary = cache / f".{result.key}.{os.getpid()}"
        temporary.write_bytes(msgspec.json.encode(result))
        temporary.replace(cache / f"{result.key}.json")


def _failure(code: int, said: str, pod: Pod) -> str:
    lines = [line for line in said.splitlines() if line.strip() and not CRASH_NOISE.search(line)]
    last = "".join(f"\n  {line[:300]}" for line in lines[-6:])
    if code == -9:
        return f"the compilation for {pod.name} was killed, as the system does when memory runs out; use --quick"
    if code < 0:
        return (
            f"the compiler itself crashed with signal {-code} while compiling for {pod.name}; another width, "
            f"model.remat or mesh may avoid that{last}"
        )
    return f"compiling for {pod.name} ended with exit code {code}{last}"


def main() -> None:
    """The child: reads a request on standard input, and writes its answer to the file that is named there."""
    request = json.loads(sys.stdin.read())
    supervisor.end_with(request["parent"])
    try:
        found: Any = _child(request)
    except UserError as e:
        found = {"error": str(e)}
    path = Path(request["answer"])
    part = path.with_suffix(".part")
    part.write_bytes(msgspec.json.encode(found))
    part.replace(path)


def _child(request: dict[str, Any]) -> StepFigures:
    import jax

    if request["kind"] == "tpu":
        from jax.experimental import topologies

        arguments = {k: tuple(v) if isinstance(v, list) else v for k, v in request["arguments"].items()}
        devices = list(topologies.get_topology_desc(request["topology"], platform="tpu", **arguments).devices)
    else:
        jax.config.update("jax_num_cpu_devices", request["devices"])
        devices = list(jax.devices())
    module, name = request["make"].split(":")
    planned: PlannedStep = getattr(importlib.import_module(module), name)(request["config"], devices)
    engine = planned.engine
    state = engine.abstract_state
    result = StepFigures(
        mesh=dict(engine.mesh.shape),
        parameters=sum(math.prod(x.shape) for x in jax.tree.leaves(state.params)),
        parameter_bytes=_device_bytes(state.params),
        optimizer_bytes=_device_bytes(state.opt_state),
        batch_bytes=_device_bytes(planned.batch),
        flops=engine.task.flops(planned.counts),
        tokens=planned.counts["tokens"],
        versions={"jax": jax.__version__},
    )
    if request["kind"] != "tpu":
        return dataclasses.replace(result, kept_bytes=_kept_bytes(planned))
    versions = {**result.versions, "libtpu": importlib.metadata.version("libtpu")}
    result = dataclasses.replace(result, versions=versions)
    return _compiled(planned, request, result) if request["compile"] else result


def _compiled(planned: PlannedStep, request: dict[str, Any], result: StepFigures) -> StepFigures:
    import jax

    engine = planned.engine
    key = jax.ShapeDtypeStruct((), engine.dropout_key.dtype, sharding=engine.shardings.step)
    began = time.process_time()
    with jax.set_mesh(engine.mesh):
        lowered = engine.train_step.lower(engine.abstract_state, planned.batch, key)
    depends = [READER, request["topology"], request["arguments"], os.environ.get("LIBTPU_INIT_ARGS", "")]
    digest = hashlib.sha256(json.dumps([*depends, result.versions], sort_keys=True).encode())
    digest.update(lowered.as_text().encode())
    result = dataclasses.replace(result, key=digest.hexdigest())
    if result.key == request["known"]:
        return result
    kept = Path(request["cache"]) / f"{result.key}.json" if request["cache"] else None
    if kept is not None and kept.exists():
        with contextlib.suppress(msgspec.DecodeError, msgspec.ValidationError, OSError):
            found = msgspec.json.decode(kept.read_bytes(), type=StepFigures)
            # FLOPs and counts depend on more than the program.
            return dataclasses.replace(found, cached=True, flops=result.flops, tokens=result.tokens)
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as e:
        found_shortage = hlo_text.shortage(str(e))
        if found_shortage is None:
            first = next((line for line in str(e).splitlines() if line.strip()), "no reason given")
            raise UserError(f"the TPU compiler refused the step: {first}") from None
        return _with_cost(dataclasses.replace(result, shortage=found_shortage), began)
    memory: Any = compiled.memory_analysis()
    schedule = hlo_text.read(compiled.as_text() or "")
    most = sorted(schedule.by_name.items(), key=lambda item: -item[1])[:LISTED]
    result = dataclasses.replace(
        result,
        peak_bytes=memory.peak_memory_in_bytes,
        argument_bytes=memory.argument_size_in_bytes,
        temporary_bytes=memory.temp_size_in_bytes,
        schedule=dataclasses.replace(schedule, by_name=dict(most)),
    )
    return _with_cost(result, began)


def _with_cost(result: StepFigures, began: float) -> StepFigures:
    rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
    return dataclasses.replace(result, cpu_seconds=time.process_time() - began, rss_bytes=rss)


def _device_bytes(tree: Any) -> float:
    """Bytes of abstract arrays on the device that holds most of them: the shardings' shares."""
    import jax

    return float(sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def _kept_bytes(planned: PlannedStep) -> float:
    """Bytes a device keeps from the forward to the backward pass, as differentiation asks for them.

    What a batch of two rows keeps beyond one of one row, times the rows that a device has at once: the rest are
    parameters, which count elsewhere.
    """
    import jax

    from transformer_jax import sharding
    from transformer_jax.losses import sum_of_means

    engine = planned.engine
    task = engine.task

    def kept(rows: int) -> int:
        batch = {k: jax.ShapeDtypeStruct((rows, *x.shape[1:]), x.dtype) for k, x in planned.batch.items()}

        def backward(params: Any, batch: Any, key: jax.Array) -> Any:
            counts = task.counts(batch)
            return jax.vjp(lambda p: sum_of_means(task.loss_fn(p, batch, key)[0], counts, task.losses), params)[1]

        found = jax.eval_shape(backward, engine.abstract_state.params, batch, engine.dropout_key)
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(found))

    config = engine.config
    rows = config.batch_size / sharding.batch_devices(engine.mesh) / config.accumulate
    tensor = engine.mesh.shape["tensor"]
    return (kept(2) - kept(1)) * rows / tensor


if __name__ == "__main__":
    main()
