"""Many processes: the same program in each, started together.

    jzero launch -n 2 --devices-per-process 4 --restarts 3 -- python examples/many_processes.py
    python examples/many_processes.py

Each process draws its own initial values and all get the first one's, each gives its own rows of
every batch, and after a failure the run continues from its newest checkpoint, with the processes
that are left. examples/cluster/ starts the same program on SLURM, Open MPI, Kubernetes and Cloud
TPU.
"""

import argparse
import functools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from _mlp import Batch, Params, batches, init_params, loss_fn

import jzero

SAVE_EVERY = 10


def main(argv: Sequence[str] | None = None) -> float:
    """Train; returns the final loss."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--checkpoint", type=Path, help="folder; None: no checkpoints")
    options = parser.parse_args(argv)

    # Finds its place, meets the others, and from here on ends when one of them fails.
    jzero.distributed.initialize()
    me, count = jax.process_index(), jax.process_count()
    # The shard axis lies inside a host, the replica axis across.
    mesh = jzero.distributed.make_mesh(replica_axis="replica")
    zero = jzero.ZeroConfig(axis="data", replica_axis="replica", mesh=mesh)
    tx = jzero.adamw(3e-3, eps=1e-6, weight_decay=0.01, zero=zero)
    value_and_grad = jzero.value_and_grad(loss_fn, zero=zero)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def train_step(params: Params, state: jzero.ZeroState, batch: Batch) -> Any:
        loss, grads = value_and_grad(params, batch)
        params, state = tx.step(grads, state, params)
        return params, state, loss

    params = jzero.broadcast(init_params(seed=me), zero=zero)
    state: Any = tx.init(params)
    if options.checkpoint is not None and jzero.checkpoint.exists(options.checkpoint):
        state, params = jzero.checkpoint.restore(options.checkpoint, like=(state, params))
    first = int(state.step)
    print(
        f"process {me} of {count} (start {os.environ.get('JZERO_RESTART', 0)}) begins at step "
        f"{first} on {mesh.shape['replica']} x {mesh.shape['data']} devices"
    )

    loss = float("nan")
    for step, whole in enumerate(batches(options.steps)):
        if step < first:
            continue
        # Here every process could make the whole batch; a real loader reads these rows only.
        rows = jzero.distributed.local_rows(mesh, len(whole["y"]))
        mine = jax.tree.map(lambda x, rows=rows: np.asarray(x)[rows], whole)
        params, state, loss = train_step(params, state, jzero.distributed.global_batch(mine, mesh))
        if options.checkpoint is not None and (step + 1) % SAVE_EVERY == 0:
            jzero.checkpoint.save(options.checkpoint, state, params)
    if me == 0:
        print(f"{count} processes, {mesh.size} devices: loss {float(loss):.6f}")
    return float(loss)


if __name__ == "__main__":
    main()
