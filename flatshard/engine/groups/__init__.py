"""The parameters that travel together, who finds them, and what users may do to them.

Touches no order and no autograd.
"""
