"""What encoding costs in accuracy and in bytes; no processes."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from flatshard.buffer.blocks import Coder, decode_rows, encode_rows, uniform
from flatshard.layout import Holding, encodable, plan, wire_of

LAYER = [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), (14336, 4096), (14336, 4096), (4096, 14336), (4096,)]


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Small tensors are slower on several threads of a busy machine."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def sizes(seed: int) -> torch.Tensor:
    """Rows of numbers from 1e-30 to 1e30, with zeros and equal ones among them."""
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(64, 300, generator=generator) * 10.0 ** torch.linspace(-30, 30, 64)[:, None]
    rows[:, 7] = 0.0
    rows[5] = rows[5, 0]
    rows[6] = 0.0
    return rows


def each(scales: torch.Tensor, row: int, block: int) -> torch.Tensor:
    return scales.double().repeat_interleave(block, dim=1)[:, :row]


@pytest.mark.parametrize("block", [32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int8_is_off_by_half_a_scale_and_the_rounding_of_the_compute_dtype(block, dtype):
    rows = sizes(block)
    codes, scales = encode_rows(rows, "int8", block)
    scale = each(scales, 300, block)
    found = decode_rows(codes, scales, block).to(dtype).double()
    # A quotient is rounded before it is rounded to a code.
    bound = scale / 2 * (1 + 2.0**-14) + rows.double().abs() * torch.finfo(dtype).eps
    assert ((found - rows.double()).abs() <= bound).all()
    assert (scale <= 1.01 * rows.double().abs().amax(1, keepdim=True) / 127 + 2.0**-126).all()


def test_float8_is_off_by_its_own_rounding():
    rows = sizes(0)
    codes, scales = encode_rows(rows, "float8", 128)
    found = decode_rows(codes, scales, 128).double()
    bound = torch.maximum(rows.double().abs() * 2.0**-4, each(scales, 300, 128) * 2.0**-10) * (1 + 2.0**-14)
    assert ((found - rows.double()).abs() <= bound).all()


def test_a_code_times_its_scale_is_exact():
    """Then it does not matter who multiplies, or whether that is fused with a sum."""
    for code in ("int8", "float8"):
        codes, scales = encode_rows(sizes(1), code, 128)
        exact = codes.float().double() * each(scales, 300, 128)
        assert torch.equal(decode_rows(codes, scales, 128).double(), exact)


def test_stochastic_rounding_is_right_on_average():
    draws, block = 1000, 128
    rows = torch.randn(2, 300, generator=torch.Generator().manual_seed(0))
    total = torch.zeros(rows.shape, dtype=torch.float64)
    for seed in range(10):
        noise = uniform(torch.tensor(seed * 977), 0, 100 * rows.numel()).view(-1, 300)
        codes, scales = encode_rows(rows.repeat(100, 1), "int8", block, noise)
        total += decode_rows(codes, scales, block).double().view(100, 2, 300).sum(0)
    scales = scales[:2]
    scale = each(scales, 300, block)
    above = rows.double() / scale - (rows.double() / scale).floor()
    sigma = scale * (above * (1 - above) / draws).sqrt()
    assert ((total / draws - rows.double()).abs() <= 5 * sigma + 1e-6 * scale).all()
    # And it is not the nearest code in disguise.
    nearest = decode_rows(*encode_rows(rows, "int8", block), block).double()
    assert ((total / draws - rows.double()).abs().mean() < 0.2 * (nearest - rows.double()).abs().mean()).all()


def test_random_numbers_of_neighbours_and_of_draws_are_independent():
    many = torch.stack([uniform(torch.tensor(seed), 0, 4096) for seed in range(64)]).double() - 0.5
    assert many.mean().abs() < 5 / math.sqrt(12 * many.numel())
    for one, other in ((many[:, 1:], many[:, :-1]), (many[1:], many[:-1])):
        assert (12 * one * other).mean().abs() < 5 / math.sqrt(one.numel())


@pytest.mark.parametrize("code", ["int8", "float8"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_stays_so_and_leaves_other_blocks_alone(code, value):
    rows = torch.randn(4, 300)
    rows[2, 130] = value
    codes, scales = encode_rows(rows, code, 128)
    found = decode_rows(codes, scales, 128)
    assert not found[2, 128:256].isfinite().any()
    found[2, 128:256] = 0.0
    assert found.isfinite().all()


@pytest.mark.parametrize("layout", ["tensor", "flat"])
@pytest.mark.parametrize("shards", [1, 7, 8, 64])
def test_a_layer_takes_at_most_52_percent_of_the_bytes_of_bf16(layout, shards):
    marks = [len(shape) > 1 for shape in LAYER]
    planned = plan(LAYER, shards, layout=layout, apart=marks)
    wire = wire_of(planned, encodable(planned, marks), 128, 2)
    assert list(wire.encoded) == marks
    assert wire.piece <= 0.52 * 2 * planned.run_numel


shapes = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), min_size=1, max_size=5)


@settings(max_examples=60, deadline=None)
@given(shapes, st.integers(1, 5), st.sampled_from(["tensor", "flat"]), st.sampled_from(["int8", "float8"]))
def test_what_was_gathered_is_what_each_tensor_gives_alone(shapes, shards, layout, code):
    """Whatever it is packed with, and however many pieces it is cut into."""
    marks = [len(shape) > 1 for shape in shapes]
    planned = plan(shapes, shards, layout=layout, apart=marks)
    encoded = encodable(planned, marks)
    assert list(encoded) == marks
    wire = wire_of(planned, encoded, 16, 2)
    coder = Coder(wire, code, torch.bfloat16)
    tensors = [torch.randn(shape) for shape in shapes]
    sent = []
    for shard in range(shards):
        local = torch.zeros(planned.shard_numel)
        runs = [
            local[start : start + segment.piece]
            for start, segment in zip(planned.run_starts(1), planned.segments)
            if segment.piece
        ]
        for slot, tensor, window in zip(planned.slots, tensors, planned.windows(shard, 1)):
            first, rows = planned.rows(slot, shard, 1)
            local.as_strided(window.shape, window.stride, window.offset).copy_(tensor[first : first + rows])
        out = torch.zeros(wire.piece, dtype=torch.uint8)
        coder.encode(runs, Holding(shard, 1), out)
        sent.append(out)
    full = torch.full((planned.buffer_numel(shards),), math.nan)
    coder.decode(torch.cat(sent).view(1, -1), Holding(0, shards), full)
    for mark, tensor, window in zip(marks, tensors, planned.windows(0, shards)):
        found = full.as_strided(window.shape, window.stride, window.offset)
        rows = tensor.view(len(tensor), -1)
        wanted = decode_rows(*encode_rows(rows, code, 16), 16).view(tensor.shape) if mark else tensor.bfloat16().float()
        assert torch.equal(found, wanted)
