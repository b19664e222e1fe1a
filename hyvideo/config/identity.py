"""Which configurations train the same thing: the fields that decide the result."""

from omegaconf import OmegaConf

from hyvideo.config.knobs import KNOBS
from hyvideo.config.schema import Config


def settings_of(cfg: Config) -> dict[str, object]:
    """Name -> value of every setting, in plain types."""
    groups = OmegaConf.to_container(OmegaConf.structured(cfg))
    return {name: value for group in groups.values() for name, value in group.items()}


def deciding_fields(cfg: Config, dp_size: int = 1) -> dict[str, object]:
    """Name -> value of every field that decides the trained weights.

    Runs that agree in all of them may continue each other; where they do not, these are the values to show.

    Args:
        cfg: the configuration.
        dp_size: data-parallel ranks; `batch_size` is given for all of them together, so that a run may continue on
            another number of ranks as long as its rollouts have as many videos.
    """
    values = settings_of(cfg)
    values["batch_size"] *= dp_size
    return {name: values[name] for name, knob in KNOBS.items() if knob.facts.decides}
