"""The cpu device: plans replayed by the native kernels."""
