"""tools/ratchet.json: for each figure the worst value that the checks accept, and the goal. Lower is better."""

import json

from gates.tree import ROOT

PATH = ROOT / "tools" / "ratchet.json"


def load(path=PATH):
    return json.loads(path.read_text(encoding="utf-8"))


def save(ratchet, path=PATH):
    path.write_text(json.dumps(ratchet, indent=2) + "\n", encoding="utf-8")


def limit(entry):
    """A figure that has reached its goal may move below the goal."""
    return entry["value"] if entry["goal"] is None else max(entry["value"], entry["goal"])


def worse(entries, measured):
    """(name, measured, limit) of each figure that is above its limit."""
    return [(name, value, limit(entries[name])) for name, value in measured.items() if value > limit(entries[name])]


def lower(entries, measured):
    """Lowers each recorded value to the measured one. Never raises a value."""
    for name, value in measured.items():
        entries[name]["value"] = min(entries[name]["value"], value)


def table(rows, columns):
    """Rows of text and numbers, aligned: the first column to the left."""
    texts = [columns] + [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(row[i]) for row in texts) for i in range(len(columns))]
    lines = ("  ".join([row[0].ljust(widths[0])] + [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])])
             for row in texts)
    return "\n".join(lines)
