"""Parameters of tensor subclasses that say themselves how they are gathered.

A sharded one holds this rank's part as the subclass; it does not lie in a main buffer. What it gives to be gathered is
gathered, and what it makes of that is the full parameter. Gradients are plain and go the way of all others.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _torch
from flatshard.buffer import DBuffer, Pool, Ticket
from flatshard.engine.codec import Extension
from flatshard.engine.gradients import Gradients
from flatshard.engine.group import Group, make_members
from flatshard.engine.host import Home
from flatshard.layout import Layout, is_sharded
from flatshard.policy import MixedPrecisionPolicy, Placements


class PlainGradients(Gradients):
    """Of a subclass, whose gradients may be of it too."""

    def take(self) -> list[torch.Tensor | None]:
        return [None if gradient is None else _plain(gradient) for gradient in super().take()]


class ExtendedGroup(Group):
    """One parameter that encodes and decodes itself. Its main buffer has a layout and no memory."""

    _gradients = PlainGradients

    def set_main(self, main: DBuffer) -> None:
        super().set_main(main)
        self.extension = Extension(self.members[0].name)
        self._gathered: list[torch.Tensor] = []
        self._sizes: list[torch.Size] = []  # of what this rank gives to be gathered
        self._remembered: Any = None
        self._owned: list[torch.Tensor] = []  # memory of the full parameter
        self._decoded = False

    @property
    def _local(self) -> torch.Tensor:
        return _torch.local_of(self.members[0].sharded)

    def gather(self, pool: Pool, name: str, lasting: bool = False) -> None:
        if self.ticket is not None:
            return
        self._gather_pool, self._decoded = pool, False
        lane, axis = pool.lane, self.mesh.ndim - 1
        group, ranks = lane.group(self.mesh, axis), self.mesh.size(axis)
        tickets = []
        with lane.entered(), _torch.lasting():
            inputs = self._inputs()
            self._sizes = [given.size() for given in inputs]
            if not self._gathered:
                self._gathered = [pool.empty(given.numel() * ranks, given.dtype) for given in inputs]
            for output in self._gathered:
                pool.allocate(output)
            for dtype in dict.fromkeys(given.dtype for given in inputs):
                same = [(o, i.reshape(-1)) for o, i in zip(self._gathered, inputs) if i.dtype == dtype and i.numel()]
                if same:
                    outputs, pieces = zip(*same)
                    tickets.append(lane.all_gather(group, outputs, pieces, name=name))

        def wait() -> None:
            for ticket in tickets:
                ticket.wait()

        self.ticket = Ticket(then=wait)

    def _inputs(self) -> list[torch.Tensor]:
        """What this rank gives to be gathered: the same sizes on all ranks."""
        member, slot, local = self.members[0], self.layout.slots[0], self._local
        if self.home.host:
            local = local.to(self.home.device, non_blocking=True)
        stride, module = torch.empty(slot.shape, device="meta").stride(), member.sites[0].module()
        context = (self._shard_mesh(), torch.Size(slot.shape), stride, module, self.policy)
        inputs, self._remembered = self.extension.encode(local, *context)
        rows = -(-slot.shape[0] // self.layout.num_shards)
        padded = (rows, *slot.shape[1:])
        if tuple(local.shape) != padded and any(tuple(given.shape) != padded for given in inputs):
            raise ValueError(
                f"parameter '{member.name}' is cut unevenly, so fsdp_pre_all_gather must return tensors padded to "
                f"shape {padded} on every rank; it returned {[tuple(given.shape) for given in inputs]}"
            )
        return [_plain(given) for given in inputs]

    def _shard_mesh(self) -> DeviceMesh:
        if self.mesh.ndim == 1:
            return self.mesh
        names = self.mesh.mesh_dim_names
        if names is None:
            raise ValueError(f"parameter '{self.members[0].name}' needs a mesh whose axes have names; name them")
        return self.mesh[names[-1]]

    def swap_in(self) -> None:
        assert self.ticket is not None
        self.ticket.wait()
        if not self._decoded:
            with _torch.lasting():
                self._decode()
            self._decoded = True
        super().swap_in()

    def _decode(self) -> None:
        member, local, dtype = self.members[0], self._local, self.codec.wire_dtype
        whole = self.layout.slots[0].shape
        padded = (-(-whole[0] // self.layout.num_shards), *whole[1:])
        gathered = [flat.view(-1, *size[1:]) for flat, size in zip(self._gathered, self._sizes)]
        # What was padded for the gather comes back without: the parameter could not be filled from it otherwise.
        gathered = [g[: whole[0]] if tuple(s) == padded else g for g, s in zip(gathered, self._sizes)]
        if member.full is None:
            made, self._owned = self.extension.decode(local, gathered, self._remembered, dtype)
            self._adopt(member, made.as_strided(whole, torch.empty(whole, device="meta").stride(), 0))
        else:
            for tensor in self._owned:
                storage, size = tensor.untyped_storage(), tensor.numel() * tensor.element_size()
                if not storage.nbytes():
                    storage.resize_(size)
            with _torch.keeping_versions([member.full, *self._owned]):
                self.extension.decode_into(member.full, local, gathered, self._remembered, dtype)
        self._remembered = None

    def release(self) -> None:
        if self.ticket is None:
            return
        self.ticket.wait()
        self.swap_out()
        self.ticket = None
        assert self._gather_pool is not None
        for output in self._gathered:
            self._gather_pool.release(output)
        for tensor in self._owned:
            tensor.untyped_storage().resize_(0)

    def offer_main_grads(self) -> None:
        """Autograd computes its gradients: kernels know nothing of the subclass."""

    def take(self, given: nn.Parameter) -> None:
        """Let the sharded parameter be as ``given``, which may be itself: its values, its class, its dtype."""
        member = self.members[0]
        if given is not member.sharded:
            torch.utils.swap_tensors(member.sharded, given)
        local = self._local
        if local.dtype != self.main.dtype:
            self.set_main(_unfilled(self.layout, self.mesh, self.placements, local.dtype))


def _plain(given: torch.Tensor) -> torch.Tensor:
    """A tensor that can be sent; of a subclass, what copying it to one leaves there."""
    if type(given) is torch.Tensor:
        return given
    plain = torch.empty(given.shape, dtype=given.dtype, device=given.device)
    plain.copy_(given)
    return plain


def is_extended(tensor: torch.Tensor) -> bool:
    """Whether a parameter, or the local part of one, is of a class that holds its values in other tensors."""
    return _torch.is_wrapper(_torch.local_of(tensor) if _torch.is_parallel(tensor) else tensor)


def _unfilled(layout: Layout, mesh: DeviceMesh, placements: Placements, dtype: torch.dtype) -> DBuffer:
    return DBuffer.zeros(layout, mesh, placements.optimizer, dtype=dtype, device="meta")


def extended_group(
    named: Any,
    layout: Layout,
    mesh: DeviceMesh,
    placements: Placements,
    policy: MixedPrecisionPolicy,
    home: Home,
    axes: tuple[tuple[int, ...], tuple[int, ...]],
) -> ExtendedGroup:
    """Cut the one parameter ``named``, a tensor subclass."""
    name, parameter, _ = named
    kind, slot = type(parameter).__name__, layout.slots[0]
    if placements.parameter != placements.optimizer or not is_sharded(placements.optimizer[-1]) or slot.dim:
        raise ValueError(
            f"parameter '{name}' is a {kind}, which is sharded on dim 0 and by strategy 'optim_grads_params' only"
        )
    whole = (_torch.local_of(parameter) if _torch.is_parallel(parameter) else parameter).detach()
    main = _unfilled(layout, mesh, placements, whole.dtype)
    with torch.no_grad():
        whole = whole if whole.is_meta or whole.device == home.device else whole.to(home.device)
        local = main.part_of(0, whole).clone(memory_format=torch.contiguous_format)
        if home.host and not local.is_meta:
            local = local.cpu()
    return ExtendedGroup(make_members(main, [named], axes, local), main, placements, policy, home)
