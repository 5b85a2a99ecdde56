"""Readers of checkpoints: Hugging Face directories, GGUF files, hub names."""
