"""The bundled trainer and the examples."""
