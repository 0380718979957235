"""Programs written for PyTorch's `fully_shard` run on ours: `install`, the command `run`, and FLATSHARD=1."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_managed_modules
from torch.distributed.fsdp._fully_shard._fsdp_state import FSDPState
from torch.distributed.pipelining import Schedule1F1B

import flatshard
from flatshard.cli import main
from tests.bench.script import as_command, free_port
from tests.fsdp2.test_pipeline import _pipeline

_ROOT = Path(__file__).parents[2]
_NAMES = ("fully_shard", "FSDPModule", "MixedPrecisionPolicy", "CPUOffloadPolicy", "register_fsdp_forward_method")


def _theirs():
    import torch.distributed._composable.fsdp as composable
    import torch.distributed.fsdp as public
    import torch.distributed.fsdp._fully_shard as package

    return public, package, composable


def _installed(rank, world):
    """What the names are before, within and after; what a module that had imported them has; and training by them."""
    homes = _theirs()
    mine = types.ModuleType("somebodys")
    mine.shard, mine.other = homes[0].fully_shard, nn.Linear
    sys.modules["somebodys"] = mine
    before = [getattr(home, name) for home in homes for name in _NAMES if hasattr(home, name)]
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    log = logging.getLogger("flatshard")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        flatshard.install()
        flatshard.install()  # nothing that it has not done
        assert len([record for record in records if "torch.distributed.fsdp" in record.getMessage()]) == 2
        within = [getattr(home, name) for home in homes for name in _NAMES if hasattr(home, name)]
        assert within == [getattr(flatshard, value.__name__) for value in before]
        assert (mine.shard, mine.other) == (flatshard.fully_shard, nn.Linear)
        from torch.distributed.fsdp import FSDPModule, fully_shard

        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (*model, model):
            fully_shard(module)
        assert isinstance(model, FSDPModule)
        state = fully_shard.state(model)
        assert state is model._get_fsdp_state()
        assert state._is_root is None
        state._lazy_init()
        assert (state._is_root, model[0]._get_fsdp_state()._is_root) == (True, False)
        assert state._state_ctx.all_states == [each._get_fsdp_state() for each in (model, *model)]
        assert state._fsdp_param_group is None
        (group,) = model[0]._get_fsdp_state()._fsdp_param_groups
        assert (group._module_fqn, [p._param_fqn for p in group.fsdp_params]) == ("0", ["0.weight", "0.bias"])
        assert (type(group.mesh_info), group.mesh_info.shard_mesh_size) == (FSDPMeshInfo, world)
        assert state._comm_ctx.all_gather_stream is group.comm_ctx.all_gather_stream is None  # there are none on CPU
        with pytest.raises(AttributeError, match=r"the attribute _post_forward of PyTorch's private FSDPState"):
            state._post_forward  # noqa: B018
        assert isinstance(state, FSDPState)
        assert _get_managed_modules((model,)) == [model]  # the others have units of their own
        model(torch.ones(2, 4)).sum().backward()
        shown = [group.is_unsharded]
        for change in (model[0].unshard, model[0].reshard):
            change()
            shown.append(group.is_unsharded)
        assert shown == [False, True, False]
    finally:
        log.removeHandler(handler)
        flatshard.uninstall()
        del sys.modules["somebodys"]
    assert [getattr(home, name) for home in homes for name in _NAMES if hasattr(home, name)] == before
    assert mine.shard is before[0]


def test_names_become_ours_and_theirs_again(ranks):
    ranks(2, _installed)


def _on_meta():
    """What a forward of a model without values raises, with the `fully_shard` that is torch's now."""
    from torch.distributed.fsdp import fully_shard

    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for module in (*model, model):
        fully_shard(module)
    with pytest.raises(RuntimeError) as raised:
        model(torch.ones(2, 4))
    return model, str(raised.value).partition("]")[0]


def _meta(rank, world):
    _, control = _on_meta()
    flatshard.install()
    try:
        model, ours = _on_meta()
    finally:
        flatshard.uninstall()
    assert ours == control
    assert ours.endswith("['0.weight', '0.bias'")
    flatshard.materialize(model)
    model(torch.ones(2, 4)).sum().backward()
    with torch.device("meta"):
        own = nn.Linear(4, 4)
    with pytest.warns(UserWarning, match="first forward initialises"):
        flatshard.fully_shard(own)(torch.ones(2, 4))


def test_a_forward_on_the_meta_device_is_refused_as_by_fsdp2(ranks):
    ranks(2, _meta)


def _piped(rank, world):
    flatshard.install()
    try:
        import torch.distributed.pipelining.stage as stage

        assert stage.FSDPModule is flatshard.FSDPModule
        _pipeline(rank, world, Schedule1F1B)
    finally:
        flatshard.uninstall()


@pytest.mark.limit(120)
def test_a_pipeline_whose_fully_shard_is_ours_equals_one_process(ranks):
    ranks(4, _piped)


_SCRIPT = """
import sys
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard
torch.distributed.init_process_group("gloo")
model = fully_shard(torch.nn.Linear(4, 4))
model(torch.ones(2, 4)).sum().backward()
print(*sys.argv[1:], fully_shard.__module__, isinstance(model, FSDPModule))
"""


def _run(rank, world, path, port):
    try:
        return as_command(rank, world, port, lambda: main(["run", path, "--steps", "3"]))
    finally:
        flatshard.uninstall()


def test_a_script_runs_on_ours(ranks, tmp_path):
    path = tmp_path / "script.py"
    path.write_text(_SCRIPT)
    assert ranks(2, _run, str(path), free_port()) == ["--steps 3 flatshard.api True\n"] * 2


def test_a_variable_of_the_environment_installs(tmp_path):
    """As an installed flatshard has it in its metadata."""
    import tomllib

    points = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]["entry-points"]["torch.backends"]
    known = tmp_path / "flatshard-0.dist-info"
    known.mkdir()
    (known / "METADATA").write_text("Metadata-Version: 2.1\nName: flatshard\nVersion: 0\n")
    lines = [f"{name} = {value}" for name, value in points.items()]
    (known / "entry_points.txt").write_text("\n".join(["[torch.backends]", *lines]))
    code = "from torch.distributed.fsdp import fully_shard; print(fully_shard.__module__)"
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{_ROOT}", "FLATSHARD": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, capture_output=True, check=True)
    assert done.stdout.strip() == "flatshard.api"
