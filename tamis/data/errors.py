"""The one error this room raises on purpose; the trainer turns it into exit code 6."""


class DataError(RuntimeError):
    """Data that is missing, damaged, late or at its end; the message names the cause and the remedy."""


def end_of_data(samples: int, seq_len: int, epochs: int | None) -> DataError:
    return DataError(
        f"the data ended after {samples:,} samples of {seq_len} tokens (data.epochs: {epochs}): add data, "
        "lower train.steps, or raise data.epochs (null: without end)"
    )
