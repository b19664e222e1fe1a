"""What benchmarks leave on disk, and when they call something slower."""

from functools import partial
from pathlib import Path

from benchmarks.__main__ import verdict, write_table
from benchmarks.paired import Result, Spread, compare


def result(median: float, low: float, high: float, name: str = "a/b") -> Result:
    return Result(name, "old / new", Spread(median, low, high, 7), {"seconds": 0.123456})


def test_a_verdict_needs_a_difference_and_ranges_that_part():
    before = {"a/b": result(2.0, 1.9, 2.1).as_json()}
    for overlapping_or_within_a_tenth in ((2.0, 1.9, 2.1), (1.7, 1.6, 1.95), (1.85, 1.84, 1.86)):
        assert verdict(result(*overlapping_or_within_a_tenth), before) == "as before"
    found = (result(1.7, 1.6, 1.75), result(2.4, 2.3, 2.5), result(2.0, 1.9, 2.1, name="c"))
    assert [verdict(one, before) for one in found] == ["slower", "faster", "new"]


def test_the_table_of_a_machine_replaces_its_own_and_leaves_the_rest(tmp_path: Path):
    document = tmp_path / "performance.md"
    document.write_text("# Speed\n\nText.\n")
    for median in (2.0, 3.0):
        write_table("cpu", {"a/b": result(median, 1.0, 4.0).as_json()}, document)
    write_table("gpu", {"c": result(1.0, 0.5, 1.5, name="c").as_json()}, document)
    text = document.read_text()
    assert text.startswith("# Speed\n\nText.\n") and text.index("### cpu") < text.index("### gpu")
    assert text.count("| a/b |") == 1 and "| a/b | old / new | **3.00** (1.00 - 4.00) |" in text


def test_both_ways_are_run_in_turns_and_settled_after_each():
    order = []
    b, c, settle = (partial(order.append, letter) for letter in "bc.")
    compared = compare("a", "b / c", b, c, pairs=3, settle=settle)
    assert "".join(order) == "b.c." + "c.b." + "b.c." + "c.b." and compared.ratio.pairs == 3
    assert compared.ratio.low <= compared.ratio.median <= compared.ratio.high
