"""Ctrl-C is obeyed wherever it comes."""

import signal
import subprocess
import sys

import pytest

from transformer_jax import interrupts

WAIT = "print('ready', flush=True)\nfor _ in range(100): time.sleep(0.1)\n"
IN_AN_IMPORT = "import time\ntry:\n    " + WAIT.replace("\n", "\n    ").rstrip() + "\nexcept BaseException: pass\n"
PLACES = {
    "code": f"try:\n    {WAIT.splitlines()[0]}\n    {WAIT.splitlines()[1]}\nexcept KeyboardInterrupt: sys.exit(130)",
    "callback": f"""
class Gone:
    def __del__(self):
        {WAIT.splitlines()[0]}
        {WAIT.splitlines()[1]}
try:
    Gone()
    time.sleep(20)
except KeyboardInterrupt:
    sys.exit(130)
""",
    "import": "import waits\nprint('swallowed')",
}


@pytest.mark.parametrize("place", PLACES)
def test_an_interrupt_ends_a_command_wherever_it_comes(tmp_path, place):
    (tmp_path / "waits.py").write_text(IN_AN_IMPORT)
    body = "\n".join(f"    {line}" for line in PLACES[place].splitlines())
    code = f"import sys, time\nfrom transformer_jax import interrupts\nwith interrupts.heard():\n{body}\n"
    child = subprocess.Popen(
        [sys.executable, "-c", code], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert child.stdout.readline() == "ready\n"
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=15)
    assert (child.returncode, out) == (130, ""), err
    assert "Exception ignored" not in err


def test_other_errors_that_are_ignored_are_told_as_before(monkeypatch):
    told = []
    monkeypatch.setattr(sys, "unraisablehook", lambda what: told.append(what.exc_type))
    with interrupts.heard():

        class Gone:
            def __del__(self):
                raise ValueError

        Gone()
    assert told == [ValueError]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_that_is_there_stays():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupts.heard():
            assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)
