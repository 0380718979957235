"""The optimizer step and gradient norms on local tensors."""
