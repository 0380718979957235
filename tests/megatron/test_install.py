"""`install`: whatever has been imported before it, and with or without Megatron-Core."""

import importlib.util
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CORE = "megatron.core.distributed.fsdp"

# Megatron-Core in small: packages that import one another as its own do.
TREE = {
    "megatron/core/__init__.py": "from megatron.core.distributed import FullyShardedDataParallel",
    "megatron/core/distributed/__init__.py": "from .fsdp.mcore_fsdp_adapter import FullyShardedDataParallel",
    "megatron/core/distributed/fsdp/__init__.py": "from .mcore_fsdp_adapter import FullyShardedDataParallel",
    "megatron/core/distributed/fsdp/mcore_fsdp_adapter.py": f"""
        from {CORE}.src.megatron_fsdp import FSDPDistributedIndex, MegatronFSDP
        from {CORE}.src.megatron_fsdp import utils as helpers
        class FullyShardedDataParallel:
            made_of = lambda self: MegatronFSDP
    """,
    "megatron/core/distributed/fsdp/src/__init__.py": "",
    "megatron/core/distributed/fsdp/src/megatron_fsdp/__init__.py": """
        from .megatron_fsdp import MegatronFSDP
        from .utils import FSDPDistributedIndex
    """,
    "megatron/core/distributed/fsdp/src/megatron_fsdp/megatron_fsdp.py": "class MegatronFSDP: pass",
    "megatron/core/distributed/fsdp/src/megatron_fsdp/utils.py": "class FSDPDistributedIndex: pass",
    "megatron/core/distributed/fsdp/src/megatron_fsdp/theirs.py": "",
    "megatron/core/transformer/__init__.py": "",
    "megatron/core/transformer/fsdp_dtensor_checkpoint.py": "",
    "megatron/core/optimizer/__init__.py": "",
}
CHECK = f"""
    import importlib, sys
    order = sys.argv[1]
    if order == "core":
        import {CORE}.mcore_fsdp_adapter as adapter
        import megatron.core.transformer.fsdp_dtensor_checkpoint, megatron.core.optimizer
        theirs = adapter.MegatronFSDP
        assert theirs.__module__.startswith("megatron.")
    import flatshard.megatron as ours
    ours.install()
    if order != "core":
        assert not any(name.startswith("megatron") for name in sys.modules)  # it does not look for them
    if order == "name":
        import {CORE}.src.megatron_fsdp as found
        assert found is ours
    import {CORE}.mcore_fsdp_adapter as adapter
    import megatron.core.transformer.fsdp_dtensor_checkpoint as checkpoint, megatron.core.optimizer
    assert adapter.MegatronFSDP is ours.MegatronFSDP
    assert adapter.FSDPDistributedIndex is ours.FSDPDistributedIndex
    assert getattr(adapter, "HAVE_MEGATRON_FSDP", True) and getattr(checkpoint, "HAVE_MEGATRON_FSDP", True)
    assert adapter.FullyShardedDataParallel.__module__ == adapter.__name__ == "{CORE}.mcore_fsdp_adapter"
    from {CORE}.src.megatron_fsdp import utils
    from {CORE}.src import megatron_fsdp
    assert megatron_fsdp is ours and utils is ours.utils and utils.__spec__.name == "flatshard.megatron.utils"
    assert vars(adapter).get("helpers", utils) is utils
    try:
        importlib.import_module("{CORE}.src.megatron_fsdp.theirs")
    except ModuleNotFoundError:
        pass  # a module of theirs that is not here is not mixed with ours
    else:
        raise AssertionError
    ours.uninstall()
    import {CORE}.src.megatron_fsdp as found
    assert found is not ours and found.MegatronFSDP.__module__.startswith("megatron.")
    if order == "core":
        assert adapter.MegatronFSDP is theirs is found.MegatronFSDP
"""


def run(code, *arguments, path=()):
    places = [str(ROOT), *map(str, path), os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(places)}
    command = [sys.executable, "-W", "ignore", "-c", textwrap.dedent(code), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert not done.returncode, done.stderr


@pytest.mark.parametrize("order", ["core", "install", "name"])
def test_in_the_place_of_megatron_core(tmp_path, order):
    for name, text in TREE.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    run(CHECK, order, path=[tmp_path])


@pytest.mark.skipif(importlib.util.find_spec("megatron") is None, reason="Megatron-Core is not installed")
@pytest.mark.parametrize("order", ["core", "install", "name"])
def test_in_the_place_of_the_real_one(order):
    run(CHECK, order)


def test_without_megatron_core(tmp_path):
    """And with `megatron_fsdp` itself, imported before."""
    (tmp_path / "megatron_fsdp").mkdir()
    (tmp_path / "megatron_fsdp" / "__init__.py").write_text("def fully_shard_model(): pass\nclass Theirs: pass")
    run(
        f"""
        import importlib.machinery, logging, sys
        # Megatron-Core is not installed, whatever is.
        sys.path[:] = [place for place in sys.path if not importlib.machinery.PathFinder.find_spec("megatron", [place])]
        import megatron_fsdp
        from megatron_fsdp import Theirs, fully_shard_model
        real, theirs = megatron_fsdp, fully_shard_model
        import flatshard.megatron as ours
        told = []
        logging.getLogger("flatshard").addHandler(logging.Handler())
        logging.getLogger("flatshard").handlers[0].emit = told.append
        logging.getLogger("flatshard").setLevel("INFO")
        ours.install()
        ours.install()
        assert len(told) == 1
        assert megatron_fsdp is ours and fully_shard_model is ours.fully_shard_model
        assert Theirs.__module__ == "megatron_fsdp"  # which is not here
        for name in ("megatron_fsdp", "{CORE}.src.megatron_fsdp"):
            assert importlib.import_module(name) is ours
            for below in ("uneven_dtensor", "param_and_grad_buffer", "utils", "experimental.dbuffer", "v2"):
                found = importlib.import_module(name + "." + below)
                assert found is importlib.import_module("flatshard.megatron." + below)
        adapter = importlib.import_module("{CORE}.mcore_fsdp_adapter")
        assert adapter.FullyShardedDataParallel is ours.FullyShardedDataParallel
        ours.uninstall()
        ours.uninstall()
        assert megatron_fsdp is real is sys.modules["megatron_fsdp"] and fully_shard_model is theirs
        assert not [name for name in sys.modules if name.startswith("megatron.")]
        try:
            importlib.import_module("megatron.core")
        except ImportError:
            pass
        else:
            raise AssertionError
        """,
        path=[tmp_path],
    )
