"""The environment of every test: eight simulated devices, and no mercy.

Warnings are errors (`pyproject.toml`), numpy-style rank promotion raises, and so does implicit
dtype promotion under the fixture `strict`.
"""

import os

# --- before jax is imported; processes that a test starts inherit it ---

# JZERO_TEST_PLATFORMS=cuda runs the tests that can on real devices.
os.environ["JAX_PLATFORMS"] = os.environ.get("JZERO_TEST_PLATFORMS", "cpu")
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
).strip()
# Nothing compiled in another run may answer for this one.
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
os.environ["JAX_ENABLE_COMPILATION_CACHE"] = "false"
# libtpu compiles for TPU pods here: it need not look for a TPU, nor be alone on the machine.
os.environ["TPU_SKIP_MDS_QUERY"] = "1"
os.environ["ALLOW_MULTIPLE_LIBTPU_LOAD"] = "1"

import functools
import importlib.util
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

import hypothesis
import jax
import pytest
from jax.experimental import topologies

jax.config.update("jax_numpy_rank_promotion", "raise")

# An example may compile, so time says nothing about it.
hypothesis.settings.register_profile(
    "ci",
    deadline=None,
    derandomize=True,
    max_examples=50,
    suppress_health_check=[hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.register_profile(
    "explore",
    hypothesis.settings.get_profile("ci"),
    derandomize=False,
    max_examples=1000,
    print_blob=True,
)
hypothesis.settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))


@pytest.fixture
def strict() -> Iterator[None]:
    """Implicit dtype promotion raises.

    For a whole module: `pytestmark = pytest.mark.usefixtures("strict")`. It is not on everywhere
    because optax's bias correction promotes; around a call of optax, use
    `with jax.numpy_dtype_promotion("standard")`.
    """
    with jax.numpy_dtype_promotion("strict"):
        yield


AxisTypes = Literal["auto", "explicit"]


@pytest.fixture(scope="session")
def make_mesh() -> Callable[..., jax.sharding.Mesh]:
    """A factory of meshes over the first devices.

    make_mesh(8), make_mesh((2, 4)), make_mesh((2, 4), ("a", "b"), types="explicit"). One axis is
    called "data", two are called ("replica", "data"), unless `names` says otherwise.
    """

    def make(
        shape: int | Sequence[int] = 8,
        names: Sequence[str] | None = None,
        types: AxisTypes = "auto",
    ) -> jax.sharding.Mesh:
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        names = ("replica", "data")[-len(shape) :] if names is None else tuple(names)
        devices = jax.devices()
        if math.prod(shape) > len(devices):
            pytest.skip(f"a mesh {shape} needs more than this machine's {len(devices)} devices")
        axis_type = {
            "auto": jax.sharding.AxisType.Auto,
            "explicit": jax.sharding.AxisType.Explicit,
        }[types]
        return jax.make_mesh(
            shape, names, axis_types=(axis_type,) * len(shape), devices=devices[: math.prod(shape)]
        )

    return make


@pytest.fixture(scope="session")
def tpu_topology() -> Callable[[str], topologies.TopologyDescription]:
    """A factory of descriptions of TPU pods to compile for, such as tpu_topology("v5e:4x4")."""
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("compiling for TPU needs libtpu: pip install 'jzero[tpu]'")
    return functools.cache(lambda name: topologies.get_topology_desc(name, "tpu"))
