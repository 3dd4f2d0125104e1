"""The run configuration: schema, YAML files and overrides, the runbooks' variables, derived sizes. No torch."""

from tamis.config.load import apply_override, build_config, known_keys, load_config
from tamis.config.schema import Config, Data, Train
from tamis.config.vocabulary import VOCABULARY
from tamis.config.yaml_file import ConfigError, read_yaml

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
