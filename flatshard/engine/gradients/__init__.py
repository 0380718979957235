"""From a gradient that autograd has made to the reduced one that an optimizer reads.

Touches buffers, lanes and pools.
"""
