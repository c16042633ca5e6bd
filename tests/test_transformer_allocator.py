"""Memory that a step frees is there for the next step, without a way through the kernel."""

from __future__ import annotations

import os
import platform
import subprocess
import sys

import pytest

from transformer_jax import allocator

STEPS = """
import os, resource, sys
os.environ["JAX_PLATFORMS"] = "cpu"
from transformer_jax import allocator
if sys.argv[1] == "keep":
    assert allocator.keep_freed_memory()
import jax, jax.numpy as jnp

@jax.jit
def step(w, x):
    def loss(w):
        y = x
        for _ in range(4):
            y = jnp.tanh(y @ w)  # 8 MB, kept for the backward pass: with the others, more than glibc keeps by itself
        return y.sum()

    return w - 1e-6 * jax.grad(loss)(w)

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

w, x = jnp.ones((256, 256)), jnp.ones((8192, 256))
for _ in range(6):
    w = step(w, x).block_until_ready()
before = faults()
for _ in range(5):
    w = step(w, x).block_until_ready()
print(faults() - before)
"""


def faults(setting: str) -> int:
    # One device and one thread: otherwise what one step leaves free differs from step to step.
    environment = {**os.environ, "XLA_FLAGS": "", "NPROC": "1"}
    command = [sys.executable, "-c", STEPS, setting]
    return int(subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout)


@pytest.mark.slow
@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="the settings are glibc's")
def test_steps_ask_the_kernel_for_far_fewer_pages_once_freed_memory_is_kept() -> None:
    assert faults("keep") < faults("default") / 2


def test_what_jax_will_compute_on_is_told_by_its_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    assert allocator.on_cpu()
    monkeypatch.setenv("JAX_PLATFORMS", "tpu,cpu")
    assert not allocator.on_cpu()


def test_without_a_setting_installed_accelerators_count(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(allocator.importlib.util, "find_spec", lambda name: None)
    assert allocator.on_cpu()
    monkeypatch.setattr(allocator.importlib.util, "find_spec", lambda name: name if name == "libtpu" else None)
    assert not allocator.on_cpu()


def test_another_c_library_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(allocator.ctypes, "CDLL", lambda name: object())
    assert not allocator.keep_freed_memory()
