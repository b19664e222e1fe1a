"""One whole round of a run, rehearsed as one rank of many on a GPU that does not exist: the real code, the real sizes.

What is rehearsed: building and sharding the policy, encoding, rollout, decoding, the anchor's pass, updates, the
anchor's refresh and collecting a checkpoint. What is not: reward networks (a stand-in scores the videos), reading
weights, and what compiled blocks become: they are called as they are compiled, but PyTorch traces nothing on a device
like this. What other ranks would say is what this one says.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from diffusers import ClassifierFreeGuidance
from PIL import Image
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    Qwen2_5_VLTextModel,
    SiglipImageProcessorPil,
    SiglipVisionModel,
    T5EncoderModel,
)

from hyvideo.algorithms.algorithm import algorithm_class
from hyvideo.algorithms.optimizer import Optimization
from hyvideo.algorithms.policy import rollout_scheduler
from hyvideo.algorithms.weights_copy import build_ema
from hyvideo.config.schema import Config
from hyvideo.data.prompts import Prompt
from hyvideo.distributed.layout import layout_of
from hyvideo.distributed.mesh import mesh_of
from hyvideo.models.parallelize import trainable_parameters
from hyvideo.models.reward_models.rewards import Scores
from hyvideo.observability.phase_timer import PhaseTimer
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from hyvideo.planning.memory import DEPTHS
from hyvideo.planning.networks import Networks, encoder_configs, make_vae
from hyvideo.planning.own_process import in_own_process
from hyvideo.planning.pretend_backend import NAME
from hyvideo.planning.pretend_device import PretendDevice
from hyvideo.planning.simulation import fake_ranks, give_memory, policy_network
from hyvideo.training.build import build_policy, compute_dtype
from hyvideo.training.collect import Rounds, collect
from hyvideo.training.run import garbage_collected_on_request
from hyvideo.training.state import RunState

TOKENIZERS = Path(__file__).parents[2] / "assets" / "tiny"
"""The bundled model's tokenizers read prompts where the configured folder has none."""

PHASES = ("build", "rollout", "reward", "anchor", "update", "between", "refresh", "checkpoint")
"""In order; `between` is what an algorithm does outside the phases that are timed."""

HOT = ("rollout", "anchor", "update")
"""Phases in which a value read back holds up the device again and again."""

ALLOWED = {
    ("hunyuan_video_grpo_pipeline.py", "decode"): "the videos go to the host, where rewards read them",
    ("algorithm.py", "over_micro_batches"): "the numbers of an update, read once when all its micro-batches are done",
    ("hunyuan_video_grpo_pipeline.py", "encode_images"): "a first frame goes to the device, once per prompt",
    ("hunyuan_video_grpo_pipeline.py", "_encode_frame"): "a first frame goes to the device, once per prompt",
    ("temporary_placement.py", "temporarily_on"): "encoders that rest in host memory visit the device, once per round",
    ("weights_copy.py", "refresh"): "an average that rests in host memory follows every update (`offload ema`)",
    ("optimizer.py", "step"): "the gradient's norm, once per update: an update that is not finite is not made",
    ("step_gradients.py", "pop"): "the gradient of each denoising step, once per update",
}
"""Where the host may wait for the device, by file and function, and why; everywhere else it is a surprise."""

OFFLOADED = {"the backward pass": "from the second micro-batch on, FSDP adds gradients in host memory (`offload`)"}
"""Where it may also wait if weights rest in host memory."""


@dataclass(frozen=True)
class Rehearsal:
    """What one rank did in one round.

    Attributes:
        num_layers: transformer blocks that were rehearsed.
        extrapolated_to: blocks that the numbers stand for.
        peaks: most bytes on the device by phase.
        flops: operations by phase.
        sent: bytes that this rank sends, by (phase, kind of collective).
        kernels: calls of attention kernels, by (phase, name).
        reads: values read back at allowed places, by (phase, place).
        uploads: copies to the device, also of host indices, for which the host waits, by (phase, place).
        surprises: what a GPU would punish, in words; empty when all is well.
    """

    num_layers: int
    extrapolated_to: int
    peaks: Mapping[str, float]
    flops: Mapping[str, float]
    sent: Mapping[tuple[str, str], float]
    kernels: Mapping[tuple[str, str], float]
    reads: Mapping[tuple[str, str], float]
    uploads: Mapping[tuple[str, str], float]
    surprises: tuple[str, ...]


class _StandIn:
    """Scores videos by a seeded draw."""

    asynchronous = False
    max_failed = 0.0

    def __call__(self, videos: Tensor, prompts: Sequence[str]) -> Scores:
        """Return a score of every video."""
        drawn = torch.randn(len(prompts), generator=torch.Generator().manual_seed(len(prompts)))
        return Scores({"VQ": drawn}, drawn, {"VQ": 1.0})


def rehearse(
    config: Config, networks: Networks, *, world_size: int, num_text: int = 300, num_layers: int | None = None
) -> Rehearsal:
    """Rehearse one round as the first of `world_size` ranks that decodes as many videos as any.

    Prompts have `num_text` tokens, and the network `num_layers` blocks; None: all of them.

    Raises:
        ValueError: the ranks do not divide as `config.parallel` says.
    """
    sizes = {"world_size": world_size, "num_text": num_text, "num_layers": num_layers}
    return in_own_process(_rehearse, config, networks, **sizes)


def _rehearse(
    config: Config, networks: Networks, *, world_size: int, num_text: int, num_layers: int | None
) -> Rehearsal:
    network = dict(networks.transformer)
    network["num_layers"] = min(num_layers or network["num_layers"], network["num_layers"])
    layout = layout_of(config, world_size)
    decoded = [len(layout.share_to_score(layout.num_own_videos, rank)) for rank in range(config.parallel.sp_size)]
    with ExitStack() as stack:
        stack.enter_context(fake_ranks(world_size, decoded.index(max(decoded))))
        stack.enter_context(told_by_this_rank())
        device = PretendDevice()
        mesh = mesh_of(config, NAME)
        stack.enter_context(device)
        stack.enter_context(garbage_collected_on_request())
        timer = PhaseTimer(device.device)
        timer.around = device.during
        folder = Path(stack.enter_context(TemporaryDirectory()))
        prompts = _prompts(networks, layout.num_groups, num_text, folder)
        policy = build_policy(config, _pipeline(config, networks, network, mesh, device))
        optimization = Optimization(
            trainable_parameters(policy.transformer),
            config.optimizer,
            sp_size=mesh.sp_size,
            ema=build_ema(config, policy.transformer),
        )
        algorithm = algorithm_class(config.grpo.algorithm)(policy, optimization, config, timer)
        rounds = Rounds(config, prompts, mesh)
        _make_optimizer_states(optimization, device)
        resting, device.phase = device.current, "between"
        anchor = getattr(algorithm, "anchor", None)
        if anchor:
            anchor.policy_moved()  # as in all rounds but those after a refresh
        with suppress(DynamicOutputShapeException):  # noted; what comes after it cannot be rehearsed
            trajectory = collect(policy, algorithm, _StandIn(), rounds.next())
            for _ in algorithm.updates(trajectory):
                pass
            if anchor and config.kl.moves_anchor:
                with device.during("refresh"):
                    anchor.refresh()
            with device.during("checkpoint"):
                RunState(policy.transformer, optimization, algorithm, rounds.sampler, {}, {}, None).tensors()
        whole = 2 * sum(parameter.numel() for parameter in policy.transformer.parameters())
        shards = layout.num_shards if config.parallel.enable_fsdp and mesh.weights is not None else 1
        allowed = OFFLOADED if "weights" in config.parallel.offload else {}
        reads = {key: count for key, count in device.reads.items() if key[1] in allowed or reason_to_wait(key[1])}
        surprises = _surprises(device, reads, whole, shards)
    return Rehearsal(
        num_layers=network["num_layers"],
        extrapolated_to=network["num_layers"],
        peaks=dict(device.peaks) | {"resting": resting},
        flops=dict(device.flops),
        sent=dict(device.sent),
        kernels=dict(device.kernels),
        reads=reads,
        uploads={key: count for key, count in device.uploads.items() if key[0] != "build"},
        surprises=surprises,
    )


def rehearse_extrapolated(config: Config, networks: Networks, **sizes: int) -> Rehearsal:
    """Rehearse two depths and extrapolate to the network's: every block but the first and the last does the same."""
    layers = networks.transformer["num_layers"]
    if layers <= max(DEPTHS):
        return rehearse(config, networks, **sizes)
    few, more = (rehearse(config, networks, num_layers=depth, **sizes) for depth in DEPTHS)
    share = (layers - DEPTHS[0]) / (DEPTHS[1] - DEPTHS[0])

    def on_line(name: str) -> dict[Any, float]:
        """Extrapolate one kind of numbers, key by key."""
        first, second = Counter(getattr(few, name)), Counter(getattr(more, name))
        return {key: first[key] + share * (second[key] - first[key]) for key in second}

    numbers = {name: on_line(name) for name in ("peaks", "flops", "sent", "kernels", "reads", "uploads")}
    surprises = tuple(dict.fromkeys(few.surprises + more.surprises))
    return replace(more, extrapolated_to=layers, surprises=surprises, **numbers)


def _make_optimizer_states(optimization: Optimization, device: PretendDevice) -> None:
    """Give the optimizers the states that they have in all rounds but the first, by a step that is not counted."""
    with device.during("states"):
        for parameter in optimization.parameters.values():
            parameter.grad = torch.zeros_like(parameter)
        for optimizer in optimization.optimizers:
            optimizer.step()
            optimizer.zero_grad()
    device.forget("states")


@contextmanager
def told_by_this_rank() -> Iterator[None]:
    """Answer every exchange of Python objects between ranks with this rank's own value."""

    def gather(values: list, value: object, *args: object) -> None:
        """Fill the list with this rank's value."""
        values[:] = [value] * len(values)

    with patch.object(dist, "all_gather_object", gather), patch.object(dist, "broadcast_object_list", lambda *_: None):
        yield


def _prompts(networks: Networks, count: int, num_text: int, folder: Path) -> list[Prompt]:
    """Make prompts of `num_text` tokens, each its own; with an image for image-to-video."""
    others = 6  # tokens: its number, and the end of the user's turn
    image = None
    if networks.transformer["task_type"] == "i2v":
        image = str(folder / "first.png")
        Image.new("RGB", (640, 360)).save(image)
    return [Prompt(f"{number}" + " a" * (num_text - others), number, None, image) for number in range(count)]


def _pipeline(
    config: Config, networks: Networks, network: Mapping[str, Any], mesh: Any, device: PretendDevice
) -> HunyuanVideoGRPOPipeline:
    """Build the pipeline of a run without reading weights."""
    configs = encoder_configs(Path(config.model.pretrained_model_root), networks.transformer["task_type"])
    with torch.device("meta"):
        vae = make_vae(networks.vae)
        text, glyph, vision = (
            None if each is None else kind._from_config(each, dtype=dtype).eval().requires_grad_(False)
            for kind, each, dtype in (
                (Qwen2_5_VLTextModel, configs.text, torch.float16),
                (T5EncoderModel, configs.glyph, torch.float32),
                (SiglipVisionModel, configs.vision, torch.float16),
            )
        )
    give_memory(vae)
    for encoder in filter(None, (text, glyph, vision)):
        give_memory(encoder, "cpu" if "encoders" in config.parallel.offload else NAME)
    reads_images = None
    if configs.vision is not None:
        reads_images = SiglipImageProcessorPil(size=dict.fromkeys(("height", "width"), configs.vision.image_size))
    pipeline = HunyuanVideoGRPOPipeline(
        text_encoder=text,
        tokenizer=AutoTokenizer.from_pretrained(TOKENIZERS / "tokenizer", trust_remote_code=False),
        transformer=policy_network(config, network, mesh),
        vae=vae,
        scheduler=rollout_scheduler(config.rollout),
        text_encoder_2=glyph,
        tokenizer_2=ByT5Tokenizer.from_pretrained(TOKENIZERS / "tokenizer_2", local_files_only=True),
        guider=ClassifierFreeGuidance(),
        image_encoder=vision,
        feature_extractor=reads_images,
    )
    pipeline.autocast_dtype = compute_dtype(config, NAME)
    pipeline.encoder_offload = "encoders" in config.parallel.offload
    return pipeline


def reason_to_wait(place: str) -> str | None:
    """Return why the host may wait for the device at a place; None where it may not."""
    reasons = (why for (file, name), why in ALLOWED.items() if f"/{file}:" in place and place.endswith(f" {name}"))
    return next(reasons, None)


def _surprises(device: PretendDevice, allowed: Collection[tuple[str, str]], whole: int, shards: int) -> tuple[str, ...]:
    said = [
        f"{phase}: host and device are mixed by {what} ({count} times)" for (phase, what), count in device.mixes.items()
    ]
    said += [f"{phase}: {what} ({count} times)" for (phase, what), count in device.faults.items()]
    said += [
        f"{phase}: a value is read back from the device in {place} ({count} times)"
        for (phase, place), count in device.reads.items()
        if phase in HOT and (phase, place) not in allowed
    ]
    said += [
        f"{phase}: the host waits for the device to copy memory that is not pinned in {place} ({count} times)"
        for (phase, place), count in device.waits.items()
        if phase in HOT and not reason_to_wait(place)
    ]
    if shards > 1 and device.most_gathered > 0.9 * whole:
        said.append(
            f"weights of {device.most_gathered / 2**30:.1f} GiB are gathered at once, which is nearly the whole model"
        )
    return tuple(said)
