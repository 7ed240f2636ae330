#!/usr/bin/env python3
"""Attacks jobs that train and save, and readers of files, for some minutes. The attacks are drawn from a seed.

    make attack MINUTES=10 SEED=7
    tests/attack/attack.py build/release --seed 7 --attack 12   # repeats one attack of that seed

Prints the failures, each with the command that repeats it: the draws are then the same, the scheduling of processes is not.
Exit code 1 if there is one. Holds of every attack:

* No process hangs, and none ends by a signal that the attack did not send.
* The surviving ranks name the rank that was killed, stopped or cut off.
* Afterwards the newest checkpoint is whole, has right values, and is at least as new as the last save that a rank reported.
* A damaged file is refused by an error with its name, or its right values are read.

Fuzzes the readers (tests/checkpoint/fuzz), changed graphs (tests/exported) and tessera-convert (tests/interop/damage_test.py)
in the first half of the time. Cutting links needs root and iproute2, for network namespaces; without them, says so.
"""

import argparse
import errno
import os
import pathlib
import random
import re
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time

sys.dont_write_bytecode = True
ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))
from hosts import Hosts  # noqa: E402

TIMEOUT_S = 5  # of the jobs' operations
DEADLINE_S = TIMEOUT_S + 40  # of a job's end, on a busy machine
ANSWER_S = 30
MOST_SAVES = 100_000  # the attack ends the job
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n"


class Failure(Exception):
    pass


def require(holds, text):
    if not holds:
        raise Failure(text)


def free_port():
    import socket

    with socket.socket() as own:
        own.bind(("127.0.0.1", 0))
        return own.getsockname()[1]


def name_of(status):
    return f"signal {signal.Signals(-status).name}" if status < 0 else f"exit code {status}"


class Process:
    """A program in its own session, with its output in a file."""

    def __init__(self, command, environment, log):
        self.log = log
        with open(log, "wb") as output:
            self.popen = subprocess.Popen(list(map(str, command)), stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                                          env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, start_new_session=True)

    @property
    def pid(self):
        return self.popen.pid

    def output(self):
        return self.log.read_text(errors="replace")

    def send(self, number):
        if self.popen.poll() is None:
            os.kill(self.pid, number)

    def wait(self, deadline, what):
        """Returns the exit status."""
        try:
            return self.popen.wait(max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            raise Failure(f"{what} hangs: {self.output()[-500:]}") from None

    def end(self):
        try:
            os.killpg(self.pid, signal.SIGCONT)
            os.killpg(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.popen.wait()


class Job:
    """The ranks of attack_job, which save to a folder."""

    def __init__(self, run, world, saves=MOST_SAVES, environment=None, hosts=None):
        self.folder, self.world = run.folder / "saves", world
        self.folder.mkdir(exist_ok=True)
        address = "10.77.0.1" if hosts else "127.0.0.1"
        port = "29577" if hosts else str(free_port())
        self.ranks = []
        for rank in range(world):
            own = {"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(world),
                   "MASTER_ADDR": address, "MASTER_PORT": port, "TESSERA_ATTACK_TIMEOUT_MS": str(TIMEOUT_S * 1000)}
            if hosts:
                own |= {"LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "TESSERA_PEER_MEMORY": "0"}
            before = ["ip", "netns", "exec", hosts.names[rank]] if hosts else []
            process = Process([*before, run.job, "train", self.folder, saves], {**own, **(environment or {})}, run.folder / f"rank{rank}.log")
            self.ranks.append(process)
            run.processes.append(process)

    def output(self):
        return "".join(f"\n  rank {rank}: {process.output()[-700:].strip()}" for rank, process in enumerate(self.ranks))

    def await_saves(self, count):
        await_saves(self.ranks[0], count, [process.popen for process in self.ranks])

    def end_of(self, ranks, signals=(), codes=(1,)):
        """Awaits these ranks. Requires one of the exit codes, or one of the signals."""
        deadline = time.monotonic() + DEADLINE_S
        for rank in ranks:
            status = self.ranks[rank].wait(deadline, f"rank {rank} of {self.world}")
            require(status in codes or -status in signals, f"rank {rank} of {self.world} ended by {name_of(status)}{self.output()}")

    def name(self, victim, ranks):
        for rank in ranks:
            error = self.ranks[rank].output().rpartition("attack_job: ")[2]
            require(re.search(rf"\branks? ([\d, and]+ )?{victim}\b", error), f"rank {rank} does not name rank {victim}: {error[:1000]}")


def await_saves(process, count, alive):
    deadline = time.monotonic() + DEADLINE_S
    while process.output().count("saved ") < count:
        require(time.monotonic() < deadline and all(other.poll() is None for other in alive),
                f"the job did not save {count} times: {process.output()[-700:]}")
        time.sleep(0.002)


class Run:
    """One attack: its draws, its folder and its processes."""

    def __init__(self, build, seed, number, folder):
        self.build, self.number = build, number
        self.draw = random.Random(f"{seed}:{number}")
        self.folder = folder
        self.job = build / "tests/attack/attack_job"
        self.processes = []
        self.reader = None

    def close(self):
        for process in self.processes:
            process.end()
        if self.reader:
            self.reader.kill()
            self.reader.wait()

    def ask(self, form, path):
        """Returns the reader's answer."""
        if self.reader is None:
            self.reader = subprocess.Popen([self.job, "read"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
                                           text=True, errors="replace", bufsize=1, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.reader.stdin.write(f"{form} {path}\n")
        self.reader.stdin.flush()
        ready, _, _ = select.select([self.reader.stdout], [], [], ANSWER_S)
        require(ready, f"reading {path} hangs")
        answer = self.reader.stdout.readline()
        if not answer:
            raise Failure(f"reading {path} ended the process by {name_of(self.reader.wait())}")
        kind = answer.split(" ", 1)[0]
        require(kind in ("values", "refused"), f"reading {path}: an error of another kind: {answer.strip()}")
        return answer.strip()

    def check_newest(self, folder, reported):
        """Requires a newest checkpoint that is whole and right, and not older than what a rank reported."""
        if not reported and not any(folder.glob("[!.]*/tessera.json")):
            return
        answer = self.ask("trained", folder)
        require(answer.startswith("values "), f"the newest checkpoint does not load: {answer}")
        require("passed over" not in answer, f"a checkpoint is damaged: {answer}")
        value = int(re.search(r'"value":(\d+)', answer)[1])
        require(value >= reported, f"the save of {reported} was reported, but the newest is of {value}")


def reported(text):
    return max(map(int, re.findall(r"^saved (\d+)$", text, re.MULTILINE)), default=0)


# ---- attacks --------------------------------------------------------------------------------------


def begin(run, world, **options):
    """Starts a job, and returns it at a drawn moment."""
    job = Job(run, world, **options)
    job.await_saves(run.draw.randint(1, 6))
    time.sleep(run.draw.random() * 0.06)
    return job


def kill(run):
    """One of several ranks ends by a signal, while it trains or saves."""
    world = run.draw.randint(2, 4)
    victim, sent = run.draw.randrange(world), run.draw.choice([signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT, signal.SIGTERM])
    job = begin(run, world)
    job.ranks[victim].send(sent)
    others = [rank for rank in range(world) if rank != victim]
    job.end_of([victim], signals=(sent,), codes=())
    job.end_of(others)
    job.name(victim, others)
    run.check_newest(job.folder, reported(job.ranks[0].output()))


def stop(run):
    """One of several ranks stops, and continues when the others have ended."""
    world = run.draw.randint(2, 3)
    victim = run.draw.randrange(world)
    job = begin(run, world)
    job.ranks[victim].send(signal.SIGSTOP)
    others = [rank for rank in range(world) if rank != victim]
    job.end_of(others)
    job.name(victim, others)
    job.ranks[victim].send(signal.SIGCONT)
    job.end_of([victim])
    run.check_newest(job.folder, reported(job.ranks[0].output()))


def suspend(run):
    """The whole job stops for longer than its timeout, and continues."""
    job = begin(run, 2)
    for process in job.ranks:
        process.send(signal.SIGSTOP)
    time.sleep(TIMEOUT_S + 2)
    before = job.ranks[0].output().count("saved ")
    for process in job.ranks:
        process.send(signal.SIGCONT)
    job.await_saves(before + 3)
    for process in job.ranks:
        process.send(signal.SIGKILL)
    job.end_of(range(2), signals=(signal.SIGKILL,))
    run.check_newest(job.folder, reported(job.ranks[0].output()))


def spawn(run):
    """The process of spawn_local(), the one that watches its ranks, or a rank is killed; or the first stops, and then a rank is
    killed."""
    world, kind = run.draw.randint(2, 3), run.draw.choice(["parent", "watcher", "rank", "stopped parent"])
    folder = run.folder / "saves"
    folder.mkdir()
    parent = Process([run.job, "spawn", world, folder, MOST_SAVES], {"TESSERA_ATTACK_TIMEOUT_MS": str(TIMEOUT_S * 1000)}, run.folder / "spawn.log")
    run.processes.append(parent)
    await_saves(parent, run.draw.randint(1, 6), [parent.popen])
    time.sleep(run.draw.random() * 0.06)
    (watcher,) = children_of(parent.pid)
    ranks = children_of(watcher)
    require(len(ranks) == world, f"spawn_local() has the ranks {ranks}, expected {world}")
    if kind == "stopped parent":
        parent.send(signal.SIGSTOP)
    victims = {"parent": parent.pid, "watcher": watcher}
    os.kill(victims.get(kind) or run.draw.choice(ranks), signal.SIGKILL)
    deadline = time.monotonic() + DEADLINE_S
    while any(is_running(rank) for rank in ranks):
        require(time.monotonic() < deadline, f"a rank hangs ({kind}): {parent.output()[-700:]}")
        time.sleep(0.01)
    parent.send(signal.SIGCONT)
    status = parent.wait(deadline, "spawn_local()")
    expected = -signal.SIGKILL if kind == "parent" else 128 + signal.SIGKILL
    require(status == expected, f"spawn_local() ended by {name_of(status)} ({kind}): {parent.output()[-700:]}")
    run.check_newest(folder, reported(parent.output()))


def children_of(pid):
    return [int(child) for child in pathlib.Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_running(pid):
    try:
        return pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def cut(run):
    """The link of one of several hosts is cut: packets vanish."""
    world = run.draw.randint(2, 3)
    victim = run.draw.randrange(world)
    with Hosts(world, 1000) as hosts:
        job = begin(run, world, hosts=hosts)
        subprocess.run(["ip", "-n", hosts.names[victim], "link", "set", "veth0", "down"], check=True)
        job.end_of(range(world))
        others = [rank for rank in range(world) if rank != victim]
        if world > 2 and victim != 0:  # two ranks name each other; without rank 0's store, none can name the victim
            job.name(victim, others)
    run.check_newest(job.folder, reported(job.ranks[0].output()))


def disk(run):
    """File calls are interrupted, short, or fail. Interruptions and short results have no effect; a failed save is refused
    by an error, and the job goes on."""
    world, saves = run.draw.randint(1, 3), run.draw.randint(4, 10)
    error = run.draw.choice([0, 0, errno.EIO, errno.ENOSPC, errno.EDQUOT])
    faults = {"FOLDER": run.folder / "saves", "SEED": run.draw.randrange(10**6), "EINTR": run.draw.choice([0, 10, 30]),
              "SHORT": run.draw.choice([0, 30, 60])}
    if error:
        faults |= {"NUMBER": run.draw.randint(1, 60), "ERROR": error, "LASTING": run.draw.randrange(2), "READS": run.draw.randrange(4) == 0}
    environment = {f"TESSERA_FAULTS_{name}": str(int(value) if isinstance(value, bool) else value) for name, value in faults.items()}
    environment["LD_PRELOAD"] = str(run.build / "tests/attack/libattack_faults.so")
    job = Job(run, world, saves, environment)
    job.end_of(range(world), codes=(0,) if not error else (0, 1))
    text = job.output()
    if error:
        for told in re.findall(r"^(?:refused|attack_job:) (.*)$", text, re.MULTILINE):
            require(str(job.folder) in told, f"an error does not name its file: {told}")
    else:
        require(text.count("saved ") == saves, f"{saves} saves expected with {environment}: {text}")
    run.check_newest(job.folder, reported(job.ranks[0].output()))


# ---- damage ---------------------------------------------------------------------------------------

EXPORTED = ("adapted", "decoder", "norms")


def change(file, draw):
    """Damages a file, and returns how."""
    data = bytearray(file.read_bytes())
    kind = draw.choice(["bit", "bit", "cut", "noise", "inserted", "removed", "gone", "empty", "pointer", "folder", "pipe", "loop"])
    at = draw.randrange(max(1, len(data)))
    if draw.randrange(2):  # in the first or last 600 bytes, which describe the rest
        at = draw.choice([at % 600, len(data) - 1 - at % 600]) % max(1, len(data))
    if kind == "bit":
        data[at] ^= 1 << draw.randrange(8)
    elif kind == "cut":
        del data[at:]
    elif kind == "noise":
        data[at : at + 40] = draw.randbytes(40)
    elif kind == "inserted":
        data[at:at] = draw.randbytes(draw.choice([1, 8, 64]))
    elif kind == "removed":
        del data[at : at + draw.choice([1, 8, 64])]
    elif kind in ("empty", "pointer"):
        data = b"" if kind == "empty" else POINTER
    else:
        file.unlink()
        if kind == "folder":
            file.mkdir()
        elif kind == "pipe":
            os.mkfifo(file)
        elif kind == "loop":
            file.symlink_to(file.name)
        return kind
    file.write_bytes(data)
    return f"{kind} at {at}"


def header_bytes(file):
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def damage(run):
    """Files of all formats are damaged, one at a time."""
    sound = run.folder / "sound"
    process = Process([run.job, "make", sound], {}, run.folder / "make.log")
    run.processes.append(process)
    require(process.wait(time.monotonic() + DEADLINE_S, "writing files") == 0, process.output())
    (sound / "exported").mkdir()
    for name in EXPORTED:
        shutil.copy(ROOT / f"tests/exported/data/{name}.pt2", sound / "exported")
    targets = [("checkpoint", "checkpoints/2"), ("newest", "checkpoints"), ("full", "full/model.safetensors"),
               ("full", "parts"), ("full", "parts/model.safetensors.index.json"), *(("exported", f"exported/{name}.pt2") for name in EXPORTED)]
    right = {target: run.ask(target[0], sound / target[1]) for target in targets}
    older = run.ask("checkpoint", sound / "checkpoints/1")
    for number in range(60):
        form, place = run.draw.choice(targets)
        hurt = run.folder / f"hurt{number}"
        shutil.copytree(sound, hurt)
        top = (hurt / place).parent if form == "full" else hurt / place
        file = run.draw.choice(sorted(path for path in top.rglob("*") if path.is_file()) if top.is_dir() else [top])
        header = header_bytes(file) if form == "full" and file.suffix == ".safetensors" else None
        how = change(file, run.draw)
        answer = run.ask(form, hurt / place)
        what = f"{form} {place}, {file.relative_to(hurt)} damaged ({how})"
        told, values = answer.startswith("refused "), answer.split(" ", 2)[1:2]
        if form == "newest":
            # A link to itself does not prove damage, so the reader must not take the older checkpoint.
            is_right = told and how == "loop" and str(file) in answer or not told and (values == right[form, place].split(" ", 2)[1:2] or
                                     values == older.split(" ", 2)[1:2] and (file.parent.name in answer or how == "gone"))
        elif told:
            is_right = any(str(path) in answer for path in (hurt, file)) and (not how.startswith("pointer") or "Git LFS" in answer)
        else:  # the values in a full file have no checksums
            is_right = values == right[form, place].split(" ", 2)[1:2] or (
                header is not None and re.match("bit|noise", how) and int(how.split()[-1]) >= header - 40)
        require(is_right, f"{what}: {answer[:400]}")
        shutil.rmtree(hurt)


# ---- fuzzing --------------------------------------------------------------------------------------


def fuzzers(build, seed, seconds):
    """Programs that draw their own input: (name, command, environment)."""
    tests = [str(build / "tests/exported/exported_tests"), "--gtest_brief=1", "--gtest_filter=Archive.Graphs*"]
    return [
        ("the fuzzer of the readers", [str(build / "tests/checkpoint/fuzz/run"), str(seconds), str(seed)], {}),
        ("changed graphs", tests, {"TESSERA_FUZZ_SECONDS": str(seconds), "TESSERA_FUZZ_SEED": str(seed * 1_000_000)}),
        ("damage of tessera-convert's input", [str(ROOT / "tools/python.sh"), str(ROOT / "tests/interop/damage_test.py"), str(seed), str(3 * seconds)], {}),
    ]


def fuzz(what, command, environment, seconds):
    """Returns the failure, or ""."""
    began = time.monotonic()
    try:
        done = subprocess.run(command, env={**os.environ, **environment}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=10 * seconds + 120)
    except subprocess.TimeoutExpired as error:
        return f"{what} hangs: {(error.stdout or b'')[-2000:].decode(errors='replace')}"
    print(f"{what}: {time.monotonic() - began:.0f} s  {'FAILED' if done.returncode else 'ok'}", flush=True)
    return f"{what} ended by {name_of(done.returncode)}: {done.stdout[-3000:].decode(errors='replace')}" if done.returncode else ""


# Each attack with its weight in the draw.
ATTACKS = {kill: 5, stop: 3, suspend: 1, spawn: 3, cut: 2, disk: 6, damage: 4}


def kind_of(seed, number):
    """Returns each kind once, then drawn kinds."""
    kinds = list(ATTACKS)
    return kinds[number] if number < len(kinds) else random.Random(f"{seed}:{number}:kind").choices(kinds, ATTACKS.values())[0]


def why_no_cut():
    if os.geteuid() != 0:
        return "needs root"
    if not shutil.which("ip") or not shutil.which("tc"):
        return "needs iproute2"
    allowed = subprocess.run(["unshare", "-n", "true"], stderr=subprocess.DEVNULL).returncode == 0
    return "" if allowed else "network namespaces are not allowed here"


def attack(build, seed, number):
    """Runs one attack. Returns its failure, or ""."""
    kind = kind_of(seed, number)
    if kind is cut and (why := why_no_cut()):
        print(f"attack {number:3d}: cut: skipped: {why}", flush=True)
        return ""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tessera-attack-"))
    run = Run(build, seed, number, folder)
    began, failure = time.monotonic(), ""
    try:
        kind(run)
    except Failure as error:
        failure = str(error)
    finally:
        run.close()
        shutil.rmtree(folder, ignore_errors=True)
    print(f"attack {number:3d}: {kind.__name__:7s} {time.monotonic() - began:5.1f} s  {'FAILED' if failure else 'ok'}", flush=True)
    return failure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=pathlib.Path)
    parser.add_argument("--minutes", type=float, default=3)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--attack", type=int, help="this one of the seed's attacks alone")
    parser.add_argument("--each", action="store_true", help="each kind of attack once, and no fuzzers")
    arguments = parser.parse_args()
    build, seed, end = arguments.build.resolve(), arguments.seed, time.monotonic() + arguments.minutes * 60
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # also ends the processes
    print(f"seed {seed}", flush=True)
    failures, number = [], 0

    def report(failure, command):
        if failure:
            failures.append(command)
            print(f"FAILED: {failure}\nrepeat it: {command}", flush=True)

    def attack_next(number):
        report(attack(build, seed, number), f"{os.path.relpath(__file__)} {arguments.build} --seed {seed} --attack {number}")

    if arguments.attack is not None:
        attack_next(arguments.attack)
    elif arguments.each:
        for number in range(len(ATTACKS)):
            attack_next(number)
    else:
        seconds = max(5, int(arguments.minutes * 60 / 6))
        for what, command, environment in fuzzers(build, seed, seconds):
            report(fuzz(what, command, environment, seconds),
                   " ".join([*(f"{name}={value}" for name, value in environment.items()), *command]))
        while time.monotonic() < end:
            attack_next(number)
            number += 1
    print(f"{len(failures)} failures" if failures else "no failure")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
