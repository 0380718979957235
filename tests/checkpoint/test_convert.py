"""Checkpoints from one form into another: every pair, by names, without a process group."""

import json
import pickle

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

import flatshard
from flatshard.checkpoint import CheckpointError, convert
from flatshard.checkpoint.convert import FORMS, form_of
from flatshard.cli import main
from tests.dist.models import batches, loss_of, make_net


def trained(seed=0):
    model = make_net(seed, depth=1)
    model.register_buffer("seen", torch.tensor(3))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loss_of(model, next(batches(1, 4))).backward()
    optimizer.step()
    return model, optimizer


def loaded(path, form):
    """A new model and optimizer with what is in a checkpoint, loaded as one would without this tool."""
    model, optimizer = trained(seed=1)
    if form == "flatshard":
        flatshard.checkpoint.load(path, model, optimizer)
    elif form == "safetensors":
        flatshard.checkpoint.load_safetensors(model, path)
    elif form == "torch":
        found = torch.load(path, weights_only=True)
        model.load_state_dict(found.get("model", found))
    else:
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        model.load_state_dict(state["model"])
    return model, optimizer


def written(folder, form, model, optimizer):
    """A checkpoint of each form by the tools that make it."""
    path = folder / f"written-{form}"
    names = {parameter: name for name, parameter in model.named_parameters()}
    groups = [{**g, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups]
    state = {"state": {names[p]: entry for p, entry in optimizer.state.items()}, "param_groups": groups}
    if form == "flatshard":
        flatshard.checkpoint.save(path, model, optimizer, extra={"step": 7})
    elif form == "dcp":
        dcp.save({"model": model.state_dict(), "optimizer": state}, checkpoint_id=path, no_dist=True)
    elif form == "safetensors":
        flatshard.checkpoint.export_safetensors(model, path, max_shard_size=2000)
    else:
        path = folder / "written.pt"
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, path)
    return path


@pytest.mark.parametrize("source", FORMS)
def test_every_form_into_every_other(tmp_path, source):
    model, optimizer = trained()
    path = written(tmp_path, source, model, optimizer)
    assert form_of(path) == source
    for target in FORMS:
        made = tmp_path / f"made-{target}"
        convert(path, made, to=target)
        assert form_of(made) == target
        if target == "flatshard" and source == "safetensors":
            fresh, _ = trained(seed=1)
            flatshard.checkpoint.load(made, fresh)
        else:
            fresh, other = loaded(made, target)
        for (name, one), two in zip(fresh.state_dict().items(), model.state_dict().values()):
            assert torch.equal(one, two), (target, name)
        if target == "flatshard" and source != "safetensors":
            for one, two in zip(fresh.parameters(), model.parameters()):
                for key, value in optimizer.state[two].items():
                    assert torch.equal(other.state[one][key], value), key
    assert not [left for left in tmp_path.iterdir() if left.name.startswith(".")]


def _saved_with_extra(rank, world, folder):
    flatshard.checkpoint.save(folder / "flatshard", torch.nn.Linear(2, 2), extra={"step": 7, "rank": rank})
    if rank == 0:  # one rank of a job may convert
        convert(folder / "flatshard", folder / "alone", to="flatshard")


def test_extra_is_that_of_rank_0_after_any_conversions(ranks, tmp_path):
    ranks(2, _saved_with_extra, tmp_path)
    for source, target in (("flatshard", "dcp"), ("dcp", "torch"), ("torch", "again"), ("again", "twice")):
        convert(tmp_path / source, tmp_path / target, to=target if target in FORMS else "flatshard")
    everything = torch.load(tmp_path / "torch", weights_only=True)
    assert everything["extra_of_ranks"] == [{"step": 7, "rank": 0}, {"step": 7, "rank": 1}]
    for path in ("alone", "again", "twice"):
        assert flatshard.checkpoint.load(tmp_path / path, torch.nn.Linear(2, 2)) == {"step": 7, "rank": 0}


def test_names_change_with_the_optimizers(tmp_path):
    model, optimizer = trained()
    wrapped = torch.nn.Module()
    wrapped.module = model
    names = {parameter: name for name, parameter in wrapped.named_parameters()}
    groups = [{**g, "params": [names[p] for p in g["params"]]} for g in optimizer.param_groups]
    state = {"state": {names[p]: entry for p, entry in optimizer.state.items()}, "param_groups": groups}
    dcp.save({"model": wrapped.state_dict(), "optimizer": state}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    (tmp_path / "names.json").write_text(json.dumps({"module.head.weight": "module.tail.weight"}))
    status = main(
        [
            *("convert", str(tmp_path / "theirs"), str(tmp_path / "ours.pt")),
            *("--rename", r"^module\.=", "--rename", "^tail=head", "--names", str(tmp_path / "names.json")),
        ]
    )
    assert status == 0
    found = torch.load(tmp_path / "ours.pt", weights_only=True)
    # a name in full is taken as it is; patterns are for the others
    expected = [name if name != "head.weight" else "module.tail.weight" for name in model.state_dict()]
    assert list(found["model"]) == expected
    assert set(found["optimizer"]["state"]) == {n for n in expected if n != "seen"}
    assert set(found["optimizer"]["param_groups"][0]["params"]) == {n for n in expected if n != "seen"}


def test_what_cannot_be_done_is_said(tmp_path, capsys):
    model, optimizer = trained()
    path = written(tmp_path, "torch", model, optimizer)
    with pytest.raises(CheckpointError, match="exists"):
        convert(path, path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        convert(tmp_path / "nothing", tmp_path / "made")
    with pytest.raises(CheckpointError, match="a name that another tensor has"):
        convert(path, tmp_path / "made", rename=[(r"norm\.(weight|bias)", "norm")])
    with pytest.raises(ValueError, match="regular expression"):
        convert(path, tmp_path / "made", rename=[("(", "")])
    (tmp_path / "text.pt").write_text("no checkpoint")
    with pytest.raises(CheckpointError, match=r"torch\.save"):
        convert(tmp_path / "text.pt", tmp_path / "made")
    assert main(["convert", str(path), str(tmp_path / "made"), "--rename", "x"]) == 2
    assert "PATTERN=NEW" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
    assert not [left for left in tmp_path.iterdir() if left.name.startswith(".")]


def test_one_file_of_safetensors(tmp_path):
    model, optimizer = trained()
    convert(written(tmp_path, "torch", model, optimizer), tmp_path / "whole.safetensors")
    convert(tmp_path / "whole.safetensors", tmp_path / "again.pt")
    found = torch.load(tmp_path / "again.pt", weights_only=True)
    assert all(map(torch.equal, found.values(), model.state_dict().values()))


def test_weights_are_kept_beside_the_name_of_the_model(tmp_path):
    model, _ = trained()
    torch.save({"state_dict": model.state_dict(), "model": "Net"}, tmp_path / "theirs.pt")
    convert(tmp_path / "theirs.pt", tmp_path / "made.pt")
    found = torch.load(tmp_path / "made.pt", weights_only=True)["model"]
    assert all(map(torch.equal, found.values(), model.state_dict().values()))


def test_an_index_of_an_earlier_torch(tmp_path):
    """Up to 2.2 the description of a tensor was a class of another module, and there was less beside it."""
    model, _ = trained()
    dcp.save({"model": model.state_dict()}, checkpoint_id=tmp_path / "old", no_dist=True)
    index = pickle.loads((tmp_path / "old" / ".metadata").read_bytes())
    for entry in index.state_dict_metadata.values():
        entry.properties = TensorProperties(dtype=entry.properties.dtype)
    del index.storage_meta, index.version
    (tmp_path / "old" / ".metadata").write_bytes(pickle.dumps(index))
    convert(tmp_path / "old", tmp_path / "new.pt")
    found = torch.load(tmp_path / "new.pt", weights_only=True)["model"]
    assert all(map(torch.equal, found.values(), model.state_dict().values()))
