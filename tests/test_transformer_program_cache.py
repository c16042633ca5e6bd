"""Compiled programs are kept for the next start, in a folder that may be bad without harm."""

import errno
import tempfile

import jax
import jax.numpy as jnp
import pytest
from jax._src import compilation_cache

from transformer_jax import program_cache
from transformer_jax.config import ConfigError, TrainConfig
from transformer_jax.program_cache import Kept


@pytest.fixture
def no_cache():
    """JAX's settings and its open cache as they were, whatever a test does."""
    names = ("compilation_cache_dir", "compilation_cache_max_size", "persistent_cache_min_compile_time_secs")
    before = {f"jax_{name}": getattr(jax.config, f"jax_{name}") for name in names}
    jax.config.update("jax_compilation_cache_dir", None)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.mark.parametrize(
    ("setting", "steps", "processes", "place"),
    [
        ("auto", 999, 1, None),
        ("auto", 1000, 1, "user"),
        ("auto", 20, 2, "RUN/programs"),
        ("on", 20, 1, "user"),
        ("on", 20, 4, "RUN/programs"),
        ("off", 10**6, 4, None),
        ("/there/kept", 20, 4, "/there/kept"),
    ],
)
def test_long_runs_and_several_hosts_keep_their_programs(monkeypatch, setting, steps, processes, place):
    monkeypatch.setattr(program_cache, "user_folder", lambda: "user")
    monkeypatch.setattr(program_cache, "keep", lambda folder, say: Kept(str(folder)))
    found = program_cache.for_training(TrainConfig(steps=steps, compile_cache=setting), "RUN/", processes, print)
    assert found.folder == (place or "") and bool(found.why) == (place is None)


def test_a_folder_is_told_from_a_mistyped_word():
    with pytest.raises(ConfigError, match=r"'none'; it must be auto, on, off, or a folder, .* \./none"):
        TrainConfig(compile_cache="none")


def test_a_folder_that_cannot_be_used_is_said_once_and_not_used(no_cache, tmp_path, monkeypatch):
    """Neither a file in its place nor a file system that is full or read-only ends a run."""
    (tmp_path / "file").write_text("")
    said = []
    assert program_cache.keep(tmp_path / "file" / "programs", said.append).folder == ""

    def full(**_):
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(tempfile, "TemporaryFile", full)
    assert program_cache.keep(tmp_path / "programs", said.append).folder == ""
    assert [line.count("warning: compiled programs are not kept") for line in said] == [1, 1]
    assert "Not a directory" in said[0] and "Read-only file system" in said[1]
    assert jax.config.jax_compilation_cache_dir is None


def test_a_program_is_found_again_with_the_same_numbers_and_a_broken_one_is_compiled(no_cache, tmp_path, monkeypatch):
    monkeypatch.setattr(program_cache, "LEAST_SECONDS", 0.0)
    seen = []
    jax.monitoring.register_event_listener(lambda event, **_: seen.append(event.rpartition("/")[2]))
    folder = program_cache.keep(tmp_path, print).folder
    assert folder == str(tmp_path / program_cache.processor())
    x = jnp.linspace(0.0, 1.0, 8)

    def result():
        jax.clear_caches()
        seen.clear()
        return jax.jit(lambda x: jnp.sin(x) @ jnp.cos(x) / 3)(x).item()

    first = result()
    assert "cache_hits" not in seen
    assert result() == first and "cache_hits" in seen
    for file in tmp_path.glob("*/*-cache"):
        file.write_bytes(file.read_bytes()[:40])
    with pytest.warns(UserWarning, match="Error reading persistent compilation cache entry"):
        assert result() == first
    assert "cache_hits" not in seen


def test_what_a_killed_process_left_half_written_goes(no_cache, tmp_path):
    """JAX writes a program, then a file beside it; it never replaces what lies there."""
    folder = tmp_path / program_cache.processor()
    folder.mkdir()
    for name in ("jit_whole-cache", "jit_whole-atime", "jit_half-cache"):
        (folder / name).write_bytes(b"12345678")
    program_cache.keep(tmp_path, print)
    assert {file.name for file in folder.glob("jit_*")} == {"jit_whole-cache", "jit_whole-atime"}


def test_machines_with_other_processors_share_no_programs(tmp_path):
    names = []
    for flags in ("sse2 avx2", "sse2 avx2 avx512f", "sse2 avx2"):
        file = tmp_path / str(len(names))
        file.write_text(f"processor : 0\nmodel name : One\nflags : {flags}\ncpu MHz : {len(names)}\n")
        names.append(program_cache.processor(file))
    assert names[0] == names[2] != names[1]
    assert program_cache.processor(tmp_path / "none").startswith("cpu-")
