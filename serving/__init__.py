"""The OpenAI server: an HTTP process in front of an engine process."""
