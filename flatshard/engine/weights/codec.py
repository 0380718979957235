"""How this rank's part of main weights becomes what travels, and what was gathered becomes full weights.

There are three. Under a `Cast` full weights are views of what was gathered: a part is written where it belongs in the
gathered buffer, and there is nothing to decode. `Blocks` has a buffer of bytes for what travels, which is decoded into
the gathered buffer. An `Extension` sends tensors of its own choice.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch.distributed.device_mesh import DeviceMesh

from flatshard import _torch
from flatshard.buffer import DBuffer
from flatshard.engine.parameters.sharded_param import ShardedParam
from flatshard.engine.weights.formats import Formats
from flatshard.layout import Layout
from flatshard.policy import MixedPrecisionPolicy, Placements


class Codec(Protocol):
    dtype: torch.dtype  # of full weights


class Cast:
    """Full weights are views of what was gathered: main's own values, or each part cast before the gather."""

    def __init__(self, main: torch.dtype, dtype: torch.dtype) -> None:
        self.dtype = dtype
        self.sends_main = main == dtype  # main's own bytes travel: nothing needs to be encoded

    def encode(self, main: Sequence[torch.Tensor], wire: Sequence[torch.Tensor]) -> None:
        """Write each run of ``main`` into the run of ``wire`` beside it."""
        torch._foreach_copy_(list(wire), list(main))


class Blocks:
    """Some tensors travel as one byte per element and a scale per block, the others cast as by a `Cast`.

    What travels are buffers of bytes, cut into as many pieces as main is. All of a group is in one of them.
    """

    def __init__(self, formats: Formats, dtype: torch.dtype) -> None:
        self.dtype, self.formats = dtype, formats
        self._coder = formats.gather_coder(dtype)
        self.layout = self._coder.wire.bytes  # of what travels

    def encode(self, main: DBuffer, wire: DBuffer) -> None:
        """Write this rank's part of main where it belongs in a buffer of bytes."""
        (piece,) = wire.runs(main.held)
        self._coder.encode(main.runs(), main.held, piece)

    def decode(self, wire: DBuffer, full: DBuffer) -> None:
        """Bring the values of all pieces into a buffer that holds everything."""
        self._coder.decode(wire.runs()[0].view(1, -1), full.held, full.local)


class DecodingCodec(Codec, Protocol):
    """What travels is not what full weights are views of."""

    def encode(self) -> list[torch.Tensor]:
        """What this rank gives to be gathered, inside the lane: plain tensors, of the same sizes on all ranks."""

    def decode(self, gathered: Sequence[torch.Tensor]) -> None:
        """Bring the full values, of what all ranks gave, into `full`: always the same tensors from the first time on.

        ``gathered``: each of the tensors of `encode`, flat, for all ranks after one another.
        """

    def full(self, index: int) -> torch.Tensor:
        """The values of one param."""

    def release(self) -> None:
        """Give back the memory of full values; `decode` will be called before they are used again."""


class Extension:
    """One parameter of a tensor subclass, which encodes and decodes itself by PyTorch's protocol for that:

    ``fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)``, or of ``mesh`` alone, returns what is to
    be gathered of this rank's part, any number of tensors, and anything to remember until then.
    ``fsdp_post_all_gather(gathered, remembered, param_dtype, *, out=None)`` returns the full parameter, and tensors
    whose memory can be taken while nobody uses it; or, given ``out``, which it returned before, fills it.

    The sharded parameter holds this rank's part as the subclass; it does not lie in a main buffer.
    """

    def __init__(
        self,
        param: ShardedParam,
        layout: Layout,
        mesh: DeviceMesh,
        policy: MixedPrecisionPolicy,
        device: torch.device,
        dtype: torch.dtype,
        index: int = 0,
    ) -> None:
        """``index``: of the parameter in the layout."""
        self.dtype = dtype
        self._member, self._mesh, self._policy, self._device = param, mesh, policy, device
        self._shape = torch.Size(layout.slots[index].shape)
        rows = -(-self._shape[0] // layout.num_shards)
        self._padded = torch.Size((rows, *self._shape[1:]))  # the shape of a part, the same on all ranks
        self._sizes: list[torch.Size] = []  # of what this rank gives to be gathered
        self._remembered: Any = None
        self._made: torch.Tensor | None = None
        self._owned: list[torch.Tensor] = []  # memory of the full parameter

    @property
    def _local(self) -> torch.Tensor:
        return _torch.local_of(self._member.sharded)

    def encode(self) -> list[torch.Tensor]:
        local = self._local
        if local.device != self._device:
            local = local.to(self._device, non_blocking=True)
        stride, module = torch.empty(self._shape, device="meta").stride(), self._member.sites[0].module()
        context = (self._shard_mesh(), self._shape, stride, module, self._policy)
        before = self._methods(local)[0]
        count = len(inspect.signature(before).parameters)
        if count not in (1, len(context)):
            raise TypeError(
                f"fsdp_pre_all_gather of parameter '{self._member.name}' takes {count} arguments; it is given a mesh, "
                "or that and the whole size and stride, the module and the precision policy"
            )
        given, self._remembered = before(*context[:count])
        given = [given] if isinstance(given, torch.Tensor) else list(given)
        if local.shape != self._padded:
            given = [self._filled_up(as_plain(each)) if each.shape == local.shape else each for each in given]
        self._sizes = [each.size() for each in given]
        if local.shape != self._padded and any(size != self._padded for size in self._sizes):
            raise ValueError(
                f"parameter '{self._member.name}' is cut unevenly, so fsdp_pre_all_gather must return tensors padded "
                f"to shape {tuple(self._padded)} on every rank; it returned {[tuple(size) for size in self._sizes]}"
            )
        return [as_plain(each) for each in given]

    def _filled_up(self, part: torch.Tensor) -> torch.Tensor:
        """Rows of this rank, and as many of no meaning as others have more."""
        padded = part.new_empty(self._padded)
        padded[: part.shape[0]].copy_(part)
        return padded

    def decode(self, gathered: Sequence[torch.Tensor]) -> None:
        parts = [flat.view(-1, *size[1:]) for flat, size in zip(gathered, self._sizes)]
        # What was padded for the gather comes back without: the parameter could not be filled from it otherwise.
        parts = [part[: self._shape[0]] if size == self._padded else part for part, size in zip(parts, self._sizes)]
        after, full = self._methods(self._local)[1], self._member.full
        remembered, self._remembered = self._remembered, None
        if self._made is None or full is None:
            made, owned = after(tuple(parts), remembered, self.dtype)
            stride = torch.empty(self._shape, device="meta").stride()
            self._made, self._owned = made.as_strided(self._shape, stride, 0), list(owned)
            return
        for tensor in self._owned:
            storage = tensor.untyped_storage()
            if not storage.nbytes():
                storage.resize_(tensor.numel() * tensor.element_size())
        with _torch.keeping_versions([full, *self._owned]):
            after(tuple(parts), remembered, self.dtype, out=full)

    def full(self, index: int) -> torch.Tensor:
        assert self._made is not None
        return self._made

    def release(self) -> None:
        for tensor in self._owned:
            tensor.untyped_storage().resize_(0)

    def _methods(self, local: torch.Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
        before, after = (getattr(local, f"fsdp_{when}_all_gather", None) for when in ("pre", "post"))
        if before is None or after is None:
            raise TypeError(
                f"parameter '{self._member.name}' is a {type(local).__name__}, which says not how it is gathered; "
                "define fsdp_pre_all_gather and fsdp_post_all_gather in that class, freeze the parameter before it is "
                "sharded, hold it as a plain tensor, or keep it whole on every rank with flatshard.no_shard"
            )
        return before, after

    def _shard_mesh(self) -> DeviceMesh:
        if self._mesh.ndim == 1:
            return self._mesh
        names = self._mesh.mesh_dim_names
        if names is None:
            raise ValueError(f"parameter '{self._member.name}' needs a mesh whose axes have names; name them")
        return self._mesh[names[-1]]


class CombinedCodec:
    """Parameters of tensor subclasses that are gathered by one launch."""

    def __init__(self, each: Sequence[Extension]) -> None:
        self.dtype, self._each = each[0].dtype, list(each)
        self._counts: list[int] = []  # of tensors that each has sent

    def encode(self) -> list[torch.Tensor]:
        given = [one.encode() for one in self._each]
        self._counts = [len(tensors) for tensors in given]
        return [tensor for tensors in given for tensor in tensors]

    def decode(self, gathered: Sequence[torch.Tensor]) -> None:
        end = 0
        for one, count in zip(self._each, self._counts):
            one.decode(gathered[end : end + count])
            end += count

    def full(self, index: int) -> torch.Tensor:
        return self._each[index].full(0)

    def release(self) -> None:
        for one in self._each:
            one.release()


def as_plain(given: torch.Tensor) -> torch.Tensor:
    """A tensor that can be sent; of a subclass, what copying it to one leaves there."""
    if type(given) is torch.Tensor:
        return given
    plain = torch.empty(given.shape, dtype=given.dtype, device=given.device)
    plain.copy_(given)
    return plain


def is_extended(tensor: torch.Tensor) -> bool:
    """Whether a parameter, or the local part of one, is of a class that holds its values in other tensors."""
    return _torch.is_wrapper(_torch.held_of(tensor))


def unfilled(layout: Layout, mesh: DeviceMesh, placements: Placements, dtype: torch.dtype) -> DBuffer:
    """The main buffer of extended parameters: a layout, and no memory."""
    return DBuffer.zeros(layout, mesh, placements.optimizer, dtype=dtype, device="meta")
