"""Targets: what a program can be compiled for; found by the entry point group ropeway.targets."""
