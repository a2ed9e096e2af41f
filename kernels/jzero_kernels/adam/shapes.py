"""Named sizes and dtypes, shared by tests and benchmark: what is timed is what is tested."""

import math
from typing import NamedTuple

MIB = 2**20


class Policy(NamedTuple):
    """The dtypes of one update, by name."""

    p: str
    m: str
    v: str
    g: str
    out: str


POLICIES: dict[str, Policy] = {
    # The usual one: float32 master and moments, bfloat16 on both wires; 28 bytes a parameter.
    "mixed": Policy("float32", "float32", "float32", "bfloat16", "bfloat16"),
    "float32": Policy("float32", "float32", "float32", "float32", "float32"),
    "bfloat16": Policy("bfloat16", "bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    "bf16_moments": Policy("float32", "bfloat16", "bfloat16", "bfloat16", "bfloat16"),
    "no_master": Policy("bfloat16", "float32", "float32", "bfloat16", "float32"),
    "float16_wire": Policy("float32", "float32", "float32", "float16", "float16"),
    "float8_wire": Policy("float32", "float32", "float32", "bfloat16", "float8_e5m2"),
    "float16": Policy("float16", "float16", "float16", "float16", "float16"),
}

# Lengths that break things: nothing, one lane more or less, a partial tile, a partial block.
LENGTHS: tuple[int, ...] = (0, 1, 127, 128, 1000, 1024, 13 * 1024, 2**17 + 1, 2**18 + 5 * 1024)

# The length of a float32 bucket of 100 MB, rounded up to whole tiles for 8 shards.
BUCKET_100MB = -(-100_000_000 // 4 // 8192) * 8192

# Float32 bytes of one array of the shard, for the benchmark.
BENCHMARK_BYTES: dict[str, int] = {
    "1MB": MIB,
    "4MB": 4 * MIB,
    "16MB": 16 * MIB,
    "64MB": 64 * MIB,
    "100MB": 4 * BUCKET_100MB,
    "256MB": 256 * MIB,
    "1GB": 1024 * MIB,
    "4GB": 4096 * MIB,
}


def gpt_leaves(n: int, width: int = 768, vocabulary: int = 50304) -> dict[str, tuple[int, ...]]:
    """Shapes of the leaves of a GPT of about n parameters: an embedding and as many layers as fit.

    Args:
      n: parameters wanted; at least one layer is given, and a narrower model below 8 million.
      width: of the model.
      vocabulary: rows of the embedding, left out when they alone would exceed n / 2.
    """
    while width > 64 and 12 * width * width > n:
        width //= 2
    leaves: dict[str, tuple[int, ...]] = {}
    if vocabulary * width <= n // 2:
        leaves["embedding"] = (vocabulary, width)
    layer = {
        "ln1": (width,),
        "qkv": (width, 3 * width),
        "attention_out": (width, width),
        "ln2": (width,),
        "mlp_in": (width, 4 * width),
        "mlp_out": (4 * width, width),
    }
    left = n - sum(math.prod(shape) for shape in leaves.values())
    per_layer = 12 * width * width + 2 * width
    for i in range(max(1, round(left / per_layer))):
        leaves |= {f"layer{i}/{name}": shape for name, shape in layer.items()}
    return leaves
