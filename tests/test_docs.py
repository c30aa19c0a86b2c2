"""What the README and the documentation show is run, or at least checked against the program.

Python blocks of a page are run one after another as one script. A block that starts with
``# file: NAME`` is written to that file instead, files named ``test_*.py`` are then run by pytest,
and entry points in a ``toml`` block are installed. Shell commands are checked for names of commands
and options; ``<!-- not run -->`` before a Python block leaves it out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[1]
PAGES = [REPOSITORY / "README.md", *sorted((REPOSITORY / "docs").glob("**/*.md"))]
LINKING = [*PAGES, REPOSITORY / "CHANGELOG.md"]
BLOCK = re.compile(
    r"^(?P<skip><!-- not run -->\n+)?^```(?P<kind>\w+)[^\n]*\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)


def blocks(page, *kinds):
    found = BLOCK.finditer(page.read_text(encoding="utf-8"))
    return [m["text"] for m in found if m["kind"] in kinds and not m["skip"]]


def name_of(page):
    return str(page.relative_to(REPOSITORY))


def install(folder, project):
    """Write what an installation of a project would leave on the path."""
    meta = folder / f"{project['project']['name']}-{project['project']['version']}.dist-info"
    meta.mkdir()
    (meta / "METADATA").write_text(f"Name: {project['project']['name']}\nVersion: 0.1\n")
    lines = []
    for group, points in project["project"].get("entry-points", {}).items():
        lines += [f"[{group}]", *(f"{name} = {value}" for name, value in points.items())]
    (meta / "entry_points.txt").write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_blocks_run(page, tmp_path):
    session = []
    for text in blocks(page, "python"):
        if named := re.match(r"# file: ([\w./]+)\n", text):
            with (tmp_path / named[1]).open("a", encoding="utf-8") as file:
                file.write(text[named.end() :] + "\n\n")
        else:
            session.append(text)
    for text in blocks(page, "toml"):
        project = tomllib.loads(text)
        if "project" in project:
            install(tmp_path, project)
    (tmp_path / "session.py").write_text("\n".join(session), encoding="utf-8")
    commands = [[sys.executable, "session.py"]]
    if any(tmp_path.glob("test_*.py")):
        commands.append(
            [sys.executable, "-m", "pytest", "-q", "--show-capture=no", "-p", "no:cacheprovider"]
        )
    for command in commands:
        done = subprocess.run(
            command,
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(tmp_path)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command[1:]}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def shell_lines(page):
    for text in blocks(page, "bash", "sh", "shell", "console"):
        for line in text.replace("\\\n", " ").splitlines():
            yield from line.removeprefix("$ ").split("&&")


def programs(page):
    """``(command to ask for help, options used)`` of our own command lines on a page."""
    for line in shell_lines(page):
        words = shlex.split(line, comments=True)
        while words and re.fullmatch(r"\w+=.*", words[0]):
            words = words[1:]
        program, *rest = [Path(words[0]).name, *words[1:]] if words else [""]
        if program in ("python", "python3") and rest[0] == "-m":
            if not rest[1].startswith("agentbench_prefix"):
                continue
            command = [sys.executable, *rest[:2]]
        elif program in ("python", "python3") and rest[0].endswith(".py"):
            command = [sys.executable, rest[0]]
        elif program == "agentbench-prefix":
            grouped = rest[:1] in (["corpus"], ["hub"], ["leaderboard"])
            words_of_it = 2 if grouped else 1
            command = [sys.executable, "-m", "agentbench_prefix", *rest[:words_of_it]]
        else:
            continue
        yield command, [word.partition("=")[0] for word in words if word.startswith("--")]


@pytest.mark.parametrize("page", [page for page in PAGES if any(programs(page))], ids=name_of)
def test_commands_and_options_exist(page):
    helps = {}
    for command, options in programs(page):
        key = tuple(command)
        if key not in helps:
            done = subprocess.run(
                [*command, "--help"],
                cwd=REPOSITORY,
                env={**os.environ, "COLUMNS": "200"},
                capture_output=True,
                text=True,
                check=False,
            )
            assert done.returncode == 0, f"{command[1:]} fails: {done.stderr[-2000:]}"
            helps[key] = done.stdout
        for option in options:
            assert re.search(rf"{re.escape(option)}\b", helps[key]), (
                f"{command[1:]} has no {option}"
            )


@pytest.mark.parametrize("page", LINKING, ids=name_of)
def test_links_lead_somewhere(page):
    text = page.read_text(encoding="utf-8")
    for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        if not re.match(r"[a-z]+:", target):
            assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_extras_exist(page):
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for line in shell_lines(page):
        if "pip install" in line:
            for extras in re.findall(r"\[([\w, -]+)\]", line):
                for extra in extras.split(","):
                    assert extra.strip() in project["optional-dependencies"]


def test_the_versions_agree():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    citation = (REPOSITORY / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\nversion: {project['version']}\n" in citation
    assert f"\nlicense: {project['license']}\n" in citation
