"""The built-in op definitions, one family a file; the registry collects their `OPS`."""
