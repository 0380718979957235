"""The optimizer step and gradient norms on local tensors, and on whole matrices."""

from flatshard.optim.eight import AdamW8bit
from flatshard.optim.together import Together

__all__ = ["AdamW8bit", "Together"]
