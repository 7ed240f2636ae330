"""A reader of C++ declarations that needs no compiler: the types of a file, with their members.

It reads tokens and matches brackets. Function bodies and initializers are skipped. Preprocessor lines are dropped, so
both branches of an #if are read: a branch must keep its brackets balanced.
"""

import functools
import re
from dataclasses import dataclass, field

NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)
TOKEN = re.compile(r"\d[\w.']*|\w+|::|->|\S")
OPERATOR = re.compile(r"\boperator\s*(?:\(\s*\)|\[\s*\]|[^\w\s(]+)")
CLOSING = {"(": ")", "{": "}", "[": "]"}
NOT_MEMBERS = {"using", "typedef", "friend", "static_assert", "template"}


@dataclass
class Type:
    name: str  # with the names of the classes around it: "Watchdog::Options"
    namespace: str
    kind: str  # class, struct, union or enum
    data: list = field(default_factory=list)
    methods: list = field(default_factory=list)
    friends: int = 0


@functools.lru_cache(maxsize=None)
def without_comments(text):
    """The code, line by line: comments are blanked, string literals become ""."""
    def blank(found):
        return ('""' if found[0][0] in "R\"'" else " ") + "\n" * found[0].count("\n")
    return NOT_CODE.sub(blank, text)


def tokens_of(text):
    code = re.sub(r"(?m)^[ \t]*#(?:[^\n\\]|\\.|\\\n)*", "", without_comments(text))
    return TOKEN.findall(OPERATOR.sub("operator_", code))


def require_pairs(tokens):
    """Throws ValueError if a brace has no partner: everything after it would be read at the wrong depth."""
    depth = 0
    for token in tokens:
        depth += {"{": 1, "}": -1}.get(token, 0)
        if depth < 0:
            break
    if depth != 0:
        raise ValueError("a brace has no partner")


def skip(tokens, at):
    """The index after the bracket that closes the one at `at`."""
    opening, closing, depth = tokens[at], CLOSING[tokens[at]], 0
    while at < len(tokens):
        depth += {opening: 1, closing: -1}.get(tokens[at], 0)
        at += 1
        if depth == 0:
            return at
    raise ValueError(f"a '{opening}' is not closed")


def without_templates(words):
    """Without template<...> in front."""
    while words[:1] == ["template"]:
        depth, at = 0, 1
        while at < len(words):
            depth += {"<": 1, ">": -1}.get(words[at], 0)
            at += 1
            if depth == 0:
                break
        words = words[at:]
    return words


def head_of_type(words):
    """(kind, name) if a brace after these words opens the definition of a type. No name: an unnamed type."""
    words = [word for word in without_templates(words) if word not in ("typedef", "static", "const", "inline")]
    if not words or words[0] not in ("class", "struct", "union", "enum"):
        return None
    name = []
    for word in words[1:]:
        if word in (":", "final", "<"):
            name += ["<"] if word == "<" else []  # a specialization
            break
        # An attribute or a macro before the name is replaced by the word after it.
        if word not in ("class", "struct", "()"):
            name = name + [word] if word == "::" or name[-1:] == ["::"] else [word]
    return words[0], "".join(name)


class Reader:
    def __init__(self, text):
        self.tokens = tokens_of(text)
        require_pairs(self.tokens)
        self.at = 0
        self.types = []

    def read(self):
        self.read_scope([], None)
        return self.types

    def read_scope(self, namespaces, owner):
        """Declarations up to the closing brace of a namespace, of a class (the owner), or to the end."""
        words = []
        while self.at < len(self.tokens):
            token = self.tokens[self.at]
            self.at += 1
            if token == "}":
                return
            if token == ";":
                self.end_declaration(words, owner)
                words = []
            elif token == ":" and words in (["public"], ["private"], ["protected"]):
                words = []
            elif token == "[":  # an attribute, the captures of a lambda or the size of an array
                self.at = skip(self.tokens, self.at - 1)
            elif token == "(":
                words.append("(*)" if self.tokens[self.at] == "*" else "()")
                self.at = skip(self.tokens, self.at - 1)
            elif token == "{":
                words = self.open_brace(words, namespaces, owner)
            else:
                words.append(token)

    def open_brace(self, words, namespaces, owner):
        """Reads the block after a brace; returns the words of the declaration so far, if it continues after the block."""
        head = head_of_type(words)
        if words[:1] == ["namespace"] or words[:2] == ["inline", "namespace"]:
            inner = [word for word in words if word not in ("namespace", "inline", "::")]
            self.read_scope(namespaces + (inner or ["(unnamed)"]), None)
        elif words[:1] == ["extern"] and "()" not in words and head is None:
            self.read_scope(namespaces, None)
        elif head is not None and "=" not in words:
            return self.read_type(head, namespaces, owner)
        else:
            self.at = skip(self.tokens, self.at - 1)
            if owner and (not is_function(words) or is_initializer_of_constructor(words)):
                return words + ["{}"]
            self.end_declaration(words, owner)
        return []

    def read_type(self, head, namespaces, owner):
        kind, name = head
        full = f"{owner.name}::{name or '(unnamed)'}" if owner else name
        found = Type(full, "::".join(namespaces), kind)
        if name and not name.endswith("<"):
            self.types.append(found)
        if kind == "enum":
            self.at = skip(self.tokens, self.at - 1)
        else:
            self.read_scope(namespaces, found)
        return ["(type)"]  # before a declarator, as in `struct {...} member_;`

    @staticmethod
    def end_declaration(words, owner):
        words = without_templates(without_annotations(words))
        if owner is None or not words:
            return
        if words[0] == "friend":
            owner.friends += 1
        elif is_function(words):
            add_method(words, owner)
        elif words[0] not in NOT_MEMBERS and "static" not in words and not is_forward(words):
            owner.data += declared_names(words)


def without_annotations(words):
    """Without macros, as GUARDED_BY(mutex_) after the name of a member."""
    kept = []
    for word in words:
        if word == "()" and kept and re.fullmatch(r"[A-Z][A-Z0-9]*_[A-Z0-9_]*", kept[-1]):
            kept.pop()
        else:
            kept.append(word)
    return kept


def outside_angles(words):
    """The words up to an initializer, outside template arguments."""
    depth = 0
    for word in words:
        if word == "=" and depth == 0:
            return
        if word == "<":
            depth += 1
        elif word == ">":
            depth -= 1
        elif depth == 0:
            yield word


def is_function(words):
    declaration = list(outside_angles(without_annotations(without_templates(words))))
    return "()" in declaration and "(*)" not in declaration  # (*): a pointer to a function


def is_initializer_of_constructor(words):
    """Whether a brace after these words initializes a member: `Name() : member_{1} {}`."""
    return ":" in words and words.index(":") > words.index("()") and (words[-1] == ">" or re.match(r"\w", words[-1]) is not None)


def is_forward(words):
    return words[0] in ("class", "struct", "union", "enum") and len([w for w in words if re.match(r"\w", w)]) <= 2 or \
        words[:2] in (["enum", "class"], ["enum", "struct"])


def add_method(words, owner):
    """Does not count constructors, destructors, and defaulted or deleted functions."""
    position = words.index("()")
    name = words[position - 1]
    own = owner.name.split("::")[-1]
    if name != own and "~" not in words[:position] and words[-1] not in ("default", "delete"):
        owner.methods.append(name)


def declared_names(words):
    """One name for each declarator of a data member."""
    if words == ["(type)"]:
        return []
    names, last = [], ""
    for word in [*outside_angles_with_commas(words), ","]:
        if word == ",":
            names += [last] if last else []
            last = ""
        elif re.match(r"[A-Za-z_]\w*$|\(\*\)$", word):
            last = word
    return names


def outside_angles_with_commas(words):
    """As outside_angles(), past initializers: `int a = 1, b = 2` has two names."""
    depth, in_value = 0, False
    for word in words:
        if word == "<":
            depth += 1
        elif word == ">":
            depth -= 1
        elif depth <= 0:
            if word == ",":
                in_value = False
                yield word
            elif word in ("=", ":"):
                in_value = True
            elif not in_value:
                yield word


def types_of(text):
    return Reader(text).read()
