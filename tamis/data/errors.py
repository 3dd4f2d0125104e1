"""Errors of data; the trainer turns them into exit code 6."""


class DataError(RuntimeError):
    """Data is missing, damaged, late or at its end; the message names the cause and the remedy."""


class EndOfData(DataError):
    """All data was read. Unlike after a network or disk failure, another try does not help."""


def end_of_data(samples: int, seq_len: int, epochs: int | None) -> EndOfData:
    return EndOfData(
        f"the data ended after {samples:,} samples of {seq_len} tokens (data.epochs: {epochs}): add data, "
        "lower train.steps, or raise data.epochs (null: without end)"
    )
