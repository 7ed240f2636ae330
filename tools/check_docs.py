#!/usr/bin/env python3
"""Compares the documentation with the tree. Links must have a target. Quoted errors must exist in the code, and errors of
the libraries must be quoted. Names in a table's column "Tessera" must exist, and so must the libraries that lines of CMake
link. The API reference must have every public header.

In a table with a column that begins with "error" or "the error", `code` quotes an error, with `...` for the parts that
differ. Each piece between must consist of at most three texts of the libraries, the tools or the CMake files, because
code joins errors from such texts. One text of each error of the libraries must be quoted, unless the error states the
expected value; tools/errors_without_entry lists the other exceptions. Names such as `std::logic_error` are skipped, and
so are errors of autograd: autograd's `code`.

With --headers it checks nothing and prints the headers of the API reference, for tools/docs.sh.
"""

import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
LEAST = 8  # minimum characters of a piece of a quoted error
MOST_TEXTS, LEAST_OF_TEXT = 3, 6  # maximum texts of the sources in one piece, minimum characters of each


def tracked(*patterns):
    listed = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, check=True, capture_output=True, text=True)
    return [ROOT / name for name in listed.stdout.split()]


def texts_of(path):
    """The string literals of a C++ file, adjacent ones in one; of other files, everything."""
    text = path.read_text(encoding="utf-8")
    if path.suffix not in (".cpp", ".h"):
        return re.sub(r"\s+", " ", text)
    text = re.sub(r'"\s*\n\s*"', "", text)
    return "\n".join(re.sub(r"\\(.)", r"\1", literal) for literal in re.findall(r'"((?:\\.|[^"\\\n])*)"', text))


def quoted(lines, title):
    """(line number, code) of the columns with such a title of a page's tables."""
    column = None
    for number, line in enumerate(lines, 1):
        if not line.startswith("|"):
            column = None
            continue
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip().strip("|"))]
        if column is None:
            names = [i for i, cell in enumerate(cells) if re.match(title, cell)]
            column = names[0] if names else -1
        elif 0 <= column < len(cells):
            for before, _, code in re.findall(r"(autograd's )?(`+)(.+?)\2", cells[column]):
                if not before and not re.fullmatch(r"[\w:.]+(\(\))?", code):
                    yield number, code.strip()


def anchors(path):
    names = set()
    for line in path.read_text(encoding="utf-8").split("\n"):
        if line.startswith("#"):
            title = re.sub(r"[^\w\- ]", "", line.lstrip("#").strip().lower())
            names.add(title.replace(" ", "-"))
    return names


def is_made_of(piece, thrown, most=MOST_TEXTS):
    """Whether the piece consists of up to `most` of the texts, joined."""
    if piece in thrown:
        return True
    return most > 1 and any(piece[:length] in thrown and is_made_of(piece[length:].strip(), thrown, most - 1)
                            for length in range(LEAST_OF_TEXT, len(piece) - LEAST_OF_TEXT + 1))


def check_errors(pages, problems):
    sources = [path for path in tracked("*.cpp", "*.h", "*.cmake", "*CMakeLists.txt")
               if path.parts[len(ROOT.parts)] not in ("tests", "bench", "examples")]
    thrown = "\n".join(map(texts_of, sources))
    count = 0
    for page in pages:
        for number, code in quoted(page.read_text(encoding="utf-8").split("\n"), r"(the )?error\b"):
            pieces = [piece for piece in re.split(r"\s*\.\.\.\s*", code) if len(piece) > 3]
            where = f"{page.relative_to(ROOT)}:{number}: `{code}`"
            if max(map(len, pieces), default=0) < LEAST:
                problems.append(f"{where} says too little to be found")
            problems += [f"{where}: nothing in the sources says '{piece}'" for piece in pieces if not is_made_of(piece, thrown)]
            count += 1
    return count


# Expressions that throw, or call a function of the file that throws; their first texts are the error.
REQUIRES = re.compile(r"\brequire(?:<[\w:]+>)?\(")  # the function of core/runtime/require.h
THROWS = re.compile(r"\b(?:throw\s+[\w:]+\s*|(?:refuse|fail|refuse_argument|fail_at|refuse_trace|refuse_value))\(")


def call_at(text, begin):
    """The call that starts at `begin`, up to the closing parenthesis of its arguments."""
    depth = 0
    for token in re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])\'|[()]').finditer(text, begin):
        depth += {"(": 1, ")": -1}.get(token[0], 0)
        if depth == 0 and token[0] == ")":
            return text[begin:token.end()]
    return text[begin:]


def thrown_in(path):
    """Yields the line number and the texts of each error that a file throws."""
    code = re.sub(r'(^|[^:"])//.*', r"\1", path.read_text(encoding="utf-8"))
    requires = REQUIRES.finditer(code) if '#include "core/runtime/require.h"' in code else []
    for found in [*THROWS.finditer(code), *requires]:
        call = re.sub(r'"\s*\n\s*"', "", call_at(code, found.start()))
        texts = [re.sub(r"\\(.)", r"\1", text).strip() for text in re.findall(r'"((?:\\.|[^"\\\n])*)"', call)]
        texts = [text for text in texts if len(text) >= LEAST]
        if texts:
            yield code.count("\n", 0, found.start()) + 1, texts


def check_thrown(pages, problems):
    pieces = {piece for page in pages for _, code in quoted(page.read_text(encoding="utf-8").split("\n"), r"(the )?error\b")
              for piece in re.split(r"\s*\.\.\.\s*", code) if len(piece) >= LEAST}
    exceptions = [line for line in (ROOT / "tools/errors_without_entry").read_text(encoding="utf-8").split("\n")
                  if line and not line.startswith("#")]
    needed, count = set(), 0
    for path in tracked("*.cpp", "*.h"):
        name = str(path.relative_to(ROOT))
        if name.startswith(("tests/", "bench/", "examples/", "tools/")):
            continue
        for number, texts in thrown_in(path):
            count += 1
            if any("expected" in text for text in texts):
                continue
            if any(piece in text or text in piece for piece in pieces for text in texts):
                continue
            excepting = [line for line in exceptions
                         if line == name or any(line.startswith(name + ": ") and line[len(name) + 2:] in text for text in texts)]
            needed.update(excepting)
            if not excepting:
                problems.append(f"{name}:{number}: no page's table of errors quotes '{texts[0]}'")
    problems += [f"tools/errors_without_entry: nothing needs '{line}'" for line in exceptions if line not in needed]
    return count


def check_names(pages, problems):
    written = "\n".join(path.read_text(encoding="utf-8") for path in tracked("*.h", "*.cpp", "*.sbatch", "docs/launch.md"))
    known = set(re.findall(r"\w+", written))
    count = 0
    for page in pages:
        for number, code in quoted(page.read_text(encoding="utf-8").split("\n"), "Tessera"):
            for name in re.findall(r"[A-Za-z_]\w{3,}", re.sub(r'"[^"]*"', "", code)):
                count += 1
                if name not in known:
                    problems.append(f"{page.relative_to(ROOT)}:{number}: nothing is called {name}")
    return count


def check_links(pages, problems, root=ROOT):
    count = 0
    for page in pages:
        text = re.sub(r"```.*?```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
        for target in re.findall(r"\]\(([^)\s]+)\)", text):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            to = (page.parent / name).resolve() if name else page
            count += 1
            if not to.exists():
                problems.append(f"{page.relative_to(root)}: there is no {target}")
            elif anchor and anchor not in anchors(to):
                problems.append(f"{page.relative_to(root)}: {to.relative_to(root)} has no section #{anchor}")
    return count


def check_targets(pages, problems):
    """Lines of CMake link libraries that the package has."""
    names = re.search(r"set\(TESSERA_LIBRARIES ([^)]+)\)", (ROOT / "CMakeLists.txt").read_text(encoding="utf-8"))[1].split()
    for page in pages:
        for line in re.findall(r"target_link_libraries\(.*", page.read_text(encoding="utf-8")):
            problems += [f"{page.relative_to(ROOT)}: there is no library tessera::{name}"
                         for name in re.findall(r"tessera::(\w+)", line) if name not in [*names, "tessera"]]


def public_headers():
    """The headers of the API reference: the installed ones, without include/tessera/detail/."""
    names = [str(path.relative_to(ROOT)) for path in tracked("include/tessera/*.h")]
    return {name for name in names if not name.startswith("include/tessera/detail/")}


def check_headers(problems):
    """The index of the reference names public headers only, and all of them."""
    headers = public_headers()
    rows = re.findall(r"^\|([^|]*)\|", (ROOT / "docs/reference/index.md").read_text(encoding="utf-8"), re.MULTILINE)
    listed = {"include/" + name for name in re.findall(r"tessera/[\w/]+\.h\b", "\n".join(rows))}
    problems += [f"docs/reference/index.md: {name} is not a public header" for name in sorted(listed - headers)]
    missing = headers - listed - {"include/tessera/tessera.h", "include/tessera/plan.h"}
    problems += [f"docs/reference/index.md does not list {name}" for name in sorted(missing)]
    return len(headers)


def main():
    if sys.argv[1:] == ["--headers"]:
        print(*sorted(public_headers()), sep="\n")
        return 0
    problems = []
    if sys.argv[1:2] == ["--links"]:
        root = pathlib.Path(sys.argv[2]).resolve()
        links = check_links(sorted(root.rglob("*.md")), problems, root)
        print(*problems, f"{links} links: {len(problems)} problems", sep="\n")
        return 1 if problems else 0
    pages = tracked("*.md")
    errors, names, links = (check(pages, problems) for check in (check_errors, check_names, check_links))
    headers, thrown = check_headers(problems), check_thrown(pages, problems)
    check_targets(pages, problems)
    print(*problems, sep="\n", end="\n" if problems else "")
    print(f"{thrown} errors, {errors} quoted, {names} names, {links} links in {len(pages)} pages, {headers} headers: {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
