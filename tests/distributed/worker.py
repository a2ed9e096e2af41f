"""What the tests of many processes run: trains a small model, and does one thing wrong on request.

    jzero launch -n 2 --devices-per-process 2 -- python worker.py '{"out": "...", "steps": 20}'

Every process writes what it saw to `out`/process-I.json.
"""

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import jzero

BATCH = 32


@dataclasses.dataclass
class Options:
    out: str = ""
    steps: int = 20
    overflow: int | None = None  # at this step, in a row of the last process
    replicas: bool = False
    seed_of_process: bool = False  # processes draw different values, and process 0's are sent
    save_every: int = 0
    fault: str = ""  # "kill", "stop", "raise", "exit", "kill in save", "model", "start"
    at: int = 0  # step
    on: int = -1  # process; -1: the last
    restart: int = 0  # in which start the fault happens
    heartbeat: float = 10.0


def draw(seed: int, width: int = 5) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    shapes = {"a": (6, 7), "b": (7,), "c": (7, width), "scale": ()}
    return {name: rng.uniform(0.5, 1.0, shape).astype(np.float32) for name, shape in shapes.items()}


def batch(step: int) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(1000 + step)
    return rng.normal(size=(BATCH, 6)).astype("f"), rng.normal(size=(BATCH, 5)).astype("f")


def loss_fn(params: Any, data: Any) -> jax.Array:
    x, y = data
    out = jnp.tanh(x @ params["a"] + params["b"][None]) @ params["c"] * params["scale"]
    return jnp.mean((out - y) ** 2)


def main(options: Options) -> None:
    started = time.monotonic()
    fault = options.fault if int(os.environ.get("JZERO_RESTART", 0)) == options.restart else ""
    jzero.distributed.initialize(
        initialization_timeout=30, heartbeat_timeout=options.heartbeat, shutdown_timeout=20
    )
    me, count = jax.process_index(), jax.process_count()
    mine = fault != "" and me == options.on % count
    mesh = jzero.distributed.make_mesh(replica_axis="replica" if options.replicas else None)
    replica = "replica" if options.replicas else None
    zero = jzero.ZeroConfig(mesh=mesh, replica_axis=replica, bucket_mb=2**-13)
    # A small rate: no parameter comes near 0, so that a relative error means something.
    tx = jzero.adamw(3e-3, weight_decay=0.1, clip_norm=1.0, zero=zero)
    if mine and fault == "start":
        os.kill(os.getpid(), signal.SIGKILL)

    drawn = draw(me if options.seed_of_process else 0, 4 if mine and fault == "model" else 5)
    params = jzero.distributed.broadcast(drawn, mesh)
    state = tx.init(params)
    value_and_grad = jzero.value_and_grad(loss_fn, zero=tx)

    @jax.jit
    def step_fn(params: Any, state: Any, data: Any) -> Any:
        loss, grads = value_and_grad(params, data)
        params, state = tx.step(grads, state, params)
        return params, state, loss

    seen: dict[str, Any] = {"losses": {}, "skipped": [], "first": 0}
    rows = jzero.distributed.local_rows(mesh, BATCH)
    for step in range(options.steps):
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
    seen["seconds"] = time.monotonic() - started
    seen["params"] = {
        name: np.asarray(x.addressable_data(0)).astype(float).ravel().tolist()
        for name, x in params.items()
    }
    seen["mesh"] = [[d.process_index for d in row] for row in np.atleast_2d(mesh.devices)]
    seen["drawn"] = {name: x.ravel().tolist() for name, x in drawn.items()}
    Path(options.out, f"process-{me}.json").write_text(json.dumps(seen), encoding="utf-8")


def same(a: jax.Array, b: jax.Array) -> None:
    for x, y in zip(a.addressable_shards, b.addressable_shards, strict=True):
        assert np.asarray(x.data).tobytes() == np.asarray(y.data).tobytes()


def do(fault: str) -> None:
    print(f"fault {fault} now", flush=True)
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif fault == "raise":
        raise ValueError("the data of this process are broken")
    elif fault == "exit":
        sys.exit(3)


if __name__ == "__main__":
    main(Options(**json.loads(sys.argv[1])))
