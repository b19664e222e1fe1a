"""Weights and adapters from anyone: they load, or a ValueError names the file; no code of theirs is run."""

import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoTokenizer, T5EncoderModel

from hyvideo.checkpoint.train_state import begin_save
from hyvideo.checkpoint.trained_policy import load_trained_policy
from hyvideo.models.adapter import ADAPTER_FILE, load_lora, lora_config, save_lora
from hyvideo.models.encoders import _from_folder
from hyvideo.models.loading import load_pipeline
from hyvideo.models.model_folder import check_component
from hyvideo.models.parallelize import prepare_policy, trainable_parameters
from hyvideo.models.reward_models.clip import ClipScore
from hyvideo.models.reward_models.registry import RewardContext
from hyvideo.models.reward_models.videoalign.network import _load
from hyvideo.models.reward_models.videoalign.scorer import _load_tokenizer
from hyvideo.models.weight_files import SafetensorsFolder, read_pickled
from tests.support.tiny_model import ADAPTER, build_transformer

CODE = """
import sys
from hyvideo.models.encoders import _from_folder
from hyvideo.models.reward_models.videoalign.network import _base_config
from hyvideo.models.reward_models.videoalign.scorer import _load_tokenizer
from pathlib import Path
from transformers import AutoConfig, AutoTokenizer
folder = Path(sys.argv[1])
for load in (
    lambda: _from_folder(AutoTokenizer, folder),
    lambda: _from_folder(AutoConfig, folder),
    lambda: _base_config(str(folder)),
    lambda: _load_tokenizer(folder),
):
    try:
        load()
    except ValueError as error:
        assert str(folder) in str(error), error
    else:
        raise AssertionError("loaded")
assert not Path("ran").exists()
print("nothing was run or asked")
AutoTokenizer.from_pretrained(folder)
"""


def test_no_code_of_a_folder_is_run_and_nobody_is_asked(tmp_path):
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "own.py").write_text("open('ran', 'w')\nclass Own: ...\n")
    names = {"AutoConfig": "own.Own", "AutoTokenizer": ["own.Own", None], "AutoModel": "own.Own"}
    (folder / "config.json").write_text(json.dumps({"model_type": "own", "auto_map": names}))
    (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "Own", "auto_map": names}))
    environment = os.environ | {"PYTHONPATH": os.getcwd(), "HF_HOME": str(tmp_path / "home")}
    command = [sys.executable, "-c", CODE, folder]
    done = subprocess.run(command, input="y\n", capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert done.stdout.startswith("nothing was run or asked\n"), done.stdout + done.stderr
    assert "run the custom code" in done.stdout  # by the last line of CODE, so the attack is a real one
    assert (tmp_path / "ran").exists(), done.stderr


def test_weights_are_not_taken_from_where_a_file_beside_them_says(tiny_root, tmp_path):
    root, other = (shutil.copytree(tiny_root, tmp_path / name) for name in ("root", "other"))
    folder, weights = root / "text_encoder_2", other / "text_encoder_2" / "model.safetensors"
    weights.write_bytes(save({name: 0 * value + 7 for name, value in load_file(weights).items()}, {"format": "pt"}))
    place = {"peft_type": "LORA", "r": 1, "target_modules": ["q"], "base_model_name_or_path": str(other)}
    (folder / "adapter_config.json").write_text(json.dumps(place))
    (folder / "adapter_model.safetensors").write_bytes(save({}))
    misled = T5EncoderModel.from_pretrained(root, subfolder="text_encoder_2")
    assert misled.shared.weight.unique().tolist() == [7]  # the attack is a real one
    for read in (lambda: load_pipeline(root, scheduler=None), lambda: ClipScore.check(RewardContext(), str(folder))):
        with pytest.raises(ValueError, match="adapter_config.json' would make the library read other weights"):
            read()


@pytest.fixture
def named(tiny_root: Path, tmp_path: Path) -> tuple[Path, Path]:
    """The tokenizer of the tiny model, and a folder beside it with another that has the token EVIL."""
    folder, other = (shutil.copytree(tiny_root / "tokenizer", tmp_path / name) for name in ("folder", "other"))
    content = json.loads((other / "tokenizer.json").read_text())
    content["model"]["vocab"]["EVIL"] = 5000
    (other / "tokenizer.4.0.json").write_text(json.dumps(content))
    return folder, other


def put(path: Path, content: dict) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **content}))


@pytest.mark.parametrize(
    ("file", "name", "several"),
    [("special_tokens_map.json", "tokenizer_file", False), ("tokenizer_config.json", "fast_tokenizer_files", True)],
)
def test_a_tokenizer_is_not_taken_from_where_its_own_files_say(named, file, name, several):
    folder, other = named
    place = str(other / "tokenizer.4.0.json")
    put(folder / file, {name: [f"../{other.name}/tokenizer.4.0.json"] if several else place})
    misled = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    assert "EVIL" in misled.get_vocab()  # the attack is a real one
    for read in (lambda: _from_folder(AutoTokenizer, folder), lambda: _load_tokenizer(folder)):
        with pytest.raises(ValueError, match=f"{file}': {name} would make the library read"):
            read()


GROWS = {"type": "Replace", "content": "a" * 10}
CONFIG, MAP, INDEX = "tokenizer_config.json", "special_tokens_map.json", "model.safetensors.index.json"


@pytest.mark.parametrize(
    ("file", "content", "said"),
    [
        *((file, {name: "/x"}, "would make") for file in (CONFIG, MAP) for name in ("vocab", "merges", "gguf_file")),
        (MAP, {"vocab_file": "../x"}, "would make"),
        (CONFIG, {"merges_file": "../x"}, "would make"),
        (CONFIG, {"init_inputs": ["../vocab.json", "../merges.txt"]}, "would make"),
        (CONFIG, {"sp_model_kwargs": {"model_file": "a/b.model"}}, "would make"),
        ("config.json", {"transformers_weights": "../x.safetensors"}, "would make"),
        ("inner/config.json", {"configuration_files": ["config./../x.json"]}, "would make"),
        ("config.4.0.json", {"hidden_size": 10**9}, "hidden_size is 1000000000"),
        ("config.json", {"attn_implementation": {"": "someone/kernel"}}, "would make"),
        *((INDEX, {"weight_map": {"a": name}}, "no|not a readable index") for name in ("../a.safetensors", "a.bin", 3)),
        (INDEX, {"weight_map": {"a": "/dev/stdin"}}, "not a readable index"),
        (INDEX, {"weight_map": ["a"]}, "not a readable index"),
        ("inner/pytorch_model.bin.index.json", {"weight_map": {"a": "../a.bin"}}, "not a readable index"),
        (CONFIG, {"extra_ids": 10**8}, "extra_ids is 100000000, expected less than 1000"),
        (CONFIG, {"added_tokens_decoder": {"9" * 5000: {"content": "a"}}}, "expected less than"),
        ("added_tokens.json", {"vocab": 10**9}, "a token's number is 1000000000"),
        ("preprocessor_config.json", {"pad_size": {"height": 10**6, "width": 10**6}}, "height is 1000000"),
        ("processor_config.json", {"image_processor": {"crop_size": [10**6, 1]}}, "crop_size is 1000000"),
        ("generation_config.json", {"temperature": float("inf")}, "temperature is inf"),
        ("vocab.json", ["a"], "expected a JSON object"),
        ("model.safetensors.index.fp16.json", {"weight_map": {"a": "/x/a.safetensors"}}, "not a readable index"),
        ("pytorch_model.bin.index.json", {"weight_map": {"a": ".."}}, "not a readable index"),
        ("tokenizer.json", {"normalizer": {"normalizers": [GROWS] * 6}}, "makes a text up to 1e\\+06 times as long"),
    ],
)
def test_no_file_of_a_component_names_another_place_or_a_size_that_fills_the_memory(tmp_path, file, content, said):
    (tmp_path / "inner").mkdir()
    (tmp_path / file).write_text(json.dumps(content))
    with pytest.raises(ValueError, match=said) as refused:
        check_component(tmp_path)
    assert str(tmp_path / file) in str(refused.value) and len(str(refused.value)) < 500


def test_a_setting_of_another_type_is_a_sentence(named):
    folder, _ = named
    put(folder / CONFIG, {"tokenizer_class": "ByT5Tokenizer", "extra_ids": "100000000"})
    with pytest.raises(ValueError, match=f"Cannot load .*'{folder}'"):
        _from_folder(AutoTokenizer, folder)


def test_what_published_models_say_is_accepted(named):
    folder, _ = named
    place = "/root/.cache/hub/models--a--b/snapshots/1"
    names = {"name_or_path": "openai/clip", "special_tokens_map_file": f"{place}/special_tokens_map.json"}
    names |= {"tokenizer_file": f"{place}/tokenizer.json", "vocab_file": None, "merges_file": "merges.txt"}
    put(folder / CONFIG, {**names, "init_inputs": [], "model_max_length": 10**30, "sp_model_kwargs": {}})
    of_text = {"rope_theta": 5000000, "max_position_embeddings": 262144, "vocab_size": 151936, "bos_token_id": 151643}
    put(folder / "config.json", {"model_type": "qwen2", "_name_or_path": "a/b", "text_config": of_text})
    put(folder / "preprocessor_config.json", {"max_pixels": 12845056, "size": {"longest_edge": 100352000}})
    put(folder / "generation_config.json", {"max_position_embeddings": 2**20})
    put(folder / "added_tokens.json", {"<layers>": 151700, "vocab": 151701})
    put(folder / "vocab.json", {"vocab": 1, "merges_file": 2, "a/b_path": 3})
    put(folder / INDEX, {"metadata": {"total_size": 16 * 10**9}, "weight_map": {"a": "model.safetensors"}})
    put(folder / "pytorch_model.bin.index.json", {"weight_map": {"a": "pytorch_model-1.bin"}})
    put(folder / "trainer_state.json", {"total_flos": 1e19, "best_model_checkpoint": "/x/y"})
    check_component(folder)
    assert "EVIL" not in _from_folder(AutoTokenizer, folder).get_vocab()


@pytest.mark.parametrize("component", ["transformer", "vae", "text_encoder", "text_encoder_2"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.int8, torch.int64])
def test_quantized_weights_are_refused_with_the_tensors_name(tiny_root, tmp_path, component, dtype):
    root = shutil.copytree(tiny_root, tmp_path / "root")
    (path,) = (root / component).glob("*.safetensors")
    weights = load_file(path)
    other = next((name for name in sorted(weights) if not name.endswith(("weight", "bias"))), None)
    name = other or next(name for name in sorted(weights) if name.endswith("weight"))
    path.write_bytes(save(weights | {name: weights[name].to(dtype)}, {"format": "pt"}))
    with pytest.raises(ValueError, match=rf"{component}.*: {re.escape(name)} is of .*Use the bf16, fp16 or fp32"):
        load_pipeline(root, scheduler=None)
    torch.save({name: weights[name].to(dtype)}, tmp_path / "model.pth")
    for read in (lambda: _load(tmp_path / "model.pth"), lambda: _load(path)):
        with pytest.raises(ValueError, match=f"{re.escape(name)} is of"):
            read()


@pytest.fixture
def adapter(tmp_path: Path) -> tuple[dict[str, Tensor], dict]:
    """Tensors and settings of an adapter of the tiny transformer, which lies in `tmp_path`."""
    policy = prepare_policy(build_transformer(), gradient_checkpointing=False, lora=ADAPTER)
    save_lora(policy, tmp_path)
    with safe_open(tmp_path / ADAPTER_FILE, "pt") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
        return tensors, json.loads(file.metadata()["lora_adapter_metadata"])


def of(tensors: dict[str, Tensor], note: dict) -> bytes:
    return save(tensors, {"lora_adapter_metadata": json.dumps(note)})


class Allocations(TorchDispatchMode):
    """Notes the bytes of the largest tensor that is made in host memory."""

    largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, Tensor) and made.device.type == "cpu":
            self.largest = max(self.largest, made.nbytes)
        return made


FIRST = "transformer_blocks.0.attn.to_q.lora_A.weight"


@pytest.mark.parametrize(
    ("changed", "settings", "said"),
    [
        ({FIRST: torch.zeros(2)}, {}, "size mismatch"),
        ({FIRST: torch.zeros(0, 32)}, {}, "size mismatch"),
        ({FIRST: torch.full((2, 32), torch.nan)}, {}, "has values that are not finite"),
        ({FIRST: torch.ones(2, 32).bfloat16() * torch.inf}, {}, "has values that are not finite"),
        ({FIRST: torch.zeros(2, 32, dtype=torch.int64)}, {}, f"{FIRST} is of torch.int64"),
        ({FIRST: torch.zeros(2, 32, dtype=torch.complex64)}, {}, f"{FIRST} is of torch.complex64"),
        ({"../../x.lora_A.weight": torch.zeros(2, 2)}, {}, "no place for ../../x.lora_A.weight"),
        ({"__class__.lora_A.weight": torch.zeros(2, 2)}, {}, "no place for __class__.lora_A.weight"),
        ({}, {"r": 10**9}, "less than or equal to 8192"),
        ({}, {"r": 0}, "greater than or equal to 1"),
        ({}, {"lora_alpha": 10**400}, "too large"),
        ({}, {"modules_to_save": ["proj_out"]}, "it sets modules_to_save"),
        ({}, {"megatron_config": {}, "megatron_core": "os"}, "it sets megatron_config, megatron_core, which this proj"),
        ({}, {"target_modules": "(a+)+$"}, "repeats too much"),
        ({}, {"alpha_pattern": {"(a+)+$": 1}}, "repeats too much"),
    ],
)
def test_a_harmful_adapter_is_refused_by_name(adapter, tmp_path, changed, settings, said):
    tensors, note = adapter
    (tmp_path / ADAPTER_FILE).write_bytes(of(tensors | changed, note | settings))
    with pytest.raises(ValueError) as refused:
        load_lora(build_transformer(), tmp_path)
    message = str(refused.value)
    assert str(tmp_path / ADAPTER_FILE) in message and said in message and len(message) < 2000


FACTS = [{"rank": 8192}, {"alpha": 10**400}, {"target_modules": [".*"]}, {"target_modules": ["proj_out"]}]


@pytest.mark.parametrize("settings", [{"r": 8192}, {"rank_pattern": {".*": 8192}}, *FACTS])
def test_a_rank_or_facts_beyond_the_tensors_take_no_memory(adapter, tmp_path, settings):
    (tensors, note), network = adapter, build_transformer()
    if settings in FACTS:
        policy = prepare_policy(build_transformer(), gradient_checkpointing=False, lora=ADAPTER)
        trained = {name: p.detach() for name, p in trainable_parameters(policy).items()}
        lora = {"rank": 2, "alpha": 4, "target_modules": sorted(ADAPTER.target_modules)}
        facts = {"lora": lora | settings, "trained": list(trained)}
        checkpoint = begin_save(tmp_path, 1, {"policy": trained}, facts).finish()
        read, said = load_trained_policy, f"'{checkpoint}' has an adapter that does not fit this model"
    else:
        checkpoint, read, said = tmp_path, load_lora, "size mismatch"
        (tmp_path / ADAPTER_FILE).write_bytes(of(tensors, note | settings))
    with pytest.raises(ValueError, match=said), Allocations() as made:
        read(network, checkpoint)
    assert made.largest < 2**19
    with Allocations() as made:  # as PyTorch's networks do
        build_transformer().add_adapter(lora_config(8192, 1, ["to_q"]))
    assert made.largest >= 2**19  # so it is seen


def header(content: object, body: bytes = b"") -> bytes:
    text = content if isinstance(content, bytes) else json.dumps(content).encode()
    return struct.pack("<Q", len(text)) + text + body


def entry(start: int, stop: int, shape: tuple[int, ...] = (2,), dtype: str = "F32") -> dict:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        struct.pack("<Q", 2**62) + b"{}",
        header(b"no JSON"),
        header(b"[" * 100_000),
        header({"a": entry(0, 8), "b": entry(4, 12)}, bytes(12)),
        header({"a": entry(0, 8)}, bytes(4)),
        header({"a": entry(0, 8, (-2,))}, bytes(8)),
        header({"a": entry(0, 0, (2**62, 4))}),
        header({"a": entry(0, 1, (2,), "F4")}, bytes(1)),
        header({"a": entry(0, 8, (2,), "X9")}, bytes(8)),
        header({"__metadata__": {"a": 3}, "a": entry(0, 8)}, bytes(8)),
    ],
)
def test_damaged_safetensors_are_named(tmp_path, content):
    path = tmp_path / ADAPTER_FILE
    path.write_bytes(content)

    def read_all() -> None:
        source = SafetensorsFolder(tmp_path)
        for name in source.shapes:
            source.read(name, None)

    whole = [] if b'"F4"' in content else [lambda: _load(path)]  # a dtype of two values in a byte is a tensor there
    for read in (read_all, lambda: load_lora(build_transformer(), tmp_path), *whole):
        with pytest.raises(ValueError, match=str(path)):
            read()


@pytest.mark.parametrize("kind", ["pipe", "device", "folder"])
def test_what_is_no_file_is_not_read(tmp_path, kind):
    path = tmp_path / ADAPTER_FILE
    if kind == "folder":
        path.mkdir()
    else:
        os.mkfifo(path) if kind == "pipe" else path.symlink_to("/dev/zero")
    of_folder = (SafetensorsFolder, lambda folder: load_lora(build_transformer(), folder))
    for read in (*(partial(one, tmp_path) for one in of_folder), partial(_load, path), partial(read_pickled, path)):
        with pytest.raises(ValueError, match=str(path)):
            read()


class _Runs:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __reduce__(self) -> tuple:
        return os.mkdir, (str(self._folder),)


def test_pickled_weights_are_tensors_or_named(tmp_path):
    path, weight = tmp_path / "byt5_model.pt", torch.ones(3)
    torch.save({"state_dict": {"w": weight, "step": 3}, "epoch": 4}, path)
    assert {name: value.tolist() for name, value in read_pickled(path).items()} == {"w": weight.tolist()}
    whole = path.read_bytes()
    for content in ([weight], weight, _Runs(tmp_path / "ran"), {"state_dict": [1]}):
        torch.save(content, path)
        with pytest.raises(ValueError, match=str(path)):
            read_pickled(path)
    for content in (b"", b"123", whole[:100], whole[:-30], pickle.dumps(_Runs(tmp_path / "ran"))):
        path.write_bytes(content)
        for read in (read_pickled, _load):
            with pytest.raises(ValueError, match=str(path)):
                read(path)
    assert not (tmp_path / "ran").exists()
