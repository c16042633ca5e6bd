"""Scripts of `launch/` and the commands that stand in for `gcloud`, `kubectl` and training in their tests."""

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def call(*words, path=None, cwd=ROOT, **environment):
    """Run a command; what it finds first on PATH is `path`, and no variable of the scripts is set but those given."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("TPU_VM_", "SLURM_", "JAX_")) and k != "PROGRAM"}
    if path is not None:
        kept["PATH"] = f"{path}{os.pathsep}{kept['PATH']}"
    words = [str(word) for word in words]
    return subprocess.run(words, cwd=cwd, env=kept | environment, capture_output=True, text=True, check=False)


def stand_in(folder, name, text):
    """An executable shell script in `folder`."""
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path
