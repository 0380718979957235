"""The parameters that are communicated together, a registry of them, and changes that users make to them.

Does not depend on the order of launches or on autograd.
"""
