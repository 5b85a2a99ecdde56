"""The version of this package; a test holds it equal to pyproject.toml's."""

VERSION = "0.1.0"
