"""What a traced program says about its results, read from its jaxpr before anything runs.

For each result: the inputs that it depends on, whether it is zero whatever the inputs, whether it
may differ between devices, and where in the program it is produced. The answers are safe: a
dependence that cannot be excluded is reported, a zero only where it is certain.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jex

__all__ = ["Fact", "analyze", "scan_counts"]

_VARIES = 1  # bit 0 of a mask; input i has bit i + 1


class Fact(NamedTuple):
    """What is known of one value.

    Attributes:
      mask: bit 0: may differ between devices; bit i + 1: depends on input i.
      zero: is zero, always.
      when: position of the equation that produces it, and of those inside of that one; ``()``
        for what is there from the start. Tuples compare in program order.
    """

    mask: int = 0
    zero: bool = False
    when: tuple[int, ...] = ()

    @property
    def varies(self) -> bool:
        return bool(self.mask & _VARIES)

    def depends_on(self, index: int) -> bool:
        return bool(self.mask >> (index + 1) & 1)


def analyze(
    closed: Any, varying: Collection[int], axes: Collection[str], constants_vary: bool = False
) -> list[Fact]:
    """Facts of each output of a ``ClosedJaxpr``.

    Args:
      closed: the program.
      varying: indices of inputs that may differ between devices.
      axes: mesh axes of these devices; a collective over all of them ends the difference.
      constants_vary: whether values that the program closes over may differ between devices.
    """
    inputs = [
        Fact((1 << (i + 1)) | (_VARIES if i in varying else 0))
        for i in range(len(closed.jaxpr.invars))
    ]
    constants = [Fact(_VARIES if constants_vary else 0)] * len(closed.jaxpr.constvars)
    return _walk(closed.jaxpr, inputs, frozenset(axes), constants)


def _walk(
    jaxpr: Any, inputs: Sequence[Fact], axes: frozenset[str], constants: Sequence[Fact] = ()
) -> list[Fact]:
    known: dict[Any, Fact] = dict(zip(jaxpr.invars, inputs, strict=True))
    known |= dict(zip(jaxpr.constvars, constants, strict=False))

    def fact(atom: Any) -> Fact:
        if isinstance(atom, jex.Literal):
            return Fact(zero=_is_zero(atom.val))
        return known.get(atom, Fact())  # a constant

    for i, eqn in enumerate(jaxpr.eqns):
        given = [fact(atom) for atom in eqn.invars]
        for var, out in zip(eqn.outvars, _equation(eqn, given, axes), strict=True):
            known[var] = out._replace(when=(i, *out.when))
    return [fact(atom) for atom in jaxpr.outvars]


def _equation(eqn: Any, given: list[Fact], axes: frozenset[str]) -> list[Fact]:
    """Facts of an equation's outputs; ``when`` is relative to the equation."""
    name = eqn.primitive.name
    if name == "scan":
        return _scan(eqn, given, axes)
    if name == "while":
        return _while(eqn, given, axes)
    if name == "cond":
        return _cond(eqn, given, axes)
    inner = _called(eqn)
    if inner is not None:
        return _walk(inner, [f._replace(when=()) for f in given], axes)
    mask = 0
    for f in given:
        mask |= f.mask
    if name == "axis_index":
        mask |= _VARIES
    elif name in _EQUALIZE and axes <= _axes_of(eqn):
        mask &= ~_VARIES
    zero = name in _KEEP_ZERO and bool(given) and all(f.zero for f in given[: _KEEP_ZERO[name]])
    return [Fact(mask, zero)] * len(eqn.outvars)


def _scan(eqn: Any, given: list[Fact], axes: frozenset[str]) -> list[Fact]:
    body = eqn.params["jaxpr"].jaxpr
    consts, carries = scan_counts(eqn)
    seen = [Fact(f.mask) for f in given]
    while True:
        outs = _walk(body, seen, axes)
        carry = [
            Fact(f.mask | out.mask)
            for f, out in zip(seen[consts : consts + carries], outs, strict=False)
        ]
        if carry == seen[consts : consts + carries]:
            # Every result of a loop is there at its end.
            return carry + [Fact(out.mask, out.zero) for out in outs[carries:]]
        seen[consts : consts + carries] = carry


def scan_counts(eqn: Any) -> tuple[int, int]:
    """How many operands of a scan every iteration is given whole, and how many it carries: the
    first ones, in this order."""
    body = eqn.params["jaxpr"].jaxpr
    # By shape, since jax 0.12 has no counts: what is scanned over, or stacked, has a dim more.
    scanned = sum(a.aval.ndim > b.aval.ndim for a, b in zip(eqn.invars, body.invars, strict=True))
    stacked = sum(a.aval.ndim > b.aval.ndim for a, b in zip(eqn.outvars, body.outvars, strict=True))
    carries = len(eqn.outvars) - stacked
    return len(eqn.invars) - scanned - carries, carries


def _while(eqn: Any, given: list[Fact], axes: frozenset[str]) -> list[Fact]:
    p = eqn.params
    nc, nb = p["cond_nconsts"], p["body_nconsts"]
    cond_consts = [Fact(f.mask) for f in given[:nc]]
    body_consts = [Fact(f.mask) for f in given[nc : nc + nb]]
    carry = [Fact(f.mask) for f in given[nc + nb :]]
    while True:
        (test,) = _walk(p["cond_jaxpr"].jaxpr, cond_consts + carry, axes)
        outs = _walk(p["body_jaxpr"].jaxpr, body_consts + carry, axes)
        # How often the body runs decides the result too.
        new = [Fact(f.mask | out.mask | test.mask) for f, out in zip(carry, outs, strict=True)]
        if new == carry:
            return carry
        carry = new


def _cond(eqn: Any, given: list[Fact], axes: frozenset[str]) -> list[Fact]:
    index, *operands = given
    operands = [f._replace(when=()) for f in operands]
    branches = [_walk(b.jaxpr, operands, axes) for b in eqn.params["branches"]]
    results: list[Fact] = []
    for outs in zip(*branches, strict=True):
        mask = index.mask
        for out in outs:
            mask |= out.mask
        results.append(Fact(mask, all(out.zero for out in outs)))
    return results


def _called(eqn: Any) -> Any:
    """The jaxpr that an equation calls once on its own operands, such as a ``jit``'s."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        inner = eqn.params.get(name)
        inner = getattr(inner, "jaxpr", inner)
        if hasattr(inner, "eqns"):
            fits = len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars)
            return inner if fits else None
    return None


def _axes_of(eqn: Any) -> frozenset[str]:
    if eqn.params.get("axis_index_groups") is not None:
        return frozenset()
    names = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    return frozenset(names if isinstance(names, (tuple, list)) else (names,))


def _is_zero(value: Any) -> bool:
    return getattr(value, "ndim", 0) == 0 and not isinstance(value, str) and bool(value == 0)


_EQUALIZE = {
    "psum",
    "psum2",
    "psum_invariant",
    "pmax",
    "pmin",
    "all_gather",
    "all_gather_invariant",
}

# Primitives that make zeros of zeros, and how many of their operands count (None: all).
_KEEP_ZERO: dict[str, int | None] = {
    "add": None,
    "add_any": None,
    "broadcast_in_dim": 1,
    "concatenate": None,
    "convert_element_type": None,
    "copy": None,
    "copy_p": None,
    "dynamic_slice": 1,
    "expand_dims": None,
    "neg": None,
    "pad": None,
    "pcast": None,
    "psum": None,
    "psum_invariant": None,
    "pvary": None,
    "reduce_sum": None,
    "reshape": 1,
    "sharding_constraint": None,
    "slice": None,
    "squeeze": None,
    "sub": None,
    "transpose": None,
}
