"""Sampling: the request's parameters, the batch that a device samples, and the samplers."""
