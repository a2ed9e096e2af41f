"""Forms of parameters and moments on the host, and from one to another.

Between equal policies a checkpoint's bytes are copied and nothing here runs. Between different
ones, values pass through float32 by these rules:

- a float32 master, a bfloat16 parameter with its 16-bit remainder and a float32 parameter
  convert into each other exactly;
- where no master is stored the value is the parameter's own, and so is a master made from it;
- a master that is dropped leaves the parameter as it was visible;
- scaled values are multiplied out, and scaled anew in the blocks of their new place; state
  narrower than what it is made from is rounded to nearest.

The other way round from ``_codec``, which does the same on devices in the pass of an update.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

from jzero._codec import Storage
from jzero_kernels.adam import BLOCK

__all__ = ["BLOCK", "ROOT", "SCALE", "Form", "Stored", "decode", "decode_param", "encode"]

SCALE = "/scale"
"""Suffix of the quantity that holds another one's scales."""

ROOT = "/root-scale"
"""The same, where the values are square roots."""

_BF16 = np.dtype(jnp.bfloat16)
_WIRES = (_BF16, np.dtype(np.float16), np.dtype(np.float32))


class Form(NamedTuple):
    """How an array of numbers is stored: its dtype, None for not at all; and which scales it
    has."""

    dtype: str | None
    scales: Literal["", "/scale", "/root-scale"] = ""

    @property
    def remainder(self) -> bool:
        """The lower halves of float32 masters."""
        return self.dtype is not None and jnp.issubdtype(jnp.dtype(self.dtype), jnp.integer)


class Stored(NamedTuple):
    """Elements as they lie in a state: values, and a scale for each or None."""

    values: np.ndarray
    scales: np.ndarray | None = None


def decode(stored: Stored, form: Form) -> np.ndarray:
    """The numbers in float32, or wider where they are stored wider."""
    values = stored.values
    wide = values if values.dtype.itemsize >= 4 else values.astype(np.float32)
    if stored.scales is not None:
        wide = wide * stored.scales
    return wide * wide if form.scales == ROOT else wide


def encode(full: np.ndarray, form: Form) -> Stored:
    """Whole blocks in another form, by the codec's own rule."""
    assert form.dtype is not None
    if form.scales:
        storage = Storage(jnp.dtype(form.dtype), scaled=True, root=form.scales == ROOT)
        made = storage.encode(jnp.asarray(full, jnp.float32))
        return Stored(np.asarray(made.values), np.asarray(made.scales))
    with np.errstate(over="ignore", invalid="ignore"):
        return Stored(full.astype(form.dtype))


def decode_param(param: np.ndarray, master: Stored | None, form: Form) -> np.ndarray:
    """The parameter in full precision, from what is visible of it and what is stored.

    The visible parameter is the truth where it is no rounding of a float master.
    """
    if master is None:
        return param
    if form.remainder:
        return join(param, master.values)
    full = decode(master, form)
    with np.errstate(over="ignore", invalid="ignore"):
        rounding = np.zeros(param.shape, bool)
        for wire in {param.dtype, *_WIRES}:
            rounding |= full.astype(wire).astype(param.dtype) == param
        if not rounding.all() and _is_coarse(param):
            # Gathered in 8 bits, whose scales are not known here: no more than an eighth off.
            rounding |= (param == 0) | (np.abs(full - param) <= np.abs(full) / 8)
        return np.where(rounding, full, param.astype(full.dtype))


def _is_coarse(param: np.ndarray) -> bool:
    """No value has more than the three bits of fraction of the widest 8-bit float."""
    bits = np.ascontiguousarray(param, np.float32).view(np.uint32)
    return not np.any(bits & np.uint32(0x000FFFFF))


def encode_param(full: np.ndarray, form: Form, leaf: np.dtype) -> tuple[np.ndarray, Stored]:
    """The visible parameter and what is stored of it, of whole blocks of full precision."""
    if form.remainder:
        visible, low = split(full)
        return visible.astype(leaf), Stored(low)
    stored = encode(full, form)
    if stored.scales is None:
        kept = stored.values
    else:
        kept = decode(stored._replace(scales=np.repeat(stored.scales, BLOCK)), form)
    with np.errstate(over="ignore", invalid="ignore"):
        return kept.astype(leaf), stored


# The two below are jzero_kernels' ``join`` and ``split`` in numpy; a test holds them together.


def join(param: np.ndarray, low: np.ndarray) -> np.ndarray:
    """The float32 of bfloat16 and int16 halves."""
    wide = param.astype(np.float32)
    rest = low.astype(np.int32)
    rest = np.where((wide == 0) & (rest < 0), np.int32(0), rest)
    return (wide.view(np.int32) + rest).view(np.float32)


def split(full: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The nearest bfloat16 of a float32, ties away from zero, and the int16 rest."""
    full = np.where(np.isnan(full), np.float32(np.nan), full.astype(np.float32))
    rest = full.view(np.int32).astype(np.int16)
    with np.errstate(over="ignore"):
        high = (full.view(np.int32) - rest.astype(np.int32)).view(np.float32)
    return high.astype(_BF16), rest
