"""The bundled trainer: a small language model, byte by byte, over local processes or under torchrun."""
