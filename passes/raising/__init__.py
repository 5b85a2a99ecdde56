"""Passes that recognise structures spelt out in primitive ops."""
