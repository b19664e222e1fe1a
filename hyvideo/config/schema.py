"""Every setting of a run, in ten groups: `cfg.<group>.<name>`.

Names are unique over all groups, so a flag is the bare name (`--eta 0.5`) and a YAML file may be flat (`eta: 0.5`) or
grouped (`rollout: {eta: 0.5}`). The string below each setting is its manual, which `--help` prints, and
`hyvideo.config.settings.Setting` says what else it holds.
"""

import math
from copy import copy
from dataclasses import dataclass, field
from typing import Any, Literal

Published = Literal[
    "prompt_noise",
    "crf_25",
    "cps_equalizer",
    "flow_kl",
    "kl_controller",
    "lora_anchor",
    "muon_momentum",
    "first_ratio",
    "idle_updates",
]

EVERY_PHASE = ("rollout", "reward", "anchor", "update", "validation")
"""The parts of a run that have a memory peak of their own."""


def setting(default: Any, **about: Any) -> Any:
    """Return a dataclass field with a default, which may be a list, and with attributes of `Setting`."""
    if isinstance(default, list | dict):
        return field(default_factory=lambda: copy(default), metadata=about)
    return field(default=default, metadata=about)


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
    """Precision of matrix products on a GPU. A CPU uses fp32."""

    master_weight_type: Literal["fp32", "bf16"] = "fp32"
    """Precision of weights and optimizer state. bf16 halves their memory but rounds most updates away without use_lora.
    """

    use_lora: bool = False
    """Train low-rank adapters instead of all weights (configs/lora.yaml)."""

    lora_r: int = setting(8, within="[1, 8192]", read_when="use_lora = true")
    """Rank of the adapters."""

    lora_alpha: int = setting(16, within="[1, inf)", read_when="use_lora = true")
    """The adapters' output is multiplied by lora_alpha / lora_r."""

    lora_target_modules: list[str] = setting(_ATTENTION + _FEED_FORWARD, read_when="use_lora = true")
    """Linear layers that get an adapter, by the end of their path; all-linear is every one but the last."""

    pretrained_lora_path: str | None = None
    """Folder or .safetensors file of the adapter to start from (docs/weights.md)."""


@dataclass
class DataConfig:
    """Prompts: .txt, one in each line, or .csv and .jsonl with `prompt`, `index`, `seed` and `ref_image_path`."""

    train_video_csv: list[str] = setting([])
    """Files of training prompts."""

    valid_video_csv: list[str] = setting([], decides=False)
    """Files of validation prompts."""

    image_root: str | None = setting(None, decides=False)
    """Folder in which every ref_image_path must lie, for prompt files that you do not trust."""


@dataclass
class RolloutConfig:
    """Exploration: how training videos are sampled and how much noise each denoising step adds."""

    sde_type: str = setting("sage_grpo", read_when="algorithm != nft")
    """Sampler: sage_grpo (exact variance, paper Eq. 5-7), flow_grpo (to first order), dance_grpo (constant diffusion),
    cps (coefficients preserved), or module:function of your own."""

    eta: float = setting(0.5, within="(0, 100]", read_when="algorithm != nft")
    """Strength of the noise. cps takes at most 1."""

    sage_clamp: float = setting(3e-3, within="(0, 1)", read_when="sde_type = sage_grpo")
    """sage_grpo starts at noise level 1 - sage_clamp. A smaller clamp adds more noise."""

    cfg_scale: float = setting(6.0, within="[1, inf)")
    """Classifier-free guidance. 1 switches it off and halves the work. Distilled weights need 1."""

    negative_prompt: str = ""
    """Text that guidance steers away from."""

    grpo_sampling_steps: int = setting(20, within="[1, 10000]")
    """Denoising steps of a rollout."""

    sample_n_frames: int = setting(81, within="[1, inf)", frees=EVERY_PHASE)
    """Frames of a rollout video, 4n + 1."""

    rollout_size: str = "352x624"
    """HEIGHTxWIDTH of rollout videos in pixels."""

    infer_flow_shift_video: float = setting(5.0, within="(0, inf)")
    """Timestep shift of the rollout. A larger one spends more steps at high noise."""

    video_fps: int = setting(24, within="[1, 1000]", unit="frames per second")
    """Frame rate of written videos."""

    use_same_noise: bool = False
    """Start all videos of a prompt from one noise."""

    published: list[Published] = setting([])
    """Behaviours of the release instead of ours (configs/published.yaml has all): the same first noises of a prompt in
    every round (prompt_noise), mp4 files for rewards at CRF 25 instead of 16 (crf_25), cps scaled by |d mean / d v| /
    std instead of its own gradient (cps_equalizer), flow_grpo's KL by its standard deviation without sqrt(delta)
    (flow_kl), lambda moved by every micro-batch, from kl_min_coef and one step earlier (kl_controller), an adapter's
    anchor that never moves (lora_anchor), Muon's steps of a weight without gradient (muon_momentum), a first update by
    the recorded log-probabilities, velocity term included (first_ratio), updates of equal rewards (idle_updates)."""

    rollout_micro_batch_size: int = setting(1, within="[0, inf)", frees=("rollout", "validation"))
    """Videos that one rank denoises together; 0 is all."""

    sde_window: Literal["all", "first", "sliding", "per_group"] = setting("all", read_when="algorithm != nft")
    """Steps that draw noise and can be trained: all (paper), the first sde_window_size, a window that moves from first
    to last (MixGRPO, arXiv 2507.21802), or one drawn for each prompt (Flash-GRPO, arXiv 2605.15980, with size 1)."""

    sde_window_size: int = setting(4, within="[1, inf)", read_when="sde_window != all")
    """Steps in the window."""

    sde_window_interval: int = setting(25, within="[1, inf)", unit="rounds", read_when="sde_window = sliding")
    """Time after which a sliding window moves by a step."""

    base_interval: int = setting(0, within="[0, inf)", unit="updates", decides=False)
    """Time between rounds that the base model samples too, for `reward/over_base`: what the policy's videos score more
    from the same prompts and noise. It may take a copy of the weights in host memory. 0 switches it off."""

    @property
    def is_guided(self) -> bool:
        """Whether every evaluation has a prompted and a negative row."""
        return self.cfg_scale != 1.0


@dataclass
class GrpoConfig:
    """Policy update: group-relative advantages and the clipped loss over stored denoising steps."""

    algorithm: str = "grpo"
    """grpo, grpo_one_pass (the same gradient for use_lora at updates_per_rollout 1, computed while videos are sampled),
    nft (DiffusionNFT, arXiv 2509.16117), or `module:Class`, a subclass of Algorithm of your own."""

    algorithm_options: dict[str, Any] | None = setting(None, read_when="algorithm != grpo")
    """Options of nft (`NFTOptions` in hyvideo/algorithms/nft.py) or of your own algorithm."""

    batch_size: int = setting(2, within="[1, 65536]")
    """Videos per data-parallel rank and rollout. This or num_generations divides the other."""

    num_generations: int = setting(4, within="[2, 65536]")
    """Videos of one prompt, which are compared."""

    clip_range: float = setting(1e-4, within="(0, inf)", read_when="algorithm != nft")
    """Clip of the policy ratio around 1, small because log-probabilities are means over latent values."""

    clip_range_high: float | None = setting(None, within="(0, inf)", read_when="algorithm != nft")
    """Clip of the ratio above 1, where it differs from that below (DAPO, arXiv 2503.14476)."""

    ratio_norm: bool = setting(False, read_when="algorithm != nft")
    """Normalize the ratio, so that its clip acts alike at all steps (GRPO-Guard, arXiv 2510.22319). It shrinks by the
    step's noise and needs a smaller clip_range."""

    adv_clip_max: float = setting(5.0, within="(0, inf)", unit="standard deviations")
    """Largest magnitude of an advantage."""

    advantage_std: Literal["group", "global", "none"] = setting("group", read_when="reward_aggregation != gdpo")
    """What an advantage is divided by: the standard deviation of its group (paper) or of the round (Flow-GRPO,
    DiffusionNFT), or nothing (Dr. GRPO, arXiv 2503.20783)."""

    timestep_fraction: float = setting(1.0, within="(0, 1]")
    """Share of the noisy steps that are trained, rounded down; with nft of all steps."""

    enable_timestep_permutation: bool = True
    """Train steps in random order. Otherwise timestep_fraction keeps the noisiest."""

    use_grad_balancing: bool = setting(True, read_when="algorithm != nft")
    """Give all steps' gradients one scale (temporal gradient equalizer, paper Eq. 8-9)."""

    updates_per_rollout: int = setting(1, within="[1, inf)")
    """Updates of a round. Clipping and the velocity KL act from the second on."""

    mini_batch_size_per_update: int = setting(1, within="[1, inf)", frees=("anchor", "update"))
    """(video, step) pairs that one rank trains together."""

    gradient_accumulation_steps: int = setting(1, within="[1, 65536]")
    """Rollouts per rank in one round. The paper uses 4."""


@dataclass
class KLConfig:
    """Trust region: the KL penalty that holds the policy near its anchor (paper Eq. 11-15, A.6)."""

    kl_weight: float = setting(1e-5, within="[0, inf)", read_when="algorithm != nft")
    """Largest value of lambda, the penalty's coefficient. 0 switches off this group."""

    use_moving_KL: bool = setting(True, read_when="algorithm != nft")
    """Refresh the anchor every update_ref_model_step. Otherwise it stays the initial model."""

    use_dual_kl: bool = setting(True, read_when="algorithm != nft")
    """Add the velocity term to the position term."""

    dual_kl_moving_weight: float = setting(1.0, within="[0, inf)", read_when="use_dual_kl = true")
    """Weight of the position term, the distance of means to the anchor's."""

    dual_kl_step_weight: float = setting(0.1, within="[0, inf)", read_when="use_dual_kl = true")
    """Weight of the velocity term, the log-probability at rollout minus the current one."""

    update_ref_model_step: int = setting(10, within="[0, inf)", unit="updates", read_when="use_moving_KL = true")
    """Time between refreshes of the anchor. 0 is never."""

    anchor_fraction: float = setting(1.0, within="(0, 1]", read_when="algorithm != nft")
    """Share of the trained steps that is compared with the anchor. The position term keeps its mean but becomes
    noisier. 0.5 halves the anchor's pass."""

    kl_schedule: Literal["fixed", "two_stage", "milder"] = setting("two_stage", read_when="algorithm != nft")
    """Lambda stays at kl_weight (fixed), or warms up and then steers the KL towards kl_target (two_stage), below a
    tenth of kl_weight (milder)."""

    kl_warmup_updates: int = setting(100, within="[0, inf)", unit="updates", read_when="kl_schedule != fixed")
    """Time in which lambda rises to its largest value."""

    kl_coef: float | None = setting(None, within="[0, inf)", read_when="kl_schedule != fixed")
    """Lambda at the start of the warm-up. None is kl_min_coef."""

    kl_min_coef: float = setting(1e-7, within="[0, inf)", read_when="kl_schedule != fixed")
    """Smallest value of lambda."""

    kl_target: float | None = setting(None, within="(0, inf)", read_when="kl_schedule != fixed")
    """Desired KL. None is kl_weight. Lambda shrinks by 0.9 while the mean of the last 10 KLs is above 1.5 times this,
    and grows by 1.1 below half of it."""


@dataclass
class RewardConfig:
    """Reward: which model scores the videos and how its metrics are weighted."""

    reward_model: str = setting("videoalign_local", read_when="reward_config = none")
    """videoalign_local, clip_score, pick_score, clip_iqa, text_rendering, vlm_checks, moving_shapes (for the tiny
    model), your own, or one of the server."""

    reward_weights: dict[str, float] = setting({"VQ": 0.5, "MQ": 0.5, "TA": 1.0}, read_when="reward_config = none")
    """Weight of each metric: visual quality VQ, motion quality MQ, text alignment TA. The default is the paper's
    setting B, equal weights are A."""

    reward_config: dict[str, Any] | None = None
    """Several rewards, instead of reward_model and reward_weights: {"models": {NAME: {"weight": 1.0, "sub_reward":
    {METRIC: WEIGHT}, "options": {...}, "url": ...}}}."""

    reward_aggregation: Literal["sum", "normalize_then_sum", "gdpo"] = "sum"
    """Add the weighted metrics (sum, paper), each brought to mean 0 and spread 1 within a prompt's videos first
    (normalize_then_sum), and then divide by the spread of the round instead of each prompt's (gdpo, arXiv 2601.05242).
    """

    reward_guard: dict[str, Any] | None = None
    """Judge of the validation videos, in the form of reward_config. The run acts when the trained reward rises while
    the judge falls."""

    drift_guard: dict[str, float] = setting({}, decides=False)
    """Looks of the validation videos (border=0.5 motion=0.5, see docs/evaluation.md). The run acts when the spread of
    one over the prompts falls below that share of what it was before training. No judge is needed."""

    reward_guard_action: Literal["warn", "stop", "rollback"] = "warn"
    """What a guard does. stop ends the run. rollback goes on from the best checkpoint by the judge at 0.3 of the rate,
    and stops the next time; for drift_guard it is stop."""

    reward_checkpoint_path: str | None = None
    """Weights of reward_model. None is VideoReward below pretrained_model_root."""

    reward_io: Literal["file", "memory"] = "file"
    """Whether rewards on video files read an mp4, as the published scorer does, or frames."""

    reward_batch_size: int = setting(8, within="[1, inf)", frees=("reward", "validation"))
    """Videos scored in one pass, or sent in one request."""

    reward_async: bool = setting(False, decides=False)
    """Score videos while the next ones are sampled."""

    reward_max_failed: float = setting(0.5, within="[0, 1]", decides=False)
    """Share of a round's videos that may lack a score."""

    remote_reward_url: str | None = setting(None, decides=False)
    """http(s) address of a reward server. The variable REWARD_TOKEN holds its token."""

    remote_reward_timeout: float = setting(300.0, within="(0, 1e9]", unit="seconds", decides=False)
    """Longest wait for one request. All attempts must fit into collective_timeout."""


@dataclass
class OptimizerConfig:
    """Optimizer: step size, decay and clipping."""

    learning_rate: float = setting(1e-5, within="(0, inf)")
    """Step size. Muon scales it for each matrix."""

    weight_decay: float = setting(0.01, within="[0, inf)")
    """Decoupled weight decay."""

    max_grad_norm: float = setting(1.0, within="(0, inf)")
    """Largest norm of the whole gradient."""

    use_muon: bool = True
    """Use Muon for weights with two or more dimensions, and AdamW for the rest."""

    lr_warmup_steps: int = setting(0, within="[0, inf)", unit="updates")
    """Time in which the learning rate rises linearly from 0."""

    ema_decay: float = setting(0.0, within="[0, 1)")
    """Share of the weights' average that stays in every update, at first less: (1 + n) / (10 + n) after n updates.
    Validation samples with the average, which takes another copy of the trained weights. 0 keeps none."""


@dataclass
class ParallelConfig:
    """Ranks: world size = dp_replicate x sharded data parallel x sp_size. None of these settings changes the result."""

    sp_size: int = setting(1, within="[1, inf)", decides=False, frees=EVERY_PHASE)
    """Ranks that share one video: the two rows of guidance if it is even, then the tokens."""

    dp_replicate: int = setting(1, within="[1, inf)", decides=False)
    """Full copies of the sharded model (HSDP)."""

    enable_fsdp: bool = setting(True, decides=False, frees=EVERY_PHASE)
    """Shard weights, gradients and optimizer state."""

    reshard_after_forward: bool = setting(True, decides=False, frees=EVERY_PHASE)
    """Free a block's gathered weights after each forward pass. Keeping them saves communication."""

    offload: list[Literal["anchor", "reward", "encoders", "ema", "weights"]] = setting(
        [], decides=False, frees=EVERY_PHASE
    )
    """What rests in host memory while it does not compute: the anchor or nft's old policy, rewards, encoders (14 GiB),
    the average, or weights with gradients and optimizer state (slow)."""

    activation_checkpointing: Literal["none", "full", "selective", "cheap", "elementwise"] = setting(
        "full", decides=False, frees=("update",)
    )
    """What of a block the backward pass computes again: nothing, all (a third more work), all but attention
    (selective), also not the second feed-forward layer (cheap), or no matrix product (elementwise). The last three keep
    1, 2 and 10 tensors per block."""

    enable_compile: bool = setting(False, decides=False)
    """Compile the transformer's blocks. The first steps take minutes."""

    collective_timeout: int = setting(1800, within="[1, 1e9]", unit="seconds", decides=False)
    """Longest wait of a rank for the others. After half of it in one phase a rank prints its threads' stacks."""


@dataclass
class ValidationConfig:
    """Validation: deterministic sampling of fixed prompts and seeds, scored by the training reward."""

    validation_interval: int = setting(100, within="[0, inf)", unit="updates", decides=False)
    """Time between validations. 0 switches them off."""

    validate_at_step0: bool = setting(False, decides=False)
    """Validate once before training."""

    validation_num_videos: int = setting(32, within="[1, inf)", decides=False)
    """Videos per validation, of the first prompts."""

    validate_video_length: int = setting(81, within="[1, inf)", decides=False, frees=("validation",))
    """Frames of a validation video, 4n + 1."""

    validation_fixed_size: str = setting("480x864", decides=False, frees=("validation",))
    """HEIGHTxWIDTH of validation videos in pixels."""

    validation_num_inference_steps: int = setting(40, within="[1, 10000]", decides=False)
    """Denoising steps of a validation video."""

    validation_timestep_shift: float = setting(5.0, within="(0, inf)", decides=False)
    """Timestep shift of validation."""

    validation_global_seed: int = setting(930, within="[0, 9223372036854775808)", decides=False)
    """Seed of prompts without one in the CSV."""

    @property
    def is_on(self) -> bool:
        """Whether there is any validation."""
        return self.validation_interval > 0 or self.validate_at_step0


@dataclass
class RunConfig:
    """Run: where it writes, how long it lasts, how it resumes."""

    output_dir: str | None = setting(None, decides=False)
    """Run folder. None is `outputs/<run_name>-<time>`."""

    run_name: str | None = setting(None, decides=False)
    """Name in trackers and of the default folder. None joins the names of the config files."""

    trackers: list[str] = setting(["tensorboard"], decides=False)
    """Experiment trackers by accelerate's names, such as wandb."""

    max_steps: int = setting(10000, within="[1, inf)", unit="updates", decides=False)
    """Length of the run. The last round is made whole."""

    seed: int = setting(42, within="[0, 9223372036854775808)")
    """Seed of prompt order, noise and steps."""

    save_interval: int = setting(100, within="[0, inf)", unit="updates", decides=False)
    """Time between checkpoints. 0 saves only at the end."""

    log_interval: int = setting(1, within="[1, inf)", unit="updates", decides=False)
    """Time between console lines."""

    keep_last: int = setting(3, within="[1, inf)", decides=False)
    """Newest checkpoints that are kept."""

    keep_every: int = setting(0, within="[0, inf)", unit="updates", decides=False)
    """Also keep the first checkpoint at or after each multiple of this."""

    max_skipped_updates: int = setting(0, within="[0, inf)", decides=False)
    """Updates whose loss or gradient is not finite that may be skipped in a row. One more ends the run."""

    async_save: bool = setting(False, decides=False)
    """Write checkpoints during the next round."""

    profile: bool = setting(False, decides=False)
    """Write profiler traces and a table of the phases to `profile/`."""

    peak_tflops: float | None = setting(None, within="(0, inf)", unit="10^12 operations per second", decides=False)
    """Peak of one device for perf/mfu_*. None is the data sheet's, or measured."""

    resume_from_checkpoint: str | None = setting(None, decides=False)
    """A checkpoint, or `latest` for the newest of output_dir, which starts afresh if there is none. None needs a new or
    empty output_dir."""

    resume_may_change: list[str] = setting([], decides=False)
    """Settings that may differ from the resumed checkpoint's and decide the result. LoRA, optimizer and precision can
    never change."""

    dry_run: bool = setting(False, decides=False)
    """Check settings, files, free space and ranks, print the plan and end."""

    def most_checkpoints(self, *, best: bool = False) -> int:
        """Return how many checkpoints lie in the folder at most; the newest is written before the oldest is deleted.

        `best` is one more, which a reward guard keeps.
        """
        saves = math.ceil(self.max_steps / self.save_interval) if self.save_interval else 1
        kept = self.max_steps // self.keep_every if self.keep_every else 0
        return min(saves, self.keep_last + kept + best + 1)


@dataclass
class Config:
    """Everything that decides a run. Made by `hyvideo.config.loading.load_config`."""

    model: ModelConfig = field(default_factory=ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    rollout: RolloutConfig = field(default_factory=RolloutConfig)
    grpo: GrpoConfig = field(default_factory=GrpoConfig)
    kl: KLConfig = field(default_factory=KLConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    validation: ValidationConfig = field(default_factory=ValidationConfig)
    run: RunConfig = field(default_factory=RunConfig)

    @property
    def moves_anchor(self) -> bool:
        """Whether the trust region's anchor follows the policy."""
        stays = self.model.use_lora and "lora_anchor" in self.rollout.published
        return self.kl.use_moving_KL and self.kl.update_ref_model_step > 0 and not stays
