"""post_train.py in which one thing goes wrong: `FAULT` names it, `FAULT_AFTER` how many of its calls go well before."""

import errno
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import post_train
from hyvideo.algorithms import grpo, optimizer
from hyvideo.algorithms.grpo import GRPO
from hyvideo.checkpoint import tensors, train_state
from hyvideo.checkpoint.train_state import PendingSave
from hyvideo.distributed.collectives import local_shard
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from hyvideo.training import build

Call = Callable[..., Any]


def fail(error: Exception) -> Call:
    def failing(call: Call, *args: Any, **settings: Any) -> None:
        raise error

    return failing


def lose_the_loss(call: Call, *args: Any, **settings: Any) -> Any:
    loss, clip_fraction = call(*args, **settings)
    return loss * torch.nan, clip_fraction


def overflow_the_gradient(call: Call, parameters: Any) -> None:
    """One element of one gradient is infinite on this rank."""
    parameters = list(parameters)
    call(parameters)
    gradients = [local_shard(p.grad) for p in parameters if p.grad is not None]
    next(gradient for gradient in gradients if gradient.numel()).view(-1)[0] = torch.inf


def lose_a_weight(call: Call, algorithm: GRPO, *args: Any, **settings: Any) -> Any:
    metrics = call(algorithm, *args, **settings)
    weights = [local_shard(p.detach()) for p in algorithm.optimization.parameters.values()]
    next(weight for weight in weights if weight.numel()).view(-1)[0] = torch.nan
    return metrics


def signal_itself(number: signal.Signals) -> Call:
    return lambda call, *args, **settings: (os.kill(os.getpid(), number), call(*args, **settings))[1]


def delay(call: Call, *args: Any) -> Any:
    time.sleep(0.5)
    return call(*args)


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
ONCE: dict[str, tuple[Any, str, Call]] = {
    "the loss is NaN": (grpo, "clipped_policy_loss", lose_the_loss),
    "a gradient is infinite": (optimizer, "average_gradients", overflow_the_gradient),
    "a weight is NaN": (GRPO, "update", lose_a_weight),
    "the encoder raises": (HunyuanVideoGRPOPipeline, "_encode_text", fail(RuntimeError("index out of range"))),
    "the decoder runs out of memory": (HunyuanVideoGRPOPipeline, "decode", fail(OUT_OF_MEMORY)),
    "it is stopped while it loads": (build, "load_pipeline", signal_itself(signal.SIGSTOP)),
    "it is killed while it writes tensors": (tensors.TensorWriter, "write_data", signal_itself(signal.SIGKILL)),
    "it is killed while it reads files back": (tensors, "_record", signal_itself(signal.SIGKILL)),
    "it is killed before the checkpoint is in its place": (PendingSave, "_publish", signal_itself(signal.SIGKILL)),
    "it is killed before latest moves": (train_state, "point", signal_itself(signal.SIGKILL)),
    "a file cannot be read back": (tensors, "_record", fail(OSError(errno.EIO, "Input/output error"))),
}
"""Fault -> whose call, its name, and what takes its place once."""


def inject(name: str, after: int) -> None:
    if name == "the clock jumps":
        true_time = time.time
        time.time = lambda: true_time() + random.choice((-1e6, -100.0, 0.0, 1e6))
    elif name == "the disk is slow":
        true_sync = os.fsync
        os.fsync = lambda file: delay(true_sync, file)
    else:
        owner, attribute, spoiled = ONCE[name]
        call, calls = getattr(owner, attribute), itertools.count()

        def counted(*args: Any, **settings: Any) -> Any:
            return spoiled(call, *args, **settings) if next(calls) == after else call(*args, **settings)

        setattr(owner, attribute, counted)


if __name__ == "__main__":
    inject(os.environ["FAULT"], int(os.environ["FAULT_AFTER"]))
    sys.argv[0] = str(Path(post_train.__file__))
    sys.exit(post_train.main())
