"""From modules to units and roots, and what a sharded model looks like from outside."""
