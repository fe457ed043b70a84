"""The settings: the tree, how it is read, and how mistakes in it are explained."""

from infini_model.config.reading import (
    dump_config,
    load_config,
    merge,
    parse_override,
    read_tree,
    validate,
)
from infini_model.config.tree import (
    MEBIBYTE,
    Config,
    DataConfig,
    EvaluationConfig,
    FilesSource,
    HubSource,
    ModelConfig,
    PackingConfig,
    RopeScaling,
    SplitsConfig,
    StageConfig,
    TokenizerConfig,
    TrainingConfig,
)

__all__ = [
    "MEBIBYTE",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "FilesSource",
    "HubSource",
    "ModelConfig",
    "PackingConfig",
    "RopeScaling",
    "SplitsConfig",
    "StageConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "dump_config",
    "load_config",
    "merge",
    "parse_override",
    "read_tree",
    "validate",
]
