"""Tiny random vision-language models of the real classes, and a chat server that answers by one of them."""

import base64
import io
from pathlib import Path

import numpy as np
import torch
import transformers
from fastapi import FastAPI, HTTPException, Request
from PIL import Image
from torch import Tensor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from hyvideo.models.reward_models.vlm_checks import LocalJudge
from scripts.tiny.components import build_tokenizer
from tests.support.tiny_model import text_config
from tests.support.videoreward import VISION_TOKENS, draw_weights, vision_token_ids

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_vision_language_model(folder: Path, family: str) -> Path:
    """Write a `qwen2_5_vl` or `qwen3_vl` whose likeliest first tokens are Yes and No, by how much the frames decide."""
    tokenizer = build_tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": [*VISION_TOKENS]})
    tokenizer.add_tokens(["Yes", "No", "yes"])
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    tokens = {**vision_token_ids(tokenizer), "tie_word_embeddings": False}
    text = text_config(len(tokenizer))
    tower = {"depth": 2, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    torch.manual_seed(0)
    if family == "qwen2_5_vl":
        tower |= {"fullatt_block_indexes": [1]}
        network = transformers.Qwen2_5_VLForConditionalGeneration(
            transformers.Qwen2_5_VLConfig(text_config=text, vision_config=tower, **tokens)
        )
        processor = Qwen2VLImageProcessorPil(patch_size=14)
    else:
        text |= {"head_dim": 16}
        tower |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
        network = transformers.Qwen3VLForConditionalGeneration(
            transformers.Qwen3VLConfig(text_config=text, vision_config=tower, **tokens)
        )
        processor = Qwen2VLImageProcessorPil(patch_size=16, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    draw_weights(network)
    processor.save_pretrained(folder)
    network.save_pretrained(folder)

    # Point the rows of Yes and No where the last hidden state of a question points.
    judge = LocalJudge(str(folder), 10**6, "cpu", torch.float32)
    kept: list[Tensor] = []
    hook = judge.network.lm_head.register_forward_pre_hook(lambda module, inputs: kept.append(inputs[0][0, -1]))
    with torch.no_grad():
        for level in (30.0, 220.0):
            judge.yes(torch.full((2, 64, 64, 3), int(level), dtype=torch.uint8), "Is it bright?")
        hook.remove()
        middle = (kept[0] + kept[1]) / 2
        for ids, side in zip(judge._answers, (1.0, -1.0), strict=True):
            row = 20 * middle / middle.norm() ** 2 + side * torch.randn(32) * 0.1
            network.lm_head.weight[ids] = row
    network.save_pretrained(folder)
    return folder


def chat_app(folder: Path, *, log_probs: bool = True, replies: list[str | int] | None = None) -> FastAPI:
    """Make a server of the chat protocol that runs a written model on the images it is sent.

    It gives log-probabilities when asked for them, unless `log_probs` is off, and `replies` to requests without images:
    a text, or the status of a refusal.
    """
    app, judge = FastAPI(), LocalJudge(str(folder), 10**6, "cpu", torch.float32)
    app.state.asked = []

    @app.post("/v1/chat/completions")
    async def complete(request: Request) -> dict[str, object]:
        asked = await request.json()
        app.state.asked.append(asked | {"key": request.headers.get("Authorization")})
        if asked["model"] != "tiny":
            raise HTTPException(404, f"no model {asked['model']}")
        parts = asked["messages"][0]["content"]
        text = "".join(part["text"] for part in parts if part["type"] == "text")
        urls = [part["image_url"]["url"] for part in parts if part["type"] == "image_url"]
        images = [Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2]))) for url in urls]
        if not images:
            if isinstance(reply := replies.pop(0), int):
                raise HTTPException(reply)
            return {"choices": [{"message": {"role": "assistant", "content": reply}}]}
        logits: list[Tensor] = []
        hook = judge.network.lm_head.register_forward_hook(lambda module, inputs, out: logits.append(out[0, -1]))
        with torch.no_grad():
            judge.yes(torch.stack([torch.from_numpy(np.array(image)) for image in images]), text)
        hook.remove()
        values, ids = logits[0].log_softmax(-1).topk(asked.get("top_logprobs", 0))
        told = [
            {"token": judge._tokenizer.decode([id]), "logprob": value, "bytes": None}
            for id, value in zip(ids.tolist(), values.tolist(), strict=True)
        ]
        choice = {"index": 0, "message": {"role": "assistant", "content": told[0]["token"]}, "finish_reason": "length"}
        if log_probs and asked.get("logprobs"):
            choice["logprobs"] = {"content": [told[0] | {"top_logprobs": told}]}
        return {"id": "1", "object": "chat.completion", "choices": [choice]}

    return app
