"""Build a training from a configuration: every part from its own room, checks before models.

Every rank builds one. A fault found on one rank stops all, with the same message.
"""

import hashlib
import os
import shlex
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from diffusers import HunyuanVideo15Transformer3DModel
from torch import nn

from hyvideo.algorithms.algorithm import algorithm_class
from hyvideo.algorithms.optimizer import Optimization
from hyvideo.algorithms.policy import Policy, rollout_scheduler
from hyvideo.algorithms.weights_copy import BaseModel, build_ema, copy_policy, starts_at_base
from hyvideo.checkpoint.run_folder import RunFolder, open_run_folder
from hyvideo.checkpoint.train_state import LATEST, point
from hyvideo.config.loading import save_config
from hyvideo.config.schema import Config
from hyvideo.config.settings import deciding_fields, parse_size, settings_of
from hyvideo.data.files import writing
from hyvideo.data.prompts import Prompt, read_prompts
from hyvideo.data.videos import check_images
from hyvideo.distributed.collectives import all_or_none, broadcast_from_main, require_same
from hyvideo.distributed.mesh import Mesh, mesh_of
from hyvideo.models.adapter import configured_adapter, draw_adapter, lora_facts
from hyvideo.models.attention import install_attention, kernel_in_use
from hyvideo.models.loading import load_pipeline
from hyvideo.models.model_folder import check_layout, task_of
from hyvideo.models.parallelize import compile_blocks, prepare_policy, shard_weights, trainable_parameters
from hyvideo.models.reward_models.rewards import WeightedReward, check_rewards, get_reward_fn, loaded_rewards
from hyvideo.models.transformer import video_tokens
from hyvideo.models.weight_files import DTYPES
from hyvideo.observability.console import COMMAND, Console
from hyvideo.observability.metrics import MetricsLog, discard_scores_after
from hyvideo.observability.phase_timer import PhaseTimer, Watchdog
from hyvideo.observability.profiling import Profile, matrix_peak_tflops
from hyvideo.observability.trackers import Trackers, check_trackers
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import Guidance, HunyuanVideoGRPOPipeline, check_task
from hyvideo.pipelines.sampling import truncated_prompts_warning
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from hyvideo.training.checks import check_config, check_validated
from hyvideo.training.collect import Rounds, Validation
from hyvideo.training.guard import ReplayWatch, RewardGuard
from hyvideo.training.run import Journal, Performance, Run
from hyvideo.training.state import CODE, CONTENT, RunState, changed_settings, code_version


def open_run(config: Config, report: Callable[[Path], None] | None = None) -> Run:
    """Check everything that can be checked, then load the models and put the run together.

    With a process group (`distributed.mesh.process_group`) this is one rank of the run, otherwise all of it. The
    main rank calls `report` with the run folder after every save. If a setting, file, weight, folder or checkpoint is
    wrong on any rank, or ranks have different ones, all raise a ValueError, and nothing was written.
    """
    prompts, valid, content, warnings = read_inputs(config)
    # With its index: rewards run in threads, and a new thread's current GPU is the first.
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    mesh = mesh_of(config, device.type)
    folder, timer = open_folder(config, mesh.layout.dp_size, content), PhaseTimer(device)
    with all_or_none():
        reward, judge = _build_rewards(config, device)
        if judge:
            check_validated(config, valid, judge)
        texts = [prompt.text for prompt in prompts]
        not_judged = reward.check_prompts(texts)
        policy = build_policy(config, build_pipeline(config, device, mesh))
    rounds = Rounds(config, prompts, mesh)
    state = _build_state(config, policy, rounds, mesh, timer, content)
    base = None  # the policy as it is before a checkpoint replaces its weights
    if config.rollout.base_interval:
        fresh = starts_at_base(config.model)
        base = BaseModel(policy.transformer) if fresh else copy_policy(policy.transformer, offload=True)
    changed = state.load(folder.resume_from, may_change=config.run.resume_may_change) if folder.resume_from else []
    state.began_at = state.began_at if folder.continues_itself else state.step
    journal = _open_journal(config, folder, policy, state, mesh, timer, report)
    told = journal.console.info
    trained = policy.transformer.num_parameters(only_trainable=True)
    name = torch.cuda.get_device_name() if device.type == "cuda" else "CPU"
    ranks = ""
    if (world_size := mesh.layout.world_size) > 1:
        ranks = f", {world_size} ranks (dp {mesh.layout.dp_size} x sp {mesh.layout.sp_size})"
    height, width = policy.size
    names = [config.grpo.algorithm] if config.grpo.algorithm != "grpo" else []
    names += [config.rollout.sde_type] if state.algorithm.needs == "transitions" else []
    method = " with ".join(names)
    told(
        f"run folder {folder.path}: {method}, {trained:,} trained parameters{' (LoRA)' if state.lora else ''}, videos "
        f"{policy.num_frames}x{height}x{width} in {config.rollout.grpo_sampling_steps} steps, on {name}{ranks}; {CODE} "
        f"is {state.noted[CODE]}"
    )
    program, *rest = sys.orig_argv
    told(COMMAND + shlex.join([Path(program).name, *rest]))
    if folder.resume_from:
        told(f"resumed from {folder.resume_from} at step {state.step}, round {rounds.sampler.round}")
    if device.type == "cuda":
        network = policy.transformer.config
        heads = network.num_attention_heads // mesh.token_ranks
        tokens = video_tokens(network, policy.pipeline.latent_shape(policy.num_frames, policy.size))
        shape = (1, tokens, heads, network.attention_head_dim)
        told(kernel_in_use(shape, policy.pipeline.autocast_dtype, device))
    for change in changed:
        told(f"changed: {change}")
    told(f"reward {reward.describe()}")
    if judge:
        told(f"judge {judge.describe()}")
    if mesh.is_main:
        cut = truncated_prompts_warning(policy.pipeline, [*prompts, *valid])
        for warning in filter(None, [*warnings, cut, not_judged]):
            journal.console.warning(warning)
    validation, settings = None, config.validation
    if valid and settings.is_on:
        scheduler = FlowMatchDiscreteScheduler(shift=settings.validation_timestep_shift)
        scheduler.set_timesteps(settings.validation_num_inference_steps)
        size = parse_size(settings.validation_fixed_size)
        validated = policy.with_schedule(scheduler, num_frames=settings.validate_video_length, size=size)
        validation = Validation(validated, valid[: settings.validation_num_videos], reward, config, mesh, judge)
    return Run(
        config=config,
        policy=policy,
        algorithm=state.algorithm,
        reward=reward,
        rounds=rounds,
        folder=folder,
        mesh=mesh,
        state=state,
        validation=validation,
        journal=journal,
        timer=timer,
        base=base,
    )


def _build_rewards(config: Config, device: torch.device) -> tuple[WeightedReward, WeightedReward | None]:
    """Build the reward and a guarded run's judge, once both are checked."""
    where = {
        "model_root": config.model.pretrained_model_root,
        "video_fps": config.rollout.video_fps,
        "prompt_csvs": [*config.data.train_video_csv, *config.data.valid_video_csv],
    }
    check_rewards(config.reward, **where)
    how = {
        "device": device,
        "offload": "reward" in config.parallel.offload,
        "crf": 25 if "crf_25" in config.rollout.published else 16,
        **where,
    }
    reward, guarded = get_reward_fn(config.reward, **how), config.reward.reward_guard is not None
    return reward, get_reward_fn(config.reward, **how, setting="reward_guard") if guarded else None


def check_weights(config: Config) -> None:
    """Refuse a model folder without its networks, or without VideoReward when the reward or judge is loaded there.

    The ValueError names all that is missing, with the commands that fetch it.
    """
    there = any(
        choice.name == "videoalign_local" and choice.options.get("checkpoint") is None
        for choice in loaded_rewards(config.reward)
    )
    check_layout(config.model.pretrained_model_root, config.model.pretrained_transformer_version, with_reward=there)


def read_inputs(config: Config) -> tuple[list[Prompt], list[Prompt], dict[str, str], list[str]]:
    """Check the configuration and the model's files, and read the prompts; errors are those of `open_run`.

    Return those for training, those for validation, the hash of each prompt file as it was read (it may change while
    the models are loaded), and warnings of settings that are valid but hardly meant.
    """
    root, version = config.model.pretrained_model_root, config.model.pretrained_transformer_version
    rank, world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    with all_or_none():
        check_weights(config)
        warnings = check_config(config, world_size)
        algorithm_class(config.grpo.algorithm)
        check_trackers(config.run.trackers)
        root_of_images = config.data.image_root
        prompts = read_prompts(config.data.train_video_csv, root_of_images)
        valid = read_prompts(config.data.valid_video_csv, root_of_images) if config.data.valid_video_csv else []
        files = [*config.data.train_video_csv, *config.data.valid_video_csv]
        content = {f"{CONTENT} {file}": hashlib.sha256(Path(file).read_bytes()).hexdigest()[:16] for file in files}
        task = task_of(root, version)
        for rows in (prompts, valid):
            check_task(rows, task)
            check_images(rows[rank::world_size])  # decoding a million takes hours
        check_validated(config, valid)
    require_same(settings_of(config) | content)
    return prompts, valid, content, warnings


def open_folder(config: Config, dp_size: int, content: Mapping[str, str]) -> RunFolder:
    """Open the run's folder, and compare the settings with those of the checkpoint to resume; no model is loaded."""
    folder = broadcast_from_main(lambda: open_run_folder(config.run))
    with all_or_none():
        if folder.resume_from:
            settings = _deciding_settings(config, dp_size, content)
            changed_settings(folder.resume_from, settings, config.run.resume_may_change)
    return folder


def _deciding_settings(config: Config, dp_size: int, content: Mapping[str, str]) -> dict[str, object]:
    """Return the settings that decide the result, and the content of the prompt files."""
    trained = [f"{CONTENT} {file}" for file in config.data.train_video_csv]
    return deciding_fields(config, dp_size) | {name: content[name] for name in trained}


def build_pipeline(config: Config, device: torch.device, mesh: Mesh) -> HunyuanVideoGRPOPipeline:
    """Load the models of `config` onto `device`, the transformer ready for training, the rollout's steps set.

    The transformer's weights are sharded as `mesh` and `config.parallel` say, and each rank reads only its own shards;
    encoders and VAE are whole everywhere, the encoders in host memory if `offload` says so.
    """
    model = config.model
    on_gpu = device.type != "cpu"
    torch.manual_seed(config.run.seed)  # for a reward of the user's: all else has seeds of its own
    pipeline = load_pipeline(
        model.pretrained_model_root,
        model.pretrained_transformer_version,
        pipeline_class=HunyuanVideoGRPOPipeline,
        scheduler=rollout_scheduler(config.rollout),
        transformer_dtype=DTYPES[model.master_weight_type] if on_gpu else torch.float32,
        encoder_dtype=torch.float16 if on_gpu else torch.float32,
        device=device,
        encoders_on=None if "encoders" in config.parallel.offload else device,
        prepare=partial(make_policy_of, config=config, mesh=mesh),
    )
    pipeline.autocast_dtype = compute_dtype(config, device.type)
    pipeline.encoder_offload = "encoders" in config.parallel.offload
    resting = pipeline.encoders if pipeline.encoder_offload else []
    for component in pipeline.components.values():
        placed = component in resting or (component is pipeline.transformer and is_sharded(config, mesh))
        if isinstance(component, nn.Module) and not placed:
            component.to(device)
    return pipeline


def compute_dtype(config: Config, device_type: str) -> torch.dtype:
    """Return the precision of the transformer's matrix products."""
    return torch.float32 if device_type == "cpu" else DTYPES[config.model.dtype]


def is_sharded(config: Config, mesh: Mesh) -> bool:
    """Whether the transformer's weights are split among ranks."""
    return mesh.weights is not None and config.parallel.enable_fsdp


def make_policy_of(
    transformer: HunyuanVideo15Transformer3DModel, config: Config, mesh: Mesh, *, draw: bool = True
) -> None:
    """Make a transformer without memory for its weights the policy of a run over `mesh`, in place.

    Sharded weights get memory on the mesh's device, to be filled; all others stay on the meta device. With `draw` a new
    adapter gets its first values.
    """
    model, parallel, algorithm = config.model, config.parallel, algorithm_class(config.grpo.algorithm)
    prepare_policy(
        install_attention(transformer, mesh.sp_group, mesh.guidance_group),
        gradient_checkpointing=parallel.activation_checkpointing != "none",
        recompute=parallel.activation_checkpointing,
        lora=configured_adapter(model),
        pretrained_lora_path=model.pretrained_lora_path,
    )
    if draw:
        draw_adapter(transformer, config.run.seed)
    if parallel.enable_compile:
        compile_blocks(transformer)
    if is_sharded(config, mesh):
        shard_weights(
            transformer,
            mesh.weights,
            compute_dtype=compute_dtype(config, mesh.weights.device_type),
            reshard_after_forward=parallel.reshard_after_forward,
            cpu_offload="weights" in parallel.offload,
            whole=trainable_parameters(transformer).values() if algorithm.whole_weights else (),
        )


def build_policy(config: Config, pipeline: HunyuanVideoGRPOPipeline) -> Policy:
    """Bind the pipeline to the rollout's guidance, sampler and video shape."""
    rollout = config.rollout
    negative = pipeline.encode([rollout.negative_prompt], glyphs=False) if rollout.is_guided else None
    return Policy(
        pipeline,
        Guidance(rollout.cfg_scale, negative),
        sde_type=rollout.sde_type,
        eta=rollout.eta,
        num_frames=rollout.sample_n_frames,
        size=parse_size(rollout.rollout_size),
        videos_at_once=rollout.rollout_micro_batch_size,
    )


def _build_state(
    config: Config, policy: Policy, rounds: Rounds, mesh: Mesh, timer: PhaseTimer, content: Mapping[str, str]
) -> RunState:
    """Build the algorithm and its optimizers, and gather what a checkpoint holds of them."""
    reward, settings = config.reward, _deciding_settings(config, mesh.layout.dp_size, content)
    optimization = Optimization(
        trainable_parameters(policy.transformer),
        config.optimizer,
        sp_size=mesh.layout.sp_size,
        max_skipped=config.run.max_skipped_updates,
        ema=build_ema(config, policy.transformer),
        always_steps="muon_momentum" in config.rollout.published,
    )
    return RunState(
        transformer=policy.transformer,
        optimization=optimization,
        algorithm=algorithm_class(config.grpo.algorithm)(policy, optimization, config, timer),
        sampler=rounds.sampler,
        settings=settings,
        noted={CODE: broadcast_from_main(code_version)}
        | {name: content[name] for name in content if name not in settings},
        lora=lora_facts(config.model),
        collective_timeout=config.parallel.collective_timeout,
        guard=None if reward.reward_guard is None else RewardGuard(reward.reward_guard_action),
    )


def _open_journal(
    config: Config,
    folder: RunFolder,
    policy: Policy,
    state: RunState,
    mesh: Mesh,
    timer: PhaseTimer,
    report: Callable[[Path], None] | None,
) -> Journal:
    """Open console and metrics, and build what reads along."""
    with all_or_none():
        console = Console(folder.path, rank=mesh.rank, log_interval=config.run.log_interval)
        metrics = None
        if mesh.is_main:
            trackers = Trackers(
                config.run.trackers,
                folder.path,
                run_name=config.run.run_name or folder.path.name,
                settings={name: str(value) for name, value in settings_of(config).items()},
                warn=console.warning,
            )
            metrics = MetricsLog(folder.path, trackers)  # claims the folder
            folder.require_unchanged(config.run)
            if folder.continues_itself:
                point(LATEST, folder.resume_from)  # the rows after it go, and so must the way to their checkpoints
            for told in metrics.truncate_after(state.step, state.began_at):
                console.warning(told)
            folder.discard_after(state.step if folder.resume_from else -1)
            discard_scores_after(folder.rollouts, state.step)
            trackers.start(state.step + 1)
            with writing(folder.path / "config.yaml"):
                save_config(config, folder.path / "config.yaml")
    if mesh.layout.world_size > 1:
        os.environ.setdefault("TORCH_FR_DUMP_TEMP_FILE", f"{folder.path.resolve()}/nccl_trace_rank_")  # read at a dump
        blocks, pipeline = policy.transformer.transformer_blocks, policy.pipeline
        timer.follow(blocks[len(blocks) // 2], times=len(blocks))
        for module in (*pipeline.encoders, pipeline.vae.decoder):
            timer.follow(module)
    profile = None
    if config.run.profile:
        profile = Profile(folder.path / "profile", rank=mesh.rank, timer=timer, transformer=policy.transformer)
    peak = config.run.peak_tflops or matrix_peak_tflops(timer.device, policy.pipeline.autocast_dtype)
    return Journal(
        folder.path,
        console,
        metrics,
        Performance(policy, config, mesh, peak_tflops=peak, updates_per_round=state.algorithm.updates_per_round),
        profile,
        Watchdog(timer, rank=mesh.rank, seconds=config.parallel.collective_timeout / 2),
        ReplayWatch(config),
        report=report,
    )
