"""What the C library does with memory that is freed while training on CPU."""

from __future__ import annotations

import ctypes
import importlib.util
import os

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
"""Numbers of the settings in glibc's malloc.h."""
_GROW_BY = 1 << 28
"""Bytes by which the heap grows."""


def on_cpu() -> bool:
    """Whether JAX will compute on CPU, as far as this can be told without starting it."""
    platforms = os.environ.get("JAX_PLATFORMS", "")
    if platforms:
        return platforms == "cpu"
    return importlib.util.find_spec("libtpu") is None and importlib.util.find_spec("jax_plugins") is None


def keep_freed_memory() -> bool:
    """Have freed memory stay with the process, where the C library is glibc.

    A training step frees its activations, and glibc gives blocks of that size back to the kernel, which clears them
    page by page when the next step asks for them again: 10 to 15 % of the CPU time of a small model's step. With these
    settings all blocks come from one heap that never shrinks. The peak of memory stays as it is.

    To be called before JAX is imported: threads that have begun to allocate stay with a heap of their own.

    Returns:
      Whether the settings were taken.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return False  # another C library, or none
    settings = ((_MMAP_MAX, 0), (_TRIM_THRESHOLD, -1), (_TOP_PAD, _GROW_BY), (_ARENA_MAX, 1))
    return all(mallopt(name, value) == 1 for name, value in settings)
