"""Reads the output of train_gpt --tensorboard with TensorBoard's own reader: `make interop` runs this.

    tools/python.sh --with tensorboard tests/interop/tensorboard_test.py build/release/examples/train_gpt
"""

import json
import math
import pathlib
import subprocess
import sys
import tempfile
import unittest

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

PROGRAM = ""


class Tensorboard(unittest.TestCase):
    def train(self, folder, *options):
        sizes = "--layers 1 --width 16 --heads 2 --context 16 --batch 2 --threads 1 --sample 0 --val-every 4".split()
        subprocess.run([PROGRAM, *sizes, *options, "--out", folder / "out", "--tensorboard", folder / "curves"],
                       check=True, stdout=subprocess.DEVNULL)

    def test_curves_are_those_of_the_metrics(self):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            self.train(folder, "--ranks", "2", "--steps", "8", "--save-every", "8", "--report-every", "4")
            # The resumed run has its own file.
            self.train(folder, "--ranks", "2", "--steps", "12", "--resume", "auto", "--report-every", "4")
            self.assertEqual(len(list((folder / "curves").iterdir())), 2)
            metrics = [json.loads(line) for line in (folder / "out/metrics.jsonl").read_text().splitlines()]
            events = EventAccumulator(str(folder / "curves"))
            events.Reload()
            curve = lambda tag: {point.step: point.value for point in events.Scalars(tag)}
            for tag, name in (("train/loss", "loss"), ("train/learning_rate", "lr"), ("train/grad_norm", "grad_norm"),
                              ("train/tokens_per_s", "tokens_per_s"), ("val/loss", "val_loss")):
                expected = {line["step"]: line[name] for line in metrics if name in line}
                points = curve(tag)
                self.assertEqual(list(points), list(expected), tag)
                for step, value in expected.items():
                    self.assertTrue(math.isclose(points[step], value, rel_tol=1e-6, abs_tol=1e-12), (tag, step))
            self.assertEqual(list(curve("wait/percent_rank_1")), [4, 8, 12])
            for name in ("state", "held", "peak"):
                by_rank = [curve(f"memory/{name}_MiB_rank_{rank}") for rank in range(2)]
                self.assertEqual([list(points) for points in by_rank], [[4, 8, 12]] * 2)
                self.assertTrue(all(value > 0 for points in by_rank for value in points.values()), name)
            # Both hold half of the sharded data; rank 0's curve equals its own.
            self.assertEqual(curve("memory/state_MiB_rank_0")[8], curve("memory/state_MiB")[8])
            for held, peak in zip(curve("memory/held_MiB").values(), curve("memory/peak_MiB").values()):
                self.assertTrue(0 < held <= peak)


if __name__ == "__main__":
    PROGRAM = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main(verbosity=2)
