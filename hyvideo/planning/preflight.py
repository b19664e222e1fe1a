"""What `post_train.py --dry_run` checks on the ranks of a run before it is started; no run folder is touched."""

import os
import platform
import shutil
import tempfile
import time
from pathlib import Path

import torch
import torch.distributed as dist

from hyvideo.checkpoint.run_folder import RunFolder
from hyvideo.checkpoint.train_state import checkpoints_of
from hyvideo.config.schema import Config, RunConfig
from hyvideo.data.files import nearest_existing
from hyvideo.distributed.collectives import all_or_none, broadcast_from_main, require_same
from hyvideo.distributed.gpus import this_gpu
from hyvideo.distributed.mesh import layout_of
from hyvideo.models.loading import open_transformer, open_vae
from hyvideo.models.reward_models.rewards import check_rewards
from hyvideo.models.weight_files import check_fit
from hyvideo.planning.assumptions import Assumptions
from hyvideo.planning.plan import GIB, Plan, make_plan, misfit, plan_table
from hyvideo.training.build import open_folder, read_inputs
from hyvideo.training.state import CODE, code_hash

SEEN_WITHIN = 10.0
"""Seconds in which a file that one rank wrote must be seen by all."""


def preflight(config: Config) -> str:
    """Check what a run needs, on all of its ranks; return the plan as a table, and what was checked.

    If something is wrong on any rank, all raise a ValueError.
    """
    started = time.monotonic()
    _, _, content, warnings = read_inputs(config)
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    require_same(
        {
            CODE: code_hash(),
            "the version of Python": platform.python_version(),
            "the version of PyTorch": torch.__version__,
            "the GPU": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        }
    )
    with all_or_none():
        root, version = config.model.pretrained_model_root, config.model.pretrained_transformer_version
        for network, source, naming in (open_transformer(root, version), open_vae(root)):
            check_fit(network, source, naming)  # shapes alone: no weight is read
        csvs = [*config.data.train_video_csv, *config.data.valid_video_csv]
        check_rewards(config.reward, root, config.rollout.video_fps, csvs)
    folder = open_folder(config, layout_of(config, world_size).dp_size, content)
    _check_folder(folder.path)
    if dist.is_initialized():  # on the device that they will train on, the ranks must reach each other
        dist.all_reduce(torch.ones(1, device="cuda" if torch.cuda.is_available() else "cpu"))
    assumptions = Assumptions(gpus_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", str(world_size))))
    plan = broadcast_from_main(
        lambda: make_plan(config, world_size=world_size, gpu=this_gpu(), assumptions=assumptions)
    )
    if not plan.fits:
        raise ValueError(f"{misfit(plan)} `python -m scripts.plan ... --search` looks for settings that fit.")
    keeps_best = config.reward.reward_guard is not None
    broadcast_from_main(lambda: check_space(folder, config.run, plan.checkpoint_bytes, keeps_best=keeps_best))
    with all_or_none():
        _check_memory(plan)
    warned = "".join(f"WARNING: {warning}\n" for warning in warnings)
    return (
        f"{plan_table(plan)}\n{warned}"
        f"dry run: {plan.world_size} rank(s), settings, prompts, weights, run folder and free "
        f"space are in order ({time.monotonic() - started:.0f} s); no run folder was touched"
    )


def _check_folder(path: Path) -> None:
    """Check that every rank can write where the run folder will be, and that it is one folder for all."""
    parent = nearest_existing(path)
    with all_or_none(), tempfile.TemporaryFile(dir=parent):
        pass
    marker = broadcast_from_main(lambda: tempfile.mkstemp(dir=parent, prefix=".dry_run-")[1])
    deadline = time.monotonic() + SEEN_WITHIN
    try:
        with all_or_none():
            while not Path(marker).exists():
                if time.monotonic() > deadline:
                    raise ValueError(
                        f"output_dir: '{parent}' on {platform.node()} is not the folder that the first rank has there. "
                        "Choose one on storage that all machines share: checkpoints are written by all ranks together."
                    )
                time.sleep(0.1)
    finally:
        broadcast_from_main(lambda: os.unlink(marker))


def check_space(folder: RunFolder, run: RunConfig, checkpoint_bytes: int, *, keeps_best: bool = False) -> None:
    """Check that there is room for the checkpoints that the run will keep at one time.

    `keeps_best` says that the best one by the judge of a reward guard is kept besides.
    """
    parent = nearest_existing(folder.path)
    free = shutil.disk_usage(parent).free
    needed = max(1, run.most_checkpoints(best=keeps_best) - len(checkpoints_of(folder.checkpoints)))
    if needed * checkpoint_bytes > free:
        raise ValueError(
            f"output_dir: '{parent}' has {free / 1e9:.1f} GB free, enough for {free // max(checkpoint_bytes, 1)} more "
            f"checkpoint(s) of {checkpoint_bytes / 1e9:.1f} GB; the run will write {needed} more before it deletes one "
            f"(keep_last {run.keep_last}, keep_every {run.keep_every}, save_interval {run.save_interval}). Free space, "
            "choose another folder, or lower max_steps, keep_last or raise keep_every."
        )


def _check_memory(plan: Plan) -> None:
    """Check that this machine, and this rank's GPU, has as much memory free as its processes take there."""
    has = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / GIB
    processes = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    elsewhere = 0 if torch.cuda.is_available() else plan.rehearsal.peak  # without a GPU everything is on the host
    for when, each in (("load", plan.host.loading), ("train", plan.host.training + elsewhere)):
        if (needed := each * processes / GIB) > has:
            raise ValueError(
                f"{platform.node()} has {has:.0f} GiB of host memory, but {processes} process(es) need {needed:.0f} "
                f"while they {when}, {each / GIB:.1f} each: start fewer on it, or turn off what keeps more here: "
                "offload, async_save."
            )
    if torch.cuda.is_available() and (free := torch.cuda.mem_get_info()[0]) < plan.rehearsal.peak:
        raise ValueError(
            f"GPU {torch.cuda.current_device()} of {platform.node()} has {free / GIB:.1f} GiB free, but the run needs "
            f"{plan.rehearsal.peak / GIB:.1f}: stop whatever else runs on it (nvidia-smi lists it)."
        )
