"""What the user chooses, checked when it is written down.

Frozen, hashable and keyword-only, as ``Precision`` is: a configuration that exists is a legal one.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax

from jzero._precision import Precision

__all__ = ["Precision", "ZeroConfig", "config_and_groups"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroConfig:
    """Over which mesh axes, in what buckets and in which precision training is sharded.

    Attributes:
      axis: mesh axis that gradients are reduce-scattered and optimizer state is sharded over.
      replica_axis: a second mesh axis whose devices hold the same shards; the shard of the
        gradient is all-reduced over it. None: no such axis.
      mesh: a ``jax.sharding.Mesh`` (Explicit or Auto axes). None: the ambient mesh of
        ``jax.set_mesh``, or of the ``shard_map`` that one is inside.
      bucket_mb: largest bucket in MiB (2**20 bytes) of leaves at their own dtype. A larger
        leaf has a bucket of its own. The default is what compiled and measured sweeps support
        (docs/report.md).
      average: gradients are divided by the devices that contributed (axis x replica axis).
        False: they are summed. A gradient that a plain jit program has already reduced is
        never scaled.
      param_sync: "eager" all-gathers the updated parameters at the end of the step. "lazy": the
        training state holds shards of them (``jzero.shard_params``), gathered inside the loss
        (``jzero.gather_params``).
      stacked: path prefixes (one, or a tuple) such as ``"layers"`` of subtrees whose leaves have
        one leading dim of layers that a scan runs one after another: each layer is padded and
        sharded by itself, and its gradient is reduced inside the loop of the backward pass; see
        docs/lazy.md. None: none. Also what ``jzero.shard_params`` takes by default.
      precision: a :class:`Precision`.

    Raises:
      ValueError: an illegal value, or an axis that ``mesh`` does not have, by name.
    """

    axis: str = "data"
    replica_axis: str | None = None
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None
    bucket_mb: float = 25.0
    average: bool = True
    param_sync: Literal["eager", "lazy"] = "eager"
    stacked: str | Sequence[str] | None = None
    precision: Precision = dataclasses.field(default_factory=Precision)

    def __post_init__(self) -> None:
        for name in ("axis", "replica_axis"):
            value = getattr(self, name)
            if not (isinstance(value, str) and value) and not (
                name == "replica_axis" and value is None
            ):
                raise ValueError(
                    f"ZeroConfig({name}={value!r}) must be the name of one mesh axis; "
                    "devices of a second axis go to replica_axis"
                )
        if self.axis == self.replica_axis:
            raise ValueError(
                f"ZeroConfig(axis={self.axis!r}, replica_axis={self.replica_axis!r}): the two "
                "must be different mesh axes; leave replica_axis=None on a one-axis mesh"
            )
        if self.mesh is not None:
            if not isinstance(self.mesh, (jax.sharding.Mesh, jax.sharding.AbstractMesh)):
                raise ValueError(
                    f"ZeroConfig(mesh={self.mesh!r}) must be a jax.sharding.Mesh; "
                    "build one with jax.make_mesh"
                )
            for name, axis in self.axes.items():
                if axis not in self.mesh.axis_names:
                    raise ValueError(
                        f"ZeroConfig({name}={axis!r}) is not an axis of the mesh, which has "
                        f"{self.mesh.axis_names}; name one of these"
                    )
        if (
            isinstance(self.bucket_mb, bool)
            or not isinstance(self.bucket_mb, (int, float))
            or not (self.bucket_mb > 0 and math.isfinite(self.bucket_mb))
        ):
            raise ValueError(
                f"ZeroConfig(bucket_mb={self.bucket_mb!r}) must be a positive number of MiB"
            )
        if self.param_sync not in ("eager", "lazy"):
            raise ValueError(f"ZeroConfig(param_sync={self.param_sync!r}): use 'eager' or 'lazy'")
        chosen = () if self.stacked is None else self.stacked
        prefixes = (chosen,) if isinstance(chosen, str) else chosen
        if not isinstance(prefixes, Sequence) or not all(
            isinstance(prefix, str) and prefix for prefix in prefixes
        ):
            raise ValueError(
                f"ZeroConfig(stacked={self.stacked!r}) must be a path prefix such as 'layers', or "
                "a tuple of them"
            )
        object.__setattr__(self, "stacked", tuple(prefixes))  # hashable, and one form of a value
        if not isinstance(self.precision, Precision):
            raise ValueError(f"ZeroConfig(precision={self.precision!r}) must be a jzero.Precision")

    @property
    def axes(self) -> dict[str, str]:
        """The mesh axes in use, by the name of the argument that named them."""
        named = {"axis": self.axis, "replica_axis": self.replica_axis}
        return {name: axis for name, axis in named.items() if axis is not None}

    @property
    def cap_bytes(self) -> int:
        """``bucket_mb`` in bytes, at least one."""
        return max(1, int(self.bucket_mb * 2**20))


def config_and_groups(zero: Any, default: ZeroConfig) -> tuple[ZeroConfig, Any]:
    """What a ``zero=`` argument says: a config, and the transformation's groups if it is one.

    Raises:
      ValueError: it is neither a config, nor made with one, nor None.
    """
    if zero is None:
        return default, None
    if isinstance(zero, ZeroConfig):
        return zero, None
    config, groups = getattr(zero, "config", None), getattr(zero, "groups", None)
    if not isinstance(config, ZeroConfig):
        raise ValueError(
            f"zero={zero!r} must be made by jzero.adamw or jzero.zero, or be a ZeroConfig"
        )
    return config, groups
