"""What a start costs is measured in parts, and does not grow with the step."""

import time

import jax
import pytest
import tiny_hosts
import tiny_run
import tiny_translation_run

import bert_jax.data
import transformer_jax.translation.data
from transformer_jax import checkpoint, optim, run, sharding, start_up
from transformer_jax.config import CheckpointConfig
from transformer_jax.engine import Engine
from transformer_jax.epochs import Epochs
from transformer_jax.goodput import Clock
from transformer_jax.shards import Shards
from transformer_jax.start_up import StartUp

BATCH = 4


def test_parts_add_up_and_compilation_is_taken_out_of_the_others():
    began = time.perf_counter()
    start = StartUp(age=5.0)
    start.enter("restoring")
    time.sleep(0.02)
    start.compiled(0.01)
    start.enter("tracing")
    start.found()
    start.enter("step")
    start.done()
    start.enter("imports")  # of an evaluation, later: nothing is added any more
    start.compiled(9.0)
    found = start.record()
    seconds = {name: found[name] for name in start_up.PARTS if name in found}
    assert found["in_all"] == pytest.approx(sum(seconds.values()), abs=1e-3)
    assert found["in_all"] == pytest.approx(5.0 + time.perf_counter() - began, abs=0.1)
    assert seconds["imports"] == pytest.approx(5.0, abs=0.1) and seconds["restoring"] >= 0.01
    assert seconds["compiling"] == pytest.approx(0.01)
    assert (found["programs"], found["programs_found"], found["step_program"]) == (1, 1, "found")
    first, second = start_up.lines(found, "/there")
    assert first.startswith(f"the first step was done {found['in_all']:.1f} s after the start: imports 5.0")
    assert second == "the step's program was kept from before (1 programs in all, 1 of them kept from before; /there)"


def test_of_the_step_only_its_own_program_counts():
    start = StartUp()
    start.found()  # the program that draws parameters
    start.enter("tracing")
    start.done()
    assert start.record()["step_program"] == "compiled"


def bert(folder):
    shards = Shards.open(tiny_run.prepare(folder), "train")
    return lambda: bert_jax.data.PretrainingData(shards, tiny_run.config(folder).examples, 0), bert_jax.data.Maker


def translation(folder):
    data = transformer_jax.translation.data
    shards = Shards.open(tiny_translation_run.prepare(folder), "train")
    return lambda: data.TrainingData(shards, tiny_translation_run.config(folder).examples, 0), data.Maker


@pytest.fixture(scope="module")
def engine(tmp_path_factory):
    settings = tiny_hosts.settings(tmp_path_factory.mktemp("engine"), train_steps=10**6, train_batch_size=BATCH)
    mesh = sharding.make_mesh(settings.mesh, jax.devices()[:1])
    optimizer = optim.make(settings.optimizer, settings.train.steps, tiny_hosts.FEATURES)
    return settings, Engine(tiny_hosts.Regression(), optimizer, settings.train, mesh, "data_parallel", 1.0)


@pytest.mark.parametrize("make", [bert, translation])
def test_going_on_at_a_late_step_plans_and_makes_no_more_than_at_an_early_one(engine, tmp_path, monkeypatch, make):
    """By counting the plans of epochs and the batches that are made, from the checkpoint to the second step."""
    settings, engine = engine
    data, maker = make(tmp_path / "prepared")
    counts = {}
    for owner, name in ((Epochs, "_make"), (maker, "rows")):
        count(monkeypatch, owner, name, counts)
    state, found = engine.init(), []
    for step, epoch in ((10, 1), (100_000, 5000)):
        fresh, first = data(), step * BATCH
        checkpoints = checkpoint.Checkpoints(tmp_path / str(step) / "checkpoints", CheckpointConfig())
        position = {"step": step, "rows": first, "epoch": epoch, "row_in_epoch": 1}
        meta = {"config": {}, "tokenizer_digest": "none"}
        with_step = state._replace(step=state.step + step)
        checkpoints.save(step, with_step._asdict(), position | {"fingerprint": fresh.fingerprint}, meta, None)
        checkpoints.wait()
        counts.clear()
        start = run.starting_point(settings, engine, fresh, checkpoints, "none", lambda stored: [])
        assert (int(start.state.step), start.first_row, start.resumed) == (step, first, True)
        for i in range(2):
            fresh.batch(start.first_row + i * BATCH, BATCH)
        assert fresh.position(start.first_row + 2 * BATCH) == {"epoch": epoch, "row_in_epoch": 1 + 2 * BATCH}
        checkpoints.close()
        found.append(dict(counts))
    assert found == [{"_make": 1, "rows": 2}] * 2


def count(monkeypatch, owner, name, counts):
    inner = getattr(owner, name)

    def counted(self, *args, **options):
        counts[name] = counts.get(name, 0) + 1
        return inner(self, *args, **options)

    monkeypatch.setattr(owner, name, counted)


def test_a_clock_hears_of_programs_that_are_compiled():
    clock = Clock()
    jax.jit(lambda x: x * 5 + 1)(1.0)
    clock.start_up.done()
    assert clock.start_up.record()["programs"] >= 1
