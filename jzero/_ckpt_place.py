"""From host to devices: which parts of a target this process needs, and arrays made of them."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from jzero._ckpt_format import CheckpointError

__all__ = ["Box", "Target", "mesh_of", "odd_empty", "odd_zeros", "target_of", "unadoptable"]


@dataclasses.dataclass(frozen=True)
class Box:
    """A part of an array, and the devices of this process that hold it."""

    start: tuple[int, ...]
    stop: tuple[int, ...]
    devices: tuple[Any, ...]


@dataclasses.dataclass
class Target:
    """An array to be made.

    Attributes:
      shape: of the global array.
      dtype: of the array; of its data for a PRNG key.
      sharding: where it goes; None: a host array, or one that is committed to no device.
      key: implementation of a typed PRNG key, or None.
      host: what is wanted is a numpy array (or a Python number, if ``number``).
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    sharding: Sharding | None
    key: str | None
    host: bool
    number: type | None
    made: dict[Any, Any] = dataclasses.field(default_factory=dict)

    def boxes(self) -> list[Box]:
        """The distinct parts that this process needs."""
        if self.sharding is None:
            return [Box((0,) * len(self.shape), self.shape, (None,))]
        holders: dict[Any, list[Any]] = {}
        for device, index in self.sharding.addressable_devices_indices_map(self.shape).items():
            assert index is not None
            bounds = tuple(s.indices(n)[:2] for s, n in zip(index, self.shape, strict=True))
            holders.setdefault(bounds, []).append(device)
        return [
            Box(tuple(b[0] for b in bounds), tuple(b[1] for b in bounds), tuple(devices))
            for bounds, devices in holders.items()
        ]

    def put(self, box: Box, values: np.ndarray) -> None:
        """Give a part its values; the array that is made of them owns its memory."""
        values = values.reshape([b - a for a, b in zip(box.start, box.stop, strict=True)])
        if self.host:
            self.made[None] = values.copy()
            return
        loose = unadoptable(values)
        for device in box.devices:
            self.made[device] = jax.device_put(loose, device)
        # The host's memory is in use until the transfer is over.
        jax.block_until_ready([self.made[device] for device in box.devices])

    def array(self) -> Any:
        """The array, when all parts have been put."""
        if self.host:
            value = self.made[None]
            return value if self.number is None else self.number(value.item())
        if self.sharding is None:
            array = self.made[None]
        else:
            array = jax.make_array_from_single_device_arrays(
                self.shape, self.sharding, list(self.made.values())
            )
        return array if self.key is None else jax.random.wrap_key_data(array, impl=self.key)


# [Note: arrays that can be donated]
# JAX on CPU makes numpy memory that is aligned for it its own instead of copying it, even with
# may_alias=False (0.10.2 and 0.12.0.1), and then cannot reuse it when it is donated.


def unadoptable(values: np.ndarray) -> np.ndarray:
    """The array, or a copy of it at an address that JAX will not adopt."""
    if values.ctypes.data % 16:
        return values
    copy = odd_zeros(values.size, values.dtype).reshape(values.shape)
    copy[...] = values
    return copy


def odd_zeros(size: int, dtype: Any) -> np.ndarray:
    """(size,) zeros at an address that JAX will not adopt."""
    values = odd_empty(size, dtype)
    values.view(np.uint8)[:] = 0
    return values


def odd_empty(size: int, dtype: Any) -> np.ndarray:
    """(size,) of whatever at an address that JAX will not adopt."""
    dtype = np.dtype(dtype)
    raw = np.empty(size * dtype.itemsize + 32, np.uint8)
    start = -raw.ctypes.data % 16 + min(dtype.itemsize, 8)
    return raw[start : start + size * dtype.itemsize].view(dtype)


def target_of(like: Any, spec: PartitionSpec, mesh: Mesh | None, name: str) -> Target:
    """How to make an array like this one.

    Args:
      like: an array, ``ShapeDtypeStruct``, numpy array or Python number.
      spec: how it lies on the mesh if it does not say.
      mesh: the mesh then.
      name: for errors.
    """
    if isinstance(like, (bool, int, float, complex)):
        return Target((), np.asarray(like).dtype, None, None, True, type(like))
    if isinstance(like, (np.ndarray, np.generic)):
        return Target(tuple(like.shape), np.dtype(like.dtype), None, None, True, None)
    if not isinstance(like, (jax.Array, jax.ShapeDtypeStruct)):
        raise CheckpointError(f"like[{name!r}] is a {type(like).__name__}, not an array")
    shape, dtype, key = tuple(like.shape), like.dtype, None
    if jnp.issubdtype(dtype, jax.dtypes.prng_key):
        impl: list[str] = []

        def look(k: Any) -> jax.Array:  # in a trace a ShapeDtypeStruct is a key like others
            impl.append(str(jax.random.key_impl(k)))
            return jax.random.key_data(k)

        data = jax.eval_shape(look, jax.ShapeDtypeStruct(shape, dtype))
        shape, dtype, key = tuple(data.shape), data.dtype, impl[0]
    sharding = _sharding(like, spec, mesh, name)
    return Target(shape, np.dtype(dtype), sharding, key, False, None)


def _sharding(
    like: jax.Array | jax.ShapeDtypeStruct, spec: PartitionSpec, mesh: Mesh | None, name: str
) -> Sharding | None:
    sharding: Any = like.sharding
    if isinstance(like, jax.Array):
        if not like.committed:
            return None
        return sharding
    if isinstance(sharding, NamedSharding) and not isinstance(sharding.mesh, Mesh):
        if mesh is not None and not sharding.mesh.empty:
            return NamedSharding(mesh, sharding.spec)
        sharding = None
    if sharding is not None:
        return sharding
    if mesh is None:
        raise CheckpointError(
            f"like[{name!r}] does not say where it goes: pass mesh=, call jax.set_mesh(mesh) "
            "before, or use ShapeDtypeStructs with shardings"
        )
    return NamedSharding(mesh, spec)


def mesh_of(leaves: Any, axis: str, shards: int, mesh: Mesh | None) -> Mesh | None:
    """The mesh for what does not name one: the argument, that of another leaf, the ambient."""
    if mesh is None:
        for leaf in leaves:
            sharding = getattr(leaf, "sharding", None)
            if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
                continue
            if sharding.mesh.shape.get(axis) == shards:
                return sharding.mesh
    if mesh is None:
        try:
            ambient = jax.sharding.get_mesh()
        except ValueError:
            ambient = None
        mesh = None if ambient is None or ambient.empty else ambient
    if mesh is not None and mesh.shape.get(axis) != shards:
        raise CheckpointError(
            f"like is sharded into {shards} over {axis!r}, but the mesh is {dict(mesh.shape)}; "
            "pass the mesh that the state was planned for"
        )
    return mesh
