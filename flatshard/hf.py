"""Methods of Hugging Face models that are units: what their users expect of them when weights are sharded.

Nothing of Transformers is imported: the methods are known by their names.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from flatshard.checkpoint.converted import of_their_own_classes
from flatshard.checkpoint.errors import exchange, together
from flatshard.checkpoint.full import iter_full_tensors
from flatshard.gathering import gathered


def methods_for(cls: type) -> dict[str, Callable[..., Any]]:
    """Methods by name for a subclass of ``cls`` whose instances are units."""
    made = {"generate": _held, "save_pretrained": _saved_by_rank_0}
    return {name: make(getattr(cls, name)) for name, make in made.items() if callable(getattr(cls, name, None))}


def _held(method: Callable[..., Any]) -> Callable[..., Any]:
    """`generate` runs forwards of the unit, and uses encoders, heads and parameters of it in between.

    The unit's own parameters stay gathered; those of the units inside come and go with every forward.
    """

    @functools.wraps(method)
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with gathered(self, recurse=False):
            return method(self, *args, **kwargs)

    return generate


def _saved_by_rank_0(method: Callable[..., Any]) -> Callable[..., Any]:
    """`save_pretrained`, called on all ranks: whole weights come to the host memory of rank 0, which writes them.

    They are gathered a bucket at a time. With a ``state_dict``, or where Transformers has sharded the model itself and
    knows what to do, it is the method as it was.
    """

    @functools.wraps(method)
    def save_pretrained(self: nn.Module, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        theirs = getattr(getattr(self, "config", None), "distributed_config", None) is not None
        if theirs or len(args) > 1 or kwargs.get("state_dict") is not None:
            return method(self, save_directory, *args, **kwargs)
        ranks = exchange("checkpoint_save")
        state = {
            name: tensor.to("cpu", copy=True)
            for name, tensor in iter_full_tensors(self, names=_adapters(self))
            if ranks.rank == 0
        }

        def write() -> None:
            if ranks.rank == 0:
                with of_their_own_classes(self):
                    method(self, save_directory, *args, **kwargs, state_dict=state)

        together(ranks, write)
        return None

    return save_pretrained


def _adapters(model: Any) -> set[str] | None:
    """Of a model of PEFT, the names of what its `save_pretrained` may write; None of any other: all."""
    known = getattr(model, "peft_config", None)
    if not known:
        return None
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    return trained | {name for name in model.state_dict() if any(f".{adapter}" in name for adapter in known)}
