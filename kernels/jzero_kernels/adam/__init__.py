"""The fused Adam update of a flat shard, and the gradient statistics that go with it."""

from jzero_kernels.adam.api import BACKENDS as BACKENDS
from jzero_kernels.adam.api import adam_update as adam_update
from jzero_kernels.adam.api import default_backend as default_backend
from jzero_kernels.adam.api import grad_stats as grad_stats
from jzero_kernels.adam.forms import BLOCK as BLOCK
from jzero_kernels.adam.forms import Master as Master
from jzero_kernels.adam.forms import Random as Random
from jzero_kernels.adam.forms import Remainder as Remainder
from jzero_kernels.adam.forms import Scaled as Scaled
from jzero_kernels.adam.math import AdamResult as AdamResult
from jzero_kernels.adam.math import AdamScalars as AdamScalars
from jzero_kernels.adam.stats import norm_from_stats as norm_from_stats

__all__ = [
    "BACKENDS",
    "BLOCK",
    "AdamResult",
    "AdamScalars",
    "Master",
    "Random",
    "Remainder",
    "Scaled",
    "adam_update",
    "default_backend",
    "grad_stats",
    "norm_from_stats",
]
