"""What is installed, what importing costs, and what works without the extras."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
import zipfile

import pytest
from hatchling.builders.wheel import WheelBuilder

from agentbench_prefix import environment_ids

HEAVY = ("torch", "transformers", "pandas", "scipy", "trl", "vllm", "hypothesis", "pytest")

# Makes the named packages unimportable, as on a machine without the extras.
BLOCKER = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {blocked}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Blocker())
"""


def python(code, *, cwd=None, blocked=()):
    if blocked:
        code = BLOCKER.format(blocked=set(blocked)) + code
    return subprocess.run(
        [sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True, check=False
    )


def extras(repository):
    text = (repository / "pyproject.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)["project"]["optional-dependencies"]


def test_importing_the_package_is_light(tmp_path):
    done = python("import agentbench_prefix, sys, json; print(json.dumps(list(sys.modules)))")
    assert done.returncode == 0, done.stderr
    loaded = set(json.loads(done.stdout))
    assert "agentbench_prefix.env" in loaded
    assert not loaded & set(HEAVY)
    assert not {name for name in loaded if name.startswith(("agentbench_envs", "agentbench_bas"))}


def test_gymnasiums_prefix_form_registers_by_itself():
    code = "import gymnasium as gym; print(gym.make('agentbench_prefix:TextCraft-v0').spec.id)"
    assert python(code).stdout.strip() == "TextCraft-v0"


CORE = """
import agentbench_prefix
for env_id in agentbench_prefix.environment_ids():
    env = agentbench_prefix.make(env_id)
    env.reset(seed=0)
    env.step(env.candidate_actions()[0])
    env.restore(env.snapshot())
    print(env_id, env.turn)
"""


def test_environments_work_without_any_extra(repository):
    needed = extras(repository)
    blocked = {line.partition(">")[0].partition("[")[0] for e in needed.values() for line in e}
    blocked = {name.replace("-", "_") for name in blocked} - {"agentbench_prefix"}
    assert {"torch", "transformers", "hypothesis", "pytest"} <= blocked
    done = python(CORE, blocked=blocked)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [word for env_id in environment_ids() for word in (env_id, "1")]


@pytest.mark.parametrize("command", [["list"], ["--help"]])
def test_the_command_line_works_without_torch(command):
    code = f"import sys; sys.argv = ['agentbench-prefix', *{command!r}]\n"
    code += "from agentbench_prefix.cli import main; main()"
    done = python(code, blocked=["torch", "transformers"])
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_a_check_that_needs_an_extra_names_it():
    code = (
        "from agentbench_prefix.testing.conformance import check_any_text\n"
        "check_any_text('TextCraft-v0')"
    )
    done = python(code, blocked=["hypothesis"])
    assert done.returncode != 0
    assert "pip install 'agentbench-prefix[dev]'" in done.stderr


@pytest.fixture(scope="module")
def wheel(repository, tmp_path_factory):
    builder = WheelBuilder(str(repository))
    out = tmp_path_factory.mktemp("wheel")
    (path,) = builder.build(directory=str(out), versions=["standard"])
    with zipfile.ZipFile(path) as archive:
        yield archive


def test_the_wheel_holds_three_packages_and_their_data(wheel):
    names = wheel.namelist()
    tops = {name.partition("/")[0] for name in names}
    info = {top for top in tops if top.endswith(".dist-info")}
    assert tops - info == {"agentbench_prefix", "agentbench_envs", "agentbench_baselines"}
    for name in (
        "agentbench_prefix/py.typed",
        "agentbench_prefix/testing/conformance.py",
        "agentbench_envs/babyai/data/manifest.json",
        "agentbench_envs/textcraft/data/book.json",
        "agentbench_envs/textcraft/data/manifest.json",
        "agentbench_baselines/py.typed",
        *(
            f"agentbench_baselines/{path}"
            for env in ("TextCraft-v0", "BabyAI-Text-v0")
            for policy in ("base", "sft")
            for path in (
                f"recipes/{env}/{policy}.yaml",
                f"checkpoints/{env}/{policy}/model.safetensors",
                f"checkpoints/{env}/{policy}/tokenizer.json",
                f"checkpoints/{env}/{policy}/agentbench_card.json",
            )
        ),
    ):
        assert name in names
    assert not [name for name in names if "__pycache__" in name or name.endswith((".pkl", ".pt"))]


def test_the_wheel_is_small_and_licensed(wheel):
    assert sum(entry.compress_size for entry in wheel.infolist()) < 40 * 2**20
    licences = {name.rpartition("/")[2] for name in wheel.namelist() if "/licenses/" in name}
    assert licences == {"LICENSE", "NOTICE"}
    (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    text = wheel.read(metadata).decode()
    assert "License-Expression: Apache-2.0" in text
    for extra in ("eval", "train", "alfworld", "vllm", "dev"):
        assert f"Provides-Extra: {extra}" in text


def test_the_core_needs_no_torch(wheel):
    (metadata,) = (n for n in wheel.namelist() if n.endswith(".dist-info/METADATA"))
    required = [
        line.removeprefix("Requires-Dist: ")
        for line in wheel.read(metadata).decode().splitlines()
        if line.startswith("Requires-Dist: ") and "extra ==" not in line
    ]
    assert required
    assert not [line for line in required if line.startswith(("torch", "transformers"))]


def test_the_wheel_declares_every_environment(wheel):
    (points,) = (n for n in wheel.namelist() if n.endswith(".dist-info/entry_points.txt"))
    text = wheel.read(points).decode()
    for env_id in environment_ids():
        assert f"\n{env_id} = agentbench_envs." in text
