"""The op registry: one entry an op, with type inference, cost and a float32 reference."""
