"""Deferred tensors: what is done with them shows at once, and is done when their values come."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from flatshard.checkpoint.deferred_tensors import DeferredFile, defer


def _state():
    rng = torch.Generator().manual_seed(0)
    fused = torch.randn(4, 6, 2, generator=rng)
    state = {"fused": fused, "halves": [None], "tied": fused, "bias": torch.arange(3)}
    state["gate"] = torch.randn(2, generator=rng)
    return {**state, "scale": torch.tensor(2.0, dtype=torch.bfloat16)}


def _prepared(state):
    """What libraries do with a state dict before they write it."""
    made = {}
    for number, expert in enumerate(state["fused"].chunk(2, dim=1)[0].contiguous().unbind(0)):
        made[f"experts.{number}.up"] = expert.squeeze().contiguous()
    made["both"] = torch.cat([state["gate"], state["bias"].to("cpu", torch.float32), torch.ones(2)])
    made["turned"] = state["fused"].reshape(24, 2).t().contiguous().half()
    made["scale"], made["bias"] = state["scale"], state["bias"]
    return made


def test_a_file_is_what_it_would_be_with_values(tmp_path):
    state = _state()
    deferred = defer(state)
    assert deferred["halves"] == [None]
    wanted, found = _prepared(state), _prepared(deferred)
    for name, value in wanted.items():
        assert (found[name].shape, found[name].dtype, found[name].device) == (value.shape, value.dtype, value.device)
    save_file(wanted, tmp_path / "wanted", {"format": "pö"})
    file = DeferredFile(tmp_path / "found", found, {"format": "pö"})
    assert file.needs == {"fused", "bias", "gate", "scale"}
    file.write((name, state[name]) for name in sorted(file.needs))
    assert (tmp_path / "found").read_bytes() == (tmp_path / "wanted").read_bytes()
    assert load_file(tmp_path / "found").keys() == wanted.keys()


def test_who_shares_memory_can_be_seen():
    deferred, others = defer(_state()), defer(_state())
    fused = deferred["fused"]
    assert fused.data_ptr() == deferred["tied"].data_ptr()
    rows = fused.unbind(0)
    assert rows[1].untyped_storage().data_ptr() == fused.untyped_storage().data_ptr()
    assert rows[1].data_ptr() == fused.data_ptr() + 12 * 4
    assert rows[1].untyped_storage().nbytes() == 4 * 12 * 4
    assert fused.clone().untyped_storage().data_ptr() not in {fused.data_ptr(), others["fused"].data_ptr()}


def test_what_needs_values_is_refused(tmp_path):
    gate = defer(_state())["gate"]
    for use in (lambda: gate.add_(1), lambda: torch.save(gate, tmp_path / "x"), gate.tolist, lambda: gate.to("meta")):
        with pytest.raises((NotImplementedError, TypeError, RuntimeError)):
            use()


def test_a_file_that_lacks_something_is_not_there(tmp_path):
    state = _state()
    file = DeferredFile(tmp_path / "found", {"a": defer(state)["gate"]}, None)
    with pytest.raises(RuntimeError, match=r"\['a'\]"):
        file.write([])
    assert not list(tmp_path.iterdir())
