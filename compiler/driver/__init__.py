"""compile(): the whole way from a model to a program."""
