"""Whatever files of a run or its prompts say: they are read, or a ValueError names them; nothing else happens."""

import io
import json
import math
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from safetensors.torch import save_file

from hyvideo.checkpoint.run_folder import open_run_folder
from hyvideo.checkpoint.tensors import MANIFEST, Manifest, verify_files
from hyvideo.checkpoint.train_state import FACTS, begin_save, read_facts
from hyvideo.config.schema import RunConfig
from hyvideo.data.prompts import COLUMNS, read_prompts
from hyvideo.data.videos import read_image
from hyvideo.evaluation.scored_files import ScoreFile
from hyvideo.models.weight_files import SafetensorsFolder
from hyvideo.observability.metrics import MetricsLog, read_metrics
from hyvideo.observability.scored_videos import read_scored_videos
from hyvideo.training.run import Run
from scripts.reports.report import report_runs
from scripts.reports.run_record import read_run
from scripts.reports.win_rates import read_votes, win_rates
from tests.support.equal_runs import sign
from tests.support.fuzzing import TEXTS, changed, damaged, fuzz, json_files, only_value_errors
from tests.support.run_folders import write_run


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    (tmp_path / "secret").write_text("secret")
    return begin_save(tmp_path / "checkpoints", 2, {"policy": {"w": torch.arange(6.0)}}, {"round": 1}).finish()


RECORD = {"size": 3, "sha256": "0" * 64}
PLACES = st.sampled_from(["../../secret", "/etc/passwd", "", ".", "a/../b", "a" * 300, "facts.json/x"])
RECORDS = st.dictionaries(st.one_of(TEXTS, PLACES), st.one_of(st.just(RECORD), changed(RECORD)), max_size=2)


@fuzz()
@given(st.data())
def test_any_manifest_is_true_or_refused_by_name(checkpoint: Path, data: st.DataObject):
    before = (checkpoint / MANIFEST).read_bytes()
    true = json.loads(before)
    more = RECORDS.map(lambda records: json.dumps(true | {"files": true["files"] | records}).encode())
    content = data.draw(st.one_of(json_files(true), more))
    (checkpoint / MANIFEST).write_bytes(content)
    with only_value_errors(checkpoint):
        verify_files(checkpoint)
        for name, record in Manifest.model_validate_json(content).files.items():
            assert (checkpoint / name).resolve().is_relative_to(checkpoint)
            assert (checkpoint / name).stat().st_size == record.size
    (checkpoint / MANIFEST).write_bytes(before)


STEPS = ["step_2", "step_1", "step_", "step_02", "step_٢", "step_1_0", "step_" + "9" * 300, "../secret"]
NAMES = st.one_of(TEXTS, st.sampled_from(STEPS))


@fuzz(4)
@given(json_files({"format": 4, "step": 2, "round": 1}), NAMES)
def test_any_facts_and_any_pointer_resume_or_are_refused_by_name(checkpoint: Path, facts: bytes, latest: str):
    (checkpoint / FACTS).write_bytes(facts)
    (checkpoint.parent / "latest").write_bytes(latest.encode("utf-8", "surrogatepass"))
    for wanted in ("latest", str(checkpoint)):
        config = RunConfig(output_dir=str(checkpoint.parents[1]), resume_from_checkpoint=wanted, max_steps=9)
        with only_value_errors(checkpoint.parent):
            chosen = open_run_folder(config).resume_from
            assert chosen is None or (chosen.parent == checkpoint.parent and read_facts(chosen)["step"] >= 0)


@pytest.fixture
def trained(make_training) -> tuple[Run, Path]:
    training = make_training(use_lora="true", lora_r=2, lora_alpha=2)
    checkpoint = training.state.save(training.folder.checkpoints, keep_last=None)
    return training, checkpoint


@fuzz(20)
@given(st.data())
def test_any_facts_with_a_true_manifest_load_or_are_refused_by_name(trained, data):
    training, checkpoint = trained
    before = (checkpoint / FACTS).read_bytes()
    facts = json.loads(before)
    (checkpoint / FACTS).write_text(json.dumps(data.draw(changed(facts))))
    sign(checkpoint)
    try:
        with only_value_errors(checkpoint):
            training.state.load(checkpoint)
            assert training.state.step >= 0 and training.state.sampler.round >= 0
            training.state.sampler.next_round()
    finally:
        (checkpoint / FACTS).write_bytes(before)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    folder = tmp_path / "weights"
    folder.mkdir()
    for name in ("a", "b"):
        save_file({name: torch.ones(2, 3)}, folder / f"{name}.safetensors")
    save_file({"c": torch.ones(1)}, tmp_path / "secret.safetensors")
    return folder


ODD = TEXTS | st.sampled_from(["../secret.safetensors", "./b.safetensors", "b.safetensors/"])
INDEX = {"metadata": {"total_size": 48}, "weight_map": {"a": "a.safetensors", "b": "b.safetensors"}}
ODD_MAPS = ODD.map(lambda b: json.dumps({"weight_map": {"a": "a.safetensors", "b": b, "c": b}}).encode())


@fuzz(4)
@given(json_files(INDEX) | ODD_MAPS)
def test_any_index_of_weights_is_true_or_refused_by_name(shards: Path, content: bytes):
    (shards / "model.safetensors.index.json").write_bytes(content)
    with only_value_errors(shards):
        source = SafetensorsFolder(shards)
        assert {source.read(name, None).shape for name in source.shapes} == {(2, 3)}
        assert source.shapes.keys() == json.loads(content)["weight_map"].keys()


ROW = {"step": 2, "reward/mean": 0.5, "reward/VQ": None, "round": 1.0, "kl/coef": 1e-5}
VIDEO = {"video": "000.mp4", "prompt": "a cat", "seed": 3, "reward": 0.5, "VQ": None}


def lines_of(row: dict) -> st.SearchStrategy[bytes]:
    true = json.dumps(row).encode()
    line = st.one_of(st.just(true), changed(row).map(lambda tree: json.dumps(tree).encode()), json_files(row))
    return st.lists(line, max_size=4).map(b"\n".join).flatmap(lambda text: st.one_of(st.just(text), damaged(text)))


@pytest.fixture
def run_folder(tmp_path: Path) -> Path:
    folder = write_run(tmp_path / "run", num_updates=6, samples={0: 0.0, 4: 0.5})
    gain = {"before": 0.0, "after": 0.5, "mean": 0.5, "low": 0.1, "high": 0.9, "in_base_std": 1.5}
    gain |= {"num_pairs": 8, "num_left_out": 0}
    (folder / "gains.json").write_text(json.dumps({"updates": 6, "gains": {"reward": gain}}))
    (folder / "console.log").write_text("2026-01-01 00:00:00 WARNING slow\n")
    return folder


@fuzz(2)
@given(lines_of(ROW))
def test_any_metrics_are_read_or_refused_by_line(tmp_path: Path, content: bytes):
    for file in tmp_path.glob("metrics*"):
        file.unlink()
    (tmp_path / "metrics.jsonl").write_bytes(content)
    run = read_run(tmp_path)
    assert all(len(column) == len(run.columns["step"]) for column in run.columns.values())
    assert run.num_updates == int(run.num_updates)
    with only_value_errors("metrics.jsonl, line"):
        rows = read_metrics(tmp_path / "metrics.jsonl")
        assert all(type(row["step"]) is int and all(type(v) in (int, float) for v in row.values()) for row in rows)
    log = MetricsLog(tmp_path)  # keeps the rows, and moves the rest away
    log.log(10**16, {"reward/mean": 1.0})
    log.close()
    assert len(read_metrics(tmp_path / "metrics.jsonl")) == len(run.columns["step"]) + 1


@fuzz(3)
@given(lines_of(VIDEO))
def test_any_scores_of_videos_are_read_or_refused_by_name(tmp_path: Path, content: bytes):
    folder = tmp_path / "samples" / "step_1"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "scores.jsonl").write_bytes(content)
    with only_value_errors(folder):
        for video in read_scored_videos(folder):
            assert video.path.parent == folder and video.path != folder
            assert all(type(score) is float for score in video.scores.values())
    (tmp_path / "metrics.jsonl").touch()
    run = read_run(tmp_path)
    assert (1 in run.samples) != any("scores.jsonl" in problem or "no videos" in problem for problem in run.problems)


@fuzz(4)
@given(lines_of({"video": "000.mp4", "key": "0" * 24, "scores": {"VQ": 1.0, "MQ": None}}))
def test_any_kept_scores_are_read_or_refused_by_line(tmp_path: Path, content: bytes):
    (tmp_path / "scores.jsonl").write_bytes(content)
    with only_value_errors("scores.jsonl, line"):
        kept = ScoreFile(tmp_path / "scores.jsonl")._scores
        values = [value for scores in kept.values() for value in scores.values()]
        assert all(value is None or math.isfinite(value) for value in values)


STUDY = {"study": "s", "models": {"x.mp4": "A", "y.mp4": "B"}, "pairs": {"p1": ["x.mp4", "y.mp4"]}}
VOTE = {"study": "s", "rater": "r", "pair": "p1", "criterion": "visual_quality", "choice": "x.mp4", "count": 1}
VOTES = {"votes": [VOTE, VOTE | {"rater": "q", "choice": "tie"}]}


@fuzz(4)
@given(st.one_of(st.just(json.dumps(STUDY).encode()), json_files(STUDY)), json_files(VOTES))
def test_any_votes_are_counted_or_refused_by_name(tmp_path: Path, study: bytes, votes: bytes):
    (tmp_path / "key.json").write_bytes(study)
    (tmp_path / "votes.json").write_bytes(votes)
    with only_value_errors("key.json", "votes.json", "vote"):
        for rate in win_rates(tmp_path / "key.json", read_votes([tmp_path / "votes.json"])):
            assert 0 <= rate.low <= rate.rate <= rate.high <= 1


RUN_FILES = ("metrics.jsonl", "config.yaml", "console.log", "gains.json", "samples/step_4/scores.jsonl")


@fuzz(20)
@given(st.data(), st.sampled_from(RUN_FILES))
def test_any_damage_to_a_run_folder_gives_a_report_or_a_reason(run_folder: Path, data: st.DataObject, name: str):
    path = run_folder / name
    before = path.read_bytes()
    path.write_bytes(data.draw(damaged(before)))
    try:
        with only_value_errors(run_folder):
            report = report_runs([run_folder], run_folder.parent / "report.html")
            assert report.stat().st_size > 1000
    finally:
        path.write_bytes(before)


PATHS = ["inside.png", "../secret.png", "link.png", "folder/a.png", "loop", "pipe", "folder", "../root/inside.png"]
PATHS += ["/etc/passwd", "/dev/zero", "inside.png\0", "a" * 300, "../" * 400 + "etc/passwd"]
WORDS = [
    "a cat",
    "",
    "0",
    "-1",
    "9" * 5000,
    "٣",
    "1.0",
    "nan",
    "~",
    "=1+1",
    "\u2028",
    "\ufeff",
    "\n",
    '"',
    "x" * 140_000,
]
CELLS = st.sampled_from(WORDS) | st.sampled_from(PATHS) | st.text(max_size=8)


@st.composite
def csv_texts(draw: st.DrawFn) -> bytes:
    """A header and rows as programs write them, with a cell too many or too few, or damaged."""
    header = draw(st.permutations(COLUMNS) | st.lists(st.sampled_from(COLUMNS) | CELLS, min_size=1, max_size=5))
    rows = draw(st.lists(st.lists(CELLS, max_size=len(header) + 1), max_size=4))
    lines = [",".join('"{}"'.format(cell.replace('"', '""')) for cell in row) for row in [header, *rows]]
    content = draw(st.sampled_from(["\n", "\r\n", "\r"])).join(lines).encode("utf-8", "surrogatepass")
    return draw(st.just(content) | damaged(content))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A folder of images with ways out of it: links to a file and to a folder, a loop, a pipe."""
    folder = tmp_path / "root"
    (tmp_path / "elsewhere").mkdir()
    folder.mkdir()
    for file in (tmp_path / "secret.png", tmp_path / "elsewhere" / "a.png", folder / "inside.png"):
        file.write_bytes(b"x")
    (folder / "link.png").symlink_to(tmp_path / "secret.png")
    (folder / "folder").symlink_to(tmp_path / "elsewhere")
    (folder / "loop").symlink_to(folder / "loop")
    os.mkfifo(folder / "pipe")
    (folder / "prompts.csv").touch()
    return folder


def listing(folder: Path) -> list[tuple[str, int]]:
    return sorted((str(path), path.lstat().st_size) for path in folder.rglob("*") if path.name != "prompts.csv")


@fuzz()
@given(csv_texts(), st.booleans())
def test_any_csv_gives_prompts_or_a_value_error_that_names_the_file(root: Path, content: bytes, confined: bool):
    (root / "prompts.csv").write_bytes(content)
    before = listing(root.parent)
    with only_value_errors("prompts.csv"):
        prompts = read_prompts([root / "prompts.csv"], image_root=root if confined else None)
        assert prompts and all(prompt.text == prompt.text.strip() != "" for prompt in prompts)
        assert len({prompt.index for prompt in prompts}) == len(prompts)
        assert all(0 <= number < 2**63 for p in prompts for number in (p.index, p.seed) if number is not None)
        images = [Path(prompt.ref_image_path) for prompt in prompts if prompt.ref_image_path]
        assert all(image.is_file() for image in images)
        assert not confined or all(image.resolve().is_relative_to(root) for image in images)
    assert listing(root.parent) == before


FILES = []  # small images, with what such files carry beside the pixels
for kind, mode in (("PNG", "P"), ("PNG", "RGBA"), ("JPEG", "RGB"), ("WEBP", "RGBA")):
    stream, exif = io.BytesIO(), Image.Exif()
    exif[0x0112] = 6
    Image.linear_gradient("L").resize((9, 7)).convert(mode).save(stream, kind, exif=exif, icc_profile=b"x" * 200)
    FILES.append(stream.getvalue())


@fuzz(2)
@given(st.one_of(st.sampled_from(FILES).flatmap(damaged), st.binary(max_size=40)))
def test_any_image_is_read_whole_or_refused_by_name(tmp_path: Path, content: bytes):
    (tmp_path / "any.png").write_bytes(content)
    with only_value_errors("any.png"):
        image = read_image(str(tmp_path / "any.png"))
        assert image.mode == "RGB"
