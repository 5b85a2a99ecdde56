"""Reads reasoning and tool calls out of a model's text, and asks for them in its format."""
