"""Gradients of stacked layers, reduced inside the loop that computes them.

[Note: reduced in the loop]
The backward pass of a scan over layers is a scan too, which stacks the gradients of its layers into
arrays as large as all of them::

    grads = scan(layer, ...)                        # (layers, ...): a full gradient a device
    shards = reduce_scatter(grads)

A stacked bucket is a row a layer, each reduced by itself, so the two lines may change places::

    shards = scan(reduce_scatter of layer, ...)     # (layers, row_shard): no full gradient exists

Autodiff cannot be told so by the loss, which is given whole parameters: their cotangents have their
shapes. So the gradient is traced to a program (a jaxpr), and the loop in it is run with another
body. It is found from its results: a gradient that a scan stacks, that nothing else reads, and that
is given back as it is, or cast. A bucket whose gradients do not all come out of one such loop
(layers that are used twice, or outside of the loop) is left alone, to be reduced after it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jex
import jax.numpy as jnp
from jax import Array, lax

from jzero._collectives import after
from jzero._layout import Bucket
from jzero._mesh import Axes
from jzero._program import scan_counts

__all__ = ["reduce_in_loops"]

Reduce = Callable[[Bucket, dict[str, Array], Any], Array]


def reduce_in_loops(
    fn: Callable[[dict[str, Array]], tuple[Any, dict[str, Array]]],
    trained: dict[str, Array],
    buckets: Sequence[Bucket],
    reduce: Reduce,
    axes: Axes,
    operand: Callable[[Any], Any] = lambda rest: None,
) -> tuple[Any, dict[str, Array], dict[int, Array]]:
    """``fn(trained)``, with the gradients of stacked buckets reduced in the loops that make them.

    Args:
      fn: from parameters by path to ``(rest, grads)``, gradients by path; a pure function.
      trained: its argument.
      buckets: those of all gradients; stacked ones are reduced in loops where possible, others
        where their gradients are known before such a loop, to be gone when it runs.
      reduce: ``reduce(bucket, leaves, operand)``, from gradients by path to a shard; of a stacked
        bucket from those of one layer, while the loop's body is traced, which stacks the shards.
      axes: over which shards vary.
      operand: from ``rest`` to the array that ``reduce`` is given, or to None. A loop that begins
        before that array is known is left alone.

    Returns:
      ``rest``; the gradients that are still to be reduced, by path; and, by number of the bucket,
      what ``reduce`` made of the others.
    """
    closed, shapes = jax.make_jaxpr(fn, return_shape=True)(trained)
    program = _Program(closed.jaxpr)
    results, treedef = closed.jaxpr.outvars, jax.tree.structure(shapes)
    rest, grads = treedef.unflatten(range(len(results)))
    number = operand(rest)
    given = None if number is None else results[number]
    made = {path: results[i] for path, i in grads.items()}
    sinks = [_sink(program, bucket, made) for bucket in buckets if bucket.layers]
    chosen = [s for s in sinks if s is not None and s.at[0] > program.made_at(given)]
    others = {b.number: {s.path: made[s.path] for s in b.slots} for b in buckets if not b.layers}
    run = _Run(reduce, axes, given, buckets, others)
    outs = run.evaluate(closed.jaxpr, closed.consts, jax.tree.leaves(trained), chosen)
    rest, grads = treedef.unflatten(outs)
    gone = {slot.path for bucket in buckets if bucket.number in run.shards for slot in bucket.slots}
    return rest, {p: g for p, g in grads.items() if p not in gone}, run.shards


# ---------------------------------------------------------------- finding the loops


class _Sink(NamedTuple):
    """A bucket whose gradients come out of one loop.

    Attributes:
      bucket: the bucket.
      at: number of the equation that is the loop; or of a call, and then of the loop in what it
        calls, and so on.
      stacked: by path, the number of the loop's result.
      casts: by path, the dtypes to which that is cast, one after another.
    """

    bucket: Bucket
    at: tuple[int, ...]
    stacked: dict[str, int]
    casts: dict[str, tuple[Any, ...]]


class _Origin(NamedTuple):
    at: tuple[int, ...]
    result: int
    casts: tuple[Any, ...]


class _Program:
    """A jaxpr, with what is asked about it more than once."""

    def __init__(self, jaxpr: Any) -> None:
        self.jaxpr = jaxpr
        self.maker = {v: (i, k) for i, e in enumerate(jaxpr.eqns) for k, v in enumerate(e.outvars)}
        self.reads = Counter(_variables(x for e in jaxpr.eqns for x in e.invars))
        self.reads.update(_variables(jaxpr.outvars))
        self.called: dict[int, _Program] = {}

    def made_at(self, var: Any) -> int:
        """Number of the equation that makes a variable; -1 for what is there from the start."""
        return -1 if var is None or isinstance(var, jex.Literal) else self.maker.get(var, (-1,))[0]

    def origin(self, var: Any, layers: int) -> _Origin | None:
        """The loop that stacks a variable, if nothing but casts stands between and nothing reads
        it beside."""
        casts: tuple[Any, ...] = ()
        while not isinstance(var, jex.Literal) and var in self.maker and self.reads[var] == 1:
            number, result = self.maker[var]
            eqn = self.jaxpr.eqns[number]
            name = eqn.primitive.name
            if name == "convert_element_type":
                casts = (eqn.params["new_dtype"], *casts)
                (var,) = eqn.invars
            elif name == "scan":
                fits = result >= scan_counts(eqn)[1] and eqn.params["length"] == layers
                return _Origin((number,), result, casts) if fits else None
            elif (inner := _called(eqn)) is not None:
                if number not in self.called:
                    self.called[number] = _Program(inner.jaxpr)
                found = self.called[number].origin(inner.jaxpr.outvars[result], layers)
                return found and _Origin((number, *found.at), found.result, found.casts + casts)
            else:
                return None
        return None


def _sink(program: _Program, bucket: Bucket, results: dict[str, Any]) -> _Sink | None:
    """The loop that all gradients of a bucket come out of, if there is one."""
    origins: dict[str, _Origin] = {}
    for slot in bucket.slots:
        origin = program.origin(results[slot.path], bucket.layers)
        if origin is None:
            return None
        origins[slot.path] = origin
    places = {origin.at for origin in origins.values()}
    if len(places) != 1:
        return None
    return _Sink(
        bucket,
        places.pop(),
        {path: origin.result for path, origin in origins.items()},
        {path: origin.casts for path, origin in origins.items()},
    )


def _called(eqn: Any) -> Any:
    """The program of an equation that only calls it: a ``jit`` inside of the loss that asks for no
    layout or sharding of its own."""
    if eqn.primitive.name not in ("jit", "pjit"):
        return None
    asked = [x for name in ("in_shardings", "out_shardings") for x in eqn.params.get(name, ())]
    asked_layouts = [x for name in ("in_layouts", "out_layouts") for x in eqn.params.get(name, ())]
    plain = all(type(x).__name__ == "UnspecifiedValue" for x in asked)
    return eqn.params["jaxpr"] if plain and all(x is None for x in asked_layouts) else None


def _varying(x: Any, axes: Axes) -> frozenset[str]:
    return frozenset(jax.typeof(x).manual_axis_type.varying) & frozenset(axes.names)


def _variables(atoms: Any) -> list[Any]:
    return [x for x in atoms if not isinstance(x, jex.Literal)]


# ---------------------------------------------------------------- running them


class _Run:
    """One evaluation of a program; ``shards`` is what was reduced on the way."""

    def __init__(
        self,
        reduce: Reduce,
        axes: Axes,
        given: Any,
        buckets: Sequence[Bucket],
        others: dict[int, dict[str, Any]],
    ) -> None:
        self.reduce = reduce
        self.axes = axes
        self.buckets = {bucket.number: bucket for bucket in buckets}
        self.others = others
        self.given = None if isinstance(given, jex.Literal) else given
        self.operand = given.val if isinstance(given, jex.Literal) else None
        self.shards: dict[int, Array] = {}

    def evaluate(
        self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any], sinks: Sequence[_Sink]
    ) -> list[Any]:
        """The results of ``jaxpr``; None where a gradient was reduced instead."""
        known: dict[Any, Any] = dict(zip(jaxpr.constvars, consts, strict=True))
        known |= dict(zip(jaxpr.invars, args, strict=True))
        read = set(_variables(jaxpr.outvars))
        read.update(_variables(x for e in jaxpr.eqns for x in e.invars))

        def value(atom: Any) -> Any:
            return atom.val if isinstance(atom, jex.Literal) else known.get(atom)

        def plainly(eqns: list[Any]) -> None:
            """Some equations in a row; a cast of what is no more is left out."""
            made = {v for e in eqns for v in e.outvars}
            taken = {v for e in eqns for v in _variables(e.invars)} - made
            gone = {v for v in taken if v not in known}
            kept: list[Any] = []
            for eqn in eqns:
                if gone.isdisjoint(_variables(eqn.invars)):
                    kept.append(eqn)
                else:
                    gone.update(eqn.outvars)
            outs = [v for e in kept for v in e.outvars if v in read]
            ins = list(taken - gone)
            part = jaxpr.replace(constvars=[], invars=ins, outvars=outs, eqns=kept)
            results = jex.jaxpr_as_fun(jex.ClosedJaxpr(part, ()))(*(known[v] for v in ins))
            known.update(zip(outs, results, strict=True))

        start = 0
        for number in sorted({sink.at[0] for sink in sinks}):
            plainly(jaxpr.eqns[start:number])
            if self.given is not None and self.given in known:
                self.operand = known[self.given]
            eqn, here = jaxpr.eqns[number], [s for s in sinks if s.at[0] == number]
            values = [value(x) for x in eqn.invars]
            values = self._behind(jaxpr, eqn, values, self._reduced(known))
            if eqn.primitive.name == "scan":
                results = self._loop(eqn, values, here)
            else:
                inner = eqn.params["jaxpr"]
                deeper = [s._replace(at=s.at[1:]) for s in here]
                results = self.evaluate(inner.jaxpr, inner.consts, values, deeper)
            known.update((v, x) for v, x in zip(eqn.outvars, results, strict=True) if x is not None)
            start = number + 1
        plainly(jaxpr.eqns[start:])
        return [value(x) for x in jaxpr.outvars]

    def _reduced(self, known: dict[Any, Any]) -> dict[str, Array]:
        """The shards of buckets whose gradients have become known, by a name."""
        new: dict[str, Array] = {}
        for number, variables in list(self.others.items()):
            if all(v in known for v in variables.values() if not isinstance(v, jex.Literal)):
                del self.others[number]
                grads = {
                    path: v.val if isinstance(v, jex.Literal) else known[v]
                    for path, v in variables.items()
                }
                self.shards[number] = self.reduce(self.buckets[number], grads, self.operand)
                new[str(number)] = self.shards[number]
        return new

    def _behind(
        self, jaxpr: Any, eqn: Any, values: list[Any], shards: dict[str, Array]
    ) -> list[Any]:
        """The operands of a loop, which must not begin before these shards are there: what they
        were made of would live as long as the loop runs. One operand is enough: the smallest of
        those that the loop carries, that have the right type, and that are computed."""
        constant = {v for e in jaxpr.eqns if not _variables(e.invars) for v in e.outvars}
        fixed, carried = scan_counts(eqn) if eqn.primitive.name == "scan" else (0, len(values))
        fits = [
            i
            for i, (var, x) in enumerate(zip(eqn.invars, values, strict=True))
            if fixed <= i < fixed + carried
            and not isinstance(var, jex.Literal)
            and var not in constant
            and jnp.issubdtype(jnp.result_type(x), jnp.floating)
            and all(_varying(x, self.axes) >= _varying(s, self.axes) for s in shards.values())
        ]
        if not fits or not shards:
            return values
        least = min(fits, key=lambda i: jnp.size(values[i]))
        ordered = after({"": values[least]}, shards)[""]
        return [ordered if i == least else x for i, x in enumerate(values)]

    def _loop(self, eqn: Any, values: list[Any], sinks: Sequence[_Sink]) -> list[Any]:
        """The results of a scan, None for those that are reduced in it."""
        p = eqn.params
        fixed, carried = scan_counts(eqn)
        body = jex.jaxpr_as_fun(p["jaxpr"])
        sunk = {result for sink in sinks for result in sink.stacked.values()}

        def step(carry: list[Any], xs: list[Any]) -> Any:
            outs = body(*values[:fixed], *carry, *xs)
            shards: list[Array] = []
            for bucket, _, stacked, casts in sinks:
                leaves = {path: outs[result] for path, result in stacked.items()}
                for path, dtypes in casts.items():
                    for dtype in dtypes:
                        leaves[path] = leaves[path].astype(dtype)
                shards.append(self.reduce(bucket, leaves, self.operand))
            ys = [y for i, y in enumerate(outs[carried:], carried) if i not in sunk]
            return outs[:carried], (ys, shards)

        options = {"_split_transpose": p["_split_transpose"]} if p.get("_split_transpose") else {}
        carry, (ys, shards) = lax.scan(
            step,
            values[fixed : fixed + carried],
            values[fixed + carried :],
            length=p["length"],
            reverse=p["reverse"],
            unroll=p["unroll"],
            **options,
        )
        self.shards |= {s.bucket.number: x for s, x in zip(sinks, shards, strict=True)}
        rest = iter(ys)
        stacked = [None if i in sunk else next(rest) for i in range(carried, len(eqn.outvars))]
        return [*carry, *stacked]
