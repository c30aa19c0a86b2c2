"""What is printed about runs. Rates are in percent with 95 % intervals in brackets."""

from __future__ import annotations

from collections.abc import Iterable

from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from agentbench_prefix.evaluation.compare import Comparison, PairedDifference
from agentbench_prefix.evaluation.metrics import Metrics, Rates
from agentbench_prefix.evaluation.stats import FEW_DIFFERING, FEW_TASKS, Estimate

WIDTH = 100
_SHOWN_TASKS = 8


def make_console(*, stderr: bool = False) -> Console:
    """Console of the command line: colours on a terminal only, 100 columns elsewhere."""
    console = Console(stderr=stderr, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    return console


def print_metrics(console: Console, metrics: Metrics, first_error: str | None = None) -> None:
    """Print the table of a run and the lines below it."""
    k = str(metrics.samples)
    table = _table(
        f"{metrics.method} on {metrics.env}, split {metrics.split}: {metrics.n_tasks} tasks x "
        f"{metrics.samples} samples = {metrics.n_episodes} episodes"
    )
    for name in ("tasks", "solved", f"Avg@{k} %", "tasks solved", f"Pass@{k} %"):
        table.add_column(name, justify="right", no_wrap=True)
    for family, rates in metrics.families.items():
        table.add_row(family, *_cells(rates, k))
    table.add_section()
    table.add_row("all", *_cells(metrics, k), style="bold")
    console.print(table)
    for line in _notes(metrics):
        _print_line(console, line)
    if metrics.n_errors:
        _print_line(
            console,
            f"ERRORS: {metrics.n_errors} of {metrics.n_episodes} episodes errored and count as "
            "unsolved; run the same command again to retry them"
            + (f". The first: {first_error}" if first_error else ""),
            style="bold red",
        )


def print_comparison(console: Console, comparison: Comparison) -> None:
    """Print paired differences."""
    a, b = comparison.a, comparison.b
    table = _table(
        f"A = {a.method}, B = {b.method} on {a.env}, split {a.split}: {a.n_tasks} tasks x "
        f"{a.samples} samples, paired by task"
    )
    table.add_column("n", justify="right", no_wrap=True)
    for name in (f"Avg@{a.samples}", f"Pass@{a.samples}"):
        table.add_column(f"{name} % A, B", justify="right", no_wrap=True)
        table.add_column("B - A", justify="right", no_wrap=True)
    for family, average in comparison.average.items():
        if family == "all":
            table.add_section()
        passed = comparison.passed[family]
        table.add_row(
            family,
            str(average.n_tasks),
            *_difference(average),
            *_difference(passed),
            style="bold" if family == "all" else None,
        )
    console.print(table)
    estimates = [
        d.difference for group in (comparison.average, comparison.passed) for d in group.values()
    ]
    lines = [_legend(estimates)]
    if comparison.changed:
        lines.append("configurations differ: " + "; ".join(comparison.changed))
    for name, run in (("A", a), ("B", b)):
        if run.n_errors:
            lines.append(
                f"{name} has {run.n_errors} errored episodes of {run.n_episodes}, counted as "
                "unsolved: run its evaluation again before trusting the difference"
            )
    for line in lines:
        _print_line(console, line)


def _print_line(console: Console, line: str, style: str = "") -> None:
    console.print(Padding(Text(line, style=style), (0, 0, 0, 1), expand=False))


def _table(title: str) -> Table:
    table = Table(
        title=Text(title), title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0)
    )
    table.add_column("family", overflow="fold")
    return table


def _cells(rates: Rates, k: str) -> list[str]:
    return [
        str(rates.n_tasks),
        f"{rates.n_solved}/{rates.n_episodes}",
        _percent(rates.avg_at_k[k]),
        f"{rates.n_tasks_solved}/{rates.n_tasks}",
        _percent(rates.pass_at_k[k]),
    ]


def _percent(estimate: Estimate, sign: str = "") -> str:
    mark = "*" if estimate.interval == "wilson" else " "
    low, high = 100 * estimate.low, 100 * estimate.high
    return f"{100 * estimate.value:{sign}.1f} [{low:{sign}.1f}, {high:{sign}.1f}]{mark}"


def _difference(paired: PairedDifference) -> list[str]:
    return [f"{100 * paired.a:.1f}, {100 * paired.b:.1f}", _percent(paired.difference, "+")]


def _legend(estimates: Iterable[Estimate]) -> str:
    text = "[95 % interval]: bootstrap over tasks"
    if any(estimate.interval == "wilson" for estimate in estimates):
        text += (
            f"; * Wilson over tasks (under {FEW_TASKS}), or the wider of both (under "
            f"{FEW_DIFFERING} differ)"
        )
    return text


def _notes(metrics: Metrics) -> list[str]:
    shown = [
        estimate
        for rates in (metrics, *metrics.families.values())
        for estimate in (*rates.avg_at_k.values(), *rates.pass_at_k.values())
    ]
    lines = [_legend(shown)]
    smaller = {k: e for k, e in metrics.pass_at_k.items() if int(k) < metrics.samples}
    if smaller:
        passes = ", ".join(f"{k}: {_percent(e).strip()}" for k, e in smaller.items())
        lines.append(f"Pass@k %: {passes}")
    turns, tokens, malformed = metrics.turns, metrics.tokens, metrics.malformed
    if turns.all is not None:
        line = f"turns: {turns.all:.2f} an episode"
        if turns.successes is not None:
            line += f", {turns.successes:.2f} a success"
        if tokens.generated_per_turn is not None:
            line += f"; tokens: {tokens.generated_per_turn:.1f} generated a turn"
        if tokens.opening_prompt is not None:
            line += f", {tokens.opening_prompt:.0f} in the first prompt"
        lines.append(line)
    if metrics.invalid_action_rate is not None:
        bad = sum(malformed.problems.values())
        line = (
            f"invalid actions: {100 * metrics.invalid_action_rate:.1f} % of {malformed.replies} "
            f"turns; malformed replies: {bad}{_counts(malformed.problems)}"
        )
        if malformed.notes:
            line += f"; noted{_counts(malformed.notes)}"
        if malformed.cut_at_max_tokens:
            line += f"; cut at the token bound: {malformed.cut_at_max_tokens}"
        lines.append(line)
    if metrics.failure_categories:
        failed = sum(metrics.failure_categories.values())
        lines.append(f"failed: {failed}{_counts(metrics.failure_categories)}")
    reach = metrics.out_of_reach
    if reach.tasks:
        names = ", ".join(reach.tasks[:_SHOWN_TASKS])
        if len(reach.tasks) > _SHOWN_TASKS:
            names += ", ..."
        n = len(reach.tasks)
        lines.append(
            f"out of reach: {n} of {metrics.n_tasks} tasks cannot be solved in {reach.max_turns} "
            f"turns by any policy: {names}; ceiling {metrics.n_tasks - n}/{metrics.n_tasks}"
        )
    return lines


def _counts(counts: dict[str, int]) -> str:
    if not counts:
        return ""
    ordered = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return " (" + ", ".join(f"{name} {count}" for name, count in ordered) + ")"
