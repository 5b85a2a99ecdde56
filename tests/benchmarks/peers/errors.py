"""What keeps an engine out of the figures."""


class EngineError(Exception):
    """It didn't install, ended, or answered nonsense; the text goes into the table."""
