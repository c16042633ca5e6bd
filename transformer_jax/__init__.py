"""The Transformer in JAX, and everything needed to train one."""
