"""One `fully_shard` call: its settings, hooks and phases."""
