"""Servers under load, in turns: ours, vLLM's, and our engine without a server."""
