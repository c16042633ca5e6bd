"""Every test sees 8 simulated devices, strict ranks and dtypes, and no network."""

import importlib.metadata
import os

os.environ["JAX_PLATFORMS"] = "cpu"
# The tests compile far more than they compute: without the compiler's optimisations they need half the time. The second
# flag is gone in newer releases, which end the process over a flag they do not know.
os.environ["XLA_FLAGS"] = (
    "--xla_backend_optimization_level=0 "
    + ("--xla_cpu_use_fusion_emitters=false " if importlib.metadata.version("jaxlib").startswith("0.10.") else "")
    + os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
)
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import jax

jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")
