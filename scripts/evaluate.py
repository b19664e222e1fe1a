"""Compare models, checkpoints or existing videos on the same prompts and seeds: a table with intervals, and win rates.

Example: `python -m scripts.evaluate --prompts_csv assets/tiny/prompts/valid.csv --rewards moving_shapes
--model base assets/tiny --model trained assets/tiny outputs/demo/checkpoints/step_80 --output_dir outputs/evaluation`

Every model samples its videos through generate.py, whose flags (`--num_inference_steps`, `--guidance_scale`, ...) may
follow. Existing videos and scores are not made again: stop and restart it as you like.
"""

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from pydantic_core import to_json

from hyvideo.config.flags import Parser
from hyvideo.config.outside import complain, loading, printable
from hyvideo.data.files import replace_synced
from hyvideo.data.prompts import Prompt, read_prompts
from hyvideo.evaluation.comparison import OVERALL, compare, with_overall
from hyvideo.evaluation.jobs import FILE_NAMES, Job, jobs_of_csv
from hyvideo.models.model_folder import check_layout
from hyvideo.observability.scored_videos import notes_folder
from scripts.reports.markdown import markdown_of

if TYPE_CHECKING:
    from hyvideo.evaluation.scored_files import NamedReward

REPOSITORY = Path(__file__).parents[1]
SUMMED = ("VQ", "MQ", "TA")


@dataclass(frozen=True)
class Entry:
    """One model of the comparison.

    Attributes:
        name: in the tables.
        root: folder of the base model, or of the videos.
        trained: checkpoint or LoRA folder on top of it; None for the base alone.
        makes_videos: whether they are sampled here.
    """

    name: str
    root: Path
    trained: Path | None
    makes_videos: bool


class _AddEntry(argparse.Action):
    """Collect `--model` and `--videos` in the order they are given."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Sequence[str], option: str
    ) -> None:
        """Append one entry."""
        most = 3 if option == "--model" else 2
        if not 2 <= len(values) <= most:
            parser.error(f"{option} takes {self.metavar}; received {' '.join(values)}")
        trained = Path(values[2]) if len(values) == 3 else None
        namespace.entries.append(Entry(values[0], Path(values[1]), trained, option == "--model"))


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; what it does not know goes to generate.py."""
    parser = Parser("evaluate", description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    add = parser.add_argument
    add("--prompts_csv", required=True, help=".csv, .jsonl or .txt")
    add("--seeds", type=int, nargs="+", default=[42], help="each makes one video per prompt; default 42; a CSV's wins")
    entry = {"dest": "entries", "nargs": "+", "action": _AddEntry, "default": []}
    add("--model", metavar="NAME ROOT [TRAINED]", help="a model: base folder, and a checkpoint or LoRA folder", **entry)
    add("--ema", metavar="NAME", nargs="+", default=[], help="models whose checkpoint's averaged weights sample")
    add("--videos", metavar="NAME FOLDER", help="existing videos, named as generate.py names those of a CSV", **entry)
    scorers = {"default": ["videoalign_local"], "metavar": "NAME[=CHECKPOINT]"}
    add("--rewards", nargs="+", help="rewards that score; default videoalign_local", **scorers)
    scales = "published: CLIPScore and PickScore as flow_grpo's scorers give them; default usual"
    add("--scale", choices=("usual", "published"), default="usual", help=scales)
    add("--overall", metavar="JSON", help="weights of the column Overall; default the sum of VQ, MQ and TA, if there")
    add("--transformer_version", help="transformer in the original layout; default: the only one there")
    add("--model_root", type=Path, default=Path("ckpts"), help="folder that holds VideoReward; default ckpts")
    add("--batch_size", type=int, default=8, help="videos scored together; default 8")
    add("--file_names", choices=FILE_NAMES, default="row", help="names of the videos, see generate.py; default row")
    add("--num_processes", type=int, help="to sample; default one per GPU")
    add("--output_dir", type=Path, required=True, help="receives videos, scores, evaluation.json and evaluation.md")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str]) -> int:
    """Sample, score, compare; returns the exit status (0 done, 2 wrong input)."""
    arguments, flags = parse_arguments(argv)
    try:
        _check_entries(arguments, flags)
        prompts = read_prompts([arguments.prompts_csv])
        numbers = _prompt_numbers(prompts, arguments)
        jobs = {
            entry.name: jobs_of_csv(_folder(entry, arguments), prompts, arguments.seeds, arguments.file_names)
            for entry in arguments.entries
        }
        for entry in arguments.entries:
            for job in () if entry.makes_videos else jobs[entry.name]:
                job.check_made()
        with loading("evaluate"):
            from transformers.utils.logging import disable_progress_bar  # only now, for it takes seconds

            _check_trained(arguments)
        disable_progress_bar()
        rewards = [_build_reward(text, arguments) for text in arguments.rewards]
        weights = _overall_weights(arguments.overall, [metric for r in rewards for metric in r.model.metrics])
        for entry in arguments.entries:
            if entry.makes_videos and (status := _sample(entry, arguments, flags)):
                return status
        scores = {}
        for reward in rewards:  # not earlier: generate.py used the device
            reward.model.to(reward.model.context.device)
        texts = [job.prompt.text for job in jobs[arguments.entries[0].name]]  # of all entries
        judged = _named((r, dict.fromkeys(r.model.metrics, np.array([*map(r.model.applies, texts)]))) for r in rewards)
        judged[OVERALL] = np.any([judged[name] for name in weights], axis=0)
        for entry in arguments.entries:
            found = _scores(entry, jobs[entry.name], rewards, arguments)
            scores[entry.name] = with_overall(found, weights, judged) if weights else found
        comparison, folder = compare(scores, numbers, judged), arguments.output_dir
        text = markdown_of(comparison)
        replace_synced(folder / "evaluation.md", text.encode())
        replace_synced(folder / "evaluation.json", to_json(comparison, indent=1, inf_nan_mode="null") + b"\n")
        print(printable(text))
    except (ValueError, OSError) as error:
        complain(f"evaluate: {error}")
        return 2
    return 0


def _prompt_numbers(prompts: Sequence[Prompt], arguments: argparse.Namespace) -> np.ndarray:
    """Return which prompt each video is of, [N]: rows of the same text and image are one prompt with several seeds.

    Raises:
        ValueError: fewer than two prompts, of which no interval can be given.
    """
    numbers: dict[tuple[str, str | None], int] = {}
    jobs = jobs_of_csv(arguments.output_dir, prompts, arguments.seeds, arguments.file_names)
    of_jobs = [numbers.setdefault((job.prompt.text, job.prompt.ref_image_path), len(numbers)) for job in jobs]
    if len(numbers) < 2:
        raise ValueError(f"--prompts_csv: intervals are over prompts, at least 2; '{arguments.prompts_csv}' has one.")
    return np.array(of_jobs)


def _check_entries(arguments: argparse.Namespace, flags: Sequence[str]) -> None:
    """Find what is missing or wrong before the first video is made."""
    if flags and not any(entry.makes_videos for entry in arguments.entries):
        raise ValueError(f"unknown flag {flags[0]}; only a --model takes those of generate.py.")
    if any(flag.partition("=")[0] in ("--cache", "--enable_cache") for flag in flags):
        raise ValueError("--cache: its videos are an approximation, and scores would be of that: leave it out.")
    for name in ("batch_size", "num_processes"):
        if (number := getattr(arguments, name)) is not None and number < 1:
            raise ValueError(f"--{name} must be at least 1; received {number}.")
    arguments.seeds = list(dict.fromkeys(arguments.seeds))
    names = [entry.name for entry in arguments.entries]
    if not names or len(set(names)) < len(names):
        raise ValueError(f"Give each --model and --videos a name of its own; received {', '.join(names) or 'none'}.")
    if unknown := sorted({*arguments.ema} - {*names}):
        raise ValueError(f"--ema {unknown[0]}: there is no --model of that name.")
    for entry in arguments.entries:
        if Path(entry.name).name != entry.name or entry.name in ("", ".."):
            raise ValueError(f"--model {entry.name}: the name becomes a folder below --output_dir, so no '/' or '..'.")
        if not entry.makes_videos and not entry.root.is_dir():
            raise ValueError(f"--videos {entry.name}: there is no folder '{entry.root}'.")
        if entry.makes_videos:
            check_layout(entry.root, arguments.transformer_version)


def _check_trained(arguments: argparse.Namespace) -> None:
    """Find what is wrong with the trained weights, and which checkpoint `best` and `latest` stand for by now."""
    from hyvideo.checkpoint.train_state import named_checkpoint

    arguments.entries = [
        replace(entry, trained=named_checkpoint(entry.trained)) if entry.trained else entry
        for entry in arguments.entries
    ]
    for entry in arguments.entries:
        if entry.trained and not _is_adapter(entry.trained):
            from hyvideo.checkpoint.trained_policy import check_checkpoint  # which takes seconds more

            check_checkpoint(entry.trained, ema=entry.name in arguments.ema)
        elif entry.name in arguments.ema:
            raise ValueError(f"--ema {entry.name}: only a --model with a run's checkpoint has an average of weights.")


def _is_adapter(folder: Path) -> bool:
    names = ("pytorch_lora_weights.safetensors", "adapter_model.safetensors")
    return folder.suffix == ".safetensors" or any((folder / name).is_file() for name in names)


def _build_reward(text: str, arguments: argparse.Namespace) -> "NamedReward":
    """Build the reward of `NAME` or `NAME=CHECKPOINT`, and put it aside in host memory."""
    import torch

    from hyvideo.evaluation.scored_files import NamedReward
    from hyvideo.models.reward_models.registry import RewardContext
    from hyvideo.models.reward_models.rewards import build_reward
    from hyvideo.models.weight_files import fingerprint

    name, _, checkpoint = text.partition("=")
    options = {"checkpoint": checkpoint} if checkpoint else {}
    if arguments.scale != "usual" and name in ("clip_score", "pick_score"):
        options["scale"] = arguments.scale
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    context = RewardContext(
        device,
        arguments.model_root,
        batch_size=arguments.batch_size,
        own_files=False,
        prompt_csvs=[arguments.prompts_csv],
    )
    model = build_reward(name, options, context)
    model.to("cpu")
    torch.cuda.empty_cache()  # generate.py is another process, to which memory that is cached here is lost
    weights = fingerprint([Path(checkpoint) if checkpoint else arguments.model_root / "VideoReward"])
    source = options or {"model_root": str(arguments.model_root.resolve())}
    return NamedReward(name, {**source, "weights": weights, "how": model.describe()}, model)


def _overall_weights(text: str | None, metrics: Sequence[str]) -> dict[str, float]:
    """Read `--overall`; without it VideoAlign's sum where its three metrics are given, else nothing."""
    if text is None:
        return dict.fromkeys(SUMMED, 1.0) if set(SUMMED) <= set(metrics) else {}
    try:
        weights = {name: float(weight) for name, weight in json.loads(text).items()}
        if not all(map(math.isfinite, weights.values())):
            raise ValueError
    except (ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(
            f'--overall: expected finite weights as JSON, such as {{"VQ": 0.5, "TA": 1}}; received {text:.200}.'
        ) from error
    if unknown := [name for name in weights if name not in metrics]:
        raise ValueError(f"--overall: no reward gives {', '.join(unknown)}; there are {', '.join(metrics)}.")
    return weights


def _folder(entry: Entry, arguments: argparse.Namespace) -> Path:
    return arguments.output_dir / entry.name if entry.makes_videos else entry.root


def _sample(entry: Entry, arguments: argparse.Namespace, flags: Sequence[str]) -> int:
    """Run generate.py, over several processes if asked; returns its exit status."""
    import torch

    number = max(1, torch.cuda.device_count()) if arguments.num_processes is None else arguments.num_processes
    ranks = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={number}"]
    command = [sys.executable, *(ranks if number > 1 else []), str(REPOSITORY / "generate.py")]
    command += ["--model_path", str(entry.root), "--prompts_csv", arguments.prompts_csv]
    command += ["--output_path", str(_folder(entry, arguments)), "--seed", *map(str, arguments.seeds)]
    command += ["--file_names", arguments.file_names]
    if arguments.transformer_version:
        command += ["--transformer_version", arguments.transformer_version]
    if entry.trained:
        command += ["--lora_path" if _is_adapter(entry.trained) else "--checkpoint_path", str(entry.trained)]
    command += ["--ema"] if entry.name in arguments.ema else []
    return subprocess.call([*command, *flags])


def _scores(
    entry: Entry, jobs: Sequence[Job], rewards: "Sequence[NamedReward]", arguments: argparse.Namespace
) -> dict[str, np.ndarray]:
    """Score an entry's videos: each metric [N]."""
    from hyvideo.evaluation.scored_files import SCORES, ScoreFile

    folder = notes_folder(arguments.output_dir / entry.name, apart=jobs[0].note_apart)
    book = ScoreFile(folder / SCORES)
    videos, prompts = [job.path for job in jobs], [job.prompt.text for job in jobs]
    columns = ((reward, book.score(reward, videos, prompts)) for reward in rewards)
    return _named((reward, {metric: np.array(values) for metric, values in of.items()}) for reward, of in columns)


def _named(of_rewards: "Iterable[tuple[NamedReward, Mapping[str, np.ndarray]]]") -> dict[str, np.ndarray]:
    """Put the metrics of several rewards together; one that is there already gets its reward's name."""
    found: dict[str, np.ndarray] = {}
    for reward, metrics in of_rewards:
        for metric, values in metrics.items():
            found[metric if metric not in found else f"{reward.name}/{metric}"] = values
    return found


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
