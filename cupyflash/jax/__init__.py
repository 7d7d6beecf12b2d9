"""Attention for JAX: eager and under `jit`, `grad`, `vmap`, `remat`, `scan` and `shard_map`, in XLA's own buffers.

Importing this module imports JAX; `import cupyflash` does not.
"""

import importlib.util

if importlib.util.find_spec("jax") is None or importlib.util.find_spec("jax.experimental.buffer_callback") is None:
    raise ImportError("cupyflash.jax needs JAX 0.6.2 or newer, which has jax.experimental.buffer_callback")

from cupyflash.jax._attention import attention
from cupyflash.jax._merge import merge_states
from cupyflash.jax._nn import dot_product_attention

__all__ = ["attention", "dot_product_attention", "merge_states"]
