"""A rehearsal is made once for the same settings, sizes and code, and never taken for another."""

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from hyvideo.config.loading import load_config
from hyvideo.planning import rehearsal
from hyvideo.planning.networks import read_networks
from hyvideo.planning.rehearsal import rehearse
from tests.support.training import REPOSITORY

TINY = ["--config", str(REPOSITORY / "configs/tiny.yaml"), "--validation_interval", "0"]
TINY += "--sample_n_frames 5 --rollout_size 32x32 --grpo_sampling_steps 2 --batch_size 2 --num_generations 2".split()
SIZES = {"world_size": 1, "num_text": 20}


@pytest.fixture(autouse=True)
def folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setenv("SAGE_GRPO_CACHE", str(tmp_path / "kept"))
    return tmp_path / "kept"


def place(*flags: str, layers: int = 2, **sizes: object) -> Path | None:
    config = load_config([*TINY, *flags])
    networks = read_networks(config.model, config.reward)
    networks = replace(networks, transformer={**networks.transformer, "num_layers": layers})
    return rehearsal.kept_at(config, networks, SIZES | sizes)


def test_the_same_run_is_rehearsed_once_and_again_when_its_file_is_damaged(folder: Path, monkeypatch):
    config = load_config(TINY)
    networks = read_networks(config.model, config.reward)
    made = rehearse(config, networks, **SIZES)
    (file,) = folder.iterdir()
    asked = []
    monkeypatch.setattr(rehearsal, "in_own_processes", lambda *args, **kwargs: asked.append(args) or 1 / 0)
    assert rehearse(config, networks, **SIZES) == made and not asked
    for text in ("", "{", "[]", '{"peaks": 1}', json.dumps({"depths": [2]})):
        file.write_text(text)
        with pytest.raises(ZeroDivisionError):
            rehearse(config, networks, **SIZES)


def test_what_decides_a_rehearsal_decides_its_file(monkeypatch):
    file = place()
    assert file == place("--max_steps", "7", "--train_video_csv", "others.csv")
    others = [place("--eta", "0.3"), place(layers=3), place(world_size=2), place(num_text=21)]
    monkeypatch.setattr(rehearsal, "code_hash", lambda: "another")
    assert len({file, place(), *others}) == 6


def test_nothing_is_kept_without_a_folder_or_where_it_cannot_be_written_or_of_an_own_sampler(folder, monkeypatch):
    assert place("--sde_type", "examples.sampler:Own") is None
    folder.write_text("a file")
    made = SimpleNamespace(depths=(1,))
    monkeypatch.setattr(rehearsal, "_extrapolated", lambda *args, **kwargs: made)
    config = load_config(TINY)
    assert rehearse(config, read_networks(config.model, config.reward), **SIZES) is made
    assert folder.read_text() == "a file"
    for name in ("", "~/kept"):
        monkeypatch.setenv("SAGE_GRPO_CACHE", name)
        assert place() is None
