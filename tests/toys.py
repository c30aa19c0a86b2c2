"""A small environment that keeps every promise, and relatives that each break one."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import multiprocessing
import random
import re
import warnings
from typing import ClassVar

import gymnasium as gym

from agentbench_prefix.dialogue import Dialogue, parse_bare, parse_bracketed, render_bare
from agentbench_prefix.env import Outcome, TeacherTurn, TextEnv
from agentbench_prefix.errors import UnknownNameError

ANSWERS = {
    "no_action": "Name an action.",
    "empty_action": "Name an action.",
    "multiple_actions": "Name one action.",
    "nested_brackets": "Name one action.",
    "unclosed_thinking": "Think less.",
}
BARE = Dialogue("bare", 1, None, parse_bare, render_bare, ANSWERS, 16)
BRACKETED = Dialogue(
    "bracketed",
    2,
    "Open the vault.",
    parse_bracketed,
    lambda action, thought: f"{thought}\n[[ {action} ]]",
    ANSWERS,
    64,
)


def code_of(task_id):
    """The three digits that open a vault."""
    return [byte % 10 for byte in hashlib.sha256(task_id.encode()).digest()[:3]]


class VaultTeacher:
    def __init__(self, env, seed, detours):
        self.env, self.detours = env, detours
        self.random = random.Random(f"{seed}")

    def next_turn(self):
        if self.random.random() < self.detours:
            return TeacherTurn("look", "Where am I?", trainable=False)
        return TeacherTurn(f"dial {self.env.code[self.env.progress]}", "The next digit.")


class Vault(TextEnv):
    """Dial the three digits of a vault, told one by one."""

    env_id = "Vault-v0"
    default_max_turns = 9
    task_options = frozenset({"polite"})
    rule_arguments = ("loud",)
    union_splits = ("all",)
    data_hash = hashlib.sha256(b"vault").hexdigest()

    def __init__(self, *, max_turns=9, split="train", loud=False, render_mode=None):
        super().__init__(max_turns=max_turns, split=split, render_mode=render_mode)
        self.loud = loud
        self.code = []
        self.progress = 0
        self.tried = []

    @classmethod
    def splits(cls):
        return ("train", "test", "all")

    def tasks(self, split):
        if split not in self.splits():
            raise UnknownNameError("split", split, self.splits())
        numbers = {"train": range(6), "test": range(6, 9), "all": range(9)}[split]
        return tuple(f"vault_{i}" for i in numbers)

    def family(self, task_id):
        if task_id in self.tasks("all"):
            return "written"
        if re.fullmatch(r"made_[0-9]{1,18}_[0-9]{1,18}", task_id):
            return "made"
        raise UnknownNameError("task_id", task_id, self.tasks("all"))

    def _begin(self, task_id, options):
        self.family(task_id)
        self.code, self.progress, self.tried = code_of(task_id), 0, []
        please = "Please dial" if options.get("polite") else "Dial"
        return f"A vault. {please} {self.code[0]}."

    def _act(self, action):
        if action == "look":
            return Outcome(f"You tried {len(self.tried)} digits, {self.progress} fit.")
        if not re.fullmatch("dial [0-9]", action):
            return Outcome(f"You cannot {action}.", valid=False)
        digit = int(action[-1])
        self.tried.append(digit)
        if digit != self.code[self.progress]:
            return Outcome(f"Try {len(self.tried)} rattles {self.rattle()} times.")
        self.progress += 1
        if self.progress == len(self.code):
            return Outcome("It opens.", reward=1.0, terminated=True, success=True)
        return Outcome(f"Click. Dial {self.code[self.progress]}.")

    def rattle(self):
        return int(self.np_random.integers(1000))

    def _get_state(self):
        return {"progress": self.progress, "tried": list(self.tried)}

    def _set_state(self, state):
        self.progress, self.tried = state["progress"], list(state["tried"])

    def fields(self, observation):
        found = re.search(r"[Dd]ial ([0-9])\.$", observation)
        return {"next": int(found.group(1))} if found else {}

    def dialogues(self):
        return {"bare": BARE, "bracketed": BRACKETED}

    def teacher(self, seed=None, *, detours=0.0):
        return VaultTeacher(self, seed, detours)

    def candidate_actions(self):
        return ["look", *(f"dial {digit}" for digit in range(10))]

    def generate_tasks(self, seed, n, **parameters):
        return tuple(f"made_{seed}_{i}" for i in range(n))


gym.register("Vault-v0", entry_point=Vault, max_episode_steps=None)


class Bench(TextEnv):
    """As little as an environment may implement: one hook, one task, lost by any answer but 4."""

    env_id = "Bench-v0"
    default_max_turns = 1
    data_hash = hashlib.sha256(b"bench").hexdigest()

    def __init__(self, *, max_turns=1, split="test", render_mode=None):
        super().__init__(max_turns=max_turns, split=split, render_mode=render_mode)

    @classmethod
    def splits(cls):
        return ("test",)

    def tasks(self, split):
        if split != "test":
            raise UnknownNameError("split", split, self.splits())
        return ("sum",)

    def family(self, task_id):
        if task_id != "sum":
            raise UnknownNameError("task_id", task_id, ["sum"])
        return "arithmetic"

    def _begin(self, task_id, options):
        self.family(task_id)
        return "2 + 2 = ?"

    def _act(self, action):
        right = action.strip() == "4"
        text = "Right." if right else "Wrong."
        return Outcome(text, reward=float(right), terminated=True, success=right)

    def _get_state(self):
        return None

    def _set_state(self, state):
        pass

    def fields(self, observation):
        return {"text": observation}

    def dialogues(self):
        return {"bare": BARE}

    def candidate_actions(self):
        return ["3", "4"]


class NeverShut(Vault):
    """A vault that can be dialled on after it opened, and keeps every promise."""

    accepts_steps_after_end = True

    def _act(self, action):
        if self.progress == len(self.code):
            return Outcome("It is open.", reward=1.0, terminated=True, success=True)
        return super()._act(action)

    def teacher(self, seed=None, *, detours=0.0):
        if self.progress == len(self.code):
            raise NotImplementedError
        return super().teacher(seed, detours=detours)


# ------------------------------------------------------------------ each breaks one promise
class WarnsOnStep(Vault):
    def _act(self, action):
        gym.logger.warn("deprecated")
        return super()._act(action)


class AnotherDefaultLimit(Vault):
    default_max_turns = 10


class NoneMeansDefault(Vault):
    def __init__(self, *, max_turns=None, **arguments):
        super().__init__(max_turns=9 if max_turns is None else max_turns, **arguments)


class LimitAsRule(Vault):
    rule_arguments = ("loud", "max_turns")


class HashPerInstance(Vault):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.data_hash = hashlib.sha256(str(id(self)).encode()).hexdigest()


class RendersOlder(Vault):
    def render(self):
        return "A vault."


class LeakySplits(Vault):
    union_splits = ()


class TwiceTheSameTask(Vault):
    def tasks(self, split):
        return (*super().tasks(split), "vault_6")


class EmptySplit(Vault):
    def tasks(self, split):
        return () if split == "test" else super().tasks(split)


class AnySplit(Vault):
    def tasks(self, split):
        return super().tasks(split if split in self.splits() else "train")


class FamilyOfAnything(Vault):
    def family(self, task_id):
        return "written"


class SeedInThePrompt(Vault):
    def _begin(self, task_id, options):
        return super()._begin(task_id, options) + f" It is {self.np_random.integers(10**9)} h."


class KeepsProgress(Vault):
    def _begin(self, task_id, options):
        before = self.tried
        text = super()._begin(task_id, options)
        self.tried = before
        return text + f" You know {len(before)} digits."


class KeepsProgressSilently(Vault):
    def _begin(self, task_id, options):
        before = self.tried
        text = super()._begin(task_id, options)
        self.tried = before
        return text


class SeedIgnored(Vault):
    def reset(self, *, seed=None, options=None):
        return super().reset(seed=0, options=options)


class OwnChance(Vault):
    def rattle(self):
        return random.SystemRandom().randrange(1000)


class HashOrder(Vault):
    def _begin(self, task_id, options):
        words = {"brass", "steel", "oak", "glass", "lead", "zinc"}
        return super()._begin(task_id, options) + " Made of " + ", ".join(words) + "."


class HashOrderedCandidates(Vault):
    def candidate_actions(self):
        return list(set(super().candidate_actions()))


class HashOrderedTasks(Vault):
    def tasks(self, split):
        return tuple(sorted(super().tasks(split), key=hash))


class SharedState(Vault):
    everything: ClassVar[list[int]] = []

    def _begin(self, task_id, options):
        text = super()._begin(task_id, options)
        self.tried = self.everything
        self.tried.clear()
        return text


cached_code_of = functools.cache(code_of)


class SharedCache(Vault):
    def _begin(self, task_id, options):
        text = super()._begin(task_id, options)
        self.code = cached_code_of(task_id)
        self.code.sort()
        return text

    def _act(self, action):
        if action.startswith("dial"):
            self.code.append(7)
        return Outcome(f"The code has {len(self.code)} digits.")


class GlobalRandom(Vault):
    def _begin(self, task_id, options):
        random.seed(task_id)
        return super()._begin(task_id, options)


class Prints(Vault):
    def _act(self, action):
        print("debug:", action)  # noqa: T201
        return super()._act(action)


class AnotherGameInWorkers(Vault):
    def _begin(self, task_id, options):
        text = super()._begin(task_id, options)
        return text + " (worker)" if multiprocessing.parent_process() else text


class SnapshotShares(Vault):
    def _get_state(self):
        return {"progress": self.progress, "tried": self.tried}


class RestoreShares(Vault):
    def _set_state(self, state):
        self.progress, self.tried = state["progress"], state["tried"]


class SnapshotForgets(Vault):
    def _get_state(self):
        return {"tried": list(self.tried)}

    def _set_state(self, state):
        self.tried = list(state["tried"])


class UnseededChanceIsLost(Vault):
    seeded = True

    def reset(self, *, seed=None, options=None):
        self.seeded = seed is not None
        return super().reset(seed=seed, options=options)

    def rattle(self):
        return super().rattle() if self.seeded else random.SystemRandom().randrange(1000)


class SnapshotOfTuples(Vault):
    def _get_state(self):
        return {**super()._get_state(), "tried": tuple(self.tried)}


class RestoreNeedsAReset(Vault):
    def restore(self, snapshot):
        _ = self.task_id
        return super().restore(snapshot)


class ForgetsTheEnd(Vault):
    def restore(self, snapshot):
        return super().restore(dataclasses.replace(snapshot, ended=False))


class TakesAnySnapshot(Vault):
    def restore(self, snapshot):
        mine = dataclasses.replace(snapshot, env_id=self.env_id, data_hash=self.data_hash)
        return super().restore(mine)


class ForgivesUnknownOptions(Vault):
    def restore(self, snapshot):
        known = {"polite": True} if snapshot.options else {}
        return super().restore(dataclasses.replace(snapshot, options=known))


class RestoresInPlace(Vault):
    """Sets the state before it looks whether it can."""

    def restore(self, snapshot):
        if isinstance(snapshot.turn, str):
            self.progress = 0
            self.tried = []
        return super().restore(snapshot)


class OwnReset(Vault):
    def reset(self, *, seed=None, options=None):
        given = {**(options or {})}
        given.pop("prefix_actions", None)
        return super().reset(seed=seed, options=given)


class PrefixPastTheEnd(Vault):
    def reset(self, *, seed=None, options=None):
        given = {**(options or {})}
        prefix = given.pop("prefix_actions", [])
        result = super().reset(seed=seed, options=given)
        for action in prefix:
            if not self.ended:
                self.step(action) if action is not None else self.skip_turn("")
        return result


class PrefixDestroysTheEpisode(Vault):
    def reset(self, *, seed=None, options=None):
        if options and "prefix_actions" in options:
            super().reset(seed=seed, options={"task_id": options["task_id"]})
        return super().reset(seed=seed, options=options)


class NoFreshBudget(Vault):
    def reset(self, *, seed=None, options=None):
        given = {**(options or {})}
        fresh = given.pop("fresh_budget", False)
        observation, info = super().reset(seed=seed, options=given)
        if fresh:
            self._turn = info["turn"] = 0
        return observation, info


class OneTurnTooMany(Vault):
    def _finish_turn(self, outcome):
        limit = self.max_turns
        self.max_turns = None if limit is None else limit + 1
        try:
            return super()._finish_turn(outcome)
        finally:
            self.max_turns = limit


class TruncatesTheSolved(Vault):
    def step(self, action):
        text, reward, terminated, truncated, info = super().step(action)
        return text, reward, terminated, truncated or self.turn == self.max_turns, info


class ForgivesUnknownTasks(Vault):
    def _begin(self, task_id, options):
        known = task_id in self.tasks("all") or task_id.startswith("made")
        return super()._begin(task_id if known else "vault_0", options)

    def family(self, task_id):
        return "written"


class UnknownTaskHalfWay(Vault):
    def _begin(self, task_id, options):
        self.progress = 0
        self.tried = []
        return super()._begin(task_id, options)


class UnknownTaskIsAKeyError(Vault):
    def _begin(self, task_id, options):
        if not task_id.startswith("made"):
            dict.fromkeys(self.tasks("all"))[task_id]
        return super()._begin(task_id, options)


class UnknownTaskNamesNothing(Vault):
    def family(self, task_id):
        try:
            return super().family(task_id)
        except UnknownNameError as error:
            raise UnknownNameError("task_id", task_id, [], "It is not there.") from error


class PlaysOnAfterTheEnd(Vault):
    def _check_running(self):
        self._ended = False
        super()._check_running()


class StepsBeforeReset(Vault):
    def step(self, action):
        if self._task_id is None:
            self.reset(seed=0)
        return super().step(action)


class OddTextRaises(Vault):
    def _act(self, action):
        if action.startswith("dial "):
            return super()._act(f"dial {int(action[5:])}")
        return super()._act(action)


class NumbersGrow(Vault):
    """Counts with a number that the player chose, and prints it."""

    def _act(self, action):
        found = re.fullmatch(r"dial ([0-9]{1,4300})", action)
        if found:
            self.tried.append(int(found.group(1)))
            return Outcome(f"Sum {sum(self.tried)}.")
        return super()._act(action)


class NarrowSpace(Vault):
    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.observation_space = gym.spaces.Text(10_000, charset="abcdefghijklmnopqrstuvwxyz .,")


class TrimsSurrogates(Vault):
    def _get_state(self):
        return {**super()._get_state(), "seen": self.last_observation.encode().decode()}


class NumpyInInfo(Vault):
    def _act(self, action):
        outcome = super()._act(action)
        return dataclasses.replace(outcome, info={"digits": {1, 2}})


class StealsSuccess(Vault):
    def _act(self, action):
        outcome = super()._act(action)
        return dataclasses.replace(outcome, info={"success": "no"})


class FieldsOfSets(Vault):
    def fields(self, observation):
        return {"words": set(observation.split())}


class NothingToPlay(Vault):
    def teacher(self, seed=None, *, detours=0.0):
        raise NotImplementedError

    def candidate_actions(self):
        raise NotImplementedError


class NoCandidateAtAll(NothingToPlay):
    def candidate_actions(self):
        return []


class NoFields(Vault):
    def fields(self, observation):
        return {}


class FieldsAct(Vault):
    def fields(self, observation):
        self.tried.append(0)
        return super().fields(observation)


class NoCategory(Vault):
    def failure_category(self, turns):
        return None


class CategoryNeedsTurns(Vault):
    def failure_category(self, turns):
        return "odd" if turns[-1].valid else "even"


class LosingTeacher(Vault):
    def _act(self, action):
        return dataclasses.replace(super()._act(action), success=False)


class WhimsicalTeacher(Vault):
    def teacher(self, seed=None, *, detours=0.0):
        return VaultTeacher(self, random.SystemRandom().random(), detours)


class OutOfReachForEver(Vault):
    def out_of_reach(self, split, max_turns):
        return self.tasks(split)[:1]


class FreshWorldsEachTime(Vault):
    def generate_tasks(self, seed, n, **parameters):
        return tuple(f"made_{random.SystemRandom().randrange(10**9)}_{i}" for i in range(n))


class SameWorldsForAllSeeds(Vault):
    def generate_tasks(self, seed, n, **parameters):
        return super().generate_tasks(0, n)


class WorldsOfThisInstanceOnly(Vault):
    def __init__(self, **arguments):
        self.made = set()
        super().__init__(**arguments)

    def generate_tasks(self, seed, n, **parameters):
        ids = super().generate_tasks(seed, n)
        self.made.update(ids)
        return ids

    def family(self, task_id):
        if task_id.startswith("made") and task_id not in self.made:
            raise UnknownNameError("task_id", task_id, self.tasks("all"))
        return super().family(task_id)


class DialogueReadsBackSomethingElse(Vault):
    def dialogues(self):
        return {"bare": dataclasses.replace(BARE, render=lambda action, thought: thought)}


class DialogueWithoutAnswer(Vault):
    def dialogues(self):
        return {"bracketed": dataclasses.replace(BRACKETED, answers={"no_action": "Name one."})}


class DialogueUnderAnotherName(Vault):
    def dialogues(self):
        return {"short": BARE}


class DialogueWithoutTokens(Vault):
    def dialogues(self):
        return {"bare": dataclasses.replace(BARE, max_tokens=0)}


class OldWarning(Vault):
    def _begin(self, task_id, options):
        warnings.warn("this will change", FutureWarning, stacklevel=2)
        return super()._begin(task_id, options)
