"""Typed run configuration: one reference of keys, every problem at once, origin of each value.

Needs no torch. ``load`` is the way in, ``to_toml`` the way out.
"""

from dflash.config.fields import expectation, fact, fields_of, values_of
from dflash.config.load import (
    Loaded,
    Origin,
    Problem,
    examine,
    load,
    problem_report,
    sound_part,
)
from dflash.config.resolve import resolved_devices, resolved_dtype, resolved_gamma
from dflash.config.sections import (
    CheckpointConfig,
    DataConfig,
    DrafterConfig,
    EvalConfig,
    ExecutionConfig,
    LogConfig,
    ObjectiveConfig,
    OptimConfig,
    PrecisionConfig,
    RunConfig,
    TargetConfig,
)
from dflash.config.text import starter_config, to_toml, toml_value

__all__ = [
    "CheckpointConfig",
    "DataConfig",
    "DrafterConfig",
    "EvalConfig",
    "ExecutionConfig",
    "Loaded",
    "LogConfig",
    "ObjectiveConfig",
    "OptimConfig",
    "Origin",
    "PrecisionConfig",
    "Problem",
    "RunConfig",
    "TargetConfig",
    "examine",
    "expectation",
    "fact",
    "fields_of",
    "load",
    "problem_report",
    "resolved_devices",
    "resolved_dtype",
    "resolved_gamma",
    "sound_part",
    "starter_config",
    "to_toml",
    "toml_value",
    "values_of",
]
