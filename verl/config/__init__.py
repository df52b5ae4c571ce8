"""The configuration of a run: schema, loading, and every check that needs no machine. Loads no torch, no Ray."""

from __future__ import annotations

from verl.config.batches import BatchPlan, SamplingPlan
from verl.config.load import LoadedConfig, build_config, dump_yaml, load_config, load_supervised
from verl.config.names import did_you_mean, nearest
from verl.config.schema import Config
from verl.config.schema_cluster import ClusterConfig
from verl.config.schema_data import DataConfig, ModelConfig
from verl.config.schema_reward import RewardConfig, SandboxConfig
from verl.config.schema_roles import ActorConfig, CriticConfig, OptimConfig, RefConfig
from verl.config.schema_run import AlgorithmConfig, RolloutConfig, TrainerConfig
from verl.config.schema_supervised import RewardModelTrainingConfig, SftConfig, SupervisedConfig

__all__ = [
    "ActorConfig", "AlgorithmConfig", "BatchPlan", "ClusterConfig", "Config", "CriticConfig", "DataConfig",
    "LoadedConfig", "ModelConfig", "OptimConfig", "RefConfig", "RewardConfig", "RewardModelTrainingConfig",
    "RolloutConfig", "SamplingPlan", "SandboxConfig", "SftConfig", "SupervisedConfig", "TrainerConfig", "build_config",
    "did_you_mean", "dump_yaml", "load_config", "load_supervised", "nearest",
]  # fmt: skip
