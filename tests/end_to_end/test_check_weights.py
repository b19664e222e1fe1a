"""check_weights tells whole downloads from damaged ones without loading them."""

import json
import shutil
from pathlib import Path

import pytest

from scripts.check_weights import main


@pytest.mark.parametrize("version", ["480p_t2v", "480p_i2v"])
def test_a_whole_download_is_listed_with_its_sizes(original_root: Path, capsys: pytest.CaptureFixture, version: str):
    assert main(["--model_path", str(original_root), "--transformer_version", version]) == 0
    listed = capsys.readouterr().out
    for folder in (f"transformer/{version}", "vae", "text_encoder/llm", "text_encoder/Glyph-SDXL-v2/checkpoints"):
        assert f"bytes  {original_root / folder}\n" in listed
    assert ("siglip/image_encoder" in listed) == (version == "480p_i2v")


def test_the_diffusers_layout_is_checked_too(tiny_root: Path, capsys: pytest.CaptureFixture):
    assert main(["--model_path", str(tiny_root)]) == 0
    assert f"bytes  {tiny_root / 'text_encoder'}\n" in capsys.readouterr().out


CUT = ["vae/diffusion_pytorch_model.safetensors", "text_encoder/llm/model.safetensors"]
CUT += ["text_encoder/llm/tokenizer.json", "text_encoder/byt5-small/tokenizer_config.json"]


@pytest.mark.parametrize(
    ("layout", "file"), [*(("original_root", file) for file in CUT), ("tiny_root", "tokenizer/tokenizer.json")]
)
def test_a_file_that_was_cut_short_is_named(request, tmp_path, capsys, layout, file):
    root = shutil.copytree(request.getfixturevalue(layout), tmp_path / "ckpts")
    (root / file).write_bytes((root / file).read_bytes()[:-10])
    version = ["--transformer_version", "480p_t2v"] if layout == "original_root" else []
    assert main(["--model_path", str(root), *version]) == 2
    assert f"Cannot read '{root / file}'" in capsys.readouterr().err


def test_weights_of_another_config_are_named(original_root: Path, tmp_path: Path, capsys: pytest.CaptureFixture):
    root = shutil.copytree(original_root, tmp_path / "ckpts")
    path = root / "transformer" / "480p_t2v" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"hidden_size": 64}))
    assert main(["--model_path", str(root), "--transformer_version", "480p_t2v"]) == 2
    assert "mis-shaped keys" in capsys.readouterr().err
