"""What policies share that run a language model themselves: its checkpoint, and its conversations.

Imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple, TypeVar

from agentbench_prefix.dialogue import Message
from agentbench_prefix.env import JSON
from agentbench_prefix.errors import (
    CheckpointError,
    ConfigurationError,
    ContextLimitError,
    MissingExtraError,
)
from agentbench_prefix.files import sha256_file, sha256_text
from agentbench_prefix.policies.base import Episode
from agentbench_prefix.serialization import ChatSerializer

_WEIGHTS = "model.safetensors"
_WEIGHTS_INDEX = "model.safetensors.index.json"
_TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "tokenizer.model", "vocab.txt")


# ------------------------------------------------------------------ checkpoints
class FoundCheckpoint(NamedTuple):
    """A checkpoint on this machine.

    Attributes:
        folder: Its folder.
        source: What names it besides its content: Hub id and commit, nothing if it is local.
    """

    folder: Path
    source: dict[str, JSON]

    def __str__(self) -> str:
        return str(self.source.get("model", self.folder))


def find_checkpoint(
    model: str | Path | FoundCheckpoint, revision: str | None = None
) -> FoundCheckpoint:
    """Find a checkpoint, on the Hub if need be.

    Args:
        model: A local folder, or a Hub id; what was found before is given back.
        revision: Branch, tag or commit of a Hub id.

    Raises:
        CheckpointError: Nothing is there, or the Hub cannot be reached.
        ConfigurationError: A revision was given of a local folder.
        MissingExtraError: It is not local, and what downloads it is not installed.
    """
    if isinstance(model, FoundCheckpoint):
        return model
    model = str(model)
    try:
        folder = Path(model).expanduser()
    except RuntimeError:  # the home folder of a user who does not exist
        folder = Path(model)
    if folder.is_dir():
        if revision is not None:
            raise ConfigurationError(
                f"a revision ({revision!r}) belongs to a Hub id, but {model!r} is a local folder"
            )
        return FoundCheckpoint(folder, {})
    if (
        folder.exists()
        or folder.is_absolute()
        or model.startswith((".", "~"))
        or model.count("/") > 1
    ):
        raise CheckpointError(
            f"no checkpoint folder {model!r}: give a folder that holds config.json, "
            "*.safetensors and a tokenizer, or a Hub id"
        )
    try:
        from huggingface_hub import snapshot_download
        from huggingface_hub.errors import LocalEntryNotFoundError
    except ImportError as error:
        raise MissingExtraError(
            f"{model!r} is no local folder; what gets it from the Hub", "eval"
        ) from error

    patterns = ["*.json", "*.safetensors", "*.jinja", "*.txt", "*.model"]
    try:
        snapshot = Path(snapshot_download(model, revision=revision, allow_patterns=patterns))
    except LocalEntryNotFoundError as error:
        raise CheckpointError(
            f"{model!r} is no local folder, and the Hub cannot be reached to look it up there: "
            "check the connection, or download the model and give its folder"
        ) from error
    except Exception as error:  # the client's HTTP library, and so its errors, vary by version
        at = "" if revision is None else f" at revision {revision!r}"
        raise CheckpointError(
            f"{model!r} is no local folder, and the Hub does not give it{at}: "
            f"{str(error).strip().splitlines()[0]}"
        ) from error
    return FoundCheckpoint(snapshot, {"model": model, "revision": snapshot.name})


class CheckpointHashes(NamedTuple):
    """What identifies a checkpoint, each a SHA-256 in hexadecimal.

    Attributes:
        checkpoint: Over the hashes of its configuration and of each weight file.
        model: Of its weight file; of several, over their hashes.
    """

    checkpoint: str
    model: str


def check_checkpoint(folder: Path) -> CheckpointHashes:
    """Check that a checkpoint is whole, and hash it.

    Raises:
        CheckpointError: A file is missing or broken.
    """

    def lacks(what: str) -> CheckpointError:
        return CheckpointError(f"the checkpoint folder {str(folder)!r} {what}")

    if not (folder / "config.json").is_file():
        raise lacks("has no config.json: it is no transformers checkpoint")
    if not any((folder / name).is_file() for name in _TOKENIZER_FILES):
        raise lacks(f"has no tokenizer (none of {', '.join(_TOKENIZER_FILES)})")
    index = folder / _WEIGHTS_INDEX
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text("utf-8"))["weight_map"].values()))
        except (ValueError, KeyError, AttributeError, TypeError) as error:
            raise lacks(f"has a broken {_WEIGHTS_INDEX}: {error}") from error
    else:
        names = [_WEIGHTS]
    missing = [name for name in names if not (folder / name).is_file()]
    if missing:
        pickled = list(folder.glob("*.bin")) and not index.is_file()
        hint = "; *.bin files are pickles and are not read: convert them" if pickled else ""
        raise lacks(f"lacks weights: {', '.join(missing)}{hint}")
    digests = [sha256_file(folder / name) for name in names]
    return CheckpointHashes(
        sha256_text("".join([sha256_file(folder / "config.json"), *digests])),
        digests[0] if len(digests) == 1 else sha256_text("".join(digests)),
    )


# ------------------------------------------------------------------ conversations
@dataclasses.dataclass
class Conversation:
    """What a session knows of one episode: its conversation in tokens.

    Attributes:
        episode: The episode; held so that its identity stays unique.
        ids: Its whole conversation in tokens.
        seen: Messages already in ``ids``.
        said: The newest reply, which is in ``ids`` before it is in the messages.
    """

    episode: Episode
    ids: list[int] = dataclasses.field(default_factory=list)
    seen: int = 0
    said: str | None = None

    def read(self, serializer: ChatSerializer) -> None:
        """Append the tokens of messages that are new; others may have spoken before the first call.

        Raises:
            ValueError: No reply is due, or the conversation does not go on from the reply given.
        """
        messages = self.episode.messages
        where = f"episode {self.episode.task_id!r} sample {self.episode.sample}"
        if not messages or messages[-1].role != "user":
            raise ValueError(
                f"no reply is due in {where}: its conversation must end with a user message"
            )
        if self.seen == 0:
            said = [i for i, message in enumerate(messages) if message.role == "assistant"]
            if said:
                self.ids, _ = serializer.conversation(messages[: said[-1] + 1], [True] * len(said))
                self.ids += serializer.glue(messages[said[-1] + 1 :])
            else:
                self.ids = serializer.opening(messages)
        else:
            answered = [] if self.said is None else [Message("assistant", self.said)]
            new = messages[self.seen :]
            between = new[len(answered) :]
            goes_on = new[: len(answered)] == answered and bool(between) == bool(answered)
            if not goes_on or any(message.role != "user" for message in between):
                given = "no reply was given" if self.said is None else f"{self.said[:40]!r}"
                raise ValueError(
                    f"the conversation of {where} does not go on from the reply given ({given}), "
                    f"but with {[(m.role, m.content[:40]) for m in new[:2]]}; open a new session "
                    "over a changed conversation"
                )
            if between:
                self.ids += serializer.glue(between)
        self.said, self.seen = None, len(messages)

    def say(self, tokens: Sequence[int], serializer: ChatSerializer) -> str:
        """Append a generated reply, and the end token if it was cut; return its text."""
        self.ids += tokens
        if tokens[-1] != serializer.end_id:
            self.ids.append(serializer.end_id)
        self.said = serializer.decode(tokens)
        return self.said


C = TypeVar("C", bound=Conversation)


def read_due(
    conversations: Mapping[int, C], episodes: Sequence[Episode], serializer: ChatSerializer
) -> list[C]:
    """Look up and read the conversations of episodes in which a reply is due.

    Args:
        conversations: Those of a session, by the ``id`` of their episodes.
        episodes: Some of the session's episodes.
        serializer: Encodes what is new.

    Raises:
        ValueError: An episode was given twice or is not the session's; see also
            :meth:`Conversation.read`.
    """
    if len({id(episode) for episode in episodes}) < len(episodes):
        raise ValueError("an episode was given twice; ask for one reply per episode")
    for episode in episodes:
        if id(episode) not in conversations:
            raise ValueError(
                f"episode {episode.task_id!r} sample {episode.sample} is not one of the session's; "
                "open a session over all episodes first"
            )
    due = [conversations[id(episode)] for episode in episodes]
    for conversation in due:
        conversation.read(serializer)
    return due


def overflow(context: int, tokens: int) -> ContextLimitError:
    """What to answer when ``tokens`` tokens of a conversation leave its reply no room."""
    return ContextLimitError(
        f"the conversation does not fit the context of {context} tokens: it has {tokens} and the "
        "reply is not finished"
    )
