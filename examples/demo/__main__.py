"""Run the example: `python -m examples.demo --out demo-output`, in the folder of a clone."""

from __future__ import annotations

import argparse

from . import run

parser = argparse.ArgumentParser("python -m examples.demo")
parser.add_argument("--out", default="demo-output", help="folder for the report and the models")
parser.add_argument("--epochs", type=int, default=40, help="epochs of the float training")
asked = parser.parse_args()
run(asked.out, epochs=max(1, asked.epochs))
