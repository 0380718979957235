"""The rooms of flatshard import downward only, one file communicates, and one room touches what torch keeps private.

Read from the source with `ast`, nothing is imported; an import for type checking counts like any other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]

_ENGINE_AND_BELOW = {"engine", "buffer", "policy", "layout", "trust"}
_ENGINE_AND_BELOW |= {"_arguments", "_epochs", "_recording", "_sizes", "_torch"}
_API_AND_BELOW = {"api", "copying", "module", "state", "hf", *_ENGINE_AND_BELOW}
_ANY = {
    "api",
    "module",
    "model",
    "wgrads",
    "wrapping",
    "captured",
    "copying",
    "recomputed",
    "gathering",
    "hf",
    "installing",
    "state",
    "optim",
    "checkpoint",
    "megatron",
    "rehearsal",
    "tools",
    "train",
    "experimental",
    "cli",
    *_ENGINE_AND_BELOW,
}

# Room (a file or folder of flatshard/) -> the rooms it may import, besides itself.
MAY_IMPORT: dict[str, set[str]] = {
    "_arguments": set(),
    "_epochs": set(),
    "_lazy": set(),
    "_torch": set(),
    "_recording": set(),
    "_sizes": set(),
    "layout": set(),
    "wrapping": set(),
    "recomputed": set(),
    "policy": {"layout", "_arguments", "_torch"},
    "trust": set(),
    "buffer": {"layout", "trust", "_epochs", "_recording", "_torch"},
    "engine": {"buffer", "policy", "layout", "trust", "_arguments", "_torch", "_recording", "_sizes"},
    "experimental": {"buffer", "policy", "_arguments", "_torch"},
    "state": _ENGINE_AND_BELOW,
    "module": {"state", *_ENGINE_AND_BELOW},
    "gathering": _ENGINE_AND_BELOW,
    "captured": {"optim", "recomputed", *_ENGINE_AND_BELOW},
    "hf": {"gathering", "checkpoint", *_ENGINE_AND_BELOW},
    "copying": {"state", *_ENGINE_AND_BELOW},
    "api": {"copying", "module", "state", "hf", "optim", *_ENGINE_AND_BELOW},
    "installing": _API_AND_BELOW,
    "optim": _ENGINE_AND_BELOW,
    "model": {"optim", "wrapping", *_API_AND_BELOW},
    "wgrads": {"module", *_ENGINE_AND_BELOW},
    "checkpoint": {"optim", *_ENGINE_AND_BELOW},
    "megatron": {"optim", "checkpoint", "wrapping", *_API_AND_BELOW},
    "train": {"optim", "checkpoint", "model", "wrapping", "captured", *_API_AND_BELOW},
    "rehearsal": {"_epochs", "_lazy", "_torch", "_recording", "_sizes"},
    "tools": {"optim", "wrapping", "rehearsal", *_ENGINE_AND_BELOW},
    "cli": {"__init__", *_ANY},
    "__main__": _ANY,
    "__init__": {"_lazy", *_ANY},  # and no room imports the public names from here
}

# Paths under flatshard/ that may call collectives: lanes, what they do it by, what is apart from them, and the backend
# that implements them.
MAY_COMMUNICATE = ("buffer/lanes.py", "buffer/collectives.py", "buffer/control_plane.py", "rehearsal/")
# Paths that may use what torch keeps private. The rehearsal backend plugs into torch below its public surface.
MAY_USE_PRIVATE = ("_torch/", "rehearsal/")

# A collective when taken from torch.distributed, or from _torch, which passes some on under a stable name ...
_COLLECTIVE = re.compile(
    r"(all_?gather|all_?reduce|reduce_scatter|all_?to_?all|broadcast|barrier|monitored_barrier|batch_isend_irecv"
    r"|(gather|scatter|reduce|send|recv|isend|irecv)(_object|_object_list|_single|_tensor)?$)"
)
# ... and whatever it is called on, because only a process group has a method of this name.
_GROUP_METHOD = re.compile(
    r"_?(allgather|allreduce|alltoall|reduce_scatter_base|reduce_scatter_tensor|all_gather_single|all_gather_into_tensor"
    r"|all_gather_object|all_to_all_single|reduce_scatter_single|broadcast_object_list|monitored_barrier)"
)
# Names by which a process group is usually known; their `broadcast`, `send` ... are collectives as well.
_GROUP_NAME = re.compile(r"(.*_)?(pg|process_group|get_group)$")
# `torch._foreach_*` is in torch's public reference, underscore and all.
_PRIVATE = re.compile(r"_(?!_|foreach_)")


def violations(source: str, path: str) -> list[str]:
    """What `source`, the file `path` under flatshard/, does against the rules; one line each, with its line number."""
    tree = ast.parse(source)
    uses = list(_uses(tree, path))
    found = [*_upward(uses, path), *_communication(tree, uses, path), *_private(uses, path)]
    return [f"flatshard/{path}:{line}: {text}" for line, text in sorted(set(found))]


def _uses(tree: ast.Module, path: str) -> Iterator[tuple[int, str, str]]:
    """(line, dotted name, kind) of every imported module or name ("import") and of attributes of them ("attribute")."""
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for name in node.names:
                known[name.asname or name.name.split(".")[0]] = name.name if name.asname else name.name.split(".")[0]
                yield node.lineno, name.name, "import"
        elif isinstance(node, ast.ImportFrom):
            base = _absolute(node, path)
            for name in node.names:
                known[name.asname or name.name] = f"{base}.{name.name}"
                yield node.lineno, f"{base}.{name.name}", "import"
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            first, _, rest = _dotted(node).partition(".")
            if first in known:
                yield node.lineno, f"{known[first]}.{rest}", "attribute"


def _absolute(node: ast.ImportFrom, path: str) -> str:
    if not node.level:
        return node.module or ""
    package = ["flatshard", *path.split("/")[:-1]]
    return ".".join([*package[: len(package) - node.level + 1], *filter(None, [node.module])])


def _dotted(node: ast.expr) -> str:
    """`a.b.c` of an attribute chain; a call in it counts as its function, anything else as nothing."""
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    if isinstance(node, ast.Call):
        return _dotted(node.func)
    return node.id if isinstance(node, ast.Name) else ""


def _room(path: str) -> str:
    return path.split("/")[0].removesuffix(".py")


def _upward(uses: list[tuple[int, str, str]], path: str) -> Iterator[tuple[int, str]]:
    room = _room(path)
    if room not in MAY_IMPORT:
        yield 1, f"room {room!r} has no row in MAY_IMPORT of tests/test_imports.py"
        return
    for line, name, kind in uses:
        parts = name.split(".")
        if parts[0] == "flatshard" and (kind == "import" or len(parts) > 1):
            target = parts[1] if len(parts) > 1 and parts[1] in MAY_IMPORT else "__init__"
            if target != room and target not in MAY_IMPORT[room]:
                yield line, f"{room} may not import {target} ({name})"
        if room == "layout" and name.startswith("torch.distributed"):
            yield line, "layout may not use torch.distributed"


def _communication(tree: ast.Module, uses: list[tuple[int, str, str]], path: str) -> Iterator[tuple[int, str]]:
    if path.startswith(MAY_COMMUNICATE):
        return
    called = {(node.lineno, _dotted(node.func)) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    for line, name in called:
        owner, _, method = name.rpartition(".")
        if owner and (
            _GROUP_METHOD.match(method) or (_GROUP_NAME.match(owner.split(".")[-1]) and _COLLECTIVE.match(method))
        ):
            yield line, f"only {MAY_COMMUNICATE[0]} communicates ({name})"
    if path.startswith("_torch/"):
        return  # may name collectives to pass them on; calling one of a process group is caught above
    for line, name, _ in uses:
        module, _, last = name.rpartition(".")
        if module.startswith(("torch.distributed", "flatshard._torch")) and _COLLECTIVE.match(last):
            yield line, f"only {MAY_COMMUNICATE[0]} communicates ({name})"


def _private(uses: list[tuple[int, str, str]], path: str) -> Iterator[tuple[int, str]]:
    if path.startswith(MAY_USE_PRIVATE):
        return
    for line, name, _ in uses:
        parts = name.split(".")
        if parts[0] == "torch" and any(map(_PRIVATE.match, parts)):
            yield line, f"private to torch, belongs in _torch/ ({name})"


_FILES = sorted(file.relative_to(_ROOT / "flatshard").as_posix() for file in (_ROOT / "flatshard").rglob("*.py"))


@pytest.mark.parametrize("path", _FILES)
def test_source_keeps_the_rules(path):
    found = violations((_ROOT / "flatshard" / path).read_text(), path)
    assert not found, "\n" + "\n".join(found)


def _imports(path: str) -> set[str]:
    """The files of flatshard/ that a file imports, in whatever way."""
    uses = _uses(ast.parse((_ROOT / "flatshard" / path).read_text()), path)
    names = [name.split(".") for _, name, kind in uses if kind == "import" and name.startswith("flatshard.")]
    found = set()
    for _, *parts in names:
        while parts:
            target = {f"{'/'.join(parts)}.py", f"{'/'.join(parts)}/__init__.py"} & set(_FILES)
            found |= target
            parts = [] if target else parts[:-1]
    return found - {path, "__init__.py"}


def test_files_import_one_way():
    try:
        TopologicalSorter({path: _imports(path) for path in _FILES}).prepare()
    except CycleError as error:
        pytest.fail(f"files import each other: {' <- '.join(error.args[1])}")


# A room of the engine imports those before it.
ENGINE = (
    "program",
    "steps",
    "parameters",
    "weights",
    "gradients",
    "groups",
    "rows",
    "watch",
    "units",
    "schedule",
    "tree",
)


def test_rooms_of_the_engine_import_one_way():
    rooms = {path.split("/")[1].removesuffix(".py") for path in _FILES if path.startswith("engine/")}
    assert rooms == {*ENGINE, "__init__"}
    for path in (path for path in _FILES if path.startswith("engine/") and path != "engine/__init__.py"):
        room = path.split("/")[1].removesuffix(".py")
        targets = {found.split("/")[1].removesuffix(".py") for found in _imports(path) if found.startswith("engine/")}
        above = targets - {room, *ENGINE[: ENGINE.index(room)]}
        assert not above, f"flatshard/{path}: {room} may not import {', '.join(above)}"


def test_the_table_has_no_cycle():
    TopologicalSorter({room: targets - {room, "cli"} for room, targets in MAY_IMPORT.items()}).prepare()


def test_what_torch_passes_on_is_used():
    source = (_ROOT / "flatshard/_torch/__init__.py").read_text()
    passed_on = {name.rpartition(".")[2] for _, name, kind in _uses(ast.parse(source), "_torch/__init__.py")}
    files = [_ROOT / "flatshard" / path for path in _FILES if not path.startswith("_torch/")]
    used = {name for file in files for name in re.findall(r"\b_torch\.(\w+)", file.read_text())}
    assert used == passed_on


_PLANTED = [
    ("layout/planner.py", "from flatshard.buffer import DBuffer", "layout may not import buffer"),
    ("layout/planner.py", "from .. import policy", "layout may not import policy"),
    ("layout/planner.py", "from flatshard._torch import x", "layout may not import _torch"),
    ("layout/planner.py", "import torch\ntorch.distributed.get_rank()", "layout may not use torch.distributed"),
    ("buffer/dbuffer.py", "def f():\n    from ..engine.unit import Unit", "buffer may not import engine"),
    ("buffer/dbuffer.py", "import flatshard.engine.units.unit", "buffer may not import engine"),
    ("engine/units/unit.py", "from flatshard import fully_shard", "engine may not import __init__"),
    ("engine/units/unit.py", "import flatshard", "engine may not import __init__"),
    ("engine/units/unit.py", "from ...optim.step import f", "engine may not import optim"),
    ("rehearsal/backend.py", "from flatshard.engine import unit", "rehearsal may not import engine"),
    ("tools/plan.py", "from flatshard.checkpoint.files import read", "tools may not import checkpoint"),
    ("shelf/box.py", "", "room 'shelf' has no row"),
    ("engine/units/unit.py", "import torch.distributed as dist\ndist.all_reduce(x)", "communicates"),
    ("engine/units/unit.py", "import torch\ntorch.distributed.barrier()", "communicates"),
    ("engine/units/unit.py", "from torch.distributed import broadcast", "communicates"),
    ("engine/units/unit.py", "from flatshard import _torch\n_torch.all_gather_one(g, x)", "communicates"),
    ("optim/clip.py", "import torch.distributed as dist\ndist.all_gather_into_tensor(a, b)", "communicates"),
    ("optim/clip.py", "mesh.get_group().broadcast([x])", "communicates"),
    ("optim/clip.py", "self.pg.allreduce([x])", "communicates"),
    ("optim/clip.py", "group._allgather_base(a, b)", "communicates"),
    ("_torch/x.py", "group.allgather_into_tensor_coalesced(a, b)", "communicates"),
    ("engine/units/unit.py", "import torch\ntorch._C._current_graph_task_id()", "private to torch"),
    ("engine/units/unit.py", "import torch._dynamo", "private to torch"),
    ("engine/units/unit.py", "from torch.distributed._composable import contract", "private to torch"),
    ("engine/units/unit.py", "from torch.distributed.tensor import _api", "private to torch"),
]

_INNOCENT = [
    (
        "engine/units/unit.py",
        "from ...buffer.dbuffer import DBuffer\nbuffer.all_reduce()\ngroup.reduce()\nlane.gather(x)",
    ),
    ("engine/units/unit.py", "import torch\ntorch.__version__\ntorch.gather(x, 0, i)\ntorch._foreach_copy_(a, b)"),
    ("buffer/lanes.py", "import torch.distributed as dist\ndist.all_reduce(x)"),
    ("_torch/x.py", "import torch._C\nfrom torch.distributed import ProcessGroup\nf = ProcessGroup._allgather_base"),
    ("__init__.py", "from .api import fully_shard\nfrom .optim.step import fully_shard_optimizer"),
    ("layout/planner.py", "import torch\nfrom . import placement\nfrom flatshard.layout.wire import x"),
]


@pytest.mark.parametrize(("path", "source", "expected"), _PLANTED)
def test_a_planted_violation_is_found(path, source, expected):
    found = violations(source, path)
    assert len(found) >= 1
    assert expected in found[0]
    assert found[0].startswith(f"flatshard/{path}:")


@pytest.mark.parametrize(("path", "source"), _INNOCENT)
def test_what_is_allowed_passes(path, source):
    assert violations(source, path) == []
