"""The files of a source tree, by the part of the project that they belong to."""

import os
import pathlib
import subprocess

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SUPPORT = {"tests", "bench", "examples", "docs", "tools", ".ci"}  # every other folder is the library
GENERATED = {".git", ".deps", "build", "out"}  # at the top of a tree that is not a git repository
CODE = {".h", ".cpp", ".cu", ".py", ".sh"}
CORE = {"core"}  # folders whose classes are measured


class Tree:
    def __init__(self, root=ROOT):
        self.root = pathlib.Path(root)
        self.names = sorted(self._listed())
        self._texts = {}

    def _listed(self):
        """Paths relative to the root. New files count before `git add`; ignored ones never do."""
        if not (self.root / ".git").exists():
            return self._walked()
        listed = subprocess.run(["git", "-C", self.root, "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
                                check=True, stdout=subprocess.PIPE, text=True)
        return {name for name in listed.stdout.split("\0") if name and (self.root / name).is_file()}

    def _walked(self):
        for folder, below, files in os.walk(self.root):
            if pathlib.Path(folder) == self.root:
                below[:] = [name for name in below if name not in GENERATED]
            yield from ((pathlib.Path(folder) / name).relative_to(self.root).as_posix() for name in files)

    def text(self, name):
        if name not in self._texts:
            self._texts[name] = (self.root / name).read_text(encoding="utf-8", errors="replace")
        return self._texts[name]

    def lines(self, name):
        return self.text(name).count("\n")

    def library(self, *suffixes):
        return [name for name in self.names if is_library(name) and pathlib.PurePath(name).suffix in suffixes]

    def core(self, *suffixes):
        return [name for name in self.library(*suffixes) if name.split("/")[0] in CORE]

    def folders_at_the_top(self):
        return sorted({name.split("/")[0] for name in self.names if "/" in name})

    def source_files_by_folder(self):
        counts = {}
        for name in self.names:
            path = pathlib.PurePath(name)
            if path.suffix in CODE:
                counts[str(path.parent)] = counts.get(str(path.parent), 0) + 1
        return counts

    def find(self, name):
        """This path, or else the only other file of the library with that name, or None."""
        if name in self.names:
            return name
        found = [other for other in self.library(".h", ".cpp") if other.endswith("/" + pathlib.PurePath(name).name)]
        return found[0] if len(found) == 1 else None


def is_library(name):
    top, _, below = name.partition("/")
    return top not in SUPPORT if below else name.endswith(".h")
