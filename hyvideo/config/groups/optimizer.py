"""Step size, decay and clipping."""

from dataclasses import dataclass

from hyvideo.config.setting import setting


@dataclass
class OptimizerConfig:
    """Optimizer: step size, decay and clipping."""

    learning_rate: float = setting(1e-5, within="(0, inf)")
    """Step size of AdamW. Muon scales it for each matrix."""

    weight_decay: float = setting(0.01, within="[0, inf)")
    """Decoupled weight decay, as a share of the learning rate."""

    max_grad_norm: float = setting(1.0, within="(0, inf)")
    """Largest norm of the whole gradient, to which a larger one is scaled down."""

    use_muon: bool = True
    """Use Muon for weights with two or more dimensions, AdamW for the rest. Otherwise use AdamW for all."""

    lr_warmup_steps: int = setting(0, within="[0, inf)", unit="updates")
    """Time in which the learning rate rises linearly from 0."""

    ema_decay: float = setting(0.0, within="[0, 1)")
    """Keep an exponential average of the trained weights beside them, of which this share stays in every update, at
    first less: (1 + n) / (10 + n) after n updates. Validation samples with it. It takes another copy of the trained
    weights. 0 keeps none."""
