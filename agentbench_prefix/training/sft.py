"""Supervised fine-tuning on a teacher's demonstrations."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from agentbench_prefix.errors import ConfigurationError
from agentbench_prefix.files import (
    append_lines,
    canonical_json,
    read_whole_lines,
    sha256_text,
    write_json_atomic,
    write_text_atomic,
)
from agentbench_prefix.training.data import Batch, batches
from agentbench_prefix.training.optim import Muon, split_parameters
from agentbench_prefix.training.recipe import SFTRecipe


def sft_loss(model: Any, batch: Batch) -> torch.Tensor:
    """Weighted mean negative log-likelihood, in nats per token.

    ``L = - sum_t w_t log pi(z_t | z_<t) / sum_t w_t`` over the whole batch, where ``w_t`` is 1 on
    the assistant tokens to learn (end-of-turn token included), and 0 or a small weight on
    observations.
    Only positions with a positive weight reach the output layer.

    Args:
        model: A ``transformers`` causal language model.
        batch: ids and weights of shape (rows, length).
    """
    hidden = model.model(input_ids=batch.ids, use_cache=False).last_hidden_state
    targets, weights = batch.ids[:, 1:], batch.weights[:, 1:]
    keep = weights > 0
    logits = model.lm_head(hidden[:, :-1][keep])
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    nll = torch.nn.functional.cross_entropy(logits, targets[keep], reduction="none")
    return (nll * weights[keep]).sum() / weights[keep].sum()


def learning_rate_factor(step: int, recipe: SFTRecipe) -> float:
    """Linear warm-up, a constant stretch, then linear decay to zero."""
    rising = recipe.progress(step + 1) / recipe.warmup if recipe.warmup else 1.0
    falling = (1 - recipe.progress(step)) / recipe.decay if recipe.decay else 1.0
    return min(1.0, rising, falling)


def run_sft(
    recipe: SFTRecipe,
    model: Any,
    serializer: Any,
    env: Any,
    out: Path,
    *,
    save_every: int = 500,
    progress: Callable[[int, float], None] | None = None,
) -> dict[str, Any]:
    """Train ``model`` in place, resumably.

    Writes ``out/log.jsonl`` (step, loss, learning-rate factor, tokens) and, every ``save_every``
    steps, ``out/resume`` (weights and optimizer state); the same call goes on from there and ends
    in the same weights.

    Args:
        recipe: What to do.
        model: A ``transformers`` causal language model.
        serializer: Its :class:`~agentbench_prefix.serialization.ChatSerializer`.
        env: The unwrapped environment.
        out: Folder of the run.
        save_every: Steps between two states.
        progress: Called with ``(step, loss)`` after every step.

    Returns:
        ``steps``, ``tokens``, ``demonstrations``, ``pool_steps`` (step at which each pool of
        demonstrations began), ``minutes`` (over all parts of the run) and ``final_loss`` (mean of
        the last 100 steps).

    Raises:
        ConfigurationError: ``out`` holds a run of another recipe.
    """
    matrices, rest = split_parameters(model)
    optimizers: list[torch.optim.Optimizer] = [
        Muon(matrices, lr=recipe.muon_lr, weight_decay=recipe.weight_decay),
        torch.optim.AdamW(
            rest, lr=recipe.adamw_lr, betas=(0.9, 0.95), weight_decay=recipe.weight_decay
        ),
    ]
    bases = [recipe.muon_lr, recipe.adamw_lr]
    key = sha256_text(canonical_json(recipe.model_dump()))
    state = _load_state(out / "resume", key, model, optimizers)
    out.mkdir(parents=True, exist_ok=True)
    log = out / "log.jsonl"
    _truncate_log(log, state["step"])
    begun = time.monotonic() - state["seconds"]
    model.train()
    for step, batch in enumerate(batches(env, recipe, serializer, state["step"]), state["step"]):
        if step >= recipe.steps:
            break
        factor = learning_rate_factor(step, recipe)
        for optimizer, base in zip(optimizers, bases, strict=True):
            for group in optimizer.param_groups:
                group["lr"] = base * factor
            optimizer.zero_grad(set_to_none=True)
        loss = sft_loss(model, batch)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        value = float(loss.detach())
        state["tokens"] += int((batch.weights > 0).sum())
        state["demonstrations"] += batch.demonstrations
        if len(state["pool_steps"]) == batch.pool:
            state["pool_steps"].append(batch.pool_step)
        state["recent"] = [*state["recent"][-99:], value]
        append_lines(log, [json.dumps({"step": step, "loss": value, "lr_factor": factor})])
        if progress is not None:
            progress(step, value)
        if (step + 1) % save_every == 0 or step + 1 == recipe.steps:
            state["step"], state["seconds"] = step + 1, time.monotonic() - begun
            _save_state(out / "resume", key, state, model, optimizers)
    model.eval()
    return {
        "steps": recipe.steps,
        "tokens": state["tokens"],
        "demonstrations": state["demonstrations"],
        "pool_steps": state["pool_steps"],
        "minutes": state["seconds"] / 60,
        "final_loss": sum(state["recent"]) / len(state["recent"]),
    }


def _truncate_log(log: Path, step: int) -> None:
    """Drop what was logged after the state that is resumed."""
    lines = read_whole_lines(log)
    if len(lines) != step:
        write_text_atomic(log, "".join(line + "\n" for line in lines[:step]))


def _tensors(model: Any, optimizers: list[torch.optim.Optimizer]) -> dict[str, torch.Tensor]:
    names = {p: name for name, p in model.named_parameters()}
    tensors = {f"model/{name}": p.detach() for p, name in names.items()}
    for optimizer in optimizers:
        for p, entries in optimizer.state.items():
            for entry, value in entries.items():
                tensors[f"optimizer/{entry}/{names[p]}"] = value
    return tensors


def _save_state(
    folder: Path,
    key: str,
    state: dict[str, Any],
    model: Any,
    optimizers: list[torch.optim.Optimizer],
) -> None:
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    name = f"state-{state['step']}.safetensors"
    save_file({k: v.contiguous() for k, v in _tensors(model, optimizers).items()}, folder / name)
    # The small file is renamed into place last: it always names a complete large one.
    write_json_atomic(folder / "state.json", {**state, "recipe_sha256": key, "tensors": name})
    for old in folder.glob("state-*.safetensors"):
        if old.name != name:
            old.unlink()


def _load_state(
    folder: Path, key: str, model: Any, optimizers: list[torch.optim.Optimizer]
) -> dict[str, Any]:
    fresh = {
        "step": 0,
        "seconds": 0.0,
        "tokens": 0,
        "demonstrations": 0,
        "recent": [],
        "pool_steps": [],
    }
    path = folder / "state.json"
    if not path.exists():
        return fresh
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        tensors = load_file(folder / saved["tensors"])
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise ConfigurationError(
            f"the saved state in {folder} cannot be read ({error}): remove that folder to begin "
            "again"
        ) from error
    if saved["recipe_sha256"] != key:
        raise ConfigurationError(
            f"{folder.parent} holds a run of another recipe; choose another --out, or remove it"
        )
    parameters = dict(model.named_parameters())
    optimizer_of = {
        p: optimizer
        for optimizer in optimizers
        for g in optimizer.param_groups
        for p in g["params"]
    }
    with torch.no_grad():
        for name, value in tensors.items():
            if name.startswith("model/"):
                parameters[name.removeprefix("model/")].copy_(value)
            else:
                _, entry, parameter = name.split("/", 2)
                p = parameters[parameter]
                optimizer_of[p].state[p][entry] = value
    return {name: saved[name] for name in fresh}
