#!/usr/bin/env python3
"""Measures the structure of the tree: folders, targets, public headers, size of classes, process-wide calls.

    tools/check_structure.py             prints the figures, and the classes above their goals
    tools/check_structure.py --check     fails if a figure is worse than in tools/ratchet.json
    tools/check_structure.py --update    lowers the figures in tools/ratchet.json to the measured ones
"""

import argparse
import re
import sys

from gates import cpp, ratchet
from gates.tree import Tree

UMBRELLA = "include/tessera/tessera.h"
INCLUDE_FOLDERS = ["", "include/"]  # in which #include looks, relative to the root
INSTALL = "tools/cmake/TesseraInstall.cmake"
INSTALLED_FOLDER = re.compile(r"install\(DIRECTORY (\S+) DESTINATION \$\{CMAKE_INSTALL_INCLUDEDIR\}")
INCLUDE = re.compile(r'^\s*#\s*include\s*(?:"([^"]+)"|<(tessera/[^>]+)>)', re.MULTILINE)
TARGET = re.compile(r"^\s*(?:tessera_add_library\(\s*|add_library\(\s*tessera_)(\w+)", re.MULTILINE)
RECURSIVE_MUTEX = re.compile(r"\brecursive_(?:timed_)?mutex\s+\w+\s*[;={]")
ENGINE = re.compile(r"\bset_default_engine_stub\s*\(")

# Calls that change the whole process, not only Tessera's objects.
PROCESS_CALLS = {
    "signal": r"\bsigaction\s*\(|(?<![\w.>])signal\s*\(",
    "terminate handler": r"\bset_terminate\s*\(|\bset_new_handler\s*\(",
    "prctl": r"\bprctl\s*\(",
    "setrlimit": r"\bsetrlimit\s*\(",
    "exit handler": r"\b(?:atexit|at_quick_exit|on_exit)\s*\(",
    "fork handler": r"\bpthread_atfork\s*\(",
    "CPU allocator": r"\bSetCPUAllocator\s*\(|\bSetAllocator\s*\(",
    "environment": r"\b(?:setenv|putenv|unsetenv|clearenv)\s*\(",
    "thread count": r"\bset_num_(?:interop_)?threads\s*\(|\bomp_set_num_threads\s*\(",
    "default dtype": r"\bset_default_(?:dtype|tensor_type)\s*\(",
    "dispatcher": r"\bTORCH_LIBRARY(?:_IMPL|_FRAGMENT)?\s*\(|\bRegisterOperators\s*\(|\bregister(?:Fallback|Impl|Library)\s*\(",
    "pickler": r"\bGetBackendMetaSerialization\s*\(|\bTensorBackendMetaRegistry\s*\(",
    "autograd engine": ENGINE.pattern,
}


def resolve(tree, includer, target):
    """The file of the tree that an #include names, or None for a header of another project."""
    candidates = [folder + target for folder in [includer.rpartition("/")[0] + "/", *INCLUDE_FOLDERS]]
    return next((name for name in candidates if name in tree.names), None)


def headers_reached(tree):
    """tessera.h, first, and the headers that it includes, at any depth."""
    ahead = [UMBRELLA] if UMBRELLA in tree.names else []
    reached = {}
    while ahead:
        name = ahead.pop()
        if name not in reached:
            reached[name] = True
            found = [resolve(tree, name, quoted or angled) for quoted, angled in INCLUDE.findall(tree.text(name))]
            ahead += [other for other in found if other]
    return list(reached)


def types_in(tree, name):
    try:
        return cpp.types_of(tree.text(name))
    except ValueError as error:
        raise SystemExit(f"check_structure: {name}: {error}") from error


def public_types(tree):
    """Types that the reached headers define directly in namespace tessera."""
    return sorted({found.name for name in headers_reached(tree) for found in types_in(tree, name)
                   if found.namespace == "tessera" and "::" not in found.name})


def headers_installed(tree):
    """Headers under the folders that the install rules name. A rule with a variable stands for all library folders."""
    folders = INSTALLED_FOLDER.findall(tree.text(INSTALL)) if INSTALL in tree.names else []
    return [name for name in tree.library(".h")
            if any(folder.startswith("${") or name.startswith(folder.rstrip("/") + "/") for folder in folders)]


def targets(tree):
    files = ["CMakeLists.txt"] + [name for name in tree.library(".txt") if name.endswith("/CMakeLists.txt")]
    return sorted({target for name in files if name in tree.names
                   for target in TARGET.findall(tree.text(name))})


def core_types(tree):
    return [found for name in tree.core(".h", ".cpp") for found in types_in(tree, name) if found.kind != "enum"]


def friends_of(tree, name):
    return sum(found.friends for file in tree.library(".h") for found in types_in(tree, file) if found.name == name)


def occurrences(tree, pattern):
    """file:line of each match in the library's code, comments and strings left out."""
    found = []
    for name in tree.library(".h", ".cpp", ".cu"):
        code = cpp.without_comments(tree.text(name))
        found += [f"{name}:{code.count(chr(10), 0, match.start()) + 1}" for match in re.finditer(pattern, code)]
    return found


def process_calls(tree):
    """{call: {file: count}}"""
    calls = {}
    for call, pattern in PROCESS_CALLS.items():
        for place in occurrences(tree, pattern):
            files = calls.setdefault(call, {})
            file = place.rpartition(":")[0]
            files[file] = files.get(file, 0) + 1
    return calls


def reading_list(tree, names):
    """The files of the list, wherever they have moved to, and the names that the tree has no longer."""
    found = {name: tree.find(name) for name in names}
    return [file for file in found.values() if file], [name for name, file in found.items() if not file]


def measure(tree, recorded):
    types = core_types(tree)
    path, _ = reading_list(tree, recorded["core_path"])
    return {
        "folders at the top": len(tree.folders_at_the_top()),
        "source files directly in a folder, at most": max(tree.source_files_by_folder().values(), default=0),
        "CMake library targets": len(targets(tree)),
        "headers reached from tessera.h": len(headers_reached(tree)[1:]),
        "types in tessera::": len(public_types(tree)),
        "headers installed": len(headers_installed(tree)),
        "library lines": sum(tree.lines(name) for name in tree.library(".h", ".cpp", ".cu")),
        "FSDP core path, files": len(path),
        "FSDP core path, lines": sum(tree.lines(name) for name in path),
        "data members of a core class, at most": max((len(found.data) for found in types), default=0),
        "methods of a core class, at most": max((len(found.methods) for found in types), default=0),
        "core classes above a goal": len(large_classes(types, recorded)),
        "recursive mutexes": len(occurrences(tree, RECURSIVE_MUTEX)),
        "friends of Communicator": friends_of(tree, "Communicator"),
        "replaced autograd engines": len(occurrences(tree, ENGINE)),
        "process-wide calls": sum(sum(files.values()) for files in process_calls(tree).values()),
    }


def large_classes(types, recorded):
    goals = recorded["structure"]
    members, methods = (goals[name]["goal"] for name in ("data members of a core class, at most",
                                                        "methods of a core class, at most"))
    return [found for found in types if len(found.data) > members or len(found.methods) > methods]


def missing(tree, measured):
    """Figures that count nothing because the tree is not laid out as this file's lists say."""
    present = ("folders at the top", "CMake library targets", "headers reached from tessera.h", "types in tessera::",
               "headers installed", "library lines", "FSDP core path, files", "methods of a core class, at most")
    return [f"{name}: found none; the lists in tools/gates/tree.py and tools/check_structure.py need the new folders"
            for name in present if not measured[name]]


def problems_of_calls(tree, allowed):
    """Process-wide calls in files, or in numbers, that the ratchet does not have."""
    for call, files in process_calls(tree).items():
        for file, count in files.items():
            limit = allowed.get(call, {}).get(file, 0)
            if count > limit:
                lines = [place for place in occurrences(tree, PROCESS_CALLS[call]) if place.startswith(file + ":")]
                yield f"process-wide calls, {call}: {count} in {', '.join(lines)}; the ratchet allows {limit}"


def check(tree, recorded):
    measured = measure(tree, recorded)
    problems = missing(tree, measured)
    problems += [f"{name}: {value}, at most {limit} allowed" for name, value, limit in
                 ratchet.worse(recorded["structure"], measured)]
    problems += problems_of_calls(tree, recorded["process_calls"])
    _, gone = reading_list(tree, recorded["core_path"])
    problems += [f"core_path: the tree has no {name}, or several; name the file that replaces it" for name in gone]
    return problems


def update(tree, recorded):
    """Lowers figures; records moves. Returns the changes that it did not record because they would raise a figure."""
    measured = measure(tree, recorded)
    ratchet.lower(recorded["structure"], measured)
    recorded["core_path"] = [tree.find(name) or name for name in recorded["core_path"]]
    allowed, now = recorded["process_calls"], process_calls(tree)
    for call in sorted(set(allowed) | set(now)):
        files = now.get(call, {})
        if sum(files.values()) <= sum(allowed.get(call, {}).values()):
            allowed[call] = files
    recorded["process_calls"] = {call: files for call, files in allowed.items() if files}
    return check(tree, recorded)


def rows(tree, recorded):
    measured = measure(tree, recorded)
    entries = recorded["structure"]
    return [(name, value, entries[name]["value"], entries[name]["goal"]) for name, value in measured.items()]


def show(tree, recorded):
    print(ratchet.table(rows(tree, recorded), ["figure", "now", "ratchet", "goal"]))
    folder, count = max(tree.source_files_by_folder().items(), key=lambda item: item[1])
    print(f"\nmost source files: {folder} ({count})\ncore classes above a goal (data members, methods):")
    for found in sorted(large_classes(core_types(tree), recorded), key=lambda found: -len(found.data)):
        print(f"  {found.name} ({len(found.data)}, {len(found.methods)})")
    print("process-wide calls:")
    for call, pattern in PROCESS_CALLS.items():
        for place in occurrences(tree, pattern):
            print(f"  {call}: {place}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--update", action="store_true")
    arguments = parser.parse_args()
    tree, recorded = Tree(), ratchet.load()
    if not arguments.check and not arguments.update:
        show(tree, recorded)
        return 0
    problems = (update if arguments.update else check)(tree, recorded)
    if arguments.update:
        ratchet.save(recorded)
    print(*[f"check_structure: {problem}" for problem in problems], sep="\n", end="\n" if problems else "")
    print(f"check_structure: {len(tree.names)} files, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
