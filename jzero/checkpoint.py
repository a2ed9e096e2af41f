"""Checkpoints that reload on any number of devices, bucket size and precision policy.

Needs TensorStore: ``pip install 'jzero[checkpoint]'``. What is on disk: [Note: a checkpoint on
disk] in ``_ckpt_format``; how to use it: docs/checkpoints.md.
"""

from jzero._ckpt_dict import load_state_dict as load_state_dict
from jzero._ckpt_dict import state_dict as state_dict
from jzero._ckpt_files import exists as exists
from jzero._ckpt_files import restore as restore
from jzero._ckpt_files import save as save
from jzero._ckpt_files import step_of as step_of
from jzero._ckpt_files import verify as verify
from jzero._ckpt_foreign import from_optax as from_optax
from jzero._ckpt_foreign import from_torch as from_torch
from jzero._ckpt_foreign import to_optax as to_optax
from jzero._ckpt_format import CheckpointError as CheckpointError
from jzero._ckpt_manager import Manager as Manager
from jzero._ckpt_orbax import orbax_handler as orbax_handler
from jzero._ckpt_safetensors import read_safetensors as read_safetensors
from jzero._ckpt_safetensors import write_safetensors as write_safetensors
from jzero._ckpt_save import Saving as Saving

__all__ = [
    "CheckpointError",
    "Manager",
    "Saving",
    "exists",
    "from_optax",
    "from_torch",
    "load_state_dict",
    "orbax_handler",
    "read_safetensors",
    "restore",
    "save",
    "state_dict",
    "step_of",
    "to_optax",
    "verify",
    "write_safetensors",
]
