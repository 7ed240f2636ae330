#!/usr/bin/env python3
"""Measures the English of comments, docstrings and Markdown pages, in findings per 1,000 words.

    tools/check_english.py               prints the figures
    tools/check_english.py --worst 20    also prints the blocks with the most findings
    tools/check_english.py --check       fails if a figure is worse than in tools/ratchet.json
    tools/check_english.py --update      lowers the figures in tools/ratchet.json to the measured ones

A block with no finding can still be unclear: the patterns below are only what a program can see.
"""

import argparse
import ast
import pathlib
import re
import sys

from gates import ratchet
from gates.tree import Tree, is_library

# A clause in the place of a noun: write "the gathered tensor", "the waiting rank".
AFTER_WHAT = ("it they is was has had came comes lies other others the a this that we user users somebody nobody does do "
              "may can cannot")
AFTER_WHO = "waits reads comes holds writes adds steps looks makes has asks wants goes keeps may can"
BEFORE_A_CLAUSE = "of for by to from with and or"
PEOPLE = "nobody somebody anybody everybody"
VAGUE = "comes goes lies stands lie came lay stood"


def any_of(words):
    return "(?:" + "|".join(words.split()) + ")"


PATTERNS = {
    "noun clause": re.compile(
        rf"\b[Ww]hat {any_of(AFTER_WHAT)}\b|\b{any_of(BEFORE_A_CLAUSE)} (?:what|who)(?:ever)?\b"
        rf"|\b[Ww]ho(?:ever)? (?:{any_of(AFTER_WHO)}|is given)\b"),
    "nobody": re.compile(rf"\b{any_of(PEOPLE)}\b", re.IGNORECASE),
    "vague verb": re.compile(rf"\b(?:{any_of(VAGUE)}|(?:is|are) through)\b"),
}
GROUPS = ("library", "tests and tools", "docs")
SLASHES = {".h", ".cpp", ".cu"}
HASHES = {".py", ".sh", ".cmake", ".sbatch", "CMakeLists.txt", "Makefile", "run"}
IGNORED = re.compile(r"NOLINT|://|Copyright|^!")
# Literals first, so that a comment sign inside one is passed over.
CPP_COMMENT = re.compile(r'R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|//+ ?(?P<line>[^\n]*)|/\*+(?P<span>.*?)\*/', re.DOTALL)


def kind_of(name):
    """'markdown', 'slashes', 'hashes' or None."""
    path = pathlib.PurePath(name)
    if path.suffix == ".md":
        return "markdown"
    if "data" in path.parts:
        return None
    if path.suffix in SLASHES:
        return "slashes"
    return "hashes" if path.suffix in HASHES or path.name in HASHES else None


def cpp_comments(text):
    """(line number, text) of each line of comment."""
    for found in CPP_COMMENT.finditer(text):
        comment = found["line"] if found["line"] is not None else found["span"]
        if comment is not None:
            first = text.count("\n", 0, found.start()) + 1
            yield from enumerate((line.strip(" *") for line in comment.split("\n")), first)


def hash_comments(text):
    for number, line in enumerate(text.split("\n"), 1):
        for found in re.finditer(r"(?:^|\s)#+ ?", line):
            before = line[:found.start()]
            if before.count('"') % 2 == 0 and before.count("'") % 2 == 0:  # not inside a string
                yield number, line[found.end():]
                break


def docstrings(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node):
            yield node.body[0].lineno, ast.get_docstring(node)


def joined(lines, starts=None):
    """Consecutive lines as (first line number, text). A line that matches `starts` begins a block of its own."""
    block, first, last = [], 0, -1
    for number, line in lines:
        if block and (number > last + 1 or (starts and starts.match(line))):
            yield first, " ".join(block)
            block = []
        first = first if block else number
        block.append(line)
        last = number
    if block:
        yield first, " ".join(block)


def paragraphs(text):
    """Paragraphs, list items and table rows of a Markdown page, without its blocks of code."""
    text = re.sub(r"^```.*?^```", lambda fence: "\n" * fence[0].count("\n"), text, flags=re.DOTALL | re.MULTILINE)
    lines = ((number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip())
    return joined(lines, re.compile(r"\s*(?:\||#|[*-] |\d+\. )"))


def blocks_of(name, text):
    """(line number, text) of each comment, docstring or paragraph."""
    kind = kind_of(name)
    if kind == "markdown":
        return list(paragraphs(text))
    lines = cpp_comments(text) if kind == "slashes" else hash_comments(text)
    found = list(joined((number, line) for number, line in lines if not IGNORED.search(line)))
    return found + list(docstrings(text)) if name.endswith(".py") else found


def group_of(name):
    if kind_of(name) == "markdown":
        return "docs"
    return "library" if is_library(name) else "tests and tools"


def all_blocks(tree):
    """{group: [("file:line", text)]}"""
    found = {group: [] for group in GROUPS}
    for name in tree.names:
        if kind_of(name):
            found[group_of(name)] += [(f"{name}:{line}", block) for line, block in blocks_of(name, tree.text(name))]
    return found


def hits(pattern, text):
    return len(PATTERNS[pattern].findall(text))


def measure(blocks):
    """{group: {pattern: [findings, words]}}"""
    figures = {}
    for group, found in blocks.items():
        words = sum(len(re.findall(r"[A-Za-z']+", text)) for _, text in found)
        figures[group] = {pattern: [sum(hits(pattern, text) for _, text in found), words] for pattern in PATTERNS}
    return figures


def rate(findings, words):
    return round(1000 * findings / max(words, 1), 2)


def is_worse(measured, entry):
    """More findings, and more per 1,000 words: deleting a clear comment makes nothing worse. The goal is always allowed."""
    findings, words = measured
    allowed = max(rate(entry["findings"], entry["words"]), entry["goal"])
    return findings > entry["findings"] and rate(findings, words) > allowed


def worst(found, patterns, number):
    """(findings, place, text) of the blocks with the most."""
    ranked = sorted(((sum(hits(pattern, text) for pattern in patterns), place, text) for place, text in found), reverse=True)
    return [block for block in ranked[:number] if block[0]]


def check(blocks, recorded):
    """Prints each figure that is worse, with blocks to rewrite; returns their number."""
    problems = 0
    for group, figures in measure(blocks).items():
        if not figures["nobody"][1]:
            print(f"check_english: {group}: no words found; see the lists in tools/gates/tree.py")
            problems += 1
        for pattern, measured in figures.items():
            entry = recorded[group][pattern]
            if is_worse(measured, entry):
                problems += 1
                print(f"check_english: {group}, {pattern}: {measured[0]} findings, {rate(*measured)} per 1,000 words; the "
                      f"ratchet allows {entry['findings']}, {rate(entry['findings'], entry['words'])}. The worst blocks:")
                show(worst(blocks[group], [pattern], 5))
    return problems


def update(blocks, recorded):
    """Records figures that improved. Never raises one."""
    for group, figures in measure(blocks).items():
        for pattern, (findings, words) in figures.items():
            entry = recorded[group][pattern]
            if rate(findings, words) < rate(entry["findings"], entry["words"]):
                entry.update(findings=findings, words=words)


def rows(blocks, recorded):
    for group, figures in measure(blocks).items():
        for pattern, measured in figures.items():
            entry = recorded[group][pattern]
            yield (f"{group}, {pattern}, per 1,000 words", rate(*measured), rate(entry["findings"], entry["words"]),
                   entry["goal"])


def show(found):
    for findings, place, text in found:
        print(f"  {place} ({findings}): {text[:300]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--worst", type=int, default=0, metavar="N")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--update", action="store_true")
    arguments = parser.parse_args()
    blocks, ratchets = all_blocks(Tree()), ratchet.load()
    recorded, problems = ratchets["english"], 0
    if arguments.update:
        update(blocks, recorded)
        ratchet.save(ratchets)
    if arguments.check or arguments.update:
        problems = check(blocks, recorded)
        print(f"check_english: {sum(map(len, blocks.values()))} blocks, {problems} problems")
    else:
        print(ratchet.table(list(rows(blocks, recorded)), ["figure", "now", "ratchet", "goal"]))
    show(worst([block for found in blocks.values() for block in found], PATTERNS, arguments.worst))
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
