"""An open-loop load generator for OpenAI servers."""
