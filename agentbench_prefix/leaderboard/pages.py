"""Rows to Markdown and CSV; the same results give the same bytes."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence, Set
from pathlib import Path
from typing import Any

from agentbench_prefix.errors import ConfigurationError, MissingExtraError
from agentbench_prefix.evaluation.stats import FEW_DIFFERING, FEW_TASKS, RESAMPLES, Estimate
from agentbench_prefix.files import write_text_atomic
from agentbench_prefix.leaderboard.reported import REPORTED, Reported, read_reported
from agentbench_prefix.leaderboard.results import KEPT_CURVES, RESULTS, read_results
from agentbench_prefix.leaderboard.rows import (
    ALL,
    Difference,
    LeaderboardConfig,
    Measured,
    Page,
    Row,
    Section,
    difference,
    make_pages,
)
from agentbench_prefix.training.summary import Cost

INDEX = "README.md"
_SHOWN_TASKS = 8
_PREPARATIONS = ("teacher", "sidecars", "probe", "calibration")
_MARK = "Written by `agentbench-prefix leaderboard build`"
_GENERATED = f"{_MARK}; change the results, not this page."
_CSV_MARKS = (b"env,tier,split,family,method,variant,init,", b"env,method,model,tasks,metric,")


def build(folder: Path) -> dict[str, str]:
    """Make every page of a folder of leaderboards, without writing it.

    Args:
        folder: Holds ``results/*.json`` and, if they are wanted, ``leaderboard.yaml``,
            ``reported.yaml`` and ``curves/``.

    Returns:
        Text by file name.

    Raises:
        ConfigurationError: A file is malformed, or results do not fit each other.
        MissingExtraError: pandas or tabulate is not installed.
    """
    if not folder.is_dir():
        raise ConfigurationError(f"there is no folder of leaderboards {folder}: name it with --dir")
    config = LeaderboardConfig.load(folder)
    pages = make_pages(read_results(folder / RESULTS), config)
    made = {}
    curves = {path.stem for path in (folder / KEPT_CURVES).glob("*.png")}
    for page in pages:
        made[f"{page.name}.md"] = _page_text(page, config, curves)
        made[f"{page.name}.csv"] = _csv(_page_records(page, config))
    reported = read_reported(folder / REPORTED)
    if reported is not None:
        made["reported.md"] = _reported_text(reported)
        made["reported.csv"] = _csv(
            [
                {**entry.model_dump(), "source": reported.sources[entry.source].title}
                for entry in reported.entries
            ]
        )
    made[INDEX] = _index_text(pages, reported is not None)
    return made


def write_pages(folder: Path, made: dict[str, str]) -> list[str]:
    """Write pages that differ from the folder's and remove pages of results that are gone.

    Returns:
        Names of the files that changed, in order.
    """
    changed = stale_pages(folder, made)
    for name in changed:
        if name in made:
            write_text_atomic(folder / name, made[name])
        else:
            (folder / name).unlink()
    return changed


def stale_pages(folder: Path, made: dict[str, str]) -> list[str]:
    """Names of pages in a folder that are not, byte for byte, what its results give.

    A file that ``build`` would not have written is nobody's page and not among them.
    """
    pages = [path for ending in ("md", "csv") for path in folder.glob(f"*.{ending}")]
    there = {path.name: path.read_bytes() for path in pages}
    left_over = {
        name
        for name, text in there.items()
        if name not in made and (_MARK.encode() in text or text.startswith(_CSV_MARKS))
    }
    return sorted(
        left_over | {name for name, text in made.items() if there.get(name) != text.encode()}
    )


# ------------------------------------------------------------------ Markdown
def _page_text(page: Page, config: LeaderboardConfig, curves: Set[str]) -> str:
    settings = page.rows[0].results[0].settings
    k = page.samples
    lines = [f"# {page.env_id}, tier `{page.tier}`", ""]
    single = [row for row in page.rows if len(row.seeds) == 1]
    if single:
        which = (
            "Every row rests"
            if len(single) == len(page.rows)
            else f"{len(single)} of {len(page.rows)} rows rest"
        )
        lines += [
            f"> **Preliminary.** {which} on a single seed: how much another seed would change is "
            "not known, and the intervals do not show it.",
            "",
        ]
    limit = "no turn limit" if settings.max_turns is None else f"{settings.max_turns} turns"
    lines += [
        _GENERATED,
        "",
        f"Measured with one evaluator: {k} episodes a task and seed at temperature "
        f"{settings.temperature:g}, dialogue `{settings.dialogue}`, at most {settings.max_tokens} "
        f"tokens a reply, {limit}; data `{page.data_hash[:12]}`. Rates are in percent, with 95 % "
        f"intervals over tasks in brackets: a bootstrap that resamples tasks ({RESAMPLES:,} times, "
        f"seed 0); * marks Wilson's interval over tasks (under {FEW_TASKS} tasks), or the wider of "
        f"both (under {FEW_DIFFERING} differ from the rest). ± is the standard deviation between "
        "seeds. Numbers that papers report are on a page of their own and never in these tables.",
    ]
    for section in page.sections:
        lines += _section_lines(page, section, config)
    lines += _cost_lines(page, config)
    lines += _note_lines(page, config)
    lines += _run_lines(page, config, curves)
    return "\n".join(lines) + "\n"


def _section_lines(page: Page, section: Section, config: LeaderboardConfig) -> list[str]:
    k = page.samples
    n = sum(section.families.values())
    splits = " + ".join(section.splits)
    lines = ["", f"## {splits}: {n} tasks", ""]
    first = section.rows[0].results[0]
    beyond = [task for split in section.splits for task in first.splits[split].out_of_reach.tasks]
    if beyond:
        lines += [
            f"{len(beyond)} of them cannot be solved within the turn limit by any policy "
            f"({', '.join(beyond[:_SHOWN_TASKS])}{', ...' if len(beyond) > _SHOWN_TASKS else ''}): "
            f"no rate can exceed {100 * (1 - len(beyond) / n):.1f}.",
            "",
        ]
    records = []
    for row in section.rows:
        found = section.measured[row][ALL]
        records.append(
            {
                **_names(row, config),
                "seeds": _seeds(row),
                "tasks": str(found.n_tasks),
                "solved": f"{found.n_solved:,}/{found.n_episodes:,}",
                f"Avg@{k}": _percent(found.average, found.average_sd),
                f"Pass@{k}": _percent(found.passed, found.passed_sd),
                "steps": _number([r.run.spent.steps for r in row.results]),
                "preprocessing": _preparation(row),
            }
        )
    lines += _table(records, left=("method", "from", "preprocessing"))
    for name, pick in (("Avg", _of_average), ("Pass", _of_passed)):
        lines += ["", f"### {name}@{k} by family ({splits})", ""]
        records = []
        for row in section.rows:
            cells = {**_names(row, config), "seeds": str(len(row.seeds)), "tasks": str(n)}
            for family, tasks in section.families.items():
                title = f"{family} ({tasks} {'task' if tasks == 1 else 'tasks'})"
                cells[title] = _percent(*pick(section.measured[row][family]))
            records.append(cells)
        lines += _table(records, left=("method", "from"))
    return lines + _difference_lines(page, section, config, n)


def _difference_lines(page: Page, section: Section, config: LeaderboardConfig, n: int) -> list[str]:
    k = page.samples
    lines = [
        "",
        f"### Paired differences ({' + '.join(section.splits)})",
        "",
        "Row minus what the column names, task by task, in percentage points. An interval that "
        "holds 0 shows no difference; many rows are compared and the intervals are not corrected "
        "for that. *Start* is the row of the method that the run started from.",
        "",
    ]
    compared = _compared(page, section, config)
    records = []
    for row in section.rows:
        cells = {**_names(row, config), "seeds": str(len(row.seeds)), "tasks": str(n)}
        for name, against in compared[row].items():
            cells[f"Avg@{k} - {name}"] = "" if against is None else _points(against.average)
            cells[f"Pass@{k} - {name}"] = "" if against is None else _points(against.passed)
        records.append(cells)
    lines += _table(records, left=("method", "from"))
    rows = set(section.rows)
    missing = [
        reference.name
        for reference in config.references
        if page.find(reference.method, reference.variant, reference.init) not in rows
    ]
    if missing:
        lines += ["", f"Not measured here, so nothing is compared with it: {', '.join(missing)}."]
    return lines


def _compared(
    page: Page, section: Section, config: LeaderboardConfig, family: str = ALL
) -> dict[Row, dict[str, Difference | None]]:
    """By row and name of what it is compared with; ``None`` for a row and itself or no such."""
    targets = {
        reference.name: page.find(reference.method, reference.variant, reference.init)
        for reference in config.references
    }
    found: dict[Row, dict[str, Difference | None]] = {}
    for row in section.rows:
        start = page.find(row.init, "", None)
        found[row] = {
            name: None
            if target is None or target is row or target not in section.measured
            else difference(row, target, section.splits, family)
            for name, target in (targets | {"start": start}).items()
        }
    return found


def _cost_lines(page: Page, config: LeaderboardConfig) -> list[str]:
    records = []
    for row in page.rows:
        spent = [result.run.spent for result in row.results]
        where = {f"{r.run.device}, {r.run.threads} thread(s)" for r in row.results}
        records.append(
            {
                **_names(row, config),
                "seeds": _seeds(row),
                "steps": _number([s.steps for s in spent]),
                "rollouts": _number([s.rollouts for s in spent]),
                "generated tokens": _number([s.generated_tokens for s in spent]),
                "learned tokens": _number([s.learned_tokens for s in spent]),
                "minutes": _number([r.run.wall_seconds / 60 for r in row.results]),
                "on": "; ".join(sorted(where)),
                "preprocessing": _preparation(row, tokens=True),
                "probe and calibration": _share(row),
            }
        )
    return [
        "",
        "## What the runs cost",
        "",
        "A run's own training, as a mean over its seeds; what its start cost is in the row of its "
        "start. Preprocessing is not part of the other columns, and what runs share counts in full "
        "in each. The last column is the share of probe and calibration in all episodes that the "
        "policy played.",
        "",
        *_table(records, left=("method", "from", "on", "preprocessing")),
    ]


def _note_lines(page: Page, config: LeaderboardConfig) -> list[str]:
    lines = []
    for row in page.rows:
        for note in dict.fromkeys(note for result in row.results for note in result.run.notes):
            of = [str(r.run.seed) for r in row.results if note in r.run.notes]
            names = _names(row, config)
            lines.append(f"- {names['method']} from {names['from']}, seed {', '.join(of)}: {note}")
    return ["", "## Notes", "", *lines] if lines else []


def _run_lines(page: Page, config: LeaderboardConfig, curves: Set[str]) -> list[str]:
    records = [
        {
            **_names(row, config),
            "seed": str(result.run.seed),
            "result": f"[json]({RESULTS}/{result.name}.json)",
            "training": ", ".join(
                f"[{what}]({KEPT_CURVES}/{result.name}.{ending})"
                for what, ending in (("curves", "png"), ("log", "jsonl"))
                if result.name in curves
            ),
            "weights": result.run.model_sha256[:12],
            "start's weights": (result.run.init.model_sha256 or "")[:12],
            "recipe": result.recipe_sha256[:12],
            "corpora": ", ".join(sha[:12] for _, sha in sorted(result.run.corpora.items())),
            "trained by code": _code(result.run.code_version),
            "evaluated by code": _code(result.evaluation_code),
        }
        for row in page.rows
        for result in row.results
    ]
    return ["", "## Runs", "", *_table(records, left=tuple(records[0]))]


def _index_text(pages: Sequence[Page], reported: bool) -> str:
    lines = ["# Leaderboards", "", _GENERATED, ""]
    if pages:
        records = []
        for page in pages:
            counts = sorted({len(row.seeds) for row in page.rows})
            records.append(
                {
                    "environment": page.env_id,
                    "tier": page.tier,
                    "table": f"[table]({page.name}.md), [csv]({page.name}.csv)",
                    "rows": str(len(page.rows)),
                    "runs": str(sum(len(row.results) for row in page.rows)),
                    "seeds a row": " to ".join(
                        str(c) for c in dict.fromkeys(counts[:1] + counts[-1:])
                    ),
                    "state": "preliminary" if counts[0] == 1 else "several seeds",
                }
            )
        lines += _table(records, left=("environment", "tier", "table", "state"))
    else:
        lines.append(f"No run has been measured yet: there is nothing in `{RESULTS}/`.")
    if reported:
        lines += [
            "",
            "What papers report, measured by others under other conditions, is on "
            "[a page of its own](reported.md).",
        ]
    return "\n".join(lines) + "\n"


def _reported_text(reported: Reported) -> str:
    lines = [
        "# Numbers that papers report",
        "",
        _GENERATED.replace("the results", "`reported.yaml`"),
        "",
        "None of these was measured here: models, prompts, budgets and evaluation are the papers'. "
        "They are kept apart from the measured tables and are not comparable with them.",
    ]
    for env in dict.fromkeys(entry.env for entry in reported.entries):
        records = [
            {
                "method": entry.method,
                "model": entry.model,
                "tasks": entry.tasks,
                "metric": entry.metric,
                "value": entry.value,
                "seeds": entry.seeds,
                "source": entry.source,
                "note": entry.note,
            }
            for entry in reported.entries
            if entry.env == env
        ]
        lines += ["", f"## {env}", ""]
        lines += _table(records, left=("method", "model", "tasks", "metric", "source", "note"))
    lines += ["", "## Sources", ""]
    for name, source in reported.sources.items():
        where = f" <{source.url}>." if source.url else ""
        lines.append(f"- **{name}**: {source.title}.{where} {source.note}".rstrip())
    return "\n".join(lines) + "\n"


def _names(row: Row, config: LeaderboardConfig) -> dict[str, str]:
    name = config.names.get(row.method, row.method)
    details = [detail for detail in (row.variant, row.recipe and f"recipe {row.recipe}") if detail]
    return {
        "method": f"{name} ({', '.join(details)})" if details else name,
        "from": config.names.get(row.init, row.init),
    }


def _seeds(row: Row) -> str:
    return f"{len(row.seeds)} ({', '.join(map(str, row.seeds))})"


def _of_average(found: Measured) -> tuple[Estimate, float | None]:
    return found.average, found.average_sd


def _of_passed(found: Measured) -> tuple[Estimate, float | None]:
    return found.passed, found.passed_sd


def _percent(estimate: Estimate, sd: float | None = None) -> str:
    text = f"{100 * estimate.value:.1f} [{100 * estimate.low:.1f}, {100 * estimate.high:.1f}]"
    text += "*" if estimate.interval == "wilson" else ""
    return text if sd is None else f"{text} ± {100 * sd:.1f}"


def _points(estimate: Estimate) -> str:
    value, low, high = (100 * x for x in (estimate.value, estimate.low, estimate.high))
    mark = "*" if estimate.interval == "wilson" else ""
    return f"{value:+.1f} [{low:+.1f}, {high:+.1f}]{mark}"


def _number(values: Sequence[float]) -> str:
    mean = statistics.fmean(values)
    return f"{mean:,.0f}" if mean >= 10 or mean == int(mean) else f"{mean:,.1f}"


def _costs(row: Row, kind: str) -> list[Cost]:
    return [getattr(result.run.preprocessing, kind) for result in row.results]


def _preparation(row: Row, *, tokens: bool = False) -> str:
    parts = []
    for kind in _PREPARATIONS:
        costs = _costs(row, kind)
        counted = []
        if any(cost.rollouts for cost in costs):
            counted.append(f"{_number([cost.rollouts for cost in costs])} episodes")
        if any(cost.tokens for cost in costs) and (tokens or not counted):
            counted.append(f"{_number([cost.tokens for cost in costs])} tokens")
        seconds = [cost.seconds for cost in costs if cost.seconds is not None]
        if tokens and seconds:
            counted.append(f"{_number([s / 60 for s in seconds])} min")
        if counted:
            parts.append(f"{kind}: {', '.join(counted)}")
    return "; ".join(parts) or "none"


def _own_preparation(row: Row) -> float:
    """Mean number of episodes that the policy played before training."""
    return statistics.fmean(
        result.run.preprocessing.probe.rollouts + result.run.preprocessing.calibration.rollouts
        for result in row.results
    )


def _share(row: Row) -> str:
    before = _own_preparation(row)
    in_training = statistics.fmean(result.run.spent.rollouts for result in row.results)
    return f"{100 * before / (before + in_training):.1f} %" if before else "none"


def _code(version: str) -> str:
    dirty = version.endswith("-dirty")
    return version.removesuffix("-dirty")[:12] + ("-dirty" if dirty else "")


def _pandas() -> Any:
    try:
        import pandas
        import tabulate  # noqa: F401
    except ImportError as error:
        raise MissingExtraError("making leaderboards", "leaderboard") from error
    return pandas


def _table(records: Sequence[dict[str, str]], left: Iterable[str] = ()) -> list[str]:
    frame = _pandas().DataFrame.from_records(records)
    # A cell with a bar would end its column.
    frame = frame.map(lambda cell: str(cell).replace("|", "\\|"))
    sides = ["left" if name in set(left) else "right" for name in frame.columns]
    text: str = frame.to_markdown(
        index=False, tablefmt="pipe", colalign=sides, disable_numparse=True
    )
    return text.split("\n")


# ------------------------------------------------------------------ CSV
def _page_records(page: Page, config: LeaderboardConfig) -> list[dict[str, Any]]:
    """One record a section, row and family, in full precision."""
    records = []
    for section in page.sections:
        by_family = {
            family: _compared(page, section, config, family) for family in (*section.families, ALL)
        }
        for row in section.rows:
            for family, found in section.measured[row].items():
                record: dict[str, Any] = {
                    "env": page.env_id,
                    "tier": page.tier,
                    "split": "+".join(section.splits),
                    "family": family,
                    "method": row.method,
                    "variant": row.variant,
                    "init": row.init,
                    "recipe": row.results[0].recipe_sha256,
                    "preliminary": len(row.seeds) == 1,
                    "n_seeds": len(row.seeds),
                    "seeds": " ".join(map(str, row.seeds)),
                    "n_tasks": found.n_tasks,
                    "samples": page.samples,
                    "n_episodes": found.n_episodes,
                    "n_solved": found.n_solved,
                    **_limits("avg", found.average),
                    "avg_sd_of_seeds": found.average_sd,
                    "avg_lowest_seed": found.average_range[0],
                    "avg_highest_seed": found.average_range[1],
                    **_limits("pass", found.passed),
                    "pass_sd_of_seeds": found.passed_sd,
                }
                for name, against in by_family[family][row].items():
                    missing = against is None
                    for kind in ("average", "passed"):
                        label = f"{'avg' if kind == 'average' else 'pass'}_minus_{name}"
                        estimate = None if missing else getattr(against, kind)
                        record |= _limits(label, estimate)
                record |= _cost_record(row)
                records.append(record)
    return records


def _limits(label: str, estimate: Estimate | None) -> dict[str, float | None]:
    return {
        label: None if estimate is None else estimate.value,
        f"{label}_low": None if estimate is None else estimate.low,
        f"{label}_high": None if estimate is None else estimate.high,
    }


def _cost_record(row: Row) -> dict[str, float]:
    runs = [result.run for result in row.results]
    record: dict[str, float] = {
        f"mean_{name}": statistics.fmean(getattr(run.spent, name) for run in runs)
        for name in ("steps", "rollouts", "generated_tokens", "learned_tokens")
    }
    record["mean_wall_seconds"] = statistics.fmean(run.wall_seconds for run in runs)
    for kind in _PREPARATIONS:
        for name in ("rollouts", "tokens"):
            record[f"mean_{kind}_{name}"] = statistics.fmean(
                getattr(cost, name) for cost in _costs(row, kind)
            )
    return record


def _csv(records: Sequence[dict[str, Any]]) -> str:
    frame = _pandas().DataFrame.from_records(records)
    text: str = frame.to_csv(index=False, float_format="%.6f", lineterminator="\n")
    return text
