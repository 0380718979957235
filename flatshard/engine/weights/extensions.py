"""Parameters of tensor subclasses, which encode themselves for an all-gather and decode what is gathered."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _torch
from flatshard.buffer import DBuffer, Pool, Ticket
from flatshard.engine.parameters.sharded_param import ShardedParam
from flatshard.engine.weights.source import Source, lasting_tensors
from flatshard.layout import Layout
from flatshard.policy import MixedPrecisionPolicy, Placements


class Extension:
    """One parameter of a tensor subclass, which encodes and decodes itself by PyTorch's protocol:

    ``fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)``, or with ``mesh`` alone, returns the
    tensors to be gathered from this rank's shard, any number of them, and metadata. ``fsdp_post_all_gather(gathered,
    metadata, param_dtype, *, out=None)`` returns the full parameter, and tensors whose memory can be freed while the
    parameter is not used; or, given ``out``, which it returned before, fills it.

    The sharded parameter holds this rank's shard as the subclass; it is not in a main buffer.

    With ``fsdp_should_release_all_gather_outputs_after_post_all_gather() -> True`` (of torch 2.15) the full parameter
    shares no memory with what was gathered, which is freed at once.
    """

    def __init__(
        self,
        param: ShardedParam,
        index: int,
        layout: Layout,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        """``index``: of the parameter in the layout."""
        self.dtype = dtype
        self._member, self._mesh, self._policy, self._device = param, mesh, policy, device
        self._shape = torch.Size(layout.slots[index].shape)
        rows = -(-self._shape[0] // layout.num_shards)
        self._padded = torch.Size((rows, *self._shape[1:]))  # the shape of a part, the same on all ranks
        self._sizes: list[torch.Size] = []  # of the tensors that this rank sends
        self._metadata: Any = None  # from `fsdp_pre_all_gather`
        self.made: torch.Tensor | None = None  # the full parameter
        self._owned: list[torch.Tensor] = []  # its memory

    @property
    def _local(self) -> torch.Tensor:
        return _torch.local_of(self._member.sharded)

    def _on_device(self) -> torch.Tensor:
        return self._local if self._local.device == self._device else self._local.to(self._device, non_blocking=True)

    @property
    def copies(self) -> bool:
        """Whether the full parameter shares no memory with what was gathered."""
        method = getattr(self._local, "fsdp_should_release_all_gather_outputs_after_post_all_gather", None)
        return method is not None and method()

    def encode(self) -> list[torch.Tensor]:
        """What this rank sends, inside the lane: plain tensors, of the same sizes on all ranks."""
        local = self._on_device()
        stride, module = torch.empty(self._shape, device="meta").stride(), self._member.sites[0].module()
        mesh, names = self._mesh, self._mesh.mesh_dim_names
        if mesh.ndim > 1:
            if names is None:
                raise ValueError(f"parameter '{self._member.name}' is a tensor subclass: its mesh needs mesh_dim_names")
            mesh = mesh[names[-1]]
        context = (mesh, self._shape, stride, module, self._policy)
        before = self._methods(local)[0]
        count = len(inspect.signature(before).parameters)
        if count not in (1, len(context)):
            raise TypeError(
                f"fsdp_pre_all_gather of parameter '{self._member.name}' takes {count} arguments; it must take 1 "
                "(mesh) or 5 (mesh, outer_size, outer_stride, module, mp_policy)"
            )
        sent, self._metadata = before(*context[:count])
        sent = [sent] if isinstance(sent, torch.Tensor) else list(sent)
        if local.shape != self._padded:
            sent = [self._pad(as_plain(each)) if each.shape == local.shape else each for each in sent]
        self._sizes = [each.size() for each in sent]
        if local.shape != self._padded and any(size != self._padded for size in self._sizes):
            raise ValueError(
                f"parameter '{self._member.name}' has shards of unequal size: fsdp_pre_all_gather must pad its tensors "
                f"to {tuple(self._padded)} on every rank; it returned {[tuple(size) for size in self._sizes]}"
            )
        return [as_plain(each) for each in sent]

    def _pad(self, part: torch.Tensor) -> torch.Tensor:
        """The rows of this rank, padded to as many as the first rank has."""
        padded = part.new_zeros(self._padded[0], *part.shape[1:])
        padded[: part.shape[0]].copy_(part)
        return padded

    def decode(self, gathered: Sequence[torch.Tensor]) -> None:
        """Decode what all ranks sent, each tensor of `encode` flat, into `made`: the same tensor in every call."""
        parts = [flat.view(-1, *size[1:]) for flat, size in zip(gathered, self._sizes)]
        # Without the padding, which ``out`` has no room for.
        parts = [part[: self._shape[0]] if size == self._padded else part for part, size in zip(parts, self._sizes)]
        after, full = self._methods(self._local)[1], self._member.full
        metadata, self._metadata = self._metadata, None
        if self.made is None or full is None:
            made, owned = after(tuple(parts), metadata, self.dtype)
            stride = torch.empty(self._shape, device="meta").stride()
            self.made, self._owned = made.as_strided(self._shape, stride, 0), list(owned)
            return
        for tensor in self._owned:
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                storage.resize_(tensor.numel() * tensor.element_size())
        with _torch.keeping_versions([full, *self._owned]):
            after(tuple(parts), metadata, self.dtype, out=full)

    def release(self) -> None:
        """Free the memory of the full parameter; `decode` is called before it is used again."""
        for tensor in self._owned:
            tensor.untyped_storage().resize_(0)

    def _methods(self, local: torch.Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
        before, after = (getattr(local, f"fsdp_{when}_all_gather", None) for when in ("pre", "post"))
        if before is None or after is None:
            raise TypeError(
                f"parameter '{self._member.name}' is a {type(local).__name__}, which does not define how it is "
                "gathered; define fsdp_pre_all_gather and fsdp_post_all_gather in that class, freeze the parameter "
                "before fully_shard, use a plain tensor, or replicate it with flatshard.no_shard"
            )
        return before, after


class LeafwiseExtension(Extension):
    """A frozen parameter of a subclass without these methods: torchao's quantised weights.

    Such a tensor consists of plain tensors (`__tensor_flatten__`). Those with one row for each of its rows (codes, a
    scale per row) are sharded, gathered and combined again; all others (a scale of the whole tensor, a packed form)
    stay whole on every rank. The result has the same bytes, whatever they mean.
    """

    def __init__(self, param: ShardedParam, *others: Any) -> None:
        super().__init__(param, *others)
        assert param.structure is not None
        self._structure, self._cut = param.structure

    def encode(self) -> list[torch.Tensor]:
        leaves = zip(self._structure.leaves(self._on_device()), self._cut)
        sent = [self._pad(leaf) for leaf, is_cut in leaves if is_cut]
        self._sizes = [each.size() for each in sent]
        return sent

    def decode(self, gathered: Sequence[torch.Tensor]) -> None:
        parts = [flat.view(-1, *size[1:])[: self._shape[0]] for flat, size in zip(gathered, self._sizes)]
        if self.made is None:
            self._owned = [part.clone() for part in parts]
            left, local = iter(self._owned), self._local
            leaves = zip(self._structure.leaves(local), self._cut)
            whole = (next(left) if cut else leaf.to(self._device, copy=True) for leaf, cut in leaves)
            self.made = self._structure.build(whole)
            return
        for owned, part in zip(self._owned, parts):
            owned.untyped_storage().resize_(owned.numel() * owned.element_size())
            with _torch.keeping_versions([owned]):
                owned.copy_(part)


class Decoded(Source):
    """Parameters of tensor subclasses, gathered in one launch and decoded into memory of their own."""

    def __init__(self, each: Sequence[Extension], mesh: DeviceMesh) -> None:
        self.each, self._mesh = list(each), mesh
        self._pool: Pool | None = None
        self._counts: list[int] = []  # of tensors that each parameter has sent
        self.wire: list[torch.Tensor] = []  # what is gathered, flat
        self._is_open = False

    def gather(self, pool: Pool, name: str, lasting: bool, comm: Any = None) -> Ticket:
        self._pool, self._is_open = pool, False
        lane, axis = pool.lane, self._mesh.ndim - 1
        group, ranks = lane.group(self._mesh, axis), self._mesh.size(axis)
        with lane.entered(), lasting_tensors():
            encoded = [one.encode() for one in self.each]
            self._counts = [len(tensors) for tensors in encoded]
            given = [tensor for tensors in encoded for tensor in tensors]
            if not self.wire:
                self.wire = [pool.empty(each.numel() * ranks, each.dtype) for each in given]
            for output in self.wire:
                pool.allocate(output)
            sent = [(output, each.reshape(-1)) for output, each in zip(self.wire, given) if each.numel()]
            return lane.all_gather(group, *zip(*sent), name=name) if sent else lane.mark()

    def open(self) -> None:
        if self._is_open:
            return
        assert self._pool is not None
        gathered = iter(self.wire)
        with lasting_tensors():
            for one, count in zip(self.each, self._counts):
                parts = list(islice(gathered, count))
                one.decode(parts)
                for part in parts if one.copies else ():
                    self._pool.release(part)
        self._is_open = True

    def full(self, index: int) -> torch.Tensor:
        made = self.each[index].made
        assert made is not None
        return made

    def release(self) -> None:
        assert self._pool is not None
        for output in self.wire:
            self._pool.release(output)
        for one in self.each:
            one.release()

    def cancel(self) -> None:
        assert self._pool is not None
        self._pool.lane.join()  # as in `Gathered.cancel`
        self.release()


def as_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A plain tensor with the values of a tensor, which may be of a subclass."""
    if type(tensor) is torch.Tensor:
        return tensor
    plain = torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device)
    plain.copy_(tensor)  # which may return a subclass
    return plain


def is_extended(tensor: torch.Tensor) -> bool:
    """Whether a parameter, or its local tensor, is of a subclass that holds its values in other tensors."""
    return _torch.is_wrapper(_torch.held_of(tensor))


def unfilled(layout: Layout, mesh: DeviceMesh, placements: Placements, dtype: torch.dtype) -> DBuffer:
    """The main buffer of extended parameters: a layout, and no memory."""
    return DBuffer.zeros(layout, mesh, placements.optimizer, dtype=dtype, device="meta")
