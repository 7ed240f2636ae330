"""Tests tools/tessera-convert on hostile pickles and damaged checkpoints: no code runs, nothing is converted in silence,
and each refusal is one line. With a seed, only damages folders, 60 or that many:

    tools/python.sh tests/interop/damage_test.py [seed [folders]]
"""

import contextlib
import copy
import io
import os
import pathlib
import pickle
import random
import runpy
import shutil
import subprocess
import sys
import tempfile
import unittest
import warnings

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONVERT = ROOT / "tools/tessera-convert"
SEED, FOLDERS = 1, 60


class Runs:
    """Creates a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def convert(*words):
    """Returns the error, or "". Propagates any exception but the tool's own end."""
    arguments, sys.argv = sys.argv, [str(CONVERT), *map(str, words)]
    try:
        with contextlib.redirect_stderr(io.StringIO()):
            runpy.run_path(str(CONVERT), run_name="__main__")
    except SystemExit as end:
        return str(end)
    finally:
        sys.argv = arguments
    return ""


class Damage(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.path = pathlib.Path(folder.name)
        torch.manual_seed(1)
        self.state = {"model": {"a": torch.randn(6, 5), "b": torch.randn(7, dtype=torch.float64), "c": torch.tensor(3.0)}, "step": 3}

    def save_dcp(self, name="dcp"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            dcp.save(self.state, checkpoint_id=self.path / name, no_dist=True)
        return self.path / name

    def refuse(self, source, part, *words):
        told = convert(source, self.path / "ours", *words)
        self.assertIn(part, told)
        self.assertIn(str(self.path), told)
        self.assertEqual(len(told.splitlines()), 1)
        self.assertFalse((self.path / "ours").exists())

    def change(self, edit):
        """Saves a folder and edits its metadata."""
        shutil.rmtree(self.path / "dcp", ignore_errors=True)
        folder = self.save_dcp()
        metadata = pickle.loads((folder / ".metadata").read_bytes())  # of this test
        edit(metadata)
        (folder / ".metadata").write_bytes(pickle.dumps(metadata))
        return folder

    def test_no_pickle_runs_code(self):
        ran = self.path / "ran"
        folder = self.save_dcp()
        whole = (folder / ".metadata").read_bytes()
        for hostile in (Runs(ran), [pickle.loads(whole), Runs(ran)], {"planner_data": Runs(ran)}):
            (folder / ".metadata").write_bytes(pickle.dumps(hostile))
            self.refuse(folder, "posix.mkdir, which is not part of torch.distributed.checkpoint's metadata")
        (folder / ".metadata").write_bytes(b"cbuiltins\neval\n(S'1'\ntR.")
        self.refuse(folder, "names builtins.eval")
        (folder / ".metadata").write_bytes(pickle.dumps(torch.hub.load))  # of an allowed package
        self.refuse(folder, "names torch.hub.load")
        for file, content in (("model.pt", {"model": self.state["model"], "x": Runs(ran)}), ("raw.pt", Runs(ran))):
            torch.save(content, self.path / file)
            self.refuse(self.path / file, "which unpickling would run as code")
        torch.save(self.state["model"], self.path / "sound.pt")
        (self.path / "optimizer.pt").write_bytes(pickle.dumps(Runs(ran)))
        self.refuse(self.path / "sound.pt", "optimizer.pt", "--optimizer-file", self.path / "optimizer.pt")
        deepspeed = self.path / "deepspeed/step"
        deepspeed.mkdir(parents=True)
        torch.save(Runs(ran), deepspeed / "zero_pp_rank_0_mp_rank_00_optim_states.pt")
        self.refuse(deepspeed, "which unpickling would run as code")
        self.assertFalse(ran.exists())

    def test_an_entry_that_would_run_code_is_left_out(self):
        self.state["beside"] = Runs(self.path / "ran")
        folder = self.save_dcp()
        self.assertEqual(convert(folder, self.path / "ours"), "")
        self.assertFalse((self.path / "ran").exists())
        self.assertEqual(convert(folder, self.path / "trusted", "--trust"), "")
        self.assertTrue((self.path / "ran").exists())

    def test_metadata_is_compared_with_itself_and_with_the_files(self):
        tensors = lambda metadata: metadata.state_dict_metadata
        places = lambda metadata: {index.fqn: place for index, place in metadata.storage_data.items()}

        def cut(*rows):
            def edit(metadata):
                tensors(metadata)["model.a"].chunks = [ChunkStorageMetadata(torch.Size([begin, 0]), torch.Size([end - begin, 5]))
                                                       for begin, end in rows]
            return edit

        def same_bytes(metadata):
            places(metadata)["model.a"].offset = places(metadata)["model.b"].offset

        edits = {
            "'model.a' is [6, 5], 30 elements; its chunks have 0": cut(),
            "its chunks have 20": cut((0, 4)),
            "chunks that overlap: [4, 5] at [0, 0] and [3, 5] at [3, 0]": cut((0, 4), (3, 6)),
            "its chunk [4, 5] at [4, 0] is not inside": cut((0, 4), (4, 8)),
            "has no place in the files for its chunk at [4, 0]": cut((0, 4), (4, 6)),
            "has the same bytes of": None,
            "'model.b' is torch.float64 [7]; .metadata has torch.int64 [7]":
                lambda metadata: setattr(tensors(metadata)["model.b"].properties, "dtype", torch.int64),
            "'model.a' is torch.float32 [6, 5]; .metadata has torch.float32 [5, 6]":
                lambda metadata: tensors(metadata).update({"model.a": dict_to_entry(tensors(metadata)["model.a"], [5, 6])}),
            "have the same bytes": same_bytes,
            "ends at byte": lambda metadata: setattr(places(metadata)["model.c"], "length", 10**6),
            "has the place '../x'": lambda metadata: setattr(places(metadata)["model.a"], "relative_path", "../x"),
            "the file other, of 'model.a', is missing": lambda metadata: setattr(places(metadata)["model.a"], "relative_path", "other"),
            "has a place in the files for 'model.b', and no entry": lambda metadata: tensors(metadata).pop("model.b"),
            "'model.b' has no keys": lambda metadata: metadata.planner_data.pop("model.b"),
            "has no planner_data": lambda metadata: delattr(metadata, "planner_data"),
            "has no entries": lambda metadata: setattr(metadata, "storage_data", None),
            "neither a tensor nor bytes": lambda metadata: tensors(metadata).update(x=3),
            "no dtype, shape or chunks": lambda metadata: delattr(tensors(metadata)["model.a"], "chunks"),
        }

        def dict_to_entry(entry, size):
            entry = copy.deepcopy(entry)
            entry.size, entry.chunks = torch.Size(size), [ChunkStorageMetadata(torch.Size([0, 0]), torch.Size(size))]
            return entry

        for part, edit in edits.items():
            if edit:
                with self.subTest(part=part):
                    self.refuse(self.change(edit), part)

    def test_pointers_of_git_lfs_are_named(self):
        for source in self.sound_sources()[1:]:
            for file in sorted(path for path in source.rglob("*") if path.is_file()):
                with self.subTest(file=file):
                    whole = file.read_bytes()
                    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n")
                    told = convert(*self.words(source, "ours"))
                    self.assertIn(f"{file.name}: is a pointer of Git LFS", told)
                    file.write_bytes(whole)

    def test_a_flipped_bit_of_a_tensor_is_found(self):
        for name, source in (("dcp", self.save_dcp() / "__0_0.distcp"), ("model.pt", self.path / "model.pt")):
            with self.subTest(name=name):
                if name == "model.pt":
                    torch.save(self.state["model"], source)
                data = bytearray(source.read_bytes())
                data[data.index(self.state["model"]["a"].numpy().tobytes()) + 50] ^= 4
                source.write_bytes(data)
                self.refuse(self.path / name, "is damaged: Bad CRC-32")

    def test_a_file_that_becomes_shorter_while_it_is_read_ends_in_one_line(self):
        file = self.path / "model.pt"
        torch.save({"a": torch.ones(1 << 22)}, file)
        program = ("import os, pathlib, sys; sys.path.insert(0, sys.argv[1]); from convert import untrusted\n"
                   "file = pathlib.Path(sys.argv[2]); state = untrusted.load_file(file, False)\n"
                   "os.truncate(file, 4096); print(state['a'].sum())")
        done = subprocess.run([sys.executable, "-c", program, CONVERT.parent, file], capture_output=True, text=True)
        self.assertEqual((done.returncode, done.stdout, done.stderr),
                         (1, "", f"tessera-convert: {file}: became shorter while it was read\n"))

    def test_damaged_folders_end_in_one_line(self):
        """Damages files of folders in all formats. A conversion that succeeds must equal that of the sound folder."""
        chance = random.Random(SEED)
        sources = self.sound_sources()
        converted = {source: self.tensors_of(source, f"sound{number}") for number, source in enumerate(sources)}
        accepted = 0
        for number in range(FOLDERS):
            source, hurt = chance.choice(sources), self.path / f"hurt{number}"
            shutil.copytree(source, hurt)
            file = chance.choice(sorted(path for path in hurt.rglob("*") if path.is_file()))
            damage(file, chance)
            with self.subTest(seed=SEED, number=number, file=file.relative_to(hurt)):
                told = convert(*self.words(hurt, f"out{number}"))
                self.assertLessEqual(len(told.splitlines()), 1, told)
                self.assertNotIn("Error:", told.replace("cannot be converted: ", ""))
                if not told:
                    accepted += 1
                    self.assertTrue(same(self.tensors_of(hurt, f"again{number}"), converted[source]), "other values, in silence")
            shutil.rmtree(hurt)
        self.assertLess(accepted, FOLDERS // 2)

    def words(self, source, target):
        """Returns the arguments: for a folder with one file of torch.save, that file."""
        file = source / "model.pt"
        return (file if file.exists() else source, self.path / target)

    def sound_sources(self):
        (self.path / "torch").mkdir()
        torch.save({"model": self.state["model"], "step": 3}, self.path / "torch/model.pt")
        folders = [self.save_dcp(), self.path / "torch"]
        self.assertEqual(convert(folders[0], self.path / "tessera"), "")
        return [folders[0], *folders, self.path / "tessera"]

    def tensors_of(self, source, target):
        """The tensors of a conversion, read by torch from its files, or from the folder that a Tessera checkpoint becomes."""
        self.assertEqual(convert(*self.words(source, target)), "")
        if (self.path / target / ".metadata").exists():
            self.assertEqual(convert(self.path / target, self.path / f"{target}-back"), "")
            target = f"{target}-back"
        from safetensors.torch import load_file

        return load_file(self.path / target / "rank-00000-0.safetensors")


def same(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) and some[name].dtype == others[name].dtype
                                                for name in some)


def damage(file, chance):
    data = bytearray(file.read_bytes())
    kind, at = chance.randrange(6), chance.randrange(len(data))
    if kind == 0:
        data[at] ^= 1 << chance.randrange(8)
    elif kind == 1:
        del data[at:]
    elif kind == 2:
        data[at : at + 40] = chance.randbytes(40)
    elif kind == 3:
        data[at:at] = chance.randbytes(8)
    elif kind == 4:
        del data[at : at + 16]
    else:
        file.unlink()
        return
    file.write_bytes(data)


if __name__ == "__main__":
    SEED, FOLDERS = [int(word) for word in sys.argv[1:3]] + [SEED, FOLDERS][len(sys.argv[1:3]):]
    only = "Damage.test_damaged_folders_end_in_one_line" if sys.argv[1:] else None
    del sys.argv[1:]
    unittest.main(verbosity=2, defaultTest=only)
