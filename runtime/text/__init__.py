"""Tokenizer, chat template, incremental detokenization, stop strings."""
