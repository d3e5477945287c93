# SPDX-License-Identifier: Apache-2.0
"""The findings of ``doctor``, and how to print them."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from rich.text import Text

Status = Literal["ok", "warning", "failure"]


@dataclass(frozen=True)
class Finding:
    """One finding, under a ``name`` in a ``section``: the text, and advice if something is wrong.

    ``devices`` names the devices of a self-test that the finding asks for.
    """

    status: Status
    section: str
    name: str
    text: str
    advice: str = ""
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class Report:
    """All findings, in the order of printing."""

    findings: tuple[Finding, ...]

    def having(self, status: Status) -> list[Finding]:
        """Return the findings of one status."""
        return [finding for finding in self.findings if finding.status == status]

    @property
    def ok(self) -> bool:
        """Whether no finding is a failure."""
        return not self.having("failure")

    def as_dict(self) -> dict[str, Any]:
        """Return the report as ``--json`` prints it."""
        names = ("status", "section", "name", "text", "advice")
        return {"ok": self.ok, "findings": [{name: getattr(each, name) for name in names} for each in self.findings]}


def print_report(report: Report, console: Console) -> None:
    """Print a report, with a verdict as the last line."""
    styles = {"ok": "green", "warning": "yellow", "failure": "bold red"}
    for section, findings in itertools.groupby(report.findings, lambda finding: finding.section):
        table = Table.grid(padding=(0, 2))
        for finding in findings:
            text = Text(finding.text)
            if finding.advice:
                text.append(f"\n-> {finding.advice}")
            table.add_row("", Text(finding.status, styles[finding.status]), Text(finding.name), text)
        console.print(Text(section, "bold"))
        console.print(table)
    warnings, failures = report.having("warning"), report.having("failure")
    if failures:
        names = "; ".join(f"{finding.section}, {finding.name}" for finding in failures)
        console.print(Text(f"FAILED: {len(failures)} of {len(report.findings)} findings ({names})", styles["failure"]))
    else:
        plural = "" if len(warnings) == 1 else "s"
        console.print(Text(f"ok: {len(report.findings)} findings, {len(warnings)} warning{plural}"))
