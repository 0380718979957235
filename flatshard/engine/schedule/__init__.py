"""What the units of one root share: the order of launches, prefetch, and the comparison between ranks."""
