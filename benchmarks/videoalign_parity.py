"""How far the VideoAlign scorer is from the original code's scores in float32 and bfloat16, and files from memory.

REFERENCE is a folder of scores of the original code: `reference.json` with `cases` (name, video, prompt), `calls`
(name, kwargs, cases, batch) and `checkpoints` (path, scores per call: case, raw and norm); ROOT holds the checkpoints.

Example: `python -m benchmarks.videoalign_parity REFERENCE ROOT`
"""

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from hyvideo.config.flags import Parser
from hyvideo.data.videos import read_video, video_length, write_video
from hyvideo.models.reward_models.videoalign import VideoAlignScorer
from hyvideo.models.reward_models.videoalign.network import METRICS


def main(argv: Sequence[str]) -> int:
    """Print a table of largest and mean differences; returns 1 where float32 is off by more than 2e-4."""
    parser = Parser("videoalign_parity", description=__doc__)
    parser.add_argument("reference", type=Path)
    parser.add_argument("root", type=Path)
    arguments = parser.parse_args(argv)
    reference = json.loads((arguments.reference / "reference.json").read_text(encoding="utf-8"))
    cases = {case["name"]: case for case in reference["cases"]}
    worst = 0.0
    print("| checkpoint | precision | raw: largest, mean | normalised: largest, mean |\n|---|---|---|---|")
    for name, checkpoint in reference["checkpoints"].items():
        for dtype in (torch.float32, torch.bfloat16):
            scorer = VideoAlignScorer(arguments.root / checkpoint["path"], dtype=dtype)
            columns = []
            for kind in ("raw", "norm"):
                calls = [(call, checkpoint["scores"][call["name"]]) for call in reference["calls"]]
                off = [d for call in calls for d in _differences(scorer, *call, cases, arguments.reference, kind)]
                columns.append(f"{max(off):.1e}, {sum(off) / len(off):.1e}")
                worst = max(worst, *off) if dtype == torch.float32 else worst
            print(f"| {name} | {str(dtype).removeprefix('torch.')} | {' | '.join(columns)} |")
        scorer = VideoAlignScorer(arguments.root / checkpoint["path"])
        for case in cases.values():
            print(f"{name}, {case['name']}: {_file_minus_memory(scorer, arguments.reference / case['video'], case)}")
    return 0 if worst <= 2e-4 else 1


def _differences(
    scorer: VideoAlignScorer,
    call: Mapping[str, Any],
    expected: Sequence[Mapping[str, Any]],
    cases: Mapping[str, Mapping[str, Any]],
    folder: Path,
    kind: str,
) -> Iterator[float]:
    """Absolute differences of all scores of a call, made as one batch or one by one."""
    for batch in [expected] if call["batch"] else [[entry] for entry in expected]:
        chosen = [cases[entry["case"]] for entry in batch]
        scores = scorer.score(
            [folder / case["video"] for case in chosen],
            [case["prompt"] for case in chosen],
            normalize=kind == "norm",
            **call["kwargs"],
        )
        for index, entry in enumerate(batch):
            yield from (abs(scores[metric][index] - entry[kind][metric]) for metric in scores)


def _file_minus_memory(scorer: VideoAlignScorer, path: Path, case: Mapping[str, Any]) -> str:
    """What compression changes: normalised scores through an mp4 of ours minus those of the frames it was made from."""
    frames, (_, fps) = read_video(path), video_length(path)
    copy = Path(f"{path.stem}.copy.mp4")
    write_video(copy, frames, fps)
    through_file = scorer.score([copy], [case["prompt"]])
    in_memory = scorer.score_frames([frames], fps, [case["prompt"]])
    copy.unlink()
    return ", ".join(f"{metric} {through_file[metric][0] - in_memory[metric][0]:+.3f}" for metric in METRICS)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
