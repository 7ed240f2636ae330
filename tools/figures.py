#!/usr/bin/env python3
"""Prints one table of the figures that the project watches, with the ratchet and the goal of each: `make figures`."""

import check_english
import check_structure
from gates import commits, ratchet
from gates.tree import ROOT, Tree


def rows_of_commits(recorded):
    subjects = commits.subjects_since(ROOT, recorded["since"])
    if subjects is None:
        print(f"The history does not reach back to {recorded['since'][:9]} (a shallow clone?): no figures of commits.\n")
        return []
    return [
        (f"commits since {recorded['since'][:9]}", len(subjects), None, None),
        ("imperative subjects, %", commits.percentage(subjects, commits.is_imperative), None, recorded["imperative"]),
        (f"subjects above {commits.LONGEST} characters, %", commits.percentage(subjects, commits.is_too_long), None,
         recorded["too_long"]),
    ]


def main():
    tree, recorded = Tree(), ratchet.load()
    rows = check_structure.rows(tree, recorded)
    rows += check_english.rows(check_english.all_blocks(tree), recorded["english"])
    rows += rows_of_commits(recorded["commits"])
    print(ratchet.table(rows, ["figure", "now", "ratchet", "goal"]))


if __name__ == "__main__":
    main()
