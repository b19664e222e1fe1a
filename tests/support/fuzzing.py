"""What fuzz tests share: hostile values, damage done to what was valid, and the one thing that may come out."""

import contextlib
import copy
import json
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


def fuzz(share: int = 1) -> settings:
    """Make one in `share` of 100 examples, with HYPOTHESIS_PROFILE=long of 10,000; one of 20 seconds has hung."""
    examples = settings().max_examples // share
    return settings(max_examples=examples, deadline=timedelta(seconds=20), suppress_health_check=list(HealthCheck))


HOSTILE = ["", "..", "/etc/passwd", "../../x", "\0", "\ud800", "a" * 5000, "nan", "1e999", "-1", "(a+)+$"]
HOSTILE += ["[", "\u2028"]
TEXTS = st.text(max_size=8) | st.sampled_from(HOSTILE)
LARGE = [2**31, 2**63, -(2**63) - 1, 10**30, -(10**400), 10**400, 0.5, -0.0, 1e39, 1e308]
SCALARS = st.none() | st.booleans() | st.integers(-5, 5) | st.sampled_from(LARGE) | st.floats() | TEXTS
TREES = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=6
)
"""Anything that JSON can say."""

TOKENS = (b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 3000, b'{"a":' * 3000, b'"', b"\0", b"\xff", b"\\ud800")


@st.composite
def changed(draw: st.DrawFn, valid: Any) -> Any:
    """A copy of a JSON tree in which one to three places were replaced, removed or renamed, or got a neighbour."""
    tree = [copy.deepcopy(valid)]
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(tree))
        parent, key = draw(st.sampled_from(places))
        action = draw(st.sampled_from(["replace", "replace", "remove", "add", "rename"]))
        if action == "replace" or parent is tree:
            parent[key] = draw(TREES)
        elif action == "remove":
            del parent[key]
        elif isinstance(parent, list):
            parent.insert(key, draw(TREES))
        elif action == "add":
            parent[draw(TEXTS)] = draw(TREES)
        else:
            parent[draw(TEXTS)] = parent.pop(key)
    return tree[0]


def _places(node: Any) -> Iterator[tuple[Any, Any]]:
    for key in list(node) if isinstance(node, dict) else range(len(node)):
        yield node, key
        if isinstance(node[key], dict | list):
            yield from _places(node[key])


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """Bytes with up to three pieces cut out, doubled, exchanged for others or for what a reader may stumble over."""
    for _ in range(draw(st.integers(1, 3))):
        start = draw(st.integers(0, len(content)))
        stop = draw(st.integers(start, min(len(content), start + draw(st.sampled_from([0, 1, 4, 100, 10**6])))))
        doubled = st.just(content[start:stop] * 2)
        piece = draw(st.one_of(st.just(b""), doubled, st.binary(max_size=4), st.sampled_from(TOKENS)))
        content = content[:start] + piece + content[stop:]
    return content


def json_files(valid: Any) -> st.SearchStrategy[bytes]:
    """Content of a file that should have held `valid`: other trees, damaged text, no JSON at all."""
    whole = json.dumps(valid).encode()
    trees = st.one_of(changed(valid), changed(valid), TREES).map(lambda tree: json.dumps(tree).encode())
    return st.one_of(trees, trees, damaged(whole), st.binary(max_size=20), st.sampled_from(TOKENS))


@contextlib.contextmanager
def only_value_errors(*names: object) -> Iterator[None]:
    """Let a ValueError pass that says one of `names`; whatever else comes out fails the test."""
    try:
        yield
    except ValueError as error:
        assert any(str(name) in str(error) for name in names), f"names none of {names}: {error!r:.500}"
