"""Stands in for the training and evaluation commands: fast, since it copies what others made.

``train FOLDER METHOD INIT SEED VARIANT STEPS``: a step is a line of ``log.jsonl``; it goes on where
it was. While ``FOLDER/../hold`` exists it stands still before its last step, and method ``broken``
fails. ``eval FOLDER SPLIT``. Both copy from the finished run that ``TEMPLATE`` names.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path


def train_command(job, folder):
    return [
        *(sys.executable, __file__, "train", str(folder), job.method, job.init_from),
        *(str(job.seed), job.variant, str(job.options.get("steps", 3))),
    ]


def eval_command(job, checkpoint, split, folder):
    return [sys.executable, __file__, "eval", str(folder), split]


def train(folder, method, init, seed, variant, steps):
    folder, log = Path(folder), Path(folder) / "log.jsonl"
    with (folder / "processes").open("a") as file:
        file.write(f"{os.getpid()} {os.environ['OMP_NUM_THREADS']} {time.time()}\n")
    sys.stderr.write(f"training {method}\n")
    done = len(log.read_text().split()) if log.exists() else 0
    for step in range(done, int(steps)):
        while step == int(steps) - 1 and (folder.parent / "hold").exists():
            time.sleep(0.02)
        with log.open("a") as file:
            file.write(f"{step}\n")
    if method == "broken":
        sys.exit("it broke")
    (folder / "curves.png").write_bytes(method.encode())
    template = Path(os.environ["TEMPLATE"])
    shutil.copytree(template / "checkpoint", folder / "checkpoint", dirs_exist_ok=True)
    summary = json.loads((template / "summary.json").read_text())
    summary |= {"method": method, "seed": int(seed), "variant": variant}
    summary["init"]["name"] = init
    (folder / "summary.json").write_text(json.dumps(summary))
    with (folder / "processes").open("a") as file:
        file.write(f"{os.getpid()} end {time.time()}\n")


def evaluate(folder, split):
    shutil.copytree(Path(os.environ["TEMPLATE"]) / "eval" / split, folder)


if __name__ == "__main__":
    {"train": train, "eval": evaluate}[sys.argv[1]](*sys.argv[2:])
