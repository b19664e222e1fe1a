"""Repeat the paper: train every row of its Table 2 and of its figures, measure them alike, write tables and a page.

  python -m scripts.paper.reproduce --scale tiny                 the bundled model, on a laptop
  python -m scripts.paper.reproduce --scale full --plan          what it would take: runs, hours, GPU-hours, disk
  python -m scripts.paper.reproduce --scale full --dry_run       check all rows, and print every command
  python -m scripts.paper.reproduce --scale full --rows sage-dual dance-fixed --setting B --seeds 1 2 3

A row is a sampler with a KL strategy (`--rows`, see scripts/paper/tables.yaml) under a reward setting: A weighs VQ, MQ
and TA alike, B weighs TA twice. Each is trained to update 100 (24 of the bundled model), then samples and scores the
same held-out prompts. Stop it as you like: started again, it goes on, and makes nothing twice.

Runs are started by --launch, by default `./run_post_train.sh` on this machine. On several:
  --launch ./run_post_train_multinode.sh                         pdsh; set NODE_IP_LIST
  --launch "sbatch --wait scripts/post_train/slurm_train.sbatch" SLURM
Flags that are not listed here go to every training, such as `--train_video_csv prompts.csv`, and --config takes the
place of the scale's own: `--config configs/sage_8gpu.yaml configs/published.yaml`. What the scale sets, such as
max_steps, wins over files; a flag wins over both.

Written to --output_dir: index.html, table2.md, table3.md, results.json, a folder per run, evaluation/ with the videos,
and studies/ for raters. Put the votes they save into studies/<name>.votes/ and start the command again.
"""

import argparse
import csv
import hashlib
import io
import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from hyvideo.checkpoint.train_state import checkpoints_of
from hyvideo.config.flags import Parser
from hyvideo.config.loading import load_config
from hyvideo.config.outside import as_value_error, complain
from hyvideo.config.schema import Config
from hyvideo.data.files import remove, replace_synced
from hyvideo.data.prompts import prompt_rows, read_prompts
from hyvideo.evaluation.scored_files import SCORES
from hyvideo.models.reward_models.registry import reward_class
from hyvideo.training.checks import check_config
from scripts.paper.reproduced import publish
from scripts.paper.runs import REPOSITORY, train

PAPER: dict[str, Any] = yaml.safe_load((Path(__file__).parent / "tables.yaml").read_text(encoding="utf-8"))
METRICS = {"clip_score": "CLIPScore", "pick_score": "PickScore"}
GPUS_OF = {"configs/sage_64gpu.yaml": 64, "configs/sage_8gpu.yaml": 8}
"""Ranks that a config is made for."""


@dataclass(frozen=True)
class PaperRun:
    """One training of a row, and its measurement.

    Attributes:
        row: its name in tables.yaml, with the reward setting: `sage-dual-b`.
        seed: of the training.
        folder: its run folder.
        training: flags of post_train.py.
        launch: the words that start a training.
        evaluation: what follows the model in the command line of scripts.evaluate.
        model_root: folder of the base model.
        metrics: of CLIP and PickScore, those that it is measured by.
        keeps: whether its checkpoints stay.
    """

    row: str
    seed: int
    folder: Path
    training: Sequence[str]
    launch: Sequence[str]
    evaluation: Sequence[str]
    model_root: str
    max_steps: int
    metrics: Sequence[str]
    keeps: bool

    @property
    def name(self) -> str:
        """Of its folder, and of its model in the evaluation."""
        return self.folder.name

    @property
    def measured(self) -> Path:
        """Folder of its measurement."""
        return self.folder.parent / "evaluation" / self.name

    @property
    def is_finished(self) -> bool:
        """Whether it was trained and measured, by all rewards that are there by now."""
        try:
            means = json.loads((self.measured / "evaluation.json").read_bytes())["means"][self.name]
            return set(self.metrics) <= set(means) and (self.measured / self.name / SCORES).is_file()
        except (OSError, ValueError, KeyError, TypeError):  # not there, or damaged: it is measured again
            return False

    @property
    def last_step(self) -> int:
        """Updates at its last checkpoint."""
        checkpoints = checkpoints_of(self.folder / "checkpoints")
        return max((int(path.name.removeprefix("step_")) for path in checkpoints), default=0)

    def commands(self) -> list[list[str]]:
        """Train, if its last checkpoint is not there (the base model needs none), then sample and score."""
        training = [[*self.launch, *self.training]] if self.last_step < self.max_steps else []
        step = max(self.last_step, self.max_steps)
        trained = [] if self.row == "base" else [str(self.folder / "checkpoints" / f"step_{step}")]
        model = [self.name, self.model_root, *trained]
        measure = [sys.executable, "-m", "scripts.evaluate", "--model", *model, "--output_dir", str(self.measured)]
        return [*training, [*measure, *self.evaluation]]

    def tidy(self) -> None:
        """Remove the checkpoints, unless they are to be kept."""
        if not self.keeps:
            remove(self.folder / "checkpoints")


def _settings_of(content: Mapping[str, Any]) -> set[str]:
    """Return the names of the settings in a config file, whose sections may nest."""
    named = [_settings_of(value) if name in SECTIONS else {name} for name, value in content.items()]
    return set().union(*named)


SECTIONS = {field.name for field in fields(Config)}
ROW_SETTINGS = {name for about in PAPER["rows"].values() for name in about.get("settings", {})}.union(
    *(
        _settings_of(yaml.safe_load((REPOSITORY / "configs" / f"{piece}.yaml").read_text(encoding="utf-8")))
        for about in PAPER["rows"].values()
        for piece in (f"method/{about['method']}", f"kl/{about['kl']}", "reward/a", "reward/b")
    )
)
"""Settings in which rows differ."""


@dataclass
class Work:
    """What the command line asks for.

    Attributes:
        arguments: its own flags.
        flags: those of post_train.py.
        scale: from tables.yaml.
        rows: rows to train, by name with the setting: the names of their config files and their settings.
    """

    arguments: argparse.Namespace
    flags: Sequence[str]
    scale: Mapping[str, Any]
    rows: dict[str, tuple[list[str], dict[str, Any]]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        known = PAPER["rows"]
        for row in self.arguments.rows or known:
            if row not in known:
                raise ValueError(f"--rows: there is no row {row!r}; there are {', '.join(known)}.")
            about = known[row]
            for setting in about["under"]:
                if setting in self.arguments.setting:
                    pieces = (f"method/{about['method']}", f"kl/{about['kl']}", f"reward/{setting.lower()}")
                    files = [str(REPOSITORY / "configs" / f"{piece}.yaml") for piece in pieces]
                    own = self.scale.get("methods", {}).get(about["method"], {})
                    self.rows[f"{row}-{setting.lower()}"] = (files, {**own, **about.get("settings", {})})
        fixed = {"seed", "output_dir", "resume_from_checkpoint", *ROW_SETTINGS}
        if taken := sorted({word[2:].partition("=")[0] for word in self.flags if word.startswith("--")} & fixed):
            raise ValueError(
                f"--{taken[0]} is what the rows differ in, or this program sets: choose rows by --rows, and give what "
                "holds for all of them."
            )
        if not self.rows:
            raise ValueError("--rows and --setting leave nothing to train: some rows are of setting B alone.")

    @property
    def world_size(self) -> int:
        """Ranks of a training."""
        paths = {_absolute(name): number for name, number in GPUS_OF.items()}
        given = next((paths[path] for path in map(_absolute, self.arguments.config) if path in paths), 1)
        return self.arguments.world_size or given

    def training(self, row: str, seed: int, folder: Path) -> list[str]:
        """Return the flags of a training; later config files and flags win over earlier ones."""
        files, settings = self.rows[row]
        configs = [*map(_absolute, self.arguments.config), str(self.base_file), *files]
        typed = {**settings, "seed": seed, "output_dir": folder, "resume_from_checkpoint": "latest"}
        words = [word for name, value in typed.items() for word in (f"--{name}", str(value))]
        return ["--config", *configs, *words, *self.flags]

    @property
    def base_file(self) -> Path:
        """The settings of the scale as a config file."""
        return self.arguments.output_dir / "scale.yaml"

    def config_of(self, row: str) -> Config:
        """Load a row's settings."""
        return load_config(self.training(row, self.arguments.seeds[0], self.arguments.output_dir / row))

    def runs(self, config: Config) -> Iterator[PaperRun]:
        """Yield all runs, the base model first, one seed of all rows after the other."""
        out, prompts = self.arguments.output_dir, self.arguments.output_dir / "prompts.csv"
        sampling = {**self.scale["sampling"], **dict(word.split("=", 1) for word in self.arguments.sampling)}
        words = [word for name, value in sampling.items() for word in (f"--{name}", str(value))]
        root, version = config.model.pretrained_model_root, config.model.pretrained_transformer_version
        evaluation = ["--prompts_csv", str(prompts), "--model_root", root, *words]
        if (REPOSITORY / root / "transformer" / version).is_dir():
            evaluation += ["--transformer_version", version]
        evaluation += ["--scale", "published", "--rewards", *self.rewards()]
        launch = shlex.split(self.arguments.launch)
        if self.arguments.scale == "full":  # else the launcher would begin with a config of its own
            launch = ["env", f"CONFIG={_absolute(self.arguments.config[0])}", *launch]
        common = {"launch": launch, "evaluation": evaluation, "model_root": root}
        common["keeps"] = self.arguments.scale == "full"
        common["metrics"] = [METRICS[name] for text in self.rewards() if (name := text.partition("=")[0]) in METRICS]
        yield PaperRun("base", 0, out / "base", [], max_steps=0, **common)
        for seed in self.arguments.seeds:
            for row in self.rows:
                folder = out / f"{row}-seed{seed}"
                steps = self.config_of(row).run.max_steps
                yield PaperRun(row, seed, folder, self.training(row, seed, folder), max_steps=steps, **common)

    def rewards(self) -> list[str]:
        """Return the rewards that measure, without those whose weights are not there."""
        named = [text.partition("=") for text in self.arguments.rewards or self.scale["rewards"]]
        placed = [(name, path and _absolute(path)) for name, _, path in named]  # measuring starts elsewhere
        return [f"{name}={path}" if path else name for name, path in placed if not path or Path(path).exists()]


def _absolute(path: str) -> str:
    """Return a path as a launcher finds it from another folder: config files of the project lie below its root."""
    return str((Path(path) if Path(path).exists() else REPOSITORY / path).resolve())


def parse_arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Read the command line; what it does not know goes to post_train.py."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = Parser("reproduce", description=__doc__, formatter_class=formatter, allow_abbrev=False)
    add = parser.add_argument
    add(
        "--scale", choices=PAPER["scales"], required=True, help="tiny: the bundled model; full: configs/sage_64gpu.yaml"
    )
    add("--rows", nargs="+", metavar="ROW", help=f"default all: {', '.join(PAPER['rows'])}")
    add("--setting", nargs="+", choices=("A", "B"), default=["A", "B"], help="reward settings; default A B")
    add("--seeds", type=int, nargs="+", default=[42], help="trainings of every row; several give intervals; default 42")
    add("--config", nargs="+", help="config files in place of the scale's")
    add("--prompts_csv", help="held-out prompts; default those of the scale")
    add("--sampling", nargs="+", default=[], metavar="FLAG=VALUE", help="of generate.py, e.g. num_inference_steps=20")
    add("--rewards", nargs="+", metavar="NAME[=CHECKPOINT]", help="what measures; default the scale's that are there")
    add("--launch", help="command that starts a training; default ./run_post_train.sh, for tiny python post_train.py")
    add("--jobs", type=int, help="trainings at a time; default 1, for tiny one per core")
    add("--minutes", type=float, help="stop after this long; start again to go on (0: only write what there is)")
    add("--output_dir", type=Path, help="default outputs/reproduce_<scale>")
    add("--plan", action="store_true", help="print runs, hours, GPU-hours and disk, and end")
    add("--dry_run", action="store_true", help="check every row, print every command, and end")
    add("--world_size", type=int, help="GPUs of a training, for checks and plan; default 64, 8 or 1 by the config")
    add("--gpu", default="H100", help="GPU to plan for; default %(default)s")
    return parser.parse_known_args(argv)


def main(argv: Sequence[str]) -> int:
    """Do what the command line asks; returns the exit status (0 done, 1 a run failed, 2 wrong input)."""
    try:
        arguments, flags = parse_arguments(argv)
        scale, tiny = PAPER["scales"][arguments.scale], arguments.scale == "tiny"
        arguments.config = arguments.config or scale["config"]
        arguments.output_dir = (arguments.output_dir or Path(f"outputs/reproduce_{arguments.scale}")).resolve()
        post_train = f"{shlex.quote(sys.executable)} {shlex.quote(str(REPOSITORY / 'post_train.py'))}"
        arguments.launch = arguments.launch or (post_train if tiny else "./run_post_train.sh")
        arguments.jobs = (os.cpu_count() if tiny else 1) if arguments.jobs is None else arguments.jobs
        if arguments.jobs < 1:
            raise ValueError(f"--jobs: expected at least 1; received {arguments.jobs}.")
        try:
            starter = (shlex.split(arguments.launch) or [""])[0]
        except ValueError as error:
            raise ValueError(f"--launch: {error} in {arguments.launch!r}.") from error
        if arguments.output_dir.is_file():
            raise ValueError(f"--output_dir: '{arguments.output_dir}' is a file; expected a folder.")
        if not (shutil.which(starter) or (REPOSITORY / starter).is_file()):
            raise ValueError(f"--launch: there is no program {starter!r}.")
        arguments.seeds = list(dict.fromkeys(arguments.seeds))
        flags = [str(Path(word).resolve()) if Path(word).is_file() else word for word in flags]  # runs start elsewhere
        return _run(Work(arguments, flags, scale))
    except (ValueError, OSError) as error:
        complain(f"reproduce: {error}")
        return 2


def _run(work: Work) -> int:
    """Check every row before the first one costs anything; then plan, print or train."""
    arguments, starter = work.arguments, []
    for kind in ("train", "valid") if arguments.scale == "full" else ():  # as the launcher gives them
        if not any(word.startswith(f"--{kind}_video_csv") for word in work.flags):
            starter += [f"--{kind}_video_csv", str(REPOSITORY / f"assets/prompts/{kind}.csv")]
    work.flags = [*starter, *work.flags]
    prompts, num_prompts = _prompts(work)
    asked = _check_same(work, prompts)
    arguments.output_dir.mkdir(parents=True, exist_ok=True)
    replace_synced(work.base_file, yaml.safe_dump(work.scale["settings"]).encode())
    given = ", ".join(f"{name} {value}" for name, value in work.scale["settings"].items())
    print(f"set by the scale, whatever --config says: {given}", flush=True)
    configs = {row: work.config_of(row) for row in work.rows}
    for row, config in configs.items():
        try:
            check_config(config, work.world_size)
        except ValueError as error:
            raise ValueError(f"{row}: {error}") from error
    _check_measuring(work, num_prompts)
    replace_synced(arguments.output_dir / "prompts.csv", prompts.encode())
    there = {text.partition("=")[0] for text in work.rewards()}
    for text in work.arguments.rewards or work.scale["rewards"]:
        if text.partition("=")[0] not in there:
            print(f"left out: {text}, whose weights are not there (checkpoints-download.md)", flush=True)
    for row in work.arguments.rows or ():
        if not any(name.rpartition("-")[0] == row for name in work.rows):
            print(f"left out: {row}, which the paper has under setting B alone")
    runs = list(work.runs(next(iter(configs.values()))))
    if arguments.plan:
        _print_bill(work, configs, num_prompts, len(runs) - 1)
    if arguments.dry_run:
        for run in runs:
            for command in run.commands():
                print(shlex.join(command))
        print(f"{len(configs)} rows were loaded and checked for {work.world_size} GPU(s); nothing was started.")
    if arguments.plan or arguments.dry_run:
        return 0
    threads = 1 if arguments.scale == "tiny" else None
    note = arguments.output_dir / "asked.json"
    is_new = not note.exists()
    replace_synced(note, json.dumps(asked, indent=1).encode())
    start = time.monotonic()
    failures = train(runs[:1], jobs=1, minutes=arguments.minutes, threads=threads)
    if failures and is_new:
        note.unlink()  # nothing was made yet, so other settings may follow
    if runs[0].is_finished:  # what its measurement lacks, every training would lack at its end
        left = arguments.minutes and max(0.0, arguments.minutes - (time.monotonic() - start) / 60)
        failures += train(runs[1:], jobs=arguments.jobs, minutes=left, threads=threads)
    for failure in failures:
        print(f"failed: {failure}", flush=True)
    print(publish(PAPER, arguments.output_dir, runs, scale=arguments.scale), flush=True)
    if unfinished := [run.name for run in runs if not run.is_finished]:
        print(f"{len(unfinished)} of {len(runs)} runs are not finished: start the same command again to go on.")
    return 1 if failures else 0


def _print_bill(work: Work, configs: Mapping[str, Config], prompts: int, num_runs: int) -> None:
    """Print what the runs will take, by plans of those that differ in what they compute."""
    from hyvideo.algorithms.grpo import anchor_kind  # only now, for these take seconds
    from hyvideo.distributed.gpus import find_gpu
    from hyvideo.planning.assumptions import Assumptions
    from hyvideo.planning.plan import make_plan, misfit

    gpu = find_gpu(work.arguments.gpu) if work.arguments.scale == "full" else None
    plans, hours, disk = {}, 0.0, 0.0
    for row, config in configs.items():
        kind = anchor_kind(config)
        if kind not in plans:
            print(f"planning {row}, as all rows {'without' if kind == 'none' else 'with'} an anchor ...", flush=True)
            plans[kind] = make_plan(config, world_size=work.world_size, gpu=gpu, assumptions=Assumptions())
            if not plans[kind].fits:
                print(f"DOES NOT FIT: {misfit(plans[kind])}")
        plan, seeds = plans[kind], len(work.arguments.seeds)
        run = config.run
        saved = [*range(run.save_interval, run.max_steps, run.save_interval)] if run.save_interval else []
        kept = [*saved, run.max_steps][-run.keep_last :]
        kept += [step for step in saved if run.keep_every and step % run.keep_every == 0 and step not in kept]
        disk += seeds * plan.checkpoint_bytes * len(kept)
        if plan.seconds:
            steps, check = config.run.max_steps, config.validation
            looks = steps // check.validation_interval if check.validation_interval else 0
            each = plan.validation_seconds / check.validation_num_videos if plan.validation_seconds else 0
            seconds = sum(plan.seconds.values()) / plan.updates * steps
            seconds += each * (looks * check.validation_num_videos + prompts)
            hours += seeds * seconds / 3600
            print(f"  {row}: {steps} updates, {seconds / 3600:.1f} h")
    print(
        f"{num_runs} runs ({len(configs)} rows x {len(work.arguments.seeds)} seeds), {prompts} prompts measured of each"
    )
    if hours:
        print(
            f"{hours:.0f} hours on {work.world_size} {gpu.name}, one run after the other: "
            f"{hours * work.world_size:,.0f} GPU-hours, measuring included and saving not"
        )
    ends = {"full": "; while a run trains, two more", "tiny": ", each removed when its run is measured"}
    print(f"{disk / 1e9:,.0f} GB of checkpoints{ends[work.arguments.scale]}")


def _content(path: str) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:16]


def _check_measuring(work: Work, num_prompts: int) -> None:
    """Refuse what would fail at the measurement, after every training."""
    if num_prompts < 2:
        raise ValueError("--prompts_csv: intervals are over prompts, of which there must be at least 2.")
    named = [text.partition("=") for text in work.arguments.rewards or ()]
    for name, _, _ in named:
        reward_class(name, "--rewards")
    if absent := [path for _, _, path in named if path and not Path(_absolute(path)).exists()]:
        raise ValueError(f"--rewards: there is nothing at '{absent[0]}'.")
    if wrong := [word for word in work.arguments.sampling if "=" not in word]:
        raise ValueError(f"--sampling: expected FLAG=VALUE, such as num_inference_steps=20; received {wrong[0]!r}.")
    sampling = {word.partition("=")[0] for word in work.arguments.sampling}
    if taken := {"output_path", "prompt", "prompts_csv", "model_path", "checkpoint_path"} & sampling:
        raise ValueError(f"--sampling: {min(taken)} is set by this program.")


def _check_same(work: Work, prompts: str) -> dict[str, Any]:
    """Refuse to mix runs of other settings or prompts into one table; rows, seeds and launch may change.

    Returns what is asked for, to be written down.
    """
    arguments, path = work.arguments, work.arguments.output_dir / "asked.json"
    asked = {
        "--config": {str(name): _content(_absolute(name)) for name in arguments.config},
        "flags": [f"{word} {_content(word)}" if Path(word).is_file() else word for word in work.flags],
        "--sampling": arguments.sampling,
        "prompts": prompts,
        "scripts/paper/tables.yaml": {name: work.scale[name] for name in work.scale if name != "rewards"},
    }
    if path.is_file():
        with as_value_error(f"'{path}' is damaged", ValueError, TypeError, advice="Choose another --output_dir."):
            before = dict(json.loads(path.read_bytes()))
        if changed := [name for name, value in asked.items() if before.get(name) != value]:
            raise ValueError(
                f"--output_dir: '{arguments.output_dir}' holds runs with other {', '.join(changed)}, which would stand "
                "in one table with these. Choose another --output_dir, or give what it was begun with."
            )
    return asked


def _prompts(work: Work) -> tuple[str, int]:
    """Return the CSV of the held-out prompts that every row is measured on, and how many there are."""
    source = Path(_absolute(work.arguments.prompts_csv or work.scale["prompts"]))
    rows = [row for _, row in prompt_rows(source)]
    for row, prompt in zip(rows, read_prompts([source]), strict=True):
        if prompt.ref_image_path:  # the copy lies elsewhere
            row["ref_image_path"] = str(Path(prompt.ref_image_path).resolve())
    rows = rows[: None if work.arguments.prompts_csv else work.scale.get("num_prompts")]
    text = io.StringIO()
    writer = csv.DictWriter(text, list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue(), len(rows)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
