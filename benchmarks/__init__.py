"""Speed and memory of flatshard beside other systems.  Start with ``python -m benchmarks.table --help``."""
