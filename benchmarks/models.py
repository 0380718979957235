"""The shapes of the benchmarks; the model itself is the trainer's."""

from flatshard.train.model import Llama, LlamaConfig

__all__ = ["LLAMA_1B", "LLAMA_8B", "LLAMA_TINY", "Llama", "LlamaConfig"]

_VOCAB, _MAX_TOKENS = 128256, 8192

LLAMA_1B = LlamaConfig(2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocab=_VOCAB, max_tokens=_MAX_TOKENS)
LLAMA_8B = LlamaConfig(4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=_VOCAB, max_tokens=_MAX_TOKENS)
LLAMA_TINY = LlamaConfig(256, layers=4, heads=4, kv_heads=2, ffn=768, vocab=2048, max_tokens=512)
