"""From a checkpoint in the original layout to training, to exports, and back: bit for bit, and the same frames."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from diffusers import HunyuanVideo15ImageToVideoPipeline, HunyuanVideo15Pipeline
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from hyvideo.checkpoint.trained_policy import load_trained_policy
from hyvideo.models.attention import install_attention
from hyvideo.models.loading import load_pipeline, load_transformer
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline
from hyvideo.pipelines.sampling_defaults import sampling_defaults
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from scripts.export import main
from tests.support.equal_runs import assert_same
from tests.support.original_layout import original_transformer, original_transformer_tensors
from tests.support.pipelines import NUM_STEPS, PROMPTS, VIDEO, noise_of
from tests.support.training import arguments, training_of, write_prompts

VERSION = "480p_t2v"


@pytest.fixture(scope="module")
def checkpoint_of(original_root: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The last checkpoint of a run of two updates from the original weights; each run is made once."""
    folder = tmp_path_factory.mktemp("trained")
    csv = write_prompts(folder / "prompts.csv")

    @cache
    def train(use_lora: bool = False) -> Path:
        settings = {"pretrained_transformer_version": VERSION, "max_steps": 2, "learning_rate": 0.01}
        argv = arguments(original_root, csv, folder / f"run {use_lora}", use_lora=use_lora, **settings)
        training = training_of(argv)
        training.train()
        return training.folder.checkpoints / "step_2"

    return train


def trained_transformer(root: Path, checkpoint: Path) -> nn.Module:
    transformer = load_transformer(root, VERSION)
    load_trained_policy(transformer, checkpoint)
    return transformer


def export(root: Path, output: Path, form: str, *flags: object) -> None:
    argv = ["--model_path", root, "--transformer_version", VERSION, "--format", form, "--output_path", output, *flags]
    assert main(list(map(str, argv))) == 0


def frames(pipeline: HunyuanVideoGRPOPipeline) -> tuple[Tensor, Tensor]:
    """Sample a guided video; returns its first noise and its frames."""
    guidance = Guidance(6.0, pipeline.encode([""], glyphs=False))
    made = pipeline.rollout(pipeline.encode(PROMPTS[:1]), noise_of(1), guidance, **VIDEO, sde_type="ode", eta=0.0)
    return made.latents[:, 0], made.videos[0]


def test_plain_diffusers_makes_the_trained_policys_frames(checkpoint_of, original_root: Path, tmp_path: Path):
    checkpoint = checkpoint_of()
    scheduler = FlowMatchDiscreteScheduler(shift=5.0)
    scheduler.set_timesteps(NUM_STEPS)
    ours = load_pipeline(original_root, VERSION, pipeline_class=HunyuanVideoGRPOPipeline, scheduler=scheduler)
    load_trained_policy(ours.transformer, checkpoint)
    install_attention(ours.transformer)
    noise, expected = frames(ours)

    export(original_root, tmp_path / "out", "diffusers", "--checkpoint_path", checkpoint)
    stock = HunyuanVideo15Pipeline.from_pretrained(tmp_path / "out")
    stock.prompt_template_encode_start_idx = ours.system_turn_length()  # 108 with the real tokenizer
    stock.set_progress_bar_config(disable=True)
    size = {"num_frames": 5, "height": 32, "width": 32, "num_inference_steps": NUM_STEPS}
    received = stock(PROMPTS[0], **size, latents=noise, output_type="pt").frames[0]
    assert (received.permute(0, 2, 3, 1) * 255 - expected).abs().max() <= 0.51  # theirs is not rounded to 8 bits
    assert sampling_defaults(tmp_path / "out") == sampling_defaults(original_root, VERSION)
    expected = trained_transformer(original_root, checkpoint).state_dict()
    assert_same(load_transformer(tmp_path / "out").state_dict(), expected)


def test_the_original_layout_round_trips(checkpoint_of, original_root: Path, tmp_path: Path):
    checkpoint = checkpoint_of()
    export(original_root, tmp_path / "transformer" / "mine", "original", "--checkpoint_path", checkpoint)
    expected = trained_transformer(original_root, checkpoint).state_dict()
    assert_same(load_transformer(tmp_path, "mine").state_dict(), expected)
    written = load_file(tmp_path / "transformer" / "mine" / "diffusion_pytorch_model.safetensors")
    assert_same(written, original_transformer_tensors(expected))
    assert not torch.equal(written["final_layer.linear.weight"], original_transformer(VERSION).proj_out.weight)


def test_a_merged_adapter_is_the_policy_up_to_rounding(checkpoint_of, original_root: Path, tmp_path: Path):
    checkpoint = checkpoint_of(use_lora=True)
    export(original_root, tmp_path / "transformer" / "mine", "original", "--checkpoint_path", checkpoint)
    expected = trained_transformer(original_root, checkpoint)
    expected.fuse_lora()
    expected.unload_lora()
    assert_same(load_transformer(tmp_path, "mine").state_dict(), expected.state_dict())


def test_a_distilled_model_keeps_the_name_that_says_so(original_root, tmp_path, capsys):
    shutil.copytree(original_root, tmp_path / "ckpts")
    (tmp_path / "ckpts" / "transformer" / VERSION).rename(tmp_path / "ckpts" / "transformer" / f"{VERSION}_distilled")
    argv = ["--model_path", str(tmp_path / "ckpts"), "--transformer_version", f"{VERSION}_distilled"]
    argv += ["--format", "original", "--output_path"]
    assert main([*argv, str(tmp_path / "mine")]) == 2 and not (tmp_path / "mine").exists()
    assert "put 'distilled' into 'mine'" in capsys.readouterr().err
    assert main([*argv, str(tmp_path / "mine_distilled")]) == 0


def test_a_base_model_is_converted_there_and_back(original_root: Path, tmp_path: Path):
    export(original_root, tmp_path / "diffusers", "diffusers")
    export(tmp_path / "diffusers", tmp_path / "transformer" / "back", "original")
    written = load_file(tmp_path / "transformer" / "back" / "diffusion_pytorch_model.safetensors")
    assert_same(written, original_transformer_tensors(original_transformer(VERSION).state_dict()))
    assert_same(load_transformer(tmp_path, "back").state_dict(), original_transformer(VERSION).state_dict())


def test_an_image_to_video_model_takes_its_vision_encoder_along(original_root: Path, tmp_path: Path):
    argv = ["--model_path", original_root, "--transformer_version", "480p_i2v", "--format", "diffusers"]
    assert main([*map(str, argv), "--output_path", str(tmp_path / "out")]) == 0
    stock = HunyuanVideo15ImageToVideoPipeline.from_pretrained(tmp_path / "out")
    scheduler = FlowMatchDiscreteScheduler()
    ours = load_pipeline(tmp_path / "out", pipeline_class=HunyuanVideoGRPOPipeline, scheduler=scheduler)
    for component in ("image_encoder", "transformer", "vae"):
        expected = getattr(stock, component).state_dict()
        assert_same(getattr(ours, component).state_dict(), expected)
    assert_same(stock.transformer.state_dict(), original_transformer("480p_i2v").state_dict())
    assert ours.task == "i2v"


def test_an_export_leaves_whatever_lies_beside_it_and_has_the_rights_of_a_new_folder(original_root, tmp_path: Path):
    for name in ("mine.partial", ".mine.partial", "mine.tmp"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "notes").touch()
    export(original_root, tmp_path / "mine", "original")
    assert len(list(tmp_path.glob("*/notes"))) == 3 and len(list(tmp_path.iterdir())) == 4
    assert (tmp_path / "mine").stat().st_mode == (tmp_path / "mine.tmp").stat().st_mode


def test_what_cannot_be_exported_leaves_nothing(checkpoint_of, original_root: Path, tmp_path: Path, capsys):
    where = ["--model_path", original_root, "--transformer_version", VERSION, "--checkpoint_path", checkpoint_of()]
    (tmp_path / "there").mkdir()
    (tmp_path / "lost").symlink_to("nowhere")
    for form, name, told in (
        ("lora", "out", "no LoRA adapter to write"),
        ("original", "there", f"'{tmp_path / 'there'}' exists already"),
        ("original", "lost", f"'{tmp_path / 'lost'}' exists already"),
    ):
        assert main([*map(str, where), "--format", form, "--output_path", str(tmp_path / name)]) == 2
        assert told in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["lost", "there"]


def test_half_precision_that_would_not_hold_all_weights_is_refused(checkpoint_of, original_root, tmp_path, capsys):
    export(original_root, tmp_path / "out", "musubi", "--checkpoint_path", checkpoint_of(use_lora=True))
    (path,) = (tmp_path / "out").glob("*.safetensors")
    tensors = load_file(path)
    alphas = [name for name in tensors if name.endswith(".alpha")]
    save_file(tensors | {name: torch.tensor(1e9 * (2 + i)) for i, name in enumerate(alphas)}, path)
    argv = f"--model_path {original_root} --transformer_version {VERSION} --lora_path {path} --format comfyui --dtype "
    assert main([*argv.split(), "fp16", "--output_path", str(tmp_path / "half")]) == 2
    assert "--dtype fp16: some weights are too large for it" in capsys.readouterr().err
    assert not (tmp_path / "half").exists()
