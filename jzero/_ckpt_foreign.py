"""Other people's optimizer states: optax.adamw, torch.optim.AdamW, Apex DistributedFusedAdam."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jzero._ckpt_dict import STEP, load_state_dict, state_dict
from jzero._ckpt_format import CheckpointError
from jzero._ckpt_place import unadoptable
from jzero._layout import path_string
from jzero._pack import leaf_paths

__all__ = ["from_optax", "from_torch", "to_optax"]


def from_optax(opt_state: Any, state: Any, params: Any, *, master: Any = None) -> tuple[Any, Any]:
    """Go on with jzero where ``optax.adamw`` stopped, moments and step count included.

    Args:
      opt_state: state of ``optax.adamw`` or of another chain around ``optax.scale_by_adam``,
        masked or split by labels too.
      state: a jzero state to be like.
      params: the parameters of both.
      master: float32 parameters, if the optax run kept a copy of its own; None: ``params``.

    Returns:
      ``(state, params)``.

    Raises:
      ValueError: no ``ScaleByAdamState`` in ``opt_state``, several that disagree on the count.
      CheckpointError: a parameter without moments, by path.
    """
    adams = [x for x in jax.tree.leaves(opt_state, is_leaf=_is_adam) if _is_adam(x)]
    counts = {int(adam.count) for adam in adams}
    if len(counts) != 1:
        raise ValueError(
            f"opt_state must hold optax.ScaleByAdamState with one count, found {len(adams)} with "
            f"counts {sorted(counts)}"
        )
    moments: dict[str, dict[str, Any]] = {}
    for adam in adams:
        for name, moment in (("exp_avg", adam.mu), ("exp_avg_sq", adam.nu)):
            for path, leaf in leaf_paths(moment):
                if leaf is not None:
                    moments.setdefault(path_string(path), {})[name] = np.asarray(leaf)
    d: dict[str, Any] = {STEP: counts.pop()}
    for path, leaf in leaf_paths(params if master is None else master):
        if leaf is not None:
            d[path_string(path)] = _param_entry(leaf, moments.get(path_string(path), {}))
    return load_state_dict(d, state, params)


def _param_entry(leaf: Any, moments: Mapping[str, Any]) -> dict[str, Any]:
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return {
            "param": np.asarray(jax.random.key_data(leaf)),
            "key": str(jax.random.key_impl(leaf)),
        }
    return {"param": np.asarray(leaf), **moments}


def to_optax(state: Any, params: Any, opt_state: Any) -> Any:
    """Go on with ``optax.adamw`` where jzero stopped.

    Args:
      state: a jzero state with Adam's moments.
      params: its parameters.
      opt_state: what ``optax.adamw(...).init(params)`` returned, to be like.

    Returns:
      ``opt_state`` with jzero's moments in each ``ScaleByAdamState`` and jzero's step in each
      ``count``, on the devices and in the dtypes of the argument.

    Raises:
      ValueError: a state without Adam's moments, an ``opt_state`` without ``ScaleByAdamState``.
      CheckpointError: a moment of another shape, by path.
    """
    d = state_dict(state, params)
    found = False

    def fill(tree: Any, quantity: str) -> Any:
        def one(path: Any, leaf: Any) -> Any:
            name = path_string(path)
            values = d.get(name, {}).get(quantity)
            if values is None:
                if jnp.issubdtype(leaf.dtype, jnp.floating) and name in d and len(d[name]) > 1:
                    raise ValueError(f"the state has no {quantity} of {name!r}; was it Adam's?")
                return leaf  # it does not train
            if values.shape != leaf.shape:
                raise CheckpointError(
                    f"{quantity} of {name!r} has shape {values.shape}, in opt_state {leaf.shape}"
                )
            return _like(values, leaf)

        leaves = [one(path, leaf) for path, leaf in leaf_paths(tree) if leaf is not None]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def visit(path: Any, node: Any) -> Any:
        nonlocal found
        if _is_adam(node):
            found = True
            return type(node)(
                count=_like(np.int32(d[STEP]), node.count),
                mu=fill(node.mu, "exp_avg"),
                nu=fill(node.nu, "exp_avg_sq"),
            )
        named = bool(path) and getattr(path[-1], "name", None) == "count"
        return _like(np.int32(d[STEP]), node) if named else node

    result = jax.tree_util.tree_map_with_path(visit, opt_state, is_leaf=_is_adam)
    if not found:
        raise ValueError("opt_state holds no optax.ScaleByAdamState; pass optax.adamw's state")
    return result


def _is_adam(x: Any) -> bool:
    return isinstance(x, optax.ScaleByAdamState)


def _like(values: Any, leaf: Any) -> Any:
    values = np.asarray(values).astype(leaf.dtype)
    if isinstance(leaf, jax.Array):
        return jax.device_put(unadoptable(values), leaf.sharding if leaf.committed else None)
    return values


def from_torch(
    optimizer: Mapping[str, Any],
    names: Mapping[Any, str],
    model: Mapping[str, Any] | None = None,
    transform: Callable[[str, np.ndarray], np.ndarray] | None = None,
) -> dict[str, Any]:
    """A state dict for :func:`load_state_dict` from that of torch's Adam or AdamW, or of Apex's
    ``DistributedFusedAdam`` (format 2). torch is not needed: arrays may be numpy's.

    Args:
      optimizer: ``{"state": {index: {"exp_avg", "exp_avg_sq", "step"}}, "param_groups": [...]}``.
        Apex's also holds ``"param"``, and one step for all.
      names: from the index of a parameter (torch counts through the groups), or from its name
        where the groups list ``param_names``, to its path in jzero, e.g. ``{0: "dense/kernel"}``.
      model: parameters by their path in jzero, or by the key they have in ``names``; needed where
        the optimizer does not hold them.
      transform: from a jzero path and an array to that array as jzero's model has it, e.g. to
        transpose the weight of a linear layer; used for parameters and moments.

    Raises:
      ValueError: an index or name without an entry in ``names``, a parameter that is nowhere,
        different steps, amsgrad.
    """
    states = optimizer.get("state")
    if not isinstance(states, Mapping):
        raise ValueError("optimizer must be a torch optimizer's state_dict(), with a 'state'")
    groups = optimizer.get("param_groups", ())
    keys: dict[Any, Any] = {}
    for group in groups:
        if group.get("amsgrad"):
            raise ValueError("amsgrad keeps a maximum that jzero.adamw has no place for")
        given = group.get("param_names") or group["params"]
        keys.update(zip(group["params"], given, strict=True))
    for index in states:
        if not isinstance(index, str):
            keys.setdefault(index, index)
    shared = [optimizer.get("step"), states.get("step"), *(g.get("step") for g in groups)]
    steps = {int(_array(s)) for s in shared if s is not None}
    found: dict[str, Any] = {}
    for index, name in keys.items():
        path = names.get(index, names.get(name))
        if path is None:
            raise ValueError(
                f"names has no entry for parameter {index!r}"
                + (f" ({name!r})" if name != index else "")
            )
        entry = states.get(index, {})
        if entry.get("step") is not None:
            steps.add(int(_array(entry["step"])))
        param = entry.get("param")
        for key in (path, name, index):
            if param is None and model is not None:
                param = model.get(key)
        if param is None:
            raise ValueError(f"no value for {path!r}: the optimizer does not hold it; pass model=")
        arrays = {"param": _array(param)}
        for quantity in ("exp_avg", "exp_avg_sq"):
            value = entry.get(quantity)  # absent: it never had a gradient
            arrays[quantity] = (
                np.zeros_like(arrays["param"], np.float32) if value is None else _array(value)
            )
        shape = transform or (lambda _, x: x)
        found[path] = {q: np.asarray(shape(path, x)) for q, x in arrays.items()}
    if len(steps) > 1:
        raise ValueError(f"parameters have made different numbers of steps: {sorted(steps)}")
    return {STEP: steps.pop() if steps else 0, **found}


def _array(value: Any) -> np.ndarray:
    """numpy's, from a number, an array or a torch tensor (whose bfloat16 numpy cannot take)."""
    if hasattr(value, "detach"):
        value = value.detach().cpu()
        if "bfloat16" in str(value.dtype):
            value = value.float()
    return np.asarray(value)
