"""TextCraft against a plain model of its rules, under play that nobody planned."""

from __future__ import annotations

import copy
import json
import re
from importlib.resources import files

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, initialize, invariant, rule

from agentbench_envs.textcraft.env import TextCraftEnv
from agentbench_prefix.env import Snapshot

BOOK = json.loads(files("agentbench_envs.textcraft").joinpath("data/book.json").read_text())
LARGEST = 10**18


class Model:
    """The rules as a reader of the environment's description would write them down."""

    def __init__(self, goal):
        self.goal = goal
        self.bag = {}

    def step(self, action):
        """Return ``(observation, whether the goal was crafted)``."""
        craft = re.match("craft (.*) using (.*)", action)
        get = re.match("get ([0-9]+) (.*)", action)
        numbers = re.findall("[0-9]+", action)
        if (craft or get) and any(int(n[-4000:]) >= LARGEST for n in numbers):
            return None, None  # refused as unreadable, in words the model leaves open
        if craft:
            return self.craft(*craft.groups())
        if get:
            item = get.group(2).replace(" ", "_")
            made = any(item in recipe[:3:2] for recipe in BOOK["recipes"])
            if made or item in BOOK["tags"] or item not in BOOK["items"]:
                return f"Could not find {get.group(2)}", False
            self.bag[item] = self.bag.get(item, 0) + int(get.group(1))
            return f"Got {int(get.group(1))} {get.group(2)}", False
        if action.startswith("inventory"):
            held = "".join(f"[{item.replace('_', ' ')}] ({n}) " for item, n in self.bag.items())
            return "Inventory: " + (held or "You are not carrying anything."), False
        return f"Could not execute {action}", False

    def craft(self, wanted, offered):
        counted = re.match("([0-9]+) (.*)", wanted)
        asked, output = (int(counted[1]), counted[2]) if counted else (1, wanted)
        output = output.replace(" ", "_")
        given = []
        for part in offered.split(","):
            found = re.match("([0-9]+) (.*)", part.strip())
            if not found:
                return f"Wrong item format: {part.strip()}", False
            given.append((found[2].replace(" ", "_"), int(found[1])))
        is_tag = output in BOOK["tags"]
        name = "None" if is_tag else f"minecraft:{output}"
        for item, n in given:
            if item in BOOK["tags"] or item not in self.bag or self.bag[item] < n:
                return f"Could not find enough items to craft {name}", False
        for made, count, _, inputs in BOOK["recipes"]:
            if made == output and not is_tag and self.fits(inputs, given):
                for item, n in given:
                    self.bag[item] -= n
                    if self.bag[item] == 0:
                        del self.bag[item]
                self.bag[output] = self.bag.get(output, 0) + count
                return f"Crafted {count} {name}", output == self.goal
        ids = ("'minecraft:" + output + "'", "None")[:: 1 if is_tag else -1]
        return (
            "Could not find a valid recipe for ItemTagWithCount(item_tag=ItemTag("
            f"tag={ids[0]}, item_id={ids[1]}), count={asked})",
            False,
        )

    @staticmethod
    def fits(inputs, given):
        """Whether the items given are the inputs one to one, in any order."""
        needed = sorted((name, n) for name, n, _ in inputs)
        tags = {name for name, _, is_tag in inputs if is_tag}
        played = [(BOOK["tag_of"][i] if BOOK["tag_of"].get(i) in tags else i, n) for i, n in given]
        return sorted(played) == needed


def spoken(name):
    return name.replace("_", " ")


NAMES = sorted({*BOOK["items"], *BOOK["tags"]})
COMMON = ["bamboo", "stick", "acacia_logs", "acacia_planks", "oak_planks", "planks", "diamond"]
names = st.one_of(
    st.sampled_from(COMMON), st.integers(0, len(NAMES) - 1).map(lambda i: NAMES[i])
).map(spoken)
amounts = st.one_of(st.integers(0, 9), st.sampled_from([64, 10**17, 10**18, 10**30])).map(str)
any_text = st.text(st.characters(exclude_categories=()), max_size=30)


def recipe_line(recipe, members):
    output, count, _, inputs = recipe
    given = ", ".join(
        f"{n} {spoken(members.get(name, name) if is_tag else name)}" for name, n, is_tag in inputs
    )
    return f"craft {count} {spoken(output)} using {given}"


MEMBERS = {tag: item for item, tag in BOOK["tag_of"].items()}
# Drawn by number: hypothesis would print the whole list.
recipes = st.integers(0, len(BOOK["recipes"]) - 1).map(lambda i: BOOK["recipes"][i])
crafts = recipes.map(lambda r: recipe_line(r, MEMBERS))
gets = st.builds("get {} {}".format, amounts, names)
odd_crafts = st.builds(
    "craft {} using {}".format,
    st.one_of(names, st.builds("{} {}".format, amounts, names), any_text),
    st.lists(st.one_of(st.builds("{} {}".format, amounts, names), any_text), max_size=3).map(
        ", ".join
    ),
)
actions = st.one_of(gets, crafts, st.just("inventory"), odd_crafts, any_text)


@st.composite
def worth_trying(draw):
    """Fetch plenty for one recipe, then craft it, or nearly: a count off, an input too many."""
    output, count, _, inputs = draw(recipes)
    given = [[n, spoken(MEMBERS.get(name, name) if is_tag else name)] for name, n, is_tag in inputs]
    steps = [f"get {n + 3} {item}" for n, item in given]
    change = draw(st.sampled_from(["none", "none", "count", "more", "twice", "less", "order"]))
    if change == "count":
        draw(st.sampled_from(given))[0] += draw(st.sampled_from([-1, 1, 2]))
    elif change == "more":
        given.append([1, "diamond"])
        steps.append("get 2 diamond")
    elif change == "twice":
        given.append(draw(st.sampled_from(given)))
    elif change == "less":
        given.pop()
    elif change == "order":
        given.reverse()
    offered = ", ".join(f"{n} {item}" for n, item in given)
    return [*steps, f"craft {count} {spoken(output)} using {offered}"]


plays = st.lists(
    st.one_of(actions.map(lambda a: [a]), worth_trying(), worth_trying()),
    min_size=1,
    max_size=8,
).map(lambda parts: [action for part in parts for action in part])


@settings(max_examples=300)
@given(st.integers(0, 543), plays)
def test_every_answer_and_inventory_is_the_models(index, played):
    env = TextCraftEnv(compat="agentgym")
    env.reset(options={"task_id": f"textcraft_{index}"})
    model = Model(env.goal)
    for action in played:
        before = dict(env.inventory)
        observation, reward, terminated, truncated, info = env.step(action)
        expected, won = model.step(action)
        if expected is None:
            assert not info["valid_action"]
            assert env.inventory == before
            continue
        assert observation == expected
        assert (reward, terminated, truncated) == (float(won), won, False)
        assert list(env.inventory.items()) == list(model.bag.items())
        assert min(env.inventory.values(), default=0) >= 0


def random_play(env, seed, turns):
    """Play candidates in an order that a seed decides; yields what each turn did."""
    picks = env.generate_tasks(seed, 1)[0].encode() * turns
    for turn in range(turns):
        offered = env.candidate_actions()
        action = offered[(picks[turn] * 31 + turn * 17 + seed) % len(offered)]
        before = dict(env.inventory)
        observation, _, terminated, _, info = env.step(action)
        yield action, before, observation, info
        if terminated:
            return


@pytest.mark.parametrize("seed", range(20))
def test_items_are_conserved_in_generated_worlds(seed):
    """What a turn changes is exactly what its own words say."""
    env = TextCraftEnv(compat="agentgym")
    crafted = 0
    for task in env.generate_tasks(seed, 15):
        env.reset(options={"task_id": task})
        for action, before, observation, info in random_play(env, seed, 40):
            after = dict(before)
            if found := re.fullmatch("Got ([0-9]+) (.*)", observation):
                item = found[2].replace(" ", "_")
                after[item] = after.get(item, 0) + int(found[1])
            elif found := re.fullmatch("Crafted ([0-9]+) minecraft:(.*)", observation):
                crafted += 1
                for part in action.split(" using ")[1].split(", "):
                    n, _, item = part.partition(" ")
                    after[item.replace(" ", "_")] -= int(n)
                after = {item: n for item, n in after.items() if n}
                after[found[2]] = after.get(found[2], 0) + int(found[1])
            assert env.inventory == after
            assert min(after.values(), default=0) >= 0
            assert info["valid_action"] or env.inventory == before
    assert crafted > 0


def test_no_recipe_takes_a_tag_and_an_item_that_carries_it():
    """Else one item could pay for two inputs."""
    env = TextCraftEnv()
    books = [env.book]
    for task in env.generate_tasks(2, 200):
        env.reset(options={"task_id": task})
        books.append(env.book)
    for book in books:
        for recipe in book.recipes:
            tags = {i.name for i in recipe.inputs if i.is_tag}
            plain = {i.name for i in recipe.inputs if not i.is_tag}
            assert not tags & {book.tag_of.get(name) for name in plain}
            assert len(tags) + len(plain) == len(recipe.inputs)


class Interleaving(RuleBasedStateMachine):
    """Two instances and any number of snapshots, in any order, beside one model each."""

    snapshots = Bundle("snapshots")

    @initialize()
    def make(self):
        self.envs = [TextCraftEnv(compat="agentgym") for _ in range(2)]
        self.models = [None, None]
        self.reset(0, 125)
        self.reset(1, 300)

    @rule(which=st.integers(0, 1), index=st.sampled_from([0, 2, 125, 300, 420, 543]))
    def reset(self, which, index):
        env = self.envs[which]
        env.reset(options={"task_id": f"textcraft_{index}"})
        self.models[which] = (Model(env.goal), 0)

    @rule(which=st.integers(0, 1), played=plays)
    def play(self, which, played):
        model, turn = self.models[which]
        for action in played:
            observation = self.envs[which].step(action)[0]
            turn += 1
            expected, _ = model.step(action)
            if expected is not None:
                assert observation == expected
        self.models[which] = (model, turn)

    @rule(target=snapshots, which=st.integers(0, 1))
    def take(self, which):
        snapshot = self.envs[which].snapshot()
        return snapshot, snapshot.to_json(), copy.deepcopy(self.models[which])

    @rule(taken=snapshots, which=st.integers(0, 1), through_json=st.booleans(), new=st.booleans())
    def restore(self, taken, which, through_json, new):
        snapshot, text, model = taken
        assert snapshot.to_json() == text
        if new:
            self.envs[which] = TextCraftEnv(compat="agentgym")
        self.envs[which].restore(Snapshot.from_json(text) if through_json else snapshot)
        self.models[which] = copy.deepcopy(model)

    @invariant()
    def every_state_is_the_models(self):
        for env, (model, turn) in zip(self.envs, self.models, strict=True):
            assert list(env.inventory.items()) == list(model.bag.items())
            assert (env.goal, env.turn) == (model.goal, turn)


TestInterleaving = Interleaving.TestCase
TestInterleaving.settings = settings(
    max_examples=60, stateful_step_count=20, suppress_health_check=list(HealthCheck)
)
