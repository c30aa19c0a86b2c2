"""Checkpoints that travel with a distribution: cast to bfloat16, and held against their row."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

from agentbench_prefix import registry
from agentbench_prefix.cards import CARD, CheckpointCard
from agentbench_prefix.errors import AgentBenchError, CheckpointError, ConfigurationError
from agentbench_prefix.evaluation.checkpoints import family_results
from agentbench_prefix.evaluation.runner import EvalConfig, evaluate
from agentbench_prefix.evaluation.stats import Estimate
from agentbench_prefix.files import sha256_file, write_json_atomic
from agentbench_prefix.leaderboard.results import Result, load_summary, make_result, row_name
from agentbench_prefix.policies.tokens import check_checkpoint

CAST_FROM = "cast_from"
"""Entry of a card's training data: hash of the weights' file before the cast."""
MAX_MEGABYTES = 2.0
_WEIGHTS = "model.safetensors"
_COPIED = (
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "special_tokens_map.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "vocab.json",
)


def shipping_folder(run: Path, *, name: str | None = None, to: Path | None = None) -> Path:
    """Where the checkpoint of a run is shipped: ``<to>/<name>``.

    Args:
        run: A finished training run.
        name: Name of the folder; ``None`` for ``<method>[-<variant>][-from-<init>]``, where an
            init is not named that the method's own recipe starts from.
        to: Folder of an environment's checkpoints; ``None`` for ``checkpoints/<env>`` in the
            folder of the method, which must have one.

    Raises:
        CheckpointError: The run is not finished.
        ConfigurationError: ``to`` is needed.
    """
    summary, _ = load_summary(run, "any")
    if to is None:
        home = getattr(registry.method(summary.method), "folder", None)
        if not isinstance(home, Path):
            raise ConfigurationError(
                f"method {summary.method!r} does not say where its checkpoints are: name the "
                "folder with --to"
            )
        to = home / "checkpoints" / summary.env_id
    if name is None:
        init = summary.init.name
        usual = _usual_init(summary.method, summary.env_id)
        name = row_name(summary.method, summary.variant, "scratch" if init == usual else init)
    return to / name


def _usual_init(method: str, env_id: str) -> str | None:
    """What a method's own recipe starts from, if it has one."""
    try:
        recipe = getattr(registry.method(method), "recipe", None)
        init = None if recipe is None else recipe(env_id).init
    except AgentBenchError:
        return None
    return init if isinstance(init, str) else None


def ship(run: Path, target: Path, *, max_megabytes: float = MAX_MEGABYTES) -> Path:
    """Copy a run's final checkpoint as bfloat16 safetensors, with its tokenizer and card.

    The copy appears whole or not at all, and replaces what was there. Weights that are bfloat16
    already are copied byte for byte, and what the run's folder has measured of them (whole splits,
    8 samples a task at temperature 1) is added to the card. Of others, the card then names the hash
    of the file they were cast from, and has no results: they would be those of another file.

    Args:
        run: A finished training run, or a checkpoint folder with a card.
        target: Folder to make.
        max_megabytes: Most megabytes (10^6 bytes) that it may take.

    Returns:
        The folder.

    Raises:
        CheckpointError: The run is not finished, its checkpoint has no card, or it is too large.
        ConfigurationError: An evaluation in the run's folder is of another checkpoint.
    """
    summary, checkpoint = load_summary(run, "any")
    card = CheckpointCard.load(checkpoint)
    if card is None:
        raise CheckpointError(f"{checkpoint} has no {CARD}: only a checkpoint with a card ships")
    check_checkpoint(checkpoint)
    if not (checkpoint / _WEIGHTS).is_file():
        raise CheckpointError(f"{checkpoint} has its weights in parts: only {_WEIGHTS} ships")
    beside = target.with_name(f".{target.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    for name in _COPIED:
        if (checkpoint / name).is_file():
            shutil.copyfile(checkpoint / name, beside / name)
    config = json.loads((checkpoint / "config.json").read_text("utf-8"))
    config.pop("torch_dtype", None)
    write_json_atomic(beside / "config.json", {**config, "dtype": "bfloat16"})
    if _cast(checkpoint / _WEIGHTS, beside / _WEIGHTS):
        before = sha256_file(checkpoint / _WEIGHTS)
        data = {**card.training.data, CAST_FROM: before}
        training = card.training.model_copy(update={"data": data})
        card = card.model_copy(update={"training": training, "results": {}})
    elif evaluations := sorted(path.parent for path in run.glob("eval/*/metrics.json")):
        result = make_result(summary, checkpoint, evaluations)
        if (result.settings.samples, result.settings.temperature) == (8, 1.0):
            found = {split: family_results(metrics) for split, metrics in result.splits.items()}
            card = card.model_copy(update={"results": {**card.results, **found}})
    after = sha256_file(beside / _WEIGHTS)
    card.model_copy(update={"model_sha256": after}).save(beside)
    for path in beside.iterdir():
        path.chmod(0o644)  # weights are written readable by their owner alone
    size = sum(path.stat().st_size for path in beside.iterdir())
    if size > max_megabytes * 10**6:
        shutil.rmtree(beside)
        raise CheckpointError(
            f"{checkpoint} takes {size / 10**6:.2f} MB in bfloat16, {max_megabytes:g} MB are "
            "allowed: raise --max-mb, or train a smaller model"
        )
    if target.exists():
        old = target.with_name(f".{target.name}.old")
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        beside.rename(target)
        shutil.rmtree(old)
    else:
        beside.rename(target)
    return target


def _cast(source: Path, target: Path) -> bool:
    """Write weights in bfloat16; say whether they were anything else before."""
    import torch
    from safetensors.torch import load_file, save_file

    tensors = load_file(source)
    others = {
        name
        for name, tensor in tensors.items()
        if tensor.is_floating_point() and tensor.dtype != torch.bfloat16
    }
    if not others:
        shutil.copyfile(source, target)
        return False
    for name in others:
        tensors[name] = tensors[name].to(torch.bfloat16)
    save_file(tensors, target, metadata={"format": "pt"})
    return True


def find_result(checkpoint: Path, results: Sequence[Result]) -> Result:
    """The result of a checkpoint, shipped or not: it names the same weights.

    Raises:
        CheckpointError: The checkpoint has no card, or its weights are not those of its card.
        ConfigurationError: There is no such result.
    """
    card = CheckpointCard.load(checkpoint)
    if card is None:
        raise CheckpointError(f"{checkpoint} has no {CARD}: it cannot be matched with a result")
    if check_checkpoint(checkpoint).model != card.model_sha256:
        raise CheckpointError(f"the weights in {checkpoint} are not those its {CARD} describes")
    hashes = {card.model_sha256, card.training.data.get(CAST_FROM)}
    for result in results:
        if result.run.model_sha256 in hashes:
            return result
    raise ConfigurationError(
        f"no result is of the weights in {checkpoint}: fill the leaderboard, or ship the "
        "checkpoint of a run that has a result"
    )


@dataclasses.dataclass(frozen=True)
class Agreement:
    """A rate measured again.

    Attributes:
        split: Split.
        metric: ``"Avg@n"`` or ``"Pass@n"``.
        row: The row's rate with its interval.
        again: The rate measured now.
    """

    split: str
    metric: str
    row: Estimate
    again: Estimate

    @property
    def within(self) -> bool:
        """Whether the rate lies within the row's interval."""
        return self.row.low <= self.again.value <= self.row.high


def reevaluate(
    checkpoint: Path,
    result: Result,
    out: Path,
    *,
    splits: Sequence[str] | None = None,
    progress: Callable[[int, int, int], None] | None = None,
) -> list[Agreement]:
    """Evaluate a checkpoint as its row was, and hold the rates against the row's intervals.

    Args:
        checkpoint: Checkpoint folder.
        result: The result of its row (:func:`find_result`).
        out: Folder of the evaluations; resumed.
        splits: Splits to play; ``None`` for all of the result's.
        progress: See :func:`~agentbench_prefix.evaluation.runner.evaluate`.

    Returns:
        Avg@n and Pass@n of each split, in the result's order.

    Raises:
        ConfigurationError: An episode errored.
    """
    from agentbench_prefix.policies.transformers import TransformersPolicy

    settings = result.settings
    policy = TransformersPolicy.load(
        checkpoint,
        temperature=settings.temperature,
        top_p=settings.top_p,
        max_tokens=settings.max_tokens,
        threads=1,
    )
    found = []
    for split in splits or result.splits:
        config = EvalConfig(
            method=result.run.method,
            env=result.run.env_id,
            env_arguments=settings.env_arguments,
            split=split,
            samples=settings.samples,
            seed=result.evaluation_seed,
            temperature=settings.temperature,
            top_p=settings.top_p,
            max_tokens=settings.max_tokens,
            dialogue=settings.dialogue,
        )
        metrics = evaluate(config, policy, out / split, progress=progress).metrics
        if metrics.n_errors:
            raise ConfigurationError(
                f"{metrics.n_errors} episodes of {checkpoint} on {split} errored: run it again"
            )
        k = str(settings.samples)
        row = result.splits[split]
        found.append(Agreement(split, f"Avg@{k}", row.avg_at_k[k], metrics.avg_at_k[k]))
        found.append(Agreement(split, f"Pass@{k}", row.pass_at_k[k], metrics.pass_at_k[k]))
    return found
