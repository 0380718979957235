"""What users do to parameters after sharding: `.to`, `to_empty`, `load_state_dict(assign=True)`, plain assignment.

All of it gives a module other parameters, or a parameter other memory, than the group's buffers. Either the group takes
the new values over, into a new main buffer, or it refuses with the reason and everything is as before. The parameter
objects stay what modules and optimizers hold.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from flatshard import _torch
from flatshard.buffer import DBuffer
from flatshard.buffer.dtensor import as_dtensor
from flatshard.engine.extended import ExtendedGroup
from flatshard.engine.group import Group, Member

Change = Callable[[torch.Tensor], torch.Tensor]


def is_moved(group: Group) -> bool:
    """Whether somebody has replaced a parameter of ours in its module, or its memory. Asked once per forward."""
    for member in group.members:
        sharded = member.sharded
        if _torch.local_of(sharded) is not member.local:
            return True
        for site in member.sites:
            if site.look() is not sharded:
                return True
    return False


@_torch.lasting()
def absorb(group: Group, awaited: bool) -> None:
    """Take over what the modules hold in the place of our parameters; raise, and put ours back, where that is wrong.

    ``awaited``: a backward is to come that will read the gathered weights of now.
    """
    given = [_given(group, member) for member in group.members]
    if isinstance(group, ExtendedGroup):
        _absorb_extended(group, given[0], awaited)
    elif any(p is not m.sharded for p, m in zip(given, group.members)) or not _owns_storage(group):
        try:
            _refuse_change(group, awaited)
            main = _as_main(group, given)
        except (ValueError, RuntimeError):
            _point(group, group.main, [member.sharded for member in group.members])
            raise
        _point(group, main, given)
        group.set_main(main)
    for member in group.members:
        member.local = _torch.local_of(member.sharded)
        for name, value in member.attributes.items():
            member.sharded.__dict__.setdefault(name, value)
        for site in member.sites:
            site.put(member.sharded)


@contextmanager
def applying(group: Group, change: Change) -> Iterator[None]:
    """Around `module._apply(change)`: what is held here survives it, or is converted with the weights."""
    grads = [member.sharded.grad for member in group.members]
    for member in group.members:
        member.attributes = dict(member.sharded.__dict__)
        member.sharded.grad = None  # `_apply` could not put back one of another dtype than the parameter's
    before = group.main
    try:
        yield
    finally:
        same = group.main is before
        for member, grad in zip(group.members, grads):
            if grad is not None and not same:
                device = _torch.local_of(member.sharded).device
                local = _torch.local_of(grad).to(device, group.gradients.grad_dtype)
                grad = _torch.like_dtensor(member.sharded, local)
            if grad is not None:
                _torch.allow_grad_of(member.sharded, grad.dtype)
                member.sharded.grad = grad


def check_change(group: Group, change: Change, awaited: bool) -> None:
    """Refuse a change of all parameters that could not be taken over, before it is made."""
    probe = torch.empty(0, dtype=group.main.dtype, device=_torch.local_of(group.members[0].sharded).device)
    changed = change(probe)
    if changed is probe:
        return
    _refuse_device(group, changed.device)
    _refuse_change(group, awaited)


def _refuse_change(group: Group, awaited: bool) -> None:
    name = group.members[0].name
    if awaited:
        raise RuntimeError(
            f"parameter '{name}' was replaced or moved between a forward and its backward, which needs it as it was; "
            "run the backward first, or give it up with reset() on the root"
        )
    if group.gradients.has_partial:
        raise RuntimeError(
            f"parameter '{name}' was replaced or moved while gradients of earlier micro-batches wait to be reduced; "
            "finish the optimizer step first, or give them up with zero_grad() on the model"
        )


def _refuse_device(group: Group, device: torch.device) -> None:
    if device.type not in (group.mesh.device_type, _torch.local_of(group.members[0].sharded).device.type):
        raise ValueError(
            f"parameter '{group.members[0].name}' was moved to {device}, and the mesh it is sharded over is on "
            f"{group.mesh.device_type}; shard a model that is already there, over a mesh of that device"
        )


def _absorb_extended(group: ExtendedGroup, given: nn.Parameter, awaited: bool) -> None:
    member = group.members[0]
    if given is member.sharded and _torch.local_of(given) is member.local:
        return
    _refuse_change(group, awaited)
    if given is not member.sharded and not (isinstance(given, DTensor) and _torch.is_cut_alike(given, member.sharded)):
        for site in member.sites:
            site.put(member.sharded)
        raise ValueError(
            f"parameter '{member.name}' was replaced by {_described(given)}; a sharded parameter can be replaced only "
            f"by {_described(member.sharded)}, cut like it over the same mesh"
        )
    group.take(given)


def _given(group: Group, member: Member) -> nn.Parameter:
    """What the modules hold in the place of one of our parameters."""
    found = [site.look() for site in member.sites]
    first = next((parameter for parameter in found if parameter is not member.sharded), found[0])
    for other in found:
        if first is None or other is None or not (other is first or other is member.sharded or _equal(first, other)):
            _point(group, group.main, [each.sharded for each in group.members])
            raise ValueError(
                f"parameter '{member.name}' was removed, or replaced by different values in the modules that share it; "
                "change sharded parameters in place"
            )
    assert first is not None
    return first


def _equal(one: nn.Parameter, other: nn.Parameter) -> bool:
    if not isinstance(one, DTensor) or not isinstance(other, DTensor):
        return False
    return torch.equal(_torch.local_of(one), _torch.local_of(other))


def _as_main(group: Group, given: Sequence[nn.Parameter]) -> DBuffer:
    """A main buffer with the values of the parameters given, of their dtype and on their device."""
    for index, (parameter, member) in enumerate(zip(given, group.members)):
        expected = as_dtensor(group.main, index, member.inner)
        if not isinstance(parameter, DTensor) or not _torch.is_cut_alike(parameter, expected):
            raise ValueError(
                f"parameter '{member.name}' was replaced by {_described(parameter)}; a sharded parameter can be "
                f"replaced only by {_described(expected)}, cut like it over the same mesh"
            )
    locals_ = [_torch.local_of(parameter) for parameter in given]
    kinds = {(local.dtype, local.device) for local in locals_}
    if len(kinds) > 1:
        raise ValueError(
            f"parameters of one group were given different dtypes or devices: "
            f"{ {m.name: (part.dtype, part.device) for m, part in zip(group.members, locals_)} }"
        )
    ((dtype, device),) = kinds
    _refuse_device(group, device)
    main = DBuffer.zeros(group.layout, group.mesh, group.main.placements, dtype=dtype, device=device)
    for index, local in enumerate(locals_):
        main.local_view(index).copy_(local)
    return group.home.take(main)


def _point(group: Group, main: DBuffer, given: Sequence[nn.Parameter]) -> None:
    """Let our parameters lie in ``main``, with the gradients and ``requires_grad`` of the ones given."""
    for index, (parameter, member) in enumerate(zip(given, group.members)):
        fresh = _torch.as_parameter(as_dtensor(main, index, member.inner), parameter.requires_grad)
        fresh.__dict__.update({**member.attributes, **member.sharded.__dict__})
        grad, member.sharded.grad = parameter.grad, None
        if grad is not None:
            _torch.allow_grad_of(fresh, grad.dtype)
            fresh.grad = grad
        torch.utils.swap_tensors(member.sharded, fresh)
        member.local = _torch.local_of(member.sharded)
        for site in member.sites:
            site.put(member.sharded)


def _owns_storage(group: Group) -> bool:
    """Whether our parameters lie where the main buffer has their rows."""
    for index, member in enumerate(group.members):
        local, view = _torch.local_of(member.sharded), group.main.local_view(index)
        if local.device != view.device or local.dtype != view.dtype or local.data_ptr() != view.data_ptr() != 0:
            return False
    return True


def _described(value: torch.Tensor) -> str:
    if isinstance(value, DTensor):
        return f"a {type(value).__name__} of shape {tuple(value.shape)} with placements {tuple(value.placements)}"
    return f"a {type(value).__name__} of shape {tuple(value.shape)}"


def fill(group: Group, full: Sequence[torch.Tensor]) -> None:
    """Take values from full tensors that every rank has, into a new main buffer on their device."""
    if isinstance(group, ExtendedGroup):
        name = group.members[0].name
        raise ValueError(f"parameter '{name}' is of a tensor subclass; give it values yourself, after to_empty()")
    parallel = [member.inner for member in group.members]
    mine = [whole if p is None else _torch.part_of(whole, p.spec) for whole, p in zip(full, parallel)]
    main = group.home.take(DBuffer.distribute(mine, group.layout, group.mesh, group.main.placements))
    _point(group, main, [member.sharded for member in group.members])
    group.set_main(main)
