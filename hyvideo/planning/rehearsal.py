"""A run's rounds, rehearsed as one rank of many on a GPU that does not exist: the real code, the real sizes.

What is rehearsed: building and sharding the policy, a validation, encoding, rollout, decoding, the anchor's pass,
updates, the anchor's refresh and collecting a checkpoint. What is not: reward networks (a stand-in takes their memory),
reading weights, and what compiled blocks become: they are called as they are compiled, but PyTorch traces nothing on a
device like this. What other ranks would say is what this one says.

Two depths of the transformer and two numbers of denoising steps are rehearsed. All others lie on a line with them, as
every block but the first and the last does the same, and so does every step.
"""

import ast
import gc
import hashlib
import json
import math
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from importlib.metadata import version
from itertools import combinations, product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from diffusers import ClassifierFreeGuidance, HunyuanVideo15Transformer3DModel
from diffusers.models.autoencoders.autoencoder_kl_hunyuanvideo15 import HunyuanVideo15Decoder3D
from PIL import Image
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException
from transformers import (
    AutoTokenizer,
    ByT5Tokenizer,
    Qwen2_5_VLTextModel,
    SiglipImageProcessorPil,
    SiglipVisionModel,
    T5EncoderModel,
)
from transformers.modeling_utils import local_torch_dtype
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLDecoderLayer

from hyvideo.algorithms.algorithm import algorithm_class
from hyvideo.algorithms.optimizer import Optimization
from hyvideo.algorithms.policy import Policy, rollout_scheduler
from hyvideo.algorithms.weights_copy import build_ema
from hyvideo.config.schema import Config, RunConfig
from hyvideo.config.settings import parse_size
from hyvideo.data.files import replacing
from hyvideo.data.prompts import Prompt
from hyvideo.distributed.mesh import Mesh, layout_of, mesh_of
from hyvideo.models.adapter import without_diffusers_logs
from hyvideo.models.parallelize import trainable_parameters
from hyvideo.models.reward_models.rewards import Scores, WeightedReward
from hyvideo.observability.phase_timer import PhaseTimer
from hyvideo.pipelines.hunyuan_video_grpo_pipeline import HunyuanVideoGRPOPipeline
from hyvideo.pipelines.sampling import sampled
from hyvideo.planning.networks import Networks, encoder_configs, make_vae
from hyvideo.planning.own_process import in_own_processes
from hyvideo.planning.pretend_device import NAME, PretendDevice
from hyvideo.schedulers.scheduling_flow_match_discrete import FlowMatchDiscreteScheduler
from hyvideo.training.build import DTYPES, build_policy, compute_dtype, is_sharded, make_policy_of
from hyvideo.training.collect import Rounds, collect
from hyvideo.training.run import garbage_collected_on_request
from hyvideo.training.state import RunState, code_hash

TOKENIZERS = Path(__file__).parents[2] / "assets" / "tiny"
"""The bundled model's tokenizers read prompts where the configured folder has none."""

LIBRARIES = ("torch", "diffusers", "transformers", "peft")
"""Those that decide what a rehearsal finds."""

DEPTHS = (4, 5)
"""Transformer blocks that are rehearsed of a deeper network. With fewer than four, no block has on both sides all those
whose weights are gathered and gradients reduced during its own pass."""

PHASES = ("build", "validation", "rollout", "reward", "anchor", "update", "between", "refresh", "checkpoint")
"""In order; `between` is what an algorithm does outside the phases that are timed."""

HOT = ("rollout", "anchor", "update")
"""Phases in which a value read back holds up the device again and again."""

REWARD_ACTIVATIONS = 100 * 2**20
"""Bytes for each video scored together: three tensors of VideoAlign's widest layer (8,960) over 1,800 tokens, bf16."""

BACKWARD = "the backward pass"
"""Where the host may also wait if weights rest in host memory: FSDP adds gradients there (`--offload weights`)."""

Numbers = Counter[tuple[str, ...]]
"""What was counted: (what, phase or part of one, more) -> number. A part of a phase is written `rollout/decode`."""


@dataclass(frozen=True)
class Rehearsal:
    """What one rank does in one round, and in one validation, which is no part of a round.

    Attributes:
        depths: transformer blocks that were rehearsed.
        steps: denoising steps that were rehearsed.
        resident: bytes on the device that stay there, by what they are.
        peaks: most bytes on the device by phase.
        flops: operations by phase.
        sent: bytes that this rank sends, by (phase, kind of collective, `weights`, `copies` of them or `tokens`).
        kernels: calls of attention kernels, by (phase, name).
        reads: values read back where that is allowed, by (phase, reason).
        uploads: copies to the device, also of host indices, for which the host waits, by (phase, place or reason).
        pinned: copies from pinned memory, for which it does not wait, likewise.
        sizes: bytes of whole things: `checkpoint`, `weights`, `trained` weights, `encoders`.
        surprises: what a GPU would punish, in words; empty when all is well.
    """

    depths: tuple[int, ...]
    steps: tuple[int, ...]
    resident: Mapping[str, float]
    peaks: Mapping[str, float]
    flops: Mapping[str, float]
    sent: Mapping[tuple[str, str, str], float]
    kernels: Mapping[tuple[str, str], float]
    reads: Mapping[tuple[str, str], float]
    uploads: Mapping[tuple[str, str], float]
    pinned: Mapping[tuple[str, str], float]
    sizes: Mapping[str, float]
    surprises: tuple[str, ...]

    @property
    def peak(self) -> float:
        """The most bytes of all phases."""
        return max(self.peaks.values())

    def as_json(self) -> dict[str, Any]:
        """Return all numbers, with names joined by spaces."""
        return {
            name: {key if isinstance(key, str) else " ".join(key): number for key, number in value.items()}
            if isinstance(value, dict)
            else value
            for name, value in vars(self).items()
        }

    def sent_in(self, phase: str, whose: str = "") -> float:
        """Return the bytes sent in a phase, of `weights`, `copies` or `tokens` alone where `whose` says so."""
        return sum(count for (where, _, what), count in self.sent.items() if where == phase and whose in ("", what))


def rehearse(
    config: Config, networks: Networks, *, world_size: int, num_text: int = 300, whole: bool = False
) -> Rehearsal:
    """Rehearse a round and a validation as the first of `world_size` ranks that decodes as many videos as any.

    A rehearsal of the same settings, code and libraries is read where it was kept (`kept_at`), so that a run which is
    planned, checked and restarted is rehearsed once.

    Every prompt has `num_text` tokens. With `whole` every block and step is made, which takes minutes.
    """
    path = kept_at(config, networks, {"world_size": world_size, "num_text": num_text, "whole": whole})
    if path:
        with suppress(OSError, ValueError, SyntaxError, TypeError):  # none is kept, or a damaged one
            return Rehearsal(**ast.literal_eval(path.read_text(encoding="utf-8")))
    done = _extrapolated(config, networks, world_size, num_text, whole=whole)
    if path:
        with suppress(OSError), replacing(path) as unfinished:  # a folder that cannot be written keeps nothing
            unfinished.write_text(repr(vars(done)), encoding="utf-8")
    return done


def kept_at(config: Config, networks: Networks, sizes: Mapping[str, Any]) -> Path | None:
    """Return the file that keeps the rehearsal of such a run, by this code and these libraries.

    None where an algorithm or a sampler of the user's own takes part, whose code may change, or without a folder.
    `SAGE_GRPO_CACHE` names the folder, `~/.cache/sage_grpo` by default; empty keeps none.
    """
    folder = os.environ.get("SAGE_GRPO_CACHE", os.path.expanduser("~/.cache/sage_grpo"))
    own = ":" in config.grpo.algorithm + config.rollout.sde_type
    if own or not folder or folder.startswith("~"):  # no home
        return None
    encoders = encoder_configs(Path(config.model.pretrained_model_root), networks.transformer["task_type"])
    data = replace(config.data, train_video_csv=[], valid_video_csv=[])
    settings = asdict(replace(config, data=data, run=RunConfig()))  # nothing in `run` changes what is rehearsed
    decides = [code_hash(), *map(version, LIBRARIES), settings, asdict(networks), repr(encoders), dict(sizes)]
    digest = hashlib.sha256(json.dumps(decides, sort_keys=True, default=str).encode()).hexdigest()
    return Path(folder) / f"rehearsal_{digest[:32]}.txt"


def _extrapolated(config: Config, networks: Networks, world_size: int, num_text: int, *, whole: bool) -> Rehearsal:
    """Rehearse a few blocks and steps unless `whole`, and draw the lines through their numbers."""
    layers, look = networks.transformer["num_layers"], config.validation.validation_num_inference_steps
    depths, made, looks = (layers,), (config,), (look,)
    if not whole:
        depths = DEPTHS if layers > max(DEPTHS) else depths
        made = _few_steps(config, world_size)
        looks = (1, 2) if config.validation.is_on and look > 2 else looks
    rounds = [(made[0], looks[0]), (made[-1], looks[-1])][: max(len(made), len(looks))]
    steps = [each.rollout.grpo_sampling_steps for each, _ in rounds]
    networks_of = [replace(networks, transformer={**networks.transformer, "num_layers": depth}) for depth in depths]
    sizes = {"world_size": world_size, "num_text": num_text, "rounds": rounds}
    of_depths, said = [], {}
    for numbers, surprises in in_own_processes(_rehearse, [(config, each) for each in networks_of], **sizes):
        few, more = numbers[0], numbers[-1]
        of_round = _on_line(few, more, steps[0], steps[-1], config.rollout.grpo_sampling_steps)
        of_look = _on_line(few, more, rounds[0][1], rounds[-1][1], look)
        validated = {key: number for key, number in of_look.items() if key[1].startswith("validation")}
        of_depths.append(Counter(of_round | validated))
        said |= dict.fromkeys(surprises)
    kinds = ("resident", "peaks", "flops", "sent", "kernels", "reads", "uploads", "pinned", "sizes")
    found: dict[str, dict[Any, float]] = {what: {} for what in kinds}
    for (what, place, *more), number in _on_line(of_depths[0], of_depths[-1], depths[0], depths[-1], layers).items():
        phase = place.partition("/")[0]  # its parts are joined: the largest of peaks, the sum of all else
        key = (phase, *more) if more else phase
        before = found[what].get(key, 0)
        found[what][key] = max(before, number) if what == "peaks" else before + number
    return Rehearsal(depths=depths, steps=tuple(dict.fromkeys(steps)), surprises=tuple(said), **found)


def _few_steps(config: Config, world_size: int) -> tuple[Config, ...]:
    """Choose rounds of two numbers of steps that lie on a line with the configured in all that is counted in passes.

    The anchor sees the configured share of their steps, or as many as in the configured round, since a tenth of few
    steps is none. Where there are no such two, that round itself. An update of one pass alone would add its gradients
    to none, which takes less memory than any other.
    """
    asked, layout = config.rollout.grpo_sampling_steps, layout_of(config, world_size)
    evaluations = algorithm_class(config.grpo.algorithm).evaluations

    def of_steps(steps: int, compared: int | None) -> Config:
        """Return the round of so many steps, of which the anchor sees the configured share, or so many."""
        made = replace(config, rollout=replace(config.rollout, grpo_sampling_steps=steps))
        if compared is None:
            return made
        share = min(1.0, compared / max(1, evaluations(made).trained))
        return replace(made, kl=replace(config.kl, anchor_fraction=share))

    def passes(settings: Config) -> tuple[float, ...]:
        """Count the passes of a round."""
        counted, updates = evaluations(settings), config.grpo.updates_per_rollout
        pairs, size = layout.num_own_videos * counted.update, config.grpo.mini_batch_size_per_update
        anchored = layout.num_own_videos * counted.anchor
        together = (math.ceil(pairs / updates / size), math.ceil(anchored / updates / size), pairs % updates)
        return *together, counted.rollout, counted.anchor, counted.update, counted.learnt

    pairs = sorted(combinations(range(1, min(asked, 9)), 2), key=max)
    for (few, more), compared in product(pairs, (None, evaluations(config).anchor)):
        with suppress(ValueError):  # too few steps for the window, or for a step with noise
            made = of_steps(few, compared), of_steps(more, compared)
            counted = list(zip(*map(passes, (*made, config)), strict=True))
            share = (asked - few) / (more - few)
            alike = counted[0][0] > 1 or counted[0][0] == counted[0][2]
            if alike and all(abs(a + share * (b - a) - c) < 1e-6 for a, b, c in counted):
                return made
    return (config,)


def _on_line(first: Numbers, second: Numbers, low: int, high: int, at: int) -> Numbers:
    """Return the numbers at a place on the line through those of two places."""
    share = (at - low) / (high - low) if high > low else 1.0
    return Counter({key: first[key] + share * (second[key] - first[key]) for key in {**first, **second}})


class _StandIn(WeightedReward):
    """Scores videos by a seeded draw, and takes the memory of the reward's networks."""

    max_failed = 0.0

    def __init__(self, config: Config, networks: Networks) -> None:
        self.asynchronous = config.reward.reward_async
        self._together = config.reward.reward_batch_size
        self._offload = "reward" in config.parallel.offload
        self._bytes = networks.reward_bytes
        self._networks = None if self._offload else self._allocate(self._bytes)
        self._count = 0
        self._working: list[Tensor] = []

    def _allocate(self, size: int) -> Tensor:
        return torch.empty(size, dtype=torch.uint8, device=NAME)

    def begin(self) -> "_StandIn":
        """Take the memory that scoring needs."""
        self._working = [self._allocate(self._bytes)] if self._offload else []
        self._count = 0
        return self

    def add(self, videos: Tensor, prompts: Sequence[str]) -> None:
        """Take some of a round's videos."""
        self._count += len(prompts)
        if self._bytes:
            self._working += [self._allocate(REWARD_ACTIVATIONS * min(self._together, len(prompts)))]
            del self._working[1 + self._offload :]

    def finish(self, scoring: "_StandIn") -> Scores:
        """Return a score of every video."""
        self._working = []
        drawn = torch.randn(self._count, generator=torch.Generator().manual_seed(self._count))
        return Scores({"VQ": drawn}, drawn, {"VQ": 1.0})


def _rehearse(
    config: Config, networks: Networks, *, world_size: int, num_text: int, rounds: Sequence[tuple[Config, int]]
) -> tuple[list[Numbers], tuple[str, ...]]:
    """Rehearse rounds, each with its settings and steps of a validation; return their numbers and surprises."""
    layout = layout_of(config, world_size)
    decoded = [len(layout.share_to_score(layout.num_own_videos, rank)) for rank in range(config.parallel.sp_size)]
    with ExitStack() as stack:
        if world_size > 1 or "weights" in config.parallel.offload:  # otherwise a run has no group of ranks either
            dist.init_process_group("fake", rank=decoded.index(max(decoded)), world_size=world_size)
            stack.callback(dist.destroy_process_group)
        stack.enter_context(told_by_this_rank())
        device = PretendDevice()
        mesh = mesh_of(config, NAME)
        stack.enter_context(device)
        stack.enter_context(garbage_collected_on_request())
        # What it takes to encode prompts also depends on whether the encoders are on the device already.
        prompts_alike = lambda pipeline, prompts, size: (len(prompts), size, pipeline.text_encoder.device)  # noqa: E731
        for owner, name, part, alike in (
            (HunyuanVideoGRPOPipeline, "encode_prompts", "encode", prompts_alike),
            (HunyuanVideoGRPOPipeline, "decode", "decode", lambda _, latents: latents.shape),
            (HunyuanVideoGRPOPipeline, "encode", "encode", None),
            (Optimization, "step", "step", None),
            (HunyuanVideo15Decoder3D, "forward", "decode", lambda _, tile: ("tile", tile.shape)),
            (Qwen2_5_VLDecoderLayer, "forward", "encode", lambda _, tokens: ("layer", tokens.shape)),
        ):
            stack.enter_context(patch.object(owner, name, _as_part(device, getattr(owner, name), part, alike)))
        timer = PhaseTimer(device.device)
        timer.around = device.during
        folder = Path(stack.enter_context(TemporaryDirectory()))
        image = str(folder / "first.png") if networks.transformer["task_type"] == "i2v" else None
        if image:
            Image.new("RGB", (640, 360)).save(image)
        words = " a" * (num_text - 6)  # the others are a prompt's number, and the end of the user's turn
        prompts = [Prompt(f"{number}{words}", number, None, image) for number in range(layout.num_groups)]
        resident: dict[str, int] = {}

        def held(what: str, make: Callable[[], Any]) -> Any:
            """Make something, and note what it takes on the device."""
            before = device.current
            made = make()
            resident[what] = device.current - before
            return made

        network = held("transformer's shard", lambda: policy_network(config, networks.transformer, mesh))
        pipeline = held("encoders and VAE", lambda: build_pipeline(config, networks, network))
        policy = build_policy(config, pipeline)
        reward = held("reward networks", lambda: _StandIn(config, networks))
        average = held("the weights' average, its shard", lambda: build_ema(config, network))
        trained = trainable_parameters(network)
        optimization = Optimization(trained, config.optimizer, sp_size=mesh.layout.sp_size, ema=average)

        def make_states() -> None:
            """Give the optimizers the states that they have in all rounds but the first."""
            for parameter in trained.values():
                parameter.grad = torch.zeros_like(parameter)
            with patch("hyvideo.algorithms.optimizer.orthogonalize", lambda matrix, dtype: matrix):  # many products
                for optimizer in optimization.optimizers:
                    optimizer.step()
                    optimizer.zero_grad()

        held("optimizer's shard", make_states)
        built, found, surprises, algorithm = device.peaks["build"], [], [], None
        whole = 2 * sum(parameter.numel() for parameter in network.parameters())
        shards = layout.num_shards if is_sharded(config, mesh) else 1
        device.phase = "between"
        for settings, look in rounds:
            sampler = rollout_scheduler(settings.rollout)
            algorithm = anchor = None  # what the former one holds is freed first
            gc.collect()
            device.forget()
            sampling = policy.with_schedule(sampler, num_frames=policy.num_frames, size=policy.size)
            make = partial(algorithm_class(config.grpo.algorithm), sampling, optimization, settings, timer)
            algorithm, dealt = held("anchor's shard", make), Rounds(settings, prompts, mesh)
            looked, sizes = 0.0, {}
            with suppress(DynamicOutputShapeException):  # noted; what comes after it cannot be rehearsed
                with device.during("validation"):
                    looked = _validate(policy, reward, config, world_size, look, prompts)
                if anchor := getattr(algorithm, "anchor", None):
                    anchor.policy_moved()  # as in all rounds but those after a refresh
                trajectory = collect(sampling, algorithm, reward, dealt.next())
                rollout = trajectory.rollout
                kept = (rollout.latents, rollout.means, rollout.log_probs)
                resident["a round's latents"] = sum(each.nbytes for each in kept if each is not None)
                for _ in algorithm.updates(trajectory):
                    pass
                if anchor and config.moves_anchor:
                    with device.during("refresh"):
                        anchor.refresh()
                with device.during("checkpoint"):
                    state = RunState(network, optimization, algorithm, dealt.sampler, {}, {}, None).tensors()
                saved = [each for part in state.values() for each in part.values()]
                sizes["checkpoint"] = sum(each.numel() * each.itemsize for each in saved)
                del trajectory, rollout, kept, state, saved
            sizes |= {"trained": sum(weight.nbytes for weight in trained.values())}
            sizes |= {"weights": sum(weight.nbytes for weight in network.parameters())}
            sizes |= {"encoders": sum(weight.nbytes for each in pipeline.encoders for weight in each.parameters())}
            device.peaks["build"] = built
            found.append(_numbers(device, mesh, looked, resident, sizes))
            surprises += _surprises(device, whole, shards, rests="weights" in config.parallel.offload)
    return found, tuple(surprises)


def _as_part(
    device: PretendDevice, function: Callable[..., Any], part: str, alike: Callable[..., object] | None
) -> Callable[..., Any]:
    """Wrap a method so that what it does is counted as a part of the phase.

    Calls for which `alike` returns the same do the same: the first is made, and the others are counted as it was.
    """
    made: dict[object, tuple[Callable[[], Any], int, Counter]] = {}

    def wrapped(owner: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the call, or count it again."""
        place, key = f"{device.phase.partition('/')[0]}/{part}", alike and alike(owner, *args)
        with device.during(place):
            if key not in made:
                before, start = device.counted(place), device.current
                most, device.peaks[place] = device.peaks[place], start
                result = function(owner, *args, **kwargs)
                counts = {what: number - before[what] for what, number in device.counted(place).items()}
                taken = device.peaks[place] - start
                device.peaks[place] = max(most, device.peaks[place])
                if key is None:
                    return result
                made[key] = (lambda: result, taken - (device.current - start), counts)  # the result stays in memory
                if isinstance(result, Tensor):  # it need not stay in memory for others like it
                    like = {"dtype": result.dtype, "device": result.device}
                    made[key] = (partial(torch.empty_strided, result.shape, result.stride(), **like), taken, counts)
            else:
                again, taken, counts = made[key]
                device.peaks[place] = max(device.peaks[place], device.current + taken)
                for (name, *rest), count in counts.items():
                    getattr(device, name)[(place, *rest) if rest else place] += count
                result = again()
        return result

    return wrapped


def _validate(
    policy: Policy, reward: _StandIn, config: Config, world_size: int, steps: int, prompts: Sequence[Prompt]
) -> float:
    """Encode a validation's prompts, sample and score videos that are sampled together; return how often it does so."""
    validation = config.validation
    if not validation.is_on:
        return 0.0
    own = layout_of(config, world_size).most_to_sample(validation.validation_num_videos)
    together = min(policy.videos_at_once or own, own)
    scheduler = FlowMatchDiscreteScheduler(shift=validation.validation_timestep_shift)
    scheduler.set_timesteps(steps)
    video = {"num_frames": validation.validate_video_length, "size": parse_size(validation.validation_fixed_size)}
    policy = policy.with_schedule(scheduler, **video)
    shown = [prompts[number % len(prompts)] for number in range(own)]
    _, _, rollout = next(sampled(policy.pipeline, shown, policy.guidance, seed=0, batch_size=together, **video))
    reward(rollout.videos, shown[:together])
    return own / together


def _numbers(
    device: PretendDevice, mesh: Mesh, validations: float, resident: Mapping[str, float], sizes: Mapping[str, float]
) -> Numbers:
    """Gather what was counted in a round; of a validation a part was made."""
    tokens = {group.group_name for group in (mesh.sp_group, mesh.guidance_group, mesh.video_group) if group}
    weights = {mesh.weights.get_group("shard").group_name} if mesh.weights else set()
    found: Numbers = Counter()
    for what in ("flops", "sent", "kernels", "reads", "uploads", "pinned"):
        for key, number in getattr(device, what).items():
            key = (key,) if isinstance(key, str) else key
            if what == "sent":
                whose = "tokens" if key[2] in tokens else "weights" if key[2] in weights else "copies"
                key = (*key[:2], whose)
            if key[0] != "build":
                found[what, *key] += number * (validations if key[0] in ("validation", "validation/decode") else 1)
    found |= Counter({("peaks", phase): number for phase, number in device.peaks.items()})
    found |= Counter({("resident", part): number for part, number in resident.items()})
    return found | Counter({("sizes", part): number for part, number in sizes.items()})


@contextmanager
def told_by_this_rank() -> Iterator[None]:
    """Answer every exchange of Python objects between ranks with this rank's own value."""

    def gather(values: list, value: object, *args: object) -> None:
        """Fill the list with this rank's value."""
        values[:] = [value] * len(values)

    with patch.object(dist, "all_gather_object", gather), patch.object(dist, "broadcast_object_list", lambda *_: None):
        yield


def policy_network(config: Config, network: Mapping[str, Any], mesh: Mesh) -> HunyuanVideo15Transformer3DModel:
    """Make the policy as a run does, on the pretended device. An adapter is always a new one."""
    config = replace(config, model=replace(config.model, pretrained_lora_path=None))
    with local_torch_dtype(DTYPES[config.model.master_weight_type]):
        with without_diffusers_logs(), torch.device("meta"):
            transformer = HunyuanVideo15Transformer3DModel.from_config(dict(network))
        make_policy_of(transformer, config, mesh, draw=False)
    if not is_sharded(config, mesh):
        give_memory(transformer)
    return transformer


def give_memory(network: nn.Module, device: str = NAME) -> None:
    """Put a network's weights from the meta device on the pretended one, or in pretended host memory (`cpu`)."""
    for module in network.modules():
        for name, weight in module._parameters.items():
            if weight is not None:
                made = torch.empty(weight.shape, dtype=weight.dtype, device=device)
                module._parameters[name] = nn.Parameter(made, weight.requires_grad)
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device=device)


def build_pipeline(
    config: Config, networks: Networks, transformer: HunyuanVideo15Transformer3DModel, vae_on: str = NAME
) -> HunyuanVideoGRPOPipeline:
    """Build the pipeline of a run without reading weights; `vae_on` is the device of the VAE, or `cpu`."""
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
    give_memory(vae, vae_on)
    for encoder in filter(None, (text, glyph, vision)):
        give_memory(encoder, "cpu" if "encoders" in config.parallel.offload else NAME)
    reads_images = None
    if configs.vision is not None:
        reads_images = SiglipImageProcessorPil(size=dict.fromkeys(("height", "width"), configs.vision.image_size))
    pipeline = HunyuanVideoGRPOPipeline(
        text_encoder=text,
        tokenizer=AutoTokenizer.from_pretrained(TOKENIZERS / "tokenizer", trust_remote_code=False),
        transformer=transformer,
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


def _surprises(device: PretendDevice, whole: int, shards: int, *, rests: bool) -> list[str]:
    """Say what a GPU would punish, with a model of `whole` bytes on so many shards, which may rest on the host."""
    allowed = device.reasons | ({BACKWARD} if rests else set())
    said = [
        f"{phase}: host and device are mixed by {what} ({count} times)" for (phase, what), count in device.mixes.items()
    ]
    said += [f"{phase}: {what} ({count} times)" for (phase, what), count in device.faults.items()]
    for noted, words in (
        (device.reads, "a value is read back from the device in"),
        (device.uploads, "the host waits for the device to copy memory that is not pinned in"),
    ):
        said += [
            f"{phase}: {words} {place} ({count} times)"
            for (phase, place), count in noted.items()
            if phase.partition("/")[0] in HOT and place not in allowed
        ]
    if shards > 1 and device.most_gathered > 0.9 * whole:
        said.append(
            f"weights of {device.most_gathered / 2**30:.1f} GiB are gathered at once, which is nearly the whole model"
        )
    return said
