"""A training program so small that several processes of it start in seconds: a network of two layers on 103 numbers.

As a script it is one process: `tiny_hosts.py SETTINGS.json WHAT WHO NUMBER`, where the process WHO does WHAT to itself
at step NUMBER, such as `kill`; or `tiny_hosts.py SETTINGS.json --profile-steps A:B`.
"""

import argparse
import contextlib
import dataclasses
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from transformer_jax import command, config, exit_codes, storage

ROWS, HELDOUT, FEATURES = 103, 7, 4


@dataclasses.dataclass(frozen=True)
class Data:
    prepared: str = ""


@dataclasses.dataclass(frozen=True)
class Init:
    checkpoint: str = ""


@dataclasses.dataclass(frozen=True)
class Settings:
    """The sections that `transformer_jax.run` asks for."""

    run_dir: str
    preset: str = "toy"
    data: Data = dataclasses.field(default_factory=Data)
    mesh: config.MeshConfig = dataclasses.field(default_factory=config.MeshConfig)
    optimizer: config.OptimizerConfig = dataclasses.field(
        default_factory=lambda: config.OptimizerConfig(learning_rate=0.05, warmup_steps=2)
    )
    train: config.TrainConfig = dataclasses.field(
        default_factory=lambda: config.TrainConfig(steps=12, batch_size=12, log_every=1, eval_every=6)
    )
    checkpoint: config.CheckpointConfig = dataclasses.field(
        default_factory=lambda: config.CheckpointConfig(every=4, keep_last=3)
    )
    hosts: config.HostsConfig = dataclasses.field(default_factory=config.HostsConfig)
    init: Init = dataclasses.field(default_factory=Init)


def values(ids: np.ndarray) -> dict[str, np.ndarray]:
    """x [n, FEATURES] and y [n] of numbers."""
    x = np.sin(ids[:, None] * np.arange(1, FEATURES + 1)).astype(np.float32)
    return {"x": x, "y": x.sum(1) * 0.5}


class Rows:
    """One source of 103 rows, each once an epoch in a drawn order."""

    fingerprint = "one file of 103 rows"

    def __init__(self, note=lambda first_row, ids: None, seed=0):
        self.note, self.seed = note, seed

    def num_rows(self, epoch):
        return ROWS

    def start_at(self, row, epoch, row_in_epoch):
        pass

    def position(self, row):
        return {"epoch": row // ROWS, "row_in_epoch": row % ROWS}

    def ids(self, first_row, count):
        from transformer_jax.inputs import derive_key, permute

        rows = np.arange(first_row, first_row + count)
        drawn = [permute(derive_key(self.seed, "order", r // ROWS), ROWS, np.array([r % ROWS]))[0] for r in rows]
        return np.asarray(drawn, np.int64)

    def batch(self, first_row, count, offset=0):
        ids = self.ids(first_row, count)
        self.note(first_row, ids.tolist())
        row_ids = np.arange(offset, offset + count, dtype=np.int32)
        return {**values(ids), "weight": np.ones(count, np.float32), "row_ids": row_ids}


class Heldout:
    """Seven rows; what is asked for beyond them counts nothing."""

    num_rows = HELDOUT

    def __init__(self, note=lambda: None):
        self.note = note

    def batch(self, first_row, count, offset=0):
        self.note()
        ids = 1000 + np.arange(first_row, first_row + count)
        weight = (ids < 1000 + HELDOUT).astype(np.float32)
        return {**values(ids), "weight": weight, "row_ids": np.arange(offset, offset + count, dtype=np.int32)}


class Regression:
    """Squared error with noise on the inputs that depends on the row alone, as dropout does."""

    losses, frozen = ("mse",), ()

    def init(self, key):
        import jax
        from flax import linen as nn

        first, second = jax.random.split(key)
        normal = jax.random.normal
        return {
            "first": {"kernel": nn.LogicallyPartitioned(normal(first, (FEATURES, 8)) * 0.5, ("embed", "mlp"))},
            "second": {"kernel": nn.LogicallyPartitioned(normal(second, (8,)) * 0.5, ("mlp",))},
        }

    def counts(self, batch):
        return {"mse": batch["weight"].sum(), "tokens": batch["weight"].sum()}

    def loss_fn(self, params, batch, key):
        import jax
        import jax.numpy as jnp

        x = batch["x"]
        if key is not None:
            noise = jax.vmap(lambda r: jax.random.normal(jax.random.fold_in(key, r), (FEATURES,)))(batch["row_ids"])
            x = x + 0.1 * noise
        found = jnp.tanh(x @ params["first"]["kernel"]) @ params["second"]["kernel"]
        return {"mse": (batch["weight"] * (found - batch["y"]) ** 2).sum()}, self.counts(batch)

    def flops(self, counts):
        return 0.0


def train(settings, stop, clock, what="", number=0, note=lambda *_: None, profile=None):
    """One process's part of a run. With `what` this process does something to itself at step `number`."""
    from transformer_jax import checkpoint, optim, run, run_file, sharding
    from transformer_jax.engine import Engine

    def do(kind, step):
        if what == kind and step == number:
            if kind in ("kill", "save"):
                os.kill(os.getpid(), signal.SIGKILL)
            if kind == "freeze":
                os.kill(os.getpid(), signal.SIGSTOP)
            if kind == "hang":
                time.sleep(600)
            if kind == "error":
                raise RuntimeError("something is broken here")
            if kind in ("signal", "evaluation"):
                os.kill(os.getppid(), signal.SIGTERM)
                time.sleep(0.5)

    done = [0]

    def on_step(step, found):
        done[0] = step
        for kind in ("kill", "freeze", "hang", "error", "signal"):
            do(kind, step)
        print("step", step, flush=True)
        time.sleep(0.05 if what else 0)

    if what == "save":
        complete = checkpoint.Checkpoints._complete

        def completing(self, step, metric):
            do("save", step)
            return complete(self, step, metric)

        checkpoint.Checkpoints._complete = completing
    optimizer = optim.make(settings.optimizer, settings.train.steps, FEATURES)
    mesh = sharding.make_mesh(settings.mesh)
    engine = Engine(Regression(), optimizer, settings.train, mesh, settings.mesh.preset, 1.0)
    data = Rows(note, settings.train.seed)
    about = {"tokenizer_files": {}, "tokenizer_digest": "none", "fingerprint": data.fingerprint}
    return run.run(
        settings,
        engine,
        data,
        Heldout(lambda: do("evaluation", done[0])),
        run.make_meta(settings, **about, sources=[], naming=1),
        write_files=lambda folder: run_file.write_config(folder, settings),
        check_resume=lambda stored: run_file.check_resume(stored, settings, False, fixed=(), unsafe=("train.seed",)),
        start_elsewhere=None,
        warnings=[],
        opening_lines=run.opening_lines(settings, engine, data, "a toy", "1"),
        stop=stop,
        clock=clock,
        on_step=on_step,
        profile=profile,
    )


def _command(args, rest):
    settings = config.load(Settings, json.loads(Path(args.settings).read_text()), args.settings)
    for key, value in json.loads(os.environ.get("CHANGES", "{}")).items():
        section, _, name = key.partition(".")
        part = dataclasses.replace(getattr(settings, section), **{name: value})
        settings = dataclasses.replace(settings, **{section: part})
    command.before_training(settings.hosts)
    from transformer_jax.run_page import write_run_page

    me = os.environ.get("JAX_PROCESS_ID", "0")
    seen = Path(f"{storage.place(settings.run_dir)}.rows-{me}.jsonl")
    seen.parent.mkdir(parents=True, exist_ok=True)

    def note(first_row, ids):
        with seen.open("a") as f:
            f.write(json.dumps([first_row, ids]) + "\n")

    what = args.what if me == args.who else "slowly" if args.what else ""
    return command.training(
        lambda stop, clock: train(settings, stop, clock, what, args.number, note, command.profile_steps(args)),
        lambda folder: write_run_page(folder, Settings),
        settings,
        as_json=True,
    )


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("settings")
    parser.add_argument("what", nargs="?", default="")
    parser.add_argument("who", nargs="?", default="")
    parser.add_argument("number", nargs="?", default=0, type=int)
    parser.add_argument("--profile-steps")
    parser.set_defaults(function=_command, takes_overrides=False)
    return command.main(parser, None)


# What tests call


def settings(folder: Path, **changes) -> Settings:
    """Settings of a run in `folder`; `train_steps=5` changes train.steps, and so on."""
    made = Settings(str(folder / "run"), data=Data(str(folder / "prepared")))
    for key, value in changes.items():
        section, _, field = key.partition("_")
        made = dataclasses.replace(made, **{section: dataclasses.replace(getattr(made, section), **{field: value})})
    return made


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


class Processes:
    """Several processes of the program; a context at whose end none of them is left.

    Args:
      made: their settings.
      count: how many there are; 1 is a process without any other.
      devices: of each.
      what: the words of the script after its settings.
      only: start these alone.
      changes: process -> settings of its own.
      program: the command in place of this file.
    """

    def __init__(self, folder, made, count, devices=1, what=(), only=None, changes=None, program=None):
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / "settings.json"
        file.write_text(json.dumps(config.to_builtins(made)))
        self.folder = folder
        self.processes = {}
        port = free_port()
        for i in range(count) if only is None else only:
            environment = {k: v for k, v in os.environ.items() if not k.startswith(("XLA_", "JAX_"))}
            environment |= {"JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(devices)}
            environment |= {"XLA_FLAGS": "--xla_backend_optimization_level=0", "PYTHONPATH": ":".join(sys.path)}
            environment |= {"CHANGES": json.dumps((changes or {}).get(i, {}))}
            if count > 1:
                environment |= {"JAX_COORDINATOR_ADDRESS": f"127.0.0.1:{port}"}
                environment |= {"JAX_NUM_PROCESSES": str(count), "JAX_PROCESS_ID": str(i)}
            words = program or [__file__, file, *what]
            with (folder / f"out-{i}").open("w") as out, (folder / f"err-{i}").open("w") as err:
                words = [sys.executable, *map(str, program or [__file__, file, *what])]
                self.processes[i] = subprocess.Popen(words, stdout=out, stderr=err, env=environment)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # with which the kernel ends its child, stopped or not
            process.wait(30)

    def codes(self, limit=240.0, but=()):
        """Exit codes in order, waiting up to `limit` seconds for all of them together."""
        deadline = time.monotonic() + limit
        return {i: p.wait(max(deadline - time.monotonic(), 0.1)) for i, p in self.processes.items() if i not in but}

    def err(self, i):
        return (self.folder / f"err-{i}").read_text()

    def out(self, i):
        return (self.folder / f"out-{i}").read_text()

    def succeed(self):
        found = self.codes()
        assert set(found.values()) == {exit_codes.DONE}, {i: (c, self.err(i)[-3000:]) for i, c in found.items()}
        return self


def rows_seen(run_dir: Path) -> dict[int, list[tuple[int, list[int]]]]:
    """process -> (first row, ids) of each part of a batch that it made."""
    found = {}
    for file in sorted(run_dir.parent.glob(f"{run_dir.name}.rows-*.jsonl")):
        found[int(file.stem.rpartition("-")[2])] = [tuple(json.loads(x)) for x in file.read_text().splitlines()]
    return found


if __name__ == "__main__":
    sys.exit(main())
