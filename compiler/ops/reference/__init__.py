"""Reference semantics of every op in plain torch, the oracle of all targets."""
