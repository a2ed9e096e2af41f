"""Array-to-array kernels of jzero: no mesh, no pytree, no optax.

Each operation is a package of its own with one reference in ``jax.numpy`` (specification,
oracle and CPU path), one file a backend, and one dispatcher:

* :mod:`jzero_kernels.adam`: the fused Adam update of one flat shard, and the overflow-safe
  sums of squares that feed the global gradient norm.
"""

from jzero_kernels import adam as adam

__all__ = ["adam"]
