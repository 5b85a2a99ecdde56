"""Ropeway: compile a causal language model once, replay it fast. Names load on first use."""
