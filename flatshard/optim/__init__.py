"""The optimizer step and gradient norms on local tensors, and on whole matrices."""

from flatshard.optim.adamw8bit import AdamW8bit
from flatshard.optim.combined import CombinedOptimizer

__all__ = ["AdamW8bit", "CombinedOptimizer"]
