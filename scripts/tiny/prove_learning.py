"""The slow proof that learning is real: held-out gain over several seeds, and no gain when rewards are shuffled.

Example: `python -m scripts.tiny.prove_learning --output_dir outputs/proof`

Every seed trains the tiny model twice as `make demo` does: with the true reward, and with the rewards of a round
shuffled among its videos, which keeps everything but the link between a video and its score. It compares videos of
prompts that the demo's settings were not tuned on, and what the reward hardly sees. Finished runs are kept: started
again, the command goes on. Two commands with one kind each are faster than one. Unknown flags are passed to the runs.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from pydantic import TypeAdapter
from pydantic_core import to_json
from torch import Tensor
from transformers.utils.logging import disable_progress_bar

from hyvideo.config.flags import Parser
from hyvideo.config.loading import load_config
from hyvideo.config.outside import complain
from hyvideo.data.files import replacing
from hyvideo.data.prompts import Prompt
from hyvideo.data.randomness import generator_for
from hyvideo.evaluation.intervals import seed_interval
from hyvideo.evaluation.paired import Gain
from hyvideo.models.reward_models.rewards import Scores, WeightedReward
from hyvideo.training.build import open_run
from hyvideo.training.collect import Sampled
from hyvideo.training.run import Run
from scripts.reports.improvement import HELD_OUT, HeldOutGains, read_held_out, write_held_out
from scripts.tiny.comparison import TUNED_ON, Kept, gains, held_out_prompts, kept, tiny_looks

KINDS = ("true", "shuffled")
SETTINGS = (
    *("--config", "configs/tiny.yaml", "configs/demo.yaml", "--validation_interval", "0", "--base_interval", "0"),
    *("--drift_guard", "{}"),
)
KEPT = "kept.json"
"""File of a run's folder that says what its training kept."""


class ShuffledReward:
    """Scores videos truly, then shuffles the scores: the null experiment."""

    def __init__(self, reward: WeightedReward, seed: int) -> None:
        self.reward = reward
        self.asynchronous, self.max_failed = False, reward.max_failed
        self.seed = seed
        self.calls = 0

    def __call__(self, videos: Tensor, prompts: list[str]) -> Scores:
        """Return the scores of `videos` `[B, F, H, W, 3]` in another order."""
        scores = self.reward(videos, prompts)
        generator = generator_for(self.seed, "shuffled reward", self.calls)
        order = torch.randperm(len(prompts), generator=generator)
        self.calls += 1
        return scores.at(order)


def main(argv: list[str]) -> int:
    """Train what is not trained yet and print a table; returns the exit status."""
    disable_progress_bar()
    parser = Parser("prove_learning", description=__doc__)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], help="run seeds; default 1 2 3")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="rewards; default true shuffled")
    parser.add_argument("--num_held_out", type=int, default=206, help="held-out videos; default 206")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/proof"), help="folder of the runs")
    arguments, flags = parser.parse_known_args(argv)
    try:
        reward = load_config([*SETTINGS, *flags]).reward
        if reward.reward_async or reward.reward_aggregation != "sum":
            raise ValueError("reward_async and another aggregation cannot be shuffled: leave them out.")
        if arguments.num_held_out < 3:
            raise ValueError(f"--num_held_out must be at least 3; received {arguments.num_held_out}.")
        for seed in arguments.seeds:
            for kind in arguments.kinds:
                folder = arguments.output_dir / f"{kind}-{seed}"
                train_and_compare(folder, seed, arguments.num_held_out, flags, shuffled=kind == "shuffled")
                gains, kept_there = found_in(folder)
                for name, gain in gains.items():  # the interval is over the held-out videos
                    print(f"{folder.name:17s} {name:10s} {gain}", flush=True)
                print(f"{folder.name:17s} " + str(kept_there).replace("\n", f"\n{folder.name:17s} "), flush=True)
        for kind in arguments.kinds:
            _print_mean([arguments.output_dir / f"{kind}-{seed}" for seed in arguments.seeds], kind)
    except (ValueError, OSError) as error:
        complain(f"prove_learning: {error}")
        return 2
    return 0


def train_and_compare(
    folder: Path, seed: int, num_held_out: int, flags: Sequence[str], *, shuffled: bool = False
) -> None:
    """Train one run to its end and write its gains over the base; nothing where that was done."""
    if (folder / HELD_OUT).is_file():
        return
    where = ["--output_dir", str(folder), "--resume_from_checkpoint", "latest", "--seed", str(seed)]
    training = open_run(load_config([*SETTINGS, *where, *flags]))
    if shuffled:
        training.reward = ShuffledReward(training.reward, seed)
        training.reward.calls = training.rounds.sampler.round
    prompts = held_out_prompts(training.config, num_held_out, slice(TUNED_ON, None))
    before = _base(training, prompts, folder)
    training.train()
    if training.state.step < training.config.run.max_steps:
        sys.exit("stopped; start the same command again to go on")
    after = training.validation.sample(prompts)
    looks = [tiny_looks(sampled.videos, prompts) for sampled in (before, after)]
    (folder / KEPT).write_bytes(to_json(kept(*looks, prompts), indent=1, inf_nan_mode="constants"))
    write_held_out(folder, HeldOutGains(training.state.step, gains(before.scores, after.scores)))
    training.journal.console.close()


def _base(training: Run, prompts: list[Prompt], folder: Path) -> Sampled:
    """Sample the base model once per folder; a resumed run reads what the first start found."""
    path = folder / "base.pt"
    if not path.is_file():
        if training.state.step:
            raise ValueError(f"'{folder}' was resumed but '{path}' is missing; delete the folder and start again.")
        sampled = training.validation.sample(prompts)
        scores = {name: dict(getattr(sampled.scores, name)) for name in ("metrics", "weights")}
        with replacing(path) as temporary:
            torch.save({"videos": sampled.videos, "scores": scores | {"total": sampled.scores.total}}, temporary)
    content = torch.load(path, weights_only=True)
    if len(content["videos"]) != len(prompts):
        raise ValueError(
            f"'{folder}' was begun with {len(content['videos'])} held-out videos; received {len(prompts)}: go on with "
            f"--num_held_out {len(content['videos'])}, or delete the folder."
        )
    return Sampled(range(len(prompts)), content["videos"], Scores(**content["scores"]))


def found_in(folder: Path) -> tuple[dict[str, Gain], Kept]:
    """Read a finished run's gains and what it kept."""
    return read_held_out(folder).gains, TypeAdapter(Kept).validate_json((folder / KEPT).read_bytes())


def _print_mean(folders: list[Path], kind: str) -> None:
    """Print one line per number: the mean over runs and its interval over them, which is what training is good for."""
    found, runs = [found_in(folder) for folder in folders], f"{kind}, {len(folders)} seeds"
    for name in found[0][0]:
        of_runs = [gains[name] for gains, _ in found]
        share = sum(gain.in_base_std for gain in of_runs) / len(found)
        print(f"{runs:17s} {name:10s} {seed_interval([g.mean for g in of_runs])}, {share:+.2f} base std", flush=True)
    numbers = [
        {"hits before": k.hits[0], "hits after": k.hits[1], "moved": k.moved, **k.drift.metrics()} for _, k in found
    ]
    for name in numbers[0]:
        print(f"{runs:17s} {name:24s} {seed_interval([of_run[name] for of_run in numbers])}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
