"""A training state as checkpoints see it: sharded nodes with a layout, and plain leaves.

[Note: addresses]
Each array of ``(state, params)`` has an address that does not depend on the number of devices, the
bucket size or the leaf order: a quantity of a node, by parameter path (``param``, ``master``,
``exp_avg`` ...), or the name of a leaf. Two trees of the same model agree on addresses, whatever
their layouts, so that one can be read where the other was written.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from jzero._ckpt_codec import ROOT, SCALE, Form
from jzero._layout import Layout, path_string
from jzero._pack import leaf_paths, unboxed
from jzero._shards import ParamShards, param_specs
from jzero._state import GradShards, ZeroState
from jzero._update import Moments

__all__ = ["Address", "Node", "View", "view_of"]

_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_SCALARS = ("step", "grad_norm", "skipped", "finite")


@dataclasses.dataclass(frozen=True)
class Address:
    """Where a leaf belongs: quantity ``what`` of bucket ``bucket`` of a node, the parameter at
    path ``what`` of a node (no bucket), or the plain leaf ``what`` (no node)."""

    what: str
    node: str | None = None
    bucket: int | None = None


@dataclasses.dataclass
class Node:
    """A sharded part of the state.

    Attributes:
      name: path in the state; "" for a state that is a ``ZeroState`` itself.
      layout: its buckets.
      axis: its mesh axis.
      kind: "state", "grads" or "frozen".
      arrays: by quantity, a flat array per bucket or None.
      params: its parameters by path where they are whole leaves; None where there are none.
    """

    name: str
    layout: Layout
    axis: str
    kind: str = "state"
    arrays: dict[str, list[Any]] = dataclasses.field(default_factory=dict)
    params: dict[str, Any] | None = None

    def array(self, quantity: str, bucket: int) -> Any:
        """One array, or None."""
        found = self.arrays.get(quantity)
        return None if found is None else found[bucket]

    def form(self, quantity: str, bucket: int) -> Form:
        """How a quantity of a bucket is stored."""
        array = self.array(quantity, bucket)
        if array is None:
            return Form(None)
        dtype = np.dtype(array.dtype).name
        for scales in (SCALE, ROOT):
            if self.array(quantity + scales, bucket) is not None:
                return Form(dtype, scales)
        return Form(dtype)

    def quantities(self) -> list[str]:
        """Names in the order in which they are stored."""
        own = set(self.arrays) | ({"param"} if self.params is not None else set())
        first = [q for q in ("param", "master", "exp_avg", "exp_avg_sq") if q in own]
        return first + sorted(own - set(first))


@dataclasses.dataclass(frozen=True)
class View:
    """``(state, params)`` taken apart.

    Attributes:
      nodes: by name.
      leaves: arrays outside of buckets, by name.
      specs: the PartitionSpec of each, by address.
      rebuild: the tree again, from a function of an address.
    """

    nodes: dict[str, Node]
    leaves: dict[str, Any]
    specs: dict[Address, P]
    addresses: tuple[Address, ...]
    treedef: Any

    def rebuild(self, value: Callable[[Address], Any]) -> Any:
        """``(state, params)`` with a new value at each address."""
        return jax.tree.unflatten(self.treedef, [value(a) for a in self.addresses])

    def arrays(self) -> dict[Address, Any]:
        """What lies at each address."""
        found: dict[Address, Any] = {}
        for address in self.addresses:
            if address.node is None:
                found[address] = self.leaves[address.what]
                continue
            node = self.nodes[address.node]
            if address.bucket is None:
                assert node.params is not None
                found[address] = node.params[address.what]
            else:
                found[address] = node.array(address.what, address.bucket)
        return found

    @staticmethod
    def base_of(quantity: str) -> str:
        """The quantity whose scales these are, or itself."""
        return quantity.removesuffix(SCALE).removesuffix(ROOT)

    @property
    def main(self) -> Node:
        """The node of the optimizer: the first that holds parameters."""
        return next(n for n in self.nodes.values() if "param" in n.quantities())


def view_of(state: Any, params: Any) -> View:
    """Take a training state apart.

    Args:
      state: a :class:`ZeroState`, or a pytree that contains one, such as the state of an
        ``optax.chain`` or of ``jzero.MultiSteps``.
      params: the parameters that belong to it.

    flax's ``nnx.Optimizer`` keeps each array of a state in a box; the view is of the arrays, and
    what is rebuilt from it has the boxes again.

    Raises:
      ValueError: no ``ZeroState`` in ``state``, or parameters that are not the state's.
    """
    structure = jax.tree.structure((state, params))
    state = unboxed(state)
    nodes: dict[str, Node] = {}
    leaves: dict[str, Any] = {}
    addresses: list[Address] = []
    specs: dict[Address, P] = {}

    def put(address: Address, leaf: Any, spec: P) -> None:
        if address in specs:
            raise ValueError(f"two arrays of the state are both {address.what!r}; rename a key")
        addresses.append(address)
        specs[address] = spec
        if address.node is None:
            leaves[address.what] = leaf
        elif address.bucket is not None:
            node = nodes[address.node]
            empty = [None] * len(node.layout.buckets)
            node.arrays.setdefault(address.what, empty)[address.bucket] = leaf

    for path, part in _parts(state):
        name = path_string(path)
        if isinstance(part, ZeroState):
            nodes[name] = Node(name, part.layout, part.axis)
            for address, leaf, sharded in _zero_state(name, part):
                put(address, leaf, P(part.axis) if sharded else P())
        elif isinstance(part, GradShards):
            nodes[name] = Node(name, part.layout, part.axis, "grads")
            for bucket, leaf in enumerate(part.buckets):
                put(Address("grad", name, bucket), leaf, P(part.axis))
        else:
            put(Address(f"state/{name}"), part, P())
    if not any(isinstance(part, ZeroState) for _, part in _parts(state)):
        raise ValueError(
            f"state is a {type(state).__name__} without a jzero.ZeroState in it; pass what "
            "tx.init or tx.step returned"
        )
    _params(params, nodes, put)
    return View(nodes, leaves, specs, tuple(addresses), structure)


def _parts(tree: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Nodes and plain leaves of a tree, with their paths."""
    found = leaf_paths_until(tree, lambda x: isinstance(x, (ZeroState, GradShards)))
    return [(path, leaf) for path, leaf in found if leaf is not None]


def leaf_paths_until(tree: Any, stop: Callable[[Any], bool]) -> list[tuple[tuple[Any, ...], Any]]:
    """Like ``leaf_paths``, but what ``stop`` is true for counts as a leaf."""
    marked = jax.tree.map(lambda x: _Opaque(x) if stop(x) else x, tree, is_leaf=stop)
    return [
        (path, leaf.value if isinstance(leaf, _Opaque) else leaf)
        for path, leaf in leaf_paths(marked)
    ]


class _Opaque:
    """Not a pytree."""

    def __init__(self, value: Any) -> None:
        self.value = value


def _zero_state(name: str, state: ZeroState) -> list[tuple[Address, Any, bool]]:
    """Address, array and whether it is sharded, in the order of the state's leaves."""
    prefix = f"state/{name}/" if name else "state/"
    found: list[tuple[Address, Any, bool]] = [
        (Address(prefix + field), getattr(state, field), False) for field in _SCALARS
    ]
    for bucket, stored in enumerate(state.master):
        for i, leaf in enumerate(jax.tree.leaves(stored)):  # values, and maybe scales
            found.append((Address("master" + SCALE * i, name, bucket), leaf, True))
    paths = [path for path, leaf in leaf_paths(state.inner) if leaf is not None]
    places = _places(state, [p for p, s in zip(paths, state.sharded, strict=True) if s])
    for path, leaf, sharded in zip(paths, jax.tree.leaves(state.inner), state.sharded, strict=True):
        if sharded:
            quantity, bucket = places[path]
            found.append((Address(quantity, name, bucket), leaf, True))
        else:
            found.append((Address(f"{prefix}inner/{path_string(path)}"), leaf, False))
    assert len(found) == len(jax.tree.leaves(state))
    return found


def _places(
    state: ZeroState, paths: Sequence[tuple[Any, ...]]
) -> dict[tuple[Any, ...], tuple[str, int]]:
    """Quantity and bucket of each sharded leaf of the inner state."""
    found: dict[tuple[Any, ...], tuple[str, int]] = {}
    if isinstance(state.inner, Moments):
        for path in paths:
            moment, bucket, *part = path
            # A scaled second moment is stored as its root.
            scales = ROOT if moment == "nu" else SCALE
            found[path] = _MOMENTS[str(moment)] + scales * (part == ["scales"]), int(bucket)
        return found
    members: dict[str, list[int]] = {}
    for bucket in state.layout.buckets:
        name = f"{bucket.group} {bucket.policy}" if bucket.policy else bucket.group
        members.setdefault(name, []).append(bucket.number)
    scaled = {path[:-1] for path in paths if path[-1] == "scales"}
    for path in paths:
        at = _bucket_key(path, paths, len(members[str(path[0])]))
        inside = path[at + 1 : -1] if path[:-1] in scaled else path[at + 1 :]
        # Without the group, so that other labels find it, and without the bucket.
        quantity = path_string([*path[1:at], *inside])
        scales = SCALE if path[:-1] in scaled and path[-1] == "scales" else ""
        found[path] = quantity + scales, members[str(path[0])][int(path[at])]
    # Adam's moments by any rule are Adam's moments.
    names = {quantity.removesuffix(SCALE) for quantity, _ in found.values()}
    for last, name in _MOMENTS.items():
        same = [q for q in names if q.split("/")[-1] == last]
        if len(same) == 1:
            found = {
                p: (name + q.removeprefix(same[0]) if q.removesuffix(SCALE) == same[0] else q, b)
                for p, (q, b) in found.items()
            }
    return found


def _bucket_key(path: tuple[Any, ...], paths: Sequence[tuple[Any, ...]], count: int) -> int:
    """Which key of the path is the bucket: an optimizer's state holds a tuple with an entry per
    bucket wherever it would hold a tree like the parameters."""
    for at in range(len(path) - 1, 0, -1):
        siblings = {
            p[at]
            for p in paths
            if len(p) == len(path) and p[:at] == path[:at] and p[at + 1 :] == path[at + 1 :]
        }
        if siblings == set(range(count)):
            return at
    raise ValueError(
        f"inner state {path_string(path)!r} has no entry per bucket, so a checkpoint cannot tell "
        "which parameters it belongs to"
    )


def _params(params: Any, nodes: dict[str, Node], put: Callable[..., None]) -> None:
    """Parameters that train go to the node that plans them; the others are leaves."""
    parts = leaf_paths_until(params, lambda x: isinstance(x, ParamShards))
    have: dict[str, Any] = {}
    for path, part in parts:
        if isinstance(part, ParamShards):
            prefix = f"{path_string(path)}/" if path else ""
            for name, shape in _shapes(part).items():
                have[prefix + name] = shape
        elif part is not None:
            have[path_string(path)] = part
    owner: dict[str, Node] = {}
    for node in nodes.values():
        if node.kind != "state":
            continue
        for path, slot in node.layout.by_path.items():
            leaf = have.get(path)
            if leaf is None or tuple(leaf.shape) != slot.shape:
                got = "nothing" if leaf is None else f"shape {tuple(leaf.shape)}"
                raise ValueError(
                    f"params do not belong to the state: it has {path!r} with shape "
                    f"{slot.shape}, params have {got} there"
                )
            owner[path] = node
    for path, part in parts:
        name = path_string(path)
        if isinstance(part, ParamShards):
            _shards(name, part, nodes, owner, put)
        elif part is None:
            continue
        elif name in owner:
            node = owner[name]
            node.params = {**(node.params or {}), name: part}
            put(Address(name, node.name), part, P())
        else:
            put(Address(f"params/{name}"), part, P())


def _shapes(shards: ParamShards) -> dict[str, Any]:
    """By path, what has the shape and dtype of each parameter."""
    found = leaf_paths(shards.shapes())
    return {path_string(path): leaf for path, leaf in found if leaf is not None}


def _shards(
    name: str,
    shards: ParamShards,
    nodes: dict[str, Node],
    owner: dict[str, Node],
    put: Callable[..., None],
) -> None:
    """Parameters that are buckets themselves, in the order of their leaves."""
    axis, specs = shards.config.axis, param_specs(shards)
    prefix = f"{name}/" if name else ""
    for kind, layout, arrays, places in (
        ("state", shards.layout, shards.buckets, specs.buckets),
        ("frozen", shards.plan.frozen, shards.frozen, specs.frozen),
    ):
        if not layout.buckets:
            continue
        node = next((n for n in nodes.values() if n.layout == layout and n.kind == kind), None)
        if kind == "state" and (prefix or node is None):
            raise ValueError(
                "params are shards of other buckets than the state's; make both with the same "
                "optimizer: jzero.shard_params(params, zero=tx), tx.init(shards)"
            )
        if node is None:
            node = nodes[f"params/{prefix}frozen"] = Node(
                f"params/{prefix}frozen", layout, axis, kind
            )
        for bucket, (array, spec) in enumerate(zip(arrays, places, strict=True)):
            put(Address("param", node.name, bucket), array, spec)
    paths = shards.other_paths()
    for path, leaf in zip(paths, shards.others, strict=True):
        if leaf is not None:
            put(Address(f"params/{prefix}{path}"), leaf, P())
    assert shards.probes is None, "probes live inside jzero.value_and_grad only"
