#!/usr/bin/env python3
"""Doxygen's input filter: converts the plain `//` comments of a Tessera header to Doxygen's form.

The position of a comment decides its subject:

* directly above a declaration: that declaration, and its overloads that follow without a blank line or a comment of
  their own. Above a variable: also the variables that follow likewise;
* after a declaration, on its line and the next ones: that declaration;
* before a blank line: the enclosing class, or the file if there is none.

A paragraph indented by three blanks is code. Bodies of functions are not changed. The output has public names only,
without destructors, moves and deleted functions.
"""

import re
import sys

CODE_INDENT = "  "  # after the blank that follows the slashes


def escaped(line):
    """The text of a comment, in which only `code` is markup."""
    parts = line.split("`")
    parts[::2] = [re.sub(r"([\\@<>#%*|])", r"\\\1", part) for part in parts[::2]]
    return "`".join(parts)


def marked_up(lines):
    """The lines of a comment with code between @code and @endcode."""
    out, code = [], False
    for line, before in zip(lines, [""] + lines):
        begins = line.startswith(CODE_INDENT) and not before.strip()
        if begins and not code:
            out.append("@code{.cpp}")
            code = True
        elif code and line.strip() and not line.startswith(CODE_INDENT):
            out.append("@endcode")
            code = False
        out.append(line if code else escaped(line))
    if code:
        out.append("@endcode")
    return out


def without_templates(text):
    """The text without `template <...>`, whose parameters could be taken for classes."""
    while (found := re.search(r"\btemplate\s*<", text)) is not None:
        depth, end = 1, found.end()
        while end < len(text) and depth > 0:
            depth += {"<": 1, ">": -1}.get(text[end], 0)
            end += 1
        text = text[: found.start()] + text[end:]
    return text.strip()


def function_name(code):
    """The function that a declaration's first line declares, or ""."""
    found = re.match(r"[^=({]*?([\w~]+)\(", code)
    return found[1] if found else ""


SCOPE = re.compile(r"^(?:export\s+)?(namespace|class|struct|enum class|enum)\s+(?:\[\[\w+\]\]\s*)?([\w:]*)")
COMMENT = re.compile(r"^(\s*)// ?(.*)$")


class Filter:
    def __init__(self):
        self.scopes = []  # (kind, name) of open braces; kind "body" is a function or a value
        self.statement = ""  # the text of the current declaration so far
        self.comment = []  # the lines of the comment above the next line
        self.indent = ""
        self.shared = []  # the comment that declarations of this paragraph share
        self.sharing = ""  # the name of the function that these overload; "" for variables
        self.out = []

    def declares(self):
        return all(kind != "body" for kind, _ in self.scopes)

    def enclosing_class(self):
        names = [name for kind, name in self.scopes if kind != "namespace"]
        return "::".join(["tessera", *names]) if names else None

    def put(self, lines, indent=""):
        self.out += [f"{indent}/// {line}".rstrip() for line in lines]

    def flush_detached(self):
        if not self.comment:
            return
        about = self.enclosing_class()
        self.put([f"@class {about}" if about else "@file", *marked_up(self.comment)])
        self.out.append("")
        self.comment = []

    def read_code(self, line):
        """Tracks the braces of a line without its comment."""
        for part in re.findall(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'|[{};]|[^{};"\']+', line):
            if part == "{":
                found = SCOPE.match(without_templates(self.statement)) if "(" not in self.statement else None
                found = found or SCOPE.match(without_templates(self.statement.partition(":")[0]))
                self.scopes.append((found[1], found[2]) if found else ("body", ""))
                self.statement = ""
            elif part == "}":
                if self.scopes:
                    self.scopes.pop()
                self.statement = ""
            elif part == ";":
                self.statement = ""
            else:
                self.statement += " " + part
        self.statement = self.statement.strip()
        if re.fullmatch(r"(public|protected|private)\s*:", self.statement) or self.statement.startswith("#"):
            self.statement = ""

    def line(self, line):
        found = COMMENT.match(line)
        if found and self.declares() and not self.statement:
            self.indent = found[1]
            self.comment.append(found[2])
            return
        if not line.strip():
            self.flush_detached()
            self.shared = []
            self.out.append(line)
            return
        code, slashes, trailing = line.partition("//") if '"' not in line.partition("//")[0] else (line, "", "")
        starts = self.declares() and not self.statement
        hidden = re.search(r"=\s*delete;|^\s*~\w+\(\)|^\s*virtual ~|^\s*[\w&= ]+\(\w+&&\) noexcept", code) and not self.comment and not trailing
        access = re.fullmatch(r"\s*(public|protected|private)\s*:\s*", code)
        if access:
            self.shared = []
            line = line.replace("protected", "private")  # protected members are for backends and wrappers, not for programs
        elif starts and code.lstrip().startswith(("namespace", "#")):
            self.flush_detached()
        elif starts:
            if self.comment:
                self.shared, self.sharing = marked_up(self.comment), function_name(code)
                self.put(self.shared, self.indent)
            elif self.shared and not trailing and code.strip()[0] != "}" and function_name(code) == self.sharing:
                self.put(self.shared, self.indent)
        self.comment = []
        declared_here = self.declares()
        self.read_code(code)
        if hidden and declared_here:
            self.out.append("")
        elif trailing and code.strip() != "}" and declared_here and self.declares() and re.search(r"[;,}]\s*$", code):
            self.out.append(f"{code}///< {escaped(trailing.strip())}")
        else:
            self.out.append(line)


def main():
    filter = Filter()
    with open(sys.argv[1], encoding="utf-8") as file:
        for line in file.read().split("\n"):
            filter.line(line)
    filter.flush_detached()
    sys.stdout.write("/// @file\n\n" + "\n".join(filter.out) + "\n")


if __name__ == "__main__":
    main()
