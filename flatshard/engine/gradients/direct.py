"""Weight gradients that kernels write into the buffer of the reduce, instead of returning them to autograd.

During a backward, a group that offers this has one full-size buffer in the reduce dtype. The part of a full parameter
in it is its ``main_grad``. A kernel that computes a weight gradient writes it there, or adds to it, and sets
`grad_added_to_main_grad`. Autograd then has no gradient for that parameter, or one to be ignored. Gradients of the
group that autograd does compute (norms, biases) are copied to the same buffer before the reduce.
"""

from __future__ import annotations

import weakref

import torch
from torch import nn

from flatshard.engine.gradients.collecting import refuse_orphan
from flatshard.engine.gradients.gradients import Gradients

_OWNER = "_flatshard_main_grad_of"


class ParameterWithMainGrad(nn.Parameter):
    """A full parameter with a buffer for its gradient. The names follow Megatron's convention."""

    @property
    def main_grad(self) -> torch.Tensor:
        """Full-size, in the reduce dtype: unreduced gradients and what kernels wrote in this backward, or zero.

        To be read and written within a backward only. Add to it, and set `grad_added_to_main_grad`.
        """
        gradients, index = owner_of_main_grad(self)
        return gradients.place(index, clear=True)

    @property
    def overwrite_main_grad(self) -> bool:
        """Whether nothing is in `main_grad` yet: a kernel may write instead of adding."""
        gradients, index = owner_of_main_grad(self)
        return gradients.is_vacant(index)

    @property
    def grad_added_to_main_grad(self) -> bool:
        """Whether a kernel has written this parameter's gradient; autograd's gradient for it is then ignored."""
        gradients, index = owner_of_main_grad(self)
        return gradients.kernels.written.get(index, False)

    @grad_added_to_main_grad.setter
    def grad_added_to_main_grad(self, value: bool) -> None:
        gradients, index = owner_of_main_grad(self)
        if value:
            gradients.kernels.wrote(index, alone=True)


def add_main_grad(full: nn.Parameter, gradients: Gradients, index: int) -> None:
    """Give a full parameter the attributes of `ParameterWithMainGrad`."""
    full.__class__ = ParameterWithMainGrad
    full.__dict__[_OWNER] = (weakref.ref(gradients), index)


def owner_of_main_grad(full: torch.Tensor) -> tuple[Gradients, int]:
    """The gradients of the group, and the index in it, of the parameter whose gradient a kernel writes."""
    ref, index = full.__dict__[_OWNER]
    gradients: Gradients | None = ref()
    if gradients is None:
        refuse_orphan()
    return gradients, index
