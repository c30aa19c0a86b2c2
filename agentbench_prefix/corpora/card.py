"""The card of a corpus: a page for people, with the header by which the Hub loads it."""

from __future__ import annotations

import json
from collections.abc import Sequence

from agentbench_prefix.cards import table
from agentbench_prefix.corpora.schema import Manifest


def configurations(manifest: Manifest) -> list[tuple[str, list[tuple[str, str]]]]:
    """Configurations of the dataset: name, then (split, path) of its files.

    A name may hold no slash, so ``sidecars/<dialogue>/<model>`` is called
    ``sidecars-<dialogue>-<model>``.
    """
    found: dict[str, list[tuple[str, str]]] = {}
    for path in manifest.files:
        folder, _, file = path.rpartition("/")
        if file.endswith(".parquet"):
            name = folder.replace("/", "-")
            found.setdefault(name, []).append((file.removesuffix(".parquet"), path))
    order = {"queries": 0, "trajectories": 1, "failures": 3}
    return sorted(found.items(), key=lambda item: (order.get(item[0], 2), item[0]))


def render(manifest: Manifest) -> str:
    """Write the card in Markdown with the Hub's YAML header."""
    recipe = manifest.recipe
    configs = configurations(manifest)
    rows = {name: sum(manifest.files[path].rows for _, path in files) for name, files in configs}
    lines = [
        "---",
        f"license: {manifest.licence.lower()}",
        f"pretty_name: {manifest.name}",
        "task_categories: [text-generation]",
        f"tags: [agentbench-prefix, {manifest.env_id}, agent, trajectories]",
        "configs:",
    ]
    for index, (name, files) in enumerate(configs):
        lines += [f"  - config_name: {name}"]
        lines += ["    default: true"] if index == 0 else []
        lines += ["    data_files:"]
        for split, path in files:
            lines += [f"      - split: {split}", f"        path: {path}"]
    lines += [
        "---",
        f"# {manifest.name} {manifest.version}",
        "",
        f"Teacher trajectories of {manifest.env_id}, cut into training queries. Each cut was "
        "replayed in the environment; each query's sidecar says which of its prompt tokens belong "
        "to the teacher's trainable turns and what log-probability an old policy gave them. "
        "Written by a program from `manifest.json`.",
        "",
        "| configuration | rows | what |",
        "|---|---|---|",
    ]
    for name, count in rows.items():
        lines.append(f"| `{name}` | {count:,} | {_what(name)} |")
    lines += [
        "",
        "```python",
        "from datasets import load_dataset",
        "",
        'load_dataset("FOLDER_OR_HUB_ID", "queries", split="train")',
        "```",
        "",
        "## Provenance",
        "",
        f"- Environment {manifest.env_id}, data `{manifest.data_hash[:16]}`, arguments "
        f"`{json.dumps(manifest.arguments, sort_keys=True)}`.",
        f"- Teacher: `{json.dumps(recipe['teacher'], sort_keys=True)}`.",
        "- Dialogues: " + ", ".join(f"`{label}`" for label in manifest.dialogues) + ".",
    ]
    for label, entry in manifest.models.items():
        source = " ".join(f"{k} {v}" for k, v in entry.source.items())
        lines.append(
            f"- Old policy `{label}`: {source}, weights `{entry.model_sha256[:16]}`, tokenizer "
            f"`{entry.tokenizer[:16]}`, distributions over its {entry.vocabulary:,} ids."
        )
    lines += [f"- {line}" for line in recipe["provenance"]]
    for split, tasks in manifest.out_of_reach.items():
        if tasks:
            lines.append(
                f"- Not taught in `{split}`, since nobody can solve them within the turn limit: "
                f"{', '.join(tasks)}."
            )
    lines += ["", "## The teacher's play", ""]
    lines += table(*teaching_table(manifest))
    lines += [
        "",
        "Failures: unsolved attempts, kept apart. Repeats: solved attempts passed over because "
        "they repeat another's actions, as far as enough different ones were found. Left out: "
        "attempts with an action that a dialogue cannot say. Plain turns: what the environment's "
        "planner takes for the same tasks without detours. Mistakes are marked `trainable: false`: "
        "neither SFT nor the prefix mask learns them.",
    ]
    if manifest.statuses:
        lines += ["", "## Queries by replay status", ""]
        lines += table(*status_table(manifest))
        lines += [
            "",
            "Cuts: distinct candidates; `all` counts every one once, though several strategies may "
            "choose it. %: validated; only these are released. Unverifiable: the observation at "
            "the cut has no structured field to compare. Ended: the replay ends the episode. "
            "Byte-equal: validated, and every observation up to the cut the same. Distinct: "
            "different prompts of each task among the validated; trajectories of a task may begin "
            "alike.",
        ]
        for s in manifest.statuses:
            if s.family == "all" and s.strategy == "all":
                lines += [
                    "",
                    f"Of the {s.validated:,} validated cuts of `{s.split}` in `{s.dialogue}`, "
                    f"{s.probe_unverifiable:,} have a probe whose observation has no structured "
                    f"field to compare, and {s.untrained:,} have a prefix in which no turn is "
                    "trainable: their masks are empty.",
                ]
    lines += [
        "",
        "## Build it again",
        "",
        "```sh",
        "agentbench-prefix corpus build corpus.yaml --out FOLDER",
        "```",
        "",
        "The files are the same byte for byte, but for `created` and `code_version` in "
        "`manifest.json`, with the same libraries on a processor of the same family; elsewhere "
        "log-probabilities may differ in their last digits. `agentbench-prefix corpus validate "
        "FOLDER --all` derives every row again, and the play of the environment's own "
        "teacher.",
        "",
        f"## Licence\n\n{manifest.licence}.",
    ]
    return "\n".join(lines) + "\n"


def _what(name: str) -> str:
    if name.startswith("sidecars-"):
        return "span, mask and old log-probabilities of each query, in the order of the queries"
    return {
        "queries": "one training query: a raw task or a validated cut",
        "trajectories": "one successful episode of the teacher, in every dialogue",
        "failures": "the teacher's unsolved attempts",
    }[name]


def teaching_table(manifest: Manifest) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Header and rows of the table of the teacher's play."""
    header = (
        "split",
        "family",
        "tasks",
        "trajectories",
        "failures",
        "repeats",
        "left out",
        "mean turns",
        "plain turns",
        "mistakes %",
    )
    rows: list[Sequence[str]] = [
        (
            t.split,
            t.family,
            str(t.tasks),
            f"{t.trajectories:,}",
            str(t.failures),
            "" if t.repeated is None else str(t.repeated),
            "" if t.unsaid is None else str(t.unsaid),
            f"{t.mean_turns:.2f}",
            f"{t.mean_plain_turns:.2f}" if t.mean_plain_turns else "",
            f"{100 * t.untrainable_share:.1f}",
        )
        for t in sorted(manifest.taught, key=lambda t: (t.split, t.family == "all", t.family))
    ]
    return header, rows


def status_table(manifest: Manifest) -> tuple[Sequence[str], list[Sequence[str]]]:
    """Header and rows of the table of candidates by status."""
    header = (
        "split",
        "dialogue",
        "strategy",
        "family",
        "cuts",
        "validated",
        "mismatch",
        "unverifiable",
        "error",
        "ended",
        "%",
        "byte-equal",
        "distinct",
    )
    names = ["raw", *sorted(manifest.recipe["strategies"]), "all"]
    rows: list[Sequence[str]] = []
    for s in sorted(
        manifest.statuses,
        key=lambda s: (
            s.split,
            s.dialogue,
            names.index(s.strategy) if s.strategy in names else len(names),
            s.family == "all",
            s.family,
        ),
    ):
        total = s.validated + s.mismatch + s.unverifiable + s.error + s.ended
        rows.append(
            (
                s.split,
                s.dialogue,
                s.strategy,
                s.family,
                f"{total:,}",
                f"{s.validated:,}",
                str(s.mismatch),
                str(s.unverifiable),
                str(s.error),
                str(s.ended),
                f"{100 * s.validated / total:.1f}" if total else "",
                f"{s.bytes_equal:,}",
                f"{s.distinct:,}",
            )
        )
    return header, rows
