"""One `fully_shard` call: its settings, hooks and phases.

A unit uses its root through `RootProtocol`, and does not know other units.
"""
