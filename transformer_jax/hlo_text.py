"""What a compiled TPU program says in its text: estimated cycles, and the collectives with their bytes.

The text of a program that the TPU compiler has scheduled carries a price in clock cycles at most of its instructions.
A loop's body is priced once, and a fusion's price stands at the fusion; so the price of a program is found by walking
it from its entry, loops as often as they run. The price is a model of the compiler's. It leaves out collectives,
kernels written by hand and some other instructions (`Schedule.unpriced`), and overlaps nothing.

Pure functions of the text; neither JAX nor a compiler is needed.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re

CROSS_SLICE = "slice-transfer"
"""The kind of what leaves a slice over the data-centre network."""
KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
WORK = ("fusion", "custom-call", "convolution", "dot", "rng-bit-generator", "sort", "gather", "scatter")
"""Instructions that take time, and are listed when they have no price."""
FREE = ("ConcatBitcast", "AllocateBuffer")
"""Custom calls that move nothing."""
UNKNOWN = 2**64 - 1
"""The compiler's mark for a price that it does not know."""
BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "f32": 4, "s32": 4, "u32": 4,
         "f64": 8, "s64": 8, "u64": 8}  # fmt: skip

INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
OPERATION = re.compile(r"(?:^|[\]\})] )([a-z][a-z0-9\-]*)\(")
COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\(.*\) -> .*)?\{$")
SHAPE = re.compile(r"\b(pred|bf16|[suf]\d+)\[([\d,]*)\]")
CALLED = re.compile(
    r"(?:calls|to_apply|body|branch_computations|true_computation|false_computation)=\{?((?:%?[\w.\-]+(?:, )?)+)"
)
PRICE = re.compile(r'"estimated_cycles":"(\d+)"')

Program = dict[str, list[str]]


@dataclasses.dataclass(frozen=True)
class Collective:
    """All collectives of one kind among groups of one size."""

    kind: str
    group: int
    """Devices that take part in one of them; 0 where the text names none."""
    count: float
    """Of a step, loops counted as often as they run."""
    bytes: float
    """Of their whole arrays together: what an all-gather gives, and what a reduce-scatter takes, on one device."""
    ahead: float
    """How many of `count` are started before they are waited for, so that other work may hide them."""
    bytes_ahead: float


@dataclasses.dataclass(frozen=True)
class Schedule:
    """What the text says of one step on one device."""

    cycles: float
    by_name: dict[str, float]
    """Cycles by the name that the operation has in the model."""
    unpriced: dict[str, float]
    """How often instructions run that have no price."""
    collectives: tuple[Collective, ...]


def read(text: str) -> Schedule:
    """Walk a scheduled program from its entry."""
    return _Walk(text).schedule()


def computations(text: str) -> tuple[str, Program]:
    """The name of the entry, and the instructions of each computation (what stands behind `name = `).

    The text of a kernel may hold line ends, so a computation ends only at a line that is nothing but a brace.
    """
    entry, name = "", ""
    found: Program = {}
    for line in text.splitlines():
        if line == "}":
            name = ""
        elif not name and (head := COMPUTATION.match(line)):
            name = head.group(2)
            found[name] = []
            entry = name if head.group(1) else entry
        elif name and (instruction := INSTRUCTION.match(line)):
            found[name].append(instruction.group(2))
    return entry, found


def operation(rest: str) -> str:
    """The operation of an instruction; "" where there is none to be seen."""
    match = OPERATION.search(rest)
    return match.group(1) if match else ""


def sizes(shapes: str) -> list[int]:
    """Bytes of each array that is named in a text."""
    return [
        BYTES.get(kind, 4) * math.prod(int(d) for d in dims.split(",") if d) for kind, dims in SHAPE.findall(shapes)
    ]


def group_size(rest: str) -> int:
    """Devices of one group of a collective, in any of the three ways to write groups; 0 if none is written."""
    named = re.search(r"replica_groups=mesh\[([^\]]*)\]\s*(?:device_ids=\S+\s*)?\{([^}]*)\}", rest)
    if named:
        axes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", named.group(1))}
        return math.prod(axes.get(name, 1) for name in re.findall(r"'([^']+)'", named.group(2)))
    tiled = re.search(r"replica_groups=\[(\d+),(\d+)\]", rest)
    if tiled:
        return int(tiled.group(2))
    listed = re.search(r"replica_groups=\{\{([\d,]*)\}", rest)
    if listed:
        return len(listed.group(1).split(","))
    pairs = re.search(r"source_target_pairs=\{(.*?)\}\}", rest)
    return len(set(re.findall(r"\d+", pairs.group(1)))) if pairs else 0


class _Walk:
    """The walk through one program, and what it has met so far."""

    def __init__(self, text: str) -> None:
        self.entry, self.program = computations(text)
        self.cycles = 0.0
        self.by_name: dict[str, float] = collections.defaultdict(float)
        self.unpriced: dict[str, float] = collections.defaultdict(float)
        self.totals: dict[tuple[str, int], list[float]] = {}
        self.channels: set[str] = set()

    def schedule(self) -> Schedule:
        if self.entry:
            self.visit(self.entry, 1, True, "")
        found = [Collective(kind, group, *numbers) for (kind, group), numbers in sorted(self.totals.items())]
        return Schedule(self.cycles, dict(self.by_name), dict(self.unpriced), tuple(found))

    def visit(self, name: str, times: float, priced: bool, inside: str) -> None:
        """`priced` is False within fusions, whose price stands at the fusion; only collectives are looked for there."""
        for rest in self.program.get(name, ()):
            op = operation(rest)
            called = [one for group in CALLED.findall(rest) for one in re.findall(r"[\w.\-]+", group)]
            self.communicate(rest, op, times, inside)
            if op == "while":
                for body in called:
                    self.visit(body, times * self.trips(rest), priced, inside)
                continue
            if priced:
                self.price(rest, op, times)
            if op in ("fusion", "call", "async-start", "conditional"):
                for sub in called:
                    self.visit(sub, times, priced and op != "fusion", sub if op == "fusion" else inside)

    def price(self, rest: str, op: str, times: float) -> None:
        found = PRICE.search(rest)
        if found and int(found.group(1)) != UNKNOWN:
            cycles = times * int(found.group(1))
            self.cycles += cycles
            where = re.search(r'op_name="([^"]*)"', rest)
            self.by_name[where.group(1) if where else op] += cycles
        elif op in WORK:
            target = re.search(r'custom_call_target="([^"]+)"', rest)
            if target is None or target.group(1) not in FREE:
                self.unpriced[f"{op}:{target.group(1)}" if target else op] += times

    def trips(self, rest: str) -> int:
        """How often a loop runs: as it says, or else the largest number that its condition compares with."""
        known = re.search(r'known_trip_count":\{"n":"(\d+)"', rest)
        if known:
            return int(known.group(1))
        condition = re.search(r"condition=%?([\w.\-]+)", rest)
        lines = self.program.get(condition.group(1), []) if condition else []
        numbers = [int(n) for line in lines for n in re.findall(r"^[su]32\[\]\S* constant\((\d+)\)", line)]
        return max(numbers, default=1)

    def communicate(self, rest: str, op: str, times: float, inside: str) -> None:
        """Count a collective once, although one that is started ahead stands in the text in several pieces."""
        kind = op.removesuffix("-start")
        if op == "send" and "is_host_transfer=true" in rest:
            kind = CROSS_SLICE
        elif kind not in KINDS or op.endswith("-done"):
            return
        channel = re.search(r"channel_id=(\d+)", rest)
        if channel:
            if channel.group(1) in self.channels:
                return
            self.channels.add(channel.group(1))
        group = group_size(rest)
        result = sizes(rest.split(f" {op}(")[0])
        # What a start gives is (operand, result, ...), and a send (operand, ...).
        size = float((max if op.endswith("-start") or op == "send" else sum)(result or [0]))
        if kind == "reduce-scatter":
            size *= max(group, 1)
        if "all-reduce-scatter" in inside:  # a fusion of this name sums whole arrays and keeps a part
            kind = "reduce-scatter"
        ahead = op.endswith("-start") or op == "send" or "async_collective" in rest or "async" in inside
        total = self.totals.setdefault((kind, group), [0.0, 0.0, 0.0, 0.0])
        for i, number in enumerate((1.0, size, 1.0 * ahead, size * ahead)):
            total[i] += times * number


def ring_bytes(collective: Collective, ahead: bool | None = None) -> float:
    """Bytes that each device must send for it around a ring, which is the least there is.

    Args:
      ahead: True takes those that are started ahead only, False the others only.
    """
    n = collective.group
    size = {None: collective.bytes, True: collective.bytes_ahead}.get(ahead, collective.bytes - collective.bytes_ahead)
    if collective.kind in ("collective-permute", CROSS_SLICE):
        return size
    share = (n - 1) / n if n > 1 else 0.0
    return size * share * (2.0 if collective.kind == "all-reduce" else 1.0)


def rematerializations(said: str) -> list[str]:
    """Lines in which the partitioner says that it makes an array whole on every device to lay it out anew."""
    return [line.strip() for line in said.splitlines() if "nvoluntary full rematerialization" in line]


NUMBER = r"([\d.]+)([KMGT]?)"
UNITS = {"": 1.0, "K": 2.0**10, "M": 2.0**20, "G": 2.0**30, "T": 2.0**40}
EARLY = re.compile(rf"memory required for HLO temporaries \({NUMBER}\) exceeds available HBM \({NUMBER}\)")
LATE = re.compile(rf"Used {NUMBER} of {NUMBER} hbm")


@dataclasses.dataclass(frozen=True)
class Shortage:
    """A program that does not fit, by the compiler's message."""

    needed: float
    """Bytes."""
    available: float
    whole: bool
    """It was compiled whole before it was found not to fit; else it was refused early, on the size of its arrays."""
    largest: tuple[str, ...]
    """Its largest arrays, where the message lists them."""


def shortage(message: str) -> Shortage | None:
    """What a RESOURCE_EXHAUSTED of the TPU compiler says, in either of its two forms; None for any other message."""
    early, late = EARLY.search(message), LATE.search(message)
    found = late or early
    if found is None:
        return None
    needed, available = (float(found.group(i)) * UNITS[found.group(i + 1)] for i in (1, 3))
    return Shortage(needed, available, late is not None, tuple(_allocations(message)))


def _allocations(message: str) -> list[str]:
    """`size shape name` of the largest allocations that are listed."""
    found, size = [], ""
    for line in message.splitlines():
        entry = re.match(r"\s*\d+\. Size: ([\d.]+[KMGT]?)", line)
        if entry:
            size = entry.group(1)
        elif size and (shape := re.match(r"\s*Shape: (\S+)", line)):
            found.append(f"{size} {shape.group(1)}")
            size = ""
        elif size and (name := re.match(r'\s*Operator: op_name="([^"]*)"', line)):
            found.append(f"{size} {name.group(1)}")
            size = ""
    return found
