"""A file that takes the place of an earlier one, and the places where none can be made."""

import os

import pytest

from transformer_jax.config import UserError
from transformer_jax.new_file import check_place, new_file


def test_a_pipe_is_not_replaced_by_a_file(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UserError, match="pipe is a device or a pipe"), new_file(tmp_path / "pipe"):
        pytest.fail("no file is to be written")
    assert (tmp_path / "pipe").is_fifo()
    check_place(tmp_path / "pipe")  # which a program that opens it may write to
