"""What an installation of jzero brings, from the source tree or from a wheel."""

import importlib.metadata
import importlib.resources
import os
import re
from pathlib import Path

import pytest

import jzero
import jzero_kernels

METADATA = importlib.metadata.metadata("jzero")


@pytest.mark.parametrize("package", ["jzero", "jzero_kernels"])
def test_typed(package: str):
    assert importlib.resources.files(package).joinpath("py.typed").is_file()


def test_few_requirements():
    requirements = importlib.metadata.requires("jzero") or []
    always = {re.split(r"[^\w-]", r)[0] for r in requirements if "extra ==" not in r}
    assert always == {"jax", "numpy", "optax"}


def test_extras():
    assert set(METADATA.get_all("Provides-Extra") or []) == {
        "checkpoint",
        "cuda",
        "dev",
        "examples",
        "flax",
        "report",
        "tpu",
    }


def test_licence():
    assert METADATA["License-Expression"] == "Apache-2.0"


@pytest.mark.skipif("JZERO_TEST_WHEEL" not in os.environ, reason="`make wheel-test` sets this")
def test_the_wheel_is_what_is_tested():
    for package in (jzero, jzero_kernels):
        assert package.__file__ is not None
        assert "site-packages" in Path(package.__file__).parts
    files = importlib.metadata.files("jzero") or []
    tops = {file.parts[0] for file in files if not file.parts[0].endswith(".dist-info")}
    assert tops - {".."} == {"jzero", "jzero_kernels"}
    # The one file elsewhere is the command.
    assert [file.name for file in files if file.parts[0] == ".."] == ["jzero"]
