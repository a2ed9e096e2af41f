"""Imports point only downwards; the layout is pure Python; kernels know arrays and nothing else."""

import ast
import graphlib
import importlib.util
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest

# The table of layers: a module imports modules of lower layers only. Within one layer it may import
# its neighbours where no circle arises, except in L4, whose modules know nothing of each other.
LAYERS: dict[str, tuple[str, ...]] = {
    "L0": (
        "_layout",
        "_precision",
        "_config",
        "_errors",
        "_paths",
        "_mesh",
        "_ckpt_commit",
        "_ckpt_format",
        "_ckpt_place",
        "_ckpt_ranges",
        "_ckpt_stream",
        "_cluster",
        "_domains",
        "_launch",
        "_meeting",
        "_processes",
        "_watch",
        "_hlo",
        "_hlo_collectives",
        "_hlo_cost",
        "_ready_models",
        "_targets",
    ),
    "L1": (
        "_pack",
        "_collectives",
        "_codec",
        "_memory",
        "_groups",
        "_batch",
        "_program",
        "_loops",
        "_ckpt_codec",
        "_spread",
        "_options",
        "_roofline",
        "_report_result",
    ),
    "L2": ("_measure", "_update", "_elementwise", "_loss_scale", "_gather", "_replicate"),
    "L3": (
        "_state",
        "_shards",
        "_plans",
        "_homes",
        "_step",
        "_machine",
        "_broadcast",
        "_ddp_step",
        "_flax",
        "_ckpt_dict",
        "_ckpt_files",
        "_ckpt_foreign",
        "_ckpt_manager",
        "_ckpt_match",
        "_ckpt_orbax",
        "_ckpt_restore",
        "_ckpt_safetensors",
        "_ckpt_save",
        "_ckpt_source",
        "_ckpt_view",
    ),
    "L4": (
        "_transform",
        "_gradients",
        "_lazy",
        "_scan",
        "_multi_steps",
        "_norms",
        "ddp",
        "checkpoint",
        "distributed",
    ),
    # Programs made of the faces.
    "L5": ("_report_programs", "_report_search", "_report_cli", "report", "cli"),
}
FACES = "L4"
# A subcommand stands for a face and imports it where it runs: `jzero launch` must not load what
# `jzero report` needs.
COMMANDS = ("cli",)
STDLIB_ONLY = ("_layout",)
# What a module may import while jzero is being imported; the rest is imported where it is used.
REQUIRED = {"jax", "numpy", "optax", "jzero", "jzero_kernels"}
OPTIONAL = {"flax", "matplotlib", "orbax", "rich", "tensorstore"}
KERNELS_MAY_IMPORT = {"jax", "numpy", "jzero_kernels"}
# jax.NAME that no kernel uses: a kernel is a function from arrays to arrays.
KERNELS_MAY_NOT_USE = {
    "make_mesh",
    "set_mesh",
    "shard_map",
    "sharding",
    "tree",
    "tree_util",
}
MAX_LINES = 450

LAYER_OF = {module: layer for layer, modules in LAYERS.items() for module in modules}


def package_root(package: str) -> Path:
    """The folder of an installed package: the source tree's or the wheel's."""
    spec = importlib.util.find_spec(package)
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(next(iter(spec.submodule_search_locations)))


def source_files(package: str) -> list[Path]:
    return sorted(package_root(package).rglob("*.py"))


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), filename=str(path))


def imported(tree: ast.AST, package: str) -> Iterator[str]:
    """The dotted names that imports in a module of `package` mention, wherever they stand."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1]
            base = ".".join([*(parents if node.level else []), *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def imported_at_start(tree: ast.Module, package: str) -> Iterator[str]:
    """The names imported when the module is: not in functions, not for type checkers only."""
    pending: list[ast.AST] = list(tree.body)
    while pending:
        node = pending.pop()
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield from imported(node, package)
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            pending.extend(node.orelse)
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            pending.extend(ast.iter_child_nodes(node))


MODULES = {
    ".".join(path.relative_to(package_root("jzero")).with_suffix("").parts): path
    for path in source_files("jzero")
    if path.stem not in ("__init__", "__main__")
}


def modules_of_jzero(names: Iterable[str]) -> set[str]:
    """Modules of jzero among dotted names; importing from `jzero` itself counts as its __init__."""
    parts = [name.split(".") for name in names if name.split(".")[0] == "jzero"]
    return {p[1] if len(p) > 1 and p[1] in MODULES else "__init__" for p in parts}


def test_every_module_has_a_layer():
    assert set(MODULES) <= set(LAYER_OF)


@pytest.mark.parametrize("module", sorted(set(MODULES) & set(LAYER_OF)))
def test_imports_point_downwards(module: str):
    order = list(LAYERS)
    own = order.index(LAYER_OF[module])
    for other in modules_of_jzero(imported(parse(MODULES[module]), "jzero")) - {module}:
        assert other != "__init__", f"{module} imports from the package's front: name the module"
        assert other in LAYER_OF, f"{module} imports {other}, which has no layer"
        theirs = order.index(LAYER_OF[other])
        assert theirs <= own, f"{module} ({order[own]}) imports {other} ({order[theirs]})"
        if module not in COMMANDS:
            assert theirs < own or order[own] != FACES, f"{module} and {other} are both {FACES}"


@pytest.mark.parametrize("module", COMMANDS)
def test_commands_import_where_they_run(module: str):
    assert modules_of_jzero(imported_at_start(parse(MODULES[module]), "jzero")) == set()


def test_no_circles():
    graph = {
        module: modules_of_jzero(imported(parse(path), "jzero")) - {module}
        for module, path in MODULES.items()
    }
    graphlib.TopologicalSorter(graph).prepare()  # raises CycleError


@pytest.mark.parametrize("module", STDLIB_ONLY)
def test_standard_library_only(module: str):
    names = set(imported(parse(MODULES[module]), "jzero"))
    foreign = {n for n in names if n.split(".")[0] not in sys.stdlib_module_names}
    assert {n for n in foreign if not modules_of_jzero([n]) <= set(STDLIB_ONLY)} == set()


def test_optional_packages_are_imported_where_they_are_used():
    for module, path in MODULES.items():
        tops = {name.split(".")[0] for name in imported_at_start(parse(path), "jzero")}
        assert tops - set(sys.stdlib_module_names) <= REQUIRED, module


def test_importing_jzero_imports_no_optional_package():
    code = "import sys, jzero, jzero_kernels; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert OPTIONAL & set(done.stdout.split()) == set()


def test_kernels_know_arrays_and_nothing_else():
    for path in source_files("jzero_kernels"):
        tree = parse(path)
        package = ".".join(path.parent.relative_to(package_root("jzero_kernels").parent).parts)
        names = set(imported(tree, package))
        tops = {name.split(".")[0] for name in names} - set(sys.stdlib_module_names)
        assert tops <= KERNELS_MAY_IMPORT, path
        used = {name for name in names if name.startswith("jax.")} | {
            f"jax.{node.attr}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "jax"
        }
        assert {name.split(".")[1] for name in used} & KERNELS_MAY_NOT_USE == set(), path


@pytest.mark.parametrize("package", ["jzero", "jzero_kernels"])
def test_modules_hold_one_thing(package: str):
    lines = {
        str(path): len(path.read_text(encoding="utf-8").splitlines())
        for path in source_files(package)
    }
    assert {path: n for path, n in lines.items() if n > MAX_LINES} == {}
