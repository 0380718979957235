"""Bodies that were written for the CPU, on a GPU: what they make goes there, with the values that it has on the CPU."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _device
from torch.utils._pytree import tree_map_only

import flatshard.train.model

# Whose tensors are moved. Those of the library and of the rest of torch stay where they ask for them.
_MAKERS = (str(Path(__file__).parents[1]), str(Path(nn.__file__).parent), flatshard.train.model.__file__)

_FACTORIES = (
    *("arange", "as_tensor", "empty", "eye", "frombuffer", "full", "linspace", "ones", "tensor", "zeros"),
    *("rand", "randint", "randn", "randperm"),
)
_FILLS = ("bernoulli_", "normal_", "random_", "uniform_")
_LIKE = ("rand_like", "randn_like")


def _is_test() -> bool:
    return sys._getframe(2).f_code.co_filename.startswith(_MAKERS)


def _factory(make: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(*args: Any, requires_grad: bool = False, **kwargs: Any) -> torch.Tensor:
        if not _is_test() or kwargs.get("device") is not None:
            return make(*args, requires_grad=requires_grad, **kwargs) if requires_grad else make(*args, **kwargs)
        tensor = make(*args, **kwargs)
        if tensor.device.type == "cpu":  # and not that of a `with torch.device("meta")`
            tensor = tensor.to(device)
        return tensor.requires_grad_() if requires_grad else tensor

    return made


def _fill(fill: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
    @functools.wraps(fill)
    def filled(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not _is_test() or tensor.device != device or type(tensor) not in (torch.Tensor, nn.Parameter):
            return fill(tensor, *args, **kwargs)
        return tensor.copy_(fill(torch.empty_like(tensor, device="cpu", requires_grad=False), *args, **kwargs))

    return filled


def _like(make: Callable[..., torch.Tensor], device: torch.device) -> Callable[..., torch.Tensor]:
    @functools.wraps(make)
    def made(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if not _is_test() or tensor.device != device or type(tensor) not in (torch.Tensor, nn.Parameter):
            return make(tensor, *args, **kwargs)
        return make(torch.empty_like(tensor, device="cpu"), *args, **kwargs).to(device)

    return made


@contextmanager
def moving(device: torch.device) -> Iterator[None]:
    """Within, tensors that tests make without a device, or fill, get values of the CPU's generators, and are there."""
    _device._device_constructors()  # torch remembers them at the first call: as they are
    with ExitStack() as stack:
        for names, wrap, place in ((_FACTORIES, _factory, torch), (_FILLS, _fill, torch.Tensor), (_LIKE, _like, torch)):
            for name in names:
                stack.enter_context(mock.patch.object(place, name, wrap(getattr(place, name), device)))
        yield


@contextmanager
def _meshes_of(kind: str) -> Iterator[None]:
    """Within, meshes "of CPUs" are of this kind of device."""
    make = DeviceMesh.__init__

    def made(self: DeviceMesh, device_type: str, *args: Any, **kwargs: Any) -> None:
        make(self, kind if device_type == "cpu" else device_type, *args, **kwargs)

    with mock.patch.object(DeviceMesh, "__init__", made):
        yield


def on_device(rank: int, world: int, body: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs a body: its arguments, what it makes, and its meshes are of the GPU, or of the CPU that stands in."""
    device = torch.device("cuda", 0) if torch.cuda.is_initialized() else torch.device("cpu")
    args, kwargs = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), (args, kwargs))
    with moving(device), _meshes_of(device.type):
        return body(rank, world, *args, **kwargs)
