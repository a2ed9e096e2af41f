"""The shard axis lies where links are fast, the replica axis across."""

import dataclasses
import random
from typing import Any

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import AxisType

from jzero.distributed import make_mesh


@dataclasses.dataclass(frozen=True)
class Fake:
    """What make_mesh reads of a device."""

    id: int
    process_index: int
    platform: str = "cpu"
    slice_index: int | None = None
    device_kind: str = "fake"


def shuffled(devices: list[Any]) -> list[Any]:
    return random.Random(0).sample(devices, len(devices))


def cpus(processes: int, each: int) -> list[Fake]:
    """As JAX numbers them: 2048 ids a process, one slice."""
    return [Fake(2048 * p + i, p, slice_index=0) for p in range(processes) for i in range(each)]


def gpus(hosts: int, each: int, domain: int = 1) -> list[Fake]:
    """A process each; ``domain`` hosts that NVLink joins are one slice."""
    return [
        Fake(each * h + i, each * h + i, "cuda", h // domain)
        for h in range(hosts)
        for i in range(each)
    ]


def numbers(mesh: jax.sharding.Mesh, what: str = "id") -> list[Any]:
    return np.vectorize(lambda d: getattr(d, what))(mesh.devices).tolist()


def test_one_axis_keeps_domains_together():
    mesh = make_mesh(devices=shuffled(cpus(3, 2)))
    assert mesh.axis_names == ("data",)
    assert numbers(mesh) == [0, 1, 2048, 2049, 4096, 4097]
    assert numbers(make_mesh(devices=shuffled(gpus(2, 4)))) == list(range(8))


def test_two_axes():
    mesh = make_mesh("shard", "copy", devices=shuffled(cpus(3, 2)), axis_types=AxisType.Explicit)
    assert mesh.axis_names == ("copy", "shard")
    assert mesh.axis_types == (AxisType.Explicit, AxisType.Explicit)
    assert numbers(mesh) == [[0, 1], [2048, 2049], [4096, 4097]]
    # Hosts of GPUs, although each GPU has a process of its own; NVLink domains of two hosts.
    assert numbers(make_mesh(replica_axis="r", devices=shuffled(gpus(2, 4)))) == [
        [0, 1, 2, 3],
        [4, 5, 6, 7],
    ]
    mesh = make_mesh(replica_axis="r", devices=shuffled(gpus(4, 2, domain=2)))
    assert numbers(mesh, "slice_index") == [[0] * 4, [1] * 4]
    # One domain: one replica.
    assert make_mesh(replica_axis="r", devices=cpus(1, 4)).devices.shape == (1, 4)


def test_a_given_size_of_the_shard_axis():
    devices = shuffled(gpus(4, 4))
    parts = make_mesh(replica_axis="r", shards=2, devices=devices)
    assert numbers(parts, "slice_index") == [[h, h] for h in range(4) for _ in range(2)]
    wider = make_mesh(replica_axis="r", shards=8, devices=devices)
    assert numbers(wider, "slice_index") == [[0] * 4 + [1] * 4, [2] * 4 + [3] * 4]
    assert make_mesh(shards=16, devices=devices).devices.shape == (16,)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        pytest.param({"devices": []}, r"devices=\[\] holds no device", id="none"),
        pytest.param({"shards": 2}, r"shards=2 of 8 .*name a replica_axis", id="left-over"),
        pytest.param({"replica_axis": "data"}, r"both 'data'; give two names", id="one-name"),
        pytest.param({"replica_axis": "r", "shards": 3}, r"shards=3 must divide the 4", id="3"),
        pytest.param({"replica_axis": "r", "shards": 0}, r"shards=0 must divide", id="0"),
        pytest.param({"replica_axis": "r", "shards": 16}, r"shards=16 must .*all 8", id="16"),
        pytest.param({"replica_axis": "r", "shards": True}, r"shards=True must", id="bool"),
        pytest.param(
            {"replica_axis": "r", "devices": [*cpus(2, 2), Fake(9, 1)]},
            r"domains of \[2, 3\] devices do not make a mesh",
            id="unequal",
        ),
    ],
)
def test_what_makes_no_mesh(arguments: dict[str, Any], error: str):
    with pytest.raises(ValueError, match=error):
        make_mesh(**{"devices": cpus(2, 4), **arguments})


def test_here():
    mesh = make_mesh()
    assert list(mesh.devices) == jax.devices()
    assert mesh.axis_types == (AxisType.Auto,)


def test_the_torus_of_a_tpu(tpu_topology: Any):
    def neighbours(row: Any) -> bool:
        steps = zip(row, np.roll(row, -1), strict=True)
        return all(
            sum(min(abs(x - y), 4 - abs(x - y)) for x, y in zip(a.coords, b.coords, strict=True))
            == 1
            for a, b in steps
        )

    devices = shuffled(list(tpu_topology("v5e:4x4").devices))
    assert neighbours(make_mesh(devices=devices).devices)
    [row] = make_mesh(replica_axis="r", devices=devices).devices
    assert neighbours(row)
    # Two slices: the replica axis crosses the network between them, the shard axis does not.
    two = topologies.get_topology_desc("v5e:4x4", "tpu", num_slices=2).devices
    mesh = make_mesh(replica_axis="r", devices=shuffled(list(two)))
    assert numbers(mesh, "slice_index") == [[0] * 16, [1] * 16]
    assert all(neighbours(row) for row in mesh.devices)
