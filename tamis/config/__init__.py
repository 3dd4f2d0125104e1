"""The run configuration: schema, YAML files and overrides, the runbooks' variables, derived sizes. No torch."""

from tamis.config.files import ConfigError, read_yaml
from tamis.config.schema import (
    VOCABULARY,
    Config,
    Data,
    Train,
    apply_override,
    build_config,
    known_keys,
    load_config,
)

__all__ = [
    "VOCABULARY",
    "Config",
    "ConfigError",
    "Data",
    "Train",
    "apply_override",
    "build_config",
    "known_keys",
    "load_config",
    "read_yaml",
]
