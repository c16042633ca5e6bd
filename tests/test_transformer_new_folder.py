"""Folders and files that take the place of earlier ones: whole or not at all, and nothing of the user's is lost."""

import os

import pytest

from transformer_jax.config import UserError
from transformer_jax.new_file import check_place, new_file
from transformer_jax.new_folder import new_folder


def fill(folder, *names):
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def test_what_the_new_folder_lacks_is_not_lost_with_the_old_one(tmp_path):
    fill(tmp_path / "out", "model", "part/config", "part/notes.txt", "old_form")
    lost = r"out holds part/notes\.txt, which this export does not write"
    with pytest.raises(UserError, match=lost), new_folder(tmp_path / "out", ("old_form",)) as made:
        fill(made, "model", "part/config")
    assert (tmp_path / "out" / "part" / "notes.txt").exists() and [p.name for p in tmp_path.iterdir()] == ["out"]
    (tmp_path / "out" / "part" / "notes.txt").unlink()
    with new_folder(tmp_path / "out", ("old_form",)) as made:
        fill(made, "model", "part/config", "new")
    found = {p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_file()}
    assert found == {"out/model", "out/part/config", "out/new"}


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is a device or a pipe"), new_file(tmp_path / "pipe"):
        pytest.fail("no file is to be written")
    assert (tmp_path / "pipe").is_fifo()
    check_place(tmp_path / "pipe")  # which a program that opens it may write to
