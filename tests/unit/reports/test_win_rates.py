"""Win rates: counts, merging over raters, intervals."""

import json
import math
from dataclasses import astuple, replace

import pytest

from hyvideo.evaluation.intervals import wilson_interval
from scripts import report
from scripts.reports.win_rates import Vote, read_votes, win_rates, write_votes

PAIRS = [f"p{number}" for number in range(10)]


@pytest.fixture
def key(tmp_path):
    models = {f"{side}{pair}": side for pair in PAIRS for side in ("base", "sage")}
    path = tmp_path / "study.key.json"
    pairs = {pair: [f"base{pair}", f"sage{pair}"] for pair in PAIRS}
    path.write_text(json.dumps({"study": "s", "models": models, "pairs": pairs}))
    return path


def vote(pair, winner, rater="Ann", criterion="visual_quality", count=1):
    return Vote("s", rater, pair, criterion, "tie" if winner == "tie" else f"{winner}{pair}", count)


def save(path, votes):
    write_votes(path, votes)
    return path


def test_wins_ties_and_losses_are_counted_per_criterion(key):
    votes = [vote(pair, winner) for pair, winner in zip(PAIRS, ["base"] * 5 + ["tie"] * 2 + ["sage"] * 3, strict=True)]
    votes += [vote(pair, "sage", criterion="motion_quality") for pair in PAIRS]
    visual, motion = win_rates(key, votes)
    assert (visual.first, visual.second, visual.criterion) == ("base", "sage", "visual_quality")
    assert (visual.wins, visual.ties, visual.losses, visual.rate) == (5, 2, 3, 0.6)
    assert motion.rate == 0 and motion.low == pytest.approx(0) and 0.2 < motion.high < 0.3


def test_more_raters_of_one_pair_are_not_more_pairs(key):
    alone = win_rates(key, [vote(pair, "base") for pair in PAIRS[:5]])
    many = win_rates(key, [vote(pair, "base", rater) for pair in PAIRS[:5] for rater in "abcdef"])
    assert (many[0].num_pairs, many[0].num_raters, many[0].wins) == (5, 6, 30)
    assert (many[0].rate, many[0].low, many[0].high) == (alone[0].rate, alone[0].low, alone[0].high)
    unequal = [vote("p0", "base", rater) for rater in "abc"] + [vote("p1", "sage")]
    assert win_rates(key, unequal)[0].rate == 0.5, "each pair counts the same"


def test_more_seeds_of_one_prompt_are_not_more_prompts(key):
    alone = win_rates(key, [vote(pair, winner) for pair, winner in zip(PAIRS, ("base", "sage", "base"), strict=False)])
    of_prompt = {pair: f"prompt {number % 3}" for number, pair in enumerate(PAIRS[:9])}
    key.write_text(json.dumps({**json.loads(key.read_text()), "prompts": of_prompt}))
    winners = ("base", "sage", "base") * 3
    thrice = win_rates(key, [vote(pair, winner) for pair, winner in zip(PAIRS, winners, strict=False)])
    assert thrice[0].num_pairs == 9
    assert [astuple(one)[-3:] for one in thrice] == [pytest.approx(astuple(one)[-3:]) for one in alone]


def test_files_merge_and_a_later_judgement_replaces_the_earlier(tmp_path):
    ann = save(tmp_path / "ann.json", [vote("p0", "base"), vote("p1", "base")])
    again = save(tmp_path / "again.json", [vote("p0", "sage", count=2)])
    bo = save(tmp_path / "bo.json", [vote("p0", "base", rater="Bo")])
    for order in ([ann, again, bo], [bo, again, ann]):
        merged = read_votes([save(tmp_path / "merged.json", read_votes(order)), ann])
        kept = sorted((v.rater, v.pair, v.choice) for v in merged)
        assert kept == [("Ann", "p0", "sagep0"), ("Ann", "p1", "basep1"), ("Bo", "p0", "basep0")]
    tied = save(tmp_path / "tied.json", [vote("p0", "tie")])
    assert [read_votes(order)[0].choice for order in ([ann, tied], [tied, ann])] == ["tie", "basep0"]


def test_votes_of_another_study_a_wrong_file_an_unknown_criterion_and_an_unknown_video_are_refused(key, tmp_path):
    with pytest.raises(ValueError, match="received a vote of study t on p0"):
        win_rates(key, [replace(vote("p0", "base"), study="t")])
    with pytest.raises(ValueError, match="judges 'beauty'; expected one of visual_quality"):
        win_rates(key, [vote("p0", "base", criterion="beauty")])
    with pytest.raises(ValueError, match="'Ann' chose 'other' of pair 'p0'; expected tie or one of its videos, basep0"):
        win_rates(key, [replace(vote("p0", "base"), choice="other")])
    files = [save(tmp_path / f"{name}.json", [replace(vote("p0", "base"), study=name, rater=name)]) for name in "st"]
    with pytest.raises(ValueError, match=r"belong to 2 studies \(s, t\)"):
        read_votes(files)
    with pytest.raises(ValueError, match="(?s)expected a JSON object with votes.*Field required"):
        read_votes([key])


def test_the_wilson_interval_solves_its_equation_and_holds_a_rate_at_the_end_of_its_range():
    assert all(wilson_interval(1.0, count)[1] == 1 and wilson_interval(0.0, count)[0] == 0 for count in range(1, 100))
    for rate, count in ((0.5, 40), (0.9, 10), (1.0, 40), (0.0, 7)):
        for end in wilson_interval(rate, count):
            assert abs(rate - end) == pytest.approx(1.959964 * math.sqrt(end * (1 - end) / count), rel=1e-5, abs=1e-7)


def test_raters_are_listed_and_those_who_were_not_asked_are_refused(key, tmp_path, capsys):
    votes = save(tmp_path / "votes.json", [vote("p0", "base"), vote("p1", "base", rater="Eve")])
    assert report.main(["winrates", str(key), str(votes)]) == 0
    assert "raters: Ann (1 votes), Eve (1 votes)" in capsys.readouterr().out
    assert report.main(["winrates", str(key), str(votes), "--raters", "Ann", "Bo"]) == 2
    assert "--raters: Eve voted too" in capsys.readouterr().err
