"""What the arguments of a loss must be."""

from __future__ import annotations

import torch


def check_shape(name: str, value: torch.Tensor, like_name: str, like: torch.Tensor) -> None:
    """Refuse a tensor that has not the shape of another one.

    Args:
        name: Argument.
        value: Its tensor.
        like_name: Argument it must agree with.
        like: That one's tensor.

    Raises:
        ValueError: The shapes differ.
    """
    if value.shape != like.shape:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, {like_name} has {tuple(like.shape)}: pad both "
            "to one shape"
        )


def check_tokens(name: str, value: torch.Tensor) -> None:
    """Refuse a tensor that is not ``[rollouts, tokens]``.

    Raises:
        ValueError: It has another number of dimensions.
    """
    if value.ndim != 2:
        raise ValueError(
            f"{name} has shape {tuple(value.shape)}, expected two dimensions: (rollouts, tokens)"
        )


def check_vector(name: str, value: torch.Tensor, length: int | None = None) -> None:
    """Refuse a tensor that is not a vector of a given length.

    Raises:
        ValueError: It has another number of dimensions or elements.
    """
    if value.ndim != 1 or (length is not None and len(value) != length):
        wanted = "one dimension" if length is None else f"shape ({length},)"
        raise ValueError(f"{name} has shape {tuple(value.shape)}, expected {wanted}")


def floating(value: torch.Tensor) -> torch.Tensor:
    """``value`` in single precision, or in double if it is that already."""
    return value.to(torch.promote_types(value.dtype, torch.float32))


def per_token(name: str, value: torch.Tensor, logprobs: torch.Tensor) -> torch.Tensor:
    """A detached value for each token, from one for each token or for each rollout.

    Args:
        name: Argument.
        value: ``[B, T]`` or ``[B]``.
        logprobs: ``[B, T]``.

    Returns:
        ``[B, T]``, or ``[B, 1]`` to be broadcast.

    Raises:
        ValueError: It has neither shape.
    """
    value = value.detach()
    if value.shape == logprobs.shape:
        return value
    if value.shape == logprobs.shape[:1]:
        return value[:, None]
    raise ValueError(
        f"{name} has shape {tuple(value.shape)}, expected ({logprobs.shape[0]},) for one value a "
        f"rollout or {tuple(logprobs.shape)} for one a token"
    )
