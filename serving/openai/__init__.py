"""OpenAI's endpoints: their fields, and their answers whole and streamed."""
