"""Where we run: which mesh, how many shards and replicas, inside or outside of a shard_map."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
from jax.core import Tracer
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jzero._config import ZeroConfig

__all__ = ["Axes", "on_mesh", "resolve_axes"]


@dataclasses.dataclass(frozen=True)
class Axes:
    """The mesh axes of a step, resolved.

    Attributes:
      shard: name of the shard axis.
      replica: name of the replica axis, or None.
      shards: devices on the shard axis.
      replicas: devices on the replica axis; 1 without one.
      manual: the caller is inside a ``shard_map`` over these axes, so arrays are local.
      mesh: the mesh to map over; None inside a ``shard_map``.
    """

    shard: str
    replica: str | None
    shards: int
    replicas: int
    manual: bool
    mesh: jax.sharding.Mesh | jax.sharding.AbstractMesh | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return (self.shard,) if self.replica is None else (self.shard, self.replica)

    @property
    def sizes(self) -> tuple[tuple[str, int], ...]:
        """Name and size of each axis."""
        return tuple(zip(self.names, (self.shards, self.replicas), strict=False))

    @property
    def size(self) -> int:
        """Devices that contribute to a gradient: shards x replicas."""
        return self.shards * self.replicas

    @property
    def batch(self) -> tuple[str, ...]:
        """The axes in mesh order: what the leading dim of a batch is split over."""
        if self.mesh is None:
            return self.names
        return tuple(name for name in self.mesh.axis_names if name in self.names)


def resolve_axes(config: ZeroConfig) -> Axes:
    """Find the mesh of a configuration at this point of the program.

    Raises:
      ValueError: no mesh at all; an axis that the mesh lacks; a ``shard_map`` that is manual
        over only one of the two axes.
    """
    ambient = jax.sharding.get_abstract_mesh()
    names = config.axes
    manual = [axis in ambient.manual_axes for axis in names.values()]
    if any(manual):
        if not all(manual):
            raise ValueError(
                f"the enclosing shard_map is manual over {tuple(ambient.manual_axes)} but jzero "
                f"needs {tuple(names.values())}; map over both the axis and the replica_axis"
            )
        mesh = ambient
    elif config.mesh is not None:
        mesh = config.mesh
    elif not ambient.empty:
        mesh = _concrete(ambient)
    else:
        raise ValueError(
            "jzero found no mesh: pass zero=jzero.ZeroConfig(mesh=mesh), or call "
            "jax.set_mesh(mesh) before, with mesh = jax.make_mesh((n,), ('data',))"
        )
    for name, axis in names.items():
        if axis not in mesh.axis_names:
            raise ValueError(
                f"ZeroConfig({name}={axis!r}) is not an axis of the mesh, which has "
                f"{mesh.axis_names}; name one of these"
            )
    return Axes(
        shard=config.axis,
        replica=config.replica_axis,
        shards=mesh.shape[config.axis],
        replicas=1 if config.replica_axis is None else mesh.shape[config.replica_axis],
        manual=all(manual),
        mesh=None if all(manual) else mesh,
    )


def on_mesh(
    axes: Axes,
    body: Callable[..., Any],
    in_specs: Any,
    out_specs: Any,
    *args: Any,
    cache: dict[Any, Callable[..., Any]] | None = None,
    key: Any = None,
    check: bool = True,
) -> Any:
    """Run ``body`` on local arrays: directly inside a shard_map, else inside one of our own.

    Under a trace the shard_map joins the program being traced. With concrete arguments it is
    compiled once per ``key`` and kept in ``cache``, and arguments that lie elsewhere are placed
    on the mesh first.

    Args:
      axes: from :func:`resolve_axes`.
      body: per-device function of ``args``.
      in_specs: a pytree prefix of PartitionSpecs for ``args`` (a tuple).
      out_specs: likewise for the result.
      cache: where compiled functions are kept; the caller owns its lifetime.
      key: hashable; everything that ``body`` depends on beside its arguments.
      check: whether JAX tracks which values vary over the axes (``check_vma``).
    """
    if axes.manual:
        return body(*args)
    assert axes.mesh is not None
    # On one device every value is trivially replicated; with the check on, JAX would want a
    # collective over the axis of size one to prove it.
    mapped = jax.shard_map(
        body,
        mesh=axes.mesh,
        in_specs=in_specs,
        out_specs=out_specs,
        axis_names=set(axes.names),
        check_vma=check and axes.size > 1,
    )
    if any(isinstance(x, Tracer) for x in jax.tree.leaves(args)):
        return mapped(*_typed(args, in_specs, axes.mesh))
    if isinstance(axes.mesh, jax.sharding.Mesh):
        args = _placed(args, in_specs, axes.mesh)
    if cache is None:
        return jax.jit(mapped)(*args)
    if key not in cache:
        cache[key] = jax.jit(mapped)
    return cache[key](*args)


def _concrete(ambient: jax.sharding.AbstractMesh) -> jax.sharding.Mesh | jax.sharding.AbstractMesh:
    """The ambient mesh with its devices where JAX tells them: outside of a trace, so that
    arrays can be placed on them."""
    try:
        mesh = jax.sharding.get_mesh()
    except ValueError:  # inside a trace
        return ambient
    return ambient if mesh.empty else mesh


def _each(specs: Any, args: Any, fn: Callable[[P, Any], Any]) -> Any:
    """``fn(spec, leaf)`` over ``args``, with ``specs`` a prefix of it."""
    return jax.tree.map(
        lambda spec, sub: jax.tree.map(lambda x: fn(spec, x), sub),
        specs,
        args,
        is_leaf=lambda x: isinstance(x, P),
    )


def _placed(args: Any, specs: Any, mesh: jax.sharding.Mesh) -> Any:
    def place(spec: P, x: Any) -> Any:
        sharding = NamedSharding(mesh, spec)
        if isinstance(x, jax.Array) and x.sharding.is_equivalent_to(sharding, x.ndim):
            return x
        return jax.device_put(x, sharding)

    return _each(specs, args, place)


def _typed(args: Any, specs: Any, mesh: Any) -> Any:
    """On Explicit axes, give each traced argument the sharding type that its spec asks for."""
    if AxisType.Explicit not in mesh.axis_types:
        return args

    def reshard(spec: P, x: Any) -> Any:
        have = jax.typeof(x).sharding.spec
        if spec.unreduced or tuple(have) == tuple(spec) + (None,) * (len(have) - len(spec)):
            return x
        return jax.reshard(x, NamedSharding(mesh, spec))

    return _each(specs, args, reshard)
