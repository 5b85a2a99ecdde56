"""Passes that fuse ops into the ones that kernels implement."""
