"""Will it learn? Forecast what a run will gain, before it is paid for.

A few rounds are sampled and scored without an update. From them come the spread within groups, what the sampler's
noise costs, and how far the gradients of two halves of the rounds agree. Then the weights make trial steps along these
gradients, as long as the run's own walk at some learning rates, and held-out videos show what such a step gains and
spoils. The last three lines say what to change.

All flags of post_train.py are accepted too. It starts like post_train.py, over several ranks with torchrun, and takes
about as long as these rounds and 13 validations.

Example: `python -m scripts.forecast --config configs/tiny.yaml configs/demo.yaml`
"""

import argparse
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hyvideo.config.flags import TeachingParser
from hyvideo.config.loading import load_config
from hyvideo.config.outside import complain, in_words, loading
from hyvideo.config.schema import Config
from hyvideo.config.settings import SETTINGS

if TYPE_CHECKING:
    from scripts.forecast.measure import Forecast

FILE = "forecast.json"
MOST_DEAD = 0.3
"""Share of groups without spread above which the advice is about the groups."""


def main(argv: list[str]) -> int:
    """Print the forecast and write it to the run folder.

    Returns:
        The exit status: 0 done, 1 too many videos could not be scored or a gradient is not finite, 2 wrong input.
    """
    try:
        arguments, config = parse_arguments(argv)
    except (ValueError, OSError) as error:
        complain(f"scripts.forecast: {in_words(error)}")
        return 2
    with loading("scripts.forecast"):
        from transformers.utils.logging import disable_progress_bar  # only now, for it takes seconds

        from hyvideo.algorithms.optimizer import NonFiniteUpdateError
        from hyvideo.distributed.mesh import process_group
        from hyvideo.models.reward_models.registry import RewardFailureError

    disable_progress_bar()
    try:
        with process_group(config.parallel.collective_timeout, of_one="weights" in config.parallel.offload):
            write_forecast(arguments, config)
    except (ValueError, OSError, RewardFailureError, NonFiniteUpdateError) as error:
        complain(f"scripts.forecast: {in_words(error)}", once=True)
        return 1 if isinstance(error, (RewardFailureError, NonFiniteUpdateError)) else 2
    return 0


def parse_arguments(argv: list[str]) -> tuple[argparse.Namespace, Config]:
    """Read the forecast's own flags, and the run's configuration, which gets validation and a folder of its own.

    Raises:
        ValueError: a flag or setting is wrong, or there are no held-out prompts.
        OSError: a configuration file cannot be read.
    """
    parser = TeachingParser(
        "forecast", description=__doc__, formatter_class=argparse.RawTextHelpFormatter, allow_abbrev=False
    )
    add = parser.add_argument
    add("--num_rounds", type=int, default=6, help="rounds without an update, an even number; default %(default)s")
    add("--num_held_out", type=int, default=64, help="videos after each trial step; default %(default)s")
    add("--rates", type=float, nargs="+", default=[], help="learning rates to try; default a third, 1 and 3 times")
    arguments, flags = parser.parse_known_args(argv)
    if arguments.num_rounds < 2 or arguments.num_rounds % 2:
        raise ValueError(f"--num_rounds must be even, for two halves of them; received {arguments.num_rounds}.")
    if arguments.num_held_out < 2:
        raise ValueError(f"--num_held_out must be at least 2; received {arguments.num_held_out}.")
    if any(not 0 < rate < 1 for rate in arguments.rates):
        raise ValueError(f"--rates must lie between 0 and 1; received {' '.join(map(str, arguments.rates))}.")
    config = load_config(flags)
    if not config.data.valid_video_csv:
        raise ValueError("a forecast needs held-out prompts: name a CSV with --valid_video_csv.")
    resumed, folder = config.run.resume_from_checkpoint, config.run.output_dir
    if resumed == "latest" or (resumed and folder and Path(folder).resolve() in Path(resumed).resolve().parents):
        raise ValueError(
            "a forecast needs a folder of its own: leave --output_dir out, and name the checkpoint to go on from as "
            "--resume_from_checkpoint RUN/checkpoints/step_N."
        )
    guard = {name: setting.default for name, setting in SETTINGS.items() if name.startswith("reward_guard")}
    may_change = [*config.run.resume_may_change, *guard]  # a checkpoint's guard has nothing to look at here
    return arguments, replace(
        config,
        validation=replace(config.validation, validate_at_step0=True),
        reward=replace(config.reward, **guard),
        run=replace(
            config.run, run_name=f"forecast-{config.run.run_name}", profile=False, resume_may_change=may_change
        ),
    )


def write_forecast(arguments: argparse.Namespace, config: Config) -> None:
    """Build the run, forecast it, and write and print what was found."""
    from pydantic_core import to_json

    from hyvideo.checkpoint.train_state import named_checkpoint, read_facts
    from hyvideo.data.files import replace_synced
    from hyvideo.data.prompts import read_prompts, repeated
    from hyvideo.training.build import open_run
    from scripts.forecast.measure import forecast, require_updates_left

    if config.run.resume_from_checkpoint:  # before the models are loaded, which takes minutes
        require_updates_left(config, read_facts(named_checkpoint(config.run.resume_from_checkpoint))["step"])
    run = open_run(config)
    prompts = repeated(read_prompts(config.data.valid_video_csv, config.data.image_root), arguments.num_held_out)
    sizes = {"num_rounds": arguments.num_rounds, "rates": arguments.rates}
    found = forecast(run, prompts, **sizes, say=run.journal.console.info)
    if run.mesh.is_main:
        replace_synced(run.folder.path / FILE, to_json(found, indent=1, inf_nan_mode="constants") + b"\n")
        run.journal.console.info(f"\n{table(found)}\n\n" + "\n".join(advice(found, config)))
        run.journal.console.info(f"numbers: {run.folder.path / FILE}")
    run.journal.console.close()


def table(found: "Forecast") -> str:
    """Lay the forecast out, gains in standard deviations of the base model's held-out rewards."""
    groups, unit, num = found.groups, found.base_std, len(found.held_out["base"])
    lines = [
        f"groups      spread {groups.spread:.3f}, {groups.share:.0%} of the variance lies within; "
        f"{groups.dead:.0%} have no spread; best above mean {groups.best:.3f}"
    ]
    if found.noise is not None:
        excess, left = found.noise
        lines.append(
            f"sampler     noise left in the latents {left:.3f}, on the way at most {excess:.2f} times the schedule's; "
            f"the ODE scores {found.ode_gap:+.3f} more"
        )
    needed = found.gradient.videos
    seen = "no signal seen" if math.isinf(needed) else f"signal equals noise at {needed:.0f} videos"
    seen += f"; an update has {found.videos:g} videos"
    lines.append(f"gradient    halves correlate by {found.gradient.correlation:+.3f}, {seen}")
    lines.append(f"outlook     over {found.updates} updates, in base std ({unit:.3f} of the reward)")
    lines.append("  rate      a trial step teaches    and spoils              gain of the run")
    for one in found.outlooks:
        parts = (one.taught, one.spoilt, one.gain)
        cells = [f"{p.mean / unit:+.2f} [{p.low / unit:+.2f}, {p.high / unit:+.2f}]" for p in parts]
        counted = f"  {one.gain.num} of {num} videos counted" if one.gain.num < num else ""
        lines.append(f"  {one.rate:<9.3g} {cells[0]:<23} {cells[1]:<23} {cells[2]}{counted}")
    return "\n".join(lines)


def advice(found: "Forecast", config: Config) -> list[str]:
    """Say in three lines what to change: the groups and sampler, the videos per update, and the learning rate."""
    return [_about_groups(found), _about_videos(found), _about_rate(found, config.optimizer.learning_rate)]


def _about_groups(found: "Forecast") -> str:
    groups = found.groups
    if groups.dead > MOST_DEAD:
        return (
            f"Groups: {groups.dead:.0%} have no spread and teach nothing. Use more num_generations, harder prompts or "
            "a reward that tells their videos apart."
        )
    if found.is_noisy:
        return (
            f"Sampler: its noise costs the rollouts {found.ode_gap:.2f} of reward, which training would learn to "
            "survive first. Use a smaller eta, more grpo_sampling_steps, or sde_window first."
        )
    in_std = "" if math.isnan(found.base_std) else f" ({groups.best / found.base_std:.2f} base std)"
    return (
        f"Groups: the best video scores {groups.best:.2f} more than its group's mean{in_std}, which is about what "
        "there is to gain. Change nothing here."
    )


def _about_videos(found: "Forecast") -> str:
    needed = found.gradient.videos
    passed = needed / found.videos
    if math.isinf(needed):
        if found.best.gain.low > 0:
            return (
                "Videos: the gradients of the two halves do not agree, but steps along them teach. How many videos an "
                "update needs takes more --num_rounds to see."
            )
        return (
            f"Videos: the gradients of the two halves do not agree, so {found.videos:.0f} videos per update show no "
            "signal. Use many more (batch_size, gradient_accumulation_steps), or measure with more --num_rounds."
        )
    text = (
        f"Videos: signal equals noise at about {needed:.0f} videos, which are {passed:.0f} updates of "
        f"{found.videos:.0f}, and the run has {found.updates}."
    )
    if passed > found.updates:
        return f"{text} Use more videos per update (batch_size, gradient_accumulation_steps), or train for longer."
    return f"{text} That is enough."


def _about_rate(found: "Forecast", rate: float) -> str:
    best = found.best
    own = next((one for one in found.outlooks if math.isclose(one.rate, rate)), None)
    if math.isnan(best.gain.low):
        return (
            f"Rate: nothing was seen, because too many held-out videos have no score (at {best.rate:.2g} "
            f"{best.gain.num} videos counted). Find out why the reward fails first: see its warnings above."
        )
    if best.gain.low <= 0:
        return (
            f"Rate: at none of the tried rates is a gain sure in {found.updates} updates (at {best.rate:.2g} "
            f"{found.in_base_std(best.gain)}). Change what stands above, or train for longer, first."
        )
    if own is None:
        return (
            f"Rate: use learning_rate {best.rate:.2g}, the best of the tried ones. Expect "
            f"{found.in_base_std(best.gain)}. The configured {rate:.2g} was not tried: add it to --rates to compare."
        )
    if best.rate == own.rate:
        expected = found.in_base_std(best.gain)
        return f"Rate: learning_rate {best.rate:.2g} is the best of the tried ones. Expect {expected}."
    return (
        f"Rate: use learning_rate {best.rate:.2g}. Expect {found.in_base_std(best.gain)} instead of "
        f"{found.in_base_std(own.gain)}."
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
