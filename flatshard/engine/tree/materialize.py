"""Initialises a model that was built and sharded on the meta device, one unit at a time."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import TypeAlias

import torch
from torch import nn

from flatshard import _arguments
from flatshard.engine.groups.changes import Names, check_found, fill, held_by_modules
from flatshard.engine.parameters.sharded_param import ShardedParam
from flatshard.engine.tree.build import units_below
from flatshard.engine.tree.parameters import owned_modules
from flatshard.engine.units.unit import Unit, unit_of
from flatshard.engine.weights.source import lasting_tensors

InitFn: TypeAlias = Callable[[nn.Module], object]


@lasting_tensors()
def materialize(model: nn.Module, init_fn: InitFn | None = None, *, seed: int = 0) -> None:
    """Initialise all parameters and buffers of ``model`` that are on the meta device.

    Unit by unit, full tensors are created on the device of the mesh, initialised, sharded and freed, so the peak beyond
    the shards is one unit. Every module that holds meta tensors is initialised by ``init_fn(module)``, or else by its
    ``reset_parameters`` or ``_reset_parameters``, or else by the model's ``_init_weights(module)`` (Hugging Face). The
    random state is set from ``seed`` and the module's name before each and restored afterwards: all ranks, and jobs of
    any number of ranks, get the same full values. A module that has meta tensors and none of these is named in a
    ValueError, before anything is changed; so is a parameter or buffer that all of them leave as it was, when they have
    run. Parameters that have been given values since, by a loader that knows some of them, keep those.
    """
    _arguments.module("materialize", model)
    if init_fn is not None and not callable(init_fn):
        raise TypeError(f"init_fn={init_fn!r}: must be a function of a module")
    if not isinstance(seed, int):
        raise TypeError(f"seed={seed!r}: must be an int")
    names = {module: name for name, module in model.named_modules()}
    inits = {module: _way_to_init(module, model, init_fn) for module in names if _has_meta(module)}
    missing = [names[module] or type(module).__name__ for module, way in inits.items() if way is None]
    if missing:
        raise ValueError(
            f"materialize cannot initialise {', '.join(missing)}: give init_fn, or define a reset_parameters method "
            "that sets all parameters and buffers of the module"
        )
    initialise = functools.partial(_initialise, inits=inits, names=names, seed=seed)
    owned: set[nn.Module] = set()
    for _, unit in units_below(model):
        modules = [module for _, module in owned_modules(unit.modules)]
        owned.update(modules)
        if any(module in inits for module in modules):
            _materialize_unit(unit, modules, model, initialise)
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in names:
        if module not in owned and module in inits and unit_of(module) is None:
            device = next((unit.device for _, unit in units_below(model)), torch.device("cpu"))
            _fill_plain(module, device, made)
            initialise([module])


def refuse_meta(model: nn.Module) -> None:
    """Raise RuntimeError, in PyTorch's words, if a unit of ``model`` has parameters on the meta device."""
    names = {parameter: name for name, parameter in model.named_parameters() if parameter.is_meta}
    for _, unit in units_below(model):
        held = [each for _, module in owned_modules(unit.modules) for each in module._parameters.values()]
        found = [names[parameter] for parameter in held if parameter in names]
        if found:
            raise RuntimeError(
                "FSDP parameters should be materialized from meta device before training, but the following were still "
                f"on meta device: {found}\nLoad a checkpoint, call module.to_empty(device) and initialise, or call "
                "flatshard.materialize(model)"
            )


def _has_meta(module: nn.Module) -> bool:
    tensors: Iterable[torch.Tensor | None] = (*module._parameters.values(), *module._buffers.values())
    return any(tensor is not None and tensor.is_meta for tensor in tensors)


def _way_to_init(module: nn.Module, model: nn.Module, init_fn: InitFn | None) -> Callable[[], object] | None:
    if init_fn is not None:
        return lambda: init_fn(module)
    for name in ("reset_parameters", "_reset_parameters"):
        own = getattr(module, name, None)
        if callable(own):
            return lambda: own()
    shared = getattr(model, "_init_weights", None)
    return (lambda: shared(module)) if callable(shared) else None


def _materialize_unit(
    unit: Unit, modules: list[nn.Module], model: nn.Module, initialise: Callable[[list[nn.Module]], None]
) -> None:
    unit.release()
    todo = []
    for group in unit.groups:
        name = Names(group, model)
        found = held_by_modules(group, name)
        if any(parameter.is_meta for parameter in found):  # else the next use adopts the values
            check_found(group, found, name)
            todo.append((group, found, name))
    for group, found, _ in todo:
        for param, known in zip(group.params, found):
            value = torch.empty(param.sharded.shape, dtype=group.main.dtype, device=unit.device)
            value = _marked(value) if known.is_meta else value
            parameter = nn.Parameter(value, requires_grad=param.sharded.requires_grad)
            parameter.__dict__.update(param.sharded.__dict__)
            for site in param.sites:
                site.put(parameter)
    # A parameter that is tied to another unit's has values there; an initialiser may write to this one, to no effect.
    for _, param, site in unit.borrowed:
        site.put(nn.Parameter(torch.empty(param.sharded.shape, dtype=param.sharded.dtype, device=unit.device)))
    made: dict[nn.Parameter, nn.Parameter] = {}
    for module in modules:
        _fill_plain(module, unit.device, made)
    initialise(modules)
    for _, param, site in unit.borrowed:
        site.put(param.sharded)
    for plain in unit.plain:
        plain.place(unit.device, unit.policy.param_dtype)
    for group, found, name in todo:
        # The values that the initialiser has left in the modules, even if it has replaced parameters.
        fill(group, [_value(param, unit.device) for param in group.params], found, name)


def _value(param: ShardedParam, device: torch.device) -> torch.Tensor:
    found = param.sites[0].look() if param.sites else None  # None: another parameter has taken its place
    return torch.zeros(param.sharded.shape, dtype=param.sharded.dtype, device=device) if found is None else found.data


def _fill_plain(module: nn.Module, device: torch.device, made: dict[nn.Parameter, nn.Parameter]) -> None:
    """Allocate meta buffers, and meta parameters that are in no group. ``made``: by the original, for tied ones."""
    for name, parameter in module._parameters.items():
        if parameter is not None and parameter.is_meta:
            if parameter not in made:
                value = _marked(torch.empty_like(parameter, device=device))
                made[parameter] = nn.Parameter(value, requires_grad=parameter.requires_grad)
                made[parameter].__dict__.update(parameter.__dict__)
            module._parameters[name] = made[parameter]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_meta:
            module._buffers[name] = _marked(torch.empty_like(buffer, device=device))


def _initialise(
    modules: Sequence[nn.Module],
    inits: dict[nn.Module, Callable[[], object] | None],
    names: dict[nn.Module, str],
    seed: int,
) -> None:
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    for module in modules:
        init = inits.get(module)
        if init is None:
            continue
        with torch.random.fork_rng(devices):
            digest = hashlib.sha256(f"{seed}:{names[module]}".encode()).digest()
            torch.manual_seed(int.from_bytes(digest[:7], "big"))
            init()
    for module in modules:
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None and _is_marked(tensor):
                place = f"{names[module]}.{name}" if names[module] else name
                raise ValueError(
                    f"'{place}' was not initialised: neither init_fn nor reset_parameters of its module sets it; set "
                    "it in one of them"
                )


# The first bytes of memory that has not been initialised.
_MARK, _MARKED = 0xA5, 64


def _marked(tensor: torch.Tensor) -> torch.Tensor:
    _first_bytes(tensor).fill_(_MARK)
    return tensor


def _is_marked(tensor: torch.Tensor) -> bool:
    plain = type(tensor) in (torch.Tensor, nn.Parameter) and not tensor.is_meta and tensor.numel() > 0
    return plain and bool(_first_bytes(tensor).eq(_MARK).all())


def _first_bytes(tensor: torch.Tensor) -> torch.Tensor:
    whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
    return whole[: min(_MARKED, tensor.numel() * tensor.element_size())]
