"""Padding of each layout for one transformer layer of well-known models.

python -m benchmarks.layout_waste > docs/layout-waste.md
"""

import sys
import time

from flatshard.layout import plan
from flatshard.layout.planner import _plan

SHARDS = (2, 8, 64, 256, 512, 1000, 1024, 4096)


def layer(hidden: int, ffn: int, kv: int, bias: bool = False) -> list[tuple[int, ...]]:
    """q, k, v, o, gate, up, down, two norms and, where the model has them, the biases of q, k and v."""
    square, narrow, wide = (hidden, hidden), (kv, hidden), (ffn, hidden)
    shapes: list[tuple[int, ...]] = [square, narrow, narrow, square, wide, wide, (hidden, ffn), (hidden,), (hidden,)]
    return shapes + ([(hidden,), (kv,), (kv,)] if bias else [])


LAYERS = {
    "Llama-7B": layer(4096, 11008, 4096),
    "Llama-8B": layer(4096, 14336, 1024),
    "Llama-70B": layer(8192, 28672, 1024),
    "Qwen2.5-7B": layer(3584, 18944, 512, bias=True),
    "Qwen2.5-32B": layer(5120, 27648, 1024, bias=True),
}


def main() -> None:
    print("# What padding costs\n")
    print("Padding of one transformer layer, in percent of its parameters, and the number of segments: a segment is")
    print("cut into equal pieces, one per shard. Made by")
    print("`python -m benchmarks.layout_waste > docs/layout-waste.md`.\n")
    print("| model | layout | " + " | ".join(f"{n} shards" for n in SHARDS) + " |")
    print("|---|---|" + "---|" * len(SHARDS))
    for model, shapes in LAYERS.items():
        for layout in ("tensor", "flat", "auto"):
            plans = [plan(shapes, n, layout=layout) for n in SHARDS]  # type: ignore[arg-type]
            cells = [f"{100 * p.waste:.2f}% / {len(p.segments)}" for p in plans]
            print(f"| {model} | {layout} | " + " | ".join(cells) + " |")


def seconds_to_plan_405b(num_shards: int = 4096) -> float:
    """Planning 126 layers of a 405B-parameter model, its embedding and its head, each anew."""
    begin = time.perf_counter()
    for _ in range(126):
        _plan.cache_clear()
        plan(layer(16384, 53248, 1024), num_shards, layout="flat")
    for _ in range(2):
        plan([(128256, 16384)], num_shards, layout="flat")
    return time.perf_counter() - begin


if __name__ == "__main__":
    main()
    print(f"405B parameters over 4096 shards planned in {seconds_to_plan_405b():.3f} s", file=sys.stderr)
