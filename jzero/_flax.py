"""A flax model in parts and back: nnx modules by their graph, linen modules by their variables."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jzero._layout import PathKey, path_string
from jzero._pack import leaf_paths

__all__ = ["Parts", "flax_modules", "is_nnx", "linen_parts", "nnx_parts", "register_wrapper"]


def flax_modules() -> tuple[Any, Any]:
    """``flax.nnx`` and ``flax.linen``, imported when they are needed.

    Raises:
      ImportError: flax is not installed, naming the extra.
    """
    try:
        from flax import linen, nnx
    except ImportError as error:
        raise ImportError(
            f"jzero.DistributedDataParallel wraps flax models: pip install 'jzero[flax]' ({error})"
        ) from error
    return nnx, linen


def is_nnx(node: Any) -> bool:
    nnx, _ = flax_modules()
    return isinstance(node, nnx.Module)


@dataclasses.dataclass(frozen=True, eq=False)
class Parts:
    """A model taken apart.

    Attributes:
      trained: the parameters that get gradients, by path.
      others: all other leaves: buffers, counters, PRNG keys, frozen parameters, in order.
      other_paths: their keys.
      params: the pytree that an optimizer is given, without flax's boxes.
      static: hashable; everything but the leaves.
      merge: a model of the same structure with new leaves.
      changed: the other leaves of a merged model that are not those it was merged from.
      write: put leaves, by index into ``others``, into the model that was taken apart.
      as_grads: from gradients by path to the tree that an optimizer is given.
      as_box: one object in the place of all gradients.
    """

    trained: dict[str, Array]
    others: tuple[Any, ...]
    other_paths: tuple[tuple[PathKey, ...], ...]
    params: Any
    static: Any
    merge: Callable[[dict[str, Array], Sequence[Any]], Any]
    changed: Callable[[Any, Sequence[Any]], dict[int, Array]]
    write: Callable[[Mapping[int, Any]], None]
    as_grads: Callable[[Mapping[str, Any]], Any]
    as_box: Callable[[Any], Any]


def nnx_parts(node: Any, wrt: Any) -> Parts:
    """Take an nnx module, or a wrapper of one, apart.

    Args:
      node: the module.
      wrt: an nnx filter of the variables that get gradients.

    Raises:
      ValueError: ``wrt`` selects no floating variable.
    """
    nnx, _ = flax_modules()
    graphdef, state = nnx.split(node, graph=True)
    selected = nnx.filter_state(state, wrt)
    pure, params = nnx.as_pure(state), nnx.as_pure(selected)
    names = {path_string(path) for path, x in leaf_paths(params) if _trains(x)}
    leaves, treedef = jax.tree.flatten(pure, is_leaf=_is_none)
    paths = [path for path, _ in leaf_paths(pure)]
    trains = [path_string(path) in names for path in paths]
    split = _Split(tuple(paths), tuple(trains))

    def merge(trained: dict[str, Array], others: Sequence[Any]) -> Any:
        return nnx.merge(graphdef, treedef.unflatten(split.join(trained, others)))

    def changed(model: Any, others: Sequence[Any]) -> dict[int, Array]:
        if not others:
            return {}
        _, state = nnx.split(model, graph=True)
        return split.changed(leaf_paths(nnx.as_pure(state)), others)

    def write(new: Mapping[int, Any]) -> None:
        if new:
            flat = [(split.other_paths[i], x) for i, x in new.items()]
            nnx.update(node, nnx.from_flat_state(flat))

    def as_grads(grads: Mapping[str, Any]) -> Any:
        old, boxes = jax.tree.flatten(selected, is_leaf=_is_none)
        where = [path_string(path) for path, _ in leaf_paths(selected)]
        return boxes.unflatten([_grad_of(p, x, grads) for p, x in zip(where, old, strict=True)])

    def as_box(value: Any) -> Any:
        # The first variable's place and type: what `wrt` selects, nnx.Optimizer selects again.
        path, variable = next(iter(nnx.to_flat_state(selected)))
        return nnx.from_flat_state([(path, type(variable)(value))])

    trained, others = split.part(leaves)
    return Parts(
        trained=trained,
        others=others,
        other_paths=split.other_paths,
        params=params,
        static=(graphdef, treedef, split),
        merge=merge,
        changed=changed,
        write=write,
        as_grads=as_grads,
        as_box=as_box,
    )


def linen_parts(
    variables: Mapping[str, Any],
    wrt: Callable[[str], bool] | None,
    rebuild: Callable[[Any], Any],
    variables_of: Callable[[Any], Any],
    replace: Callable[[Any], None],
) -> Parts:
    """Take the variables of a linen module apart.

    Args:
      variables: collections by name; "params" is trained.
      wrt: which paths below "params" get gradients; None: all.
      rebuild: from variables to what the loss function is given.
      variables_of: its inverse.
      replace: puts new variables into the wrapper that was taken apart.
    """
    leaves, treedef = jax.tree.flatten(variables, is_leaf=_is_none)
    paths = [path for path, _ in leaf_paths(variables)]

    def train(path: tuple[PathKey, ...], leaf: Any) -> bool:
        mine = path[0] == "params" and _trains(leaf)
        return mine and (wrt is None or bool(wrt(path_string(path[1:]))))

    trains = [train(path, leaf) for path, leaf in zip(paths, leaves, strict=True)]
    # Gradients have the paths of variables["params"], as the optimizer sees them.
    split = _Split(tuple(p[1:] if t else p for p, t in zip(paths, trains, strict=True)), (*trains,))

    def merge(trained: dict[str, Array], others: Sequence[Any]) -> Any:
        return rebuild(treedef.unflatten(split.join(trained, others)))

    def changed(model: Any, others: Sequence[Any]) -> dict[int, Array]:
        return split.changed(leaf_paths(variables_of(model)), others)

    def write(new: Mapping[int, Any]) -> None:
        if new:
            trained, others = split.part(leaves)
            current = [new.get(i, x) for i, x in enumerate(others)]
            replace(treedef.unflatten(split.join(trained, current)))

    params = variables.get("params", {})

    def as_grads(grads: Mapping[str, Any]) -> Any:
        old, structure = jax.tree.flatten(params, is_leaf=_is_none)
        where = [path_string(path) for path, _ in leaf_paths(params)]
        return structure.unflatten([_grad_of(p, x, grads) for p, x in zip(where, old, strict=True)])

    trained, others = split.part(leaves)
    return Parts(
        trained=trained,
        others=others,
        other_paths=split.other_paths,
        params=params,
        static=(treedef, split),
        merge=merge,
        changed=changed,
        write=write,
        as_grads=as_grads,
        as_box=lambda value: value,
    )


@dataclasses.dataclass(frozen=True)
class _Split:
    """Which leaves train: the same for every model of one structure."""

    paths: tuple[tuple[PathKey, ...], ...]
    trains: tuple[bool, ...]

    @property
    def other_paths(self) -> tuple[tuple[PathKey, ...], ...]:
        return tuple(p for p, train in zip(self.paths, self.trains, strict=True) if not train)

    def part(self, leaves: Sequence[Any]) -> tuple[dict[str, Array], tuple[Any, ...]]:
        items = list(zip(self.paths, leaves, self.trains, strict=True))
        trained = {path_string(path): jnp.asarray(x) for path, x, train in items if train}
        return trained, tuple(x for _, x, train in items if not train)

    def join(self, trained: Mapping[str, Any], others: Sequence[Any]) -> list[Any]:
        rest = iter(others)
        return [
            trained[path_string(path)] if train else next(rest)
            for path, train in zip(self.paths, self.trains, strict=True)
        ]

    def changed(
        self, leaves: list[tuple[tuple[PathKey, ...], Any]], others: Sequence[Any]
    ) -> dict[int, Array]:
        """Leaves that are other objects than before. Leaves that are new, such as sown
        intermediates, stay where they are."""
        now = dict(leaves)
        gone = [path for path in self.other_paths if path not in now]
        if gone:
            raise ValueError(
                f"loss_fn removed {path_string(gone[0])!r} from the model; its structure must "
                "stay while it is differentiated"
            )
        found: dict[int, Array] = {}
        for i, (path, old) in enumerate(zip(self.other_paths, others, strict=True)):
            new = now[path]
            # A random stream's key is this device's own, and moves on by its count: the common one
            # stays. (Through remat or scan it comes back as another object.)
            if new is old or _is_key(old):
                continue
            found[i] = jnp.asarray(new)
        return found


def _grad_of(path: str, leaf: Any, grads: Mapping[str, Any]) -> Any:
    if path in grads:
        return grads[path]
    if leaf is None or _is_key(leaf):
        return leaf
    return jnp.zeros_like(leaf)  # frozen, or an integer


def _trains(leaf: Any) -> bool:
    if not isinstance(leaf, (jax.Array, np.ndarray, np.generic)):
        return False
    return bool(jnp.issubdtype(leaf.dtype, jnp.floating))


def _is_key(x: Any) -> bool:
    return isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def _is_none(x: Any) -> bool:
    return x is None


def register_wrapper(
    wrapper: type,
    module_of: Callable[[Any], Any],
    static_of: Callable[[Any], Any],
    make: Callable[[Any, Any], Any],
) -> None:
    """Make a class that wraps a module look to nnx like the module itself: the same paths, so that
    states, gradients, optimizers and checkpoints of the two are interchangeable.

    Args:
      wrapper: the class.
      module_of: its module.
      static_of: hashable; what else it is made of.
      make: a wrapper from a module and that.
    """
    from flax.nnx import graphlib

    if graphlib.is_node_type(wrapper):
        return

    def impl(node: Any) -> Any:
        found: Any = graphlib.get_node_impl(module_of(node))
        return found

    def flatten(node: Any) -> Any:
        items, metadata = impl(node).flatten(module_of(node))
        return items, (type(module_of(node)), metadata, static_of(node))

    def create_empty(metadata: Any) -> Any:
        kind, inner, static = metadata
        found: Any = graphlib.get_node_impl_for_type(kind)
        return make(found.create_empty(inner), static)

    graphlib.register_graph_node_type(
        wrapper,
        flatten,
        lambda node, key, value: impl(node).set_key(module_of(node), key, value),
        lambda node, key: impl(node).pop_key(module_of(node), key),
        create_empty,
        lambda node: impl(node).clear(module_of(node)),
        lambda node, items: impl(node).init(module_of(node), items),
    )
