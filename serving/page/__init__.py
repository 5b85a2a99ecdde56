"""The page at /: a playground and a live view, plain HTML and JavaScript."""
