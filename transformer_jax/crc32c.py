"""CRC-32C (Castagnoli), the checksum of TensorFlow's files, fast enough in numpy for files of some hundred megabytes.

A register that starts at 0 is linear in the data, and leading zero bytes leave it at 0. So a block is cut into lanes,
the registers of all lanes are worked out side by side, and neighbours are joined: the register of A followed by B is
that of A moved on by as many zero bytes as B has, added (exclusive or) to that of B.
"""

from __future__ import annotations

import functools

import numpy as np

_POLYNOMIAL = 0x82F63B78
_LANES = 1024
_MOST_WORDS = 256
"""Words of a lane in a block; 1 MiB a block keeps everything in cache."""
_SMALL = 2048
"""Data of fewer bytes is worked out byte by byte."""
_MASK_DELTA = 0xA282EAD8


def crc32c(data: bytes | memoryview) -> int:
    """The checksum of `data`; that of b"123456789" is 0xE3069283."""
    register = _start(data) if len(data) < _SMALL else _register(data) ^ _moved(0xFFFFFFFF, len(data))
    return register ^ 0xFFFFFFFF


def unmasked(stored: int) -> int:
    """The checksum that TensorFlow stores masked, so that checksums of checksums do not weaken it."""
    rotated = (stored - _MASK_DELTA) & 0xFFFFFFFF
    return ((rotated >> 17) | (rotated << 15)) & 0xFFFFFFFF


def masked(checksum: int) -> int:
    """What is stored of a checksum."""
    return (((checksum >> 15) | (checksum << 17)) + _MASK_DELTA) & 0xFFFFFFFF


def _start(data: bytes | memoryview) -> int:
    table, register = _byte_table().tolist(), 0xFFFFFFFF
    for byte in bytes(data):
        register = table[(register ^ byte) & 0xFF] ^ (register >> 8)
    return register


def _register(data: bytes | memoryview) -> int:
    """The register after `data`, from 0."""
    words = min(_MOST_WORDS, -(-len(data) // (4 * _LANES)))
    size = 4 * _LANES * words
    first = len(data) % size
    padded = bytes(size - first) + bytes(data[:first]) if first else b""
    blocks = [np.frombuffer(padded, "<u4")] if first else []
    blocks += [np.frombuffer(data[at : at + size], "<u4") for at in range(first, len(data), size)]
    # The tables of a word's two halves: each is moved on past the bytes that come after it in the word.
    low, high = _half_tables()
    register = 0
    for block in blocks:
        lanes = np.zeros(_LANES, np.uint32)
        for column in np.ascontiguousarray(block.reshape(_LANES, words).T):
            lanes ^= column
            lanes = low[lanes & 0xFFFF] ^ high[lanes >> 16]
        length = 4 * words
        while len(lanes) > 1:
            lanes = _apply(_mover(length), lanes[0::2]) ^ lanes[1::2]
            length *= 2
        register = _moved(register, size) ^ int(lanes[0])
    return register


@functools.cache
def _byte_table() -> np.ndarray:
    register = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        register = np.where(register & 1, (register >> 1) ^ np.uint32(_POLYNOMIAL), register >> 1)
    return register


@functools.cache
def _half_tables() -> tuple[np.ndarray, np.ndarray]:
    """Registers after four bytes, for each value of the two low bytes, and of the two high bytes."""
    values = np.arange(1 << 16, dtype=np.uint32)
    return _zero_bytes(values, 4), _zero_bytes(values << 16, 4)


def _zero_bytes(registers: np.ndarray, count: int) -> np.ndarray:
    for _ in range(count):
        registers = _byte_table()[registers & 0xFF] ^ (registers >> 8)
    return registers


@functools.cache
def _mover(length: int) -> np.ndarray:
    """What `length` zero bytes make of each bit of a register, uint32 [32]."""
    bits = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))
    if length <= 4:
        return _zero_bytes(bits, length)
    half = _mover(length // 2)
    doubled = _apply(half, half)
    return _zero_bytes(doubled, 1) if length % 2 else doubled


def _apply(mover: np.ndarray, registers: np.ndarray) -> np.ndarray:
    moved = np.zeros_like(registers)
    for bit in range(32):
        moved ^= np.where((registers >> np.uint32(bit)) & 1, mover[bit], np.uint32(0))
    return moved


def _moved(register: int, length: int) -> int:
    return int(_apply(_mover(length), np.array([register], np.uint32))[0])
