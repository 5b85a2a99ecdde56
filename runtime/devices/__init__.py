"""Devices: the run-time half of the targets."""
