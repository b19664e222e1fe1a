"""Knobs of the method: exploration, policy update, trust region and reward (paper arXiv 2603.21872)."""

from dataclasses import dataclass, field
from typing import Any, Literal


@dataclass
class RolloutConfig:
    """Exploration: how training videos are sampled and how much noise each denoising step adds."""

    sde_type: Literal["sage_grpo", "flow_grpo", "dance_grpo", "cps"] = "sage_grpo"
    """Stochastic transition of a denoising step. sage_grpo: exact integral of the variance (paper Eq. 5-7);
    flow_grpo: its first-order version; dance_grpo: constant diffusion; cps: coefficients-preserving."""

    eta: float = 0.5
    """Exploration strength: factor on the noise std of every step (no unit). 0 would sample deterministically,
    and nothing could be learnt."""

    sage_clamp: float = 3e-3
    """Distance from sigma = 1 at which sage_grpo cuts its singular first step (noise level, 0 to 1).
    It sets how much noise that first step adds: smaller is noisier."""

    cfg_scale: float = 6.0
    """Classifier-free guidance scale of rollout, replay and validation. 1.0 switches guidance off and halves the
    transformer work; use it for CFG-distilled weights."""

    negative_prompt: str = ""
    """Text of the unconditional branch of guidance. Only used when cfg_scale is above 1."""

    grpo_sampling_steps: int = 20
    """Denoising steps K of a rollout. Time and stored latents grow in proportion."""

    sample_n_frames: int = 81
    """Frames per rollout video, 4n + 1 (the VAE packs 4 frames into one latent frame after the first)."""

    rollout_size: str = "352x624"
    """HEIGHTxWIDTH of rollout videos in pixels, multiples of the VAE factor. For 16:9 352x624 is the 480-base bucket,
    480x848 the 640-base one (what generate.py makes)."""

    infer_flow_shift_video: float = 5.0
    """Timestep shift of the rollout's sigma schedule. Larger spends more steps at high noise."""

    video_fps: int = 24
    """Frames per second of written videos, and thereby of what file-based reward models see."""

    use_same_noise: bool = False
    """Start all videos of a prompt group from one initial noise, so that they differ only by step noise."""

    rollout_micro_batch_size: int = 1
    """Videos denoised together on one rank; 0: all at once. Larger is faster and takes more memory; the noise stays
    the same."""

    sde_window: Literal["all", "first", "sliding", "per_group"] = "all"
    """Which denoising steps draw noise and can be trained; the others follow the ODE. all: every step (paper); first:
    the first sde_window_size; sliding: a window that moves from the first steps to the last and begins again (MixGRPO,
    arXiv 2507.21802); per_group: a random place for each prompt group in each round (with size 1 the iso-temporal
    groups of Flash-GRPO, arXiv 2605.15980; with use_same_noise as well, the videos of a group differ only by that
    step)."""

    sde_window_size: int = 4
    """Denoising steps in the window of sde_window. The update's and the anchor's work grow in proportion."""

    sde_window_interval: int = 25
    """Rounds after which a sliding window moves on by one step."""

    save_rollout_videos: bool = True
    """Write a round's videos as mp4 under `rollouts/` of the run folder: the first round's, then one round's per
    save_interval."""


@dataclass
class GrpoConfig:
    """Policy update: group-relative advantages and the clipped loss over stored denoising steps."""

    algorithm: str = "grpo"
    """Training algorithm: grpo, or `module:Class` for a subclass of `Algorithm` of your own that Python can import."""

    algorithm_options: dict[str, Any] | None = None
    """Settings of an algorithm of your own, which reads them from the configuration. As a flag: JSON."""

    batch_size: int = 2
    """Videos per data-parallel rank in one rollout. One of batch_size and num_generations must divide the other."""

    num_generations: int = 4
    """Group size G: videos sampled per prompt, compared with each other for the advantage. At least 2."""

    clip_range: float = 1e-4
    """Clip of the policy ratio around 1. Small because log-probabilities are means over all latent elements."""

    adv_clip_max: float = 5.0
    """Bound on the magnitude of an advantage, in standard deviations of its group."""

    timestep_fraction: float = 1.0
    """Share of the denoising steps that are trained, above 0 and at most 1; their number is rounded down."""

    timestep_stride: bool = False
    """Spread the trained share evenly over the denoising steps, every 1 / timestep_fraction-th of them and the same for
    all videos, instead of a random share for each video."""

    enable_timestep_permutation: bool = True
    """Train the steps of each video in random order. Off: in denoising order, so that a timestep_fraction without
    timestep_stride keeps the noisiest steps, the same for all videos."""

    use_grad_balancing: bool = True
    """Temporal gradient equalizer (paper Eq. 8-9): weight each step's policy loss so that all steps contribute
    gradients of the same scale."""

    updates_per_rollout: int = 1
    """Optimizer updates made from one rollout; its samples and steps are split over them. At 1 the ratio is 1
    everywhere: clipping and the velocity KL only act from 2 on."""

    mini_batch_size_per_update: int = 1
    """(video, step) pairs per forward and backward pass of the update on one rank. Larger is faster and takes more
    memory."""

    gradient_accumulation_steps: int = 1
    """Rollouts of batch_size videos per rank collected for one round; every update averages over all of them.
    The paper uses 4."""


@dataclass
class KLConfig:
    """Trust region: the KL penalty that holds the policy near its anchor (paper Eq. 11-15, A.6)."""

    kl_weight: float = 1e-5
    """Ceiling of the KL coefficient lambda. 0 switches off penalty, controller, anchor and the anchor pass."""

    use_moving_KL: bool = True
    """Refresh the anchor from the policy every update_ref_model_step; otherwise it stays the initial model."""

    use_dual_kl: bool = True
    """Add the velocity term to the position term: weights dual_kl_moving_weight and dual_kl_step_weight."""

    dual_kl_moving_weight: float = 1.0
    """Weight of the position term, the distance of denoising means to the anchor, in the dual KL. 0 leaves only
    the step-wise velocity term."""

    dual_kl_step_weight: float = 0.1
    """Weight of the velocity term, log-probability at rollout minus now, in the dual KL."""

    update_ref_model_step: int = 10
    """Optimizer updates between anchor refreshes of the moving KL."""

    kl_compute_mode: Literal["rollout_phase", "training_phase"] = "rollout_phase"
    """When anchor means are computed. rollout_phase: once per round, kept on the CPU; training_phase: again in
    every update."""

    reference_mode_offload: bool = False
    """Keep the anchor's weights on the CPU except while videos are scored and in the anchor's pass. Saves GPU memory in
    rollout and update, costs transfers."""

    kl_schedule: Literal["fixed", "two_stage", "milder"] = "two_stage"
    """Schedule of lambda. fixed: kl_weight throughout; two_stage: warm-up, then control around kl_target; milder:
    two_stage below a lower ceiling."""

    kl_warmup_updates: int = 100
    """Controller updates over which lambda rises linearly from kl_coef to its ceiling."""

    kl_coef: float | None = None
    """Start of lambda's warm-up, from kl_min_coef to its ceiling. None: kl_min_coef. The metric kl/coef is something
    else: lambda at that update."""

    kl_min_coef: float = 1e-7
    """Floor of lambda, at most its ceiling: kl_weight, with milder a tenth of it. fixed has none."""

    kl_target: float | None = None
    """Target KL of the controller: while the mean of the last 10 KLs is above 1.5 times it lambda shrinks by 0.9, below
    half it grows by 1.1. None: equal to kl_weight."""


@dataclass
class RewardConfig:
    """Reward: which model scores the videos and how its metrics are weighted."""

    reward_model: str = "videoalign_local"
    """Name of the reward: videoalign_local (VideoReward weights), clip_score, pick_score, clip_iqa, moving_shapes (the
    bundled tiny model), or another registered one; with remote_reward_url one that the server has."""

    reward_weights: dict[str, float] = field(default_factory=lambda: {"VQ": 0.5, "MQ": 0.5, "TA": 1.0})
    """Weight per metric of the total: visual quality VQ, motion quality MQ, text alignment TA. As a flag: JSON.
    The default is the paper's setting B; equal weights are setting A."""

    reward_config: dict[str, Any] | None = None
    """Several rewards at once, instead of reward_model and reward_weights: {"models": {NAME: {"weight": 1.0,
    "sub_reward": {METRIC: WEIGHT}, "options": {...}, "url": ...}}}. As a flag: JSON. None: the short form."""

    reward_aggregation: Literal["sum", "normalize_then_sum"] = "sum"
    """How metrics become one reward per video. sum: their weighted sum (paper); normalize_then_sum: each metric is
    first brought to mean 0 and spread 1 within its prompt group, so that none outweighs the others by its scale."""

    reward_checkpoint_path: str | None = None
    """Weights of reward_model. None: VideoReward below pretrained_model_root for videoalign_local."""

    reward_checkpoint_mode: Literal["v3"] = "v3"
    """Scoring mode of the VideoAlign checkpoint; v3 is the released VideoReward. Only v3 exists here; the flag is kept
    for scripts that pass it."""

    reward_io: Literal["file", "memory"] = "file"
    """How frames reach rewards that are defined on video files. file: through an mp4 at video_fps, as the published
    scorer reads them; memory: as they are, without compression loss."""

    reward_batch_size: int = 8
    """Videos scored together, in one pass of a reward network and in one request to a server."""

    reward_async: bool = False
    """Score videos while the next ones are sampled. Results are the same; faster where the reward runs elsewhere (a
    server, another device), not where it shares one GPU with the policy."""

    reward_offload: bool = False
    """Keep reward networks on the CPU except while they score. Saves GPU memory, costs transfers."""

    reward_max_failed: float = 0.5
    """Share of a round's videos, over all ranks, that may lack a score; above it the run stops. Videos without a score
    are left out of their group's statistics and of the loss."""

    remote_reward_url: str | None = None
    """http(s) address of a reward server to score with; its token is read from the environment (REWARD_TOKEN). None:
    score in this process."""

    remote_reward_timeout: float = 300.0
    """Seconds to wait for the scores of one request. Over several ranks all its attempts must end within
    collective_timeout."""

    remote_reward_retries: int = 3
    """Times a failed request is sent again, after waits that double from half a second; then its videos count as
    failed."""

    remote_reward_in_flight: int = 4
    """Concurrent requests to the server."""
