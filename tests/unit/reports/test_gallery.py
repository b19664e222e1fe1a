"""Which videos a gallery puts side by side, and what a study hands out."""

import json
import shutil

import pytest

from scripts.reports.gallery import read_models, same_prompts, write_gallery, write_study
from tests.support.run_folders import PROMPTS, model_of, write_run, write_scored


def generated(folder, prompts, seeds):
    folder.mkdir()
    for number, (prompt, seed) in enumerate(zip(prompts, seeds, strict=True)):
        (folder / f"{number:04d}.mp4").write_bytes(b"video")
        (folder / f"{number:04d}.json").write_text(json.dumps({"prompt": prompt, "seed": seed}))
    return folder


def test_videos_are_matched_by_prompt_and_seed_whatever_their_order_and_without_seeds_in_order(tmp_path):
    first = model_of(generated(tmp_path / "seeds a", ["x", "y", "x"], [1, 1, 2]))
    second = model_of(generated(tmp_path / "seeds b", ["x", "x", "z"], [2, 1, 1]))
    rows = same_prompts([first, second])
    assert [[(video.prompt, video.seed) for video in row] for row in rows] == [[("x", 1)] * 2, [("x", 2)] * 2]
    first = model_of(write_scored(tmp_path / "a", ["x", "x", "y"], [0.0] * 3))
    second = model_of(generated(tmp_path / "b", ["y", "x", "x"], [5, 6, 7]))
    names = [[video.path.name for video in row] for row in same_prompts([first, second])]
    assert names == [["000.mp4", "0001.mp4"], ["001.mp4", "0002.mp4"], ["002.mp4", "0000.mp4"]]


def test_the_last_validation_that_all_run_folders_made_is_shown(tmp_path):
    short = write_run(tmp_path / "short", samples={0: 0.0, 10: 0.5})
    long = write_run(tmp_path / "long", samples={0: 0.0, 10: 0.4, 30: 0.9})
    plain = write_scored(tmp_path / "plain", PROMPTS, [0.0] * 8)
    models = read_models([(None, short), ("ours", long), (None, plain)])
    assert [model.name for model in models] == ["short", "ours", "plain"]
    assert [model.videos[0].path.parent.name for model in models] == ["step_10", "step_10", "plain"]
    other = write_run(tmp_path / "other", samples={7: 0.0})
    told = r"No update after which all runs validated: .*short has \[0, 10\]; .*other has \[7\]"
    with pytest.raises(ValueError, match=told):
        read_models([(None, short), (None, other)])
    run = write_run(tmp_path / "run", samples={8: 0.0, 10: 0.5})
    shutil.copytree(run / "samples" / "step_10", run / "samples" / "step_10.bak")  # none of the validations
    model = model_of(run, "trained")
    assert model.name == "trained" and {video.path.parent.name for video in model.videos} == {"step_10"}


def test_models_without_a_common_prompt_or_a_name_of_their_own_are_refused(tmp_path):
    first = model_of(generated(tmp_path / "a", ["x"], [1]))
    with pytest.raises(ValueError, match="no prompt and seed in common. They hold a: 'x'; b: 'y'"):
        same_prompts([first, model_of(generated(tmp_path / "b", ["y"], [1]))])
    with pytest.raises(ValueError, match="folders with names of their own; received a, a"):
        same_prompts([first, first])


def test_one_folder_is_a_grid_of_the_seeds_of_each_prompt(tmp_path):
    model = model_of(generated(tmp_path / "a", ["x", "y", "x", "x"], [7, 7, 8, 9]))
    text = write_gallery(tmp_path / "gallery.html", [model]).read_text()
    strips = text.split('<section class="strip"')[1:]
    assert [[seed for seed in (7, 8, 9) if f"seed {seed}" in strip] for strip in strips] == [[7, 8, 9], [7]]
    assert "2 prompts, the seeds of each side by side." in text


def test_prompts_whose_videos_were_not_kept_are_counted_and_left_out(tmp_path):
    models = [model_of(write_scored(tmp_path / name, PROMPTS, [0.1] * 8)) for name in ("base", "sage")]
    text = write_gallery(tmp_path / "gallery.html", models).read_text()
    assert text.count('src="base/') == text.count('src="sage/') == 8
    for model in models:
        for video in model.videos[1:]:
            video.path.unlink()
    text = write_gallery(tmp_path / "gallery.html", models).read_text()
    assert text.count('<section class="strip"') == 1 and 'class="no-video"' not in text
    assert f"1 prompt, the same seeds for all models; {len(models[0].videos) - 1} prompts whose videos" in text


def test_a_study_holds_copies_under_random_names_and_its_key_lies_beside(tmp_path):
    models = [model_of(write_scored(tmp_path / name, PROMPTS, [0.1] * 8)) for name in ("base", "dance", "sage")]
    key_path = write_study(tmp_path / "study", models, num_pairs=9)
    key = json.loads(key_path.read_text())
    assert key_path == tmp_path / "study.key.json"
    couples = [tuple(key["models"][video] for video in videos) for videos in key["pairs"].values()]
    assert sorted(couples) == 3 * [("base", "dance")] + 3 * [("base", "sage")] + 3 * [("dance", "sage")]
    assert set(key["prompts"]) == set(key["pairs"]) and len(set(key["prompts"].values())) == 3
    handed_out = {path.stem for path in (tmp_path / "study" / "videos").iterdir()}
    assert handed_out == set(key["models"]) and len(handed_out) == 18


def test_a_study_with_missing_videos_or_a_used_folder_is_refused(tmp_path):
    models = [model_of(write_scored(tmp_path / name, PROMPTS, [0.1] * 8)) for name in ("base", "sage")]
    with pytest.raises(ValueError, match=r"num_pairs must lie in 1\.\.8, all pairs there are; received 9"):
        write_study(tmp_path / "study", models, num_pairs=9)
    models[0].videos[3].path.unlink()
    with pytest.raises(ValueError, match=r"1 of the videos are missing or empty, such as .*003\.mp4"):
        write_study(tmp_path / "study", models)
    (tmp_path / "study").mkdir()
    with pytest.raises(ValueError, match="exists already: give a new folder"):
        write_study(tmp_path / "study", models)
