from __future__ import annotations

from importlib.metadata import EntryPoint

import gymnasium as gym
import pytest
import toys

from agentbench_prefix import environment_ids, make, registry
from agentbench_prefix.errors import EntryPointError, UnknownNameError


@pytest.fixture
def third_party(monkeypatch):
    """Entry points of a distribution that is not this one."""

    def points(*, group):
        if group == registry.ENVIRONMENTS_GROUP:
            return [EntryPoint("ThirdParty-v0", "toys:Vault", group)]
        return [EntryPoint("their_method", "toys:ANSWERS", group)]

    monkeypatch.setattr(registry, "entry_points", points)
    environment_ids.cache_clear()
    yield
    gym.registry.pop("ThirdParty-v0", None)
    environment_ids.cache_clear()


def test_environments_are_registered_by_importing_the_package():
    assert "TextCraft-v0" in environment_ids()
    for env_id in environment_ids():
        spec = gym.spec(env_id)
        assert spec.max_episode_steps is None
        assert spec.id == env_id


def test_make_returns_the_unwrapped_environment():
    env = make("TextCraft-v0", max_turns=7)
    assert env is env.unwrapped
    assert env.max_turns == 7
    assert type(env) is registry.environment_class("TextCraft-v0")


def test_a_third_party_needs_an_entry_point_only(third_party):
    assert environment_ids() == ("ThirdParty-v0",)
    registry.register_environments()
    assert isinstance(make("ThirdParty-v0"), toys.Vault)
    assert registry.method("their_method") is toys.ANSWERS
    assert registry.method_names() == ("their_method",)


@pytest.mark.parametrize(
    ("value", "cause"),
    [
        ("no_such_library.envs:Env", "No module named 'no_such_library'"),
        ("toys:NoSuchClass", "has no attribute 'NoSuchClass'"),
    ],
)
def test_what_cannot_be_imported_is_named(monkeypatch, tmp_path, value, cause):
    info = tmp_path / "their_package-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-package\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        f"[{registry.ENVIRONMENTS_GROUP}]\nTheirs-v0 = {value}\n"
        f"[{registry.METHODS_GROUP}]\ntheirs = {value}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    for look_up, name, kind in (
        (registry.environment_class, "Theirs-v0", "environment"),
        (make, "Theirs-v0", "environment"),
        (registry.method, "theirs", "method"),
    ):
        with pytest.raises(EntryPointError) as caught:
            look_up(name)
        text = str(caught.value)
        assert f"{kind} '{name}' of their-package cannot be imported from {value}" in text
        assert cause in text
    assert "theirs" in registry.method_names()


def test_registering_twice_is_harmless():
    before = dict(gym.registry)
    registry.register_environments()
    assert dict(gym.registry) == before


def test_unknown_names_are_refused_with_the_known_ones():
    with pytest.raises(UnknownNameError, match=r"unknown environment 'Chess-v0'; valid: .*-v0"):
        make("Chess-v0")
    with pytest.raises(UnknownNameError, match=r"unknown method 'magic'; valid: .*sft"):
        registry.method("magic")
