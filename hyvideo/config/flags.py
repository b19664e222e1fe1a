"""The command line, made from the schema: one flag per setting, and the manual that `--help` prints.

Flags of the release that have another name here, or set nothing, are taken too: its commands run as they are.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

from hyvideo.config.outside import printable, with_home
from hyvideo.config.settings import GROUPS, SETTINGS, Setting, text_of

BOOLEANS = dict.fromkeys(("true", "yes", "on", "1"), True) | dict.fromkeys(("false", "no", "off", "0"), False)
"""Spelling of a boolean, in small letters -> its value."""

METAVARS = {bool: "BOOL", int: "INT", float: "NUMBER", str: "TEXT", list: "TEXT", dict: "NAME=VALUE"}
"""Type of a setting -> the placeholder of its value in `--help`."""

_ABOUT = (
    "Every flag is also a key of the YAML files, by itself or under its group. Values come from the schema's defaults, "
    "then the files of --config from left to right, then the flags. Booleans take true/false, yes/no, on/off or 1/0, "
    "and a bare flag means true. A mapping is NAME=VALUE ... or JSON. A value that begins with '-' is written "
    "--flag=value; 'none' clears what may be none. The launchers (run_post_train.sh, run_post_train_multinode.sh) also "
    "take --max_restarts N: after a lost rank or node they restart the run from its last checkpoint, at most N times."
)


@dataclass(frozen=True)
class Alias:
    """What a flag or YAML key that is no setting does.

    Attributes:
        setting: what it sets; empty: nothing.
        word: it is a boolean that adds this word to the setting, a list, or takes it out.
        off: it is a boolean that sets this where it is false. True sets the default where this is set.
        only: spellings of the one value that it takes.
    """

    setting: str = ""
    word: str = ""
    off: str = ""
    only: tuple[str, ...] = ()

    @property
    def is_name(self) -> bool:
        """Whether it is just another name of a setting."""
        return bool(self.setting) and not self.word and not self.off


ALIASES = {
    "post_train_type": Alias("algorithm"),
    "model_path": Alias("pretrained_model_root"),
    "transformer_version": Alias("pretrained_transformer_version"),
    "lora_path": Alias("pretrained_lora_path"),
    "guidance_scale": Alias("cfg_scale"),
    "fps": Alias("video_fps"),
    "validation_video_length": Alias("validate_video_length"),
    "video_length": Alias("validate_video_length"),
    "enable_gradient_checkpointing": Alias("activation_checkpointing", off="none"),
    "cpu_offload": Alias("offload", word="weights"),
    "encoder_offload": Alias("offload", word="encoders"),
    "reward_offload": Alias("offload", word="reward"),
    "ema_offload": Alias("offload", word="ema"),
    "reference_mode_offload": Alias("offload", word="anchor"),
    "lora_dropout": Alias(only=("0.0", "0")),  # it would change the replayed log-probabilities
    "reward_checkpoint_mode": Alias(only=("v3",)),
    "kl_compute_mode": Alias(only=("rollout_phase",)),
}
"""Names that are taken beside those of the settings: of the release, of generate.py, of settings that became one."""

_SUPERVISED = "it belongs to supervised training, which is not part of this project"

WITHOUT_EFFECT = {
    "num_workers": "prompts are read at once, and need no workers",
    "prefetch_factor": "prompts are read at once, and need no workers",
    "warmup_steps": "the reference takes it and warms nothing up; --lr_warmup_steps does",
    "i2v_prob": _SUPERVISED,
    "train_timestep_shift": f"{_SUPERVISED}; rollouts follow --infer_flow_shift_video",
    "flow_snr_type": _SUPERVISED,
    "validation_prompts": "write them into a CSV with a `prompt` column, and name it with --valid_video_csv",
    "debug_grad_flow": "metrics.jsonl has the gradient norms of every update",
    "debug_train_diagnostics_interval": "metrics.jsonl has every update",
}
"""The release's flags that set nothing here -> why, or what does instead."""

OWN_SIZES = {"480p": "480x848", "720p": "720x1280"}
"""Resolution of a version -> its size at 16:9, which the reference means by `--validation_fixed_size none`."""

SYNONYMS = {
    "beta": "kl_weight",
    "cfg": "cfg_scale",
    "compile": "enable_compile",
    "fixed_size": "rollout_size",
    "group_size": "num_generations",
    "lora_rank": "lora_r",
    "lr": "learning_rate",
    "num_frames": "sample_n_frames",
    "num_inference_steps": "grpo_sampling_steps",
    "num_videos": "num_generations",
    "prompts_csv": "train_video_csv",
    "resume": "resume_from_checkpoint",
    "shift": "infer_flow_shift_video",
    "steps": "max_steps",
}
"""What other projects call a setting -> its name here, which messages about unknown names give."""

_EXACT = "only generate.py takes it, for a replay must repeat its rollout exactly"
ELSEWHERE = {"cache": _EXACT, "attention_backend": _EXACT}
ELSEWHERE["max_restarts"] = "only run_post_train.sh and run_post_train_multinode.sh take it"
"""Flags of other programs -> which take them."""

PROMPTS = ("--prompt", "--negative_prompt")
"""Flags whose next word is a text and no path."""


class Parser(argparse.ArgumentParser):
    """A parser that finds the home folder, and shows control characters instead of sending them to the terminal."""

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parse what `with_home` makes of the arguments, prompts excepted."""
        given = list(sys.argv[1:] if args is None else args)
        words = zip(["", *given], given, strict=False)
        found = [one if {before, one.partition("=")[0]} & {*PROMPTS} else with_home(one) for before, one in words]
        return super().parse_known_args(found, namespace)

    def error(self, message: str) -> NoReturn:
        """Print usage and message, and exit with 2."""
        super().error(printable(message))


class TeachingParser(Parser):
    """A parser whose errors are ValueErrors instead of an exit."""

    def error(self, message: str) -> NoReturn:
        """Raise what argparse found wrong, with advice."""
        raise ValueError(f"{message} (a value that begins with '-' is written --flag=value; --help lists all flags)")


def _range_text(setting: Setting) -> str:
    """Return what a number must be, such as `> 0, seconds`; empty for settings that are none."""
    within, unit = setting.within, setting.unit
    if within.endswith("inf)"):
        within = f"{'>' if within[0] == '(' else '>='} {within[1:].partition(',')[0]}"
    elif within:
        within = f"in {within}"
    return f"{within}, {unit}" if unit else within


def build_parser() -> argparse.ArgumentParser:
    """The parser of `--config` and all settings, grouped as the schema is; values stay raw text, or lists of it.

    Its errors are ValueErrors; `-h` and `--help` print the manual and exit with 0.
    """
    parser = TeachingParser(
        prog="post_train.py",
        usage="%(prog)s [--config FILE [FILE ...]] [--flag VALUE] ...",
        description=_ABOUT,
        formatter_class=partial(argparse.HelpFormatter, max_help_position=8),  # each flag on a line of its own
        allow_abbrev=False,
    )
    parser.add_argument(
        "--config",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="YAML files, merged from left to right; each says only what differs.",
    )
    for name, about in GROUPS.items():
        group = parser.add_argument_group(name, about)
        for setting in (setting for setting in SETTINGS.values() if setting.group == name):
            metavar = "{" + ",".join(setting.choices) + "}" if setting.choices else METAVARS[setting.kind]
            several = {"nargs": "*" if setting.choices else "+"}  # without a word it is empty
            arity = {bool: {"nargs": "?", "const": "true"}, list: several, dict: {"nargs": "+"}}.get(setting.kind, {})
            facts = "; ".join(filter(None, [_range_text(setting), f"default: {text_of(setting.default)}"]))
            others = (name for name, alias in ALIASES.items() if alias.is_name and alias.setting == setting.name)
            names = [f"--{name}" for name in (setting.name, *others)]
            text = f"{setting.doc} [{facts}]".replace("%", "%%")
            group.add_argument(
                *names, dest=setting.name, metavar=metavar, default=argparse.SUPPRESS, help=text, **arity
            )
    for name, alias in ALIASES.items():
        if not alias.is_name:
            switch = {} if alias.only else {"nargs": "?", "const": "true"}
            parser.add_argument(f"--{name}", **switch, default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    for name in WITHOUT_EFFECT:
        parser.add_argument(f"--{name}", nargs="*", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
    return parser
