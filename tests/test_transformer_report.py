"""What a run says of itself: metrics.jsonl, the log, the console, the page."""

import errno
import json
import re
import subprocess
import sys
import threading
import xml.etree.ElementTree as ElementTree
from unittest import mock

import pytest

from transformer_jax.config import UserError
from transformer_jax.page import write_page
from transformer_jax.report import Reporter, drop_records_after, read_records


def values(step, **more):
    counts = {"n/mlm": 10.0, "n/tokens": 60.0, "n/slots": 80.0}
    return {"loss": 9.0 - step, "mlm_loss": 8.0 - step, "mlm_accuracy": 0.5, "learning_rate": 1e-4} | counts | more


def report(folder, first, last, total=10, log_every=4, held_out=()):
    with Reporter(folder, total, log_every, first) as reporter:
        for step in range(first + 1, last + 1):
            reporter.step(step, values(step), flops=1e9, waited=0.25)
            if step in held_out:
                reporter.evaluation(step, values(step))
    return read_records(folder / "metrics.jsonl")


def test_the_first_every_nth_and_the_last_step_are_recorded(tmp_path):
    assert [r["step"] for r in report(tmp_path, 0, 10)] == [1, 4, 8, 10]


def test_a_record_holds_what_training_is_judged_by(tmp_path):
    first, second, *_ = report(tmp_path, 0, 10)
    assert first["split"] == "train" and first["loss"] == 8.0 and first["fill"] == 0.75
    assert second["input_wait_seconds"] == pytest.approx(3 * 0.25)
    assert second["tokens_per_second"] == pytest.approx(3 * 60 / second["seconds"])
    assert second["steps_per_second"] == pytest.approx(3 / second["seconds"])


def test_model_flops_utilisation_is_told_where_the_peak_is_known(tmp_path, monkeypatch):
    monkeypatch.setattr("transformer_jax.report.peak_flops", lambda: 1e12)
    record = report(tmp_path, 0, 10)[1]
    assert record["mfu"] == pytest.approx(3e9 / record["seconds"] / 1e12)


def test_time_aside_is_kept_out_of_the_rates(tmp_path, monkeypatch):
    clock = [0.0]
    monkeypatch.setattr("transformer_jax.goodput.time.perf_counter", lambda: clock[0])
    with Reporter(tmp_path, 10, 1) as reporter:
        with reporter.timed("evaluation"):
            clock[0] += 100
        reporter.clock.enter("step")
        clock[0] += 2
        reporter.step(1, values(1), 0.0, 0.0)
    (record,) = read_records(tmp_path / "metrics.jsonl")
    assert record["tokens_per_second"] == 30.0 and record["evaluation_seconds"] == 100.0


@pytest.mark.parametrize("killed_after", [5, 8, 9])
def test_after_a_stop_each_step_has_one_record(tmp_path, killed_after):
    straight = report(tmp_path / "straight", 0, 10, held_out=(4, 8))
    report(tmp_path / "stopped", 0, killed_after, held_out=(4, 8))
    again = report(tmp_path / "stopped", 4, 10, held_out=(8,))
    both = [[(r["step"], r["split"], r["loss"]) for r in records] for records in (straight, again)]
    # Going on from step 4: the first step of a process is not recorded unless it is due.
    assert both[0] == both[1]


def test_a_line_cut_off_by_a_kill_is_left_out(tmp_path):
    report(tmp_path, 0, 8)
    path = tmp_path / "metrics.jsonl"
    path.write_text(path.read_text()[:-30])
    assert [r["step"] for r in read_records(path)] == [1, 4]
    drop_records_after(path, 4)
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 4]


def test_what_is_no_record_is_left_out(tmp_path):
    report(tmp_path, 0, 8)
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'\xff\x00 5\n"x"\n[]\n{"loss": 1}\n{"step": "x", "split": "train"}\n' + path.read_bytes())
    assert [r["step"] for r in read_records(path)] == [1, 4, 8]


def test_recorded_evaluations_are_known_when_a_run_goes_on(tmp_path):
    report(tmp_path, 0, 9, held_out=(4, 8))
    with Reporter(tmp_path, 10, 4, 4) as reporter:
        assert reporter.evaluations == {4: values(4)}


def test_numbers_that_are_not_finite_are_null(tmp_path):
    with Reporter(tmp_path, 10, 1) as reporter:
        reporter.step(1, values(1, gradient_norm=float("nan"), loss=float("inf")), 0.0, 0.0)
    text = (tmp_path / "metrics.jsonl").read_text()
    record = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert record["gradient_norm"] is None and record["loss"] is None


def test_lines_go_to_standard_error_and_to_the_log(tmp_path, capsys):
    report(tmp_path, 0, 10, held_out=(8,))
    out, err = capsys.readouterr()
    assert out == ""
    lines = err.splitlines()
    assert re.fullmatch(
        r"step 4/10  loss 5  mlm_loss 4  mlm_accuracy 0.5  learning_rate 0.0001  [\d,]+ tokens/s  0m00s left", lines[1]
    )
    assert lines[3] == "step 8  held out: loss 1  mlm_loss 0  mlm_accuracy 0.5  learning_rate 0.0001  (n: mlm 10)"
    assert [line[20:] for line in (tmp_path / "log.txt").read_text().splitlines()] == lines


def test_tensorboard_gets_the_numbers(tmp_path):
    report(tmp_path, 0, 10)
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"train/mlm_loss" in events.read_bytes()


def test_a_full_disk_ends_a_run_with_a_sentence_and_no_thread_waits_for_room(tmp_path, monkeypatch):
    """Of a thread that writes events nobody hears that it has ended, and its full queue stops training for ever."""
    threads = threading.active_count()
    with Reporter(tmp_path, 10, 1) as reporter:
        assert threading.active_count() == threads
        reporter.step(1, values(1), 0.0, 0.0)
        full = OSError(errno.ENOSPC, "No space left on device")
        monkeypatch.setattr(reporter._board, "add", mock.Mock(side_effect=full))
        with pytest.raises(UserError, match="the disk is full, so the run's records cannot be written"):
            reporter.step(2, values(2), 0.0, 0.0)


def test_the_page_is_one_file_with_its_curves(tmp_path):
    report(tmp_path, 0, 10, held_out=(4, 8))
    path = write_page(tmp_path, {"Held out": {"loss": 1.25, "n/mlm": 1234}}, {"Settings": "a < b & c"})
    page = path.read_text()
    assert not re.search(r"https?:|<script|<link|src=", page)
    assert "a &lt; b &amp; c" in page and "1.2500" in page and "1,234" in page
    charts = re.findall(r"<figure>.*?</figure>", page)
    loss = next(c for c in charts if "<figcaption>loss " in c)
    assert loss.count("<polyline") == 2 and "train" in loss and "heldout" in loss
    assert len(re.search(r'points="([^"]+)"', loss).group(1).split()) == 4
    for chart in charts:
        ElementTree.fromstring(re.search(r"<svg.*?</svg>", chart).group(0))


def test_a_page_without_records_or_with_gaps_can_be_written(tmp_path):
    write_page(tmp_path, {}, {})
    with Reporter(tmp_path, 10, 1) as reporter:
        for step, loss in ((1, 3.0), (2, float("nan")), (3, 2.0)):
            reporter.step(step, values(step, loss=loss), 0.0, 0.0)
    page = write_page(tmp_path, {}, {}).read_text()
    assert "nan" not in page.lower().replace("name", "")


def test_pytorch_is_not_imported_for_tensorboard(tmp_path):
    """Its import takes seconds of every start, where it happens to be installed."""
    program = f"""
import sys
import threading
from pathlib import Path
from transformer_jax.report import Reporter
with Reporter(Path({str(tmp_path)!r}), 1, 1):
    pass
assert "torch" not in sys.modules, sorted(sys.modules)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert list((tmp_path / "tensorboard").iterdir())


def test_what_orbax_warns_of_stays_out_of_the_terminal():
    """The filter goes by the file a message comes from, whatever is imported first."""
    code = (
        "from transformer_jax.report import quiet_libraries; quiet_libraries()\n"
        "import transformer_jax.checkpoint\n"
        "from orbax.checkpoint import utils\n"
        "exec(compile('from absl import logging; logging.warning(1)', utils.__file__, 'exec'))\n"
        "exec(compile('from absl import logging; logging.warning(22)', 'elsewhere.py', 'exec'))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip().splitlines() == ["WARNING:absl:22"]
