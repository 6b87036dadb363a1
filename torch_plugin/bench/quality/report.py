"""The output of ``gflow bench quality``: tables in Markdown, and plots.

It states facts and judges nothing. Every training of a method counts; differences to dense are
taken between trainings with the same seed, which have the same weights and data.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from gflow.bench.quality.runs import DENSE
from gflow.bench.quality.tasks import TASKS
from gflow.bench.units import show_rate

Row = dict[str, Any]


class Setting(NamedTuple):
    """What trainings have in common that are compared with each other."""

    task: str
    hosts: int
    rate: int | None
    steps: int

    @classmethod
    def of(cls, row: Row) -> Setting:
        """The setting of one training."""
        return cls(*(row[name] for name in cls._fields))

    @property
    def title(self) -> str:
        """It in words.

        Example:
            >>> Setting("gpt", 2, None, 4000).title
            'gpt, 2 hosts on loopback, 4000 steps'
        """
        where = f"with links of {show_rate(self.rate)}" if self.rate else "on loopback"
        return f"{self.task}, {self.hosts} hosts {where}, {self.steps} steps"


@dataclass(frozen=True)
class Spread:
    """Mean and standard deviation of some numbers, such as what several trainings ended with."""

    mean: float
    deviation: float
    count: int

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Spread:
        """Of at least one number; one alone has no deviation.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0])
            Spread(mean=2.0, deviation=1.0, count=3)
        """
        deviation = statistics.stdev(numbers) if len(numbers) > 1 else float("nan")
        return cls(statistics.fmean(numbers), deviation, len(numbers))

    def show(self, form: str) -> str:
        """It as text, with numbers in this form.

        Example:
            >>> Spread.of([1.0, 2.0, 3.0]).show("+.2f"), Spread.of([2.0]).show(".1f")
            ('+2.00 ± 1.00', '2.0')
        """
        deviation = f" ± {self.deviation:{form.lstrip('+')}}" if self.count > 1 else ""
        return f"{self.mean:{form}}{deviation}"


def above_dense(own: Sequence[Row], dense: Sequence[Row]) -> Spread | None:
    """By how many percent losses are above those of dense with the same seed; None without any.

    Example:
        >>> dense = [{"seed": 0, "loss": 2.0}, {"seed": 1, "loss": 4.0}]
        >>> above_dense([{"seed": 1, "loss": 4.2}, {"seed": 0, "loss": 2.02}], dense).show("+.1f")
        '+3.0 ± 2.8'
    """
    losses = {row["seed"]: row["loss"] for row in dense}
    differences = [
        100 * (row["loss"] / losses[row["seed"]] - 1) for row in own if row["seed"] in losses
    ]
    return Spread.of(differences) if differences else None


def tables(rows: Sequence[Row]) -> str:
    """All trainings by setting: the methods, and the learning rates of dense if there are several.

    A table of methods has the trainings at the learning rate of the task.
    """
    parts = []
    for setting, own in _grouped(rows, Setting.of).items():
        sweep = _grouped([row for row in own if row["method"] == DENSE], _learning_rate)
        compared = [row for row in own if _learning_rate(row) == TASKS[setting.task].learning_rate]
        methods = _grouped(compared, _method)
        parts.append(f"## {setting.title}\n\n{_words(own)}")
        if len(methods) > 1 or len(sweep) <= 1:
            parts.append(_method_table(methods, _dense(rows, setting)))
        if len(sweep) > 1:
            parts.append(_sweep_table(sweep))
        parts += [f"note: {text}" for text in _warnings(own)]
    parts.append(_MEANING)
    return "\n\n".join(parts)


_MEANING = (
    "Held-out loss after the last step, as mean ± standard deviation over the seeds. Above dense: "
    "the differences to dense with the same seed (the same weights and data), in percent. Fewer "
    "bytes: what an exact ring would send over what was sent, in the second half of the training. "
    "Noise: the variance that compression added, relative to the square of the gradient, as "
    "gflow's audits found it: their median, and the largest. A step: its median on the first rank, "
    "without evaluations, on whatever else the machine did."
)


def _words(rows: Sequence[Row]) -> str:
    task = TASKS[rows[0]["task"]]
    torch = ", ".join(sorted({row["torch"] for row in rows}))
    return f"{task.summary}. {rows[0]['parameters']} parameters, torch {torch}."


def _dense(rows: Sequence[Row], setting: Setting) -> list[Row]:
    """Dense of a setting; without any, that over other links: exact sums are the same on all."""
    dense = [
        row
        for row in rows
        if _method(row) == DENSE and _learning_rate(row) == TASKS[setting.task].learning_rate
    ]
    anywhere = setting._replace(rate=None)
    own = [row for row in dense if Setting.of(row) == setting]
    return own or [row for row in dense if Setting.of(row)._replace(rate=None) == anywhere]


def _method_table(methods: dict[str, list[Row]], dense: Sequence[Row]) -> str:
    cells = []
    for method, own in methods.items():
        difference = above_dense(own, dense) if method != DENSE else None
        cells.append(
            [
                f"{method} (dense)" if method == DENSE else method,
                f"{statistics.median(row['ratio'] for row in own):.1f} x",
                _spread_of(own, "loss").show(".4f"),
                f"{difference.show('+.2f')} %" if difference else "",
                Spread.of([100 * row["accuracy"] for row in own]).show(".2f"),
                _noise(own),
                f"{statistics.median(row['step_ms'] for row in own):.1f}",
                ", ".join(str(row["seed"]) for row in sorted(own, key=lambda row: row["seed"])),
            ]
        )
    header = ["method", "fewer bytes", "held-out loss", "above dense", "accuracy %",
              "noise", "ms per step", "seeds"]  # fmt: skip
    shown = _markdown(header, cells)
    if len(dense) > 1:
        spread = _spread_of(dense, "loss")
        share = 100 * spread.deviation / spread.mean
        shown += f"\n\nThe seeds of dense spread by {share:.2f} % (standard deviation)."
    return shown


def _sweep_table(sweep: dict[float, list[Row]]) -> str:
    ordered = sorted(sweep.items())
    best, of_best = min(ordered, key=lambda item: _spread_of(item[1], "loss").mean)
    cells = [
        [f"{rate:g}", _spread_of(own, "loss").show(".4f"),
         f"{100 * (_spread_of(own, 'loss').mean / _spread_of(of_best, 'loss').mean - 1):+.2f} %",
         ", ".join(str(row["seed"]) for row in own)]
        for rate, own in ordered
    ]  # fmt: skip
    header = ["learning rate of dense", "held-out loss", "above the best", "seeds"]
    default = TASKS[of_best[0]["task"]].learning_rate
    verdict = "the task's own" if best == default else f"the task's own is {default:g}"
    edge = best in (ordered[0][0], ordered[-1][0])
    return (
        f"{_markdown(header, cells)}\n\nBest: {best:g} ({verdict})"
        f"{', at the edge of what was tried' if edge else ''}."
    )


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table whose columns are also aligned for those who read it as text."""
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]
    lines = [header, ["-" * width for width in widths], *rows]
    padded = [
        [cell.ljust(width) for cell, width in zip(line, widths, strict=True)] for line in lines
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in padded)


def _noise(rows: Sequence[Row]) -> str:
    noises = [audit["noise"] for row in rows for audit in row["audits"]]
    return f"{statistics.median(noises):.3f} ({max(noises):.3f})" if noises else ""


def _warnings(rows: Sequence[Row]) -> list[str]:
    return sorted({text for row in rows for text in row["warnings"]})


def _spread_of(rows: Sequence[Row], what: str) -> Spread:
    return Spread.of([row[what] for row in rows])


def _learning_rate(row: Row) -> float:
    return float(row["learning_rate"])


def _method(row: Row) -> str:
    return str(row["method"])


def _grouped(rows: Sequence[Row], key: Callable[[Row], Any]) -> dict[Any, list[Row]]:
    """The rows by some key, in the order in which their first came."""
    found: dict[Any, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


# --- the plot

_DENSE = "#333333"
_COLOURS = ("#e6550d", "#3182bd", "#31a354", "#756bb1", "#a50f15", "#636363", "#d4a000", "#17a2a2",
            "#e377c2")  # fmt: skip
_STYLES = ("-", "--", "-.", ":")


def plot(rows: Sequence[Row], path: Path) -> None:
    """Draw a row of panels for each setting: the held-out loss over steps and over time, and by how
    much it is above dense.

    A line is the mean over all seeds; the band is a standard deviation in each direction.
    """
    from matplotlib.figure import Figure

    settings = {
        setting: _grouped(
            [row for row in own if _learning_rate(row) == TASKS[setting.task].learning_rate],
            _method,
        )
        for setting, own in _grouped(rows, Setting.of).items()
    }
    settings = {setting: methods for setting, methods in settings.items() if methods}
    if not settings:
        raise ValueError("there is no training at the learning rate of its task")
    figure = Figure(figsize=(15, 0.6 + 3.6 * len(settings)), layout="constrained")
    grid = figure.subplots(len(settings), 3, squeeze=False)
    # A method looks the same in all panels.
    looks = _looks(dict.fromkeys(method for methods in settings.values() for method in methods))
    for (setting, methods), (steps, times, differences) in zip(settings.items(), grid, strict=True):
        dense = _dense(rows, setting)
        for method, own in methods.items():
            _draw(steps, own, "step", method, looks[method])
            _draw(times, own, "seconds", method, looks[method])
            if method != DENSE:
                _draw_difference(differences, own, dense, method, looks[method])
        steps.set_title(setting.title, loc="left", fontsize=10)
        steps.set_ylabel("held-out loss")
        steps.legend(frameon=False, fontsize=8)
        for axes, word in ((steps, "step"), (times, "seconds of training, as measured"),
                           (differences, "step")):  # fmt: skip
            axes.set_xlabel(word)
            axes.grid(which="both", alpha=0.3)
        differences.axhline(0, color=_DENSE, linewidth=1)
        differences.set_ylabel("held-out loss above dense, %")
        _zoom(differences)
    figure.savefig(path, dpi=110)


def _looks(methods: Iterable[str]) -> dict[str, dict[str, str]]:
    others = [method for method in methods if method != DENSE]
    looks = {
        method: {
            "color": _COLOURS[number % len(_COLOURS)],
            "linestyle": _STYLES[number % len(_STYLES)],
        }
        for number, method in enumerate(others)
    }
    return looks | {DENSE: {"color": _DENSE, "linestyle": "-"}}


def _draw(axes: Any, own: Sequence[Row], column: str, label: str, look: dict[str, str]) -> None:
    # The points of all seeds are at the same steps, and at about the same times. The first is of
    # random weights.
    points = list(zip(*(row["curve"][1:] or row["curve"] for row in own), strict=True))
    positions = [statistics.fmean(one[column] for one in point) for point in points]
    _line(axes, positions, [[one["loss"] for one in point] for point in points], label, look)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter("{x:g}")
    axes.yaxis.set_minor_formatter("{x:g}")
    axes.tick_params(which="both", labelsize=8)


def _draw_difference(
    axes: Any, own: Sequence[Row], dense: Sequence[Row], label: str, look: dict[str, str]
) -> None:
    curves = {row["seed"]: row["curve"] for row in dense}
    paired = [
        [
            (mine["step"], 100 * (mine["loss"] / its["loss"] - 1))
            for mine, its in zip(row["curve"][1:], curves[row["seed"]][1:], strict=True)
        ]
        for row in own
        if row["seed"] in curves
    ]
    if not paired:
        return
    points = list(zip(*paired, strict=True))
    positions = [float(point[0][0]) for point in points]
    _line(axes, positions, [[percent for _, percent in point] for point in points], label, look)


def _line(
    axes: Any,
    positions: Sequence[float],
    values: Sequence[Sequence[float]],
    label: str,
    look: dict[str, str],
) -> None:
    spreads = [Spread.of(numbers) for numbers in values]
    axes.plot(positions, [one.mean for one in spreads], label=label, linewidth=1.4, **look)
    if spreads and spreads[0].count > 1:
        low = [one.mean - one.deviation for one in spreads]
        high = [one.mean + one.deviation for one in spreads]
        axes.fill_between(positions, low, high, color=look["color"], alpha=0.12, linewidth=0)


def _zoom(axes: Any, most: float = 8.0) -> None:
    """Keep a method that is far off from flattening all the others."""
    low, high = axes.get_ylim()
    axes.set_ylim(max(low, -most), min(high, most))
