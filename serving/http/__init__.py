"""The HTTP face: application, limits, keys, errors, event streams, and what isn't OpenAI's."""
