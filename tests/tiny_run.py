"""A run small enough to be trained in a second: prepared folder, settings, and a run file."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from bert_jax import pretrain
from bert_jax.config import BertConfig, DataConfig, ExamplesConfig, PretrainConfig
from bert_jax.data import PretrainingData
from transformer_jax import config as core
from transformer_jax import sharding
from transformer_jax.config import CheckpointConfig, MeshConfig, OptimizerConfig, TrainConfig
from transformer_jax.shards import Shards, write_prepared
from transformer_jax.tokenizer import WordPiece
from transformer_jax.tokenizer_config import WordPieceConfig

CONTROL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
VOCAB = [*CONTROL, *(f"w{letter}{n}" for letter in "abcdefg" for n in range(8))]
MODEL = BertConfig(
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=64,
    vocab_multiple=16,
    max_position_embeddings=32,
)


def tokenizer(vocab: list[str] = VOCAB) -> WordPiece:
    return WordPiece(vocab, WordPieceConfig())


def documents(count: int, seed: int) -> list[list[list[int]]]:
    """Made-up sentences of 2 to 8 pieces in which some pieces are commoner than others."""
    rng = np.random.default_rng(seed)

    def sentence() -> list[int]:
        return [int(5 + (len(VOCAB) - 5) * x**2) for x in rng.random(rng.integers(2, 9))]

    return [[sentence() for _ in range(rng.integers(3, 12))] for _ in range(count)]


def prepare(folder: Path, train: int = 60, heldout: int = 12, vocab: list[str] = VOCAB) -> Path:
    write_prepared(folder, tokenizer(vocab), {"train": documents(train, 0), "heldout": documents(heldout, 1)})
    return folder


def config(folder: Path, **changes) -> PretrainConfig:
    """Settings of a run in `folder`, which also holds `prepared`; `train_steps=5` changes train.steps, and so on."""
    made = PretrainConfig(
        preset="bert-tiny",
        run_dir=str(folder / "run"),
        model=MODEL,
        data=DataConfig(prepared=str(folder / "prepared")),
        examples=ExamplesConfig(max_seq_length=32, max_sequences_per_row=4, max_predictions_per_row=8),
        optimizer=OptimizerConfig(learning_rate=1e-2, warmup_steps=3),
        train=TrainConfig(steps=20, batch_size=8, log_every=5),
        checkpoint=CheckpointConfig(every=5, keep_last=3),
    )
    for key, value in changes.items():
        section, _, field = key.partition("_")
        part = getattr(made, section)
        new = value if not field else dataclasses.replace(part, **{field: value})
        made = dataclasses.replace(made, **{section: new})
    return made


def write_run_file(path: Path, settings: PretrainConfig) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(core.dump_toml(settings), encoding="utf-8")
    return path


class Run:
    """Engine and data of a run, for tests that take steps themselves."""

    def __init__(self, settings: PretrainConfig, devices=None):
        shards = Shards.open(Path(settings.data.prepared), "train")
        self.config = pretrain.resolve(settings, shards)
        self.mesh = sharding.make_mesh(self.config.mesh, devices)
        self.engine = pretrain.make_engine(self.config, self.mesh)
        self.data = PretrainingData(shards, self.config.examples, self.config.train.seed)

    def steps(self, count: int, state=None):
        """The metrics of the first steps, and the state after them; `state` saves compiling the initialiser."""
        import jax

        state = self.engine.init() if state is None else jax.device_put(state, self.engine.shardings)
        size = self.config.train.batch_size
        found = []
        with jax.set_mesh(self.mesh):
            for step in range(count):
                batch = self.engine.put(self.engine.make(self.data, step * size, size))
                state, metrics = self.engine.train_step(state, batch, self.engine.dropout_key)
                found.append({k: float(v) for k, v in metrics.items()})
        return found, state


def mesh(preset: str = "data_parallel", data: int = -1, fsdp: int = 0, tensor: int = 1) -> MeshConfig:
    return MeshConfig(preset=preset, data=data, fsdp=fsdp, tensor=tensor)


def cache_programs(folder: Path) -> None:
    """Keep compiled programs, so that another process, or the same run again, need not compile them."""
    import jax

    # Not more than JAX's own settings: with a limit it wants a file of times beside each program, also of those that
    # another process has written without one.
    jax.config.update("jax_compilation_cache_max_size", -1)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


@contextlib.contextmanager
def programs_kept(folder: Path) -> Iterator[Path]:
    """Programs are kept in `folder`, and no longer afterwards."""
    import jax
    from jax._src import compilation_cache

    before = jax.config.jax_compilation_cache_dir  # type: ignore[attr-defined]
    compilation_cache.reset_cache()  # which otherwise stays with the folder that it has opened first
    cache_programs(folder)
    yield folder
    jax.config.update("jax_compilation_cache_dir", before)
    compilation_cache.reset_cache()


@contextlib.contextmanager
def one_device() -> Iterator[None]:
    """Runs that name no devices use the first alone, which compiles faster."""
    import jax
    import pytest

    make_mesh = sharding.make_mesh
    with pytest.MonkeyPatch.context() as patch:
        first = lambda config, devices=None: make_mesh(config, devices or jax.devices()[:1])  # noqa: E731
        patch.setattr(sharding, "make_mesh", first)
        yield


class Flag:
    """A stop signal that a test raises by hand."""

    name, exit_code = "SIGTERM", 143

    def __init__(self):
        self.raised = False

    def __call__(self):
        return self.raised


def stop_at(step: int) -> dict:
    """Arguments for `pretrain` that have it stop after this step, of 2 or more."""
    stop = Flag()

    def on_step(number, values):
        # Told of a step when the next one is dispatched.
        stop.raised = stop.raised or number == step - 1

    return {"stop": stop, "on_step": on_step}
