"""What the units of one root share: in which order is launched what, how far ahead, and what all ranks agree upon."""
