"""Passes that tidy the IR without changing what it computes."""
