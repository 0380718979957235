"""`generate` and `save_pretrained` of sharded Hugging Face models, and `save_model` of their Trainer.

Transformers is not imported: the methods are found by their names.
"""

from __future__ import annotations

import functools
import inspect
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor

from flatshard.buffer import Exchange
from flatshard.checkpoint.deferred_tensors import DeferredFile, DeferredTensor, defer
from flatshard.checkpoint.errors import on_all_ranks
from flatshard.checkpoint.full import iter_full_tensors
from flatshard.engine.tree.unit_classes import original_classes
from flatshard.engine.units.unit import unit_of
from flatshard.gathering import gathered

_WRITER = "safe_save_file"  # the name under which Hugging Face libraries import `safetensors.torch.save_file`


def methods_for(cls: type) -> dict[str, Callable[..., Any]]:
    """Methods by name for a subclass of ``cls`` whose instances are units."""
    made = {"generate": _keeping_gathered, "save_pretrained": _saving_on_rank_0}
    return {name: make(getattr(cls, name)) for name, make in made.items() if callable(getattr(cls, name, None))}


def _keeping_gathered(method: Callable[..., Any]) -> Callable[..., Any]:
    """`generate`, which runs forwards of the unit, and uses its encoders, heads and parameters between them.

    So the unit's own parameters stay gathered; units inside it are gathered and resharded in every forward.
    """

    @functools.wraps(method)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with gathered(self, recurse=False):
            return method(self, *args, **kwargs)

    return generate


def _saving_on_rank_0(method: Callable[..., Any]) -> Callable[..., Any]:
    """`save_pretrained`, which all ranks must call: rank 0 writes, with one bucket of full weights in memory at a time.

    If a ``state_dict`` is given, or Transformers has sharded the model itself, the original method is called. PEFT
    writes only adapters; rank 0 gathers all of them at once.
    """

    @functools.wraps(method)
    def save_pretrained(self: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = getattr(getattr(self, "config", None), "distributed_config", None) is not None
        if theirs or len(args) > 1 or kwargs.get("state_dict") is not None:
            return method(self, save_directory, *args, **kwargs)
        ranks, adapters = Exchange("control"), _adapters(self)
        streams = adapters is None and kwargs.get("safe_serialization", True)  # an argument of Transformers 4
        modules = _safetensors_users(type(self)) if streams else []
        requests, prompts = _GatherRequests(self, ranks), _prompt_parameters(self)
        if modules:
            state = defer(self.state_dict(keep_vars=True))
        else:
            whole = iter_full_tensors(self, names=adapters)
            state = {name: tensor.to("cpu", copy=True) for name, tensor in whole if ranks.rank == 0}

        def write() -> None:
            with original_classes(self), requests.by(modules), _holding(prompts, state):
                method(self, save_directory, *args, **{**kwargs, "state_dict": state})

        with gathered(self.get_submodule("prompt_encoder")) if prompts else nullcontext():
            on_all_ranks(ranks, write if ranks.rank == 0 else requests.answer)
        return None

    return save_pretrained


def _safetensors_users(cls: type) -> list[dict[str, Any]]:
    """The namespaces of the modules that define `save_pretrained` of ``cls`` and call `safe_save_file`."""
    methods = [inspect.unwrap(vars(each)["save_pretrained"]) for each in cls.__mro__ if "save_pretrained" in vars(each)]
    namespaces = {id(names): names for names in (method.__globals__ for method in methods) if _WRITER in names}
    return list(namespaces.values())


class _GatherRequests:
    """Full weights for rank 0 while it runs library code; the other ranks take part in the gathers it asks for."""

    def __init__(self, model: nn.Module, ranks: Exchange) -> None:
        self._model, self._ranks = model, ranks

    @contextmanager
    def by(self, modules: list[dict[str, Any]]) -> Iterator[None]:
        """Within the context, files of deferred tensors that these modules write get their values from all ranks."""
        before = [(names, names[_WRITER]) for names in modules]
        for names, write in before:
            names[_WRITER] = functools.partial(self._write, write)
        try:
            yield
        finally:
            for names, write in before:
                names[_WRITER] = write
            self._ranks.gather(json.dumps(None).encode())

    def answer(self) -> None:
        """Take part in gathers until rank 0 has written all files."""
        while (names := json.loads(self._ranks.gather(b"")[0])) is not None:
            for _ in iter_full_tensors(self._model, names=set(names)):
                pass

    def _write(self, write: Callable[..., Any], tensors: Any, path: Any, metadata: Any = None) -> None:
        if not any(isinstance(tensor, DeferredTensor) for tensor in tensors.values()):
            write(tensors, path, metadata=metadata)
            return
        file = DeferredFile(Path(path), tensors, metadata)
        self._ranks.gather(json.dumps(sorted(file.needs)).encode())
        whole = iter_full_tensors(self._model, names=file.needs)
        try:
            file.write(whole)
        finally:
            for _ in whole:  # also after an error: the other ranks wait in these gathers
                pass


def _adapters(model: Any) -> set[str] | None:
    """The names that `save_pretrained` of a PEFT model may write; None, meaning all, for any other model."""
    known = getattr(model, "peft_config", None)
    if not known:
        return None
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return trained | {name for name in model.state_dict() if any(f".{adapter}" in name for adapter in known)}


def _prompt_parameters(model: Any) -> dict[str, nn.Module]:
    """Names of the sharded parameters with which PEFT computes prompts, and their modules.

    PEFT does not save these, but the prompts, which it computes while it saves.
    """
    if not hasattr(model, "peft_config") or not hasattr(model, "prompt_encoder"):
        return {}
    return {
        f"prompt_encoder.{path}.{name}": module
        for path, module in model.prompt_encoder.named_modules()
        for name, parameter in module.named_parameters(recurse=False)
        if isinstance(parameter, DTensor)
    }


@contextmanager
def _holding(modules: dict[str, nn.Module], state: dict[str, Any]) -> Iterator[None]:
    """Within the context, modules hold the parameters of ``state``: gathered ones are in the compute dtype."""
    held = {name: module.get_parameter(name.rpartition(".")[2]) for name, module in modules.items()}
    try:
        for name, module in modules.items():
            setattr(module, name.rpartition(".")[2], nn.Parameter(state[name], requires_grad=False))
        yield
    finally:
        for name, module in modules.items():
            setattr(module, name.rpartition(".")[2], held[name])


_trainers: dict[Any, Callable[..., Any]] = {}  # classes, and their original `save_model`


def let_trainer_save() -> None:
    """Let `save_model` of Transformers' Trainer write the weights also if state dicts are sharded.

    The original method writes no weights then. No effect if the Trainer has not been imported. Its checkpoints, for
    which it calls the same method, do not change, except that the folder of one exists when this method returns.
    """
    cls = getattr(sys.modules.get("transformers.trainer"), "Trainer", None)
    if cls is None or cls in _trainers:
        return
    method = _trainers[cls] = cls.save_model

    @functools.wraps(method)
    def save_model(self: Any, output_dir: Any = None, _internal_call: bool = False) -> Any:
        sharded = self.is_fsdp_enabled and "FULL" not in str(self.accelerator.state.fsdp_plugin.state_dict_type)
        if sharded and unit_of(self.model) is not None:
            if _internal_call:  # for a checkpoint: all ranks look next whether its folder exists, to note the best one
                Path(output_dir).mkdir(parents=True, exist_ok=True)
            else:
                _save(self, output_dir)
        return method(self, output_dir, _internal_call)

    cls.save_model = save_model


def undo_let_trainer_save() -> None:
    """Undo `let_trainer_save`."""
    while _trainers:
        cls, method = _trainers.popitem()
        cls.save_model = method


def _save(trainer: Any, folder: Any) -> None:
    streams = hasattr(type(trainer.model), "save_pretrained")  # false for a compiled model
    state = None if streams else trainer.accelerator.get_state_dict(trainer.model)
    if trainer.args.should_save:
        trainer._save(folder, state_dict=state)
    elif streams:  # `_save` calls it on all ranks only before Transformers 5.23
        trainer.model.save_pretrained(folder)
