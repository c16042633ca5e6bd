"""Every test sees 8 simulated devices, strict ranks and dtypes, no network, and no programs kept by others."""

import atexit
import importlib.metadata
import os
import shutil
import signal
import tempfile

os.environ["JAX_PLATFORMS"] = "cpu"
# The tests compile far more than they compute: without the compiler's optimisations they need half the time. The second
# flag is gone in newer releases, which end the process over a flag they do not know.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 "
    + ("--xla_cpu_use_fusion_emitters=false " if importlib.metadata.version("jaxlib").startswith("0.10.") else "")
    + os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
)
# Commands keep compiled programs in the user's cache folder: here in one that this process, and those it starts, share.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="test-cache-")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax

# What a shell runs in the background ignores Ctrl-C, and what nohup runs ignores the end of the terminal; so would each
# program that a test starts and signals.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
atexit.register(shutil.rmtree, os.environ["XDG_CACHE_HOME"], ignore_errors=True)
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Files that take longest come first, so that the processes of a parallel run end at about the same time; those that
# start processes of their own, at places 0 and 2, do not come at once in a run of two.
LONGEST = ("transformer_hosts", "transformer_tokenizer", "bert_resume", "transformer_train", "transformer_checkpoint")


def pytest_collection_modifyitems(items):
    place = {f"test_{name}.py": i for i, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.path.name, len(place)))
