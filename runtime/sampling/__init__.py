"""Sampling parameters and the native sampler."""
