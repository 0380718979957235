"""Checkpoints: atomic, verified, and loadable on any number of ranks."""

from flatshard.checkpoint.errors import CheckpointError
from flatshard.checkpoint.loading import load
from flatshard.checkpoint.reader import verify
from flatshard.checkpoint.saving import Pending, latest, save

__all__ = ["CheckpointError", "Pending", "latest", "load", "save", "verify"]
