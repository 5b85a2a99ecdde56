"""Causal language models in plain PyTorch."""
