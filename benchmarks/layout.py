"""How long does planning the buckets of a large model take? Python time, no arrays.

python benchmarks/layout.py [leaves] prints the best of five for plan_layout alone and for the
fingerprint, whose sum should stay below 0.1 s for 10,000 leaves.
"""

import sys
import time

from jzero._layout import Leaf, plan_layout


def transformer(count: int) -> list[Leaf]:
    """Leaves like those of an unrolled transformer: ten to a layer, of four sizes."""
    shapes = ((1024, 3072), (3072,), (1024, 1024), (1024,), (1024, 4096), (4096,), (4096, 1024))
    return [
        Leaf(
            ("layers", i // 10, ("attention", "mlp")[i % 10 > 4], f"w{i % 10}"),
            shapes[i % len(shapes)],
            "bfloat16" if i % 3 else "float32",
            2 if i % 3 else 4,
            "" if i % 2 else "no decay",
        )
        for i in range(count)
    ]


def best(fn, repeats: int = 5) -> float:
    """Least seconds of several runs: the machine's noise only ever adds."""
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        fn()
        times.append(time.perf_counter() - start)
    return min(times)


def main() -> None:
    most = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    print(f"{'leaves':>8} {'buckets':>8} {'plan ms':>8} {'+ fingerprint ms':>17} {'us/leaf':>8}")
    for count in sorted({most // 100, most // 10, most} - {0}):
        leaves = transformer(count)

        def plan():
            return plan_layout(leaves, shards=256, cap_bytes=100 * 2**20)  # noqa: B023

        seconds = best(plan)
        with_print = best(lambda: plan().fingerprint)
        print(
            f"{count:>8} {len(plan().buckets):>8} {seconds * 1e3:>8.1f} {with_print * 1e3:>17.1f} "
            f"{seconds / count * 1e6:>8.2f}"
        )


if __name__ == "__main__":
    main()
