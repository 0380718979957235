"""Checkpoints: atomic, verified, and loadable on any number of ranks."""

from flatshard.checkpoint.convert import convert
from flatshard.checkpoint.errors import CheckpointError
from flatshard.checkpoint.full import export_safetensors, iter_full_tensors, load_safetensors
from flatshard.checkpoint.loading import load
from flatshard.checkpoint.reader import verify
from flatshard.checkpoint.saving import PendingSave, latest, save
from flatshard.checkpoint.stored_names import MIXTRAL, QWEN_MOE, StoredAs, renamed

__all__ = [
    "MIXTRAL", "QWEN_MOE", "CheckpointError", "PendingSave", "StoredAs", "convert", "export_safetensors",
    "iter_full_tensors", "latest", "load", "load_safetensors", "renamed", "save", "verify",
]  # fmt: skip
