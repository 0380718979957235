"""Changes to parameters after sharding: `.to`, `to_empty`, `load_state_dict(assign=True)`, plain assignment.

They all give a module other parameters, or a parameter other memory, than the buffers of the group. The group either
adopts the new values, into a new main buffer, or raises an error and restores everything. A parameter that was assigned
to a module belongs to the group from then on, because an optimizer may hold it. An optimizer that holds the replaced
parameter raises at its next step. The exception is `load_state_dict` of a unit: its values are copied into the existing
parameters, because no other code can have taken the new ones from the module yet, and existing optimizers remain valid.

Modules and loaders change parameters one after another, but a group can be adopted only as a whole: its parameters have
one dtype and one device. While they differ, nothing is done. They must agree at the next use, which is a forward of the
root, or `unshard`; a group of which only a part was cast or moved is refused then.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard import _torch
from flatshard.buffer import DBuffer
from flatshard.buffer.dtensor import as_dtensor
from flatshard.buffer.ragged import RaggedDTensor
from flatshard.buffer.rules import is_cut_alike
from flatshard.engine.groups.param_group import ParamGroup
from flatshard.engine.groups.registry import OWNER, adopt, group_of, supersede
from flatshard.engine.parameters.sharded_param import ShardedParam, Snapshot
from flatshard.engine.weights.extensions import unfilled
from flatshard.engine.weights.source import lasting_tensors

Change = Callable[[torch.Tensor], torch.Tensor]


class Names:
    """Names of a group's params, for errors: from ``root`` down if it is known, otherwise from the unit's own modules.

    Computed one by one, because the search for a module is slow.
    """

    def __init__(self, group: ParamGroup, root: nn.Module | None) -> None:
        self._params = group.params
        self._root = root

    def __getitem__(self, index: int) -> str:
        param = self._params[index]
        if not param.sites:  # other parameters have taken its place
            return param.name
        holder = param.sites[0].module()
        for prefix, module in self._root.named_modules() if self._root is not None else ():
            if module is holder:
                return f"{prefix}.{param.sites[0].name}" if prefix else param.sites[0].name
        # A unit of several modules may have several of one name.
        alike = sum(other.name == param.name for other in self._params) > 1
        return f"{type(holder).__name__}.{param.name}" if alike else param.name


@lasting_tensors()
def absorb(
    group: ParamGroup, awaited: bool, *, root: nn.Module | None = None, wait: bool = False, ours: bool = False
) -> None:
    """Adopt the parameters that the modules hold instead of the group's; if that is wrong, restore ours and raise.

    ``awaited``: a later backward reads the weights that are gathered now. ``root``: the module at which names in errors
    start. ``wait``: if parameters differ in dtype or device, leave them until the others have changed too.
    ``ours``: keep our parameter objects.
    """
    names = Names(group, root)
    found = held_by_modules(group, names)
    if any(p is not m.sharded for p, m in zip(found, group.params)) or not _owns_storage(group):
        if wait and not ours and _foreign(group, found):
            return  # modules may have been tied, which is known only when the root has all units
        try:
            _refuse_others(group, found, names, ours)
            if wait and len(_kinds(found)) > 1:
                for param in group.params:
                    _put_attributes_back(param)
                return
            _refuse_change(group, awaited, names)
            main = _as_main(group, found, names)
        except (ValueError, RuntimeError):
            _restore(group)
            raise
        _take(group, main, found, ours)
        if main is not group.main:
            group.set_main(main)
    _show(group)


def _show(group: ParamGroup) -> None:
    """Put our parameters into the modules."""
    for param in group.params:
        _put_attributes_back(param)
        for site in param.sites:
            site.put(param.sharded)
    group.snapshot = Snapshot(group.params)


def _put_attributes_back(param: ShardedParam) -> None:
    """Restore the attributes that users had set on the parameter before it was replaced."""
    for name, value in param.attributes.items():
        param.sharded.__dict__.setdefault(name, value)


@contextmanager
def applying(group: ParamGroup) -> Iterator[None]:
    """Around `module._apply`: gradients and attributes are kept, or converted with the weights."""
    held = [(param.sharded, param.sharded.grad) for param in group.params]
    for param in group.params:
        param.attributes = dict(param.sharded.__dict__)
        param.sharded.grad = None  # `_apply` cannot set one of another dtype than the parameter's
    before = group.main
    try:
        yield
    finally:
        same = group.main is before
        for sharded, grad in held:
            if grad is not None and not same:
                device = _torch.local_of(sharded).device
                local = _torch.local_of(grad).to(device, group.gradients.grad_dtype)
                grad = _torch.like_dtensor(sharded, local)
            if grad is not None:
                _torch.allow_grad_of(sharded, grad.dtype)
                sharded.grad = grad


def check_change(group: ParamGroup, change: Change, awaited: bool, root: nn.Module | None) -> None:
    """Raise before a change of all parameters that could not be adopted."""
    probe = torch.empty(0, dtype=group.main.dtype, device=_torch.local_of(group.params[0].sharded).device)
    changed = change(probe)
    if changed is probe:
        return
    names = Names(group, root)
    _refuse_device(group, changed.device, names)
    _refuse_change(group, awaited, names)
    if changed.is_complex() and any(param.sharded.requires_grad for param in group.params):
        raise ValueError(f"parameter '{names[0]}' cannot be cast to {changed.dtype}: use a real dtype, or freeze it")


def _refuse_change(group: ParamGroup, awaited: bool, names: Names) -> None:
    if awaited:
        raise RuntimeError(
            f"parameter '{names[0]}' was replaced or moved between a forward and its backward, which needs the old "
            "values; run the backward first, or discard it with reset() on the root module"
        )
    if group.gradients.has_partial:
        raise RuntimeError(
            f"parameter '{names[0]}' was replaced or moved while gradients of earlier micro-batches wait to be "
            "reduced; finish the optimizer step first, or discard them with zero_grad() on the model"
        )


def _refuse_device(group: ParamGroup, device: torch.device, names: Names) -> None:
    """Parameters may be on the mesh's device, and in host memory while they are not used."""
    if device.type not in (group.mesh.device_type, "cpu", _torch.local_of(group.params[0].sharded).device.type):
        raise ValueError(
            f"parameter '{names[0]}' was moved to {device}, but its mesh is on {group.mesh.device_type}; to train on "
            f"{device.type}, call fully_shard with a mesh of that device type"
        )


@functools.cache
def share_data() -> None:
    """Let writes to the ``.data`` of sharded parameters count as writes to these, and refuse assignments to it."""
    _torch.share_data(lambda tensor: group_of(tensor) is not None, _refuse_data)


def _refuse_data(parameter: nn.Parameter, other: Any) -> None:
    if not isinstance(other, DTensor) or _torch.local_of(other) is not _torch.local_of(parameter):  # its own
        raise ValueError(
            f"`.data` of parameter '{parameter.__dict__[OWNER][0]}' cannot be replaced: a DTensor would drop the "
            "values. Write into it with `.data.copy_(...)`, cast or move the model with its to() method, or assign a "
            "new nn.Parameter"
        )


def held_by_modules(group: ParamGroup, names: Names) -> list[nn.Parameter]:
    """Per param, the parameter that the modules hold, which may be another one than the group's."""
    result = []
    for index, param in enumerate(group.params):
        found = [site.look() for site in param.sites] or [param.sharded]
        first = next((each for each in found if each is not param.sharded), found[0])
        same = [each is first or each is param.sharded or _equal(first, each) for each in found]
        if first is None or not all(same):
            _restore(group)
            raise ValueError(
                f"parameter '{names[index]}' was removed, or the modules that share it now have parameters with "
                "different values; change sharded parameters in place, and parametrize modules before fully_shard"
            )
        result.append(first)
    return result


def _equal(one: torch.Tensor | None, other: torch.Tensor | None) -> bool:
    if not isinstance(one, DTensor) or not isinstance(other, DTensor):
        return False
    return torch.equal(_torch.local_of(one), _torch.local_of(other))


def _kinds(found: Sequence[nn.Parameter]) -> set[tuple[torch.dtype, torch.device]]:
    """The dtypes and devices of sharded parameters."""
    return {(local.dtype, local.device) for local in map(_torch.local_of, found)}


def _as_main(group: ParamGroup, found: Sequence[nn.Parameter], names: Names) -> DBuffer:
    """A main buffer with the values of the parameters found, of their dtype and on their device."""
    locals_ = [_torch.local_of(parameter) for parameter in found]
    kinds = _kinds(found)
    if len(kinds) > 1:
        listed = ", ".join(f"'{names[i]}' {part.dtype} on {part.device}" for i, part in enumerate(locals_))
        raise ValueError(
            f"parameters that are sharded together were given different dtypes or devices: {listed}. They are "
            "unchanged; change all of them alike, or call fully_shard on the submodule that is to differ"
        )
    ((dtype, device),) = kinds
    _refuse_device(group, device, names)
    if group.is_extended:
        same = dtype == group.main.dtype
        return group.main if same else unfilled(group.layout, group.mesh, group.placements, dtype)
    main = DBuffer.zeros(group.layout, group.mesh, group.main.placements, dtype=dtype, device=device)
    for index, local in enumerate(locals_):
        main.local_view(index).copy_(local)
    return group.home.take(main)


def _refuse_others(group: ParamGroup, found: Sequence[nn.Parameter], names: Names, ours: bool = False) -> None:
    """Raise if a parameter found is not sharded like the group's or, unless ``ours``, belongs to another group."""
    foreign = [] if ours else _foreign(group, found)
    for index in foreign:
        raise ValueError(
            f"parameter '{names[index]}' was replaced by '{found[index].__dict__[OWNER][0]}', which is sharded "
            "differently or belongs to another model; tie parameters before fully_shard"
        )
    for index, (parameter, param) in enumerate(zip(found, group.params)):
        if isinstance(parameter, DTensor) and not isinstance(parameter, nn.Parameter):
            raise ValueError(
                f"parameter '{names[index]}' was replaced by a tensor that is not an nn.Parameter, for example by "
                "torch.func.functional_call; a sharded module accepts only parameters, and its own must stay"
            )
        expected = param.sharded if group.is_extended else as_dtensor(group.main, index, param.inner)
        if not isinstance(parameter, DTensor) or not is_cut_alike(parameter, expected):
            # On the meta device torch assigns the parts of a full state dict, which it cuts as plain DTensors.
            is_early = isinstance(expected, RaggedDTensor) and group.main.local.is_meta
            remedy = "; call to_empty(device=...) before you load a state dict" if is_early else ""
            raise ValueError(
                f"parameter '{names[index]}' was replaced by {_described(parameter)}; a sharded parameter can be "
                f"replaced only by {_described(expected)}, sharded in the same way over the same mesh{remedy}"
            )


def _foreign(group: ParamGroup, found: Sequence[nn.Parameter]) -> list[int]:
    """Which of the parameters found belong to another group."""
    pairs = enumerate(zip(found, group.params))
    return [index for index, (p, param) in pairs if p is not param.sharded and group_of(p) is not None]


def _take(group: ParamGroup, main: DBuffer, found: Sequence[nn.Parameter], ours: bool) -> None:
    """Make the parameters found the group's, over ``main``, or copy their grad and requires_grad to ``ours``."""
    for index, (parameter, param) in enumerate(zip(found, group.params)):
        param.attributes.update(param.sharded.__dict__)
        if not ours:
            _adopt(group, index, parameter)
        kept = param.sharded
        if group.is_extended:  # it lies in no buffer
            if kept is not parameter:
                torch.utils.swap_tensors(kept, parameter)
            continue
        _put_attributes_back(param)
        fresh = _torch.as_parameter(as_dtensor(main, index, param.inner), parameter.requires_grad)
        grad = parameter.grad
        if kept is not parameter:
            kept.grad = None
        if not _torch.replace_local(kept, fresh):
            _become(kept, fresh, grad)
        elif grad is not None and kept.grad is not grad:
            _torch.allow_grad_of(kept, grad.dtype)
            kept.grad = grad


def _become(parameter: nn.Parameter, fresh: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Replace the contents of a parameter by those of ``fresh``, but keep its attributes, and set this gradient."""
    parameter.grad = None
    fresh.__dict__.update(parameter.__dict__)
    if grad is not None:
        _torch.allow_grad_of(fresh, grad.dtype)
        fresh.grad = grad
    torch.utils.swap_tensors(parameter, fresh)


def _adopt(group: ParamGroup, index: int, parameter: nn.Parameter) -> None:
    """Make a parameter that was assigned to the modules param ``index`` of the group."""
    param = group.params[index]
    if parameter is param.sharded:
        return
    param.sharded.grad = None
    adopt(group, index, parameter)
    _put_attributes_back(param)
    for other in (site.look() for site in param.sites):
        if isinstance(other, nn.Parameter) and other is not parameter and group_of(other) is None:
            supersede(group, index, other)  # a tied module was given an equal parameter


def _restore(group: ParamGroup) -> None:
    """Restore the state before a change that is refused."""
    _take(group, group.main, [param.sharded for param in group.params], ours=True)
    _show(group)


def _owns_storage(group: ParamGroup) -> bool:
    """Whether the parameters still use their memory, in the main buffer if they lie there."""
    if group.is_extended:
        return not any(map(group.snapshot.is_moved, range(len(group.params))))
    for index, param in enumerate(group.params):
        local, view = _torch.local_of(param.sharded), group.main.local_view(index)
        if local.device != view.device or local.dtype != view.dtype or local.data_ptr() != view.data_ptr() != 0:
            return False
    return True


def _described(value: torch.Tensor) -> str:
    cut = f" with placements {tuple(value.placements)}" if isinstance(value, DTensor) else ""
    return f"a {type(value).__name__} of shape {tuple(value.shape)}{cut}"


def check_found(group: ParamGroup, found: Sequence[nn.Parameter], names: Names) -> None:
    """Raise if `fill` could not adopt the parameters found, some of them on the meta device."""
    _refuse_others(group, found, names)
    for index, parameter in enumerate(found):
        if parameter.dtype != group.main.dtype:
            raise ValueError(
                f"parameter '{names[index]}' was given values of {parameter.dtype}; the parameters that are sharded "
                f"with it are {group.main.dtype} and have no values yet. Give all of them values of one dtype"
            )


def fill(group: ParamGroup, full: Sequence[torch.Tensor], found: Sequence[nn.Parameter], names: Names) -> None:
    """Shard full tensors that every rank has into a new main buffer on their device.

    ``found``: the parameters of the modules before. Those that have values keep them.
    """
    if group.is_extended:
        raise ValueError(f"parameter '{names[0]}' is a tensor subclass: call to_empty() and set its values yourself")
    parallel = [param.inner for param in group.params]
    mine = [whole if p is None else _torch.local_rows(whole, p.spec) for whole, p in zip(full, parallel)]
    main = group.home.take(DBuffer.distribute(mine, group.layout, group.mesh, group.main.placements))
    for index, parameter in enumerate(found):
        if not parameter.is_meta:
            main.local_view(index).copy_(_torch.local_of(parameter))
    _take(group, main, found, ours=False)
    group.set_main(main)
    _show(group)
