"""Tables of which rank holds which part of a tensor, shared by all tensors that are cut in the same way.

A model has thousands of tensors and few ways to cut them: blocks repeat, and a weight and its moments are cut alike. A
*table* is one way: the boxes of all ranks. Every rank sends its distinct boxes and one number per tensor. The numbers
repeat from block to block, so they compress well.
"""

from __future__ import annotations

import base64
import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Box = tuple[Sequence[int], Sequence[int]]  # offsets, sizes


def pack_boxes(keys: Iterable[str], boxes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]) -> dict[str, Any]:
    """The boxes that one rank holds of the tensors ``keys``, as JSON."""
    known: dict[Any, int] = {}
    numbers = np.array([known.setdefault(boxes.get(key), len(known)) for key in keys], dtype="<u4")
    return {"boxes": list(known), "numbers": base64.b64encode(zlib.compress(numbers.tobytes())).decode()}


def merge_boxes(
    shapes: Sequence[tuple[int, ...]], packed: Iterable[dict[str, Any]]
) -> tuple[list[int], list[list[tuple[int, Sequence[int], Sequence[int]]]]]:
    """The number of each tensor's table, and the tables: rank, offsets and sizes of each part.

    ``packed``: the results of `pack_boxes` on all ranks, for tensors of these shapes.
    """
    known: dict[Any, int] = {}
    tables = np.array([known.setdefault(shape, len(known)) for shape in shapes], dtype=np.int64)
    seen: dict[str, Any] = {}
    ranks: list[tuple[list[Box | None], Any]] = []
    for each in packed:
        text = each["numbers"]
        if text not in seen:
            numbers = seen[text] = np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype="<u4")
            # Tensors share a table if every rank has the same box of each of them.
            pairs = tables * len(each["boxes"]) + numbers
            tables = np.unique(pairs, return_inverse=True)[1].reshape(-1)
        ranks.append((each["boxes"], seen[text]))
    made = []
    for tensor in np.unique(tables, return_index=True)[1].tolist():
        boxes = ((rank, held[numbers[tensor]]) for rank, (held, numbers) in enumerate(ranks))
        made.append([(rank, *box) for rank, box in boxes if box is not None])
    return tables.tolist(), made
