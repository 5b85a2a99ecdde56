"""What one token costs on the cpu target, read off a plan."""
