"""Constrained decoding: from what a request asks of its text to the tokens that may come next."""
