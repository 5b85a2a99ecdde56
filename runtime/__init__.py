"""The runtime: load an artifact, schedule requests, replay steps, return text."""
