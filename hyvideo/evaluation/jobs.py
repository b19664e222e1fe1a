"""What generate.py makes: one file per prompt and seed, each with a note of how it was made, each made once."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import from_json

from hyvideo.data.prompts import Prompt
from hyvideo.observability.scored_videos import note_path, read_note

if TYPE_CHECKING:
    from torch import Tensor

FILE_NAMES = ("row", "vbench")
"""How the videos of a CSV may be called."""

VBENCH_CHARACTERS = 180
"""Characters of a prompt in the names of VBench-2.0's videos."""


@dataclass(frozen=True)
class Job:
    """One video to make.

    Attributes:
        path: the mp4 to write.
        prompt: text, number and image.
        seed: of its noise; the prompt's own where it has one.
        note_apart: whether the note lies in `<folder>_notes`: VBench-2.0 takes every file of a folder for a video.
    """

    path: Path
    prompt: Prompt
    seed: int
    note_apart: bool = False

    @property
    def note(self) -> Path:
        """The JSON file that says how the video was made."""
        return note_path(self.path, apart=self.note_apart)

    def is_finished(self, note: dict[str, Any]) -> bool:
        """Whether the file is there and was made exactly as `note` says; older notes lack the index."""
        return self.path.is_file() and {"index": note.get("index"), **self.read()} == json.loads(json.dumps(note))

    def read(self) -> dict[str, Any]:
        """Return the note that is there; an empty one where there is none, or a damaged one."""
        try:
            return dict(from_json(self.note.read_bytes()))
        except (OSError, ValueError, TypeError):
            return {}

    def check_made(self) -> None:
        """Refuse a video that is missing, or whose note names another prompt, seed or index; it may have no note."""
        if not self.path.is_file():
            raise ValueError(f"There is no video '{self.path}'.")
        note = read_note(self.note.read_bytes(), str(self.note)) if self.note.is_file() else {}
        for name, wanted in (("prompt", self.prompt.text), ("seed", self.seed), ("index", self.prompt.noise_index)):
            if note.get(name, wanted) != wanted:
                raise ValueError(
                    f"'{self.path}' was made with the {name} {note[name]!r}, here its row has {wanted!r}: give the CSV "
                    "and the seeds that the videos were made with."
                )

    def write(self, video: "Tensor", fps: int, note: dict[str, Any]) -> None:
        """Write the video `[F, H, W, 3]`, then its note: a video without one was not finished."""
        from hyvideo.data.videos import write_video  # here, so that jobs are planned without waiting for PyTorch

        self.note.unlink(missing_ok=True)
        write_video(self.path, video, fps)
        self.note.write_text(json.dumps(note, indent=1, ensure_ascii=False), encoding="utf-8")


def jobs_of_prompt(path: Path, prompt: Prompt, seeds: Sequence[int]) -> list[Job]:
    """Return the jobs of one prompt: `path` itself, or with several seeds one file each, `<name>_seed<N>.mp4`."""
    if path.suffix != ".mp4":
        raise ValueError(f"--output_path: expected a file ending in .mp4 for one prompt; received '{path}'.")
    return [Job(_with_seed(path, seed, seeds), replace(prompt, seed=seed), seed) for seed in seeds]


def jobs_of_csv(folder: Path, prompts: Sequence[Prompt], seeds: Sequence[int], names: str = "row") -> list[Job]:
    """Return the jobs of a CSV's rows: `<folder>/0000.mp4`, ...; a row with its own seed is made once.

    With `names` `vbench` they are called as VBench and VBench-2.0 expect it: `<prompt>-<number of the seed>.mp4`, the
    prompt cut after 180 characters; two of one name, and a prompt that cannot be one, are a ValueError.
    """
    jobs: dict[Path, Job] = {}
    for row, prompt in enumerate(prompts):
        chosen = seeds if prompt.seed is None else [prompt.seed]
        for number, seed in enumerate(chosen):
            path = _with_seed(folder / f"{row:04d}.mp4", seed, chosen)
            if names == "vbench":
                path = folder / f"{prompt.text[:VBENCH_CHARACTERS]}-{number}.mp4"
                if path.parent != folder or "\0" in path.name or len(path.name.encode()) > 255:
                    raise ValueError(
                        f"--file_names vbench: the prompt {prompt.text!r:.120} cannot be the name of a file."
                    )
                if path in jobs:
                    raise ValueError(
                        f"--file_names vbench: two videos would be '{path.name}'; give each prompt once, and the seeds "
                        "by --seed."
                    )
            jobs[path] = Job(path, prompt, seed, note_apart=names == "vbench")
    return list(jobs.values())


def _with_seed(path: Path, seed: int, seeds: Sequence[int]) -> Path:
    return path if len(seeds) == 1 else path.with_name(f"{path.stem}_seed{seed}{path.suffix}")
