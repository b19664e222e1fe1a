"""Which files a weights folder must hold, what is missing from one, and which transformer versions it has.

The original layout is that of the authors' downloads, below one root with several transformers; the diffusers layout
holds one model, and the bundled tiny base is in it.
"""

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic_core import from_json

from hyvideo.config.outside import as_value_error, check_files, read_file

DIFFUSERS_COMPONENTS = ("transformer", "vae", "text_encoder", "tokenizer", "text_encoder_2", "tokenizer_2")
"""Folders of the diffusers layout, to which an image-to-video model adds two."""

HOW_TO_GET = (
    "Everything at once, with the reward VideoReward: ./download_weights.sh --all VERSION (61 GB; "
    "checkpoints-download.md says more). Without any download, the bundled tiny model trains on this machine: "
    "python post_train.py --config configs/tiny.yaml configs/demo.yaml"
)

_LIMITS = {
    "layers|depth|^extra_ids$": 1000,
    "^(height|width|crop_size|pad_size)$": 2**12,
    "pixels|_edge$": 2**27,
    "theta": 2**33,
    "^model_max_length$": 2**128,  # published so, for no limit
    "": 2**20 + 1,
}
"""Bounds on the numbers in a JSON, by their names: networks and images are made before anything shows them absurd."""

_NAMES_FILES = re.compile(
    r".*(?<!name_or)_(files?|path)|.*_implementation|vocab|merges|tokenizer_object|init_inputs|transformers_weights"
)
"""Settings by which a library reads further files."""

_MOST_GROWTH = 1000
"""How many times as long a tokenizer may make a text: published ones replace a space by one letter."""

_WITHOUT_EFFECT = ("tokenizer_file", "special_tokens_map_file")
"""Of these, what published tokenizers say in tokenizer_config.json, where the library does not obey it."""

_NO_FOLDER = (
    "there is no folder '{}' on this machine, and names on the Hub are not looked up: download_weights.sh fetches "
    "weights (checkpoints-download.md)"
)
_SUGGESTED_VERSION = "480p_t2v"  # by messages, when the user named none
_REPOSITORY = "hf download tencent/HunyuanVideo-1.5 --local-dir {root} --include '{folder}/*'"
_COMMANDS = {
    "text_encoder/llm": "hf download Qwen/Qwen2.5-VL-7B-Instruct --local-dir {root}/{folder}",
    "text_encoder/byt5-small": "hf download google/byt5-small --local-dir {root}/{folder}",
    "text_encoder/Glyph-SDXL-v2": "modelscope download --model AI-ModelScope/Glyph-SDXL-v2 --local_dir {root}/{folder}",
    "VideoReward": "./download_weights.sh {root}",
    "vision_encoder/siglip": "hf download black-forest-labs/FLUX.1-Redux-dev --local-dir {root}/{folder}",
}


def original_files(version: str) -> dict[str, tuple[str, ...]]:
    """Return folder -> file patterns of HunyuanVideo-1.5 as its authors publish it, for one transformer version."""
    files = {
        "scheduler": ("scheduler_config.json",),
        f"transformer/{version}": ("config.json", "*.safetensors"),
        "vae": ("config.json", "*.safetensors"),
        "text_encoder/llm": ("config.json", "tokenizer_config.json", "tokenizer.json", "*.safetensors"),
        "text_encoder/byt5-small": ("config.json", "tokenizer_config.json"),
        "text_encoder/Glyph-SDXL-v2": (
            *("assets/color_idx.json", "assets/multilingual_10-lang_idx.json"),
            "checkpoints/byt5_model.pt",
        ),
    }
    if "i2v" in version:
        encoder = ("image_encoder/config.json", "image_encoder/*.safetensors")
        files["vision_encoder/siglip"] = (*encoder, "feature_extractor/preprocessor_config.json")
    return files


def download_command(root: str | Path, folder: str) -> str:
    """Return the command that fetches `folder` of the original layout into `root`."""
    return _COMMANDS.get(folder, _REPOSITORY).format(root=root, folder=folder)


def is_diffusers_layout(root: Path) -> bool:
    """Whether `root` follows the diffusers layout: one transformer, or an index of components."""
    return (root / "model_index.json").is_file() or (root / "transformer" / "config.json").is_file()


def check_diffusers_layout(root: str | Path, components: Iterable[str] = DIFFUSERS_COMPONENTS) -> Path:
    """Return `root` if it holds `components` in the diffusers layout; a ValueError names all that are missing."""
    root = Path(root)
    if missing := [name for name in components if not any((root / name).glob("*.json"))]:
        raise ValueError(
            f"pretrained_model_root: '{root}' lacks {', '.join(missing)}; expected a folder with config files for each "
            f"of {', '.join(components)}. {HOW_TO_GET}"
        )
    for name in components:
        check_component(root / name)
    return root


def check_layout(root: str | Path, version: str | None, *, with_reward: bool = False) -> Path:
    """Return `root` as a path after checking that it holds a whole model; `version` as in `transformer_folder`.

    With `with_reward` the original layout must also hold VideoReward, so that one message names all that is missing. A
    ValueError names each missing file with the command that fetches it, or says that the version is not there.
    """
    root = Path(root)
    if root.exists():
        local_folder(root, "pretrained_model_root")
    if sharpens(version):
        raise ValueError(
            f"pretrained_transformer_version: '{version}' only sharpens the videos of another version: name "
            "that one, with generate.py --sr true."
        )
    if is_diffusers_layout(root):
        check_diffusers_layout(root)
        for name in ("guider", "scheduler"):  # these may be missing
            check_component(root / name)
        if task_of(root, version) == "i2v":
            check_diffusers_layout(root, (*DIFFUSERS_COMPONENTS, "image_encoder", "feature_extractor"))
        return root
    version = chosen_version(root, version) if versions_in(root) else version or _SUGGESTED_VERSION
    reward = {"VideoReward": ("model_config.json", "checkpoint-*")} if with_reward else {}
    listed = "\n".join(
        f"  {root / folder}: {', '.join(absent)}\n    {download_command(root, folder)}"
        for folder, patterns in (original_files(version) | reward).items()
        if (absent := [pattern for pattern in patterns if not any((root / folder).glob(pattern))])
    )
    if listed:
        absent = "" if root.exists() else f"{_NO_FOLDER.format(root)}; "
        said = f"pretrained_model_root: {absent}weights are missing for version {version}"
        raise ValueError(f"{said}:\n{listed}\n{HOW_TO_GET}")
    for folder in original_files(version):
        check_component(root / folder)
    return root


def versions_in(root: Path) -> list[str]:
    """Return the transformer versions that the original layout at `root` holds, those that only sharpen left out."""
    found = [path.parent.name for path in (root / "transformer").glob("*/config.json")]
    return sorted(name for name in found if not sharpens(name))


def sharpens(version: str | None) -> bool:
    """Whether a version is the second transformer of super-resolution, which makes no videos by itself."""
    return version is not None and "_sr_" in version


def chosen_version(root: Path, version: str | None) -> str:
    """Return `version`, or for None the only one of the original layout at `root`; a ValueError lists those there."""
    found = versions_in(root)
    if version is None and len(found) == 1:
        return found[0]
    if version not in found and not (sharpens(version) and (root / "transformer" / version / "config.json").is_file()):
        received = "none was named" if version is None else f"received '{version}'"
        command = download_command(root, f"transformer/{version or _SUGGESTED_VERSION}")
        raise ValueError(
            f"pretrained_transformer_version: {received}, '{root / 'transformer'}' holds {', '.join(found) or 'none'}. "
            f"Name one of these, or fetch another: {command}"
        )
    return version


def transformer_folder(root: str | Path, version: str | None) -> Path:
    """Return the folder of the transformer's config and weights; a ValueError if there is none.

    `version` is that of the original layout (None: the only one there); the diffusers layout holds one, and ignores it.
    """
    root = local_folder(root, "pretrained_model_root")
    if is_diffusers_layout(root):
        return check_diffusers_layout(root, ("transformer",)) / "transformer"
    folder = root / "transformer" / chosen_version(root, version)
    check_component(folder)
    return folder


def check_component(folder: Path) -> None:
    """Refuse a folder in which a library would wait for a pipe, follow a file to other places or fill the memory.

    Called before any library reads the folder. Links are followed, because downloaders make them.
    """
    check_files(folder)
    for path in sorted(folder.rglob("*.json")):
        if path.name == "adapter_config.json":
            raise ValueError(
                f"'{path}' would make the library read other weights, at a place that it names. Move it away: adapters "
                "are given by --pretrained_lora_path or --lora_path."
            )
        if ".index." in path.name:
            read_index(path)
        elif "config" in path.name or path.name == "special_tokens_map.json":
            check_values(read_json(path), path)
        elif path.name == "added_tokens.json":
            check_values(list(read_json(path).values()), path, "a token's number")
        elif path.name == "tokenizer.json":
            if (growth := _growth(read_json(path).get("normalizer"))) > _MOST_GROWTH:
                raise ValueError(f"'{path}': its normalizer makes a text up to {growth:.0e} times as long. Remove it.")
        elif path.name == "vocab.json":
            read_json(path)  # the library does not say which file is damaged


def check_values(config: Mapping[str, Any] | Sequence[Any], path: Path, key: str = "") -> None:
    """Raise a ValueError if a value in the JSON file `path` is larger than that of any model, or names another place.

    `config` is the file's content, or what it has under `key`.
    """
    for name, value in config.items() if isinstance(config, Mapping) else ((key, each) for each in config):
        if isinstance(value, Mapping | list | tuple):
            check_values(value, path, name)
        limit = _limit_of(name)
        for number in (value, float(name) if name.isdecimal() else 0):
            if isinstance(number, int | float) and not abs(number) < limit:
                raise ValueError(f"'{path}': {name:.80} is {value!r:.80}, expected less than {limit}.")
        if name in _WITHOUT_EFFECT and path.name == "tokenizer_config.json":
            continue
        if isinstance(value, str) and any(map(_NAMES_FILES.fullmatch, (key, name))) and not _is_beside(value):
            raise ValueError(
                f"'{path}': {name} would make the library read {value!r:.80}. A file of weights may name only files "
                "beside it. Remove this setting."
            )


@lru_cache(1024)
def _limit_of(name: str) -> float:
    return next(limit for pattern, limit in _LIMITS.items() if re.search(pattern, name))


def _growth(normalizer: Any) -> float:
    """Return how many times as long the replacements of a tokenizer's normalizer can make a text, one after another."""
    if isinstance(normalizer, list):
        return math.prod(map(_growth, normalizer))
    if not isinstance(normalizer, dict):
        return 1.0
    return max(1.0, float(len(str(normalizer.get("content", ""))))) * _growth(normalizer.get("normalizers"))


def read_index(path: Path) -> dict[str, str]:
    """Return tensor -> file name as an index of weights says; a ValueError if it names what does not lie beside it."""
    kinds = (OSError, ValueError, KeyError, TypeError)
    with as_value_error(f"'{path}' is not a readable index with a weight_map", *kinds, advice="Download it again."):
        weight_map = dict(from_json(read_file(path))["weight_map"])
        for file in weight_map.values():
            safe = ".safetensors." in path.name
            if not (_is_beside(file) and (file.endswith(".safetensors") or not safe)):
                raise ValueError(f"expected the name of a *.safetensors file beside it, received {file!r:.80}")
        return weight_map


def _is_beside(name: object) -> bool:
    return isinstance(name, str) and Path(name).name == name.removeprefix("./") and name not in ("", ".", "./", "..")


def local_folder(path: str | Path, setting: str) -> Path:
    """Return the folder `path` of a setting; a ValueError if there is none, or it only holds the Hub's snapshots."""
    path = Path(path)
    if path.name.startswith("models--") and (snapshots := sorted((path / "snapshots").glob("*"))):
        files = " or ".join(f"'{snapshot}'" for snapshot in snapshots)
        raise ValueError(f"{setting}: '{path}' is a folder of the Hub's cache. Name the one with the files: {files}")
    if not path.is_dir():
        raise ValueError(f"{setting}: {_NO_FOLDER.format(path)}.")
    return path


@contextmanager
def readable(path: Path, what: str) -> Iterator[None]:
    """Turn whatever a library raises for the file or folder `path` into a ValueError that names it.

    There is no list of what that may be: it reads damaged files until something does not fit.
    """
    try:
        yield
    except Exception as error:
        named = isinstance(error, ValueError) and str(path) in str(error)
        if named or type(error).__name__ == "OutOfMemoryError":  # PyTorch's, for which nothing here need wait
            raise
        reason = f"{error!s:.1000} ({type(error).__name__})"
        raise ValueError(
            f"Cannot load {what} from '{path}': {reason}. Download it again, or report this if the files are whole."
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """Return the content of a configuration file; a ValueError if it is no object, or no file (a pipe would block)."""
    advice = "Download it again (checkpoints-download.md)."
    with as_value_error(f"Cannot read '{path}'", OSError, ValueError, advice=advice):
        content = from_json(read_file(path))
    if not isinstance(content, dict):
        raise ValueError(f"'{path}': expected a JSON object; received {content!r:.80}.")
    return content


def task_of(root: str | Path, version: str | None) -> str:
    """Return what the transformer of `root` is made for: `t2v` or `i2v`."""
    config = read_json(transformer_folder(root, version) / "config.json")
    return config.get("ideal_task") or config.get("task_type") or "t2v"
