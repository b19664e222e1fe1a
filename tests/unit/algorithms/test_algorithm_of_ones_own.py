"""An algorithm named by its import path trains, saves and resumes as the built-in one does."""

import pytest
import torch

from hyvideo.training.run import Run
from tests.support.equal_runs import assert_same, rows_of
from tests.support.reward_weighted import RewardWeighted
from tests.support.training import REPOSITORY, arguments, collect_round, training_of, weights_of

PATH = "tests.support.reward_weighted:RewardWeighted"
IDEAS = "tests.support.own_ideas"


def test_it_trains_the_bundled_model_and_a_resumed_run_equals_an_uninterrupted_one(prompts_csv, tmp_path):
    def bundled(name: str, **settings: object) -> Run:
        root = REPOSITORY / "assets" / "tiny"
        return training_of(arguments(root, prompts_csv, tmp_path / name, algorithm=PATH, **settings))

    whole, first = bundled("whole", max_steps=2), bundled("first", max_steps=1)
    before = weights_of(whole)
    whole.train()
    after = weights_of(whole)
    assert isinstance(whole.algorithm, RewardWeighted)
    assert any(not torch.equal(after[name], before[name]) for name in before)
    first.train()
    resumed = bundled("resumed", max_steps=2, resume_from_checkpoint=first.folder.checkpoints / "step_1")
    resumed.train()
    assert rows_of(resumed.folder.path) == rows_of(whole.folder.path)[1:]
    assert_same(weights_of(resumed), after)


def test_final_latents_are_those_that_the_ode_leaves(make_training):
    training = make_training(algorithm=PATH, updates_per_rollout=2)
    assert training.algorithm.updates_per_round == 1  # as its class says
    trajectory = collect_round(training)
    assert trajectory.rollout.latents.shape[:2] == (4, 1)
    assert trajectory.rollout.means is None and trajectory.rollout.log_probs is None


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"algorithm": "standard"}, "there is no 'standard'; expected one of grpo, nft, or module:Class"),
        ({"algorithm": "tests.support.reward_weighted:Missing"}, "cannot be imported"),
        ({"algorithm": "pathlib:Path"}, "must be a subclass of hyvideo.algorithms.algorithm.Algorithm"),
        ({"sde_type": f"{IDEAS}:missing"}, "sde_type: .* cannot be imported"),
        ({"sde_type": "sage"}, "did you mean 'sage_grpo'"),
    ],
)
def test_what_is_no_algorithm_or_sampler_is_refused(make_training, settings, said):
    with pytest.raises(ValueError, match=said):
        make_training(**settings)


def test_one_that_miscounts_its_updates_is_told_what_its_number_means_and_not_to_resume_from_nothing(make_training):
    training = make_training(algorithm=PATH)
    training.algorithm.updates_per_round = 2
    told = "RewardWeighted made 1 updates of a round, but its updates_per_round is 2: .* follows updates_per_rollout, 1"
    with pytest.raises(ValueError, match=told):
        training.train()
    where = training.whereabouts()
    assert where.startswith("Rank 0 failed in phase 'between phases") and "resume" not in where
    assert where.endswith(", update 2. No checkpoint was saved yet.")


def test_a_sampler_and_a_trust_region_of_ones_own_train_with_exact_replay_and_equal_pulls(make_training):
    settings = {"algorithm": f"{IDEAS}:FartherTerm", "sde_type": f"{IDEAS}:fading", "updates_per_rollout": 2}
    training = make_training(**settings, kl_weight=0.01, max_steps=2)
    assert training.policy.stochastic_steps().tolist() == [True, True, True, False]
    training.train()
    first, second = rows_of(training.folder.path)
    assert max(first["ratio/max_deviation"], first["replay/mean_error"]) < 1e-5 < first["grad_norm"]
    pulls = torch.tensor([first[f"velocity_grad/step_{step:02d}"] for step in range(3)])
    before = pulls / training.algorithm.scales[:3]
    assert pulls.max() / pulls.min() < 1.4 < before.max() / before.min()
    told = second["loss/policy"] + second["kl/coef"] * max(second["kl/position"], second["kl/velocity"])
    assert second["kl/position"] > 0
    assert second["loss/total"] == pytest.approx(told, rel=1e-5)
