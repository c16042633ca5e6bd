"""Plans: the table of pods, what is worked out from a compiled step, the search, and the compiled steps themselves.

The last part compiles for TPUs, and needs libtpu; its figures are compared with golden/plan.json (see plan_cases.py).
"""

import dataclasses
import importlib.util
import json
import re
from pathlib import Path

import failing_steps
import jax
import plan_cases
import pytest
import tiny_run
import tiny_translation_run

from bert_jax import main as bert_main
from bert_jax.plan import PROGRAM, abstract_batch, resolved
from transformer_jax import compiled_step, plan_report, plan_search, run_file_edit, sharding
from transformer_jax.compiled_step import StepFigures
from transformer_jax.config import ConfigError, UserError
from transformer_jax.hlo_text import Collective, Schedule, Shortage
from transformer_jax.plan import Plan, line_fit, make_plan, step_times
from transformer_jax.topologies import GIB, pod
from transformer_jax.translation import data as pair_data
from transformer_jax.translation import plan as translation_plan

MESH = {"data": 16, "fsdp": 1, "tensor": 1}


@pytest.mark.parametrize(
    "name,topology,chips,hosts,devices",
    [
        ("v3-32", "v3:4x4", 16, 4, 32),
        ("v4-128", "v4:4x4x4", 64, 16, 64),
        ("v5e-1", "v5e:1x1", 1, 1, 1),
        ("v5e-256", "v5e:16x16", 256, 64, 256),
        ("v5p-16", "v5p:2x2x2", 8, 2, 8),
        ("v6e-16", "v6e:4x4", 16, 4, 16),
        ("tpu7x-2x2x2", "tpu7x:2x2x2", 8, 2, 16),
    ],
)
def test_a_product_name_gives_chips_hosts_and_devices(name, topology, chips, hosts, devices):
    found = pod(name)
    assert (found.topology, found.chips, found.hosts, found.devices) == (topology, chips, hosts, devices)


def test_slices_and_hosts_of_eight_chips():
    found = pod("v5e-16", slices=4)
    assert (found.chips, found.hosts, found.arguments) == (64, 16, {"num_slices": 4})
    assert pod("v6e-256", chips_per_host=8).hosts == 32
    with pytest.raises(UserError, match="hosts of v5p-16 have 4 chips"):
        pod("v5p-16", chips_per_host=8)


@pytest.mark.parametrize(
    "name,text",
    [("v5e-12", "of v5e there are v5e-1, v5e-4"), ("v5lite-16", "TPUs: v2: v2-8"), ("h100-9", "hosts of 8")],
)
def test_a_pod_that_is_not_there_is_refused_with_those_that_are(name, text):
    with pytest.raises(UserError, match=text):
        pod(name)


def test_gpus_by_name_and_by_memory():
    found = pod("gpu:40GiB x 16")
    assert (found.chips, found.hosts, found.chip.usable_bytes) == (16, 2, 40 * GIB)
    assert pod("h100-8").chip.peak_flops == 989e12


def figures(**changes) -> StepFigures:
    schedule = Schedule(1.5e8, {"dot": 1e8}, {}, (Collective("all-reduce", 16, 4, 2e8, 0, 0),))
    made = StepFigures(MESH, 100, 4e8, 8e8, 1e6, 16 * 197e12 * 0.05, 1000.0, peak_bytes=4 * GIB, schedule=schedule)
    return dataclasses.replace(made, **changes)


def test_the_time_of_a_step_lies_between_the_products_and_everything_one_after_another():
    times = step_times(figures(), pod("v5e-16"))
    assert times.products == pytest.approx(0.05)
    assert times.operations == pytest.approx(0.1)  # 1.5e8 cycles at 1.5 GHz
    assert times.links == times.links_waited == pytest.approx(2 * 15 / 16 * 2e8 / 200e9)
    assert times.state == pytest.approx(2 * 1.2e9 / 819e9)
    assert (times.least, times.most) == (pytest.approx(0.08), pytest.approx(0.1 + times.links))
    assert times.bound == "products"


def test_a_line_through_two_needs_says_how_many_rows_fit_and_in_how_many_parts():
    fit = line_fit([(100, 12e9), (200, 22e9)], limit=10e9, rows_in_all=212)
    assert fit is not None
    assert (fit.fixed_bytes, fit.row_bytes, fit.rows) == (2e9, 1e8, 75)  # (9.5e9 - 2e9) / 1e8
    assert fit.accumulate == 4  # 53 rows at once; 3 does not divide 212
    nothing = line_fit([(1, 30e9), (2, 31e9)], limit=10e9, rows_in_all=8)
    assert nothing is not None and (nothing.rows, nothing.accumulate) == (0, 0)


TEXT = """# a note
preset = "bert-tiny"  # which

[model]
remat = "none"  # keeps all
dtype = "bfloat16"

[train]
steps = 10
# last
"""


def test_values_are_set_in_a_run_file_without_touching_its_comments():
    changed = run_file_edit.with_values(
        TEXT, {"model.remat": "full", "train.accumulate": 4, "mesh.preset": "fsdp", "mesh.fsdp": 8}
    )
    assert (
        changed
        == TEXT.replace('"none"  # keeps', '"full"  # keeps').replace("steps = 10\n", "steps = 10\naccumulate = 4\n")
        + '\n[mesh]\npreset = "fsdp"\nfsdp = 8\n'
    )
    with pytest.raises(UserError, match=r"set by hand: model\.remat"):
        run_file_edit.with_values('model = { remat = "none" }\n', {"model.remat": "full"})


def tiny(folder: Path):
    return dataclasses.replace(
        tiny_run.config(folder), model=dataclasses.replace(tiny_run.MODEL, vocab_size=61, num_hidden_layers=2)
    )


def fake_plan(needs, seconds):
    """A `make_plan` that works out memory and time from the settings; its calls are in `calls`."""
    calls = []

    def made(program, config, pod, *, run, cache, probe):
        calls.append(config)
        need, time = needs(config), seconds(config)
        found = figures(shortage=Shortage(need, 16 * GIB, False, ())) if need > 16 * GIB else figures(peak_bytes=need)
        times = dataclasses.replace(step_times(figures(), pod), least=time, most=time)
        form = "scanned" if config.model.scanned else "unrolled"
        return Plan(run, pod, found, form, form, 256, config.train.accumulate, 10, "32", {}, (), times)

    return made, calls


def test_the_search_ranks_what_fits_by_time_and_compiles_the_best_unrolled_too(tmp_path):
    slower = {"none": 1.0, "names": 1.1, "dots": 1.2, "full": 1.3}

    def needs(config):
        return {"none": 40, "names": 24, "dots": 20, "full": 10}[config.model.remat] * GIB / config.train.accumulate

    def seconds(config):
        on_mesh = 2.0 if config.mesh.preset == "fsdp_tensor" else 1.0
        return slower[config.model.remat] * on_mesh * (1.0 if config.model.scanned else 0.9)

    plan, calls = fake_plan(needs, seconds)
    tries = plan_search.search(PROGRAM, tiny(tmp_path), pod("v5e-16"), run="r", plan=plan)
    best = tries[0]
    assert best.changes["model.remat"] == "none" and best.changes["train.accumulate"] == 4
    assert best.changes["model.layers"] == "unrolled" and best.changes["mesh.preset"] == "data_parallel"
    assert [t.usable for t in tries] == sorted((t.usable for t in tries), reverse=True)
    assert len(calls) == len(tries) == len({tuple(sorted(t.changes.items())) for t in tries})
    assert plan_search.to_write(tiny(tmp_path), best) == {"train.accumulate": 4}
    assert len(plan_search.table(tries).splitlines()) == len(tries)


def test_a_layout_that_the_batch_does_not_divide_into_is_listed_and_not_fatal(tmp_path):
    asked = []

    def plan(program, config, pod, **_):
        asked.append(config.model.remat)
        if config.train.accumulate > 1:
            raise ConfigError("train.batch_size is 8")
        if config.model.remat == "dots":
            raise UserError("the compiler itself crashed")
        return fake_plan(lambda c: GIB, lambda c: 1.0)[0](program, config, pod, run="", cache=None, probe=False)

    config = tiny(tmp_path)
    config = dataclasses.replace(config, train=dataclasses.replace(config.train, accumulate=2))
    tries = plan_search.search(PROGRAM, config, pod("v5e-16"), run="r", quick=True, plan=plan)
    assert tries[0].usable and any(t.refused == "train.batch_size is 8" for t in tries)
    assert asked.count("dots") == 1  # more parts would not mend that


def plan_of(**changes) -> Plan:
    made = Plan("r.toml", pod("v5e-16"), figures(), "scanned", "unrolled", 1024, 1, 1000, "128",
                {"mesh.preset": "data_parallel", "model.remat": "none"}, ("a note",))  # fmt: skip
    made = dataclasses.replace(made, times=step_times(made.figures, made.pod))
    return dataclasses.replace(made, **changes)


def test_a_report_says_what_was_compiled_how_long_the_run_takes_and_how_far_to_trust_it():
    report = plan_report.report(plan_of())
    least, most = report["days"]
    assert least == pytest.approx(1000 * 0.08 / 86400) and most > least
    assert report["chip_hours"][0] == pytest.approx(1000 * 0.08 * 16 / 3600)
    assert report["memory"]["margin"] == pytest.approx(1 - 4 / 15.75)
    text = plan_report.render(report)
    for part in ("layers scanned (the run's is unrolled", "all-reduce", "how far to trust it", "note: a note"):
        assert part in text, part
    assert json.loads(json.dumps(report)) == report
    assert not {"cost_analysis", "optimal_seconds"} & set(json.dumps(report).split('"'))


def test_what_does_not_fit_says_by_how_much_and_what_would():
    short = figures(shortage=Shortage(20 * GIB, 15.75 * GIB, False, ()), schedule=None)
    fit = line_fit([(64, 20 * GIB), (128, 38 * GIB)], 15.75 * GIB, 64)
    made = plan_of(figures=short, times=None, fit=fit)
    text = plan_report.render(plan_report.report(made))
    assert made.exit_code == 3 and not made.fits
    assert "4.25 GiB too much" in text and "--train.accumulate 2" in text and "tokens/s" not in text


def test_an_abstract_batch_is_a_real_one_without_numbers(tmp_path):
    tiny_run.prepare(tmp_path / "prepared")
    run = tiny_run.Run(tiny_run.config(tmp_path))
    real = run.engine.make(run.data, 0, run.config.train.batch_size)
    planned = abstract_batch(run.config, run.mesh)
    assert {k: (x.shape, x.dtype) for k, x in planned.items()} == {k: (x.shape, x.dtype) for k, x in real.items()}
    for name, x in run.engine.put(real).items():
        assert x.sharding == planned[name].sharding


def test_an_abstract_batch_of_pairs_is_a_real_one_without_numbers(tmp_path):
    tiny_translation_run.prepare(tmp_path / "prepared")
    config = tiny_translation_run.config(tmp_path)
    config, notes = translation_plan.resolved(config)
    shards = translation_plan.open_prepared(config, "train")
    real = pair_data.TrainingData(shards, config.examples, 0).batch(0, config.train.batch_size)
    planned = translation_plan.abstract_batch(config, sharding.make_mesh(config.mesh))
    assert {k: (x.shape, x.dtype) for k, x in planned.items()} == {k: (x.shape, x.dtype) for k, x in real.items()}
    assert notes == [] and config.model.target_vocab_size == tiny_translation_run.vocabularies().target.vocab_size


def test_a_run_that_is_not_prepared_takes_its_vocabulary_from_the_run_file(tmp_path):
    config, notes = resolved(tiny_run.config(tmp_path))
    assert config.model.vocab_size == config.tokenizer.vocab_size
    assert "is not prepared" in notes[0]


@pytest.mark.slow
def test_a_plan_for_gpus_adds_up_the_bytes_that_the_engine_really_takes(tmp_path, capsys):
    tiny_run.prepare(tmp_path / "prepared")
    settings = tiny_run.config(tmp_path, mesh=tiny_run.mesh("fsdp", data=2, fsdp=4))
    path = tiny_run.write_run_file(tmp_path / "run.toml", settings)
    assert bert_main.main(["plan", str(path), "--topology", "h100-8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    engine = tiny_run.Run(settings).engine
    for name, tree in (("parameters", engine.abstract_state.params), ("optimizer", engine.abstract_state.opt_state)):
        leaves = jax.tree.leaves(tree)
        expected = sum(jax.numpy.zeros(x.sharding.shard_shape(x.shape), x.dtype).nbytes for x in leaves)
        assert report["memory"][name] == expected
    assert report["mesh"] == {"data": 2, "fsdp": 4, "tensor": 1}
    assert report["memory"]["activations_estimate"] > 0 and "peak" not in report["memory"]
    assert report["flops"] > 0 and "compile" not in report


def test_a_plan_for_gpus_that_does_not_fit_by_its_estimate_says_so_and_what_would(tmp_path, monkeypatch):
    """1 GiB of state and gradients and 1 MiB a row: on 4 GiB 3,072 rows, 2,867 with 5 % free."""

    def counted(make, config, pod, *, cache):
        rows = config.train.batch_size // config.train.accumulate
        mesh = MESH | {"data": 1}
        return figures(
            mesh=mesh, parameter_bytes=GIB / 4, optimizer_bytes=GIB / 2, kept_bytes=rows * 2**20, schedule=None
        )

    monkeypatch.setattr(compiled_step, "figures", counted)
    config = tiny_run.config(tmp_path, train_batch_size=4096)
    plan = make_plan(PROGRAM, config, pod("gpu:4GiB"), run="r.toml")
    said = plan_report.render(plan_report.report(plan))
    assert plan.exit_code == 3 and "does not fit, by this estimate: 1.00 GiB too much" in said
    assert "about 2,867 rows of a device at once would fit" in said and "so try --train.accumulate 2, which" in said
    halves = tiny_run.config(tmp_path, train_batch_size=4096, train_accumulate=2)
    assert make_plan(PROGRAM, halves, pod("gpu:4GiB"), run="r.toml").exit_code == 0


@pytest.mark.parametrize(
    ("name", "said"),
    [("gpu:0GiB x 8", "a GPU needs memory"), ("h100", "as in h100-8"), ("gpu:80GB", "gpu:80GiB x 8")],
)
def test_gpus_that_are_none_are_refused(name, said):
    with pytest.raises(UserError, match=re.escape(said)):
        pod(name)


def test_googles_own_name_of_a_v5e_is_known():
    assert pod("v5litepod-16") == pod("v5e-16")


@pytest.mark.slow
@pytest.mark.parametrize(
    "make,text",
    [(failing_steps.ends_natively, "crashed with signal 6"), (failing_steps.refuses, "mesh data=3 asks for 3 devices")],
)
def test_what_goes_wrong_in_the_compiling_process_is_one_message(make, text, tmp_path):
    with pytest.raises(UserError, match=text):
        compiled_step.figures(make, tiny(tmp_path), pod("h100-1"))


def test_without_the_compiler_the_extra_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    path = tiny_run.write_run_file(tmp_path / "run.toml", tiny_run.config(tmp_path))
    assert bert_main.main(["plan", str(path), "--topology", "v5e-4"]) == 2
    assert 'extra "tpu"' in capsys.readouterr().err


def test_writing_needs_a_search_and_a_search_a_compiler(tmp_path, capsys):
    path = tiny_run.write_run_file(tmp_path / "run.toml", tiny_run.config(tmp_path))
    assert bert_main.main(["plan", str(path), "--topology", "v5e-4", "--write"]) == 2
    assert bert_main.main(["plan", str(path), "--topology", "h100-8", "--search"]) == 2
    assert "give both" in (said := capsys.readouterr().err) and "no compiler" in said


def test_a_search_writes_its_winner_and_prints_its_plan(tmp_path, monkeypatch, capsys):
    path = tiny_run.write_run_file(tmp_path / "run.toml", tiny_run.config(tmp_path))
    best = plan_search.Try(
        {"mesh.preset": "fsdp", "mesh.data": -1, "mesh.fsdp": 8, "mesh.tensor": 1, "model.remat": "dots",
         "train.accumulate": 1, "model.layers": "unrolled"}, plan_of(form="unrolled"),
    )  # fmt: skip
    monkeypatch.setattr(plan_search, "search", lambda *_, **__: [best])
    monkeypatch.setattr(compiled_step, "check_compiler", lambda: None)
    assert bert_main.main(["plan", str(path), "--topology", "v5e-16", "--search", "--write"]) == 0
    assert "on v5e-16" in capsys.readouterr().out
    from bert_jax.run_file import load_run

    written = load_run(path)
    assert (written.mesh.preset, written.mesh.fsdp, written.model.remat) == ("fsdp", 8, "dots")


def test_growth_of_more_than_five_per_cent_or_an_array_made_whole_is_told():
    old = {"peak_bytes": 1000, "cycles": 1000, "collective_bytes": 1000, "rematerializations": 0, "permutes": 0}
    assert plan_cases.grown(old, old) == []
    assert plan_cases.grown({**old, "cycles": 1050, "peak_bytes": 10}, old) == []
    assert "cycles 1,000 -> 1,051" in plan_cases.grown({**old, "cycles": 1051}, old)[0]
    assert "rematerialisation" in plan_cases.grown({**old, "rematerializations": 1}, old)[0]
    assert "330 permutes" in plan_cases.grown({**old, "permutes": 330}, old)[0]


needs_libtpu = pytest.mark.skipif(importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed")
FAST = ("base-1-v5e-16", "large-1-v5p-16")


@needs_libtpu
@pytest.mark.parametrize(
    "case", [c if c in FAST else pytest.param(c, marks=pytest.mark.slow) for c in plan_cases.CASES]
)
def test_the_compiled_step_takes_no_more_memory_cycles_or_traffic_than_it_did(case):
    """tests/benchmarks/tpu_cost.py --write measures the golden figures anew, and says what changed."""
    versions = plan_cases.versions()
    kept = plan_cases.golden().get(versions, {}).get(case)
    if kept is None:
        pytest.skip(f"golden/plan.json has no figures of {versions}")
    found = plan_cases.figures(case, known=kept["key"])
    if found.schedule is None:
        assert found.key == kept["key"] and found.shortage is None  # the same program, the same compiler
        return
    assert plan_cases.grown(plan_cases.entry(found), kept) == []


@needs_libtpu
@pytest.mark.slow
@pytest.mark.full_size
@pytest.mark.parametrize("case", plan_cases.FULL_SIZE)
def test_the_full_size_step_fits_and_costs_what_one_and_two_layers_say(case):
    """Nothing is taken from before: `pytest -m full_size` compiles both, unrolled."""
    size, layers, name = case.split("-", 2)
    found = plan_cases.figures(case)
    assert found.shortage is None
    kept, new = plan_cases.golden()[plan_cases.versions()], plan_cases.entry(found)
    assert plan_cases.grown(new, kept[case]) == []
    one, two = (kept[f"{size}-{n}-{name}"] for n in (1, 2))

    def share(figure):
        return new[figure] / (one[figure] + (int(layers) - 1) * (two[figure] - one[figure]))

    assert share("collective_bytes") == pytest.approx(1, rel=1e-3)
    assert share("cycles") == pytest.approx(1, rel=0.05) and share("peak_bytes") == pytest.approx(1, rel=0.15)


@needs_libtpu
def test_an_array_that_the_partitioner_makes_whole_is_seen_in_what_the_compiler_says(tmp_path):
    """So that none seen in the steps above means that there is none."""
    found = compiled_step.figures(failing_steps.makes_an_array_whole, tiny(tmp_path), pod("v5e-16"), cache=tmp_path)
    assert found.schedule is not None and found.rematerializations
    again = compiled_step.figures(failing_steps.makes_an_array_whole, tiny(tmp_path), pod("v5e-16"), cache=tmp_path)
    assert again.cached and again.rematerializations == found.rematerializations
