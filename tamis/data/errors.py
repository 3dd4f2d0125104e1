"""The errors this room raises on purpose; the trainer turns them into exit code 6."""


class DataError(RuntimeError):
    """Data that is missing, damaged, late or at its end; the message names the cause and the remedy."""


class EndOfData(DataError):
    """All of it was read: unlike a network or a disk that failed, it will not be better on another try."""


def end_of_data(samples: int, seq_len: int, epochs: int | None) -> EndOfData:
    return EndOfData(
        f"the data ended after {samples:,} samples of {seq_len} tokens (data.epochs: {epochs}): add data, "
        "lower train.steps, or raise data.epochs (null: without end)"
    )
