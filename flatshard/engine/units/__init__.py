"""One `fully_shard` call: what was asked, its hooks and phases.

Asks its root by `RootProtocol`, and knows no other unit.
"""
