#!/usr/bin/env python3
"""Compares docs/plan.md with the output of its commands: a `text` block after an `sh` block must be the output of that
block's last command. Argument: the build folder. Skips programs that are not built; exit code 77 if none is.
"""

import os
import pathlib
import re
import shlex
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
BUILD = pathlib.Path(sys.argv[1] if len(sys.argv) > 1 else ROOT / "build/release").resolve()


def program(name):
    """Maps the page's name of a program to its path in this build."""
    return BUILD / (f"tools/tessera/{name}" if "/" not in name else name.removeprefix("build/release/"))


def main():
    page = (ROOT / "docs/plan.md").read_text(encoding="utf-8")
    count, problems = 0, []
    for commands, text in re.findall(r"```sh\n([^`]*?)```\n\n```text\n([^`]*?)```", page):
        words = shlex.split(commands.strip().split("\n")[-1], comments=True)
        if not (path := program(words[0])).exists() or not path.with_name(f"{path.name}_plan").exists() and "--plan" in words:
            print(f"passed over, since it is not built: {path}")
            continue
        printed = subprocess.run([path, *words[1:]], stdout=subprocess.PIPE, text=True, check=True,
                                 env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout
        count += 1
        if printed.strip() != text.strip():
            problems.append(f"docs/plan.md says something else than `{shlex.join(words)}` prints:\n{printed}")
    print("\n".join(problems) or f"docs/plan.md has what {count} commands print")
    return 1 if problems else 0 if count else 77


sys.exit(main())
