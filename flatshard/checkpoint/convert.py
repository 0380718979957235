"""`convert`: write a checkpoint in another format, in one process and without a model.

Tensors are memory-mapped files in a temporary folder beside the result, so that one tensor at a time is in memory.
"""

from __future__ import annotations

import itertools
import json
import re
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from flatshard import _arguments, _torch
from flatshard.buffer import Exchange
from flatshard.checkpoint.contents import decode_tree, encode_tree
from flatshard.checkpoint.dcp import METADATA, DcpFolder, check_archive
from flatshard.checkpoint.errors import CheckpointError
from flatshard.checkpoint.files import INDEX, SINGLE, find_tensors, open_file
from flatshard.checkpoint.full import plan_files, write_files
from flatshard.checkpoint.manifest import MANIFEST, Manifest
from flatshard.checkpoint.reader import MakeTensor, Reader, read_extra
from flatshard.checkpoint.saving import write_snapshot
from flatshard.checkpoint.state import Snapshot
from flatshard.checkpoint.stored_names import with_names

Form = Literal["flatshard", "dcp", "safetensors", "torch"]
FORMS: tuple[Form, ...] = get_args(Form)
_MARKS: dict[str, Form] = {MANIFEST: "flatshard", METADATA: "dcp", SINGLE: "safetensors", INDEX: "safetensors"}
_SUFFIXES: dict[str, Form] = {".safetensors": "safetensors", ".pt": "torch", ".pth": "torch", ".bin": "torch"}
_EXTRA = "extra_of_ranks"  # beside "model" in DCP's folders and torch.save's files: a list of what each rank has saved


@dataclass
class State:
    """A checkpoint: a dict of model, optimizer and ``rest``; if not ``nested``, the model's state dict alone."""

    model: dict[str, Any]
    optimizer: dict[str, Any] | None
    rest: dict[str, Any]
    nested: bool

    @classmethod
    def of(cls, tree: dict[str, Any]) -> State:
        """Find model and optimizer in the tree of a checkpoint by their usual names."""
        model = next((key for key in ("model", "state_dict") if isinstance(tree.get(key), dict)), None)
        if model is None:
            return cls(tree, None, {}, False)
        optimizer = next((key for key in ("optimizer", "optim") if isinstance(tree.get(key), dict)), None)
        rest = {key: value for key, value in tree.items() if key not in (model, optimizer)}
        return cls(tree[model], None if optimizer is None else tree[optimizer], rest, True)

    def tree(self) -> dict[str, Any]:
        if not self.nested:
            return self.model
        optimizer = {} if self.optimizer is None else {"optimizer": self.optimizer}
        return {**self.rest, "model": self.model, **optimizer}  # the rest may have the model's name as "model"


def convert(
    source: str | Path,
    target: str | Path,
    *,
    to: Form | None = None,
    rename: Sequence[tuple[str, str]] = (),
    names: dict[str, str] | None = None,
    model_only: bool = False,
) -> Form:
    """Write the checkpoint ``source`` to ``target`` in another format; returns the format of ``target``.

    Formats are ``"flatshard"`` (a folder of `save`), ``"dcp"`` (a folder of torch.distributed.checkpoint, as FSDP2 and
    Megatron-FSDP write it), ``"safetensors"`` (a folder or one file; weights only) and ``"torch"`` (a file of
    torch.save). The format of ``source`` is detected. That of ``target``, which must not exist, is ``to``, or depends
    on its suffix (``.pt``, ``.pth``, ``.bin``, ``.safetensors``; otherwise flatshard).

    ``rename``: pairs of a regular expression and its replacement, applied in this order to the names of parameters.
    ``names``: a dict from full names to new names. Optimizer state is renamed too; if it has numbers in place of names,
    the names are taken from the model where the shapes agree.
    ``model_only``: write only the weights.

    No process group is needed or used, so one rank of a job may call this. No code from a file is run, and checksums in
    the files are verified. CheckpointError says what is damaged, or that the format is unknown.
    """
    source, target = _arguments.path("source", source), _arguments.path("target", target)
    if names is not None and not isinstance(names, dict):
        raise TypeError(f"names={names!r}: must be a dict from names to new names")
    form = _SUFFIXES.get(target.suffix, "flatshard") if to is None else to
    if form not in FORMS:
        raise ValueError(f"to={form!r}: must be one of {', '.join(FORMS)}")
    change = _mapping(rename, names or {})
    if target.exists():
        raise CheckpointError(f"{target} exists and is not overwritten: choose another target")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix=".converting-") as folder:
        made = Path(folder, "made")
        try:
            state = _renamed(State.of(_READERS[form_of(source)](source, _mapped_tensors(folder))), change)
            if model_only or form == "safetensors":
                state = replace(state, optimizer=None, rest={})
            _WRITERS[form](made, state)
        except (TypeError, KeyError, IndexError, AttributeError, RuntimeError) as error:
            # A file may hold anything, for example dicts in place of tensors, or numbers in place of names.
            reason = f"{type(error).__name__}: {error}"
            raise CheckpointError(f"{source} has content that cannot be written as {form}: {reason}") from error
        if form == "safetensors" and target.suffix == ".safetensors":
            made = made / SINGLE
            if not made.is_file():
                raise CheckpointError(f"{target}: the weights need several files; give a folder, with to='safetensors'")
        shutil.move(made, target)
    return form


def form_of(path: Path) -> Form:
    for name, form in _MARKS.items():
        if (path / name).is_file():
            return form
    if path.is_file():
        return "safetensors" if path.suffix == ".safetensors" else "torch"
    raise CheckpointError(f"{path} does not exist, or is no checkpoint in a known format ({', '.join(FORMS)})")


def _mapped_tensors(folder: str) -> MakeTensor:
    """A function that makes tensors whose memory is a file in ``folder``."""
    numbers = itertools.count()

    def make(dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
        numel = torch.Size(shape).numel()
        if not numel:
            return torch.empty(tuple(shape), dtype=dtype)
        path = f"{folder}/{next(numbers)}.tensor"
        raw = torch.from_file(path, shared=True, size=numel * dtype.itemsize, dtype=torch.uint8)
        return raw.view(dtype).view(tuple(shape))

    return make


def _read_own(path: Path, make: MakeTensor) -> dict[str, Any]:
    manifest = Manifest(path)
    with Reader(manifest, make=make) as reader:
        tree = {"model": decode_tree(manifest.model, reader.whole)}
        if manifest.optimizer is not None:
            optimizer = decode_tree(manifest.optimizer, reader.whole)
            tree["optimizer"] = {"state": optimizer["state"], "param_groups": optimizer["groups"]}
        extra = [read_extra(manifest, reader, rank) for rank in range(manifest.world)]
    if any(each is not None for each in extra):
        tree[_EXTRA] = extra
    return tree


def _read_safetensors(path: Path, make: MakeTensor) -> dict[str, Any]:
    files = find_tensors(path)
    with Reader(files, make=make) as reader:
        return {name: reader.whole(name) for name in files.tensors}


def _with_lists(tree: Any) -> Any:
    """The tree with dicts whose keys are integers turned into lists: DCP flattens lists to such dicts."""
    if not isinstance(tree, dict):
        return tree
    items = {key: _with_lists(value) for key, value in tree.items()}
    if items and all(type(key) is int for key in items):
        return [items[number] for number in sorted(items)]
    return items


def _read_torch(path: Path, make: MakeTensor) -> dict[str, Any]:
    size = path.stat().st_size
    try:
        with open_file(path) as file:
            check_archive(file, size)
        state = torch.load(path, mmap=True, weights_only=True, map_location="cpu")
    except Exception as error:  # of many types: the file has another format, or code in it, or is too short
        raise CheckpointError(f"{path} cannot be read as a file of torch.save: {error}") from error
    if not isinstance(state, dict):
        raise CheckpointError(f"{path} holds a {type(state).__name__}, not a state dict")
    for value in _torch.pytree_leaves(state):
        if isinstance(value, torch.Tensor) and value.numel() * value.element_size() > size:
            raise CheckpointError(f"{path}: a tensor of shape {tuple(value.shape)} is larger than the file")
    return state


def _mapping(rename: Sequence[tuple[str, str]], names: dict[str, str]) -> Callable[[str], str]:
    patterns = []
    for each in rename:
        if not isinstance(each, (tuple, list)) or len(each) != 2 or not all(isinstance(part, str) for part in each):
            raise TypeError(f"rename contains {each!r}: must be pairs of a regular expression and its replacement")
        pattern, replacement = each
        try:
            patterns.append((re.compile(pattern), replacement))
        except re.error as error:
            raise ValueError(f"rename contains {pattern!r}, which is not a regular expression: {error}") from error

    def change(name: str) -> str:
        if name in names:
            return names[name]
        for pattern, replacement in patterns:
            name = pattern.sub(replacement, name)
        return name

    return change


def _renamed(state: State, change: Callable[[str], str]) -> State:
    model: dict[str, Any] = {}
    for name, value in state.model.items():
        if change(name) in model:
            raise CheckpointError(f"'{name}' would be renamed to '{change(name)}', a name that another tensor has too")
        model[change(name)] = value
    optimizer = state.optimizer
    if optimizer is not None and optimizer.keys() == {"state", "param_groups"}:
        optimizer = with_names(_by_names(optimizer, state.model), change)
    return replace(state, model=model, optimizer=optimizer)


def _by_names(optimizer: dict[str, Any], model: dict[str, Any]) -> dict[str, Any]:
    """Optimizer state with names in place of numbers. Parameters are in the order of the model's tensors."""
    numbers = [number for group in optimizer["param_groups"] for number in group["params"]]
    if not all(isinstance(number, int) for number in numbers):
        return optimizer
    state = {int(number): entry for number, entry in optimizer["state"].items()}
    names, known = {}, iter(model.items())
    for number in sorted(numbers):
        shapes = {
            value.shape for value in state.get(number, {}).values() if isinstance(value, torch.Tensor) and value.dim()
        }
        fits = (name for name, value in known if not shapes or getattr(value, "shape", None) in shapes)
        name = next(fits, None)
        if name is None:
            raise CheckpointError(
                "the optimizer state has numbers in place of names, and their order does not fit the model's tensors; "
                "save it with torch.distributed.checkpoint.state_dict.get_optimizer_state_dict, or set model_only"
            )
        names[number] = name
    return with_names({**optimizer, "state": state}, names.__getitem__)


def _write_own(path: Path, state: State) -> None:
    snapshot = Snapshot(0)
    snapshot.model = encode_tree(state.model, snapshot.put, "model")
    if state.optimizer is not None:
        optimizer = {"groups": state.optimizer["param_groups"], "state": state.optimizer["state"]}
        snapshot.optimizer = encode_tree(optimizer, snapshot.put, "optimizer")
    extra, only = state.rest or None, state.rest.get(_EXTRA)
    if isinstance(only, list) and only and len(state.rest) == 1:
        extra = only[0]  # as if the checkpoint were loaded on another number of ranks
    snapshot.extra = encode_tree(extra, partial(snapshot.put, own=True), "extra/0")
    write_snapshot(path, snapshot, Exchange(None))


def _write_safetensors(path: Path, state: State) -> None:
    tensors = {}
    for name, value in state.model.items():
        if isinstance(value, torch.Tensor):
            tensors[name] = value
        elif not name.endswith("_extra_state"):
            kind = type(value).__name__
            raise CheckpointError(f"'{name}' is a {kind}; safetensors files hold only tensors: choose another format")
    write_files(path, plan_files(tensors, 5 * 10**9), iter(tensors.values()))


_READERS: dict[Form, Callable[[Path, MakeTensor], dict[str, Any]]] = {
    "flatshard": _read_own,
    "dcp": lambda path, make: _with_lists(DcpFolder(path).read(make)),
    "safetensors": _read_safetensors,
    "torch": _read_torch,
}
_WRITERS: dict[Form, Callable[[Path, State], None]] = {
    "flatshard": _write_own,
    "dcp": lambda path, state: dcp_save(replace(state, nested=True).tree(), checkpoint_id=path, no_dist=True),
    "safetensors": _write_safetensors,
    "torch": lambda path, state: torch.save(state.tree(), path),
}


def names_from(path: str | Path) -> dict[str, str]:
    """Read a dict from names to new names from a JSON file; ValueError if it is not one."""
    try:
        names = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}") from error
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
        raise ValueError(f"{path} must hold one JSON object that maps old names to new names")
    return names
