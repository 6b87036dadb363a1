"""Tests the gate opener on small sources: what it widens, what it leaves, what it refuses. No torch
is needed: it works on syntax trees.
"""

from __future__ import annotations

import ast

import pytest

from .gates import UnknownGateError, open_for


def opened(source: str) -> str:
    return ast.unparse(open_for("gflow", source)[0])


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("BACKEND == 'gloo'", "BACKEND in ('gloo', 'gflow')"),
        ("'gloo' != BACKEND", "BACKEND not in ('gloo', 'gflow')"),
        ("b == dist.Backend.GLOO", "b in (dist.Backend.GLOO, 'gflow')"),
        ("BACKEND in {'gloo', 'nccl'}", "BACKEND in {'gloo', 'nccl', 'gflow'}"),
        ("ALLOWED = [dist.Backend.GLOO]", "ALLOWED = [dist.Backend.GLOO, 'gflow']"),
        (
            "BACKEND != 'gloo' and BACKEND != 'nccl'",
            "BACKEND not in ('gloo', 'gflow') and BACKEND != 'nccl'",
        ),
        (
            "require_backend_is_available({'gloo'})",
            "require_backend_is_available({'gloo', 'gflow'})",
        ),
    ],
)
def test_gate_is_opened(before: str, after: str) -> None:
    assert opened(before) == after


@pytest.mark.parametrize(
    "source",
    [
        "BACKEND == 'nccl'",
        "dist.new_group(backend='gloo')",
        "dist.new_group(timeout=t, backend=dist.Backend.GLOO)",
        "dist.Backend(['gloo'])",
        "ddp_logging_data.get('backend_name') == 'gloo'",
        "skip(BACKEND == 'nccl', 'Gloo-only test')",
    ],
)
def test_what_is_no_gate_stays(source: str) -> None:
    assert opened(source) == source


@pytest.mark.parametrize(
    "source",
    [
        "check('gloo')",
        "BACKEND.startswith('gloo')",
        "{'gloo': 1}[BACKEND]",
        "f(backend=dist.Backend.GLOO)",
        "title = 'gloo:all_reduce'",
        "init(backend='cpu:gloo,cuda:nccl')",
        "a == BACKEND == 'gloo'",
        "'gloo' == BACKEND or names['gloo']",
    ],
)
def test_unknown_mention_is_refused(source: str) -> None:
    with pytest.raises(UnknownGateError):
        open_for("gflow", source)


def test_lines_stay_where_they_were() -> None:
    tree, mentions = open_for("gflow", "\n\nBACKEND != 'gloo'")
    assert tree.body[0].lineno == 3
    assert [mention.line for mention in mentions] == [3]
