"""A parameter in all its forms: sharded, full, and the places in modules where it is registered.

Touches modules and DTensors.
"""
