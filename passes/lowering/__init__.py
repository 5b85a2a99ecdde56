"""Passes that prepare a program for one target and one bucket."""
