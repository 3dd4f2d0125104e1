"""How the verbs' help reads: what a person types, without the types of the program."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand, TyperGroup


class Verb(TyperCommand):
    """A command whose help is for people."""

    def get_params(self, ctx: Any) -> list[Any]:
        return plain(super().get_params(ctx))


class Verbs(TyperGroup):
    """The same for a command with commands of its own."""

    def get_params(self, ctx: Any) -> list[Any]:
        return plain(super().get_params(ctx))


def plain(parameters: list[Any]) -> list[Any]:
    """Without the types that typer shows beside everything, where they teach nothing."""
    for parameter in parameters:
        if getattr(parameter, "is_flag", False) and parameter.metavar is None:
            parameter.metavar = ""
        if getattr(parameter, "min", None) is not None and parameter.metavar is None:
            parameter.metavar = "N"
        if parameter.param_type_name == "argument" and parameter.metavar is not None:
            parameter.display_type_rich = lambda ctx: None  # its name says it: RUN, CONFIG|SECTION.KEY=VALUE
    return parameters
