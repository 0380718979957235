"""The optimizer step and gradient norms on local tensors, and on whole matrices."""

from flatshard.optim.together import Together

__all__ = ["Together"]
