"""In which dtypes state is kept and values travel: checked when it is written down."""

from __future__ import annotations

import dataclasses
import fnmatch
from collections.abc import Mapping
from typing import Any, Literal, cast

import jax.numpy as jnp
import numpy as np

__all__ = ["EIGHT_BITS", "Precision"]

EIGHT_BITS = ("float8_e5m2", "float8_e4m3fn", "float8_e4m3")
_SIXTEEN_BITS = ("bfloat16", "float16")
_FLOATS = ("float32", *_SIXTEEN_BITS, *EIGHT_BITS)
_MASTER = ("full", "remainder", "none")
_ACCUMULATE = ("wire", "float32")
_ROUNDING = ("nearest", "stochastic")


def _dtype(name: str, value: Any) -> np.dtype:
    try:
        dtype = jnp.dtype(value)
    except TypeError as error:
        raise ValueError(
            f"Precision({name}={value!r}) is not a dtype; use one of {_FLOATS}"
        ) from error
    if dtype.name not in _FLOATS:
        raise ValueError(f"Precision({name}={dtype.name!r}) is not supported; use one of {_FLOATS}")
    return dtype


@dataclasses.dataclass(frozen=True, kw_only=True)
class Precision:
    """In which dtypes state is kept and values travel.

    Attributes:
      state: dtype of the moments, and of the master parameters where a leaf holds fewer digits:
        float32, bfloat16, float16, float8_e4m3fn, float8_e4m3 or float8_e5m2. The arithmetic is
        float32 whatever it is.
      grad_sync: dtype on the wire of the reduce-scatter, one of the same. None: ``state`` (and
        bfloat16 for 8-bit state). In 8 bits a block of 128 elements has a scale, an eighth of a
        bit an element.
      param_sync: dtype on the wire of the all-gather, and so the precision of the parameters
        that come back; 8 bits with scales likewise. None: each leaf's own dtype.
      master: "full" keeps a copy of every parameter that its leaf cannot hold, in ``state`` dtype
        (in float32 for 8-bit state; a float32 leaf that is gathered in float32 is its own master
        and costs nothing). "remainder" keeps the lower 16 bits of a float32 beside each bfloat16
        leaf: the master of "full", exactly, for half its bytes (NVIDIA Apex's
        ``store_param_remainders``). "none" keeps no copy, so a bfloat16 leaf rounds at every step.
      accumulate: where the sum of a narrow ``grad_sync`` is rounded. "wire": by the collective, at
        every addition. "float32": the same bytes travel by all-to-all, and each device adds
        them in float32; costs a copy of the bucket. None: "float32" in 8 bits, else "wire".
      scaled: state below 32 bits has a float32 scale for each block of 128 elements, a power of
        two, so that its range does not matter; the second moment is stored as its root. Needed in
        8 bits.
      rounding: of state below 32 bits. "nearest"; or "stochastic": up with the probability of the
        cut-off fraction, without which a second moment in bfloat16 or 8 bits cannot decay by
        ``b2 = 0.999`` a step. Parameters themselves are always rounded to nearest.
      seed: of stochastic rounding. The same seed, model and data give the same bits, on any
        number of devices.
      overrides: other choices for some parameters: from a pattern that a path such as
        ``"layers/0/kernel"`` matches (``*`` any characters), to arguments of this class, e.g.
        ``{"*embedding*": {"grad_sync": "float32"}}``. The first pattern that matches holds.

    Raises:
      ValueError: a value outside these lists, or two that exclude each other, by name.
    """

    state: Any = jnp.float32
    grad_sync: Any = None
    param_sync: Any = None
    master: Literal["full", "remainder", "none"] = "full"
    accumulate: Literal["wire", "float32"] | None = None
    scaled: bool = False
    rounding: Literal["nearest", "stochastic"] = "nearest"
    seed: int = 0
    overrides: Mapping[str, Any] | None = dataclasses.field(default=None, hash=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "state", _dtype("state", self.state))
        for name in ("grad_sync", "param_sync"):
            if getattr(self, name) is not None:
                object.__setattr__(self, name, _dtype(name, getattr(self, name)))
        for name, accepted in (
            ("master", _MASTER),
            ("accumulate", (*_ACCUMULATE, None)),
            ("rounding", _ROUNDING),
        ):
            if getattr(self, name) not in accepted:
                raise ValueError(
                    f"Precision({name}={getattr(self, name)!r}): use one of {accepted}"
                )
        if not isinstance(self.scaled, bool):
            raise ValueError(f"Precision(scaled={self.scaled!r}) must be True or False")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise ValueError(f"Precision(seed={self.seed!r}) must be an integer")
        self._check_state()
        self._check_wires()
        object.__setattr__(self, "overrides", self._overrides())

    def _check_state(self) -> None:
        narrow = self.state.itemsize < 4
        if self.scaled and not narrow:
            raise ValueError(
                "Precision(scaled=True) scales state below 32 bits, and state is "
                f"{self.state.name}; leave scaled=False, or use state='float8_e4m3fn'"
            )
        if self.state.name in EIGHT_BITS and not self.scaled:
            raise ValueError(
                f"Precision(state={self.state.name!r}) holds nothing without scales: most moments "
                "are outside its range; add scaled=True"
            )
        if self.rounding == "stochastic" and not narrow:
            raise ValueError(
                "Precision(rounding='stochastic') rounds state below 32 bits, and state is "
                f"{self.state.name}; leave rounding='nearest', or use state='bfloat16'"
            )

    def _check_wires(self) -> None:
        if self.accumulate == "float32" and self.grad_dtype.itemsize >= 4:
            raise ValueError(
                "Precision(accumulate='float32') is for a narrow grad_sync, and grad_sync is "
                f"{self.grad_dtype.name}, which adds in float32 anyway; leave accumulate=None"
            )
        if self.accumulate == "wire" and self.grad_dtype.name in EIGHT_BITS:
            raise ValueError(
                f"Precision(accumulate='wire') cannot add {self.grad_dtype.name} values of "
                "different scales; leave accumulate=None, which adds them in float32"
            )
        sync = None if self.param_sync is None else self.param_sync.name
        if self.master == "remainder" and sync not in (None, "bfloat16"):
            raise ValueError(
                "Precision(master='remainder') splits a float32 into the bfloat16 that the model "
                f"uses and the rest, and param_sync is {sync!r}; leave param_sync=None, or use "
                "master='full'"
            )
        if self.master == "none" and sync in EIGHT_BITS:
            raise ValueError(
                f"Precision(master='none', param_sync={sync!r}) would round every parameter to "
                "8 bits at every step; use master='full'"
            )

    def _overrides(self) -> Any:
        if self.overrides is None:
            return None
        if not isinstance(self.overrides, Mapping):
            raise ValueError(
                f"Precision(overrides={self.overrides!r}) must map patterns of paths to arguments, "
                "e.g. {'*embedding*': {'grad_sync': 'float32'}}"
            )
        base: dict[str, Any] = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        legal = set(base) - {"overrides", "seed"}
        result: dict[str, Precision] = {}
        for pattern, changes in self.overrides.items():
            if isinstance(changes, Precision):  # has been here before, by dataclasses.replace
                result[pattern] = changes
                continue
            unknown = set(changes) - legal if isinstance(changes, Mapping) else {changes}
            if not isinstance(pattern, str) or unknown:
                raise ValueError(
                    f"Precision(overrides={{{pattern!r}: {changes!r}}}) must map a pattern to some "
                    f"of {sorted(legal)}"
                )
            changed: dict[str, Any] = {
                **base,
                **cast("Mapping[str, Any]", changes),
                "overrides": None,
            }
            result[pattern] = Precision(**changed)
        return result

    @property
    def grad_dtype(self) -> np.dtype:
        """The dtype on the wire of the reduce-scatter."""
        if self.grad_sync is not None:
            return self.grad_sync
        return jnp.dtype(jnp.bfloat16) if self.state.name in EIGHT_BITS else self.state

    def policy(self, path: str) -> str:
        """The first pattern of ``overrides`` that the path matches; "" for none."""
        patterns = self.overrides or {}
        return next((p for p in patterns if fnmatch.fnmatchcase(path, p)), "")

    def under(self, policy: str) -> Precision:
        """The choices for the parameters of a :meth:`policy`."""
        return (self.overrides or {})[policy] if policy else self
