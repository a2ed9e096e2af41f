"""How fast are checkpoints, against plain Orbax and against TensorStore's own speed?

python benchmarks/checkpoint.py [--mb 256] [--devices 8] [--rounds 5] [--json FILE]

All ways store the same bytes, float32 parameters and Adam's two moments of a GPT whose parameters
take --mb MiB, to the same folder, in turn, and read them back from disk (the kernel's cache of
the files is dropped first):

  tensorstore   one uncompressed array of so many bytes in chunks of 16 MiB, from host memory to
                host memory: no checksums, no devices
  orbax         StandardCheckpointer, the tree unsharded on one device
  jzero         checkpoint.save of the same on one device
  jzero all     parameters on all devices, moments sharded over them: a restore places --devices
                copies of the parameters
  jzero behind  the same with wait=False

Per way: seconds until save returns (what the training loop stands still for), until the checkpoint
is on disk, and for the restore until the arrays are on their devices; MB/s (10**6 bytes) of the
two; the most by which the process grew meanwhile (resident memory, sampled every 2 ms; a restore
grows by what it restores); bytes on disk. Medians over rounds, of which the first is left out.
"""

import argparse
import contextlib
import ctypes
import dataclasses
import json
import os
import pathlib
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jzero
from jzero import checkpoint
from jzero_kernels.adam.shapes import gpt_leaves

WAYS = ("tensorstore", "orbax", "jzero", "jzero all", "jzero behind")


@contextlib.contextmanager
def growth(found: dict[str, float], name: str) -> Generator[None]:
    """Notes by how many bytes the process grew at most."""
    with contextlib.suppress(OSError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)
    page = os.sysconf("SC_PAGE_SIZE")

    def resident() -> int:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * page

    start = most = resident()
    stop = threading.Event()

    def watch() -> None:
        nonlocal most
        while not stop.wait(0.002):
            most = max(most, resident())

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        found[name] = max(most, resident()) - start


def forget(folder: pathlib.Path) -> int:
    """Drop a folder's files from the kernel's cache; their bytes."""
    os.sync()  # what is not on disk yet would stay in the cache
    total = 0
    for path in folder.rglob("*"):
        if path.is_file():
            total += path.stat().st_size
            with path.open("rb") as file:
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return total


def measure(
    folder: pathlib.Path, save: Callable[[], Callable[[], None]], restore: Callable[[], Any]
) -> dict[str, float]:
    """One round: ``save`` returns when the loop may go on, its result when all is on disk."""
    found: dict[str, float] = {}
    with growth(found, "save_growth_bytes"):
        start = time.perf_counter()
        finish = save()
        found["stall_s"] = time.perf_counter() - start
        finish()
        found["save_s"] = time.perf_counter() - start
    found["disk_bytes"] = forget(folder)
    with growth(found, "restore_growth_bytes"):
        start = time.perf_counter()
        jax.block_until_ready(restore())
        found["restore_s"] = time.perf_counter() - start
    shutil.rmtree(folder)
    return found


def ways(base: pathlib.Path, count: int, devices: int) -> tuple[dict[str, Any], int]:
    """For each way its folder, save and restore; and the bytes of the state."""
    shapes = gpt_leaves(count)
    rng = np.random.default_rng(0)
    host = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}

    def sharded(number: int) -> tuple[Any, Any, Any]:
        """Mesh, parameters and state on so many devices."""
        mesh = jax.make_mesh((number,), ("data",), (AxisType.Auto,), devices=jax.devices()[:number])
        params = jax.device_put(host, NamedSharding(mesh, P()))
        tx = jzero.adamw(1e-3, zero=jzero.ZeroConfig(mesh=mesh))
        state: Any = tx.init(params)
        # As random as Orbax's tree, though nothing here is compressed.
        inner = [
            jax.device_put(rng.normal(size=x.shape).astype(np.float32), x.sharding)
            for x in jax.tree.leaves(state.inner)
        ]
        inner = jax.tree.unflatten(jax.tree.structure(state.inner), inner)
        return mesh, params, dataclasses.replace(state, inner=inner)

    def ours(name: str, made: tuple[Any, Any, Any], wait: bool) -> Any:
        mesh, params, state = made
        like = jax.eval_shape(lambda: (state, params))
        return (
            base / name,
            lambda: checkpoint.save(base / name, state, params, wait=wait).wait,
            lambda: checkpoint.restore(base / name, like, mesh=mesh),
        )

    every = sharded(devices)
    alone = jax.devices()[0]
    tree = jax.device_put({"params": host, "mu": host, "nu": host}, alone)
    abstract = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), tree
    )
    size = 3 * sum(x.nbytes for x in host.values())
    raw = rng.integers(0, 2**63, size // 8).view(np.uint8)
    checkpointer = ocp.StandardCheckpointer()

    def spec() -> dict[str, Any]:
        grid = {"name": "regular", "configuration": {"chunk_shape": [16 * 2**20]}}
        return {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{base / 'tensorstore'}/"},
            "metadata": {"shape": [raw.size], "data_type": "uint8", "chunk_grid": grid},
        }

    def save_tensorstore() -> Callable[[], None]:
        ts.open(spec(), create=True).result().write(raw).result()
        return lambda: None

    def save_orbax() -> Callable[[], None]:
        checkpointer.save(base / "orbax", tree)
        return checkpointer.wait_until_finished

    return {
        "tensorstore": (
            base / "tensorstore",
            save_tensorstore,
            lambda: ts.open(spec(), open=True).result().read().result(),
        ),
        "orbax": (
            base / "orbax",
            save_orbax,
            lambda: checkpointer.restore(base / "orbax", abstract),
        ),
        "jzero": ours("jzero", sharded(1), True),
        "jzero all": ours("all", every, True),
        "jzero behind": ours("behind", every, False),
    }, size


def run(options: argparse.Namespace) -> dict[str, Any]:
    base = pathlib.Path(tempfile.mkdtemp(dir=options.folder))
    try:
        made, size = ways(base, int(options.mb * 2**20) // 4, options.devices)
        rounds: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for number in range(options.rounds + 1):
            for way in WAYS[number % len(WAYS) :] + WAYS[: number % len(WAYS)]:
                figures = measure(*made[way])
                if number:
                    rounds[way].append(figures)
    finally:
        shutil.rmtree(base, ignore_errors=True)
    table = {
        way: {name: statistics.median(r[name] for r in every) for name in every[0]}
        for way, every in rounds.items()
    }
    for figures in table.values():
        figures["save_mb_per_s"] = size / 1e6 / figures["save_s"]
        figures["restore_mb_per_s"] = size / 1e6 / figures["restore_s"]
    return {"state_bytes": size, "ways": table, "rounds": rounds}


def show(report: dict[str, Any]) -> None:
    orbax = report["ways"]["orbax"]
    print(f"{report['state_bytes'] / 1e6:,.0f} MB of state")
    print(
        f"{'way':>13} {'stall s':>8} {'save s':>7} {'MB/s':>6} {'x orbax':>8} {'grew MB':>8} "
        f"{'restore s':>10} {'MB/s':>6} {'x orbax':>8} {'grew MB':>8} {'disk MB':>8}"
    )
    for way, f in report["ways"].items():
        print(
            f"{way:>13} {f['stall_s']:8.2f} {f['save_s']:7.2f} {f['save_mb_per_s']:6.0f} "
            f"{orbax['save_s'] / f['save_s']:8.2f} {f['save_growth_bytes'] / 1e6:8.0f} "
            f"{f['restore_s']:10.2f} {f['restore_mb_per_s']:6.0f} "
            f"{orbax['restore_s'] / f['restore_s']:8.2f} {f['restore_growth_bytes'] / 1e6:8.0f} "
            f"{f['disk_bytes'] / 1e6:8.0f}"
        )


def main(argv: list[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=float, default=256, help="MiB of parameters")
    parser.add_argument("--devices", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", help="where to write; None: the system's temporary folder")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args(argv)
    with contextlib.suppress(RuntimeError):  # JAX has started: what is there must do
        jax.config.update("jax_num_cpu_devices", options.devices)
    report = {
        "command": "python benchmarks/checkpoint.py " + " ".join(argv or sys.argv[1:]),
        "host": f"{platform.machine()}, {os.cpu_count()} cores",
        "device": jax.devices()[0].device_kind,
        "versions": {m.__name__: m.__version__ for m in (jax, ocp)},
        **run(options),
        "load_average": os.getloadavg()[0],  # what else this machine did meanwhile
    }
    show(report)
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    return report


if __name__ == "__main__":
    main()
