"""The parts around the tiny networks (tokenizer, text encoders, scheduler, guider) and the transformer's config."""

import inspect
import json

import torch
from diffusers import (
    AutoencoderKLHunyuanVideo15,
    ClassifierFreeGuidance,
    FlowMatchEulerDiscreteScheduler,
    HunyuanVideo15Pipeline,
    HunyuanVideo15Transformer3DModel,
)
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, trainers
from transformers import (
    ByT5Tokenizer,
    Qwen2_5_VLTextConfig,
    Qwen2_5_VLTextModel,
    Qwen2Tokenizer,
    T5Config,
    T5EncoderModel,
)
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from scripts.tiny.prompts import ALL_SCENES, WORDINGS, prompt

TEXT_WIDTH = 128
GLYPH_WIDTH = 32
IMAGE_WIDTH = 16
PROMPT_TOKENS = 15
"""What the longest prompt takes: no prompt is cut."""

SHIFT = 3.0
SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def build_tokenizer() -> Qwen2Tokenizer:
    """Train a byte-level BPE on the prompts and the chat template, so that nearly every word is one token."""
    signature = inspect.signature(HunyuanVideo15Pipeline._get_mllm_prompt_embeds)
    system_text = signature.parameters["system_message"].default  # the pipeline puts it before every prompt
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PRETOKENIZE_REGEX), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    corpus = [prompt(scene, wording) for scene in ALL_SCENES for wording in range(len(WORDINGS))]
    roles = [f"{role}\n" for role in ("system", "user", "assistant")]
    training = trainers.BpeTrainer(
        vocab_size=1024, initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()), show_progress=False
    )
    bpe.train_from_iterator([*corpus, *roles * 2, *[system_text] * 2], training)
    learned = json.loads(bpe.to_str())["model"]
    vocabulary = learned["vocab"] | {SPECIAL_TOKENS[0]: len(learned["vocab"])}
    tokenizer = Qwen2Tokenizer(
        vocab=vocabulary, merges=[tuple(pair) for pair in learned["merges"]], padding_side="right"
    )
    tokenizer.add_special_tokens({"additional_special_tokens": list(SPECIAL_TOKENS[1:])})
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


@torch.no_grad()
def encode_prompts(
    tokenizer: Qwen2Tokenizer, encoder: Qwen2_5_VLTextModel, prompts: list[str]
) -> tuple[torch.Tensor, torch.Tensor]:
    """Embed prompts as the pipeline does.

    Returns:
        Embeddings `[P, S, D]`, zero beyond the end of each prompt, and their mask `[P, S]`; S is PROMPT_TOKENS.
    """
    states, mask = HunyuanVideo15Pipeline._get_mllm_prompt_embeds(
        encoder, tokenizer, prompts, "cpu", tokenizer_max_length=PROMPT_TOKENS
    )
    return states * mask[..., None], mask.float()


def build_text_encoder(vocab_size: int) -> Qwen2_5_VLTextModel:
    """Make a random three-layer language model; its third-last hidden state is unit-scale embeddings plus one layer."""
    torch.manual_seed(0)
    config = Qwen2_5_VLTextConfig(
        vocab_size=vocab_size,
        hidden_size=TEXT_WIDTH,
        intermediate_size=2 * TEXT_WIDTH,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=2048,
        initializer_range=0.06,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]},
        bos_token_id=None,
        eos_token_id=None,
    )
    encoder = Qwen2_5_VLTextModel(config)
    torch.nn.init.normal_(encoder.embed_tokens.weight)
    return encoder.to(torch.bfloat16).float().eval()


def build_glyph_encoder() -> T5EncoderModel:
    """Make a random one-layer ByT5; the prompts quote no text, so training never uses it."""
    torch.manual_seed(0)
    config = T5Config(vocab_size=384, d_model=GLYPH_WIDTH, d_kv=8, d_ff=64, num_layers=1, num_heads=4)
    return T5EncoderModel(config).eval()


def build_transformer(latent_channels: int) -> HunyuanVideo15Transformer3DModel:
    """Make the untrained transformer: six dual-stream layers of width 160."""
    torch.manual_seed(0)
    return HunyuanVideo15Transformer3DModel(
        in_channels=2 * latent_channels + 1,
        out_channels=latent_channels,
        num_attention_heads=4,
        attention_head_dim=40,
        num_layers=6,
        num_refiner_layers=1,
        text_embed_dim=TEXT_WIDTH,
        text_embed_2_dim=GLYPH_WIDTH,
        image_embed_dim=IMAGE_WIDTH,
        patch_size=2,
        rope_axes_dim=(8, 16, 16),
        target_size=64,
        task_type="t2v",
    )


def assemble(transformer: HunyuanVideo15Transformer3DModel, vae: AutoencoderKLHunyuanVideo15) -> HunyuanVideo15Pipeline:
    """Put trained networks and freshly built parts into the stock diffusers pipeline."""
    tokenizer = build_tokenizer()
    return HunyuanVideo15Pipeline(
        text_encoder=build_text_encoder(len(tokenizer)),
        tokenizer=tokenizer,
        transformer=transformer,
        vae=vae,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=SHIFT),
        text_encoder_2=build_glyph_encoder(),
        tokenizer_2=ByT5Tokenizer(),
        guider=ClassifierFreeGuidance(guidance_scale=1.0),
    )
