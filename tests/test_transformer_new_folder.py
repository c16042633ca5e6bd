"""A folder that takes the place of an earlier one: nothing of the user's is lost with that."""

import pytest

from transformer_jax.config import UserError
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
