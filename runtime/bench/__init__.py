"""The benchmark suite behind ropeway bench."""
