"""``flatshard plan`` and ``flatshard report``."""
