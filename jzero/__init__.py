"""ZeRO for JAX: data-parallel training with gradients, optimizer state and update sharded."""

import importlib.metadata

from jzero import checkpoint as checkpoint
from jzero import distributed as distributed
from jzero._broadcast import broadcast as broadcast
from jzero._broadcast import first_difference as first_difference
from jzero._config import ZeroConfig as ZeroConfig
from jzero._ddp_step import LocalGrads as LocalGrads
from jzero._gather import save_except_gathered as save_except_gathered
from jzero._gather import save_gathered as save_gathered
from jzero._gradients import accumulate as accumulate
from jzero._gradients import value_and_grad as value_and_grad
from jzero._lazy import gather_params as gather_params
from jzero._lazy import shard_params as shard_params
from jzero._loss_scale import DynamicLossScale as DynamicLossScale
from jzero._multi_steps import MultiSteps as MultiSteps
from jzero._multi_steps import MultiStepsState as MultiStepsState
from jzero._norms import global_norm as global_norm
from jzero._options import compiler_options as compiler_options
from jzero._precision import Precision as Precision
from jzero._scan import scan_layers as scan_layers
from jzero._shards import ParamShards as ParamShards
from jzero._state import GradShards as GradShards
from jzero._state import ZeroState as ZeroState
from jzero._state import partition_specs as partition_specs
from jzero._transform import ZeroTransformation as ZeroTransformation
from jzero._transform import adamw as adamw
from jzero._transform import zero as zero
from jzero.ddp import DistributedDataParallel as DistributedDataParallel
from jzero.report import Report as Report
from jzero.report import report as report

__version__ = importlib.metadata.version("jzero")

__all__ = [
    "DistributedDataParallel",
    "DynamicLossScale",
    "GradShards",
    "LocalGrads",
    "MultiSteps",
    "MultiStepsState",
    "ParamShards",
    "Precision",
    "Report",
    "ZeroConfig",
    "ZeroState",
    "ZeroTransformation",
    "accumulate",
    "adamw",
    "broadcast",
    "checkpoint",
    "compiler_options",
    "distributed",
    "first_difference",
    "gather_params",
    "global_norm",
    "partition_specs",
    "report",
    "save_except_gathered",
    "save_gathered",
    "scan_layers",
    "shard_params",
    "value_and_grad",
    "zero",
]
