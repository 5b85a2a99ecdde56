"""The ropeway command."""
