"""Builds that kill themselves at a file operation, run apart by the tests of building.

``python killed_builds.py RECIPE FOLDER FIRST STEP`` builds again and again, each time killed with
SIGKILL at one more file operation, and goes on with it until it is done. One line of JSON each.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

from agentbench_prefix.corpora import build as module
from agentbench_prefix.corpora.recipe import load_corpus_recipe

OPERATIONS = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod"}


def same_everywhere() -> None:
    """Small parts, and no trace of what else is going on in the checkout."""
    module.PART = 1
    module.code_version = lambda: "tested"


def tree(folder: Path) -> dict[str, object]:
    """Every file of a corpus; the manifest without the time it was made."""
    found: dict[str, object] = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = json.loads(found.pop("manifest.json"))  # type: ignore[arg-type]
    assert manifest.pop("created")
    return {**found, "manifest.json": manifest}


def kill_at(moment: int, folder: Path) -> None:
    """Kill this process at its so-manieth file operation in a folder."""
    seen = 0

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event == "open":
            # Only those that write.
            concerned = isinstance(arguments[2], int) and bool(arguments[2] & os.O_WRONLY)
        else:
            concerned = event in OPERATIONS
        if concerned and str(folder) in str(arguments[0]):
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(hook)


def apart(recipe: Path, out: Path, moment: int) -> int:
    """Build in a process of its own; its wait status."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if moment:
                kill_at(moment, out.parent)
            module.build(load_corpus_recipe(recipe), out)
            code = 0
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1]


def main(recipe: Path, root: Path, first: int, step: int) -> None:
    """Kill at every ``step``-th operation until a build is through before it is killed."""
    same_everywhere()
    assert apart(recipe, root / "whole" / "corpus", 0) == 0
    expected = tree(root / "whole" / "corpus")
    moment = first
    while True:
        out = root / str(moment) / "corpus"
        status = apart(recipe, out, moment)
        killed = os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL
        early = not out.exists() or tree(out) == expected
        again = apart(recipe, out, 0)
        result = {
            "moment": moment,
            "killed": killed,
            "status": status,
            "absent until complete": early,
            "goes on": again == 0,
            "same": again == 0 and tree(out) == expected,
            "left": sorted(path.name for path in out.parent.iterdir() if path != out),
        }
        print(json.dumps(result), flush=True)  # noqa: T201
        if not killed:
            return
        moment += step


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
