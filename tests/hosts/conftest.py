"""Fixtures of the tests on several hosts: the hosts, and measurements for the summary.

Where network namespaces can't be created, tests are skipped with the reason.
"""

from collections.abc import Callable, Iterator

import pytest

from gflow.launch.namespaces import Network, why_not


@pytest.fixture
def hosts() -> Iterator[Callable[..., Network]]:
    """`hosts(2)`: a network of two hosts, removed after the test."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    made: list[Network] = []

    def make(count: int, planes: int = 1, ipv4: bool = True) -> Network:
        made.append(Network(count, planes, ipv4))
        return made[-1]

    yield make
    for network in made:
        network.close()


@pytest.fixture
def measured(record_property: Callable[[str, object], None]) -> Callable[[str], None]:
    """Records a measurement for the summary at the end of the run; no test depends on it."""
    return lambda text: record_property("measured", text)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    lines = [
        f"{report.nodeid.partition('::')[2]}: {text}"
        for outcome in ("passed", "failed")
        for report in terminalreporter.getreports(outcome)
        for name, text in report.user_properties
        if name == "measured" and report.when == "call"
    ]
    if lines:
        terminalreporter.section("measured, for information")
        for line in lines:
            terminalreporter.line(line)
