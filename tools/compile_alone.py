#!/usr/bin/env python3
"""Compiles source files one at a time, as the preset dev does, without writing objects.

    tools/compile_alone.py             the files that the last 10 commits, or uncommitted changes, have touched
    tools/compile_alone.py --all       all files of the build: a quarter of an hour
    tools/compile_alone.py FILE...     these files

Other builds merge files, so a file may use the includes of another one, and fail to compile only in the preset dev. A
header is compiled alone, too. Ends with exit code 1 if a file fails.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = ROOT / "build/alone"
COMMITS = 10


def commands():
    """Returns each source file's compiler command, without its output file."""
    options = [f"-DTESSERA_BUILD_{what}=ON" for what in ("TESTS", "EXAMPLES", "BENCH")]
    subprocess.run(["cmake", "--preset", "dev", "-B", BUILD, "--log-level=WARNING", *options], cwd=ROOT, check=True,
                   stdout=subprocess.DEVNULL)
    subprocess.run(["ninja", "-C", BUILD, "tessera_pch_libraries", "tessera_pch_programs"], check=True,
                   stdout=subprocess.DEVNULL)
    found = {}
    for entry in json.loads((BUILD / "compile_commands.json").read_text()):
        path = pathlib.Path(entry["file"])
        if path.is_relative_to(ROOT) and not path.is_relative_to(BUILD) and "cmake_pch" not in path.name:
            words = shlex.split(entry["command"])
            output = words.index("-o")
            found[path.relative_to(ROOT)] = words[:output] + words[output + 2:]
    return found


def touched():
    """Returns the files that the last commits or uncommitted changes have touched."""
    count = int(subprocess.check_output(["git", "rev-list", "--count", "HEAD"], cwd=ROOT))
    since = f"HEAD~{min(COMMITS, count - 1)}"
    names = subprocess.check_output(["git", "diff", "--name-only", "--diff-filter=d", since], cwd=ROOT, text=True)
    return [pathlib.Path(name) for name in names.split()]


def problem_of(path, known):
    """Returns the compiler's messages; "" if there are none, or if no command for the file is known."""
    if path in known:
        words = known[path] + ["-fsyntax-only"]
    else:
        beside = [other for other in known if other.parent == path.parent and other.parts[0] != "tests"]
        if path.suffix != ".h" or not beside:
            return ""
        words = known[beside[0]]
        words = words[:words.index("-c")] + ["-fsyntax-only", "-x", "c++", "-Wno-pragma-once-outside-header", path]
    done = subprocess.run(words, cwd=BUILD if path in known else ROOT, capture_output=True, text=True)
    return done.stderr if done.returncode != 0 else ""


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--all", action="store_true", help="all files of the build")
    parser.add_argument("files", nargs="*", type=pathlib.Path)
    arguments = parser.parse_args()
    known = commands()
    chosen = list(known) if arguments.all else [f.resolve().relative_to(ROOT) for f in arguments.files] or touched()
    failed = 0
    with concurrent.futures.ThreadPoolExecutor(int(os.environ.get("JOBS", os.cpu_count()))) as pool:
        for path, problem in zip(chosen, pool.map(lambda path: problem_of(path, known), chosen)):
            if problem:
                failed += 1
                print(f"{path} does not compile alone:\n{problem}", flush=True)
    print(f"compile_alone: {len(chosen)} files, {failed} problems")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
