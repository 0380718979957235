"""How main weights become what is gathered, and that becomes full parameters.

Ordinary ones are views of what was gathered. Tensor subclasses have their own ways.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch


class Codec(Protocol):
    """Encodes this rank's part of main into its part of the gathered buffer."""

    wire_dtype: torch.dtype
    sends_main: bool  # main's own bytes are the wire format: nothing needs to be encoded

    def encode(self, wire: Sequence[torch.Tensor], main: Sequence[torch.Tensor]) -> None:
        """Write the wire format of each run of ``main`` into the run of ``wire`` beside it."""


class Identity:
    """Compute in main's dtype."""

    sends_main = True

    def __init__(self, dtype: torch.dtype) -> None:
        self.wire_dtype = dtype

    def encode(self, wire: Sequence[torch.Tensor], main: Sequence[torch.Tensor]) -> None:
        torch._foreach_copy_(list(wire), list(main))


class Cast(Identity):
    """Compute in another dtype than main's: one cast of the local part, before the gather."""

    sends_main = False


class Extension:
    """A parameter of a tensor subclass that encodes and decodes itself, by PyTorch's protocol for that:

    ``fsdp_pre_all_gather(mesh, outer_size, outer_stride, module, mp_policy)``, or of ``mesh`` alone, returns what is to
    be gathered of this rank's part, any number of tensors, and anything to remember until then.
    ``fsdp_post_all_gather(gathered, remembered, param_dtype, *, out=None)`` returns the full parameter, and tensors
    whose memory can be taken while nobody uses it; or, given ``out``, which it returned before, fills it.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def methods(self, local: torch.Tensor) -> tuple[Callable[..., Any], Callable[..., Any]]:
        before, after = (getattr(local, f"fsdp_{when}_all_gather", None) for when in ("pre", "post"))
        if before is None or after is None:
            raise TypeError(
                f"parameter '{self.name}' is a {type(local).__name__}, which says not how it is gathered; define "
                "fsdp_pre_all_gather and fsdp_post_all_gather in that class, or hold the parameter as a plain tensor"
            )
        return before, after

    def encode(self, local: torch.Tensor, *context: Any) -> tuple[list[torch.Tensor], Any]:
        """What is gathered of this rank's part, and what to remember. ``context`` is as above, from ``mesh`` on."""
        before = self.methods(local)[0]
        count = len(inspect.signature(before).parameters)
        if count not in (1, len(context)):
            raise TypeError(
                f"fsdp_pre_all_gather of parameter '{self.name}' takes {count} arguments; it is given a mesh, or that "
                "and the whole size and stride, the module and the precision policy"
            )
        given, remembered = before(*context[:count])
        return [given] if isinstance(given, torch.Tensor) else list(given), remembered

    def decode(
        self, local: torch.Tensor, gathered: Sequence[torch.Tensor], remembered: Any, dtype: torch.dtype
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """The full parameter, and tensors whose memory can be taken."""
        full, owned = self.methods(local)[1](tuple(gathered), remembered, dtype)
        return full, list(owned)

    def decode_into(
        self,
        out: torch.Tensor,
        local: torch.Tensor,
        gathered: Sequence[torch.Tensor],
        remembered: Any,
        dtype: torch.dtype,
    ) -> None:
        """Fill a full parameter that `decode` returned."""
        self.methods(local)[1](tuple(gathered), remembered, dtype, out=out)


def codec_for(main: torch.dtype, compute: torch.dtype) -> Codec:
    return Identity(main) if main == compute else Cast(compute)
