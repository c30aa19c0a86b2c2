"""``hub push`` and ``hub pull``: whole commands against a local server that speaks the Hub's HTTP.

Commands run in processes of their own: they are killed, and the Hub's client reads its settings
once, when it is imported.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hub_server import Fault, HubServer, Repo, Seen
from small_corpora import write_small_corpus

from agentbench_prefix.corpora.hub import HubError, check_files, pull, push
from agentbench_prefix.corpora.reading import CARD, MANIFEST, Corpus
from agentbench_prefix.errors import ConfigurationError, CorpusError

TOKEN = "hf_SecretOfTheTests"
ID = "somebody/toys"
TRAJECTORIES = "trajectories/train.parquet"
FAILURES = "failures/train.parquet"


@pytest.fixture
def server() -> Iterator[HubServer]:
    with HubServer(TOKEN).running() as server:
        yield server


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    return write_small_corpus(tmp_path_factory.mktemp("corpus") / "toys")


@pytest.fixture
def published(server: HubServer, corpus: Corpus) -> tuple[Repo, str]:
    repo = server.create(ID)
    return repo, repo.publish(corpus.folder)


Start = Callable[..., "subprocess.Popen[str]"]
Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def start(server: HubServer, tmp_path: Path) -> Start:
    """Start ``agentbench-prefix hub ...``."""
    quiet = {k: v for k, v in os.environ.items() if not k.startswith(("HF_", "HUGGING"))}
    settings = {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "hf"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "AGENTBENCH_PREFIX_CACHE": str(tmp_path / "cache"),
    }

    def start(*arguments: object, **changes: str | None) -> subprocess.Popen[str]:
        env = {k: v for k, v in (quiet | settings | changes).items() if v is not None}
        return subprocess.Popen(
            [sys.executable, "-m", "agentbench_prefix", "hub", *map(str, arguments)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    return start


@pytest.fixture
def run(start: Start) -> Run:
    """Run it to its end; whatever it says never holds the token."""

    def run(*arguments: object, **changes: str | None) -> subprocess.CompletedProcess[str]:
        process = start(*arguments, **changes)
        out, err = process.communicate(timeout=120)
        assert TOKEN not in out + err
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)

    return run


def contents(folder: Path) -> dict[str, bytes]:
    files = [path for path in folder.rglob("*") if path.is_file()]
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def sha256(corpus: Corpus, name: str) -> str:
    return corpus.manifest.files[name].sha256


def once(fault: Fault, matches: Callable[[Seen], bool]) -> Callable[[Seen], Fault | None]:
    """The fault for the first request that matches."""
    left = [fault]

    def script(seen: Seen) -> Fault | None:
        return left.pop() if left and matches(seen) else None

    return script


# ------------------------------------------------------------------ the way there and back
def test_push_then_pull_gives_the_same_bytes(server: HubServer, run: Run, tmp_path: Path) -> None:
    corpus = write_small_corpus(tmp_path / "made")
    (corpus.folder / "notes.txt").write_text("not in the manifest", encoding="utf-8")
    released = contents(corpus.folder)
    del released["notes.txt"]

    pushed = run("push", corpus.folder, ID)
    assert pushed.returncode == 0, pushed.stderr
    repo = server.repos[ID]
    assert repo.files() == released
    assert len(repo.commits) == 2  # the Hub's own first one, and one
    commit = pushed.stdout.strip()
    assert commit == repo.branches["main"]
    assert f"hub pull {ID} --revision {commit}" in pushed.stderr

    again = run("push", corpus.folder, ID)
    assert again.returncode == 0, again.stderr
    assert again.stdout == pushed.stdout
    assert "already holds this corpus" in again.stderr
    assert len(repo.commits) == 2

    out = tmp_path / "new" / "toys"
    pulled = run("pull", ID, "--revision", commit, "--out", out)
    assert pulled.returncode == 0, pulled.stderr
    assert pulled.stdout.strip() == str(out)
    assert contents(out) == released
    assert list(out.parent.iterdir()) == [out]

    server.seen.clear()
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    again = run("pull", ID, "--revision", commit, "--out", out)
    assert again.returncode == 0, again.stderr
    assert "already there" in again.stderr
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before
    assert list(out.parent.iterdir()) == [out]
    fetched = [s.path for s in server.seen if s.method == "GET" and "/resolve/" in s.path]
    assert [path.rpartition("/")[2] for path in fetched] == [MANIFEST]


def test_the_token_is_sent_to_the_hub_and_not_to_its_store(
    server: HubServer, corpus: Corpus, run: Run, tmp_path: Path
) -> None:
    commit = run("push", corpus.folder, ID, "--private").stdout.strip()
    assert server.repos[ID].private
    denied = run("pull", ID, "--revision", commit, HF_TOKEN=None)
    assert denied.returncode == 2
    assert "no such dataset, or hides it" in denied.stderr
    server.seen.clear()
    pulled = run("pull", ID, "--revision", commit)
    assert pulled.returncode == 0, pulled.stderr
    assert Path(pulled.stdout.strip()) == tmp_path / "cache" / "corpora" / ID / commit
    assert {s.token for s in server.seen if "/datasets/" in s.path} == {TOKEN}
    assert {s.token for s in server.seen if "/signed/" in s.path} == {None}


def test_a_new_version_replaces_the_old_one_in_one_commit(
    server: HubServer, run: Run, tmp_path: Path
) -> None:
    sidecar = {"sidecars/compact/old/train.parquet": b"PAR1 of a model that is left out PAR1"}
    old = write_small_corpus(tmp_path / "old", extra=sidecar)
    new = write_small_corpus(tmp_path / "new", version="2")
    repo = server.create(ID)
    first = repo.publish(old.folder)
    repo.replace("LICENSE", b"what somebody added by hand")
    pushed = run("push", new.folder, ID)
    assert pushed.returncode == 0, pushed.stderr
    assert f"2 of 5 files pushed to {ID}, 1 removed" in pushed.stderr
    assert repo.files() == contents(new.folder) | {"LICENSE": b"what somebody added by hand"}
    assert repo.files(first) == contents(old.folder)

    side = run("push", old.folder, ID, "--revision", "v1")
    assert side.returncode == 0, side.stderr
    assert repo.files("v1").keys() >= sidecar.keys()
    assert repo.branches["main"] == pushed.stdout.strip() != side.stdout.strip()


# ------------------------------------------------------------------ connections
def test_a_dropped_connection_is_resumed_within_the_file(
    server: HubServer, run: Run, tmp_path: Path
) -> None:
    # The Hub's client hands on pieces of 10 MiB: what arrived of a piece is lost with it.
    piece, whole = 10 * 2**20, 11 * 2**20
    big = {"sidecars/compact/old/train.parquet": random.Random(0).randbytes(whole)}
    corpus = write_small_corpus(tmp_path / "toys", extra=big)
    commit = server.create(ID).publish(corpus.folder)
    cut = sha256(corpus, "sidecars/compact/old/train.parquet")
    reset = sha256(corpus, TRAJECTORIES)
    faults = {
        cut: [Fault(drop_after=piece + 5000)],
        reset: [Fault(drop_after=1000, reset=True)],
    }

    def script(seen: Seen) -> Fault | None:
        left = faults.get(seen.path.rpartition("/")[2]) if seen.method == "GET" else None
        return left.pop() if left else None

    server.script = script
    out = tmp_path / "out"
    pulled = run("pull", ID, "--revision", commit, "--out", out)
    assert pulled.returncode == 0, pulled.stderr
    assert contents(out) == contents(corpus.folder)
    assert faults == {cut: [], reset: []}
    ranges = {s.range for s in server.seen if s.method == "GET" and s.path.endswith(cut)}
    assert ranges == {None, f"bytes={piece}-"}
    assert server.count("GET", reset) == 2


@pytest.mark.parametrize("verb", ["push", "pull"])
def test_a_dead_endpoint_is_named(verb: str, corpus: Corpus, run: Run, tmp_path: Path) -> None:
    dead = "http://127.0.0.1:9"
    out = tmp_path / "out"
    arguments = {
        "push": (corpus.folder, ID),
        "pull": (ID, "--revision", "a" * 40, "--out", out),
    }
    failed = run(verb, *arguments[verb], HF_ENDPOINT=dead)
    assert failed.returncode == 2
    assert dead in failed.stderr
    assert "check the connection and HF_ENDPOINT" in failed.stderr
    assert "Traceback" not in failed.stderr
    assert not out.exists()


# ------------------------------------------------------------------ damaged files
def flip(content: bytes) -> bytes:
    middle = len(content) // 2
    return content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :]


@pytest.mark.parametrize(
    "change", [lambda content: content[:-100], flip], ids=["truncated", "tampered"]
)
def test_a_file_damaged_on_the_way_is_refused_and_got_anew(
    change: Callable[[bytes], bytes],
    server: HubServer,
    corpus: Corpus,
    published: tuple[Repo, str],
    run: Run,
    tmp_path: Path,
) -> None:
    repo, commit = published
    fault = Fault(content=change(repo.files()[TRAJECTORIES]))
    place = sha256(corpus, TRAJECTORIES)
    server.script = once(fault, lambda s: s.method == "GET" and s.path.endswith(place))
    out = tmp_path / "out"
    refused = run("pull", ID, "--revision", commit, "--out", out)
    assert refused.returncode == 2
    assert TRAJECTORIES in refused.stderr
    assert not out.exists()
    pulled = run("pull", ID, "--revision", commit, "--out", out)
    assert pulled.returncode == 0, pulled.stderr
    assert contents(out) == repo.files(commit)
    assert server.count("GET", sha256(corpus, FAILURES)) == 1  # it was kept


@pytest.fixture
def here(server: HubServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let this process use the server."""
    monkeypatch.setenv("HF_ENDPOINT", server.url)
    monkeypatch.setenv("HF_TOKEN", TOKEN)


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize(
    ("name", "change"),
    [
        (CARD, flip),
        (CARD, lambda content: content + b"more"),
        (MANIFEST, lambda content: content.replace(b"Apache-2.0", b"Apache-1.0")),
        (MANIFEST, lambda content: content.replace(b"Apache-2.0", b"")),
    ],
)
def test_files_beside_parquet_are_verified_too(
    name: str,
    change: Callable[[bytes], bytes],
    server: HubServer,
    published: tuple[Repo, str],
    tmp_path: Path,
) -> None:
    repo, commit = published
    good = repo.files()[name]
    assert change(good) != good
    # Length and content change for both requests, as behind a proxy that rewrites.
    place = f"/resolve/{commit}/{name}"
    server.script = lambda s: Fault(content=change(good)) if s.path.endswith(place) else None
    with pytest.raises(CorpusError, match=name):
        pull(ID, revision=commit, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()
    server.script = lambda s: None
    assert pull(ID, revision=commit, out=tmp_path / "out").manifest.licence == "Apache-2.0"


@pytest.mark.usefixtures("here")
@pytest.mark.parametrize("kind", ["truncated", "tampered", "missing"])
def test_a_revision_that_differs_from_its_manifest_is_refused(
    kind: str, published: tuple[Repo, str], tmp_path: Path
) -> None:
    repo, first = published
    good = repo.files()[TRAJECTORIES]
    if kind == "missing":
        tree = dict(repo.commits[first])
        del tree[TRAJECTORIES]
        bad = repo.commit("main", tree)
    else:
        bad = repo.replace(TRAJECTORIES, flip(good) if kind == "tampered" else good[:-100])
    with pytest.raises(CorpusError, match=f"{TRAJECTORIES}.*choose another revision"):
        pull(ID, revision=bad, out=tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("here")
def test_a_manifest_that_points_outside_is_refused(
    server: HubServer, corpus: Corpus, tmp_path: Path
) -> None:
    evil = write_small_corpus(tmp_path / "evil")
    outside(evil.folder)
    commit = server.create(ID).publish(evil.folder)
    with pytest.raises(CorpusError, match="passwords"):
        pull(ID, revision=commit, out=tmp_path / "deep" / "out")
    assert not (tmp_path / "deep" / "out").exists()
    assert not server.count("GET", "passwords")


@pytest.mark.usefixtures("here")
def test_what_is_at_the_place_is_left_as_it_was(
    published: tuple[Repo, str], tmp_path: Path
) -> None:
    repo, commit = published
    out = tmp_path / "new" / "out"
    write_small_corpus(out, version="2")
    before = contents(out)
    with pytest.raises(ConfigurationError, match="out exists and holds something else"):
        pull(ID, revision=commit, out=out)
    assert contents(out) == before
    assert list(out.parent.iterdir()) == [out]

    for name, content in repo.files(commit).items():
        (out / name).write_bytes(flip(content) if name == TRAJECTORIES else content)
    before = contents(out)
    with pytest.raises(CorpusError, match=f"{TRAJECTORIES}: sha256"):
        pull(ID, revision=commit, out=out)
    assert contents(out) == before


# ------------------------------------------------------------------ kills
def wait_for(event: threading.Event, process: subprocess.Popen[str]) -> None:
    while not event.wait(0.05):
        assert process.poll() is None, process.communicate()[1]


def kill(process: subprocess.Popen[str]) -> None:
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def test_a_killed_push_leaves_no_half_commit_and_goes_on(
    server: HubServer, corpus: Corpus, start: Start, run: Run
) -> None:
    first, second = sha256(corpus, FAILURES), sha256(corpus, TRAJECTORIES)
    held, release = threading.Event(), threading.Event()
    server.script = once(
        Fault(hold=release, held=held),
        lambda s: s.method == "PUT" and s.path.endswith(second),
    )
    process = start("push", corpus.folder, ID)
    try:
        wait_for(held, process)
        while first not in server.uploads:
            assert process.poll() is None
            time.sleep(0.05)
        kill(process)
        repo = server.repos[ID]
        assert repo.files() == {}
        assert len(repo.commits) == 1
    finally:
        release.set()

    resumed = run("push", corpus.folder, ID)
    assert resumed.returncode == 0, resumed.stderr
    assert server.count("PUT", first) == 1  # not sent again
    assert len(repo.commits) == 2

    unbroken = HubServer(TOKEN)
    with unbroken.running():
        whole = run("push", corpus.folder, ID, HF_ENDPOINT=unbroken.url)
    assert whole.stdout == resumed.stdout
    assert unbroken.repos[ID].files() == repo.files()


def test_a_killed_pull_leaves_nothing_half_written_and_goes_on(
    server: HubServer,
    corpus: Corpus,
    published: tuple[Repo, str],
    start: Start,
    run: Run,
    tmp_path: Path,
) -> None:
    repo, commit = published
    held, release = threading.Event(), threading.Event()
    server.script = once(
        Fault(hold=release, held=held),
        lambda s: s.method == "GET" and s.path.endswith(sha256(corpus, TRAJECTORIES)),
    )
    out = tmp_path / "new" / "out"
    process = start("pull", ID, "--revision", commit, "--out", out)
    try:
        wait_for(held, process)
        kill(process)
        assert not out.exists()
    finally:
        release.set()
    pulled = run("pull", ID, "--revision", commit, "--out", out)
    assert pulled.returncode == 0, pulled.stderr
    assert contents(out) == repo.files()
    assert list(out.parent.iterdir()) == [out]
    assert server.count("GET", sha256(corpus, FAILURES)) == 1  # not fetched again


def test_two_pulls_to_one_place_do_not_disturb_each_other(
    server: HubServer, published: tuple[Repo, str], start: Start, tmp_path: Path
) -> None:
    repo, commit = published
    out = tmp_path / "new" / "out"
    both = [start("pull", ID, "--revision", commit, "--out", out) for _ in range(2)]
    for process in both:
        _, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
    assert contents(out) == repo.files()
    assert list(out.parent.iterdir()) == [out]


# ------------------------------------------------------------------ refusals
@pytest.mark.usefixtures("here")
def test_a_revision_must_be_a_commit(published: tuple[Repo, str], run: Run, tmp_path: Path) -> None:
    _, commit = published
    refused = run("pull", ID, "--revision", "main", "--out", tmp_path / "out")
    assert refused.returncode == 2
    assert f"--revision {commit}" in refused.stderr
    with pytest.raises(HubError, match="no such revision"):
        pull(ID, revision="a" * 40, out=tmp_path / "out")
    assert not [path for path in tmp_path.iterdir() if path.name != "hf"]


@pytest.mark.usefixtures("here")
def test_an_unknown_repository_is_named(tmp_path: Path) -> None:
    with pytest.raises(HubError, match=r"nobody/nothing.*no such dataset"):
        pull("nobody/nothing", revision="a" * 40, out=tmp_path / "out")
    assert not list(tmp_path.iterdir())


@pytest.mark.usefixtures("here")
def test_a_push_needs_a_token_that_may_write(
    server: HubServer,
    corpus: Corpus,
    published: tuple[Repo, str],
    run: Run,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    repo, _ = published
    missing = run("push", corpus.folder, ID, HF_TOKEN=None)
    assert missing.returncode == 2
    assert "set HF_TOKEN" in missing.stderr
    assert "hf auth login" in missing.stderr
    assert server.seen == [] or {s.method for s in server.seen} == {"GET"}

    monkeypatch.setenv("HF_TOKEN", "hf_Wrong")
    with pytest.raises(HubError, match="hf auth login") as wrong:
        push(corpus.folder, ID)
    assert "hf_Wrong" not in str(wrong.value)

    repo.replace(TRAJECTORIES, b"so that there is something to push")
    server.script = lambda s: (
        Fault(status=403, message=f"Bearer {TOKEN} may only read") if "/commit/" in s.path else None
    )
    forbidden = run("push", corpus.folder, ID)  # which looks for the token in what is said
    assert forbidden.returncode == 2
    assert "*** may only read" in forbidden.stderr


@pytest.mark.usefixtures("here", "published")
def test_a_public_repository_is_not_pushed_to_as_a_private_one(corpus: Corpus) -> None:
    with pytest.raises(ConfigurationError, match=f"{ID} exists and is public"):
        push(corpus.folder, ID, private=True)


def test_a_server_without_xet_is_explained(server: HubServer, corpus: Corpus, run: Run) -> None:
    pytest.importorskip("hf_xet")
    refused = run("push", corpus.folder, ID, HF_HUB_DISABLE_XET=None)
    assert refused.returncode == 2
    assert "set HF_HUB_DISABLE_XET=1" in refused.stderr
    assert server.repos[ID].files() == {}


def break_file(folder: Path) -> None:
    path = folder / TRAJECTORIES
    path.write_bytes(flip(path.read_bytes()))


def truncate_file(folder: Path) -> None:
    path = folder / TRAJECTORIES
    path.write_bytes(path.read_bytes()[:-1])


def set_manifest(folder: Path, **changes: Any) -> None:
    path = folder / MANIFEST
    path.write_text(json.dumps(json.loads(path.read_text("utf-8")) | changes), encoding="utf-8")


def no_card(folder: Path) -> None:
    (folder / CARD).unlink()
    files = json.loads((folder / MANIFEST).read_text("utf-8"))["files"]
    set_manifest(folder, files={name: entry for name, entry in files.items() if name != CARD})


def outside(folder: Path) -> None:
    files = json.loads((folder / MANIFEST).read_text("utf-8"))["files"]
    set_manifest(folder, files=files | {"../passwords": files[CARD]})


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (break_file, f"{TRAJECTORIES}: sha256"),
        (truncate_file, f"{TRAJECTORIES}: \\d+ bytes"),
        (lambda folder: (folder / FAILURES).unlink(), f"{FAILURES}: .* does not hold it"),
        (
            lambda folder: (folder / "queries.parquet").write_bytes(b"PAR1"),
            "queries.parquet: the manifest does not list",
        ),
        (lambda folder: set_manifest(folder, licence=""), "field licence"),
        (no_card, "README.md, the card"),
        (outside, "'../passwords'; expected a plain path"),
        (lambda folder: (folder / MANIFEST).unlink(), "is no corpus"),
    ],
)
@pytest.mark.usefixtures("here")
def test_a_damaged_folder_is_not_pushed(
    damage: Callable[[Path], None],
    says: str,
    tmp_path: Path,
    server: HubServer,
) -> None:
    corpus = write_small_corpus(tmp_path / "toys")
    check_files(corpus)
    damage(corpus.folder)
    with pytest.raises(CorpusError, match=says):
        push(corpus.folder, ID)
    assert server.seen == []


@pytest.mark.parametrize(
    ("repo_id", "revision"), [("toys", None), ("a/b/c", None), ("../x", None), (ID, "a" * 40)]
)
def test_bad_names_are_refused(repo_id: str, revision: str | None, corpus: Corpus) -> None:
    with pytest.raises(ConfigurationError):
        push(corpus.folder, repo_id, revision=revision)


def test_the_command_line_starts_without_the_hub() -> None:
    code = (
        "import sys, agentbench_prefix.corpora.hub\n"
        "print({'huggingface_hub', 'pyarrow', 'torch', 'datasets'} & sys.modules.keys())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
