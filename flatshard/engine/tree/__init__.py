"""From modules to units and roots, and a summary of a sharded model."""
