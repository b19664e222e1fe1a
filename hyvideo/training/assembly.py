"""Build a trainer from a configuration: every part by the function of its own room, checks before models."""

import torch

from hyvideo.checkpoint.run_folder import RunFolder, open_run_folder
from hyvideo.config.checks import check_config
from hyvideo.config.identity import config_hash
from hyvideo.config.loading import save_config
from hyvideo.config.schema import Config
from hyvideo.config.sizes import parse_size
from hyvideo.data.images import check_images
from hyvideo.data.prompts import read_prompts
from hyvideo.data.samplers import GroupSampler
from hyvideo.grpo.gradient_equalizer import equalizer_scales
from hyvideo.grpo.kl_controller import KLController
from hyvideo.models.attention import install_attention
from hyvideo.models.layout import check_layout, task_of
from hyvideo.models.loading import load_pipeline
from hyvideo.models.parallelize import lora_config, parameter_count, prepare_policy, trainable_parameters
from hyvideo.models.reward_models.rewards import WeightedReward, get_reward_fn
from hyvideo.observability.console import Console
from hyvideo.observability.metrics import MetricsLog
from hyvideo.observability.phase_timer import PhaseTimer
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from hyvideo.training.anchor import Anchor
from hyvideo.training.optimizer import build_optimizers
from hyvideo.training.state import RunState
from hyvideo.training.trainer import Trainer
from hyvideo.training.update import PolicyUpdate
from hyvideo.training.validation import Validation

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def build_trainer(config: Config, *, world_size: int = 1) -> Trainer:
    """Check everything that can be checked, then load the models and put the run together.

    Args:
        config: the run's configuration.
        world_size: number of processes.

    Raises:
        ValueError: a setting, prompt file, weight folder, run folder or checkpoint is wrong; nothing was written.
    """
    check_layout(config.model.pretrained_model_root, config.model.pretrained_transformer_version)
    if world_size != 1:
        raise ValueError(f"{world_size} processes were started; this version trains in one (NPROC_PER_NODE=1).")
    check_config(config, world_size)
    prompts = read_prompts(config.data.train_video_csv)
    valid = read_prompts(config.data.valid_video_csv) if config.data.valid_video_csv else []
    task = task_of(config.model.pretrained_model_root, config.model.pretrained_transformer_version)
    check_images(prompts, task)
    check_images(valid, task)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    reward = get_reward_fn(
        config.reward, device, model_root=config.model.pretrained_model_root, video_fps=config.rollout.video_fps
    )
    folder = open_run_folder(config.run)

    pipeline = build_pipeline(config, device)
    update, state = _build_method(
        config,
        pipeline,
        GroupSampler(
            num_prompts=len(prompts),
            batch_size=config.grpo.batch_size,
            num_generations=config.grpo.num_generations,
            dp_rank=0,
            dp_size=world_size,
            seed=config.run.seed,
        ),
    )
    if folder.resume_from:
        state.load(folder.resume_from)
    console = Console(folder.path, rank=0, log_interval=config.run.log_interval)
    _introduce(console, folder, config, state)
    console.info(f"reward {reward.describe()}")
    save_config(config, folder.path / "config.yaml")
    metrics = MetricsLog(folder.path)
    metrics.truncate_after(state.step)
    return Trainer(
        config=config,
        folder=folder,
        prompts=prompts,
        reward=reward,
        update=update,
        state=state,
        validation=_build_validation(config, pipeline, update.guidance, valid, reward),
        metrics=metrics,
        console=console,
        timer=PhaseTimer(device),
    )


def build_pipeline(config: Config, device: torch.device) -> HunyuanVideoGRPOPipeline:
    """Load the models of `config` onto `device`, the transformer ready for training, the rollout's steps set.

    Raises:
        ValueError: weights are missing or do not fit.
    """
    model, rollout = config.model, config.rollout
    on_gpu = device.type == "cuda"
    scheduler = FlowMatchDiscreteScheduler(shift=rollout.infer_flow_shift_video, sage_clamp=rollout.sage_clamp)
    scheduler.set_timesteps(rollout.grpo_sampling_steps)
    pipeline = load_pipeline(
        model.pretrained_model_root,
        model.pretrained_transformer_version,
        pipeline_class=HunyuanVideoGRPOPipeline,
        scheduler=scheduler,
        transformer_dtype=DTYPES[model.master_weight_type] if on_gpu else torch.float32,
        encoder_dtype=torch.float16 if on_gpu else torch.float32,
    )
    adapter = lora_config(model.lora_r, model.lora_alpha, model.lora_dropout, model.lora_target_modules)
    torch.manual_seed(config.run.seed)  # a fresh adapter is drawn from the library's global generator
    prepare_policy(
        install_attention(pipeline.transformer),
        gradient_checkpointing=model.enable_gradient_checkpointing,
        lora=adapter if model.use_lora else None,
        pretrained_lora_path=model.pretrained_lora_path,
    )
    pipeline.autocast_dtype = DTYPES[model.dtype] if on_gpu else torch.float32
    return pipeline.to(device)


def _build_method(
    config: Config, pipeline: HunyuanVideoGRPOPipeline, sampler: GroupSampler
) -> tuple[PolicyUpdate, RunState]:
    """Build what makes an update, and the state it moves."""
    kl, rollout = config.kl, config.rollout
    parameters = trainable_parameters(pipeline.transformer)
    optimizers = build_optimizers(parameters, config.optimizer)
    has_position_term = kl.kl_weight > 0 and not (kl.use_dual_kl and kl.dual_kl_moving_weight == 0)
    anchor = Anchor(parameters, offload=kl.reference_mode_offload) if has_position_term else None
    negative = pipeline.encode([rollout.negative_prompt], glyphs=False) if rollout.cfg_scale != 1.0 else None
    norms = pipeline.scheduler.gradient_norms(sde_type=rollout.sde_type, eta=rollout.eta)
    update = PolicyUpdate(
        pipeline,
        Guidance(rollout.cfg_scale, negative),
        parameters,
        optimizers,
        anchor,
        equalizer_scales(norms) if config.grpo.use_grad_balancing else torch.ones_like(norms),
        config,
    )
    state = RunState(
        transformer=pipeline.transformer,
        optimizers=optimizers,
        anchor=anchor,
        controller=_build_controller(config) if kl.kl_weight > 0 else None,
        sampler=sampler,
        config_hash=config_hash(config),
        lora=_lora_facts(config),
    )
    return update, state


def _build_controller(config: Config) -> KLController:
    kl = config.kl
    return KLController(
        max_coef=kl.kl_weight,
        min_coef=kl.kl_min_coef,
        warmup_updates=kl.kl_warmup_updates,
        target=kl.kl_target,
        schedule=kl.kl_schedule,
    )


def _lora_facts(config: Config) -> dict | None:
    """Return the arguments of `lora_config`, or None for full fine-tuning."""
    model = config.model
    if not model.use_lora:
        return None
    names = {"rank": model.lora_r, "alpha": model.lora_alpha, "dropout": model.lora_dropout}
    return {**names, "target_modules": list(model.lora_target_modules)}


def _build_validation(
    config: Config, pipeline: HunyuanVideoGRPOPipeline, guidance: Guidance, prompts: list, reward: WeightedReward
) -> Validation | None:
    """Build validation with its own scheduler over the same components; None when there are no prompts for it."""
    settings = config.validation
    if not prompts or not (settings.validation_interval or settings.validate_at_step0):
        return None
    scheduler = FlowMatchDiscreteScheduler(shift=settings.validation_timestep_shift)
    scheduler.set_timesteps(settings.validation_num_inference_steps)
    return Validation(
        pipeline.with_scheduler(scheduler), guidance, prompts[: settings.validation_num_videos], reward, config
    )


def _introduce(console: Console, folder: RunFolder, config: Config, state: RunState) -> None:
    """Say what runs, where, and from which step."""
    parameters = trainable_parameters(state.transformer).values()
    height, width = parse_size(config.rollout.rollout_size)
    console.info(
        f"run folder {folder.path}: {config.rollout.sde_type}, {parameter_count(parameters):,} trained parameters"
        f"{' (LoRA)' if state.lora else ''}, videos {config.rollout.sample_n_frames}x{height}x{width} in "
        f"{config.rollout.grpo_sampling_steps} steps, on {next(iter(parameters)).device}"
    )
    if folder.resume_from:
        console.info(f"resumed from {folder.resume_from} at step {state.step}, round {state.round}")
