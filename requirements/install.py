"""Make a virtual environment with what this project needs, pinned and hashed; `make` calls it.

    python requirements/install.py FOLDER users|tests|development|ct2|gcs|tpu

users is what running needs; tests adds what the tests need but for PyTorch; development adds PyTorch. The others make
nothing new: they add CTranslate2, what reads Google Cloud Storage, or the TPU compiler (Linux on x86-64 alone), to an
environment that is there. Says first how much it will download. pip's own settings hold, so an index or a folder named
there is used.
"""

from __future__ import annotations

import importlib.util
import json
import platform
import re
import subprocess
import sys
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent
SETS = {"users": "py{}.txt", "tests": "dev-py{}.txt", "development": "dev-py{}.txt"}
ADDED = {
    "ct2": ("ct2-py{}.txt", "CTranslate2"),
    "gcs": ("gcs-py{}.txt", "Google Cloud Storage"),
    "tpu": ("tpu-py{}.txt", "the TPU compiler"),
}
HASHED = ("install", "--quiet", "--no-compile", "--require-hashes")


def megabytes(file: str) -> int:
    """The download a requirements file states for this machine; 0 when it states none."""
    machine = {"arm64": "arm64" if sys.platform == "darwin" else "aarch64"}.get(platform.machine(), platform.machine())
    system = {"darwin": "macOS", "linux": "Linux"}.get(sys.platform, sys.platform)
    text = (REQUIREMENTS / file).read_text(encoding="utf-8")
    found = re.search(rf"^# download on {system} {machine}: (\d+) MB$", text, re.MULTILINE)
    return int(found[1]) if found else 0


def pip(python: Path, *arguments: str, quiet: bool = False) -> str:
    """Run pip in the new environment; its own message is enough when it fails."""
    command = [str(python), "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE if quiet else None, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pip could not finish; the environment is not complete. The command was: {' '.join(command)}")
    return done.stdout or ""


def torch_file(python: Path) -> str:
    """The file with the PyTorch that pip, as it is set up here, would find."""
    pin = re.search(r"^torch==[\d.]+", (REQUIREMENTS / "torch.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert pin
    report = pip(python, "install", "--quiet", "--dry-run", "--no-deps", "--report", "-", pin[0], quiet=True)
    found: str = json.loads(report)["install"][0]["metadata"]["version"]
    return "torch-cpu.txt" if found.endswith("+cpu") else "torch.txt"


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[2] not in (*SETS, *ADDED):
        raise SystemExit(__doc__)
    folder, which = Path(sys.argv[1]).resolve(), sys.argv[2]
    version = ".".join(map(str, sys.version_info[:2]))
    short = version.replace(".", "")
    file = (SETS[which] if which in SETS else ADDED[which][0]).format(short)
    if not (REQUIREMENTS / file).exists():
        raise SystemExit(f"Python {version} at {sys.executable} has no requirements/{file}; use Python 3.11 or 3.12.")
    if which in ADDED:
        print(f"Adding {ADDED[which][1]} to {folder.name}: downloads about {megabytes(file)} MB.", flush=True)
        pip(folder / "bin" / "python", *HASHED, "--no-deps", "-r", str(REQUIREMENTS / file))
        return
    if importlib.util.find_spec("ensurepip") is None:
        raise SystemExit(f"Python {version} cannot make virtual environments here; install python{version}-venv.")

    print(f"Making {folder.name} with Python {version}.", flush=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
    python = folder / "bin" / "python"
    total = megabytes(file) + megabytes("build.txt")
    torch = torch_file(python) if which == "development" else None
    if torch:
        total += megabytes(torch)
        print(f"PyTorch for the parity tests: {megabytes(torch)} MB.")
        if torch == "torch.txt" and sys.platform == "linux":
            print(
                f"That is the build for CUDA; the one for the CPU is {megabytes('torch-cpu.txt')} MB. To have it, "
                "stop here, put PyTorch's index of CPU builds in PIP_EXTRA_INDEX_URL and start again."
            )
    print(f"Downloads about {total} MB, less what pip has stored from before.", flush=True)
    pip(python, *HASHED, "-r", str(REQUIREMENTS / "build.txt"))
    pip(python, *HASHED, "--no-build-isolation", "-r", str(REQUIREMENTS / file))
    if torch:
        pip(python, *HASHED, "--no-deps", "-r", str(REQUIREMENTS / torch))
    pip(python, "install", "--quiet", "--no-deps", "--no-build-isolation", "--editable", str(REQUIREMENTS.parent))


if __name__ == "__main__":
    main()
