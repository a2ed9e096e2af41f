"""State dicts as safetensors files, written a bucket at a time; readable without jzero.

The format: eight bytes of little-endian length, a JSON header of that length with dtype, shape and
byte range of each tensor, then the bytes.
"""

from __future__ import annotations

import json
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jzero._ckpt_dict import INNER, KEY, STEP, inner_of, prefix_of, shapes_of, stream_of
from jzero._ckpt_format import CheckpointError, absolute
from jzero._ckpt_save import whole
from jzero._ckpt_view import view_of

__all__ = ["read_safetensors", "write_safetensors"]

FORMAT = "jzero-state-dict"
_NAMES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
}
_DTYPES = {short: name for name, short in _NAMES.items()}


def write_safetensors(path: str | os.PathLike[str], state: Any, params: Any) -> None:
    """Write ``state_dict(state, params)`` as one safetensors file, a bucket at a time.

    A tensor is called by its parameter's path and quantity, as in ``layers/0/kernel/exp_avg``;
    the step and what is no tensor is in the metadata. The file appears whole or not at all. With
    several processes all call it, and the first writes.

    Raises:
      ValueError: as ``state_dict``; a dtype that safetensors lacks, by path.

    Collectives: as ``state_dict``.
    """
    view = view_of(state, params)
    step = int(whole(view.leaves[f"{prefix_of(view)}step"]))
    inner = {f"{INNER}/{name}": value for name, value in inner_of(view)}
    metadata = {"format": FORMAT, STEP: str(step)}
    for name, leaf in view.leaves.items():
        if jnp.issubdtype(getattr(leaf, "dtype", np.float32), jax.dtypes.prng_key):
            metadata[f"{KEY}/{name.removeprefix('params/')}"] = str(jax.random.key_impl(leaf))
    header: dict[str, Any] = {"__metadata__": metadata}
    at = 0
    listed = [(f"{p}/{q}", shape, dtype) for p, q, shape, dtype in shapes_of(view)]
    listed += [(name, value.shape, value.dtype) for name, value in inner.items()]
    for name, shape, dtype in listed:
        if np.dtype(dtype).name not in _NAMES:
            raise ValueError(f"safetensors has no dtype for {name!r}, which is {dtype}")
        size = math.prod(shape) * np.dtype(dtype).itemsize
        header[name] = {
            "dtype": _NAMES[np.dtype(dtype).name],
            "shape": list(shape),
            "data_offsets": [at, at + size],
        }
        at += size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    own = jax.process_index() == 0
    target = absolute(path)
    temporary = target.with_name(f".{target.name}.part")
    with open(temporary if own else os.devnull, "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _, entry in stream_of(view):
            for quantity, values in entry.items():
                if quantity != KEY:
                    file.write(np.ascontiguousarray(values).reshape(-1).view(np.uint8).data)
        for value in inner.values():
            file.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        file.flush()
        if own:
            os.fsync(file.fileno())
    if own:
        temporary.replace(target)


def read_safetensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The state dict in a file that :func:`write_safetensors` wrote, for ``load_state_dict``.

    Arrays are views of the file, read from disk when they are used.

    Raises:
      CheckpointError: another kind of file, or a damaged one, by name.
    """
    path = absolute(path)
    try:
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            if size > path.stat().st_size:
                raise ValueError("its header is longer than the file")
            header = json.loads(file.read(size))
        metadata = header.pop("__metadata__", {})
        if metadata.get("format") != FORMAT:
            raise ValueError(f"its metadata does not say {FORMAT!r}")
        end = max([entry["data_offsets"][1] for entry in header.values()], default=0)
        if path.stat().st_size != 8 + size + end:
            raise ValueError(f"it has {path.stat().st_size} bytes and should have {8 + size + end}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} is no safetensors file of jzero's: {error}") from error
    data = np.memmap(path, np.uint8, "r", 8 + size) if end else np.empty(0, np.uint8)
    found: dict[str, Any] = {STEP: int(metadata[STEP])}
    for name, entry in header.items():
        a, b = entry["data_offsets"]
        values = data[a:b].view(jnp.dtype(_DTYPES[entry["dtype"]])).reshape(entry["shape"])
        if name.startswith(f"{INNER}/"):
            found.setdefault(INNER, {})[name.removeprefix(f"{INNER}/")] = values
            continue
        parameter, _, quantity = name.rpartition("/")
        found.setdefault(parameter, {})[quantity] = values
    for name, impl in metadata.items():
        if name.startswith(f"{KEY}/"):
            found[name.removeprefix(f"{KEY}/")][KEY] = impl
    return found
