"""A weights folder that cannot be loaded is refused with everything that is missing and how to get it."""

import shutil

import pytest

from hyvideo.models.model_folder import (
    DIFFUSERS_COMPONENTS,
    HOW_TO_GET,
    check_diffusers_layout,
    check_layout,
    download_command,
    is_diffusers_layout,
    original_files,
    task_of,
    transformer_folder,
)
from hyvideo.models.reward_models.clip import ClipScore
from hyvideo.models.reward_models.registry import RewardContext
from hyvideo.models.reward_models.videoalign import VideoAlignReward
from hyvideo.models.reward_models.vlm_checks import VlmChecks
from tests.support.original_layout import VERSIONS


def test_all_missing_components_are_named_at_once_with_the_way_to_get_them(tiny_root, tmp_path):
    copied_root = shutil.copytree(tiny_root, tmp_path / "copy")
    shutil.rmtree(copied_root / "vae")
    for file in (copied_root / "tokenizer_2").iterdir():  # an empty folder is missing, too
        file.unlink()
    with pytest.raises(ValueError, match=rf"'{copied_root}' lacks vae, tokenizer_2;") as error:
        check_layout(copied_root, "480p_t2v")
    assert HOW_TO_GET in str(error.value)
    with pytest.raises(ValueError, match=f"lacks {', '.join(DIFFUSERS_COMPONENTS)};"):
        check_diffusers_layout(tmp_path)


@pytest.mark.parametrize("root", ["absent", "."])
def test_a_folder_without_any_model_lists_the_commands_that_fetch_the_published_layout(tmp_path, root):
    with pytest.raises(ValueError, match="missing for version 720p_i2v") as error:
        check_layout(tmp_path / root, "720p_i2v")
    message = str(error.value)
    assert (root == "absent") == (
        f"there is no folder '{tmp_path / root}' on this machine, and names on the" in message
    )
    for folder in original_files("720p_i2v"):
        assert download_command(tmp_path / root, folder) in message
    assert "siglip" in message
    assert message.endswith("python post_train.py --config configs/tiny.yaml configs/demo.yaml"), (
        "whose samples begin with the base"
    )


def test_a_name_of_the_hub_is_no_folder_and_of_its_cache_the_snapshot_is_named(tmp_path):
    with pytest.raises(ValueError, match="there is no folder 'org/name' on this machine, .*download_weights.sh"):
        transformer_folder("org/name", None)
    root = tmp_path / "models--org--name"
    snapshot = root / "snapshots" / "5ab1"
    snapshot.mkdir(parents=True)
    context = RewardContext(prompt_csvs=["a.csv"])
    for read in (
        lambda: check_layout(root, None),
        lambda: transformer_folder(root, None),
        lambda: task_of(root, None),
        lambda: ClipScore.check(context, str(root)),
        lambda: VlmChecks.check(context, checkpoint=str(root)),
        lambda: VideoAlignReward.check(context, str(root)),
    ):
        with pytest.raises(
            ValueError, match=f"is a folder of the Hub's cache. Name the one with the files: '{snapshot}'"
        ):
            read()


def test_only_what_is_missing_of_the_published_layout_is_listed(tmp_path):
    for folder, patterns in original_files("480p_t2v").items():
        for pattern in patterns:
            path = tmp_path / folder / pattern.replace("*", "model")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch()
    (tmp_path / "vae" / "config.json").unlink()
    with pytest.raises(ValueError, match=rf"missing[^\n]*\n  {tmp_path / 'vae'}: config.json\n") as error:
        check_layout(tmp_path, "480p_t2v")
    assert "text_encoder" not in str(error.value) and "siglip" not in str(error.value)


def test_both_layouts_are_accepted_and_tell_what_a_transformer_is_made_for(tiny_root, original_root):
    assert is_diffusers_layout(tiny_root) and not is_diffusers_layout(original_root)
    assert check_layout(tiny_root, "480p_t2v") == tiny_root
    assert task_of(tiny_root, None) == "t2v"
    for version, changes in VERSIONS.items():
        assert check_layout(original_root, version) == original_root
        assert task_of(original_root, version) == changes["task_type"]


def test_a_version_that_is_not_there_is_refused_with_those_that_are(original_root):
    with pytest.raises(ValueError, match=f"received '720p_t2v', .* holds {', '.join(sorted(VERSIONS))}") as error:
        check_layout(original_root, "720p_t2v")
    assert "--include 'transformer/720p_t2v/*'" in str(error.value)


def test_without_a_version_the_only_one_is_chosen_and_several_are_listed(original_root, tmp_path):
    with pytest.raises(ValueError, match=f"none was named, .* holds {', '.join(sorted(VERSIONS))}"):
        transformer_folder(original_root, None)
    shutil.copytree(original_root / "transformer" / "480p_i2v", tmp_path / "transformer" / "mine")
    assert transformer_folder(tmp_path, None) == tmp_path / "transformer" / "mine"
