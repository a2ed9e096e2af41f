"""What the tests of many processes run: trains a small model, and does one thing wrong on request.

    jzero launch -n 2 --devices-per-process 2 -- python worker.py '{"out": "...", "steps": 20}'

Every process writes what it saw to `out`/process-I.json.
"""

import dataclasses
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jzero

BATCH = 48  # 1, 2, 3 and 4 processes of 2 devices divide it


@dataclasses.dataclass
class Options:
    out: str = ""
    steps: int = 20
    overflow: int | None = None  # at this step, in a row of the last process
    replicas: bool = False
    seed_of_process: bool = False  # processes draw different values, and process 0's are sent
    ddp: bool = False  # also build a DistributedDataParallel, of other values on each process
    save: str = ""  # the checkpoint's folder; the run continues from what is there
    save_every: int = 4
    fault: str = ""  # one of `do`, or "model", "buckets", "start"
    at: int = 0  # step
    on: int = -1  # process; -1: the last
    restart: int = 0  # in which start the fault happens
    heartbeat: float = 10.0
    shutdown: float = 20.0
    pause: float = 0.0  # seconds after each step
    kill_after: list[float] = dataclasses.field(default_factory=list)  # seconds, by start


def draw(seed: int, width: int = 5) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"a": (6, 7), "b": (7,), "c": (7, width), "scale": ()}
    return {name: rng.uniform(0.5, 1.0, shape).astype(np.float32) for name, shape in shapes.items()}


def odd(seed: int) -> dict[str, Any]:
    """Values whose bits are easily lost, of every kind, on process 0; and others elsewhere."""
    own = np.float32(seed)
    return {
        "zeros": np.array([-0.0, 0.0], np.float32) + own,
        "nans": (np.array([0x7FC00123, 0xFFC00001], np.uint32) + seed).view(np.float32),
        "infinite": np.array([np.inf, -np.inf], np.float16) * (1 - seed),
        "narrow": jnp.array([-0.0, 3.0], jnp.bfloat16) + seed,
        "complex": np.array([-0.0 - 1j, np.nan], np.complex64) + own,
        "flags": np.array([True, False]) ^ bool(seed),
        "counts": np.array([-1, 2**31 - 1], np.int32) ^ seed,
        "tiny": np.array([[-128]], np.int8) + np.int8(seed),
        "none": None,
        "empty": np.zeros((0, 3), np.float32),
        "key": np.asarray(jax.random.key_data(jax.random.key(seed))),
        "depth": 3,
    }


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1000 + step)
    return rng.normal(size=(BATCH, 6)).astype("f"), rng.normal(size=(BATCH, 5)).astype("f")


def loss_fn(params: Any, data: Any) -> jax.Array:
    x, y = data
    out = jnp.tanh(x @ params["a"] + params["b"][None]) @ params["c"] * params["scale"]
    return jnp.mean((out - y) ** 2)


def main(options: Options) -> None:
    start = int(os.environ.get("JZERO_RESTART", 0))
    fault = options.fault if start == options.restart else ""
    jzero.distributed.initialize(
        initialization_timeout=30,
        heartbeat_timeout=options.heartbeat,
        shutdown_timeout=options.shutdown,
    )
    me, count = jax.process_index(), jax.process_count()
    mine = fault != "" and me == options.on % count
    mesh = jzero.distributed.make_mesh(replica_axis="replica" if options.replicas else None)
    replica = "replica" if options.replicas else None
    cap = 2**-12 if mine and fault == "buckets" else 2**-13
    zero = jzero.ZeroConfig(mesh=mesh, replica_axis=replica, bucket_mb=cap)
    # A small rate: no parameter comes near 0, so that a relative error means something.
    tx = jzero.adamw(3e-3, weight_decay=0.1, clip_norm=1.0, zero=zero)
    if mine and fault == "start":
        do("kill")

    drawn = draw(me if options.seed_of_process else 0, 4 if mine and fault == "model" else 5)
    params = jzero.broadcast(drawn, zero=jzero.ZeroConfig(mesh=mesh, replica_axis=replica))
    if options.ddp:
        check_ddp(me)
    if options.seed_of_process:
        jzero.distributed.initialize()  # a second time changes nothing
        with pytest.raises(ValueError, match=f"was started with num_processes={count}"):
            jzero.distributed.initialize(num_processes=count + 1)
        jax.tree.map(same_bits, jzero.broadcast(odd(me), zero=zero), odd(0))
    state = tx.init(params)
    value_and_grad = jzero.value_and_grad(loss_fn, zero=tx)

    @jax.jit
    def step_fn(params: Any, state: Any, data: Any) -> Any:
        loss, grads = value_and_grad(params, data)
        params, state = tx.step(grads, state, params)
        return params, state, loss

    first = 0
    if options.save and jzero.checkpoint.exists(options.save):
        state, params = jzero.checkpoint.restore(options.save, like=(state, params))
        first = int(state.step)
    print(f"process {me} of {count} begins at step {first}", flush=True)
    seen: dict[str, Any] = {"losses": {}, "skipped": [], "first": first}
    rows = jzero.distributed.local_rows(mesh, BATCH)
    if me == options.on % count and start < len(options.kill_after):
        kill_after(options.kill_after[start])
    for step in range(first, options.steps):
        data = tuple(x[rows] for x in batch(step))
        if step == options.overflow and me == count - 1:
            data[0][-1] = np.inf
        before = (params, state.inner)
        if mine and step == options.at:
            do(fault)
        params, state, loss = step_fn(params, state, jzero.distributed.global_batch(data, mesh))
        seen["losses"][step] = float(loss).hex()
        if int(state.skipped) > len(seen["skipped"]):
            seen["skipped"].append(step)
            jax.tree.map(same, before, (params, state.inner))
        if options.save and (step + 1) % options.save_every == 0:
            if mine and fault == "kill in save" and step >= options.at:
                die_at_publication()
            jzero.checkpoint.save(options.save, state, params)
            print(f"process {me} saved step {step + 1}", flush=True)
        time.sleep(options.pause)
    seen["params"] = {
        name: np.asarray(x.addressable_data(0)).astype(float).ravel().tolist()
        for name, x in params.items()
    }
    seen["mesh"] = [[d.process_index for d in row] for row in np.atleast_2d(mesh.devices)]
    seen["drawn"] = {name: x.ravel().tolist() for name, x in drawn.items()}
    Path(options.out, f"process-{me}.json").write_text(json.dumps(seen), encoding="utf-8")


def check_ddp(seed: int) -> None:
    """Wrapping a model gives every process the first one's values."""
    from flax import nnx

    model = nnx.Linear(3, 4, rngs=nnx.Rngs(seed))
    own = np.asarray(model.kernel[...])
    first = np.asarray(nnx.Linear(3, 4, rngs=nnx.Rngs(0)).kernel[...])
    assert (own == first).all() == (seed == 0)
    ddp = jzero.DistributedDataParallel(model, mesh=jzero.distributed.make_mesh())
    same_bits(ddp.module.kernel[...], first)


def same_bits(sent: Any, own: Any) -> None:
    if not isinstance(sent, jax.Array):
        assert sent == own
        return
    for shard in sent.addressable_shards:
        have, want = np.asarray(shard.data), np.asarray(own)
        assert (have.dtype, have.shape) == (want.dtype, want.shape)
        assert have.tobytes() == want.tobytes(), f"{have} is not {want}"


def same(a: jax.Array, b: jax.Array) -> None:
    for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
        assert np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()


def do(fault: str) -> None:
    print(f"fault at {time.time()}", flush=True)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "raise":
        raise ValueError("the data of this process are broken")
    elif fault == "exit":
        sys.exit(3)


def kill_after(seconds: float) -> None:
    """At a moment that has nothing to do with what the program does then."""

    def kill() -> None:
        time.sleep(seconds)
        do("kill")

    threading.Thread(target=kill, daemon=True).start()


def die_at_publication() -> None:
    """The next file to be put in its place is not: this process is gone."""

    def replace(self: Path, target: Any) -> Any:
        do("kill")

    Path.replace = replace


if __name__ == "__main__":
    main(Options(**json.loads(sys.argv[1])))
