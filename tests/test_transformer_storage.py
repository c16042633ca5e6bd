"""gs:// paths: runs, prepared data and exports in storage, broken networks, and the copies on a machine."""

import argparse
import dataclasses
import os
import runpy
import subprocess
import sys
import types
from pathlib import Path

import emulator
import jax
import numpy as np
import pytest
import tiny_hosts
import tiny_run
import tiny_tfds
import tiny_translation_run
from emulator import BUCKET

from bert_jax.config import DataConfig
from bert_jax.evaluate import evaluate
from bert_jax.finetune import tables
from bert_jax.interop.exports import export_checkpoint
from bert_jax.interop.imports import import_folder
from bert_jax.pretrain import pretrain
from bert_jax.run_page import write_run_page
from transformer_jax import checkpoint, command, corpora, exit_codes, manifest, mirror, step_folders, storage
from transformer_jax.checkpoint import Checkpoints
from transformer_jax.config import CheckpointConfig, UserError
from transformer_jax.new_folder import check_target, new_folder
from transformer_jax.prepared_folder import working_copy
from transformer_jax.report import read_records
from transformer_jax.shards import Shards
from transformer_jax.translation.loading import read_vocabularies


@pytest.fixture(scope="module")
def port():
    for package in ("gcp_storage_emulator", "gcsfs"):
        pytest.importorskip(package, reason=f"{package} is not installed: no gs:// path can be tried")
    with emulator.running() as port:
        yield port


@pytest.fixture(autouse=True)
def cache(port, tmp_path, monkeypatch):
    """This machine's copies; another value of it is another machine."""
    emulator.put(monkeypatch, port, tmp_path / "cache")
    return tmp_path / "cache"


@pytest.fixture
def bucket(request):
    """A place in the bucket that no other test uses."""
    return f"{BUCKET}/{request.node.name}"


@pytest.fixture
def way(port, monkeypatch):
    """The way to the storage that can be broken; pauses between attempts are short."""
    import gcsfs.retry

    async def soon(seconds):
        pass

    way = emulator.Way(port)
    monkeypatch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{way.server_address[1]}")
    monkeypatch.setattr(gcsfs.retry, "asyncio", types.SimpleNamespace(sleep=soon))
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    yield way
    way.shutdown()
    way.server_close()


def fill(folder: Path, **contents: bytes) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in contents.items():
        (folder / name).write_bytes(content)
    return folder


def content_of(folder: str | Path) -> dict[str, bytes]:
    root = storage.path(folder)
    return {name: (root / name).read_bytes() for name in storage.files(root)}


def test_a_path_in_storage_needs_the_extra_and_a_bucket(monkeypatch):
    for wrong, said in (("gs:///x", "names no bucket"), ("s3://b/x", "only gs://BUCKET")):
        with pytest.raises(UserError, match=said):
            storage.path(wrong)
    monkeypatch.setattr(storage.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r'pip install "bert-transformer-jax\[gcs\]"'):
        storage.path("gs://b/x")
    assert storage.path("gs") == Path("gs")


def test_a_folder_is_sent_and_fetched_as_it_is(tmp_path, bucket):
    here = fill(tmp_path / "here", a=b"1", b=b"2" * 1000)
    fill(here / "sub", **{"manifest.json": b"{}", ".lock": b""})
    storage.send(here, storage.path(bucket))
    expected = {"a": b"1", "b": b"2" * 1000, "sub/manifest.json": b"{}"}
    assert content_of(bucket) == expected
    assert content_of(storage.fetch(storage.path(bucket))) == expected
    (here / "b").unlink()
    (here / "a").write_bytes(b"changed")
    storage.send(here, storage.path(bucket))
    assert (
        content_of(bucket)
        == content_of(storage.fetch(storage.path(bucket)))
        == {
            "a": b"changed",
            "sub/manifest.json": b"{}",
        }
    )


def test_a_stopped_transfer_leaves_a_folder_that_is_not_taken_for_whole(tmp_path, bucket, monkeypatch):
    here = fill(tmp_path / "here", a=b"1", b=b"2")
    send_file = storage.send_file

    def part(source, target):
        if source.name == "b":
            raise KeyboardInterrupt
        send_file(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(storage, "send_file", part)
        storage.send(here, storage.path(bucket))
    with pytest.raises(UserError, match="not whole"):
        storage.fetch(storage.path(bucket))
    storage.send(here, storage.path(bucket))
    assert content_of(storage.fetch(storage.path(bucket))) == {"a": b"1", "b": b"2"}


def test_requests_that_fail_for_a_while_are_made_again(tmp_path, bucket, way):
    here = fill(tmp_path / "here", a=b"1" * 300_000, b=b"2")
    way.refuse, way.cut, way.after = 2, 2, 100_000
    storage.send(here, storage.path(bucket))
    assert way.faults == 4
    way.refuse, way.cut, way.after = 2, 1, 1
    assert content_of(storage.fetch(storage.path(bucket))) == {"a": b"1" * 300_000, "b": b"2"}


def test_storage_that_stays_away_is_one_clear_error(tmp_path, bucket, way):
    way.refuse = 1_000
    with pytest.raises(UserError, match=r"gs://bkt/.*storage cannot be reached or does not answer"):
        storage.send(fill(tmp_path / "here", a=b"1"), storage.path(bucket))
    with pytest.raises(UserError, match="no such bucket"):
        way.refuse = 0
        storage.send(tmp_path / "here", storage.path("gs://nobody/x"))


def test_an_export_in_storage_appears_when_it_is_whole_and_is_replaced_on_demand(bucket):
    target = storage.path(f"{bucket}/model")
    check_target(target, False, ("config.json",))
    with pytest.raises(RuntimeError), new_folder(target) as folder:
        (folder / "config.json").write_text("{}")
        raise RuntimeError
    assert content_of(target) == {}
    with new_folder(target) as folder:
        fill(folder, **{"config.json": b"{}", "old": b"1"})
    with pytest.raises(UserError, match="not empty"):
        check_target(target, False, ("config.json",))
    check_target(target, True, ("config.json",))
    with pytest.raises(UserError, match="holds old, which this export does not write"), new_folder(target) as folder:
        fill(folder, **{"config.json": b"{}", "new": b"1"})
    assert content_of(target) == {"config.json": b"{}", "old": b"1"}
    with new_folder(target, ("old",)) as folder:
        fill(folder, **{"config.json": b"{}", "new": b"1"})
    assert content_of(target) == {"config.json": b"{}", "new": b"1"}


class Prepared:
    """Prepared data in storage, and what is fetched of it."""

    def __init__(self, folder: Path, name: str, patch):
        self.name, self.fetched = f"{name}/prepared", []
        self.here = tiny_run.prepare(folder / "made", train=20, heldout=5)
        storage.send(self.here, storage.path(self.name))
        fetch_file = storage.fetch_file

        def noted(source, target, wrong):
            self.fetched.append(str(source).removeprefix(f"{self.name}/"))
            fetch_file(source, target, wrong)

        patch.setattr(storage, "fetch_file", noted)


@pytest.fixture
def prepared(tmp_path, bucket, monkeypatch):
    return Prepared(tmp_path, bucket, monkeypatch)


def test_shards_are_fetched_once_and_a_damaged_copy_again(prepared, cache):
    train = Shards.open(prepared.name, "train")
    assert train.fingerprint == Shards.open(prepared.here, "train").fingerprint
    assert train.folder.is_relative_to(cache)
    assert prepared.fetched and not any(name.startswith("heldout") for name in prepared.fetched)
    prepared.fetched.clear()
    Shards.open(prepared.name, "train")
    assert prepared.fetched == []
    tokens = train.folder / "train-00000" / "tokens.npy"
    content = bytearray(tokens.read_bytes())
    content[-3] ^= 4
    tokens.write_bytes(content)
    again = Shards.open(prepared.name, "train", check="digests")
    assert prepared.fetched == ["train-00000/tokens.npy"]
    np.testing.assert_array_equal(again.tokens_by_id(), Shards.open(prepared.here, "train").tokens_by_id())


def test_a_shard_that_is_damaged_in_storage_is_named(prepared, monkeypatch):
    monkeypatch.setattr(storage.time, "sleep", lambda seconds: None)
    damaged = storage.path(prepared.name) / "train-00000" / "tokens.npy"
    damaged.write_bytes(b"?" * storage.size(damaged))
    with pytest.raises(UserError, match=r"tokens.npy: not what the manifest says, 3 times over"):
        Shards.open(prepared.name, "train")
    with pytest.raises(UserError, match="no prepared data here"):
        Shards.open(f"{prepared.name}-missing", "train")


def test_a_preparation_is_sent_when_it_is_done_and_goes_on_elsewhere(tmp_path, bucket, monkeypatch):
    with working_copy(bucket) as here:
        tiny_run.prepare(here, train=20, heldout=5)
        fill(here / "chunks", **{"settings.json": b"{}"})
        fill(here / manifest.CACHES, plan=b"1")
    assert manifest.MANIFEST in content_of(bucket) and "chunks/settings.json" in content_of(bucket)
    assert not any(name.startswith(manifest.CACHES) for name in content_of(bucket))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    with working_copy(bucket) as there:
        assert there != here and manifest.verify(there) == []


def test_records_that_were_not_sent_are_kept_unless_storage_knows_more(tmp_path, bucket, monkeypatch):
    with mirror.mirrored(bucket) as run:
        (run.local / "log.txt").write_text("one\n")
    (run.local / "log.txt").write_text("one\nkilled before this was sent\n")
    with mirror.mirrored(bucket) as run:
        assert (run.local / "log.txt").read_text() == "one\nkilled before this was sent\n"
    assert content_of(bucket) == {"log.txt": b"one\nkilled before this was sent\n"}
    (storage.path(bucket) / "log.txt").write_text("one\nfrom another machine\n")
    with mirror.mirrored(bucket) as run:
        assert (run.local / "log.txt").read_text() == "one\nfrom another machine\n"
    storage.remove_tree(storage.path(bucket))
    with mirror.mirrored(bucket) as run:  # taken away to begin anew
        assert storage.files(run.local) == {}


def test_records_wait_here_for_storage_that_is_away(bucket, way):
    with pytest.raises(UserError, match="the same command on this machine sends them"), mirror.mirrored(bucket) as run:
        (run.local / "log.txt").write_text("one\n")
        run.send_now()
        (run.local / "log.txt").write_text("one\ntwo\n")
        way.refuse = 1_000
    way.refuse = 0
    with mirror.mirrored(bucket):
        assert content_of(bucket) == {"log.txt": b"one\ntwo\n"}


def test_a_recipe_and_its_text_can_be_in_storage(tmp_path, bucket):
    text = {"a1.txt": b"one\n\ntwo\n", "a2.txt": b"three\n", "b.txt": b"not named\n"}
    recipe = b'name = "there"\n[[sources]]\nfiles = ["text/a*.txt"]\n'
    fill(fill(tmp_path / "in", **{"recipe.toml": recipe}) / "text", **text)
    storage.send(tmp_path / "in", storage.path(bucket))

    def read(name):
        found = corpora.load_recipe(name)
        return [d.sentences for d in corpora.documents(found)], corpora.describe(found)

    assert read(f"{bucket}/recipe.toml") == read(tmp_path / "in" / "recipe.toml")
    (storage.path(bucket) / "text" / "a2.txt").write_bytes(b"four\n")
    assert read(f"{bucket}/recipe.toml")[0] == [["one"], ["two"], ["four"]]
    with pytest.raises(UserError, match="is in storage"):
        corpora.load_recipe(f"{bucket}/recipe.toml", fetch=False)


def test_a_tfds_set_can_be_in_storage(tmp_path, bucket):
    tiny_tfds.make_articles(tmp_path / "sets", "array_record")
    storage.send(tmp_path / "sets", storage.path(bucket) / "sets")
    recipe = 'name = "there"\n[[sources]]\nformat = "tfds"\ndataset = "articles"\ndata_dir = "{}"\n'
    for name, place in (("here", tmp_path / "sets"), ("there", f"{bucket}/sets")):
        (tmp_path / f"{name}.toml").write_text(recipe.format(place))
    here, there = (corpora.load_recipe(tmp_path / f"{name}.toml") for name in ("here", "there"))
    assert [d.sentences for d in corpora.documents(there)] == [d.sentences for d in corpora.documents(here)]
    titles = [
        tables.from_tfds(f"{place}/articles/1.2.0", "train", ["title"])
        for place in (tmp_path / "sets", f"{bucket}/sets")
    ]
    assert titles[0] == titles[1] and len(titles[0].rows) == 5
    with pytest.raises(UserError, match="is in storage"):
        corpora.load_recipe(tmp_path / "there.toml", fetch=False)
    with pytest.raises(UserError, match=r"gs://.*nothing in a form that can be read.*--data-dir gs://"):
        tables.from_tfds(f"{bucket}/nothing", "train", ["title"])


def test_vocabularies_of_translation_can_be_in_storage(tmp_path, bucket):
    here = tiny_translation_run.vocabularies()
    here.save(tmp_path / "run" / "tokenizer")
    storage.send(tmp_path / "run", storage.path(bucket) / "run")
    assert read_vocabularies(f"{bucket}/run").digest == here.digest


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    """Runs use the first device only and keep their programs: each is compiled once."""
    with tiny_run.programs_kept(tmp_path_factory.mktemp("programs")), tiny_run.one_device():
        yield


def settings(run_dir: object, prepared: object):
    return dataclasses.replace(
        tiny_run.config(Path("nowhere"), train_steps=6, train_log_every=1, checkpoint_every=2, checkpoint_keep_last=2),
        run_dir=str(run_dir), data=DataConfig(prepared=str(prepared)),
    )  # fmt: skip


def losses(run_dir: str | Path) -> dict[int, float]:
    records = read_records(storage.path(run_dir) / "metrics.jsonl")
    return {r["step"]: r["loss"] for r in records if r["split"] == "train"}


def assert_same(a, b):
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.array(x), np.array(y)), a, b)


KILLED = """
import os, sys, time
sys.path.insert(0, os.environ["TESTS"])
import jax
import tiny_hosts
import tiny_run
from bert_jax import pretrain
from bert_jax.run_file import load_run
from transformer_jax import sharding, step_folders

tiny_run.cache_programs(sys.argv[2])
make_mesh, write_digests = sharding.make_mesh, step_folders.write_digests
pretrain.sharding.make_mesh = lambda mesh: make_mesh(mesh, jax.devices()[:1])

def late(path, metric, settings):
    if path.name == "4":
        print("saving", flush=True)
        time.sleep(60)
    write_digests(path, metric, settings)

step_folders.write_digests = late
pretrain.pretrain(load_run(sys.argv[1], []))
"""


def kill_in_mid_save(run, tmp_path):
    """Run in a process of its own until the arrays of step 4 are there and its digests are not; then SIGKILL."""
    file = tiny_run.write_run_file(tmp_path / "killed.toml", run)
    environment = {**os.environ, "TESTS": str(Path(__file__).parent), "PYTHONWARNINGS": "ignore"}
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, file, jax.config.jax_compilation_cache_dir],
        env=environment, stdout=subprocess.PIPE, cwd=tmp_path,
    ) as child:  # fmt: skip
        assert child.stdout.readline() == b"saving\n"
        child.kill()


@pytest.mark.slow
def test_a_run_in_storage_goes_on_on_another_machine_and_is_the_run_on_a_disk(
    prepared, tmp_path, bucket, monkeypatch, programs
):
    """Killed in mid-save, saved, deleted, verified and gone on with; a damaged step is passed over."""
    disk = pretrain(settings(tmp_path / "disk", prepared.here))
    remote = settings(f"{bucket}/run", prepared.name)
    steps = storage.path(remote.run_dir) / "checkpoints"
    kill_in_mid_save(remote, tmp_path)
    assert checkpoint.steps(remote.run_dir) == [2] and storage.files(steps / "4")
    assert pretrain(remote, **tiny_run.stop_at(5)).interrupted
    assert checkpoint.steps(remote.run_dir) == [4, 5]
    assert {"config.toml", "log.txt", "metrics.jsonl", "tokenizer/vocab.txt"} <= content_of(remote.run_dir).keys()
    damaged = max((name for name in storage.files(steps / "5")), key=lambda name: storage.files(steps / "5")[name].size)
    content = (steps / "5" / damaged).read_bytes()
    (steps / "5" / damaged).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    (steps / "2" / "left").write_text("by a stop while step 2 was deleted")

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another machine"))
    found = pretrain(remote)
    assert_same(found.state, disk.state)
    assert "step 5 passed over" in storage.read_text(storage.path(remote.run_dir) / "log.txt")
    assert [step for step, problems in checkpoint.verify(remote.run_dir) if not problems] == [4, 6]
    assert losses(remote.run_dir) == losses(tmp_path / "disk") and len(losses(remote.run_dir)) == 6
    assert write_run_page(storage.path(remote.run_dir)).exists()
    # As launch/restart.py asks, which needs nothing of the project itself.
    loop = runpy.run_path(str(Path(__file__).parents[1] / "launch" / "restart.py"))
    assert loop["newest_step"](remote.run_dir, [sys.executable]) == 6

    # What a checkpoint is for, from there to there.
    figures = evaluate(remote.run_dir, max_seq_length=32)
    assert figures["loss"] == evaluate(tmp_path / "disk", max_seq_length=32)["loss"]
    exported = export_checkpoint(f"{remote.run_dir}@6", f"{bucket}/model", "huggingface")
    assert str(exported) == f"{bucket}/model" and "config.json" in content_of(exported)
    imported = import_folder(f"{bucket}/model", f"{bucket}/imported", say=lambda line: None)
    assert_same(checkpoint.read_params(imported)[1]["encoder"], checkpoint.read_params(remote.run_dir)[1]["encoder"])
    with pytest.raises(UserError, match="in use"):
        import_folder(f"{bucket}/model", f"{bucket}/imported", say=lambda line: None)


def test_a_save_that_storage_refuses_is_told_and_what_was_complete_stays(bucket, way, monkeypatch):
    """CKPT: a failed save takes nothing away and can be tried again; old steps go, a damaged one is found."""
    saves = Checkpoints(storage.path(bucket) / "checkpoints", CheckpointConfig(keep_last=2))
    state = {"params": {"w": jax.numpy.arange(6.0)}}
    assert saves.save(2, state, {"rows": 2}, {}) and saves.wait() is None
    write_digests = step_folders.write_digests

    def refused(path, metric, config):
        way.refuse = 1_000
        write_digests(path, metric, config)

    with monkeypatch.context() as patch:
        patch.setattr(step_folders, "write_digests", refused)
        saves.save(4, state, {"rows": 4}, {})
        with pytest.raises(UserError, match=r"saving step 4 failed: .*storage cannot be reached"):
            saves.wait()
    way.refuse = 0
    assert checkpoint.steps(bucket) == [2]
    for step in (4, 6):
        saves.save(step, state, {"rows": step}, {})
    saves.close()
    assert checkpoint.verify(bucket) == [(4, []), (6, [])]
    file = storage.path(bucket) / "checkpoints" / "6" / "data" / "metadata"
    file.write_bytes(file.read_bytes().replace(b"6", b"7"))
    assert checkpoint.read_meta(bucket)[:2] == (4, {"rows": 4})


def test_single_files_of_a_command_are_fetched_and_sent(bucket):
    (storage.path(bucket) / "in.txt").write_text("text")
    args = argparse.Namespace(file=f"{bucket}/in.txt", out=f"{bucket}/out.txt", writes=("out",), overwrite=False)
    with command.files_at_hand(args):
        Path(args.out).write_text(Path(args.file).read_text().upper())
    assert content_of(bucket) == {"in.txt": b"text", "out.txt": b"TEXT"}
    again = argparse.Namespace(out=f"{bucket}/out.txt", writes=("out",), overwrite=False)
    with pytest.raises(UserError, match="is there already"), command.files_at_hand(again):
        pass
    with pytest.raises(UserError, match="no such bucket or object"):
        storage.local_file(f"{bucket}/missing.txt")


@pytest.mark.slow
def test_two_processes_share_a_run_in_storage_and_one_goes_on(tmp_path, bucket):
    """DIST: one of two is killed; both leave, and one process goes on to where one process on a disk comes to."""
    there = dataclasses.replace(tiny_hosts.settings(tmp_path), run_dir=f"{bucket}/run")
    with tiny_hosts.Processes(tmp_path / "two", there, 2, what=("kill", 1, 10)) as two:
        assert two.codes()[0] == exit_codes.RESTART
    assert 4 in checkpoint.steps(there.run_dir)
    with tiny_hosts.Processes(tmp_path / "one", there, 1) as one:
        one.succeed()
    with tiny_hosts.Processes(tmp_path / "disk", tiny_hosts.settings(tmp_path), 1) as disk:
        disk.succeed()
    assert [step for step, problems in checkpoint.verify(there.run_dir) if not problems] == [4, 8, 12]
    found, expected = (checkpoint.read_params(run)[1] for run in (there.run_dir, tmp_path / "run"))
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6), found, expected)
    assert losses(there.run_dir).keys() == losses(tmp_path / "run").keys() == set(range(1, 13))
