"""What several test modules need: a model, three ways to train it, and how to compare."""

import collections
import dataclasses
import logging
import re
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero

# ---------------------------------------------------------------- a model

BATCH = 48  # 1, 2, 3, 4 and 8 devices divide it


def model(seed: int = 0, dtype: Any = jnp.float32) -> dict[str, Any]:
    """A small network whose leaves fall awkwardly: 0-d, one element, primes, lists.

    No parameter is near 0 or comes near it in a test, so that a relative error means something.
    """
    rng = np.random.default_rng(seed)

    def draw(*shape: int) -> jax.Array:
        values = rng.uniform(0.5, 1.0, shape) * rng.choice([-1, 1], shape)
        return jnp.asarray(values, dtype)

    return {
        "layers": [
            {"kernel": draw(6, 7), "bias": draw(7)},
            {"kernel": draw(7, 5), "bias": draw(5)},
        ],
        "scale": draw(),
        "shift": draw(1),
    }


def batch(seed: int = 0, size: int = BATCH) -> tuple[jax.Array, jax.Array]:
    rng = np.random.default_rng(1000 + seed)
    x, y = rng.normal(size=(size, 6)), rng.normal(size=(size, 5))
    return jnp.asarray(x, jnp.float32), jnp.asarray(y, jnp.float32)


def loss_fn(params: Any, data: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Mean over the batch of a squared error."""
    x, y = data
    for layer in params["layers"]:
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"][None])
    out = x * params["scale"] + params["shift"][None]
    return jnp.mean((out - y.astype(out.dtype)) ** 2)


# ---------------------------------------------------------------- three ways to train it


def batch_axes(mesh: Mesh) -> P:
    return P(tuple(mesh.axis_names))


def config_for(on: Mesh, **options: Any) -> jzero.ZeroConfig:
    """A config whose small cap makes several buckets of the model."""
    replica = "replica" if "replica" in on.axis_names else None
    chosen = {"mesh": on, "replica_axis": replica, "bucket_mb": 2**-13, **options}
    return jzero.ZeroConfig(**chosen)


def replicated(tree: Any, mesh: Mesh) -> Any:
    return jax.device_put(tree, NamedSharding(mesh, P()))


def split(data: Any, mesh: Mesh) -> Any:
    return jax.device_put(data, NamedSharding(mesh, batch_axes(mesh)))


def plain_jit(tx: Any, mesh: Mesh, loss: Any = loss_fn) -> Callable[..., Any]:
    """Way 1: jzero.value_and_grad under jit, no shard_map in user code."""
    value_and_grad = jzero.value_and_grad(loss, zero=tx)

    def step(params: Any, state: Any, data: Any) -> Any:
        _, grads = value_and_grad(params, data)
        return tx.step(grads, state, params)

    return step


def in_shard_map(check_vma: bool, vary: bool = False) -> Callable[..., Any]:
    """Way 2: the user's own shard_map over all axes of the mesh."""

    def way(tx: Any, mesh: Mesh, loss: Any = loss_fn) -> Callable[..., Any]:
        def local(params: Any, state: Any, data: Any) -> Any:
            seen = jax.lax.pcast(params, mesh.axis_names, to="varying") if vary else params
            return tx.step(jax.grad(loss)(seen, data), state, params)

        def step(params: Any, state: Any, data: Any) -> Any:
            specs = jzero.partition_specs(state)
            mapped = jax.shard_map(
                local,
                mesh=mesh,
                in_specs=(P(), specs, batch_axes(mesh)),
                out_specs=(P(), specs),
                check_vma=check_vma,
            )
            return mapped(params, state, data)

        return step

    return way


def varying(tx: Any, mesh: Mesh, loss: Any = loss_fn) -> Callable[..., Any]:
    """Way 2 with types on and the gradient kept local: the reduction is left to jzero."""
    return in_shard_map(True, vary=True)(tx, mesh, loss)


def drop_in(tx: Any, mesh: Mesh, loss: Any = loss_fn) -> Callable[..., Any]:
    """Way 3: a jit program written for optax, whose gradients XLA reduces."""

    def step(params: Any, state: Any, data: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params, data), state, params)
        return optax.apply_updates(params, updates), state

    return step


WAYS: dict[str, Callable[..., Any]] = {
    "plain": plain_jit,
    "checked": in_shard_map(True),
    "unchecked": in_shard_map(False),
    "drop-in": drop_in,
}


def train(way: str, tx: Any, mesh: Mesh, params: Any, batches: Sequence[Any], loss: Any = loss_fn):
    """Parameters and state after a step on each batch."""
    params = replicated(params, mesh)
    state = jax.jit(tx.init)(params)
    step = jax.jit(WAYS[way](tx, mesh, loss))
    for data in batches:
        params, state = step(params, state, split(data, mesh))
    return params, state


def train_optax(tx: Any, params: Any, batches: Sequence[Any], loss: Any = loss_fn):
    """The oracle: the whole batch on one device."""

    @jax.jit
    def step(params: Any, state: Any, data: Any) -> Any:
        updates, state = tx.update(jax.grad(loss)(params, data), state, params)
        return optax.apply_updates(params, updates), state

    state = tx.init(params)
    for data in batches:
        params, state = step(params, state, data)
    return params, state


# ---------------------------------------------------------------- comparing


def with_paths(tree: Any) -> dict[str, Any]:
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(path): leaf for path, leaf in flat}


def host(x: Any) -> np.ndarray:
    if jnp.issubdtype(getattr(x, "dtype", np.float32), jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def assert_bits(have: Any, want: Any) -> None:
    """Same structure, dtypes, shapes and bits (so -0.0 is not 0.0, and a NaN is itself)."""
    assert jax.tree.structure(have) == jax.tree.structure(want)
    theirs = with_paths(want)
    for path, leaf in with_paths(have).items():
        a, b = host(leaf), host(theirs[path])
        assert (a.dtype, a.shape) == (b.dtype, b.shape), path
        assert a.tobytes() == b.tobytes(), f"{path}: {a} is not {b}"


def relative_error(have: Any, want: Any) -> float:
    """Largest ``|have - want| / |want|`` over all elements of all leaves."""
    assert jax.tree.structure(have) == jax.tree.structure(want)
    worst, theirs = 0.0, with_paths(want)
    for path, leaf in with_paths(have).items():
        a, b = host(leaf).astype(np.float64), host(theirs[path]).astype(np.float64)
        assert a.shape == b.shape, path
        assert np.isfinite(a).all(), path
        if a.size:
            with np.errstate(divide="ignore", invalid="ignore"):
                ratio = np.where(a == b, 0.0, np.abs(a - b) / np.abs(b))
            worst = max(worst, float(ratio.max()))
    return worst


def assert_close(have: Any, want: Any, rtol: float = 2e-6) -> None:
    """Each element within ``rtol`` of the wanted one, relative to that element."""
    error = relative_error(have, want)
    assert error <= rtol, f"relative error {error:.3g}"


# ---------------------------------------------------------------- compiled programs

DTYPES = {"f32": 4, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "pred": 1, "f64": 8, "s64": 8, "u8": 1}
_COLLECTIVE = re.compile(
    r"= (?P<type>\((?:[^()]|\([^()]*\))*\)|\S+) "  # TPU's layouts have parentheses of their own
    r"(?P<op>all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute)(?:-start)?\("
)
_ARRAY = re.compile(r"(?P<dtype>[a-z]+[0-9]*)\[(?P<dims>[0-9,]*)\]")


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a compiled program, with its result: dtypes and elements."""

    op: str
    dtypes: tuple[str, ...]
    sizes: tuple[int, ...]


def arrays(text: str) -> list[tuple[str, int]]:
    """Dtype and elements of each array in an HLO type."""
    return [
        (m["dtype"], int(np.prod([int(d) for d in m["dims"].split(",") if d], dtype=np.int64)))
        for m in _ARRAY.finditer(text)
    ]


def collectives(compiled: Any) -> list[Collective]:
    """Every collective of a compiled program, in all its computations."""
    found = []
    for m in _COLLECTIVE.finditer(compiled.as_text()):
        parts = arrays(m["type"])
        found.append(Collective(m["op"], tuple(d for d, _ in parts), tuple(n for _, n in parts)))
    return found


def by_op(compiled: Any) -> dict[str, list[Collective]]:
    groups = collections.defaultdict(list)
    for c in collectives(compiled):
        groups[c.op].append(c)
    return dict(groups)


@contextmanager
def counting(event: str = "Compiling ") -> Generator[list[str]]:
    """What JAX compiles meanwhile, by the names of the functions."""
    seen: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            message = record.getMessage()
            if message.startswith(event):
                seen.append(message.removeprefix(event).split()[0])

    logger, handler = logging.getLogger("jax"), Handler()
    propagate = logger.propagate
    logger.addHandler(handler)
    logger.propagate = False
    try:
        with jax.log_compiles():
            yield seen
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate
