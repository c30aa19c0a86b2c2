"""Corpora on the Hugging Face Hub: ``agentbench-prefix hub push`` and ``hub pull``.

A corpus is a dataset repository that holds the files its manifest lists. It is pushed in one commit
and pulled at a pinned one, and every file is compared with the manifest on both ways. The token
comes from ``HF_TOKEN`` or the Hub's own login (``hf auth login``), the server from ``HF_ENDPOINT``.

Only the functions import what they need: the module is cheap for the command line.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any

import typer

from agentbench_prefix.errors import (
    AgentBenchError,
    ConfigurationError,
    CorpusError,
    MissingExtraError,
)
from agentbench_prefix.files import sha256_file

if TYPE_CHECKING:
    from huggingface_hub import HfApi, RepoFile

    from agentbench_prefix.corpora.reading import Corpus
    from agentbench_prefix.corpora.schema import FileEntry

BRANCH = "main"
TIMEOUT = 30.0
"""Seconds to wait for the first answer of the Hub."""
ATTEMPTS = 3
"""Times a file is asked for when the connection is reset; the Hub's client resumes other breaks."""

_COMMIT = re.compile(r"[0-9a-f]{40}")
_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")

Progress = Callable[[str], None]
"""Told in one line what was done."""

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Publish corpora on the Hugging Face Hub, and get them from there.",
)


class HubError(AgentBenchError):
    """The Hub cannot be reached, or refuses."""


def is_hub_id(text: str) -> bool:
    """Whether a text has the form ``owner/name``."""
    return _ID.fullmatch(text) is not None


def cache_folder(repo_id: str, revision: str) -> Path:
    """Where a pulled corpus is kept: ``<cache>/corpora/<owner>/<name>/<commit>``.

    ``<cache>`` is ``$AGENTBENCH_PREFIX_CACHE``, by default ``~/.cache/agentbench-prefix``.
    """
    cache = os.environ.get("AGENTBENCH_PREFIX_CACHE") or "~/.cache/agentbench-prefix"
    return Path(cache).expanduser() / "corpora" / repo_id / revision


# ------------------------------------------------------------------ files against the manifest
def check_files(corpus: Corpus) -> None:
    """Compare a folder with its manifest: size and hash of every file, and no other Parquet file.

    Raises:
        CorpusError: A file is missing, differs, or is not listed; it is named.
    """
    for name, entry in corpus.manifest.files.items():
        _check_name(name)
        check_file(corpus.folder, name, entry)
    for path in sorted(corpus.folder.rglob("*.parquet")):
        name = path.relative_to(corpus.folder).as_posix()
        if name not in corpus.manifest.files and not name.startswith("."):
            raise CorpusError(
                "the manifest does not list this file: remove it, or build the corpus again",
                file=name,
            )


def _check_name(name: str) -> None:
    parts = PurePosixPath(name).parts
    if (
        name != "/".join(parts)
        or "\\" in name
        or name.startswith("/")
        or any(part.startswith(".") for part in parts)
        or not parts
    ):
        raise CorpusError(
            f"lists {name!r}; expected a plain path within the corpus: get it from another source",
            file="manifest.json",
            field="files",
        )


def check_file(folder: Path, name: str, entry: FileEntry) -> None:
    """Compare one file with its entry in the manifest.

    Args:
        folder: Folder of the corpus.
        name: Path of the file in it.
        entry: What the manifest says of it.

    Raises:
        CorpusError: It is missing, or its size or hash differs; it is named.
    """
    path = folder / name
    if not path.is_file():
        raise CorpusError(
            f"the manifest lists this file, but {folder} does not hold it: "
            "build or pull the corpus again",
            file=name,
        )
    size = path.stat().st_size
    if size != entry.size:
        raise CorpusError(
            f"{size} bytes in {folder}, {entry.size} by the manifest: it is truncated or another "
            "file; build or pull the corpus again",
            file=name,
        )
    found = sha256_file(path)
    if found != entry.sha256:
        raise CorpusError(
            f"sha256 {found} in {folder}, {entry.sha256} by the manifest: it was changed; "
            "build or pull the corpus again",
            file=name,
        )


# ------------------------------------------------------------------ the Hub's client
def _client() -> HfApi:
    try:
        from huggingface_hub import HfApi
    except ImportError as error:
        raise MissingExtraError("the Hub", "corpora") from error
    # The client reads HF_ENDPOINT once, when it is imported.
    endpoint = os.environ.get("HF_ENDPOINT", "").rstrip("/") or None
    return HfApi(endpoint=endpoint, library_name="agentbench-prefix")


def _check_id(repo_id: str) -> None:
    if not is_hub_id(repo_id):
        raise ConfigurationError(f"{repo_id!r} is no id of a dataset on the Hub: write owner/name")


def _message(error: BaseException) -> str:
    """First line that says something, without the token, whatever the server sent back."""
    from huggingface_hub import get_token

    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = getattr(error, "server_message", None)
    text = " ".join(dict.fromkeys([*lines[:1], *([str(said)] if said else [])]))
    text = re.sub(r"(https?://[^\s?'\"]+)\?[^\s'\"]*", r"\1", text)  # signed addresses
    for token in (os.environ.get("HF_TOKEN", "").strip(), get_token()):
        text = text.replace(token, "***") if token else text
    return text or type(error).__name__


@contextlib.contextmanager
def _reporting(what: str, api: HfApi) -> Iterator[None]:
    """Turn the client's errors into ours.

    Args:
        what: What was being done, e.g. ``"pull owner/name"``.
        api: The client.
    """
    from huggingface_hub import errors

    again = "run the same command again to go on"
    try:
        yield
    except AgentBenchError:
        raise
    except errors.GatedRepoError as error:
        raise HubError(
            f"cannot {what}: it is gated; ask for access on its page at {api.endpoint} and log in "
            "(HF_TOKEN or `hf auth login`)"
        ) from error
    except errors.RepositoryNotFoundError as error:
        raise HubError(
            f"cannot {what}: {api.endpoint} has no such dataset, or hides it from you: check the "
            "id, and for a private one set HF_TOKEN or run `hf auth login`"
        ) from error
    except errors.RevisionNotFoundError as error:
        raise HubError(
            f"cannot {what}: there is no such revision: choose a commit from its history"
        ) from error
    except errors.HfHubHTTPError as error:
        status = error.response.status_code
        if status in (401, 403):
            do = "use a token that may do this (HF_TOKEN or `hf auth login`)"
        elif status in (409, 412):
            do = f"somebody else changed it meanwhile; {again}"
        elif status >= 500 or status in (408, 429):
            do = f"wait a little, then {again}"
        else:
            do = "see what the server says"
        raise HubError(f"cannot {what}: {_message(error)}: {do}") from error
    except errors.OfflineModeIsEnabled as error:
        raise HubError(f"cannot {what}: HF_HUB_OFFLINE is set: unset it") from error
    except (errors.HTTPError, OSError) as error:  # type: ignore[attr-defined] # httpx's, renamed at times
        if "/xet-write-token/" in str(error) and "404" in str(error):
            raise HubError(
                f"cannot {what}: {api.endpoint} has no Xet storage, which the Hub's client uses "
                "unless told otherwise: set HF_HUB_DISABLE_XET=1, then " + again
            ) from error
        raise HubError(
            f"cannot {what}: {_message(error)} (server {api.endpoint}): check the connection and "
            f"HF_ENDPOINT, then {again}"
        ) from error
    except (ValueError, RuntimeError) as error:  # of hf_xet, too
        raise HubError(f"cannot {what}: {_message(error)}") from error


def _tree(api: HfApi, repo_id: str, commit: str) -> dict[str, RepoFile]:
    from huggingface_hub import RepoFile

    entries = api.list_repo_tree(repo_id, recursive=True, revision=commit, repo_type="dataset")
    return {entry.path: entry for entry in entries if isinstance(entry, RepoFile)}


def _same(entry: RepoFile | None, path: Path) -> bool:
    """Whether a file at the Hub has the bytes of a local one."""
    from huggingface_hub.utils.sha import git_hash

    if entry is None or entry.size != path.stat().st_size:
        return False
    if entry.lfs is not None:
        return entry.lfs.sha256 == sha256_file(path)
    return entry.blob_id == git_hash(path.read_bytes())


def _head(api: HfApi, repo_id: str, revision: str | None) -> Any:
    return api.repo_info(repo_id, repo_type="dataset", revision=revision, timeout=TIMEOUT)


# ------------------------------------------------------------------ push
def push(
    folder: Path,
    repo_id: str,
    *,
    revision: str | None = None,
    private: bool = False,
    progress: Progress | None = None,
) -> str:
    """Publish a corpus in one commit; what the Hub already has is not sent again.

    The commit holds the files of the manifest and the manifest. Files of an earlier version in the
    corpus' own folders (``queries/`` and so on) are removed by it, others are left. The revision
    stays as it was until the commit, so a broken push leaves nothing half-written: run it again.

    Args:
        folder: Folder of the corpus.
        repo_id: Dataset repository ``owner/name``; it is created if there is none.
        revision: Branch; created if there is none. Default: ``main``.
        private: Create the repository as a private one.
        progress: Reports in words.

    Returns:
        The commit, 40 hexadecimal digits: the revision to pull.

    Raises:
        CorpusError: The folder is no corpus, has no card, or differs from its manifest.
        ConfigurationError: No token, a bad id or revision, or a public repository asked to be
            private.
        HubError: The Hub cannot be reached or refuses.
        MissingExtraError: ``huggingface_hub`` is not installed.
    """
    from agentbench_prefix.corpora.reading import CARD, MANIFEST, Corpus
    from agentbench_prefix.corpora.schema import ROWS

    tell = progress or _quiet
    _check_id(repo_id)
    branch = revision or BRANCH
    if _COMMIT.fullmatch(branch):
        raise ConfigurationError(
            f"{branch} is a commit, which cannot be changed: name a branch to push to"
        )
    corpus = Corpus.open(folder)
    if CARD not in corpus.manifest.files:
        raise CorpusError(
            f"does not list {CARD}, the card, which every release has: build the corpus again",
            file=MANIFEST,
            field="files",
        )
    check_files(corpus)
    wanted = {name: folder / name for name in (*corpus.manifest.files, MANIFEST)}
    api = _client()
    from huggingface_hub import CommitOperationAdd, CommitOperationDelete, errors, get_token

    with _reporting(f"push to {repo_id}", api):
        if not get_token():
            raise ConfigurationError(
                "pushing needs a token of the Hub: set HF_TOKEN to one that may write, or log in "
                "with `hf auth login`"
            )
        try:
            info = _head(api, repo_id, None)
        except errors.RepositoryNotFoundError:
            # Not False: an organisation may make what is not said private.
            visible = True if private else None
            api.create_repo(repo_id, repo_type="dataset", private=visible, exist_ok=True)
            info = _head(api, repo_id, None)
        if private and not info.private:
            raise ConfigurationError(
                f"{repo_id} exists and is public: make it private in its settings first, choose "
                "another id, or leave --private out"
            )
        if branch != BRANCH:
            try:
                info = _head(api, repo_id, branch)
            except errors.RevisionNotFoundError:
                api.create_branch(repo_id, branch=branch, repo_type="dataset", exist_ok=True)
                info = _head(api, repo_id, branch)
        head = str(info.sha)
        there = _tree(api, repo_id, head)
        changed = [name for name, path in wanted.items() if not _same(there.get(name), path)]
        stale = [
            name for name in there if name not in wanted and PurePosixPath(name).parts[0] in ROWS
        ]
        if not changed and not stale:
            tell(f"{repo_id} already holds this corpus, all {len(wanted)} files are the same")
            return head
        commit = api.create_commit(
            repo_id,
            [
                *(CommitOperationAdd(name, wanted[name]) for name in changed),
                *(CommitOperationDelete(name, is_folder=False) for name in stale),
            ],
            commit_message=f"{corpus.manifest.name} {corpus.manifest.version}",
            repo_type="dataset",
            revision=branch,
            parent_commit=head,
        ).oid
        arrived = _tree(api, repo_id, commit)
        for name, path in wanted.items():
            if not _same(arrived.get(name), path):
                raise CorpusError(
                    f"it is not the local file in the new commit {commit} of {repo_id}: the "
                    "repository's .gitignore may leave it out, or it was changed during the push; "
                    "do not use this commit, push again",
                    file=name,
                )
    tell(f"{len(changed)} of {len(wanted)} files pushed to {repo_id}, {len(stale)} removed")
    return commit


# ------------------------------------------------------------------ pull
def pull(repo_id: str, *, revision: str, out: Path, progress: Progress | None = None) -> Corpus:
    """Get a corpus at a commit; ``out`` appears when every file is there and verified.

    Files are kept in ``.<out>.partial`` beside ``out`` as they arrive, so the same call goes on
    where a broken one stopped; a dropped connection is resumed within the file. A corpus that is
    at ``out`` already is left as it is.

    Args:
        repo_id: Dataset repository ``owner/name``.
        revision: Commit, 40 hexadecimal digits.
        out: Folder of the corpus.
        progress: Reports in words.

    Raises:
        CorpusError: The revision holds no corpus, or a file of it is missing, truncated or changed;
            it is named.
        ConfigurationError: A bad id; a revision that is no commit, with the commit it stands for
            now; or something else is at ``out``.
        HubError: The Hub cannot be reached or refuses.
        MissingExtraError: ``huggingface_hub`` is not installed.
    """
    from agentbench_prefix.corpora.reading import MANIFEST

    tell = progress or _quiet
    _check_id(repo_id)
    api = _client()
    with _reporting(f"pull {repo_id} at {revision!r}", api):
        commit = str(_head(api, repo_id, revision).sha)
        if commit != revision:
            raise ConfigurationError(
                f"{revision!r} is no commit but a name that may move; it stands for {commit} now: "
                f"pin it with --revision {commit}"
            )
        there = _tree(api, repo_id, commit)
    if MANIFEST not in there:
        raise CorpusError(
            f"{repo_id} at {commit} is no corpus: it has no {MANIFEST}; check id and revision"
        )
    out = Path(os.path.abspath(out))  # noqa: PTH100 # resolve() would follow a link at out
    partial = out.with_name(f".{out.name}.partial")
    with _locked(partial):
        corpus = _fetch(api, repo_id, commit, there, partial / commit, out, tell)
        shutil.rmtree(partial)
    return corpus


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Make a folder and hold it against other processes; the block may remove it."""
    from filelock import FileLock

    lock = FileLock(folder / "lock")
    while True:
        folder.mkdir(parents=True, exist_ok=True)
        # Its holder removes the folder when done, perhaps just now.
        with contextlib.suppress(FileNotFoundError):
            lock.acquire()
            break
    try:
        yield
    finally:
        lock.release()


def _fetch(
    api: HfApi,
    repo_id: str,
    commit: str,
    there: dict[str, RepoFile],
    files: Path,
    out: Path,
    tell: Progress,
) -> Corpus:
    """Bring every file to ``files``, then rename that to ``out``."""
    from agentbench_prefix.corpora.reading import MANIFEST, Corpus

    _download(api, repo_id, commit, MANIFEST, files)
    if not _same(there[MANIFEST], files / MANIFEST):
        (files / MANIFEST).unlink()
        raise CorpusError(
            f"it is not the file of commit {commit} of {repo_id}: it was truncated or changed on "
            "the way; pull again",
            file=MANIFEST,
        )
    if out.exists():
        _check_present(out, files)
        tell(f"already there: {out} holds this corpus, every file is verified")
        return Corpus.open(out)
    corpus = Corpus.open(files)
    for name, entry in corpus.manifest.files.items():
        _check_name(name)
        if name not in there:
            raise CorpusError(
                f"the manifest lists this file, but {repo_id} at {commit} does not hold it: "
                "choose another revision",
                file=name,
            )
        if there[name].size != entry.size:
            raise CorpusError(
                f"{there[name].size} bytes in {repo_id} at {commit}, {entry.size} by the manifest: "
                "it is truncated or another file there; choose another revision",
                file=name,
            )
    for name, entry in corpus.manifest.files.items():
        _download(api, repo_id, commit, name, files)
        try:
            check_file(files, name, entry)
        except CorpusError as error:
            (files / name).unlink()  # so that the next call gets it anew
            raise CorpusError(
                f"what {repo_id} at {commit} sends is not the file of the manifest (sha256 or "
                "size differ): it was truncated or changed; nothing was written, pull again or "
                "choose another revision",
                file=name,
            ) from error
    shutil.rmtree(files / ".cache", ignore_errors=True)
    files.rename(out)
    tell(f"{len(corpus.manifest.files) + 1} files are there and verified")
    return Corpus.open(out)


def _check_present(out: Path, files: Path) -> None:
    from agentbench_prefix.corpora.reading import MANIFEST, Corpus

    mine = out / MANIFEST
    if not mine.is_file() or mine.read_bytes() != (files / MANIFEST).read_bytes():
        shutil.rmtree(files.parent, ignore_errors=True)
        raise ConfigurationError(
            f"{out} exists and holds something else: choose another folder with --out, or remove it"
        )
    check_files(Corpus.open(out))


def _download(api: HfApi, repo_id: str, commit: str, name: str, files: Path) -> None:
    """Get a file unless it is there; what is there is not trusted, but checked by the caller."""
    from tenacity import Retrying, retry_if_exception, stop_after_attempt, wait_exponential

    def broken(error: BaseException) -> bool:
        # The one break the client does not resume itself; its HTTP library varies by version.
        return type(error).__name__ == "ReadError"

    with _reporting(f"get {name} of {repo_id} at {commit}", api):
        Retrying(
            retry=retry_if_exception(broken),
            stop=stop_after_attempt(ATTEMPTS),
            wait=wait_exponential(max=8),
            reraise=True,
        )(
            api.hf_hub_download,
            repo_id,
            name,
            repo_type="dataset",
            revision=commit,
            local_dir=files,
        )


def _quiet(_: str) -> None:
    pass


# ------------------------------------------------------------------ the command line
def _say(text: str, *, stderr: bool = False) -> None:
    from agentbench_prefix.evaluation.tables import make_console

    make_console(stderr=stderr).print(text, markup=False, highlight=False, soft_wrap=True)


def _report(text: str) -> None:
    _say(text, stderr=True)


def _calm() -> None:
    """The client's bars are for terminals only."""
    if not sys.stderr.isatty():
        with contextlib.suppress(ImportError):  # reported by what follows
            from huggingface_hub.utils.tqdm import disable_progress_bars

            disable_progress_bars()


@app.command(name="push")
def push_command(
    folder: Annotated[Path, typer.Argument(metavar="FOLDER", help="Folder of the corpus.")],
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Dataset owner/name.")],
    revision: Annotated[
        str | None, typer.Option(metavar="BRANCH", help="Branch to push to. Default: main.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Create the repository as a private one.")
    ] = False,
) -> None:
    """Publish a corpus in one commit; prints the commit. The same command resumes a broken push.

    The token comes from HF_TOKEN or `hf auth login`.
    """
    _calm()
    commit = push(folder, repo_id, revision=revision, private=private, progress=_report)
    _report(f"pull it with: agentbench-prefix hub pull {repo_id} --revision {commit}")
    _say(commit)


@app.command(name="pull")
def pull_command(
    repo_id: Annotated[str, typer.Argument(metavar="REPO_ID", help="Dataset owner/name.")],
    revision: Annotated[str, typer.Option(metavar="COMMIT", help="Commit to get, in full.")],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of the corpus. Default: the cache, where other commands find it under "
            "REPO_ID@COMMIT."
        ),
    ] = None,
) -> None:
    """Get a corpus at a commit and verify it; prints its folder. The same command resumes."""
    _calm()
    folder = out if out is not None else cache_folder(repo_id, revision)
    _say(str(pull(repo_id, revision=revision, out=folder, progress=_report).folder))
