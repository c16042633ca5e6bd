"""The engine on a task that one can compute by hand, and on BERT where meshes and number formats matter."""

import collections
import dataclasses
import gc
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny_run
from tiny_run import Run

from bert_jax.task import PretrainingTask
from transformer_jax import losses, optim, sharding, train
from transformer_jax.checkpoint import Checkpoints
from transformer_jax.checkpoint import steps as complete_steps
from transformer_jax.config import CheckpointConfig, ConfigError, MeshConfig, OptimizerConfig, TrainConfig, UserError
from transformer_jax.engine import Engine, TrainState, gradients, train_step
from transformer_jax.optim import Optimizer
from transformer_jax.report import Reporter, read_records


class Toy:
    """Least squares; a row with `poison` infinite has an infinite loss."""

    losses = ("fit",)
    frozen = ()

    def init(self, key):
        return {"w": jax.random.normal(key, (7, 3)), "bias": jnp.zeros((3,))}

    def counts(self, batch):
        return {"fit": jnp.sum(batch["weight"])}

    def loss_fn(self, params, batch, key):
        error = batch["x"] @ params["w"] + params["bias"][None, :] - batch["y"]
        if key is not None:
            error = error * (1 + 0.1 * jax.random.normal(jax.random.fold_in(key, 1), (1, 3)))
        squares = jnp.sum(error**2, axis=1) * batch["weight"]
        return {"fit": jnp.sum(jnp.where(batch["weight"] > 0, squares * batch["poison"], 0.0))}, self.counts(batch)

    def flops(self, counts):
        return counts["fit"]


class ToyData:
    """Row r is a function of r; batches of `size` rows that belong to a step in `poisoned` are infinite."""

    fingerprint = "toy"

    def __init__(self, rows=None, size=8, poisoned=(), broken=None):
        self.num_rows, self.size, self.poisoned, self.broken = rows, size, set(poisoned), broken
        self.asked = []

    def batch(self, first_row, count, offset=0):
        self.asked.append(first_row)
        if first_row // self.size + 1 == self.broken:
            raise UserError("this batch cannot be made")
        rows = np.arange(first_row, first_row + count)
        x = np.stack([np.random.default_rng(r).normal(size=7) for r in rows]).astype(np.float32)
        y = np.stack([x.sum(1), x[:, 0], -x[:, 1]], 1)
        weight = np.ones(count, np.float32) if self.num_rows is None else (rows < self.num_rows).astype(np.float32)
        poison = np.where(np.isin(rows // self.size + 1, list(self.poisoned)), np.inf, 1).astype(np.float32)
        return {"x": x, "y": y.astype(np.float32), "weight": weight, "poison": poison}

    def position(self, row):
        return {"epoch": 0, "row_in_epoch": row}


def toy_engine(devices=1, name="adamw", clip=0.0, **changes):
    settings = TrainConfig(**{"steps": 10, "batch_size": 8, "log_every": 1, **changes})
    optimizer = optim.make(OptimizerConfig(name=name, learning_rate=0.05), settings.steps)
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:devices])
    return Engine(Toy(), optimizer, settings, mesh, "data_parallel", clip)


class Flag:
    """A stop signal that a test raises by hand."""

    name = "SIGTERM"

    def __init__(self):
        self.raised = False

    def __call__(self):
        return self.raised


def run(
    folder,
    engine=None,
    data=None,
    evaluation=None,
    save_every=0,
    stop=None,
    on_step=lambda s, v: None,
    validation=None,
    **keep,
):
    """Train in `folder`, going on from its newest checkpoint; returns the result."""
    engine = engine or toy_engine()
    checkpoints = Checkpoints(folder / "checkpoints", CheckpointConfig(**{"keep_last": 99, **keep}))
    resumed = bool(complete_steps(folder / "checkpoints"))
    state, row = engine.init(), 0
    if resumed:
        restored = checkpoints.restore(engine.abstract_state._asdict())
        state, row = TrainState(**restored.state), restored.data["rows"]
    try:
        with Reporter(folder, engine.config.steps, engine.config.log_every, int(state.step)) as reporter:
            return train.train(
                engine,
                state,
                data or ToyData(),
                evaluation,
                checkpoints,
                {},
                reporter,
                save_every=save_every,
                stop=stop or Flag(),
                first_row=row,
                resumed=resumed,
                on_step=on_step,
                validation=validation,
            )
    finally:
        checkpoints.close()


def copied(tree):
    return jax.tree.map(lambda x: np.array(x), tree)


def assert_same(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


# One step


def test_the_loss_is_one_sum_over_one_count():
    sums, counts = {"mlm": jnp.float32(6), "nsp": jnp.float32(1)}, {"mlm": jnp.float32(4), "nsp": jnp.float32(2)}
    assert float(losses.sum_of_means(sums, counts, ("mlm", "nsp"))) == 2.0


def test_a_term_that_counts_nothing_is_zero():
    """C051: no NaN from an empty batch, in the loss or in its gradient."""
    zero = jnp.float32(0)
    value, grad = jax.value_and_grad(lambda s: losses.sum_of_means({"mlm": s}, {"mlm": zero}, ("mlm",)))(zero)
    assert float(value) == 0.0 and np.isfinite(float(grad))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("clip", "expected"), [(1.0, [3 - 0.3, 4 - 0.4]), (20.0, [3 - 3.0, 4 - 4.0]), (0.0, [3 - 3.0, 4 - 4.0])]
)
def test_gradients_are_clipped_by_their_global_norm(clip, expected):
    """Gradients 6 and 8 in two tensors: norm 10, so clipping to 1 gives 0.6 and 0.8. No jit and no loop."""

    class Linear(Toy):
        def loss_fn(self, params, batch, key):
            return {"fit": 6 * params["a"] + 8 * params["b"]}, self.counts(batch)

    optimizer = Optimizer(optax.identity(), lambda step: jnp.float32(0.5))
    zero = jnp.int32(0)
    params = {"a": jnp.float32(3), "b": jnp.float32(4)}
    state = TrainState(zero, params, optimizer.init(params), zero, zero)
    batch = {"weight": jnp.ones((1,))}
    new, metrics = train_step(
        state, batch, jax.random.key(0), task=Linear(), optimizer=optimizer, accumulate=1, clip_norm=clip
    )
    assert float(metrics["gradient_norm"]) == pytest.approx(10.0)
    assert [float(new.params["a"]), float(new.params["b"])] == pytest.approx(expected, abs=1e-6)


def test_means_divide_each_sum_by_its_own_count():
    totals = {"sum/mlm": 8.0, "sum/mlm_accuracy": 1.0, "count/mlm": 4.0, "sum/nsp": 3.0, "count/nsp": 0.0, "rate": 5.0}
    assert losses.means(totals, ("mlm", "nsp")) == {
        "loss": 5.0,
        "mlm_loss": 2.0,
        "mlm_accuracy": 0.25,
        "nsp_loss": 3.0,
        "n/mlm": 4.0,
        "n/nsp": 0.0,
        "rate": 5.0,
    }


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["default", "high", "highest"])
def test_matrix_products_have_the_precision_asked_for(precision):
    engine = toy_engine(matmul_precision=precision)
    batch = engine.put(ToyData().batch(0, 8))
    traced = str(engine.train_step.trace(engine.abstract_state, batch, engine.dropout_key).jaxpr)
    evaluated = str(engine.eval_step.trace(engine.abstract_state.params, batch).jaxpr)
    for text in (traced, evaluated):
        assert "dot_general" in text
        assert ("Precision.HIGHEST" in text, "Precision.HIGH," in text) == (precision == "highest", precision == "high")


# The same numbers on any mesh and for any accumulation


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train")
    tiny_run.prepare(folder / "prepared")
    return folder


def with_dropout(folder, **changes):
    return tiny_run.config(folder, train_batch_size=32, model_hidden_dropout_prob=0.2, **changes)


STEPS = 4
COMPARED = ("sum/mlm", "sum/nsp", "sum/mlm_accuracy", "count/mlm", "count/nsp", "gradient_norm", "learning_rate")


@pytest.fixture(scope="module")
def initial(prepared):
    """The state before the first step, on the host; it is the same on any mesh, says test_transformer_sharding."""
    return copied(Run(with_dropout(prepared), jax.devices()[:1]).engine.init())


@pytest.fixture(scope="module")
def on_one_device(prepared, initial):
    run = Run(with_dropout(prepared), jax.devices()[:1])
    return *run.steps(STEPS, initial), run


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "accumulate"),
    [
        (tiny_run.mesh("data_parallel"), 1),
        (tiny_run.mesh("fsdp"), 2),
        (tiny_run.mesh("fsdp_tensor", fsdp=2, tensor=2), 1),
        (tiny_run.mesh("fsdp_tensor", fsdp=2, tensor=2), 4),
        (None, 4),
    ],
    ids=["data_parallel", "fsdp-in-2-parts", "fsdp_tensor", "fsdp_tensor-in-4-parts", "in-4-parts"],
)
def test_any_mesh_and_any_accumulation_give_the_losses_of_one_device(
    prepared, initial, on_one_device, mesh, accumulate
):
    """Dropout is on, so equal losses also say that the masks are the same."""
    settings = with_dropout(prepared, mesh=mesh or MeshConfig(), train_accumulate=accumulate)
    found, state = Run(settings, None if mesh else jax.devices()[:1]).steps(STEPS, initial)
    for here, there in zip(found, on_one_device[0], strict=True):
        assert {k: here[k] for k in COMPARED} == pytest.approx({k: there[k] for k in COMPARED}, rel=1e-5)
    # Adam makes whole steps of gradients that are zero but for rounding, as those of key biases are.
    largest = jax.tree.map(lambda a, b: float(jnp.abs(jnp.asarray(a) - np.asarray(b)).max()), state, on_one_device[1])
    assert max(jax.tree.leaves(largest.opt_state)) < 1e-5


def test_dropout_is_on_in_that_comparison(initial, on_one_device):
    found, _, run = on_one_device
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run.engine, "dropout_key", jax.random.key(99))
        assert run.steps(1, initial)[0][0]["sum/mlm"] != pytest.approx(found[0]["sum/mlm"], rel=1e-4)


def uneven_batch():
    """16 rows; row r has r + 1 predictions, four rows more than that: 1 to 20 in all."""
    rng = np.random.default_rng(3)
    predictions = np.array([*range(1, 13), 14, 16, 18, 20])
    length = 32
    shape = (16, length)
    positions = np.argsort(rng.random((16, length - 2)), 1)[:, :20] + 1
    return {
        "input_ids": rng.integers(5, 61, shape),
        "token_type_ids": np.zeros(shape),
        "position_ids": np.tile(np.arange(length), (16, 1)),
        "sequence_ids": np.ones(shape),
        "masked_lm_positions": positions,
        "masked_lm_ids": rng.integers(5, 61, (16, 20)),
        "cls_positions": np.zeros((16, 1)),
        "next_sentence_labels": rng.integers(0, 2, (16, 1)),
        "row_ids": np.arange(16),
    }, {
        "masked_lm_weights": np.arange(20)[None, :] < predictions[:, None],
        "next_sentence_weights": np.ones((16, 1)),
    }


@pytest.mark.slow
def test_gradients_do_not_depend_on_how_uneven_rows_are_split():
    """C004: rows with 1 to 20 masked pieces, as one batch, in 4 parts, and on 8 devices."""
    ids, weights = uneven_batch()
    batch = {k: v.astype(np.int32) for k, v in ids.items()} | {k: v.astype(np.float32) for k, v in weights.items()}
    task = PretrainingTask(dataclasses.replace(tiny_run.MODEL, vocab_size=61), 32)
    params = sharding.unbox(task.init(jax.random.key(0)))

    def split(params, batch, parts):
        counts = task.counts(batch)

        def loss_fn(params, part):
            sums, _ = task.loss_fn(params, part, None)
            return losses.sum_of_means(sums, counts, task.losses), sums

        return gradients(loss_fn, params, batch, parts)[0]

    compiled = jax.jit(split, static_argnums=2)
    whole = compiled(params, batch, 1)
    in_parts = compiled(params, batch, 4)
    on_devices = compiled(params, sharding.put_batch(batch, sharding.make_mesh(MeshConfig())), 1)
    for other in (in_parts, on_devices):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), whole, other)


@pytest.mark.slow
def test_bfloat16_computes_in_half_and_keeps_float32(prepared, initial, on_one_device):
    """C058: parameters, moments and metrics stay float32, and the loss is near that of float32."""
    found, state = Run(with_dropout(prepared, model_dtype="bfloat16"), jax.devices()[:1]).steps(1, initial)
    kinds = {str(x.dtype) for x in jax.tree.leaves((state.params, state.opt_state))}
    assert kinds == {"float32", "int32"}
    there = on_one_device[0][0]
    for name in ("sum/mlm", "sum/nsp", "gradient_norm"):
        assert found[0][name] == pytest.approx(there[name], rel=0.02)
        assert found[0][name] != there[name]


# Steps that are not finite


def test_a_step_that_is_not_finite_changes_nothing_but_the_step_and_the_counters():
    engine, data = toy_engine(), ToyData(poisoned=[2, 3])
    state, seen = engine.init(), []
    for step in range(4):
        state, metrics = engine.train_step(state, engine.put(data.batch(step * 8, 8)), engine.dropout_key)
        seen.append((copied(state), {k: float(v) for k, v in metrics.items()}))
    states, metrics = zip(*seen, strict=True)
    for poisoned in (1, 2):
        assert_same(states[poisoned].params, states[0].params)
        assert_same(states[poisoned].opt_state, states[0].opt_state)
    assert not np.array_equal(states[3].params["w"], states[0].params["w"])
    assert [int(s.step) for s in states] == [1, 2, 3, 4]
    assert [int(s.nonfinite_total) for s in states] == [0, 1, 2, 2]
    assert [int(s.nonfinite_in_row) for s in states] == [0, 1, 2, 0]
    rates = [float(engine.optimizer.schedule(i)) for i in range(4)]
    assert [m["learning_rate"] for m in metrics] == pytest.approx(rates)
    assert int(states[3].opt_state[0].updates) == 2


@pytest.mark.slow
def test_too_many_such_steps_in_a_row_stop_the_run(tmp_path):
    engine = toy_engine(max_nonfinite_steps=3)
    message = r"step 6: 3 steps in a row .*\(train\.max_nonfinite_steps is 3\).*learning_rate"
    with pytest.raises(UserError, match=message):
        run(tmp_path, engine, ToyData(poisoned=[2, 4, 5, 6]))
    records = read_records(tmp_path / "metrics.jsonl")
    assert [r["nonfinite_in_row"] for r in records] == [0, 1, 0, 1, 2, 3]
    assert records[1]["loss"] is None  # JSON has no infinity
    for line in (tmp_path / "metrics.jsonl").read_text().splitlines():
        json.loads(line, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))


def test_counters_of_such_steps_survive_a_stop(tmp_path):
    stop = Flag()

    def at_step(step, values):
        stop.raised = step == 4

    data = ToyData(poisoned=[2, 4, 5, 6])
    engine = toy_engine(max_nonfinite_steps=3)
    result = run(tmp_path, engine, data, stop=stop, on_step=at_step)
    assert result.interrupted and int(result.state.step) in (5, 6) and int(result.state.nonfinite_total) >= 3
    with pytest.raises(UserError, match="step 6: 3 steps in a row"):
        run(tmp_path, engine, data)


# Evaluation


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 8])
def test_evaluation_scores_every_row_once_whatever_the_batch(devices):
    """C001: 13 rows at any batch size, on 1 and 8 devices."""
    found = []
    for size in (1, 4, 8, 13, 16) if devices == 1 else (8, 16):
        engine = toy_engine(devices, eval_batch_size=size)
        found.append(engine.evaluate(engine.init().params, ToyData(rows=13)))
    alone = np.concatenate([ToyData(rows=13).batch(r, 1)["y"] for r in range(13)])
    assert [f["n/fit"] for f in found] == [13.0] * len(found) == [len(alone)] * len(found)
    engine = toy_engine()
    reference = engine.evaluate(engine.init().params, ToyData(rows=13))
    for f in found:
        assert f == pytest.approx(reference, rel=1e-6)


def test_evaluation_has_no_dropout():
    engine = toy_engine()
    params, rows = engine.init().params, ToyData(rows=8)
    batch = rows.batch(0, 8)
    error = batch["x"] @ np.array(params["w"]) - batch["y"]
    assert engine.evaluate(params, rows)["fit_loss"] == pytest.approx(float((error**2).sum(1).mean()), rel=1e-5)


# The loop


class Watched:
    """An array on the device whose reading is noted."""

    def __init__(self, name, events, value=1.0):
        self.name, self.events, self.value = name, events, value

    def __array__(self, *args, **kwargs):
        self.events.append(self.name)
        return np.asarray(self.value)


class WatchedEngine:
    """Notes what is dispatched and what is read."""

    def __init__(self, events, **changes):
        real = toy_engine(**changes)
        self.config, self.mesh, self.task, self.dropout_key = real.config, real.mesh, real.task, real.dropout_key
        self.events, self.put, self.make = events, lambda batch: batch, real.make

    def train_step(self, state, batch, key):
        number = state.step.value + 1
        self.events.append(f"dispatch {number}")
        names = ("sum/fit", "count/fit", "learning_rate", "gradient_norm")
        metrics = {k: Watched(f"read {number}", self.events) for k in names}
        metrics |= {k: Watched(f"read {number}", self.events, 0) for k in ("nonfinite_in_row", "nonfinite_total")}
        return state_at(number, self.events), metrics

    def evaluate(self, params, data, stop):
        self.events.append("evaluate")
        return {"loss": 1.0}


def state_at(step, events):
    return TrainState(*(Watched("state read", events, step) for _ in range(5)))


class NoCheckpoints:
    config = CheckpointConfig()

    def __init__(self, events):
        self.events = events

    def check(self):
        pass

    def wait(self):
        self.events.append("wait")

    def save(self, step, *args):
        self.events.append(f"save {step}")


def test_the_loop_reads_a_step_only_when_the_next_one_is_dispatched(tmp_path):
    events = []
    engine = WatchedEngine(events, steps=6, eval_every=4)
    state = state_at(0, events)
    with Reporter(tmp_path, 6, 1) as reporter:
        train.train(
            engine, state, ToyData(), ToyData(rows=3), NoCheckpoints(events), {}, reporter, save_every=0, stop=Flag()
        )
    assert [e for i, e in enumerate(events) if i == 0 or e != events[i - 1]] == [
        "state read",  # of the first step's number, and of nothing later
        "dispatch 1",
        *("dispatch 2", "read 1", "dispatch 3", "read 2", "dispatch 4", "read 3", "read 4", "evaluate"),
        *("dispatch 5", "dispatch 6", "read 5", "read 6", "evaluate", "save 6", "wait"),
    ]
    assert events.count("state read") == 1


def test_batches_are_made_and_put_ahead_in_another_thread(tmp_path):
    engine = toy_engine(steps=4)
    places, put = collections.Counter(), engine.put

    def noted(batch):
        places[threading.current_thread() is threading.main_thread()] += 1
        return put(batch)

    engine.put = noted
    run(tmp_path, engine)
    assert places == {False: 4}


@pytest.mark.slow
@pytest.mark.parametrize("where", ["data", "step", "save"])
def test_an_error_leaves_no_thread_behind(tmp_path, monkeypatch, where):
    before = set(threading.enumerate())
    data, engine = ToyData(), toy_engine()
    if where == "data":
        data = ToyData(broken=3)
    elif where == "step":
        engine.train_step = lambda *args: 1 / 0
    else:
        monkeypatch.setattr(Checkpoints, "check", lambda self: 1 / 0)
    with pytest.raises((UserError, ZeroDivisionError)):
        run(tmp_path, engine, data)
    left = [t for t in set(threading.enumerate()) - before if not t.daemon]
    for thread in left:
        thread.join(5)
    assert not [t.name for t in left if t.is_alive()]


def test_a_failed_save_stops_the_run_at_the_next_step(tmp_path, monkeypatch):
    """A save fails behind the training: it is told at once, and not at the next save."""
    failed = threading.Event()

    def fail(*args):
        failed.set()
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("transformer_jax.step_folders.write_digests", fail)
    reached = []

    def on_step(step, values):
        reached.append(step)
        if step > 2:
            failed.wait(10)

    with pytest.raises(UserError, match="saving step 2 failed: the disk is full"):
        run(tmp_path, toy_engine(steps=400), save_every=2, on_step=on_step)
    assert reached[-1] < 10


@pytest.mark.slow
def test_what_is_saved_is_the_state_of_that_step(tmp_path):
    """Buffers are donated and steps run on while a save is under way: each save still holds its own step."""
    engine, data = toy_engine(), ToyData()
    state, expected = engine.init(), {}
    for step in range(10):
        state, _ = engine.train_step(state, engine.put(data.batch(step * 8, 8)), engine.dropout_key)
        expected[step + 1] = copied(state)
    run(tmp_path, engine, save_every=3)
    checkpoints = Checkpoints(tmp_path / "checkpoints", CheckpointConfig())
    assert complete_steps(tmp_path) == [3, 6, 9, 10]
    for step in complete_steps(tmp_path):
        restored = checkpoints.restore(engine.abstract_state._asdict(), step)
        assert_same(copied(TrainState(**restored.state)), expected[step])
        assert restored.data["rows"] == 8 * step and restored.data["step"] == step
    checkpoints.close()


@pytest.mark.slow
def test_no_old_state_stays_alive_and_nothing_is_compiled_twice(tmp_path):
    engine, alive, stop = toy_engine(), [], Flag()

    def weights():
        gc.collect()
        return len([x for x in jax.live_arrays() if x.shape == (7, 3) and not x.is_deleted()])

    def count(step, values):
        alive.append(weights() - before)
        stop.raised = step == 4

    before = weights()
    run(tmp_path, engine, stop=stop, on_step=count)
    run(tmp_path, engine, on_step=count)
    assert (
        int(Checkpoints(tmp_path / "checkpoints", CheckpointConfig()).restore(engine.abstract_state._asdict()).step)
        == 10
    )
    # A weight and its two moments, before and after the stop.
    assert alive == [3] * 10
    assert engine.train_step._cache_size() == 1


def test_a_run_that_is_done_trains_nothing_and_gives_its_recorded_figures(tmp_path):
    held_out = ToyData(rows=5)
    first = run(tmp_path, evaluation=held_out)
    held_out.asked.clear()
    again = run(tmp_path, evaluation=held_out)
    assert again.evaluation == first.evaluation and not again.interrupted
    assert held_out.asked == []
    assert_same(copied(again.state), copied(first.state))


class StopInside(ToyData):
    """Held-out rows whose making raises the flag, at the n-th batch from now."""

    def __init__(self, stop, at, rows=13):
        super().__init__(rows=rows)
        self.stop, self.at = stop, at

    def batch(self, first_row, count, offset=0):
        self.at -= 1
        if self.at == 0:
            self.stop.raised = True
        return super().batch(first_row, count, offset)


def held_out_records(folder):
    return [r for r in read_records(folder / "metrics.jsonl") if r["split"] == "heldout"]


@pytest.mark.slow
@pytest.mark.parametrize(("at", "step"), [(1, 4), (3, 8), (5, 10)])
def test_a_signal_during_evaluation_saves_and_the_evaluation_is_made_up(tmp_path, at, step):
    """C037: evaluations are of 2 batches after steps 4, 8 and 10; the signal comes inside each of them in turn."""
    changes = {"eval_every": 4, "eval_batch_size": 8}
    straight = run(tmp_path / "straight", toy_engine(**changes), evaluation=ToyData(rows=13))
    stop = Flag()
    folder = tmp_path / "stopped"
    result = run(folder, toy_engine(**changes), evaluation=StopInside(stop, at), stop=stop)
    assert result.interrupted and result.evaluation is None
    assert complete_steps(folder) == [step]
    assert f"SIGTERM: step {step} is saved; the same command goes on from there" in (folder / "log.txt").read_text()
    result = run(folder, toy_engine(**changes), evaluation=ToyData(rows=13), keep_best=1)
    assert not result.interrupted
    assert result.evaluation == straight.evaluation
    assert held_out_records(folder) == held_out_records(tmp_path / "straight")
    assert_same(copied(result.state), copied(straight.state))


@pytest.mark.slow
def test_an_evaluation_made_up_counts_for_the_best_checkpoint(tmp_path):
    stop, changes = Flag(), {"eval_every": 4, "eval_batch_size": 8}
    run(tmp_path, toy_engine(**changes), evaluation=StopInside(stop, 1), stop=stop)
    run(tmp_path, toy_engine(**changes), evaluation=ToyData(rows=13))
    digests = json.loads((tmp_path / "checkpoints" / "4" / "digests.json").read_text())
    assert digests["metric"] == held_out_records(tmp_path)[0]["loss"]


def scores(every, values, asked, stop=None):
    """A validation that gives the next of `values` at each call, or raises the stop signal in place of one of None."""

    def score(params, leave):
        asked.append(params["w"].shape)
        value = values[len(asked) - 1]
        if value is None:
            stop.raised = True
        return None if leave() else {"bleu": value, "chrf": 2 * value}

    return train.Validation(("bleu", "chrf"), every, score)


@pytest.mark.slow
@pytest.mark.parametrize(("every", "steps"), [(0, {4: 1.0, 8: 3.0, 10: 2.0}), (3, {3: 1.0, 6: 3.0, 9: 2.0, 10: 2.5})])
def test_further_figures_are_part_of_the_evaluation(tmp_path, every, steps):
    """With every evaluation of the loss, or at steps of their own; the last step has both."""
    asked = []
    figures = scores(every, list(steps.values()), asked)
    changes = {"eval_every": 4, "eval_batch_size": 8}
    result = run(tmp_path, toy_engine(**changes), evaluation=ToyData(rows=13), validation=figures)
    records = held_out_records(tmp_path)
    assert {r["step"]: r["bleu"] for r in records if "bleu" in r} == steps
    assert [r["step"] for r in records if "loss" in r] == [4, 8, 10]
    assert {"loss", "bleu", "chrf"} <= set(result.evaluation) and len(asked) == len(steps)


@pytest.mark.slow
def test_the_best_checkpoint_is_kept_by_the_figure_that_is_named(tmp_path):
    """BLEU is highest at step 4, where it was worth keeping; the loss of this task falls to the end."""
    policy = {"keep_last": 1, "keep_best": 1, "best_metric": "bleu", "best_is": "highest"}
    figures = scores(2, [1.0, 3.0, 2.0, 2.5, 0.5], [])
    run(tmp_path, toy_engine(), evaluation=ToyData(rows=13), save_every=2, validation=figures, **policy)
    assert complete_steps(tmp_path) == [4, 10]


def test_figures_cut_short_by_a_signal_are_made_up(tmp_path):
    """C037: the signal comes during the translations of step 4."""
    stop, policy = Flag(), {"keep_best": 1, "best_metric": "bleu", "best_is": "highest"}
    result = run(tmp_path, validation=scores(4, [None], [], stop), stop=stop, save_every=4, **policy)
    assert result.interrupted and complete_steps(tmp_path) == [4]
    run(tmp_path, validation=scores(4, [1.5, 1.0, 0.5], []), save_every=4, **policy)
    assert [r["bleu"] for r in held_out_records(tmp_path)] == [1.5, 1.0, 0.5]
    assert json.loads((tmp_path / "checkpoints" / "4" / "digests.json").read_text())["metric"] == 1.5


def test_keeping_the_best_by_an_unknown_figure_is_refused_before_the_first_step(tmp_path):
    with pytest.raises(ConfigError, match=r"best_metric is 'blue', which is no figure .*did you mean `bleu`"):
        run(
            tmp_path,
            evaluation=ToyData(rows=13),
            validation=scores(0, [], []),
            on_step=pytest.fail,
            keep_best=1,
            best_metric="blue",
        )
    assert not complete_steps(tmp_path)


def test_a_record_is_there_before_its_checkpoint(tmp_path, monkeypatch):
    """A kill right after a save must not lose the record of the saved step."""
    seen, save = {}, Checkpoints.save

    def look(self, step, *args):
        seen[step] = [r["step"] for r in read_records(tmp_path / "metrics.jsonl") if r["split"] == "train"]
        return save(self, step, *args)

    monkeypatch.setattr(Checkpoints, "save", look)
    run(tmp_path, save_every=4)
    assert seen == {4: [1, 2, 3, 4], 8: [*range(1, 9)], 10: [*range(1, 11)]}


@pytest.mark.slow
def test_rows_go_on_from_their_count_when_the_batch_size_changes(tmp_path):
    """C094: after 3 steps of 8 rows, steps of 4 go on from row 24; no step's number comes twice."""
    stop = Flag()
    run(tmp_path, stop=stop, on_step=lambda s, v: setattr(stop, "raised", s == 2))
    assert complete_steps(tmp_path) == [3]
    data = ToyData(size=4)
    result = run(tmp_path, toy_engine(batch_size=4), data)
    assert data.asked == list(range(24, 24 + 7 * 4, 4))
    assert int(result.state.step) == 10
    assert complete_steps(tmp_path) == [3, 10]
