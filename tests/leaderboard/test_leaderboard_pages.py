"""``leaderboard build``: what is on the pages, and that they follow from the results alone."""

from __future__ import annotations

import csv
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path

import made
import pytest

from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.evaluation.compare import compare
from agentbench_prefix.leaderboard.pages import build, stale_pages, write_pages
from agentbench_prefix.leaderboard.reported import read_reported
from agentbench_prefix.training.summary import Cost, Preprocessing

pytest.importorskip("pandas")

CONFIG = """
references:
  - {name: Replay, method: replay, init: base}
  - {name: SFT→GRPO, method: grpo, init: sft}
names: {grpo: GRPO, sft: SFT, replay: Replay-GRPO}
splits: {Toy-v0: [test, train]}
"""
REPORTED = """
sources: {P: {title: A paper, url: "https://example.org/p"}}
entries:
  - env: Toy
    method: M
    model: Q
    tasks: all
    metric: Avg@8 %
    value: "81.60"
    seeds: "1"
    source: P
"""
SMALL = {f"toy_{i}": f"digits_{2 + i % 2:02}" for i in range(12)}


def small(seed, method, init="base", strength=2, **run):
    rng = random.Random(f"{seed} {method} {init}")
    counts = {task: min(4, rng.randint(0, 2) + strength) for task in SMALL}
    return made.made_up({"test": (counts, SMALL)}, 4, method=method, init=init, seed=seed, **run)


@pytest.fixture
def board(tmp_path, first_board):
    """A folder of leaderboards with rows of one and of several seeds."""
    return Path(shutil.copytree(first_board, tmp_path / "leaderboards"))


@pytest.fixture(scope="module")
def first_board(tmp_path_factory):
    folder = tmp_path_factory.mktemp("first") / "leaderboards"
    (folder / "results").mkdir(parents=True)
    (folder / "leaderboard.yaml").write_text(CONFIG, "utf-8")
    (folder / "reported.yaml").write_text(REPORTED)
    for result in [
        small(0, "base", "scratch", 0),
        small(0, "sft", "base", 1),
        small(0, "replay"),
        *(small(seed, "grpo", "sft", 1) for seed in range(3)),
        small(0, "grpo", variant="wide", notes=("saturated | often",)),
    ]:
        result.save(folder / "results")
    return folder


def table(text, heading):
    """Rows of the first table behind a heading, as mappings."""
    part = text[text.index(f"\n{heading}\n") :]
    lines = part.split("\n\n|", 1)[1].split("\n\n")[0].strip().split("\n")
    header, _, *rows = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)] for line in lines]
    header = header if header[0] else header[1:]
    return [dict(zip(header, row[1:], strict=False)) for row in rows]


def records(made_pages, name="Toy-v0-cpu.csv"):
    return list(csv.DictReader(io.StringIO(made_pages[name])))


def test_the_command_writes_pages_and_checks_them(board, call):
    status, out, _ = call("leaderboard", "build", "--dir", board)
    assert (status, "5 pages, 5 changed" in out) == (0, True)
    names = {path.name for path in board.glob("*.*")}
    assert {"README.md", "Toy-v0-cpu.md", "Toy-v0-cpu.csv", "reported.md", "reported.csv"} < names
    before = {path.name: path.read_bytes() for path in board.glob("*.*")}
    assert call("leaderboard", "build", "--dir", board)[1].endswith("5 pages, 0 changed\n")
    assert {path.name: path.read_bytes() for path in board.glob("*.*")} == before
    assert call("leaderboard", "build", "--dir", board, "--check")[0] == 0


def test_check_finds_what_is_changed_missing_or_left_over(board, call):
    write_pages(board, build(board))
    page = board / "Toy-v0-cpu.md"
    page.write_text(page.read_text("utf-8") + "\n", "utf-8")
    (board / "reported.csv").unlink()
    (board / "Gone-v0-cpu.md").write_text((board / "README.md").read_text())
    (board / "Gone-v0-cpu.csv").write_bytes((board / "Toy-v0-cpu.csv").read_bytes())
    (board / "thoughts.md").write_text("a person's\n")
    (board / "thoughts.csv").write_text("a,b\n")
    before = {path.name: path.read_bytes() for path in board.glob("*.*")}
    status, out, _ = call("leaderboard", "build", "--dir", board, "--check")
    assert status == 1
    for name in ("Toy-v0-cpu.md", "reported.csv", "Gone-v0-cpu.md", "Gone-v0-cpu.csv"):
        assert f"{name} is not what the results give" in out
    assert "README.md" not in out
    assert "thoughts" not in out
    assert {path.name: path.read_bytes() for path in board.glob("*.*")} == before
    status, out, _ = call("leaderboard", "build", "--dir", board)
    assert f"removed {board / 'Gone-v0-cpu.md'}" in out
    assert stale_pages(board, build(board)) == []
    assert (board / "thoughts.md").is_file()
    [result] = board.glob("results/*-replay-*")
    result.unlink()
    assert "Toy-v0-cpu.md" in stale_pages(board, build(board))


def test_another_process_makes_the_same_bytes(board):
    code = (
        "import sys; from pathlib import Path\n"
        "from agentbench_prefix.leaderboard.pages import build\n"
        "sys.stdout.buffer.write(''.join(build(Path(sys.argv[1])).values()).encode())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(board)],
        env={**os.environ, "PYTHONHASHSEED": "7", "LC_ALL": "C", "TZ": "Asia/Tokyo"},
        capture_output=True,
        check=True,
    )
    assert done.stdout.decode() == "".join(build(board).values())


def test_rows_state_seeds_tasks_rates_and_their_spread(board):
    page = build(board)["Toy-v0-cpu.md"]
    rows = table(page, "## test: 12 tasks")
    assert {(row["method"], row["from"]): row["seeds"] for row in rows} == {
        ("GRPO", "SFT"): "3 (0, 1, 2)",
        ("GRPO (wide)", "base"): "1 (0)",
        ("Replay-GRPO", "base"): "1 (0)",
        ("SFT", "base"): "1 (0)",
        ("base", "scratch"): "1 (0)",
    }
    assert {row["tasks"] for row in rows} == {"12"}
    rates = [float(row["Avg@4"].split(" ")[0]) for row in rows]
    assert rates == sorted(rates, reverse=True)
    spread = {row["method"]: "±" in row["Avg@4"] for row in rows}
    assert [name for name, shown in spread.items() if shown] == ["GRPO"]
    for heading in ("### Avg@4 by family (test)", "### Pass@4 by family (test)"):
        for row in table(page, heading):
            assert (row["tasks"], row["seeds"]) == ("12", "3" if row["from"] == "SFT" else "1")
            assert re.match(r"\d+\.\d \[\d+\.\d, \d+\.\d\]", row["digits_02 (6 tasks)"])


def test_single_seeds_are_labelled_preliminary(board):
    pages = build(board)
    assert "**Preliminary.** 4 of 5 rows rest on a single seed" in pages["Toy-v0-cpu.md"]
    assert "preliminary" in pages["README.md"]
    for path in board.glob("results/*"):
        if "grpo-from-sft" not in path.name:
            path.unlink()
    pages = build(board)
    assert "Preliminary" not in pages["Toy-v0-cpu.md"]
    assert "several seeds" in pages["README.md"]
    assert {record["preliminary"] for record in records(pages)} == {"False"}
    (board / "results/Toy-v0-cpu-grpo-from-sft-seed1.json").unlink()
    (board / "results/Toy-v0-cpu-grpo-from-sft-seed2.json").unlink()
    assert "**Preliminary.** Every row rests on a single seed" in build(board)["Toy-v0-cpu.md"]


def test_differences_are_against_the_references_and_the_start(board):
    pages = build(board)
    rows = table(pages["Toy-v0-cpu.md"], "### Paired differences (test)")
    by_name = {(row["method"], row["from"]): row for row in rows}
    assert by_name["Replay-GRPO", "base"]["Avg@4 - Replay"] == ""
    assert by_name["GRPO", "SFT"]["Avg@4 - SFT→GRPO"] == ""
    assert by_name["base", "scratch"]["Avg@4 - start"] == ""
    assert re.match(r"[+-]\d+\.\d \[", by_name["GRPO", "SFT"]["Pass@4 - Replay"])
    found = {
        (r["method"], r["variant"], r["init"]): r for r in records(pages) if r["family"] == "all"
    }
    for row, start in ((("grpo", "", "sft"), "sft"), (("sft", "", "base"), "base")):
        [own] = [r for name, r in found.items() if name == row]
        [other] = [r for name, r in found.items() if name[:2] == (start, "")]
        assert float(own["avg_minus_start"]) == pytest.approx(
            float(own["avg"]) - float(other["avg"]), abs=2e-6
        )
    (board / "results/Toy-v0-cpu-replay-from-base-seed0.json").unlink()
    page = build(board)["Toy-v0-cpu.md"]
    assert "Not measured here, so nothing is compared with it: Replay." in page
    assert {row["Avg@4 - Replay"] for row in table(page, "### Paired differences (test)")} == {""}


def test_costs_have_preprocessing_in_a_column_of_its_own(board):
    costs = Preprocessing(
        teacher=Cost(rollouts=1492),
        sidecars=Cost(tokens=50_000, seconds=90.0),
        probe=Cost(rollouts=30),
        calibration=Cost(rollouts=10),
    )
    small(0, "ada", preprocessing=costs).save(board / "results")
    page = build(board)["Toy-v0-cpu.md"]
    [row] = [r for r in table(page, "## What the runs cost") if r["method"] == "ada"]
    assert row["preprocessing"] == (
        "teacher: 1,492 episodes; sidecars: 50,000 tokens, 1.5 min; probe: 30 episodes; "
        "calibration: 10 episodes"
    )
    assert row["probe and calibration"] == "33.3 %"  # 40 of 40 + 80
    assert (row["steps"], row["rollouts"], row["minutes"]) == ("10", "80", "1")
    [row] = [r for r in table(page, "## test: 12 tasks") if r["method"] == "ada"]
    assert row["preprocessing"].startswith("teacher: 1,492 episodes; sidecars: 50,000 tokens; ")
    [row] = [r for r in table(page, "## What the runs cost") if r["method"] == "SFT"]
    assert (row["preprocessing"], row["probe and calibration"]) == ("none", "none")


def test_notes_and_provenance_are_on_the_page(board):
    page = build(board)["Toy-v0-cpu.md"]
    assert "- GRPO (wide) from base, seed 0: saturated | often" in page
    rows = table(page, "## Runs")
    assert len(rows) == 7
    for row in rows:
        assert (board / re.search(r"\((.*)\)", row["result"])[1]).is_file()
        assert row["weights"]
        assert row["recipe"]


def test_reported_numbers_are_on_a_page_of_their_own(board):
    pages = build(board)
    assert "81.60" in pages["reported.md"]
    assert "**P**: A paper. <https://example.org/p>." in pages["reported.md"]
    assert "81.60" in pages["reported.csv"]
    for name in ("Toy-v0-cpu.md", "Toy-v0-cpu.csv", "README.md"):
        assert "81.6" not in pages[name]
    assert "(reported.md)" in pages["README.md"]
    (board / "reported.yaml").unlink()
    assert not [name for name in build(board) if "reported" in name]
    assert read_reported(board / "reported.yaml") is None


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("sources: {}\nentries: [{env: x}]", r"entries\.0\.method: Field required"),
        (REPORTED.replace("source: P", "source: Q"), r"entries\.0\.source 'Q' is not among"),
        (REPORTED.replace('"81.60"', "81.6"), r"entries\.0\.value: Input should be a valid string"),
        ("- a", "must be a mapping"),
    ],
)
def test_malformed_reported_numbers_name_the_field(board, text, message):
    (board / "reported.yaml").write_text(text)
    with pytest.raises(ConfigurationError, match=message):
        build(board)


def test_without_results_there_is_an_index(tmp_path):
    assert "No run has been measured yet" in build(tmp_path)["README.md"]
    with pytest.raises(ConfigurationError, match=r"no folder of leaderboards .*nowhere"):
        build(tmp_path / "nowhere")


def test_a_malformed_result_stops_the_command_with_one_line(board, call):
    path = board / "results/Toy-v0-cpu-base-seed0.json"
    value = json.loads(path.read_text())
    value["run"]["seed"] = "x"
    path.write_text(json.dumps(value))
    status, out, err = call("leaderboard", "build", "--dir", board)
    assert (status, out) == (2, "")
    assert err.count("\n") == 1
    assert f"{path} is not a result of a run: run.seed" in err


def test_pages_of_real_runs_agree_with_compare(toy_env, call):
    """From episodes of the real evaluator to the table, without a hand-made number."""
    weak, strong = made.counts_of(1, 0.3), made.counts_of(2, 0.7)
    for name, counts in (("replay", weak), ("prefix", strong)):
        run = made.make_run(Path(name), counts, method=name)
        made.result_of(run).save(Path("leaderboards/results"))
    Path("leaderboards/leaderboard.yaml").write_text(CONFIG, "utf-8")
    assert call("leaderboard", "build")[0] == 0
    page = Path("leaderboards/Toy-v0-cpu.md").read_text("utf-8")
    comparison = compare(Path("replay/eval/test"), Path("prefix/eval/test"))
    for family, tasks in (("all", 48), ("digits_02", 12)):
        [row] = [
            row
            for row in records({"Toy-v0-cpu.csv": Path("leaderboards/Toy-v0-cpu.csv").read_text()})
            if (row["method"], row["family"]) == ("prefix", family)
        ]
        for kind, paired in (("avg", comparison.average), ("pass", comparison.passed)):
            expected = paired[family]
            assert float(row[kind]) == pytest.approx(expected.b, abs=1e-6)
            for ending in ("", "_low", "_high"):
                value = getattr(expected.difference, ending.strip("_") or "value")
                column = f"{kind}_minus_Replay{ending}"
                assert float(row[column]) == pytest.approx(value, abs=1e-6)
        assert int(row["n_tasks"]) == tasks
    [row] = [r for r in table(page, "## test: 48 tasks") if r["method"] == "prefix"]
    assert row["solved"] == f"{sum(strong.values())}/192"


def test_tasks_that_nobody_can_solve_are_stated(toy_env):
    result = made.quick_result("run", made.counts_of(1))
    result.save(Path("leaderboards/results"))
    page = build(Path("leaderboards"))["Toy-v0-cpu.md"]
    beyond = [task for task in made.TASKS if task not in made.REACHABLE]
    assert f"12 of them cannot be solved within the turn limit by any policy ({beyond[0]}, " in page
    assert "no rate can exceed 75.0." in page
