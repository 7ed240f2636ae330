"""The rule for commit messages, for the commit-msg hook and for `make figures`."""

import re
import subprocess

LONGEST = 72
SUBJECT = re.compile(r"(?P<scope>[\w.][\w./, -]{0,30}): (?P<rest>\S.*)")
GIT_WROTE_IT = re.compile(r"(?:Merge|Revert) |(?:fixup|squash|amend)! ")
TWO_TOPICS = re.compile(r";|, and | and .* and ")
# The first word of a subject, after "scope: ". Add the verb that you miss.
VERBS = set("""abort accept accumulate acquire add adjust adopt align allocate allow annotate apply archive ask assert assign
attach avoid average balance batch begin bind block borrow bound break bring broadcast build bump cache calibrate call
cancel cap cast catch change check choose clamp clarify clean clear clip clone close collapse collect combine commit
compare compile complete compress compute configure connect consolidate convert copy correct count cover create cut
declare decode decouple decrease deduplicate default defer define delay delete deprecate derive describe detach detect
determine disable document download drop dump eliminate embed emit enable encode end enforce ensure enter evict exclude
execute expand expect explain export expose extend extract factor fail fall fetch fill filter find finish fix flag flatten
flush fold follow forbid force fork format forward free freeze gather generate get give group guard handle harden hash
hide hoist hold honor ignore implement import improve include increase infer inherit initialize inline insert
inspect install instrument introduce invalidate inject isolate join keep kill label launch leave let lift limit link list
load lock log lower make map mark match materialize measure mention merge migrate mirror mock modernize move name narrow
note notify offload omit open optimize order overlap overwrite own pack pad page parallelize parse pass permute pick pin
place plan point poll pool port prefer prefetch prepare preserve prevent print process profile promote protect provide
prune publish pull push put quantize quote raise rank reach read reattach rebuild recompute record recover reduce
refactor refer refine refresh refuse register reject relax release remove rename reorder repair repeat replace replicate
report require reserve reset reshard resolve respect restore restrict restructure resume retain retry return reuse revert
review revise rewrite rework round route run sample save scale schedule search seed select send separate serialize set
shard share shorten show shrink shut signal silence simplify simulate size skip slice sort specify speed split stage stamp
standardize start state stop store stream strip submit substitute summarize summon support suppress swap switch
synchronize take teach tell terminate test throttle throw tidy tie tighten time trace track train transfer translate trim
truncate try tune turn unblock undo unify unload unlock unpack unshard unwrap update upgrade upload use validate verify
view visit wait warn watch widen wipe wrap write zero""".split())


def first_verb(subject):
    """The first word after the scope, or "" if there is no scope."""
    found = SUBJECT.fullmatch(subject)
    return found["rest"].split()[0].lower() if found else ""


def is_imperative(subject):
    return first_verb(subject) in VERBS


def is_too_long(subject):
    return len(subject) > LONGEST


def content(message):
    """The lines of a message that git keeps: without comments, and without the diff of `git commit -v`."""
    message = re.split(r"^# -+ >8 -+$", message, flags=re.MULTILINE)[0]
    lines = [line.rstrip() for line in message.split("\n") if not line.startswith("#")]
    while lines and not lines[0]:
        lines.pop(0)
    return lines


def problems(message):
    """Breaches of the rule, each a sentence. An empty list accepts the message."""
    lines = content(message)
    subject = lines[0] if lines else ""
    if GIT_WROTE_IT.match(subject):
        return []
    found = []
    if not SUBJECT.fullmatch(subject):
        found.append("The subject must be `scope: verb ...`, as in `comm: let a waiting rank copy unclaimed messages`.")
    elif not is_imperative(subject):
        found.append(f"'{first_verb(subject)}' is no imperative verb that tools/gates/commits.py lists. Write what the commit "
                     "does, as in `docs: shorten the zero page`, or add the verb to the list.")
    if is_too_long(subject):
        found.append(f"The subject has {len(subject)} characters. The limit is {LONGEST}; the body has room for the rest.")
    if subject.endswith("."):
        found.append("The subject must not end with a full stop.")
    if TWO_TOPICS.search(subject):
        found.append("The subject names more than one topic. Make a commit of each.")
    if len(lines) > 1 and lines[1]:
        found.append("The second line must be empty.")
    return found


def git(root, *arguments):
    return subprocess.run(["git", "-C", root, *arguments], capture_output=True, text=True)


def subjects_since(root, commit):
    """Subjects of the commits after this one, without merges; None if the history does not reach back to it."""
    if git(root, "merge-base", "--is-ancestor", commit, "HEAD").returncode != 0:
        return None
    return git(root, "log", "--no-merges", "--format=%s", f"{commit}..HEAD").stdout.splitlines()


def percentage(subjects, test):
    return round(100 * sum(map(test, subjects)) / len(subjects)) if subjects else None
