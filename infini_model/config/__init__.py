"""Configuration: the tree of settings, reading it, and explaining mistakes in it."""

from infini_model.config.data import (
    MEBIBYTE,
    DataConfig,
    FilesSource,
    HubSource,
    PackingConfig,
    Remainder,
    SplitsConfig,
)
from infini_model.config.evaluation import SampleConfig, UnmaskingConfig
from infini_model.config.model import ModelConfig, RopeScaling
from infini_model.config.reading import (
    difference,
    differences,
    dump_config,
    leaves,
    load_config,
    merge,
    merge_typed,
    nested,
    parse_override,
    read_recorded,
    read_tree,
    read_typed,
    validate,
)
from infini_model.config.training import AttentionBackend, LaunchConfig, LoraConfig, TrainingConfig
from infini_model.config.tree import Config, StagesConfig
