"""The root of the configuration: `cfg.<group>.<field>`, ten groups of documented knobs.

Field names are unique over all groups, so a flag is the bare field name (`--eta 0.5`) and a YAML file may be flat
(`eta: 0.5`) or grouped (`rollout: {eta: 0.5}`). The string below each field is its manual, which `--help` prints, and
`hyvideo.config.setting` says what else a field holds.
"""

from dataclasses import dataclass, field

from hyvideo.config.groups.data import DataConfig
from hyvideo.config.groups.grpo import GrpoConfig
from hyvideo.config.groups.kl import KLConfig
from hyvideo.config.groups.model import ModelConfig
from hyvideo.config.groups.optimizer import OptimizerConfig
from hyvideo.config.groups.parallel import ParallelConfig
from hyvideo.config.groups.reward import RewardConfig
from hyvideo.config.groups.rollout import RolloutConfig
from hyvideo.config.groups.run import RunConfig
from hyvideo.config.groups.validation import ValidationConfig


@dataclass
class Config:
    """Everything that decides a run. Made by `hyvideo.config.loading.load_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    run: RunConfig = field(default_factory=RunConfig)
