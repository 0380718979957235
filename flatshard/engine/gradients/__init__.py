"""From the gradients that autograd computes to the reduced gradients that an optimizer reads."""
