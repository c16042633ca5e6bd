"""A file that takes the place of an earlier one, and the places where none can be made."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from transformer_jax.config import UserError
from transformer_jax.new_file import check_place, new_file


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is a device or a pipe"), new_file(tmp_path / "pipe"):
        pytest.fail("no file is to be written")
    assert (tmp_path / "pipe").is_fifo()
    check_place(tmp_path / "pipe")  # which a program that opens it may write to


def test_a_link_stays_and_what_it_leads_to_is_replaced(tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to("there/page")
    for text in ("made", "made again"):
        with new_file(tmp_path / "link") as made:
            made.write_text(text)
        assert (tmp_path / "link").is_symlink() and (tmp_path / "there" / "page").read_text() == text
    assert [p.name for p in (tmp_path / "there").iterdir()] == ["page"]


def test_a_link_to_no_folder_is_told_before_the_work(tmp_path):
    (tmp_path / "link").symlink_to("nowhere/page")
    with pytest.raises(UserError, match="nowhere: no such folder"):
        check_place(tmp_path / "link")


def test_a_file_is_not_replaced_where_none_can_be_made():
    """`/proc` takes no files, whoever asks, and has some that may be written."""
    if not Path("/proc/self/comm").is_file():
        pytest.skip("no /proc here")
    check_place(Path("/proc/self/comm"))
    with pytest.raises(UserError, match="no file can be made there"), new_file(Path("/proc/self/comm")):
        pytest.fail("nothing is to be written")
    with pytest.raises(UserError, match="no file can be made there"):
        check_place(Path("/proc/self/comm"), replaced=True)


def test_a_link_that_leads_back_to_itself_is_told(tmp_path):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(UserError, match="leads back to itself"):
        check_place(tmp_path / "loop")


def test_where_the_program_prints_no_file_is_put(tmp_path):
    """Of `--attention /dev/stdout > FILE` the page would replace the file that the rest still goes to."""
    code = (
        "import sys; from pathlib import Path; from transformer_jax.new_file import check_place\n"
        "try: check_place(Path(sys.argv[1]), replaced=True)\n"
        "except Exception as e: print(e)"
    )
    for name in ("/dev/stdout", str(tmp_path / "out")):
        with (tmp_path / "out").open("w") as out:
            subprocess.run([sys.executable, "-c", code, name], stdout=out, check=True)
        assert (tmp_path / "out").read_text() == f"{name} is where this program prints; name a file\n"
    assert subprocess.check_output([sys.executable, "-c", code, "/dev/stdout"]).startswith(b"/dev/stdout is where")
