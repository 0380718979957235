"""Hooks on the inputs and outputs of forwards, which follow a backward."""
