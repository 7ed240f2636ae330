#!/usr/bin/env python3
"""Tests of the ratchets (tools/check_english.py, tools/check_structure.py) and of the commit-msg hook, on small trees."""

import contextlib
import copy
import io
import json
import pathlib
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.dont_write_bytecode = True
sys.path.insert(0, str(ROOT / "tools"))
import check_english  # noqa: E402
import check_structure  # noqa: E402
from gates import commits, cpp, ratchet  # noqa: E402
from gates.tree import Tree  # noqa: E402

COMMUNICATOR = """
namespace tessera {
class Communicator {
 public:
  Communicator(int rank) : rank_{rank}, sizes_({1, 2}) {}
  virtual ~Communicator() = default;
  Communicator(const Communicator&) = delete;
  Communicator& operator=(const Communicator&) = delete;
  [[nodiscard]] int rank() const noexcept { return rank_; }
  void reduce(std::vector<int> counts = {}, std::string_view what = {});
  template <class T> T take() { if (true) { return T{}; } }
  bool operator==(const Communicator& other) const;

 private:
  friend class GlooOperation;
  friend void begin(Communicator&);
  static constexpr int kMost = 3;
  static int count_;
  using Done = std::function<void(int)>;
  enum Stage : int { kIdle, kBusy };
  struct Part {
    int first = 0, last = 1;
    std::map<int, std::pair<int, int>> places;  // int not_a_member;
  };
  int rank_ GUARDED_BY(mutex_);
  std::function<void(int)> done_ = [](int x) { use(x); };
  void (*handler_)(int) = nullptr;
  std::vector<int> sizes_{1, 2};
  std::mutex mutex_;
};
enum class Op { kSum };
struct Forward;
struct Communicator::State {
  int a, b;
};
template <> struct Traits<int> {
  int value;
};
namespace internal {
struct Hidden {};
}
}  // namespace tessera
namespace elsewhere {
struct Other {};
}
"""
CALLS = """
// sigaction(1) in a comment, and std::set_terminate("...") in a literal, are none.
const char* text = "std::set_terminate(x)";
void f() {
  struct sigaction action {};
  sigaction(SIGPIPE, nullptr, &action);
  auto separated = 1'000'000;
  torch::autograd::set_default_engine_stub(&engine);
}
struct Lock {
  std::recursive_mutex mutex_;
  std::recursive_mutex& borrowed_;
};
"""
FILES = {
    "CMakeLists.txt": "add_library(tessera INTERFACE)\nadd_library(tessera_zero INTERFACE)\n",
    "include/tessera/tessera.h": '#include <tessera/fsdp.h>\n#include <vector>\n#include "core/comm/communicator.h"\n',
    "include/tessera/fsdp.h": '#include "tessera.h"\nnamespace tessera {\nclass Fsdp {};\n}\n',
    "core/CMakeLists.txt": "tessera_add_library(comm\n  SOURCES a.cpp)\nadd_library(tessera::comm ALIAS tessera_comm)\n",
    "core/comm/communicator.h": COMMUNICATOR,
    "core/comm/calls.cpp": CALLS,
    "core/comm/unreached.h": "struct Unreached {};\n",
    "tools/cmake/TesseraInstall.cmake": "install(DIRECTORY include/tessera DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})\n",
    "tests/a_test.cpp": "// A test.\n",
    ".ci/run": "#!/bin/sh\n",
}
RECORDED = {
    "structure": {name: {"value": 100, "goal": 12} for name in [
        "folders at the top", "source files directly in a folder, at most", "CMake library targets",
        "headers reached from tessera.h", "types in tessera::", "headers installed", "library lines",
        "FSDP core path, files", "FSDP core path, lines", "data members of a core class, at most",
        "methods of a core class, at most", "core classes above a goal", "recursive mutexes", "friends of Communicator",
        "replaced autograd engines", "process-wide calls"]},
    "process_calls": {"signal": {"core/comm/calls.cpp": 1}, "autograd engine": {"core/comm/calls.cpp": 1}},
    "core_path": ["fsdp/communicator.h"],
}


def written(folder, files):
    for name, text in files.items():
        path = pathlib.Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return Tree(folder)


class WithFolder(unittest.TestCase):
    def setUp(self):
        made = tempfile.TemporaryDirectory()
        self.addCleanup(made.cleanup)
        self.folder = made.name


class Declarations(unittest.TestCase):
    def test_members_and_methods_of_a_class(self):
        found = {each.name: each for each in cpp.types_of(COMMUNICATOR)}
        communicator = found["Communicator"]
        self.assertEqual(communicator.data, ["rank_", "done_", "(*)", "sizes_", "mutex_"])
        self.assertEqual(communicator.methods, ["rank", "reduce", "take", "operator_"])
        self.assertEqual(communicator.friends, 2)
        self.assertEqual(found["Communicator::Part"].data, ["first", "last", "places"])
        self.assertEqual(found["Communicator::State"].data, ["a", "b"])
        self.assertEqual(found["Hidden"].namespace, "tessera::internal")
        self.assertNotIn("Forward", found)
        self.assertNotIn("Traits", found)

    def test_brackets_that_do_not_match(self):
        for text in ("void f() {", "namespace tessera {", "class A {", "class A {}; }"):
            with self.assertRaises(ValueError, msg=text):
                cpp.types_of(text)


class Structure(WithFolder):
    def test_figures_of_a_tree(self):
        measured = check_structure.measure(written(self.folder, FILES), RECORDED)
        lines = sum(text.count("\n") for name, text in FILES.items() if name.endswith((".h", ".cpp")) and "tests" not in name)
        self.assertEqual(measured, {
            "folders at the top": 5, "source files directly in a folder, at most": 3, "CMake library targets": 2,
            "headers reached from tessera.h": 2, "types in tessera::": 3, "headers installed": 2, "library lines": lines,
            "FSDP core path, files": 1, "FSDP core path, lines": COMMUNICATOR.count("\n"),
            "data members of a core class, at most": 5, "methods of a core class, at most": 4,
            "core classes above a goal": 0, "recursive mutexes": 1, "friends of Communicator": 2,
            "replaced autograd engines": 1, "process-wide calls": 2})

    def test_rules_for_all_folders_install_all_headers(self):
        rule = "install(DIRECTORY ${_folder} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR} COMPONENT a)\n"
        tree = written(self.folder, {**FILES, "tools/cmake/TesseraInstall.cmake": rule})
        self.assertEqual(len(check_structure.headers_installed(tree)), 4)

    def test_check_names_each_figure_that_is_worse(self):
        tree, recorded = written(self.folder, FILES), copy.deepcopy(RECORDED)
        self.assertEqual(check_structure.check(tree, recorded), [])
        recorded["structure"]["recursive mutexes"] = {"value": 0, "goal": 0}
        recorded["process_calls"].pop("signal")
        recorded["core_path"].append("fsdp/gone.h")
        problems = check_structure.check(tree, recorded)
        self.assertEqual(len(problems), 3, problems)
        self.assertIn("recursive mutexes: 1, at most 0", problems[0])
        self.assertIn("core/comm/calls.cpp:6", problems[1])
        self.assertIn("fsdp/gone.h", problems[2])

    def test_check_fails_where_it_finds_nothing_to_count(self):
        problems = check_structure.check(written(self.folder, {"other/a.txt": ""}), RECORDED)
        self.assertIn("headers reached from tessera.h: found none", "\n".join(problems))

    def test_update_lowers_and_follows_moves_but_never_raises(self):
        tree, recorded = written(self.folder, FILES), copy.deepcopy(RECORDED)
        recorded["structure"]["recursive mutexes"] = {"value": 0, "goal": 0}
        recorded["process_calls"] = {"signal": {"comm/calls.cpp": 1}}
        problems = check_structure.update(tree, recorded)
        self.assertEqual(recorded["structure"]["folders at the top"]["value"], 5)
        self.assertEqual(recorded["structure"]["recursive mutexes"]["value"], 0)
        self.assertEqual(recorded["process_calls"], {"signal": {"core/comm/calls.cpp": 1}})
        self.assertEqual(recorded["core_path"], ["core/comm/communicator.h"])
        self.assertEqual(len(problems), 2, problems)  # the mutex, and an engine that was not allowed

    def test_a_figure_below_its_goal_may_rise_to_it(self):
        entries = {"files": {"value": 3, "goal": 5}, "friends": {"value": 3, "goal": 0}}
        self.assertEqual(ratchet.worse(entries, {"files": 5, "friends": 3}), [])
        self.assertEqual(ratchet.worse(entries, {"files": 6, "friends": 4}), [("files", 6, 5), ("friends", 4, 3)])


ENGLISH = {
    "core/a.h": "// Adds what is given.\n// Nobody waits.\nint a;  // comes later\n"
                'const char* text = "// what is quoted";\n/* who waits */\n',
    "tests/b.py": '"""Returns what it was."""\ntext = "a # nobody"  # for what follows\n# See https://nobody.example\n',
    "docs/c.md": "It lies here.\n\n```\nwhat is code\n```\n\n| somebody |\n| Everybody |\n",
}


class English(WithFolder):
    def measured(self):
        return check_english.measure(check_english.all_blocks(written(self.folder, ENGLISH)))

    def recorded(self):
        return {group: {name: {"findings": findings, "words": words, "goal": 0}
                        for name, (findings, words) in figures.items()} for group, figures in self.measured().items()}

    def failures(self, recorded):
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            count = check_english.check(check_english.all_blocks(Tree(self.folder)), recorded)
        return count, printed.getvalue()

    def test_findings_in_comments_docstrings_and_pages(self):
        self.assertEqual(self.measured(), {
            "library": {"noun clause": [2, 10], "nobody": [1, 10], "vague verb": [1, 10]},
            "tests and tools": {"noun clause": [2, 7], "nobody": [0, 7], "vague verb": [0, 7]},
            "docs": {"noun clause": [0, 5], "nobody": [2, 5], "vague verb": [1, 5]}})

    def test_check_shows_the_blocks_of_a_figure_that_is_worse(self):
        recorded = self.recorded()
        self.assertEqual(self.failures(recorded)[0], 0)
        recorded["library"]["noun clause"]["findings"] = 1
        count, printed = self.failures(recorded)
        self.assertEqual(count, 1)
        self.assertIn("core/a.h:1 (1): Adds what is given. Nobody waits.", printed)

    def test_deleting_clear_words_makes_nothing_worse(self):
        recorded = self.recorded()
        recorded["docs"]["vague verb"]["words"] = 500
        self.assertEqual(self.failures(recorded)[0], 0)

    def test_a_figure_may_rise_to_its_goal(self):
        recorded = self.recorded()
        recorded["docs"]["vague verb"].update(findings=0, words=2)
        self.assertEqual(self.failures(recorded)[0], 1)
        recorded["docs"]["vague verb"].update(goal=200)  # per 1,000 words, of 1 in 5
        self.assertEqual(self.failures(recorded)[0], 0)

    def test_update_never_raises_a_figure(self):
        recorded = self.recorded()
        recorded["library"]["nobody"].update(findings=0)
        recorded["docs"]["nobody"].update(findings=5)
        check_english.update(check_english.all_blocks(Tree(self.folder)), recorded)
        self.assertEqual(recorded["library"]["nobody"]["findings"], 0)
        self.assertEqual(recorded["docs"]["nobody"]["findings"], 2)


class Commits(WithFolder):
    def hook(self, message):
        path = pathlib.Path(self.folder) / "message"
        path.write_text(message, encoding="utf-8")
        return subprocess.run([ROOT / "tools/git-hooks/commit-msg", path], capture_output=True, text=True)

    def test_the_hook_accepts(self):
        for message in ("comm: let a waiting rank copy any unclaimed message\n\nThe owner may be busy.\n",
                        "fsdp, sdp: use one enum for the state of .grad\n# A comment of git's; of any length" + "." * 90,
                        "docs: fix a link\n# ------------------------ >8 ------------------------\ndiff\n",
                        "Merge branch 'gates'\n", "fixup! docs: fix a link\n"):
            self.assertEqual(self.hook(message).returncode, 0, message)

    def test_the_hook_refuses_and_says_why(self):
        for message, reason in (("let a rank copy messages", "scope: verb"),
                                ("comm: who waits copies for all", "'who' is no imperative verb"),
                                ("comm: copies messages", "'copies' is no imperative verb"),
                                ("comm: copy " + "messages " * 9, "The limit is 72"),
                                ("comm: copy messages; rename tags", "more than one topic"),
                                ("comm: copy messages.", "full stop"),
                                ("comm: copy messages\nand tags", "second line"),
                                ("# only a comment\n", "scope: verb")):
            refused = self.hook(message)
            self.assertEqual(refused.returncode, 1, message)
            self.assertIn(reason, refused.stderr)

    def test_figures_of_a_history(self):
        def git(*arguments):
            return subprocess.run(["git", "-C", self.folder, "-c", "user.name=a", "-c", "user.email=a@b", *arguments],
                                  check=True, capture_output=True, text=True).stdout.strip()
        git("init", "--quiet")
        git("commit", "--quiet", "--allow-empty", "-m", "before")
        base = git("rev-parse", "HEAD")
        for subject in ("comm: add a transport", "comm: what was added", "docs: " + "word " * 20, "fsdp: rename units"):
            git("commit", "--quiet", "--allow-empty", "-m", subject)
        subjects = commits.subjects_since(self.folder, base)
        self.assertEqual(len(subjects), 4)
        self.assertEqual(commits.percentage(subjects, commits.is_imperative), 50)
        self.assertEqual(commits.percentage(subjects, commits.is_too_long), 25)
        self.assertIsNone(commits.subjects_since(self.folder, "0" * 40))
        self.assertIsNone(commits.percentage([], commits.is_imperative))


class Presets(unittest.TestCase):
    def test_each_exports_compile_commands(self):
        presets = {each["name"]: each for each in json.loads((ROOT / "CMakePresets.json").read_text())["configurePresets"]}
        self.assertGreater(len(presets), 1)
        for name in presets:
            values, ahead = {}, [name]
            while ahead:
                preset = presets[ahead.pop()]
                values = {**preset.get("cacheVariables", {}), **values}
                inherited = preset.get("inherits", [])
                ahead += [inherited] if isinstance(inherited, str) else inherited
            self.assertEqual(values.get("CMAKE_EXPORT_COMPILE_COMMANDS"), "ON", name)


if __name__ == "__main__":
    unittest.main()
