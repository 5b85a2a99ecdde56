"""The passes, and the pipeline as one literal list."""
