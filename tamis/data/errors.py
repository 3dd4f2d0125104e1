"""The one error this room raises on purpose; the trainer turns it into exit code 6."""


class DataError(RuntimeError):
    """Data that is missing, damaged, late or at its end; the message names the cause and the remedy."""
