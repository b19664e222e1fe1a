"""Which weights are trained, in which precision, fully or through LoRA."""

from dataclasses import dataclass
from typing import Literal

from hyvideo.config.setting import setting

_ATTENTION = ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]
_FEED_FORWARD = ["ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"]


@dataclass
class ModelConfig:
    """Model: which weights are trained, in which precision, fully or through LoRA."""

    pretrained_model_root: str = "./ckpts"
    """Folder of the base model, in the original layout or that of diffusers."""

    pretrained_transformer_version: str = "480p_t2v"
    """Version of the transformer, such as 720p_i2v. A diffusers folder has only one."""

    dtype: Literal["bf16", "fp32"] = "bf16"
    """Precision of the transformer's matrix products on a GPU. A CPU uses fp32."""

    master_weight_type: Literal["fp32", "bf16"] = "fp32"
    """Precision of the transformer's weights and optimizer state. bf16 halves their memory but needs use_lora, because
    it rounds most updates away."""

    use_lora: bool = False
    """Train low-rank adapters instead of all weights. configs/lora.yaml has fitting settings."""

    lora_r: int = setting(8, within="[1, 8192]", read_when="use_lora = true")
    """Rank of the adapters."""

    lora_alpha: int = setting(16, within="[1, inf)", read_when="use_lora = true")
    """The adapters' output is multiplied by lora_alpha / lora_r."""

    lora_target_modules: list[str] = setting(_ATTENTION + _FEED_FORWARD, read_when="use_lora = true")
    """The linear layers that get an adapter, by the end of their path, here or in the original layout."""

    pretrained_lora_path: str | None = None
    """Folder with the pytorch_lora_weights.safetensors to start from."""
