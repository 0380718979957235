"""Where full weights come from: main weights, codecs between main and the wire, host memory.

Touches buffers, lanes and pools.
"""
