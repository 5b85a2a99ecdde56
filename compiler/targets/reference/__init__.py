"""The reference target: the IR itself, run by the interpreter."""
