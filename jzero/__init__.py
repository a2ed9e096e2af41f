"""ZeRO for JAX: data-parallel training with gradients, optimizer state and update sharded."""

import importlib.metadata

from jzero._config import Precision as Precision
from jzero._config import ZeroConfig as ZeroConfig
from jzero._gradients import value_and_grad as value_and_grad
from jzero._state import GradShards as GradShards
from jzero._state import ZeroState as ZeroState
from jzero._state import partition_specs as partition_specs
from jzero._transform import ZeroTransformation as ZeroTransformation
from jzero._transform import adamw as adamw
from jzero._transform import zero as zero

__version__ = importlib.metadata.version("jzero")

__all__ = [
    "GradShards",
    "Precision",
    "ZeroConfig",
    "ZeroState",
    "ZeroTransformation",
    "adamw",
    "partition_specs",
    "value_and_grad",
    "zero",
]
