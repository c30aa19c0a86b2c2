"""The command line: what it prints, and that its errors are one line that names the remedy."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
import toy
from test_cards import make_card

from agentbench_prefix import cli, registry
from agentbench_prefix.cli import main
from agentbench_prefix.env import Snapshot, TextEnv
from agentbench_prefix.errors import UnknownNameError
from agentbench_prefix.policies.scripted import OraclePolicy
from agentbench_prefix.policies.tokens import FoundCheckpoint


class Method:
    """A method that ships what it is told to."""

    name = "taught"
    summary = "a method for tests"

    def __init__(self):
        self.shipped = {}

    def checkpoint(self, env_id):
        return self.shipped.get(env_id)


@pytest.fixture(autouse=True)
def toy_env(tmp_path, monkeypatch):
    with toy.registered(tmp_path / "site", monkeypatch):
        folder = tmp_path / "here"
        folder.mkdir()
        monkeypatch.chdir(folder)
        yield folder


@pytest.fixture
def method(monkeypatch):
    """``taught``, the only registered method."""
    taught = Method()

    def look_up(name):
        if name != "taught":
            raise UnknownNameError("method", name, ["taught"])
        return taught

    monkeypatch.setattr(registry, "method", look_up)
    monkeypatch.setattr(registry, "method_names", lambda: ("taught",))
    return taught


@pytest.fixture
def only_toy(monkeypatch):
    monkeypatch.setattr(registry, "environment_ids", lambda: ("Toy-v0",))


@pytest.fixture
def loaded(monkeypatch):
    """Stand in for the transformers back end: the oracle plays; what was asked for is kept."""
    policies = pytest.importorskip("agentbench_prefix.policies.transformers")
    asked = []

    def load(model, **settings):
        asked.append({"model": model, **settings})
        return OraclePolicy()

    monkeypatch.setattr(policies.TransformersPolicy, "load", load)
    return asked


@pytest.fixture
def call(capsys, monkeypatch):
    """Run a command line; give exit status, standard output and standard error."""

    def run(*argv, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        with pytest.raises(SystemExit) as caught:
            main([str(word) for word in argv])
        out, err = capsys.readouterr()
        return caught.value.code, out, err

    return run


def metrics(folder="."):
    [path] = Path(folder).glob("**/metrics.json")
    return json.loads(path.read_text())


def key(folder="."):
    [path] = Path(folder).glob("**/config.json")
    return json.loads(path.read_text())["key"]


def assert_error(result, *needles):
    status, out, err = result
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    for needle in needles:
        assert needle in err


# ------------------------------------------------------------------ eval
def test_eval_plays_writes_and_prints(call):
    status, out, err = call("eval", "--method", "oracle", "--env", "Toy-v0", "--samples", 2)
    assert status == 0
    assert "oracle on Toy-v0, split test: 48 tasks x 2 samples = 96 episodes" in out
    assert "72/96" in out
    assert "written to runs/eval/Toy-v0/oracle-test-" in out
    assert "\x1b" not in out + err
    assert "96/96 solved 72/96 (75.0%)" in err
    assert metrics()["avg_at_k"]["2"]["value"] == 0.75


def test_eval_takes_every_flag(call):
    status, _, err = call(
        *("eval", "--method", "random", "--env", "Toy-v0", "--split", "all", "--samples", 3),
        *("--tasks", 5, "--seed", 7, "--max-turns", 4, "--temperature", 0.5, "--top-p", 0.9),
        *("--max-tokens", 11, "--dialogue", "bracketed", "--batch-size", 2, "--out", "mine"),
        *("--max-consecutive-errors", 3, "--no-progress"),
    )
    assert (status, err) == (0, "")
    found = key("mine")
    expected = {
        "method": "random",
        "env": "Toy-v0",
        "split": "all",
        "samples": 3,
        "tasks": 5,
        "seed": 7,
        "max_turns": 4,
        "temperature": 0.5,
        "top_p": 0.9,
        "max_tokens": 11,
        "batch_size": 2,
        "dialogue": "bracketed@2",
    }
    assert {name: found[name] for name in expected} == expected
    assert len(found["task_ids"]) == 5


def test_the_module_is_the_same_command(toy_env):
    site = toy_env.parent / "site"
    done = subprocess.run(
        [sys.executable, "-m", "agentbench_prefix.eval", "--method", "nope"],
        env={"PYTHONPATH": f"{site}:{Path(toy.__file__).parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert_error(
        (done.returncode, done.stdout, done.stderr), "unknown method 'nope'; valid: oracle, random"
    )


def test_scripted_policies_need_neither_torch_nor_scipy(toy_env):
    blocked = "torch", "transformers", "scipy", "pandas", "httpx", "safetensors", "tabulate"
    code = (
        f"import sys\nfor name in {blocked}: sys.modules[name] = None\n"
        "from agentbench_prefix.cli import main\n"
        "main(['eval', '--method', 'random', '--env', 'Toy-v0', '--tasks', '2'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={"PYTHONPATH": f"{toy_env.parent / 'site'}:{Path(toy.__file__).parent}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert metrics()["n_episodes"] == 16


def test_the_shipped_checkpoint_its_card_and_its_environment_are_the_defaults(
    call, method, loaded, tmp_path
):
    card = make_card(env_id="Toy-v0", data_hash=toy.Toy.data_hash, dialogue="bracketed@2")
    method.shipped["Toy-v0"] = tmp_path / "weights"
    card.save(tmp_path / "weights")
    status, _, err = call("eval", "--method", "taught", "--samples", 1, "--device", "cpu")
    assert status == 0
    assert "warning" not in err
    assert loaded == [
        {
            "model": FoundCheckpoint(tmp_path / "weights", {}),
            "device": "cpu",
            "threads": 1,
            "temperature": 1.0,
            "top_p": 1.0,
            "max_tokens": 5,
        }
    ]
    assert (key()["method"], key()["env"], key()["dialogue"]) == ("taught", "Toy-v0", "bracketed@2")
    assert key()["max_tokens"] == 5


def test_flags_overrule_the_card(call, method, loaded, tmp_path):
    make_card(data_hash=toy.Toy.data_hash, dialogue="bracketed@2").save(tmp_path / "weights")
    status, _, err = call(
        *("eval", "--method", "taught", "--model", tmp_path / "weights", "--tasks", 1),
        *("--dialogue", "bare", "--temperature", 0.5, "--top-p", 0.75),
    )
    assert status == 0
    assert "taught in bracketed@2, it is evaluated in bare@1" in err
    assert loaded[0]["max_tokens"] == 16  # the dialogue's: the card's bound is for its own dialogue
    assert (loaded[0]["temperature"], loaded[0]["top_p"]) == (0.5, 0.75)
    status, _, _ = call(
        "eval",
        "--method",
        "taught",
        "--model",
        tmp_path / "weights",
        "--max-tokens",
        9,
        "--tasks",
        1,
    )
    assert (status, loaded[1]["max_tokens"]) == (0, 9)


def test_a_checkpoint_of_other_data_or_another_environment_is_warned_about(
    call, method, loaded, tmp_path
):
    make_card(data_hash="f" * 64).save(tmp_path / "other_data")
    status, _, err = call(
        "eval", "--method", "taught", "--model", tmp_path / "other_data", "--tasks", 1
    )
    assert status == 0
    assert f"trained on other data of Toy-v0 (ffffffffffff, here {toy.Toy.data_hash[:12]})" in err
    make_card(env_id="Else-v0", dialogue="odd@3").save(tmp_path / "elsewhere")
    status, _, err = call(
        "eval",
        "--method",
        "taught",
        "--model",
        tmp_path / "elsewhere",
        "--env",
        "Toy-v0",
        "--tasks",
        1,
    )
    assert status == 0
    assert "trained for Else-v0, it is evaluated on Toy-v0" in err
    assert loaded[-1]["max_tokens"] == 16


def test_a_dialogue_that_changed_since_training_is_warned_about(call, method, loaded, tmp_path):
    make_card(data_hash=toy.Toy.data_hash, dialogue="bracketed@1").save(tmp_path / "old")
    status, _, err = call("eval", "--method", "taught", "--model", tmp_path / "old", "--tasks", 1)
    assert status == 0
    assert "taught in bracketed@1, it is evaluated in bracketed@2" in err


def test_weights_that_are_not_the_cards_are_warned_about(call, method, loaded, tmp_path):
    make_card(data_hash=toy.Toy.data_hash, dialogue="bare@1").save(tmp_path / "changed")
    (tmp_path / "changed/model.safetensors").write_bytes(b"other weights")
    status, _, err = call(
        "eval", "--method", "taught", "--model", tmp_path / "changed", "--tasks", 1
    )
    assert status == 0
    assert "model.safetensors is not the file its card describes" in err


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """Folder of ``Org/Model`` at commit ``c0ffee``; ``asked`` holds what was downloaded."""
    huggingface_hub = pytest.importorskip("huggingface_hub")
    snapshot = tmp_path / "c0ffee"
    snapshot.mkdir()
    asked = []

    def download(name, revision, allow_patterns):
        assert "*.json" in allow_patterns
        asked.append((name, revision))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    return snapshot, asked


def test_a_foreign_model_plays_the_only_environment(call, method, loaded, only_toy, hub):
    snapshot, asked = hub
    status, _, _ = call("eval", "--method", "taught", "--model", "Org/Model", "--tasks", 1)
    assert status == 0
    found = FoundCheckpoint(snapshot, {"model": "Org/Model", "revision": "c0ffee"})
    assert (loaded[0]["model"], key()["env"], key()["dialogue"]) == (found, "Toy-v0", "bare@1")
    assert asked == [("Org/Model", None)]


def test_a_model_of_the_hub_plays_the_dialogue_of_its_card(call, method, loaded, hub):
    snapshot, asked = hub
    make_card(data_hash=toy.Toy.data_hash, dialogue="bracketed@2").save(snapshot)
    command = ("eval", "--method", "taught", "--model", "Org/Model", "--revision", "abc")
    status, _, err = call(*command, "--tasks", 1)
    assert status == 0
    assert "warning" not in err
    assert (key()["env"], key()["dialogue"], key()["max_tokens"]) == ("Toy-v0", "bracketed@2", 5)
    assert asked == [("Org/Model", "abc")]  # once


def test_a_model_in_the_home_folder_plays_the_dialogue_of_its_card(
    call, method, loaded, tmp_path, monkeypatch
):
    monkeypatch.setenv("HOME", str(tmp_path))
    make_card(data_hash=toy.Toy.data_hash, dialogue="bracketed@2").save(tmp_path / "ck")
    status, _, _ = call("eval", "--method", "taught", "--model", "~/ck", "--tasks", 1)
    assert (status, key()["dialogue"]) == (0, "bracketed@2")
    assert loaded[0]["model"] == FoundCheckpoint(tmp_path / "ck", {})


def test_the_same_command_resumes(call):
    command = ("eval", "--method", "random", "--env", "Toy-v0", "--tasks", 4, "--batch-size", 5)
    assert call(*command)[0] == 0
    [path] = Path().glob("**/episodes.jsonl")
    text, before = path.read_bytes(), metrics()
    path.write_bytes(text[: len(text) // 2])
    status, _, err = call(*command)
    assert status == 0
    assert "32/32" in err
    assert (path.read_bytes(), metrics()) == (text, before)


@pytest.mark.parametrize(
    ("argv", "needles"),
    [
        (("--method", "grpo"), ("unknown method 'grpo'", "valid: oracle, random, taught")),
        (("--method", "taught"), ("ships no checkpoint", "--model PATH|HUB_ID", "train --method")),
        (("--method", "taught", "--env", "Toy-v0"), ("no checkpoint for Toy-v0", "--env Toy-v0")),
        (("--method", "taught", "--model", "./gone"), ("no checkpoint folder './gone'",)),
        (("--method", "taught", "--model", "~/gone"), ("no checkpoint folder '~/gone'",)),
        (("--method", "taught", "--model", "~nobody-here/x"), ("'~nobody-here/x'",)),
        (("--method", "taught", "--model", ".", "--revision", "a"), ("belongs to a Hub id",)),
        (("--method", "oracle", "--revision", "a", "--backend", "vllm", "--device", "cuda"),
         ("plays without a model: leave --revision, --backend, --device out",)),
        (("--method", "random", "--base-url", "http://x/v1"), ("leave --base-url out",)),
        (("--method", "taught", "--base-url", "http://x/v1", "--model", "m", "--backend", "vllm"),
         ("not loaded here: leave --backend out",)),
        (("--method", "taught", "--base-url", "http://x/v1", "--model", "m", "--device", "cuda",
          "--revision", "a"), ("leave --revision, --device out",)),
        (("--method", "oracle", "--temperature", "inf"), ("--temperature", "finite", "inf")),
        (("--method", "oracle", "--temperature", "nan"), ("--temperature", "finite", "nan")),
        (("--method", "oracle", "--temperature", "-1"), ("--temperature", ">= 0, got -1",)),
        (("--method", "oracle", "--top-p", "nan"), ("--top-p must be in (0, 1]",)),
        (("--method", "oracle", "--env", "Toi-v0"), ("unknown environment 'Toi-v0'", "Toy-v0")),
        (("--method", "oracle"), ("name the environment with --env", "Toy-v0")),
        (("--method", "oracle", "--model", "x"), ("leave --model out",)),
        (("--method", "taught", "--base-url", "http://x/v1"), ("--base-url needs --model",)),
        (("--method", "oracle", "--env", "Toy-v0", "--split", "dev"), ("unknown split 'dev'",)),
        (("--method", "oracle", "--env", "Toy-v0", "--dialogue", "x"), ("unknown dialogue 'x'",)),
        (("--method", "oracle", "--env", "Toy-v0", "--tasks", "99"), ("has 48 tasks",)),
        (("--method", "oracle", "--env", "Toy-v0", "--top-p", "0"), ("--top-p must be in (0, 1]",)),
        (("--method", "oracle", "--env", "Toy-v0", "--out", "file/x"), ("file/x", "--out")),
    ],
)  # fmt: skip
def test_errors_name_the_thing_and_the_remedy(call, method, argv, needles):
    Path("file").write_text("")
    assert_error(call("eval", *argv), *needles)


def test_a_changed_configuration_in_the_same_folder_is_refused(call):
    command = ("eval", "--method", "random", "--env", "Toy-v0", "--tasks", 2, "--out", "here")
    assert call(*command)[0] == 0
    assert_error(call(*command, "--seed", 1), "here", "seed is 0 there, 1 now", "--out")


def test_several_shipped_checkpoints_need_a_choice(call, method, tmp_path):
    method.shipped = dict.fromkeys(registry.environment_ids(), tmp_path)
    assert_error(call("eval", "--method", "taught"), "choose one with --env", "Toy-v0")


def test_a_missing_back_end_names_the_extra(call, method, tmp_path, monkeypatch):
    (tmp_path / "weights").mkdir()
    for module in ("torch", "transformers", "vllm", "agentbench_prefix.policies.transformers"):
        monkeypatch.setitem(sys.modules, module, None)
    del sys.modules["agentbench_prefix.policies.transformers"]
    argv = ("eval", "--method", "taught", "--model", tmp_path / "weights", "--env", "Toy-v0")
    assert_error(call(*argv), "pip install 'agentbench-prefix[eval]'")
    assert_error(call(*argv, "--backend", "vllm"), "pip install 'agentbench-prefix[vllm]'")
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    argv = ("eval", "--method", "taught", "--model", "Org/Model", "--env", "Toy-v0")
    assert_error(call(*argv), "'Org/Model'", "Hub", "pip install 'agentbench-prefix[eval]'")


def test_a_dead_endpoint_stops_the_run(call, method, monkeypatch):
    openai = pytest.importorskip("agentbench_prefix.policies.openai")
    monkeypatch.setattr(openai, "_CONNECT_RETRIES", 0)
    status, out, err = call(
        *("eval", "--method", "taught", "--base-url", "http://127.0.0.1:9/v1", "--model", "m"),
        *("--env", "Toy-v0", "--tasks", 4, "--no-progress"),
    )
    assert_error(
        (status, out, err),
        "16 errored episodes in a row",
        "http://127.0.0.1:9/v1/chat/completions",
        "run the same command to resume",
    )


def test_episodes_that_errored_give_exit_status_1(call, method, monkeypatch):
    openai = pytest.importorskip("agentbench_prefix.policies.openai")
    monkeypatch.setattr(openai, "_CONNECT_RETRIES", 0)
    status, out, _ = call(
        *("eval", "--method", "taught", "--base-url", "http://127.0.0.1:9/v1", "--model", "m"),
        *("--env", "Toy-v0", "--tasks", 1, "--samples", 3),
    )
    assert status == 1
    assert "ERRORS: 3 of 3 episodes errored" in out
    assert metrics()["n_errors"] == 3


# ------------------------------------------------------------------ compare, list
def test_compare_prints_paired_differences_and_names_what_clashes(call):
    for name in ("oracle", "random"):
        assert (
            call("eval", "--method", name, "--env", "Toy-v0", "--samples", 2, "--out", name)[0] == 0
        )
    status, out, _ = call("compare", "random", "oracle")
    assert status == 0
    assert "A = random, B = oracle on Toy-v0" in out
    call("eval", "--method", "oracle", "--env", "Toy-v0", "--samples", 1, "--out", "one")
    assert_error(call("compare", "random", "one"), "samples is 2 in A, 1 in B")
    assert_error(call("compare", "random", "nothing"), "nothing is not a finished evaluation")


def test_list_shows_what_is_registered(call, method, tmp_path):
    status, out, _ = call("list")
    assert status == 0
    assert f"Toy-v0  data: ok ({toy.Toy.data_hash[:12]})" in out
    assert "tasks: train 12, test 48, all 60; turn limit 8" in out
    assert "dialogues: bare@1, bracketed@2" in out
    assert "taught  a method for tests" in out
    assert "no checkpoint is shipped" in out
    method.shipped["Toy-v0"] = tmp_path
    assert f"checkpoint for Toy-v0: {tmp_path}" in call("list")[1]


def test_list_says_what_is_missing(call, method, monkeypatch):
    def missing(self, **arguments):
        raise UnknownNameError("data folder", "toys", [], "Run toy-download")

    monkeypatch.setattr(toy.Toy, "__init__", missing)
    status, out, _ = call("list")
    assert status == 0
    assert "Toy-v0  data: missing (unknown data folder 'toys'" in out
    assert "Run toy-download" in out


@pytest.fixture
def broken_distribution(tmp_path, monkeypatch):
    """An installed environment and method whose library is missing."""
    info = tmp_path / "broken" / "their_package-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[{registry.ENVIRONMENTS_GROUP}]\nBroken-v0 = no_such_library:Env\n"
        f"[{registry.METHODS_GROUP}]\nbroken = no_such_library:METHOD\n"
    )
    monkeypatch.syspath_prepend(tmp_path / "broken")
    registry.environment_ids.cache_clear()
    yield
    registry.environment_ids.cache_clear()


@pytest.mark.usefixtures("broken_distribution")
def test_list_goes_on_past_what_cannot_be_imported(call):
    status, out, err = call("list")
    assert (status, err) == (0, "")
    for kind, name in (("environment", "Broken-v0"), ("method", "broken")):
        assert f"{name}  cannot be used: {kind} '{name}' of their-package cannot be imported" in out
    assert out.count("No module named 'no_such_library'") == 2
    assert "Toy-v0  data: ok" in out
    assert "Corpora" in out


@pytest.mark.usefixtures("broken_distribution")
def test_what_cannot_be_imported_is_one_line_elsewhere(call):
    assert_error(call("eval", "--method", "oracle", "--env", "Broken-v0"), "no_such_library")
    assert_error(call("eval", "--method", "broken", "--env", "Toy-v0"), "no_such_library")
    assert_error(call("play", "Broken-v0"), "their-package", "no_such_library")


def test_list_looks_for_corpora_in_a_checkout_only(call, tmp_path, monkeypatch):
    root = tmp_path / "root"
    (root / "datasets" / "walks").mkdir(parents=True)
    (root / "datasets" / "walks" / "manifest.json").write_text('{"env_id": "Toy-v0"}')
    monkeypatch.setattr(cli, "__file__", str(root / "agentbench_prefix" / "cli.py"))
    assert "walks" not in call("list")[1]
    (root / "pyproject.toml").write_text("")
    assert "walks  Toy-v0" in call("list")[1]


@pytest.mark.parametrize(
    ("name", "lacks", "needle"),
    [
        ("oracle", "teacher", "the oracle cannot play: Toy-v0 has no teacher"),
        ("random", "candidate_actions", "the random policy cannot play: Toy-v0 does not list"),
    ],
)
def test_scripted_policies_name_what_an_environment_lacks(call, monkeypatch, name, lacks, needle):
    monkeypatch.setattr(toy.Toy, lacks, getattr(TextEnv, lacks))
    argv = ("eval", "--method", name, "--env", "Toy-v0", "--no-progress")
    assert_error(call(*argv), needle)


# ------------------------------------------------------------------ play
def test_a_negative_seed_is_refused(call):
    status, out, err = call("play", "Toy-v0", "--seed", -1)
    assert (status, out) == (2, "")
    assert "Invalid value for '--seed'" in err


def test_a_person_plays_to_the_end(call):
    env = toy.Toy()
    env.reset(options={"task_id": "toy_13"})
    lines = "".join(f"dial {digit}\n" for digit in env.code)
    status, out, _ = call("play", "Toy-v0", "--task", "toy_13", stdin=lines)
    assert status in (0, None)
    assert "A vault of 3 digits." in out
    assert "turn 1/8> " in out
    assert "turn 3/8> " in out
    assert "It opens." in out
    assert "Solved in 3 turns." in out


def test_fields_are_shown(call, monkeypatch):
    monkeypatch.setattr(toy.Toy, "fields", lambda self, text: {"place": "hall", "seen": [1, "x"]})
    _, out, _ = call("play", "Toy-v0", stdin="")
    assert "  place  hall" in out
    assert '  seen   [1, "x"]' in out


def test_undo_puts_the_game_back(call, monkeypatch):
    restored = []
    restore = toy.Toy.restore

    def watch(self, snapshot):
        restored.append(Snapshot.from_json(snapshot.to_json()))
        return restore(self, snapshot)

    monkeypatch.setattr(toy.Toy, "restore", watch)
    env = toy.Toy()
    env.reset(options={"task_id": "toy_12"})
    first, second = (f"dial {digit}" for digit in env.code)
    script = [":undo", "look", first, "nonsense", ":undo", ":undo", ":undo", first, second]
    status, out, _ = call("play", "Toy-v0", "--task", "toy_12", stdin="\n".join(script))
    assert status in (0, None)
    assert "There is no turn to take back." in out
    assert [snapshot.turn for snapshot in restored] == [2, 1, 0]
    assert "Solved in 2 turns." in out  # the turns taken back do not count


def test_help_quit_and_the_end_of_input(call):
    _, out, _ = call("play", "Toy-v0", stdin=":help\n:what\nlook\n:quit\n")
    assert out.count("Write an action, or :undo") == 2
    assert "You left after 1 turns." in out
    _, out, _ = call("play", "Toy-v0", stdin="look\nlook\n")
    assert "You left after 2 turns." in out


def test_a_lost_game_says_why(call):
    _, out, _ = call("play", "Toy-v0", "--task", "toy_15", stdin="look\n" * 8)
    assert "Not solved (shut) in 8 turns." in out


def test_with_a_dialogue_a_person_sees_and_writes_what_a_model_does(call):
    env = toy.Toy()
    env.reset(options={"task_id": "toy_12"})
    first, second = env.code
    lines = f"dial {first}\n[[ dial {first} ]]\nso [[ dial {second} ]]\n"
    _, out, _ = call("play", "Toy-v0", "--task", "toy_12", "--dialogue", "bracketed", stdin=lines)
    assert "Open the vault." in out  # the system prompt
    assert "Name an action." in out  # the answer to a reply without brackets
    assert "Solved in 3 turns." in out
    _, out, _ = call("play", "Toy-v0", "--task", "toy_12", stdin=":quit\n")
    assert "Open the vault." not in out


def test_play_errors_name_the_choices(call):
    assert_error(call("play", "Toi-v0"), "unknown environment 'Toi-v0'")
    assert_error(call("play", "Toy-v0", "--task", "toy_99"), "unknown task_id 'toy_99'", "toy_0")
    assert_error(call("play", "Toy-v0", "--split", "dev"), "unknown split 'dev'")
    assert_error(call("play", "Toy-v0", "--dialogue", "x"), "unknown dialogue 'x'")


def test_play_draws_the_task_by_seed(call):
    drawn = {call("play", "Toy-v0", "--seed", seed)[1].split("\n")[0] for seed in (1, 1, 1)}
    assert len(drawn) == 1
    many = {call("play", "Toy-v0", "--seed", seed)[1].split("\n")[0] for seed in range(8)}
    assert len(many) > 1


def test_a_model_may_carry_any_label_that_names_a_folder(call, loaded, tmp_path):
    make_card(data_hash=toy.Toy.data_hash).save(tmp_path / "model")
    model = ("--env", "Toy-v0", "--model", tmp_path / "model", "--tasks", 1)
    status, out, _ = call("eval", "--method", "my-model.v2", *model)
    assert status == 0
    assert "my-model.v2 on Toy-v0" in out
    status, _, err = call("eval", "--method", "../up", *model)
    assert status == 2
    assert "'../up' is no label" in err
