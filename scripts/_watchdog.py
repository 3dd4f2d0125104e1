#!/usr/bin/env python
"""Watch a run; halt it when it stalls, slows down or stops learning: python scripts/_watchdog.py --dir OUT --halt 1"""

import argparse
import dataclasses
import sys

from _environment import enter_environment

enter_environment()

from tamis.run.supervise.watchdog import limits_of, watch_run


def seconds(text: str) -> float:
    """A number above zero; argparse names the flag otherwise."""
    if not 0 < (value := float(text)) < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of seconds above 0")
    return value


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dir", required=True, help="the run directory, train.out_dir")
    parser.add_argument("--halt", type=int, choices=(0, 1), default=1, help="1: halt on an alarm; 0: only report")
    parser.add_argument("--interval", type=seconds, default=1.0, help="seconds between looks")
    parser.add_argument("--stall-floor", type=seconds, help="never suspect a silence shorter than these seconds")
    arguments = parser.parse_args()
    limits = limits_of(arguments.dir)
    if arguments.stall_floor is not None:
        limits = dataclasses.replace(limits, floor_s=arguments.stall_floor)
    return watch_run(arguments.dir, halt=bool(arguments.halt), look_every_s=arguments.interval, limits=limits)


if __name__ == "__main__":
    sys.exit(main())
