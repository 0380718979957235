"""Which rank holds which part of each tensor, named once for all tensors that are cut in the same way.

A model has thousands of tensors and few ways to cut them: blocks repeat, and so do a weight and its moments. A *table*
is one way, the boxes of all ranks. Every rank says what it holds as its distinct boxes and one number per tensor; these
numbers repeat like the blocks do, and are compressed to next to nothing.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Box = tuple[Sequence[int], Sequence[int]]  # offsets, sizes


def pack_boxes(keys: Iterable[str], boxes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, Any]:
    """What one rank holds of the tensors ``keys``, as JSON."""
    known: dict[Any, int] = {}
    numbers = np.array([known.setdefault(boxes.get(key), len(known)) for key in keys], dtype="<u4")
    return {"boxes": list(known), "numbers": base64.b64encode(zlib.compress(numbers.tobytes())).decode()}


def merge_boxes(
    shapes: Sequence[tuple[int, ...]], packed: Iterable[dict[str, Any]]
) -> tuple[list[int], list[list[tuple[int, Sequence[int], Sequence[int]]]]]:
    """The table of each tensor, by number, and the tables: rank, offsets and sizes of each part.

    ``packed``: what `pack_boxes` has made on each rank, of tensors of these shapes.
    """
    known: dict[Any, int] = {}
    tables = np.array([known.setdefault(shape, len(known)) for shape in shapes], dtype=np.int64)
    seen: dict[str, Any] = {}
    ranks: list[tuple[list[Box | None], Any]] = []
    for each in packed:
        text = each["numbers"]
        if text not in seen:
            numbers = seen[text] = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<u4")
            # Tensors stay in one table as long as every rank has the same box of them.
            pairs = tables * len(each["boxes"]) + numbers
            tables = np.unique(pairs, return_inverse=True)[1].reshape(-1)
        ranks.append((each["boxes"], seen[text]))
    made = []
    for tensor in np.unique(tables, return_index=True)[1].tolist():
        boxes = ((rank, held[numbers[tensor]]) for rank, (held, numbers) in enumerate(ranks))
        made.append([(rank, *box) for rank, box in boxes if box is not None])
    return tables.tolist(), made
