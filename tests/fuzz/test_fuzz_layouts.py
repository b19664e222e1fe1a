"""Any division of videos over ranks deals every (prompt, generation) once, or is refused with its numbers."""

import torch
from hypothesis import example, given
from hypothesis import strategies as st

from hyvideo.config.loading import load_config
from hyvideo.data.samplers import GroupSampler
from hyvideo.distributed.layout import Layout
from hyvideo.training.checks import check_config
from tests.support.fuzzing import SCALARS, fuzz, only_value_errors

SIZES = st.one_of(st.integers(0, 9), st.sampled_from([12, 16, 24, 32]))
WORLDS = st.one_of(st.integers(1, 9), st.sampled_from([12, 16, 24, 32, 64]))
CONFIG = load_config([])


@st.composite
def fitting(draw: st.DrawFn) -> tuple[int, ...]:
    """Sizes that divide one another, in the order of `refusal`: groups inside of a rank, or over several."""
    sp_size, dp_replicate, num_generations = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(2, 8))
    ranks_per_group = draw(st.sampled_from([n for n in range(1, num_generations + 1) if num_generations % n == 0]))
    groups_per_rank = draw(st.integers(1, 3)) if ranks_per_group == 1 else 1
    world_size = sp_size * dp_replicate * ranks_per_group * draw(st.integers(1, 2))
    return world_size, sp_size, dp_replicate, num_generations * groups_per_rank // ranks_per_group, num_generations


LAYOUTS = st.one_of(fitting(), st.tuples(WORLDS, SIZES, st.integers(0, 4), SIZES, SIZES))


def refusal(world_size: int, sp_size: int, dp_replicate: int, batch_size: int, num_generations: int) -> str:
    """Why a configuration with these sizes cannot run; empty if it can."""
    parallel, grpo = CONFIG.parallel, CONFIG.grpo
    parallel.enable_fsdp, parallel.sp_size, parallel.dp_replicate = True, sp_size, dp_replicate
    grpo.batch_size, grpo.num_generations, grpo.updates_per_rollout = batch_size, num_generations, 1
    try:
        check_config(CONFIG, world_size, files=False)
    except ValueError as error:
        return str(error)
    return ""


@fuzz()
@given(LAYOUTS, st.integers(1, 40), st.integers(1, 3), st.integers(1, 3))
def test_accepted_layouts_deal_every_video_once_and_others_name_their_numbers(
    sizes, num_prompts, num_rollouts, num_rounds
):
    world_size, sp_size, dp_replicate, batch_size, num_generations = sizes
    message = refusal(*sizes)
    tiles = min(sp_size, dp_replicate, batch_size) >= 1 and num_generations >= 2
    tiles = tiles and world_size % (sp_size * dp_replicate) == 0
    tiles = tiles and (batch_size % num_generations == 0 or num_generations % batch_size == 0)
    tiles = tiles and batch_size * (world_size // sp_size) % num_generations == 0
    assert (message == "") == tiles, message
    if message:
        numbers = {"sp_size": sp_size, "dp_replicate": dp_replicate, "batch_size": batch_size}
        numbers |= {"num_generations": num_generations, "world size": world_size}
        assert any(f"{name} {value}" in message or f"{name} is {value}" in message for name, value in numbers.items())
        return
    layout = Layout(*sizes, num_rollouts)
    places = [layout.positions(layout.dp_rank(rank)) for rank in range(world_size)]
    samplers = [GroupSampler(num_prompts, layout.num_groups, num_generations, own, seed=5) for own in places]
    for _ in range(num_rounds):
        dealt = [sampler.next_round() for sampler in samplers]
        assert all(videos == dealt[layout.dp_rank(rank) * sp_size] for rank, videos in enumerate(dealt))
        parts = [torch.tensor([(a.prompt_index, a.generation) for a in videos]) for videos in dealt[::sp_size]]
        joined = torch.cat(parts)[torch.cat(places[::sp_size]).argsort()]
        videos = [tuple(pair) for pair in joined.tolist()]
        assert len(set(videos)) == len(videos) == layout.num_videos
        for start in range(0, len(videos), num_generations):
            prompts, generations = zip(*videos[start : start + num_generations], strict=True)
            assert len(set(prompts)) == 1 and generations[0] % num_generations == 0
            assert generations == tuple(range(generations[0], generations[0] + num_generations))


NUMBERS = st.one_of(st.integers(-2, 20), st.sampled_from([2**31, 10**12, 10**30]))


@fuzz(4)
@given(st.lists(NUMBERS, min_size=6, max_size=6))
def test_any_layout_is_made_or_refused_with_its_numbers(numbers):
    with only_value_errors(*numbers):
        Layout(*numbers)


STATES = st.dictionaries(st.sampled_from(["round", "groups_dealt", "x"]), st.one_of(st.integers(-1, 10**6), SCALARS))


@fuzz(4)
@given(st.one_of(STATES, SCALARS, st.lists(SCALARS)))
@example({"round": "1", "groups_dealt": 2})
@example(None)
def test_any_state_of_a_sampler_is_continued_or_refused(state):
    sampler = GroupSampler(5, 4, 2, Layout(2, batch_size=4, num_generations=2).positions(0), seed=0)
    with only_value_errors("round and groups_dealt"):
        sampler.load_state_dict(state)
        assert len(sampler.next_round()) == 4 and sampler.round == state["round"] + 1
