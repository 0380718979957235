"""What happens to a unit during a training step."""
