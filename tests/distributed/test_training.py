"""Training over ranks equals training in one process: rollouts, log-probabilities, losses, gradients and weights."""

from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from hyvideo.algorithms.algorithm import Trajectory
from hyvideo.distributed.collectives import gather, whole
from hyvideo.distributed.mesh import process_group
from hyvideo.models.adapter import save_lora
from hyvideo.models.loading import load_transformer
from hyvideo.models.parallelize import prepare_policy, trainable_parameters
from hyvideo.training.run import Run
from tests.support.ranks import run_on_ranks
from tests.support.tiny_model import ADAPTER, randomize
from tests.support.training import ALGORITHMS, arguments, training_of

TOLERANCE = 1e-5
"""Largest relative error, float32. (The refiner's key bias, whose true gradient is 0, is frozen.)"""

SENSITIVE = {"rewards": 1e-2, "kl": 1e-3, "norm": 1e-4}
"""Tolerances of what magnifies rounding: in 32x32 pixels of 8 bits the last bit of a latent may turn a pixel; the KL is
a difference of means that are nearly equal, squared and divided by a small variance; the norm of a large tensor, summed
in float32 by one process, is off in the fifth digit, that of its shards less."""

FLOORS = {"kl": 1e-3}
"""Sizes below which an error is no longer relative; 0.1 elsewhere: losses are means of terms of size 1 that cancel."""

NUM_VIDEOS = 4
RUN = {"grpo_sampling_steps": 3, "max_steps": 3, "update_ref_model_step": 2, "kl_weight": 0.1, "learning_rate": 1e-4}

TWO_UPDATES = {"updates_per_rollout": 2, "grpo_sampling_steps": 4, "max_steps": 4}
WINDOWS = {"sde_window": "per_group", "sde_window_size": 2, "update_ref_model_step": 4, "learning_rate": 1e-3}
METHODS: dict[str, dict[str, Any]] = {
    "grpo": ALGORITHMS["grpo"],
    "full": {},
    "guidance": {"cfg_scale": 3.0, "validation_interval": 2, "validation_num_videos": 3},
    "lora": {"use_lora": True, "lora_r": 2, "lora_alpha": 4, "pretrained_lora_path": True},
    "lora, fixed anchor": {"use_lora": True, "use_moving_KL": False},
    "muon": {"use_muon": True},
    "muon, adapter": {"use_muon": True, "use_lora": True},
    "two updates in windows": {**TWO_UPDATES, **WINDOWS, "kl_weight": 1.0, "max_grad_norm": 10.0},
    "one pass": {
        **{"algorithm": "grpo_one_pass", "use_lora": True, "cfg_scale": 3.0, "rollout_micro_batch_size": 1},
        **{"sde_window": "sliding", "sde_window_size": 2, "anchor_fraction": 0.5, "learning_rate": 1e-3},
    },
    "one pass, own windows": {
        **{"algorithm": "grpo_one_pass", "use_lora": True, "rollout_micro_batch_size": 1, "learning_rate": 1e-3},
        **{"sde_window": "per_group", "sde_window_size": 2, "timestep_fraction": 0.5},
    },
    "nft, guidance, adapter": {**ALGORITHMS["nft"], "cfg_scale": 3.0, "use_lora": True, "learning_rate": 1e-3},
    "nft, two updates": {**ALGORITHMS["nft"], **TWO_UPDATES, "timestep_fraction": 0.5, "max_grad_norm": 100.0},
}

FSDP = {"enable_fsdp": True}
ON_TWO = {**FSDP, "batch_size": 2}
SP_2 = {**FSDP, "sp_size": 2, "batch_size": 4}
ACCUMULATED = {**FSDP, "batch_size": 1, "gradient_accumulation_steps": 2}
COPIES_OF_PAIRS = {**FSDP, "dp_replicate": 2, "sp_size": 2, "batch_size": 2}

Cases = dict[str, tuple[str, dict[str, Any]]]
TWO_RANKS: Cases = {
    "dp": ("grpo", ON_TWO),
    "sp": ("grpo", SP_2),
    "sp, guidance, blocks recomputed, weights kept and saved after a validation": (
        "guidance",
        {**SP_2, "activation_checkpointing": "full", "reshard_after_forward": False, "save_interval": 2},
    ),
    "dp, groups over ranks, accumulated": ("two updates in windows", ACCUMULATED),
    "dp, one pass, groups over ranks, accumulated": ("one pass", ACCUMULATED),
    "dp, one pass, weights whole": ("one pass, own windows", {"batch_size": 2}),
    "dp, nft, groups over ranks, accumulated": ("nft, two updates", {**ACCUMULATED, "cpu_offload": True}),
}
FOUR_RANKS: Cases = {
    "dp x sp, weights whole": ("lora", {"sp_size": 2, "batch_size": 2}),
    "two rows of guidance, each over two ranks": ("guidance", {**SP_2, "sp_size": 4}),
    "one pass, copies x two rows of guidance, recomputed": (
        "one pass",
        COPIES_OF_PAIRS | {"activation_checkpointing": "elementwise"},
    ),
    "nft, copies x two rows of guidance": ("nft, guidance, adapter", COPIES_OF_PAIRS),
}
MORE_ON_TWO: Cases = {
    "dp, weights whole": ("full", {"batch_size": 2}),
    "dp, weights in host memory": ("full", {**ON_TWO, "cpu_offload": True, "reference_mode_offload": True}),
    "sp, fresh adapter with a fixed anchor": ("lora, fixed anchor", SP_2),
    "dp, lora": ("lora", ON_TWO),
    "dp, muon": ("muon, adapter", ON_TWO),
}
MORE_ON_FOUR: Cases = {
    "groups over ranks": ("full", {**FSDP, "batch_size": 1}),
    "copies x sp, no product recomputed": ("guidance", COPIES_OF_PAIRS | {"activation_checkpointing": "elementwise"}),
    "copies, muon": ("muon", {**FSDP, "dp_replicate": 2, "batch_size": 1}),
}


class Recording:
    """Everything a run computed: this rank's rollouts, and gradients and weights joined over ranks.

    `in_shards` says whether the weights were in shards after each rollout, `decoded` how many videos this rank decoded
    in each; all videos are what it would have decoded alone.
    """

    def __init__(self, training: Run) -> None:
        self.rows, self.trajectories, self.gradients, self.in_shards, self.decoded = [], [], [], [], []
        self._training = training
        for optimizer in training.algorithm.optimization.optimizers:
            optimizer.register_step_pre_hook(self._keep_gradients)
            if isinstance(optimizer, torch.optim.AdamW):  # its first step is as long for what is rounding alone
                optimizer.param_groups[0]["eps"] = 1e-4
        pipeline, decoded = training.policy.pipeline, []
        pipeline.vae.decoder.register_forward_hook(
            lambda *call: decoded.append(len(call[2])) if training.timer.phase == "rollout" else None
        )
        updates, log = training.algorithm.updates, training.journal.log

        def keep_round(trajectory: Trajectory) -> Iterator[dict[str, float]]:
            rollout, block = trajectory.rollout, training.policy.transformer.transformer_blocks[0]
            self.in_shards.append(isinstance(block.attn.to_q.weight, DTensor))
            self.decoded.append(sum(decoded))
            decoded.clear()
            alone = [pipeline.decode(part) for part in rollout.latents[:, -1].split(training.policy.videos_at_once)]
            assert torch.equal(rollout.videos, torch.cat(alone))
            log_probs = {} if rollout.log_probs is None else {"log_probs": rollout.log_probs}
            self.trajectories.append({"latents": rollout.latents} | log_probs)
            return updates(trajectory)

        def keep_row(step: int, row: dict[str, float], *, round_ends: bool) -> None:
            self.rows.append(dict(row))
            log(step, row, round_ends=round_ends)

        training.algorithm.updates, training.journal.log = keep_round, keep_row
        training.train()
        self.weights = {name: whole(p.detach()).clone() for name, p in self._parameters().items()}

    def _parameters(self) -> dict[str, nn.Parameter]:
        return trainable_parameters(self._training.policy.transformer)

    def _keep_gradients(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if optimizer is self._training.algorithm.optimization.optimizers[0]:
            self.gradients.append({name: whole(p.grad).clone() for name, p in self._parameters().items()})


def record_alone(argv: list[str], path: str) -> None:
    recording = vars(Recording(training_of(argv)))
    torch.save({name: recording[name] for name in ("rows", "trajectories", "gradients", "weights")}, path)


def relative(received: Tensor, expected: Tensor) -> float:
    scale = float(expected.double().norm())
    error = float((received.double() - expected.double()).norm())
    return error / scale if scale else error


def compare(argv: list[str], path: str) -> dict[str, float]:
    """Run over the ranks; return the largest error of each kind against the run in the file, over all ranks."""
    training = training_of(argv)
    received, expected = Recording(training), torch.load(path)
    parallel = training.config.parallel
    assert set(received.in_shards) == {parallel.enable_fsdp and parallel.reshard_after_forward}
    blocks = -(-training.rounds.layout.num_own_videos // training.policy.videos_at_once)
    most = -(-blocks // training.mesh.layout.sp_size) * training.policy.videos_at_once
    assert 0 < max(gather(max(received.decoded))) <= most
    own = training.rounds.layout.positions(training.mesh.dp_rank)
    rounds = list(zip(received.trajectories, expected["trajectories"], strict=True))
    errors = {name: max(relative(r[name], e[name][own]) for r, e in rounds) for name in rounds[0][1]}
    pairs = list(zip(received.gradients, expected["gradients"], strict=True))
    assert all(r.keys() == e.keys() for r, e in pairs)
    errors["gradients"] = max(relative(r[name], e[name]) for r, e in pairs for name in e)
    errors["weights"] = max(relative(received.weights[name], value) for name, value in expected["weights"].items())
    rows = list(zip(received.rows, expected["rows"], strict=True))
    slowest = {"perf/slowest_rank", "perf/slowest_ratio"}  # which one process alone does not have
    assert all(r.keys() - slowest == e.keys() for r, e in rows)
    kinds = {"losses": ("loss/", "clip_fraction", "nft/"), "kl": ("kl/",), "norm": ("grad_norm",)}
    kinds["rewards"] = ("reward/", "valid/")
    for kind, prefixes in kinds.items():
        of_kind = [(r[name], e[name]) for r, e in rows for name in e if name.startswith(prefixes)]
        floor = FLOORS.get(kind, 0.1)
        errors[kind] = max((abs(mine - theirs) / max(abs(theirs), floor) for mine, theirs in of_kind), default=0.0)
    return {name: max(others) for name, others in ((name, [e[name] for e in gather(errors)]) for name in errors)}


def compare_all(cases: dict[str, tuple[list[str], str]]) -> dict[str, dict[str, float]]:
    return {name: compare(argv, path) for name, (argv, path) in cases.items()}


@pytest.fixture(scope="module")
def run_of(tmp_path_factory: pytest.TempPathFactory, root_of_four_heads: Path, prompts_csv: Path):
    """Command line of a run of a method, in a folder of its own."""
    folder, number = tmp_path_factory.mktemp("runs"), count()
    transformer = load_transformer(root_of_four_heads)
    prepare_policy(transformer, gradient_checkpointing=False, lora=ADAPTER)
    randomize(transformer)
    save_lora(transformer, folder / "adapter")

    def argv(method: str, **settings: Any) -> list[str]:
        chosen = {**RUN, **METHODS[method], **settings}
        if chosen.get("pretrained_lora_path"):
            chosen["pretrained_lora_path"] = folder / "adapter"
        return arguments(root_of_four_heads, prompts_csv, folder / f"{next(number)}", **chosen)

    return argv


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, run_of):
    """File of the single-process run of every method, made when asked for."""
    folder = tmp_path_factory.mktemp("alone")

    def path_of(method: str) -> str:
        path = folder / f"{method}.pt"
        if not path.exists():
            run_on_ranks(1, record_alone, run_of(method, batch_size=NUM_VIDEOS), str(path))
        return str(path)

    return path_of


@pytest.mark.parametrize(
    ("world_size", "cases"),
    [
        pytest.param(2, TWO_RANKS, id="2 ranks"),
        pytest.param(4, FOUR_RANKS, id="4 ranks"),
        pytest.param(2, MORE_ON_TWO, id="more on 2", marks=pytest.mark.slow),
        pytest.param(4, MORE_ON_FOUR, id="more on 4", marks=pytest.mark.slow),
    ],
)
def test_ranks_compute_what_one_process_computes(world_size: int, cases: Cases, run_of, recorded):
    runs = {name: (run_of(method, **settings), recorded(method)) for name, (method, settings) in cases.items()}
    first, *others = run_on_ranks(world_size, compare_all, runs)
    assert all(other == first for other in others)
    assert first.keys() == cases.keys()
    found = [(name, kind, error) for name, errors in first.items() for kind, error in errors.items()]
    assert [one for one in found if not one[2] <= SENSITIVE.get(one[1], TOLERANCE)] == []


def compare_offloaded(argv: list[str], path: str) -> dict[str, float]:
    """Compare a run of one process whose weights rest in host memory."""
    with process_group(60, of_one=True):
        return compare(argv, path)


def test_one_process_computes_the_same_bit_for_bit_with_its_weights_in_host_memory(run_of, recorded):
    argv = run_of("lora", **FSDP, batch_size=NUM_VIDEOS, cpu_offload=True)
    (errors,) = run_on_ranks(1, compare_offloaded, argv, recorded("lora"))
    assert set(errors.values()) == {0.0}, errors


def test_every_term_of_the_loss_acts_in_the_run_of_two_updates(recorded):
    rows = torch.load(recorded("two updates in windows"))["rows"]
    for name, least in (("loss/policy", 0.05), ("kl/position", 1e-3), ("kl/velocity", 1e-3), ("clip_fraction", 0.05)):
        assert max(abs(row[name]) for row in rows) > least, name
