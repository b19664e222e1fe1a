"""What ranks send is what sharding and Ulysses need, counted in bytes; it does not grow with the number of videos."""

from benchmarks.communication import measure
from tests.support.ranks import run_on_ranks

SETTINGS = {
    "dp 4": {"sp_size": 1},
    "dp 2 x sp 2, recomputed": {"sp_size": 2, "recompute": True},
    "sp 4, twice the frames": {"sp_size": 4, "frames": 8},
    "copies 2 x dp 2": {"sp_size": 1, "dp_replicate": 2},
}


def measure_all(settings: dict[str, dict]) -> dict[str, dict[str, dict[str, int]]]:
    """Measure several settings in one launch."""
    return {name: measure(**chosen) for name, chosen in settings.items()}


def test_bytes_sent_are_the_least_but_for_padded_shards():
    first, *_ = run_on_ranks(4, measure_all, SETTINGS)
    for name, kinds in first.items():
        print(f"{name}: " + ", ".join(f"{k} {v['counted']}/{v['least']}" for k, v in kinds.items()))
        for kind, sent in kinds.items():
            if kind in ("tokens", "condition"):
                assert sent["counted"] == sent["least"], (name, kind)
            else:  # shards of one size: the last is padded where ranks do not divide the rows of a weight
                assert sent["least"] <= sent["counted"] <= 1.02 * sent["least"], (name, kind)
