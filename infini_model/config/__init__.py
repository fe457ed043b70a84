"""Configuration: the tree of settings, reading it, and explaining mistakes in it."""

from infini_model.config.data import (
    MEBIBYTE,
    DataConfig,
    FilesSource,
    HubSource,
    PackingConfig,
    SplitsConfig,
    TokenizerConfig,
)
from infini_model.config.evaluation import EvaluationConfig, SampleConfig, UnmaskingConfig
from infini_model.config.model import ModelConfig, RopeScaling
from infini_model.config.reading import (
    check_typed,
    dump_config,
    load_config,
    merge,
    parse_override,
    read_tree,
    validate,
)
from infini_model.config.section import Section
from infini_model.config.training import (
    AttentionBackend,
    CheckpointConfig,
    LaunchConfig,
    LoggingConfig,
    LoraConfig,
    TrainingConfig,
)
from infini_model.config.tree import Config, FlowStageConfig, StageConfig

__all__ = [
    "MEBIBYTE",
    "AttentionBackend",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvaluationConfig",
    "FilesSource",
    "FlowStageConfig",
    "HubSource",
    "LaunchConfig",
    "LoggingConfig",
    "LoraConfig",
    "ModelConfig",
    "PackingConfig",
    "RopeScaling",
    "SampleConfig",
    "Section",
    "SplitsConfig",
    "StageConfig",
    "TokenizerConfig",
    "TrainingConfig",
    "UnmaskingConfig",
    "check_typed",
    "dump_config",
    "load_config",
    "merge",
    "parse_override",
    "read_tree",
    "validate",
]
