"""Parameters of a model: where they are registered, and their sharded and full forms."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from flatshard import _torch
from flatshard.buffer import DBuffer
from flatshard.buffer.dtensor import Parallel, as_dtensor

PLAIN = "_flatshard_plain"  # on a parameter that is a DTensor, of which its module wants the local part


@dataclass(frozen=True)
class Structure:
    """How a tensor of a subclass is made of plain tensors, its leaves."""

    kind: Any
    context: Any
    parts: dict[str, Structure | None]  # None: a plain tensor
    size: torch.Size
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Structure:
        asked: Any = tensor
        names, context = asked.__tensor_flatten__()
        inner = {name: getattr(tensor, name) for name in names}
        parts = {name: cls.of(part) if _torch.is_made_of_others(part) else None for name, part in inner.items()}
        return cls(type(tensor), context, parts, tensor.size(), tensor.stride())

    def leaves(self, tensor: torch.Tensor) -> Iterator[torch.Tensor]:
        for name, part in self.parts.items():
            inner = getattr(tensor, name)
            yield from (inner,) if part is None else part.leaves(inner)

    def build(self, leaves: Iterator[torch.Tensor], rows: int | None = None) -> torch.Tensor:
        """A tensor of these leaves. ``rows``: how many it has, if they are not all."""
        inner = {name: next(leaves) if p is None else p.build(leaves, rows) for name, p in self.parts.items()}
        size = self.size if rows is None else torch.Size((rows, *self.size[1:]))
        made: torch.Tensor = self.kind.__tensor_unflatten__(inner, self.context, size, self.stride)
        return made

    def mapped(self, tensor: torch.Tensor, change: Callable[[torch.Tensor], torch.Tensor], rows: int) -> torch.Tensor:
        """A tensor of ``rows`` rows: leaves with rows are changed, the others are copied."""
        parts = (change(leaf) if self.has_rows(leaf) else leaf for leaf in self.leaves(tensor))
        return self.build((part.clone(memory_format=torch.contiguous_format) for part in parts), rows)

    def has_rows(self, leaf: torch.Tensor) -> bool:
        """Whether a leaf of the whole tensor has one row for each of its rows, and so is sharded with it."""
        return leaf.dim() > 0 and leaf.shape[0] == self.size[0] > 1


@dataclass
class Site:
    """One place where a parameter is registered. Tied parameters have several."""

    module: weakref.ref[nn.Module]
    name: str
    slots: dict[str, nn.Parameter | None]  # the module's own dict
    is_plain: bool  # written to directly, because the module does not override __setattr__ as RNNs do

    @classmethod
    def of(cls, module: nn.Module, name: str) -> Site:
        is_plain = type(module).__setattr__ is nn.Module.__setattr__
        return cls(weakref.ref(module), name, module._parameters, is_plain)

    def look(self) -> nn.Parameter | None:
        """The object registered there, of any type."""
        return self.slots.get(self.name)

    def put(self, parameter: nn.Parameter) -> None:
        if self.is_plain:
            self.slots[self.name] = parameter
        else:
            module = self.module()
            assert module is not None
            setattr(module, self.name, parameter)


@dataclass
class ShardedParam:
    """One parameter of a group."""

    name: str  # from the unit's module down
    sites: list[Site]
    sharded: nn.Parameter  # a DTensor over main: what optimizers and checkpoints see
    full: nn.Parameter | None = None  # what forward and backward use; None before the first all-gather
    inner: Parallel | None = None  # of the full parameter, if tensor parallelism has made it a DTensor
    attributes: dict[str, object] = field(default_factory=dict)  # those of `sharded`, in case it is replaced
    structure: tuple[Structure, list[bool]] | None = None  # a subclass that is gathered leaf by leaf, and which are cut

    def make_full(self, values: torch.Tensor) -> None:
        """Create the full parameter from its values."""
        if self.inner is not None and not self.inner.hidden:
            values = _torch.dtensor_of(values, self.inner.spec)
        self.full = nn.Parameter(values, requires_grad=values.is_floating_point())
        self.attributes = dict(self.sharded.__dict__)
        own = self.full.__dict__
        own.update({name: value for name, value in self.attributes.items() if name not in own})
        if self.full.requires_grad:
            self.full.grad_dtype = None  # a function may return gradients that are more exact than the weights
            self.full.requires_grad = self.sharded.requires_grad


def make_params(
    main: DBuffer,
    named: Sequence[tuple[str, nn.Parameter, list[Site]]],
    axes: tuple[tuple[int, ...], tuple[int, ...]] = ((), ()),
    locals_: Sequence[torch.Tensor] | None = None,
    apart: DeviceMesh | None = None,
) -> list[ShardedParam]:
    """Sharded parameters over ``main``, in the place of the originals and with their attributes.

    ``axes``: the axes of the parameters' own mesh that data parallelism shards and replicates over, if it uses some.
    ``locals_``: this rank's parts of the parameters, if ``main`` does not hold them.
    ``apart``: a mesh on which each rank has different parameters, plain tensors.
    """
    params = []
    for index, (name, original, sites) in enumerate(named):
        hidden = bool(original.__dict__.get(PLAIN))
        inner = Parallel(_torch.spec_of(original), *axes, hidden) if isinstance(original, DTensor) else None
        inner = inner if apart is None else Parallel.held_apart(original, apart)
        local = None if locals_ is None else locals_[index]
        sharded = _torch.as_parameter(as_dtensor(main, index, inner, local), original.requires_grad)
        sharded.__dict__.update(attributes_of(original))
        for site in sites:
            site.put(sharded)
        params.append(ShardedParam(name, sites, sharded, inner=inner))
    return params


def attributes_of(parameter: nn.Parameter) -> dict[str, object]:
    """What users have put on a parameter."""
    own = {"_spec", "_local_tensor", "_is_param"}  # a DTensor's own
    if _torch.is_wrapper(parameter):
        own |= {name for name, value in parameter.__dict__.items() if isinstance(value, torch.Tensor)}
    return {name: value for name, value in parameter.__dict__.items() if name not in own}


@dataclass
class Plain:
    """A frozen parameter that `no_shard` keeps whole in its module: it is in no group and is not communicated.

    It is identified by where it is registered, because `materialize` and `to_empty` replace it.
    """

    name: str  # from the unit's module down
    sites: list[Site]
    keeps_dtype: bool

    @property
    def parameter(self) -> nn.Parameter:
        found = self.sites[0].look()
        assert found is not None
        return found

    def place(self, device: torch.device, dtype: torch.dtype | None) -> None:
        """Move it to the device and the dtype of compute."""
        parameter = self.parameter
        if not parameter.is_meta:
            is_cast = dtype is not None and parameter.is_floating_point() and not self.keeps_dtype
            parameter.data = parameter.data.to(device, dtype if is_cast else parameter.dtype)
        self.guard()

    def guard(self) -> None:
        """Raise if it gets a gradient: it would not be averaged, and the copies of the ranks would differ."""
        parameter = self.parameter
        if parameter._post_accumulate_grad_hooks or not parameter.is_floating_point() or parameter.requires_grad:
            return
        parameter.requires_grad_(True)  # a hook can be put only on what needs a gradient
        parameter.register_post_accumulate_grad_hook(functools.partial(_refuse_gradient, self.name))
        parameter.requires_grad_(False)


def _refuse_gradient(name: str, parameter: torch.Tensor) -> None:
    parameter.grad = None
    raise RuntimeError(
        f"parameter '{name}' was frozen and marked with no_shard when fully_shard was called, so its gradient is not "
        "averaged over the ranks; set requires_grad=True before fully_shard, or keep it frozen"
    )


class Snapshot:
    """The state of a group's parameters when it last put them into its modules.

    Detects that a parameter of a module, or its memory, has been replaced.

    A unit is not notified of such changes: parameters, and modules below the unit's own, do not refer to a unit. So
    every forward checks every parameter, with as few function calls as possible.
    """

    def __init__(self, params: Sequence[ShardedParam]) -> None:
        self._parameters = [param.sharded for param in params]
        self.locals = [_torch.local_of(parameter) for parameter in self._parameters]
        self._local_ids = list(map(id, self.locals))
        self._places: list[tuple[dict[str, nn.Parameter | None], str, nn.Parameter]] = []
        for param in params:
            for site in param.sites:
                self.add(site, param.sharded)

    def add(self, site: Site, parameter: nn.Parameter) -> None:
        """Check one more site too."""
        self._places.append((site.slots, site.name, parameter))

    def has_changed(self) -> bool:
        """Whether a parameter in a module, or its memory, has been replaced. Called once per forward."""
        try:
            for slots, name, parameter in self._places:
                if slots[name] is not parameter:
                    return True
        except KeyError:
            return True
        return list(map(id, map(_torch.local_part, self._parameters))) != self._local_ids

    def is_moved(self, index: int) -> bool:
        """Whether a parameter has other memory, in whichever module it is."""
        return _torch.local_of(self._parameters[index]) is not self.locals[index]
