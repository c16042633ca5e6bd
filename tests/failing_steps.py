"""Steps that cannot be made, for the process that compiles; it imports them by name."""

import os

from transformer_jax.config import ConfigError


def ends_natively(settings, devices):
    os.abort()


def refuses(settings, devices):
    raise ConfigError("mesh data=3 asks for 3 devices")
