"""A parameter in all its forms: sharded, full, and the modules where it is registered."""
