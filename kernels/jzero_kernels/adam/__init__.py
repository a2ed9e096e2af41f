"""The fused Adam update of a flat shard, and the gradient statistics that go with it."""

from jzero_kernels.adam.api import BACKENDS as BACKENDS
from jzero_kernels.adam.api import adam_update as adam_update
from jzero_kernels.adam.api import default_backend as default_backend
from jzero_kernels.adam.api import grad_stats as grad_stats
from jzero_kernels.adam.math import AdamResult as AdamResult
from jzero_kernels.adam.math import AdamScalars as AdamScalars
from jzero_kernels.adam.stats import norm_from_stats as norm_from_stats

__all__ = [
    "BACKENDS",
    "AdamResult",
    "AdamScalars",
    "adam_update",
    "default_backend",
    "grad_stats",
    "norm_from_stats",
]
