"""Where a backward stands: hooks on the tensors that forwards take and return.

Touches autograd and nothing else.
"""
