"""The learning proof as a program: two kinds of runs, kept once finished, and their gains over seeds."""

from pathlib import Path

import pytest
import torch

from hyvideo.models.reward_models.rewards import Scores
from hyvideo.observability.metrics import read_metrics
from scripts.tiny.prove_learning import ShuffledReward, main

SMALL = ["--num_held_out", "4", "--batch_size", "8", "--max_steps", "2"]


class Ranks:
    max_failed = 0.5

    def __call__(self, videos: torch.Tensor, prompts: list[str]) -> Scores:
        places = torch.arange(len(prompts), dtype=torch.float32)
        return Scores({"VQ": -places}, places, {"VQ": -1.0})


@pytest.mark.slow
def test_both_kinds_are_trained_once_and_reported_over_seeds(tmp_path: Path, capsys: pytest.CaptureFixture):
    where = ["--output_dir", str(tmp_path), "--seeds", "1", "2", *SMALL]
    assert main(where) == 0
    first = capsys.readouterr().out
    rows = {" ".join(line.split()[:2]) for line in first.splitlines() if " base std" in line}
    assert rows >= {"true-1 reward", "shuffled-2 TA", "true, 2", "shuffled, 2"}
    logs = sorted(tmp_path.glob("*/metrics.jsonl"))
    assert [path.parent.name for path in logs] == ["shuffled-1", "shuffled-2", "true-1", "true-2"]
    true, shuffled = (read_metrics(tmp_path / kind / "metrics.jsonl")[0] for kind in ("true-1", "shuffled-1"))
    assert true["reward/mean"] == pytest.approx(shuffled["reward/mean"]) and true["grad_norm"] != shuffled["grad_norm"]
    before = [path.read_bytes() for path in logs]
    assert main(where) == 0 and [path.read_bytes() for path in logs] == before


def test_shuffled_scores_are_the_same_scores_of_other_videos_and_repeat_with_the_round():
    dealt, again = ShuffledReward(Ranks(), seed=1), ShuffledReward(Ranks(), seed=1)
    prompts = ["a prompt"] * 32
    rounds = [dealt(torch.empty(0), prompts) for _ in range(2)]
    for scores in rounds:
        assert sorted(scores.total.tolist()) == list(range(32))
        assert torch.equal(scores.metrics["VQ"], -scores.total)
        assert (scores.total != torch.arange(32)).float().mean() > 0.5
    assert not torch.equal(rounds[0].total, rounds[1].total)
    again.calls = 1
    assert torch.equal(again(torch.empty(0), prompts).total, rounds[1].total)


def test_what_cannot_be_compared_is_refused_before_it_is_trained(tmp_path: Path, capsys: pytest.CaptureFixture):
    prompts = tmp_path / "prompts.csv"
    prompts.write_text("prompt\na red circle moves slowly to the left\n")
    begun = tmp_path / "begun" / "true-1"
    begun.mkdir(parents=True)
    scores = {"metrics": {}, "weights": {}, "total": torch.zeros(3)}
    torch.save({"videos": torch.zeros(3, 1), "scores": scores}, begun / "base.pt")
    for flags, told in (
        (["--num_held_out", "1"], "--num_held_out must be at least 3; received 1"),
        (["--valid_video_csv", str(prompts)], "valid_video_csv has 1 prompts; expected more than 128"),
        (["--output_dir", str(begun.parent)], "was begun with 3 held-out videos; received 4"),
    ):
        assert main(["--output_dir", str(tmp_path / "other"), "--seeds", "1", *SMALL, *flags]) == 2
        assert told in capsys.readouterr().err
