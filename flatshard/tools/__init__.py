"""Tools around training: they read shapes, policies and layouts, and know nothing of the engine."""
