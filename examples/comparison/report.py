"""The demo's results as text: a table, and sentences about what it shows in this run."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence

from comparison.methods import METHODS
from comparison.processors import QUIET_SHARE
from comparison.runs import TOLERANCE, Result
from gflow.bench.table import render


def result_table(results: Mapping[str, Result]) -> str:
    """One row per method."""
    first = next(iter(results.values()))
    header = [
        *("", "s to target", "speed", "s in all", "ms per step", "MB per step"),
        *("held-out loss", "accuracy"),
    ]
    rows = [
        [
            METHODS[key].label,
            _or_dash(result.time_to_target, lambda seconds: f"{seconds:.1f}"),
            _or_dash(_speed(result, first), lambda ratio: f"{ratio:.2f}x"),
            f"{result.seconds:.1f}",
            f"{result.step_ms:.1f}",
            f"{result.sent_bytes / 1e6:.2f}",
            _with_range(result.losses, lambda loss: f"{loss:.4f}"),
            _with_range(result.accuracies, lambda share: f"{share:.1%}"),
        ]
        for key, result in results.items()
    ]
    return render(header, rows)


def how_it_was_measured(
    results: Mapping[str, Result], seeds: int, evaluation_steps: int, interface: str
) -> str:
    """Explains the columns."""
    sender = "a host" if interface != "lo" else "the loopback interface, shared among the ranks,"
    first = METHODS[next(iter(results))].label
    return "\n".join(
        (
            f"target:     the held-out loss that {first} ends with from the same seed, plus "
            f"{TOLERANCE:.0%}: so it is as good a model,",
            "            and the chance by which two trainings differ that round differently does "
            "not decide",
            f"s:          seconds of training, evaluations (every {evaluation_steps} steps) not "
            "counted",
            f"ms, MB:     median over the second half of the steps; MB: all that {sender} sent",
            f"loss, acc.: after the last step, mean (least..most) over the seeds ({seeds})",
        )
    )


def conclusions(results: Mapping[str, Result]) -> list[str]:
    """Each method against the first, in a sentence."""
    (first, baseline), *others = results.items()
    name = METHODS[first].label
    return [f"{METHODS[key].label}: {_against(result, baseline, name)}" for key, result in others]


def _against(result: Result, baseline: Result, name: str) -> str:
    reached = _speed(result, baseline)
    bytes_share = f"{result.sent_bytes / baseline.sent_bytes:.1%} of its bytes per step"
    if reached is None:
        count = sum(one is None for one in result.seconds_to_target)
        return (
            f"of {len(result.losses)} trainings {count} did not reach {name}'s loss; "
            f"{baseline.seconds / result.seconds:.2f} times as fast in all, {bytes_share}."
        )
    accuracy = statistics.fmean(result.accuracies)
    least, most = min(baseline.accuracies), max(baseline.accuracies)
    place = "below" if accuracy < least else "above" if accuracy > most else "within"
    return (
        f"{reached:.2f} times as fast to {name}'s loss, {bytes_share}; its accuracy is {place} "
        f"the range of {name}'s seeds."
    )


def own_count(counters: Mapping[str, float]) -> str:
    """gflow's own counters per step, over all steps."""
    return (
        f"By gflow's own count, per step of all: {counters['gradient_bytes'] / 1e6:.2f} MB of "
        f"gradients, {counters['wire_bytes'] / 1e6:.2f} MB sent, "
        f"{counters['hidden_seconds'] * 1e3:.1f} ms of exchange behind the backward, "
        f"{counters['exposed_seconds'] * 1e3:.1f} ms of waiting for it."
    )


def trust(share_of_others: float) -> str:
    """How far the times can be trusted."""
    text = f"Other programs took {share_of_others:.0%} of the processors meanwhile"
    if share_of_others > QUIET_SHARE:
        return text + ": the times are rough, repeat on a quiet machine."
    return text + "."


def _speed(result: Result, first: Result) -> float | None:
    """How many times as fast it reached the target as the first method; None if it did not."""
    own, other = result.time_to_target, first.time_to_target
    return None if own is None or other is None else other / own


def _or_dash(number: float | None, show: Callable[[float], str]) -> str:
    return "-" if number is None else show(number)


def _with_range(numbers: Sequence[float], show: Callable[[float], str]) -> str:
    mean = show(statistics.fmean(numbers))
    return mean if len(numbers) == 1 else f"{mean} ({show(min(numbers))}..{show(max(numbers))})"
