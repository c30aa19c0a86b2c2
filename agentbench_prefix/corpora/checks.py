"""Checks of a corpus' manifest, and of what it names: files, card, recipe, environment, models."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from agentbench_prefix.corpora.card import configurations, render
from agentbench_prefix.corpora.reading import CARD, MANIFEST, RECIPE, Corpus
from agentbench_prefix.corpora.recipe import CorpusRecipe, Scoring, load_corpus_recipe
from agentbench_prefix.corpora.schema import ROWS, ModelEntry
from agentbench_prefix.corpora.scoring import Scorer, load_scorer
from agentbench_prefix.corpora.storage import open_parquet
from agentbench_prefix.corpora.validate import TOLERANCE, Report
from agentbench_prefix.env import TextEnv
from agentbench_prefix.errors import AgentBenchError, ConfigurationError, CorpusError
from agentbench_prefix.files import canonical_json, sha256_file
from agentbench_prefix.registry import make

_COARSE = 0.05  # of half-precision models, whose logits depend on how a product is split

Finding = tuple[str, str]
"""A field and what is wrong with it."""


def blame_manifest(report: Report, what: str, field: str) -> None:
    """Note a fault of the manifest."""
    report.add(CorpusError(what, file=MANIFEST, field=field))


def check_files(corpus: Corpus, report: Report) -> None:
    """Every file is there as the manifest says, and no other Parquet file is."""
    files = corpus.manifest.files
    for name in (CARD, RECIPE):
        if name not in files:
            blame_manifest(report, f"{name} is not listed", "files")
    for name, entry in files.items():
        path = corpus.folder / name
        if PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
            blame_manifest(report, f"{name!r} lies outside the corpus", "files")
            continue
        report.checked["files"] += 1
        if not path.is_file():
            report.add(
                CorpusError("the file is missing; build or pull the corpus again", file=name)
            )
            continue
        found: dict[str, int | str] = {"size": path.stat().st_size}
        if found["size"] == entry.size:
            found["sha256"] = sha256_file(path)
        if name.endswith(".parquet"):
            kind = name.partition("/")[0]
            if kind not in ROWS:
                blame_manifest(
                    report, f"{name!r} is of no known kind: expected {', '.join(ROWS)}", "files"
                )
                continue
            try:
                found["rows"] = open_parquet(path, kind, name).metadata.num_rows
            except CorpusError as error:
                report.add(error)
        for field, value in found.items():
            if getattr(entry, field) != value:
                report.add(
                    CorpusError(
                        f"{MANIFEST} says {getattr(entry, field)}, the file has {value}; "
                        "build or pull the corpus again",
                        file=name,
                        field=field,
                    )
                )
    for path in sorted(corpus.folder.rglob("*.parquet")):
        name = path.relative_to(corpus.folder).as_posix()
        hidden = any(part.startswith(".") for part in PurePosixPath(name).parts)
        if name not in files and not hidden:
            report.add(CorpusError(f"the file is not listed in {MANIFEST}; remove it", file=name))


def check_card(corpus: Corpus, report: Report) -> None:
    """The card's header names the licence and every configuration."""
    import yaml

    def fault(what: str, field: str = "") -> None:
        report.add(CorpusError(what, file=CARD, field=field))

    try:
        text = (corpus.folder / CARD).read_text(encoding="utf-8")
    except FileNotFoundError:
        return  # named already if it is listed
    except (OSError, ValueError) as error:
        fault(f"cannot be read ({error})")
        return
    try:
        header = yaml.safe_load(text.split("---\n")[1]) if text.startswith("---\n") else None
    except (IndexError, yaml.YAMLError) as error:
        fault(f"its YAML header cannot be read ({error})")
        return
    if not isinstance(header, dict):
        fault("has no YAML header: expected one that names license and configs")
        return
    licence = corpus.manifest.licence.lower()
    if header.get("license") != licence:
        fault(f"expected {licence!r} as in {MANIFEST}, got {header.get('license')!r}", "license")
    try:
        named = {
            config["config_name"]: sorted((f["split"], f["path"]) for f in config["data_files"])
            for config in header.get("configs") or []
        }
    except (TypeError, KeyError) as error:
        fault(f"each needs config_name and data_files of split and path ({error!r})", "configs")
        return
    expected = {name: sorted(files) for name, files in configurations(corpus.manifest)}
    for name in expected | named:
        if named.get(name) != expected.get(name):
            fault(
                f"expected {expected.get(name, 'no such configuration')}, got "
                f"{named.get(name, 'none')}",
                f"configs.{name}",
            )
            return


def check_card_text(corpus: Corpus, report: Report) -> None:
    """The card of an otherwise sound corpus is what its manifest gives, figure by figure."""
    text = (corpus.folder / CARD).read_text(encoding="utf-8")
    if (written := render(corpus.manifest)) != text:
        what = f"is not what {MANIFEST} gives: {expectation(written, text)}"
        report.add(CorpusError(what, file=CARD))


def check_recipe(corpus: Corpus, report: Report) -> CorpusRecipe | None:
    """The recipe is valid, the same in the manifest and in its file, and gives these files."""
    manifest = corpus.manifest
    try:
        recipe = CorpusRecipe.model_validate(manifest.recipe)
    except ValidationError as error:
        first = error.errors()[0]
        blame_manifest(report, first["msg"], ".".join(["recipe", *map(str, first["loc"])]))
        return None
    for name in ("name", "version", "licence", "env_id"):
        if getattr(manifest, name) != getattr(recipe, name):
            blame_manifest(
                report,
                f"expected {getattr(recipe, name)!r} as in the recipe, got "
                f"{getattr(manifest, name)!r}",
                name,
            )
    if (corpus.folder / RECIPE).is_file():
        try:
            written = load_corpus_recipe(corpus.folder / RECIPE)
        except ConfigurationError as error:
            report.add(CorpusError(str(error), file=RECIPE))
        else:
            differs = difference(recipe.model_dump(mode="json"), written.model_dump(mode="json"))
            if differs is None:
                recipe = written  # the order of strategies counts, and the manifest sorts its keys
            else:
                what = f"{differs[1]}, as in {MANIFEST}"
                report.add(CorpusError(what, file=RECIPE, field=differs[0]))
    kinds = ["trajectories"]
    if recipe.dialogues:
        kinds += ["queries", *(f"sidecars/{label_of(scoring)}" for scoring in recipe.models)]
    wanted = {f"{kind}/{split}.parquet" for split in recipe.splits for kind in kinds}
    optional = {f"failures/{split}.parquet" for split in recipe.splits}
    listed = {name for name in manifest.files if name.endswith(".parquet")}
    for name in sorted(wanted - listed):
        blame_manifest(report, f"{name} is not listed, though the recipe makes it", "files")
    for name in sorted(listed - wanted - optional):
        blame_manifest(report, f"{name} is listed, though the recipe does not make it", "files")
    return recipe


def label_of(scoring: Scoring) -> str:
    """``<dialogue>/<model>`` of a model."""
    return f"{scoring.dialogue}/{scoring.label}"


def gives_entropies(scoring: Scoring) -> bool:
    """Whether a model gives the entropies that cuts are ranked by."""
    return scoring.backend == "transformers"


def check_environment(corpus: Corpus, recipe: CorpusRecipe, report: Report) -> TextEnv | None:
    """The environment installed here is the corpus' own; ``None`` if rows would not fit it."""
    manifest = corpus.manifest
    try:
        env = make(recipe.env_id, **recipe.arguments)
    except (AgentBenchError, TypeError, ValueError) as error:
        blame_manifest(report, f"the environment cannot be made: {error}", "env_id")
        return None
    before = len(report.faults)
    hashes = {d.label: d.fingerprint() for d in env.dialogues().values()}
    for name, mine in (
        ("env_id", env.env_id),
        ("data_hash", env.data_hash),
        ("arguments", json.loads(canonical_json(env.arguments()))),
        ("dialogues", hashes),
    ):
        differs = difference(mine, getattr(manifest, name), name)
        if differs is not None:
            blame_manifest(
                report, f"{differs[1]}, as in the environment installed here", differs[0]
            )
    for name in recipe.dialogues:
        if name not in env.dialogues():
            blame_manifest(report, f"the environment has no dialogue {name!r}", "recipe.dialogues")
    return env if len(report.faults) == before else None


def check_splits(corpus: Corpus, recipe: CorpusRecipe, env: TextEnv, report: Report) -> None:
    """Tasks are those of the environment's splits that can be solved, each in one split only."""
    manifest = corpus.manifest
    owner: dict[str, str] = {}
    for split, tasks in manifest.splits.items():
        for index, task in enumerate(tasks):
            if task in owner:
                blame_manifest(
                    report,
                    f"task {task!r} is in split {owner[task]!r} already: expected each task in one "
                    "split, once",
                    f"splits.{split}.{index}",
                )
            owner[task] = split
    splits, beyond = {}, {}
    for split, source in recipe.splits.items():
        beyond[split] = list(env.out_of_reach(source, env.max_turns))
        left_out = set(beyond[split])
        splits[split] = [t for t in env.tasks(source) if t not in left_out][: recipe.tasks]
    for name, mine in (("splits", splits), ("out_of_reach", beyond)):
        differs = difference(mine, getattr(manifest, name), name)
        if differs is not None:
            blame_manifest(report, f"{differs[1]}, as in the environment", differs[0])


def difference(expected: Any, got: Any, path: str = "") -> Finding | None:
    """The first place where two values differ, and how."""
    if type(expected) is type(got) and expected == got:
        return None
    stem = f"{path}." if path else ""
    if isinstance(expected, dict) and isinstance(got, dict):
        for key in expected | got:
            if key not in got:
                return f"{stem}{key}", f"is missing: expected {expected[key]!r:.80}"
            if key not in expected:
                return f"{stem}{key}", f"is not expected, got {got[key]!r:.80}"
            found = difference(expected[key], got[key], f"{stem}{key}")
            if found is not None:
                return found
        return None
    if isinstance(expected, list) and isinstance(got, list):
        for index, (one, other) in enumerate(zip(expected, got, strict=False)):
            found = difference(one, other, f"{stem}{index}")
            if found is not None:
                return found
        if len(expected) != len(got):
            return path, f"expected {len(expected)} entries, got {len(got)}"
        return None
    if expected == got and not isinstance(expected, bool) and not isinstance(got, bool):
        return None  # 1 and 1.0
    return path, expectation(expected, got)


def expectation(expected: Any, got: Any) -> str:
    """Say what was expected; of two long texts, from a little before the place they part."""
    if isinstance(expected, str) and isinstance(got, str) and max(len(expected), len(got)) > 60:
        pairs = zip(expected, got, strict=False)
        part = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(expected), len(got)))
        begin = max(0, part - 20)
        return (
            f"from character {begin} on, expected {expected[begin : begin + 60]!r}, got "
            f"{got[begin : begin + 60]!r}"
        )
    return f"expected {expected!r:.80}, got {got!r:.80}"


# ------------------------------------------------------------------ models
@dataclasses.dataclass(frozen=True)
class Judge:
    """A model at hand.

    Attributes:
        scoring: What the recipe says of it.
        entry: What the manifest says of it.
        scorer: The model; ``None`` if it is not to be used, or is another.
        same_weights: Whether its weights are those of the manifest.
    """

    scoring: Scoring
    entry: ModelEntry
    scorer: Scorer | None
    same_weights: bool

    @property
    def tolerance(self) -> float:
        """Largest difference allowed, in nats."""
        return TOLERANCE if self.scoring.dtype in ("float32", "float64") else _COARSE

    def scores(self, ids: Sequence[int]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
        """One plain forward pass over one sequence, nothing shared with how corpora are built.

        Returns:
            Log-probability of each token but the first, and entropy of the distribution it comes
            from, in nats, ``[tokens - 1]``.
        """
        import torch

        assert self.scorer is not None
        policy = self.scorer.policy
        model = policy.runner.model
        tokens = torch.tensor([ids], device=model.device)
        with torch.inference_mode():
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1, : policy.vocabulary]
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            logprobs = torch.log_softmax(logits / self.scoring.temperature, dim=-1)
            chosen = logprobs.gather(-1, tokens[0, 1:, None])[:, 0]
            entropies = torch.special.entr(logprobs.exp()).sum(-1)
        return chosen.double().cpu().numpy(), entropies.double().cpu().numpy()


def load_judges(
    corpus: Corpus,
    recipe: CorpusRecipe,
    given: Mapping[str, str | Path],
    report: Report,
    *,
    without: bool,
) -> dict[str, Judge]:
    """Models by label; the manifest's entries are checked against them."""
    labels = [label_of(scoring) for scoring in recipe.models]
    names = {*labels, *(scoring.label for scoring in recipe.models)}
    for name in given:
        if name not in names:
            raise ConfigurationError(
                f"the corpus has no model {name!r}, only {', '.join(labels) or 'none'}"
            )
    for label in corpus.manifest.models:
        if label not in labels:
            blame_manifest(report, "the recipe names no such model", f"models.{label}")
    if without and recipe.models:
        report.notes.append(
            "models were left out: log-probabilities and entropies were not computed anew, and "
            "masks only checked for their lengths and sums"
        )
    judges = {}
    for label, scoring in zip(labels, recipe.models, strict=True):
        field = f"models.{label}"
        entry = corpus.manifest.models.get(label)
        if entry is None:
            blame_manifest(report, "the model is missing, though the recipe names it", field)
            continue
        if entry.dialogue != scoring.dialogue:
            blame_manifest(
                report, expectation(scoring.dialogue, entry.dialogue), f"{field}.dialogue"
            )
        judges[label] = Judge(scoring, entry, None, same_weights=False)
        if without:
            continue
        place = given.get(label, given.get(scoring.label))
        # Other back ends only have to be installed where a corpus is built.
        changes: dict[str, Any] = {"backend": "transformers"}
        if scoring.dtype == "float32":
            # Two single-precision passes may differ by the sum of their errors, and machines do.
            changes["dtype"] = "float64"
        if place is not None:
            changes |= {"model": str(place), "revision": None}
        try:
            scorer = load_scorer(scoring.model_copy(update=changes), recipe.env_id)
        except (AgentBenchError, ImportError) as error:
            blame_manifest(
                report,
                f"the model is not at hand ({error}); say where it is with --model "
                f"{label}=FOLDER, or check without models",
                field,
            )
            continue
        for fields in (("model_sha256", "checkpoint_sha256"), ("tokenizer", "vocabulary")):
            for name in fields:
                mine, theirs = getattr(scorer.entry, name), getattr(entry, name)
                if mine == theirs:
                    continue
                blame_manifest(
                    report,
                    f"the model at hand has {mine}, the corpus' has {theirs}; say where that is "
                    f"with --model {label}=FOLDER",
                    f"{field}.{name}",
                )
                break
        if scorer.entry.tokenizer == entry.tokenizer:
            same = scorer.entry.checkpoint_sha256 == entry.checkpoint_sha256
            judges[label] = Judge(scoring, entry, scorer, same_weights=same)
    return judges
