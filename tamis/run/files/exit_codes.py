"""What a worker's exit code means; the supervisor decides by it and passes it on unchanged."""

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    CRASH = 1  # an uncaught error; any code not named here is a crash too
    USAGE = 2  # a wrong flag or config key: trying again cannot help
    HALTED = 3  # .HALT was honoured; a checkpoint is there
    PREEMPTED = 4  # TERM or INT was honoured; a checkpoint is there
    ANOMALY = 5  # non-finite numbers, collapse, an implausible loss: a person should look
    DATA_FAILURE = 6  # the data could not be read
    COST_LIMIT = 7  # cost.max or cost.max_hours is reached; a checkpoint is there
