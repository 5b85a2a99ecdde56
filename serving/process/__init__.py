"""The engine's own process, what is said to it and heard from it, and who keeps it alive."""
