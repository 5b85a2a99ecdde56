"""Scheduler, block pool, step execution."""
