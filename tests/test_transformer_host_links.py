"""Processes meet, and know of each other's end: threads of one process that each have their own connections."""

import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from tiny_hosts import free_port

from transformer_jax import exit_codes, host_links
from transformer_jax.config import UserError
from transformer_jax.host_links import JoinError, meet


def together(*calls):
    """What each call gives or raises, all at once."""
    found = [None] * len(calls)

    def run(i, call):
        try:
            found[i] = call()
        except Exception as e:
            found[i] = e

    threads = [threading.Thread(target=run, args=item) for item in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def process(address, count, index, limit=20.0, silence=30.0, said=None):
    say = (said if said is not None else []).append
    return lambda: meet(address, count, index, limit, silence, say)


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


@pytest.fixture
def left(monkeypatch):
    """With which codes a process would have ended; the time it is given is short."""
    codes = []
    monkeypatch.setattr(host_links, "GRACE", 0.1)
    monkeypatch.setattr(host_links.Links.__init__, "__defaults__", (codes.append,))
    return codes


def until(condition, seconds=20.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_all_know_all_names_and_one_port(address):
    found = together(*(process(address, 3, i) for i in (1, 0, 2)))
    assert {links.index for links in found} == {0, 1, 2}
    assert {tuple(links.names) for links in found} == {(socket.gethostname(),) * 3}
    assert len({links.port for links in found}) == 1
    for links in found:
        links.say_goodbye(exit_codes.DONE)


@pytest.mark.slow
def test_who_is_missing_is_told_to_all_that_came(address):
    """C077"""
    zero, two = together(process(address, 4, 0, limit=2.0), process(address, 4, 2, limit=2.0))
    for error in (zero, two):
        assert isinstance(error, JoinError)
        assert "2 of 4 processes have joined within 2 s; missing: processes 1, 3" in str(error)
    assert "hosts.join_limit" in str(zero)


def test_without_process_zero_its_address_is_named(address):
    began = time.monotonic()
    (error,) = together(process(address, 2, 1, limit=1.0))
    assert isinstance(error, JoinError) and time.monotonic() - began < 10
    assert f"process 0 has not answered at {address} within 1 s; this is process 1 of 2" in str(error)


def test_a_number_given_twice_or_another_count_is_refused_on_all(address):
    one = process(address, 3, 1)
    found = together(process(address, 3, 0), one, one)
    assert all(isinstance(e, UserError) and not isinstance(e, JoinError) for e in found)
    assert all("process 1" in str(e) and "each number may be given once" in str(e) for e in found)
    port = f"127.0.0.1:{free_port()}"
    for error in together(process(port, 2, 0), process(port, 4, 1)):
        assert "process 1" in str(error) and "of 4" in str(error) and "of 2" in str(error)


@pytest.mark.parametrize("address", ["10.0.0.2", ":1", "host:port", "", "host:0", "host:65536"])
def test_an_address_that_is_none_is_refused(address):
    with pytest.raises(UserError, match="HOST:PORT"):
        meet(address, 2, 1, 1.0, 1.0)


def test_a_name_that_no_host_has_is_said_to_be_none():
    with pytest.raises(JoinError, match=r"process 0 has not answered .*[Nn]ame"):
        meet("no-host.invalid:8476", 2, 1, 0.1, 1.0)


def test_a_port_that_is_taken_is_named():
    with socket.create_server(("", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UserError, match=f"cannot listen at port {port}"):
            meet(f"127.0.0.1:{port}", 2, 0, 1.0, 1.0)


def test_strangers_at_the_port_are_sent_away(address):
    def stranger():
        time.sleep(0.3)
        with socket.create_connection(address.split(":"), timeout=10) as s:
            s.sendall(b"GET / HTTP/1.1\r\n\r\n")
            s.shutdown(socket.SHUT_WR)
            return s.recv(100)

    def late():
        time.sleep(1.0)
        return meet(address, 2, 1, 20.0, 30.0)

    answer, zero, one = together(stranger, process(address, 2, 0), late)
    assert answer == b"" and zero.names == one.names


def test_a_process_that_leaves_with_an_error_ends_the_others_with_its_reason(address, left, capfd):
    zero, one, two = together(*(process(address, 3, i) for i in range(3)))
    one.say_goodbye(exit_codes.MISTAKE, "error: no data here")
    until(lambda: len(left) == 2)
    assert left == [exit_codes.MISTAKE] * 2  # starting all again would not help
    for links in (zero, two):
        assert links.lost.process == 1 and links.lost.why == "error: no data here"
    assert capfd.readouterr().err.count("is lost: error: no data here") == 2


def test_a_process_that_is_done_is_not_lost(address, left):
    zero, one = together(*(process(address, 2, i) for i in range(2)))
    one.say_goodbye(exit_codes.DONE)
    one._connections[0].socket.shutdown(socket.SHUT_RDWR)
    time.sleep(0.5)
    assert not left and zero.lost is None
    zero.say_goodbye(exit_codes.DONE)


def test_a_process_that_is_killed_is_known_at_once(address, left):
    program = f"""if True:
        import time
        from transformer_jax.host_links import meet
        meet({address!r}, 3, 1, 60.0, 30.0)
        time.sleep(99)"""
    child = subprocess.Popen([sys.executable, "-c", program])
    try:
        zero, two = together(process(address, 3, 0, 60.0), process(address, 3, 2, 60.0))
        os.kill(child.pid, signal.SIGKILL)
        until(lambda: len(left) == 2)
    finally:
        child.kill()
        child.wait()
    assert left == [exit_codes.RESTART] * 2
    assert zero.lost.process == two.lost.process == 1
    assert "ended without a word" in two.lost.why


def test_silence_is_reported_and_ends_nothing(address, left, capfd):
    zero, one = together(process(address, 2, 0, silence=0.5), process(address, 2, 1, silence=600.0))
    said = []

    def heard(words):
        said.append(capfd.readouterr().err)
        return words in "".join(said)

    until(lambda: heard("no sign of life"))  # which says a word only every five seconds
    assert not left and zero.lost is None and "process 1" in "".join(said)
    until(lambda: heard("answers again"))
    one.say_goodbye(exit_codes.DONE)
