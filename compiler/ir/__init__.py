"""The graph IR: types, dims, weights, functions; text form and its parser."""
