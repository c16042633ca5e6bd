"""A pytest plugin for CI: a comparison with PyTorch that was not made fails the run, it is not passed over."""

from __future__ import annotations

import pytest

wanted: set[str] = set()
passed: set[str] = set()
missing: list[str] = []


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.skipped:
        missing.append(f"{report.nodeid} (the whole file)")


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    # Markers are among a report's keywords. With several test processes, reports are all that this one sees.
    if "torch" in report.keywords:
        wanted.add(report.nodeid)
    if report.when == "call" and report.passed:
        passed.add(report.nodeid)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):  # a test process, which sees only its share
        return
    missing.extend(sorted(wanted - passed))
    if not wanted:
        missing.append("all of them: no test carries the marker `torch`")
    if missing and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    terminalreporter.line(f"comparisons with PyTorch: {len(wanted & passed)} of {len(wanted)} passed")
    for name in missing:
        terminalreporter.line(f"NOT COMPARED: {name}", red=True)
