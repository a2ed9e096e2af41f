"""Stored parameters and moments on the host: what ``_codec`` does on devices, in numpy.

Between equal policies a checkpoint's bytes are copied and nothing here runs. Between different
ones, values pass through float32 by these rules:

- a float32 master, a bfloat16 parameter with its 16-bit remainder and a float32 parameter
  convert into each other exactly;
- where no master is stored the value is the parameter's own, and so is a master made from it;
- a master that is dropped leaves the parameter as it was visible;
- scaled values are multiplied out, and scaled anew.
"""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import jax.numpy as jnp
import numpy as np

__all__ = ["Kind", "Stored", "decode_param", "encode_param", "kind_of", "unscale"]

Kind = Literal["none", "full", "remainder", "scaled"]

_BF16 = np.dtype(jnp.bfloat16)
_WIRES = (_BF16, np.dtype(np.float16), np.dtype(np.float32))


class Stored(NamedTuple):
    """Elements as they lie in a state: values, and a scale for each or None."""

    values: np.ndarray
    scales: np.ndarray | None = None


def kind_of(dtype: Any | None, scaled: bool) -> Kind:
    """How a master of this dtype is stored."""
    if dtype is None:
        return "none"
    if scaled:
        return "scaled"
    return "remainder" if np.dtype(dtype).kind in "iu" else "full"


def unscale(stored: Stored) -> np.ndarray:
    """The values in float32, or wider where they are stored wider."""
    values = stored.values
    wide = values if values.dtype.itemsize >= 4 else values.astype(np.float32)
    return wide if stored.scales is None else wide * stored.scales


def decode_param(param: np.ndarray, master: Stored | None) -> np.ndarray:
    """The parameter in full precision, from what is visible of it and what is stored.

    The visible parameter is the truth where it is no rounding of a float master.
    """
    if master is None:
        return param
    if kind_of(master.values.dtype, master.scales is not None) == "remainder":
        return join(param, master.values)
    full = unscale(master)
    rounding = np.zeros(param.shape, bool)
    with np.errstate(over="ignore", invalid="ignore"):
        for wire in {param.dtype, *_WIRES}:
            rounding |= full.astype(wire).astype(param.dtype) == param
        return np.where(rounding, full, param.astype(full.dtype))


def encode_param(
    param: np.ndarray, full: np.ndarray, kind: Kind, leaf: Any, master: Any
) -> tuple[np.ndarray, np.ndarray | None]:
    """The visible parameter and what to store of it.

    Args:
      param: the parameter as it was visible.
      full: it in full precision.
      kind: how the target stores its master.
      leaf: dtype of the target's parameter.
      master: dtype of the target's master, or None.
    """
    if kind == "none":
        return param.astype(leaf), None
    if kind == "remainder":
        visible, low = split(full)
        return visible, low.view(master)
    with np.errstate(over="ignore"):
        return full.astype(leaf), full.astype(master)


def join(param: np.ndarray, remainder: np.ndarray) -> np.ndarray:
    """float32 from a bfloat16 half that was rounded to nearest, ties away from zero, and the
    low 16 bits."""
    low = np.ascontiguousarray(remainder).view(np.uint16).astype(np.uint32)
    high = np.ascontiguousarray(param).view(np.uint16).astype(np.uint32)
    return (((high - (low >> np.uint32(15))) << np.uint32(16)) | low).view(np.float32)


def split(full: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The inverse of :func:`join`: the bfloat16 half and the low 16 bits as uint16."""
    bits = np.ascontiguousarray(full, np.float32).view(np.uint32)
    low = bits & np.uint32(0xFFFF)
    high = ((bits >> np.uint32(16)) + (low >> np.uint32(15))).astype(np.uint16)
    return high.view(_BF16), low.astype(np.uint16)
