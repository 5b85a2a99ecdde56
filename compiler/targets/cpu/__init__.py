"""The cpu target: lowering to a plan of native kernel calls."""
