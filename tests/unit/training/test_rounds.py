"""Groups are dealt over ranks and rounds, every prompt once per epoch, in an order that a state continues."""

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from hyvideo.distributed.mesh import Layout
from hyvideo.training.collect import Assignment, GroupSampler


def samplers(num_prompts, batch_size, num_generations, dp_size, seed=0, num_rollouts=1):
    layout = Layout(dp_size, 1, 1, batch_size, num_generations, num_rollouts)
    places = map(layout.positions, range(dp_size))
    return [GroupSampler(num_prompts, layout.num_groups, num_generations, own, seed) for own in places]


def joined_round(ranks):
    return [assignment for rank in ranks for assignment in rank.next_round()]


@st.composite
def layouts(draw):
    """(num_prompts, batch_size, num_generations, dp_size) whose groups tile the ranks."""
    num_generations = draw(st.integers(1, 6))
    if draw(st.booleans()):
        batch_size = num_generations * draw(st.integers(1, 3))
        dp_size = draw(st.integers(1, 4))
    else:
        batch_size = draw(st.sampled_from([n for n in range(1, num_generations + 1) if num_generations % n == 0]))
        dp_size = num_generations // batch_size * draw(st.integers(1, 3))
    return draw(st.integers(1, 12)), batch_size, num_generations, dp_size


def test_the_drawing_in_the_docstring_is_what_the_sampler_deals():
    lines = GroupSampler.__doc__.splitlines()
    rows = [line.split()[2:] for line in lines if line.split()[:1] == ["round"]]
    drawn = [[cell for cell in row if cell.replace(".", "").isdigit()] for row in rows]
    ranks = samplers(num_prompts=5, batch_size=2, num_generations=4, dp_size=4, seed=3)
    dealt = [[f"{a.prompt_index}.{a.generation}" for a in joined_round(ranks)] for _ in drawn]
    assert len(drawn) == 4 and drawn == dealt


@settings(deadline=None)
@given(layouts(), st.integers(0, 5))
def test_every_prompt_is_seen_once_per_epoch_before_any_repeats(layout, seed):
    num_prompts, _, num_generations, _ = layout
    ranks = samplers(*layout, seed=seed)
    groups = [video.prompt_index for _ in range(8) for video in joined_round(ranks)[::num_generations]]
    for start in range(0, len(groups) - num_prompts + 1, num_prompts):
        assert sorted(groups[start : start + num_prompts]) == list(range(num_prompts))


@settings(deadline=None)
@given(layouts(), st.integers(0, 5))
def test_a_restored_sampler_continues_where_it_was(layout, rounds):
    original, restored = samplers(*layout)[-1], samplers(*layout)[-1]
    for _ in range(rounds):
        original.next_round()
    restored.load_state_dict(original.state_dict())
    assert restored.round == rounds
    assert [restored.next_round() for _ in range(3)] == [original.next_round() for _ in range(3)]


def test_the_order_is_shuffled_and_differs_between_seeds_and_epochs_and_fewer_prompts_repeat():
    ranks = [samplers(num_prompts=50, batch_size=50, num_generations=1, dp_size=1, seed=seed)[0] for seed in (0, 1)]
    orders = [tuple(video.prompt_index for video in rank.next_round()) for rank in ranks * 2]
    assert len({*orders, tuple(range(50))}) == 5
    (rank,) = samplers(num_prompts=1, batch_size=4, num_generations=2, dp_size=1)
    assert rank.next_round() == [Assignment(0, generation) for generation in range(4)]


def test_a_state_continues_the_epoch_on_another_number_of_ranks():
    before = samplers(num_prompts=12, batch_size=4, num_generations=4, dp_size=4)
    seen = Counter(video.prompt_index for _ in range(2) for video in joined_round(before)[::4])
    after = samplers(num_prompts=12, batch_size=4, num_generations=4, dp_size=2)
    for rank in after:
        rank.load_state_dict(before[0].state_dict())
    seen.update(video.prompt_index for _ in range(2) for video in joined_round(after)[::4])
    assert seen == Counter(range(12))


@settings(deadline=None)
@given(layouts(), st.integers(2, 4))
def test_rollouts_of_one_round_are_dealt_in_turn_and_hold_no_video_twice(layout, num_rollouts):
    together, apart = samplers(*layout, num_rollouts=num_rollouts), samplers(*layout)
    rounds = [rank.next_round() for rank in together]
    for rank, videos in zip(apart, rounds, strict=True):
        one_by_one = [video for _ in range(num_rollouts) for video in rank.next_round()]
        assert [video.prompt_index for video in videos] == [video.prompt_index for video in one_by_one]
    everything = [video for videos in rounds for video in videos]
    assert len(set(everything)) == len(everything) == num_rollouts * layout[1] * layout[3]
    assert together[0].round == 1
