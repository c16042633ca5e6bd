"""Compiled programs kept on disk, so that the next start of a run, or of a command, need not compile them.

JAX's persistent compilation cache does the keeping. Its key covers the program, the options of the compiler, and the
versions of JAX, XLA and the device. Two things are added here: the folder is tried before it is relied on, since a bad
one must cost time and never the run; and programs for CPUs lie in a folder of their own for each kind of processor.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import platform
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from transformer_jax import storage
from transformer_jax.config import UserError

if TYPE_CHECKING:
    from transformer_jax.config import TrainConfig

LONG_STEPS = 1000
"""A run of so many steps, or one on several hosts, is long: "auto" keeps its programs."""
BYTES = 1 << 30
"""Of programs that are kept in a local folder; those that were used longest ago go first."""
LEAST_SECONDS = 0.3
"""Programs that compile faster are not kept."""


class Kept(NamedTuple):
    """Where the programs of this process are kept."""

    folder: str
    """Empty: they are not kept, and `why` says why."""
    why: str = ""


def user_folder() -> Path:
    """In the user's cache folder: for commands, and for training in one process."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "transformer-jax" / "programs"


def for_training(config: TrainConfig, run_dir: str, processes: int, say: Callable[[str], None]) -> Kept:
    """Keep the programs of a run as `train.compile_cache` asks for it.

    By default one process uses the user's cache folder, and several use `programs` in the run folder, which they
    share and which outlives machines: JAX has process 0 alone write, so with folders of their own the others would
    compile at each start.

    Args:
      say: told, once, of a folder that cannot be used.
    """
    setting = config.compile_cache
    if setting == "off":
        return Kept("", "train.compile_cache is off")
    if setting == "auto" and config.steps < LONG_STEPS and processes == 1:
        return Kept("", f"a run of less than {LONG_STEPS:,} steps")
    if setting not in ("auto", "on"):
        return keep(setting, say)
    return keep(user_folder() if processes == 1 else f"{run_dir.rstrip('/')}/programs", say)


def keep(folder: str | Path, say: Callable[[str], None]) -> Kept:
    """Have JAX keep compiled programs in this folder, before the first is compiled.

    What is set already, as by JAX_COMPILATION_CACHE_DIR, stays. A folder that cannot be written is not used.
    """
    import jax

    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    if before is not None:
        return Kept(before)
    where = f"{str(folder).rstrip('/')}/{processor()}" if _on_cpu() else str(folder)
    problem = _problem(where)
    if problem:
        say(f"warning: compiled programs are not kept, so each start compiles anew: {where}: {problem}")
        return Kept("", "the folder cannot be used")
    remote = storage.is_remote(where)
    _tidy(None if remote else Path(where))
    jax.config.update("jax_compilation_cache_dir", where)
    jax.config.update("jax_compilation_cache_max_size", -1 if remote else BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)
    return Kept(where)


@functools.cache
def processor(file: Path = Path("/proc/cpuinfo")) -> str:
    """A name for this machine's processor: programs for CPUs use instructions that another one may lack.

    XLA notices some such cases when it loads a program, and goes on with an error message; it had better not come to
    that on a cluster of unlike machines that share a folder.
    """
    try:
        lines = file.read_text().splitlines()
    except OSError:
        lines = []
    known = ("vendor_id", "cpu family", "model", "model name", "flags", "Features", "CPU part")
    found = dict.fromkeys(line for line in lines if line.partition(":")[0].strip() in known)
    text = "\n".join([platform.machine(), platform.processor(), *sorted(found)])
    return f"cpu-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def _on_cpu() -> bool:
    import jax

    return jax.default_backend() == "cpu"


def _problem(where: str) -> str:
    """Why a folder cannot be used; empty if it can. It is made if it is not there."""
    try:
        folder = storage.path(where)
        if storage.is_remote(where):
            mark = folder / f".tried-{os.getpid()}"
            mark.write_text("")
            mark.unlink()
            return ""
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as f:
            f.write(b"x")
        with (folder / ".lockfile").open("a"):
            return ""
    except UserError as e:
        return str(e)
    except OSError as e:
        return e.strerror or type(e).__name__
    except Exception as e:  # libraries for storage raise errors of their own, and the run needs none of them
        return f"{type(e).__name__}: {e}"[:200]


def _tidy(folder: Path | None) -> None:
    """Remove programs that a killed process has left half written.

    A program's file is followed by a second one with the time of its use. One without the other would never be replaced
    and never be dropped: JAX warns of it at each start, and stops keeping programs once the folder is full.
    """
    import filelock  # comes with JAX's own use of it

    if folder is None or not folder.is_dir():
        return
    with contextlib.suppress(OSError, filelock.Timeout), filelock.FileLock(folder / ".lockfile", timeout=2):
        for file in folder.glob("*-cache"):
            if not file.with_name(f"{file.name.removesuffix('-cache')}-atime").exists():
                file.unlink(missing_ok=True)
