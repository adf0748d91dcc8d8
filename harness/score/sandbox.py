"""The inside of one code scoring: a judge that runs the tests and a solver that runs the answer. Started as a script.

The two are separate processes, and that is what makes a pass hard to forge: the answer never shares an interpreter with
the tests. The judge calls the answer's function through a pipe and gets plain values back, so an answer can return from
its function and nothing else: it cannot patch `assert`, return an object equal to everything, print a verdict or exit
its way past the tests. The token that proves a pass is read by the judge after the solver has been split off.

Around the solver, each layer where the system grants it (a run names those in force): no network, IPC or other
processes in its namespaces; an unprivileged user; Landlock, which confines writing to its temporary folder; resource
limits, among them no child process; an audit hook for what the others leave open. Without namespaces, sockets and
processes are still refused by the hook, which a determined attacker could defeat: run models you do not trust in a
container.

Standard library only, and nothing of this package: the script runs outside it, in an isolated interpreter.
"""

import sys

if __name__ == "__main__":
    del sys.path[0]  # this folder: its modules must not stand in for those of the standard library

import contextlib
import itertools
import json
import os
import resource
import select
import signal
import time
import types

MESSAGE_BYTES = 4 << 20
LAZY = 10_000  # items of a range or an iterator: the judge, which no limit holds, may have to make them all
VIEWS: dict = {"keys": type({}.keys()), "values": type({}.values()), "items": type({}.items())}
NOBODY = 65534


class Failure(Exception):
    """The answer is not right, and why."""


# Frames: a length of 8 bytes, then JSON. Values keep their type: what JSON lacks is tagged.
def send(fd, message):
    data = json.dumps(message).encode()
    data = len(data).to_bytes(8, "big") + data
    while data:
        data = data[os.write(fd, data) :]


def receive(fd, deadline=None):
    size = int.from_bytes(_exactly(fd, 8, deadline), "big")
    if size > MESSAGE_BYTES:
        raise Failure(f"an answer of {size} bytes")
    try:
        return json.loads(_exactly(fd, size, deadline))
    except (ValueError, RecursionError) as error:
        raise Failure(f"an unreadable answer: {error}") from None


def _exactly(fd, size, deadline):
    data = b""
    while len(data) < size:
        if deadline is not None and not select.select([fd], [], [], max(0.0, deadline - time.monotonic()))[0]:
            raise Failure("timeout")
        part = os.read(fd, min(size - len(data), 1 << 20))
        if not part:
            raise Failure("the answer's process ended")
        data += part
    return data


def encode(value, depth=0):
    """Plain values as tagged JSON; anything else becomes an opaque value, equal to nothing.

    An iterator, which can be read once here and once there, is its items.
    """
    if depth > 200:
        raise ValueError("nested too deeply")
    for plain in (bool, int, float, str):
        if isinstance(value, plain):
            return value if type(value) is plain else plain(value)
    if value is None:
        return None
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": list(value)}
    if isinstance(value, dict):
        return {"dict": [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(v, depth + 1) for v in value]}
    if isinstance(value, range) and len(value) <= LAZY:
        return {"range": [value.start, value.stop, value.step]}
    fractions = sys.modules.get("fractions")  # where an answer made one, it is there
    if fractions is not None and isinstance(value, fractions.Fraction):
        return {"Fraction": [value.numerator, value.denominator]}
    for name, view in VIEWS.items():
        if isinstance(value, view):
            return {name: [encode(v, depth + 1) for v in value]}
    if hasattr(type(value), "__next__"):
        items = list(itertools.islice(value, LAZY + 1))
        if len(items) <= LAZY:
            return {"iterator": [encode(v, depth + 1) for v in items]}
    return {"opaque": type(value).__name__}


class Opaque:
    def __init__(self, name):
        self.name = name

    def __eq__(self, other):
        return False

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self):
        return f"<{self.name}>"


def decode(value):
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise Failure("an unreadable answer")
        return value
    ((tag, inner),) = value.items()
    if tag == "dict":
        return {decode(k): decode(v) for k, v in inner}
    if tag == "complex":
        return complex(*inner)
    if tag == "bytes":
        return bytes(inner)
    if tag == "opaque":
        return Opaque(str(inner))
    if tag == "range":
        found = range(*inner)
        if len(found) > LAZY:
            raise ValueError(f"a range of more than {LAZY}")
        return found
    if tag == "Fraction":
        from fractions import Fraction

        return Fraction(*inner)
    inner = [decode(v) for v in inner]
    if tag in VIEWS:
        made = dict(inner) if tag == "items" else dict.fromkeys(inner) if tag == "keys" else dict(enumerate(inner))
        return getattr(made, tag)()
    if tag == "iterator":
        return iter(inner)
    kinds = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return kinds[tag](inner)


def judge():
    _libc("prctl", 1, signal.SIGKILL, 0, 0, 0)  # die with the harness
    job = receive(0)
    deadline = time.monotonic() + job["seconds"]
    layers = isolate()
    question_r, question_w = os.pipe()
    answer_r, answer_w = os.pipe()
    solver_pid = os.fork()
    if solver_pid == 0:
        try:
            solve(job, question_r, answer_w)
        finally:
            os._exit(0)
    os.close(question_r)
    os.close(answer_w)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    _libc("prctl", 4, 0, 0, 0, 0)  # not dumpable: its memory is its own
    exam = receive(0)
    try:
        layers += receive(answer_r, deadline)["layers"]
    except Failure as failure:
        send(1, {"error": f"the sandbox did not start: {failure}"})
        return
    result = {"layers": layers, "token": "", "detail": ""}
    try:
        loaded = receive(answer_r, deadline)
        if loaded != {"loaded": True}:
            raise Failure(str(loaded.get("raised") if isinstance(loaded, dict) else loaded))
        run_tests(job, exam["tests"], question_w, answer_r, deadline)
        result["token"] = exam["token"]
    except Failure as failure:
        result["detail"] = str(failure)[:200]
    except BaseException as error:  # a test failed, in whatever way
        result["detail"] = f"{type(error).__name__}: {error}"[:200]
    finally:
        os.kill(solver_pid, signal.SIGKILL)
        os.waitpid(solver_pid, 0)
    send(1, result)


def run_tests(job, tests, question, answer, deadline):
    """Execute every test source in one namespace, the answer's function standing in it by proxy."""
    calls = 0

    def candidate(*args, **kwargs):
        nonlocal calls
        calls += 1
        try:
            send(question, {"call": calls, "args": encode(args), "kwargs": encode(kwargs)})
        except BrokenPipeError:
            raise Failure("the answer's process ended") from None
        reply = receive(answer, deadline)
        if not isinstance(reply, dict) or reply.get("call") != calls:
            raise Failure("an answer to another question")
        if "raised" in reply:
            kind = getattr(__import__("builtins"), str(reply["raised"]), None)
            kind = kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError
            raise kind(str(reply.get("message", ""))[:200])
        try:
            return decode(reply["value"])
        except (ArithmeticError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise Failure(f"an unreadable answer: {error}") from None

    namespace: dict = {"__name__": "tests"}
    exec(compile(job["prelude"], "<prelude>", "exec"), namespace)
    namespace[job["entry_point"]] = candidate
    for index, test in enumerate(tests):
        exec(compile(test, f"<test {index + 1}>", "exec"), namespace)
    if calls == 0:
        raise Failure("the tests never called the function")


def solve(job, question, answer):
    """Lock this process down, load the answer, serve calls. Runs in the forked child and never returns to the judge."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    for name in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else map(str, range(3, 64)):
        if int(name) > 2 and int(name) not in (question, answer):
            with contextlib.suppress(OSError):
                os.close(int(name))
    layers = [*drop_user(), *confine("."), *limit(job)]
    _libc("prctl", 1, signal.SIGKILL, 0, 0, 0)  # again: changing user cleared it
    _libc("prctl", 38, 1, 0, 0, 0)  # no new privileges
    send(answer, {"layers": [*layers, "audit"]})
    for module in [name for name in sys.modules if name.partition(".")[0] in ("ctypes", "_ctypes")]:
        del sys.modules[module]
    guard(os.getcwd())
    namespace: dict = {"__name__": "answer"}
    sys.modules["__main__"] = types.ModuleType("__main__")
    try:
        exec(compile(job["prelude"], "<prelude>", "exec"), namespace)
        exec(compile(job["source"], "<answer>", "exec"), namespace)
        function = namespace[job["entry_point"]]
        if not callable(function):
            raise TypeError(f"{job['entry_point']} is no function")
    except BaseException as error:
        send(answer, {"raised": f"{type(error).__name__}: {error}"[:200]})
        return
    send(answer, {"loaded": True})
    while True:
        call = receive(question)
        reply = {"call": call["call"]}
        try:
            value = function(*decode(call["args"]), **decode(call["kwargs"]))
            reply["value"] = encode(value)
        except BaseException as error:
            reply["raised"], reply["message"] = type(error).__name__, str(error)[:200]
        send(answer, reply)


def _libc(function, *args):
    """Call libc; 0 where it worked, else errno."""
    import ctypes

    values = [ctypes.c_long(a) if isinstance(a, int) else a for a in args]
    done = getattr(ctypes.CDLL(None, use_errno=True), function)(*values)
    return ctypes.get_errno() or -1 if done == -1 else 0


def isolate():
    """New network, IPC and process namespaces for the children of this process, as many as are granted."""
    net, ipc, pid, user = 0x40000000, 0x08000000, 0x20000000, 0x10000000
    uid, gid = os.geteuid(), os.getegid()
    for flags in (net | ipc | pid, net):
        if _libc("unshare", flags if uid == 0 else flags | user) == 0:
            if uid != 0:
                for name, text in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
                    with contextlib.suppress(OSError), open(f"/proc/self/{name}", "w") as file:
                        file.write(text)
            return ["no network", "own processes"] if flags & pid else ["no network"]
    return []


def drop_user():
    """From root to nobody, keeping at most the capability to read: the interpreter may lie in a private folder."""
    if os.geteuid() != 0:
        return []
    import ctypes

    with open("/proc/self/status") as file:
        held = next(int(line.split()[1], 16) for line in file if line.startswith("CapPrm"))
    read = held & (1 << 2)
    if not read and not _readable_by_all(os.__file__):
        return []
    _libc("prctl", 8, 1, 0, 0, 0)  # keep capabilities over the change of user, to give up all but one
    try:
        os.setgroups([])
        os.setresgid(NOBODY, NOBODY, NOBODY)
        os.setresuid(NOBODY, NOBODY, NOBODY)
    except OSError:
        return []
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    if _libc("capset", header, (ctypes.c_uint32 * 6)(read, read, 0, 0, 0, 0)) != 0:
        raise OSError("capset: the capabilities of root could not be given up")
    return ["nobody"]


def _readable_by_all(path):
    path = os.path.realpath(path)
    if not os.stat(path).st_mode & 0o004:
        return False
    while path != "/":
        path = os.path.dirname(path)
        if not os.stat(path).st_mode & 0o001:
            return False
    return True


def confine(folder):
    """Landlock: create, write and remove below `folder` only, no TCP, no signals to others. Needs no privilege.

    What it can confine grows with its version; kernels before 5.13 have none of it.
    """
    import ctypes

    create_ruleset, add_rule, restrict_self = 444, 445, 446
    version = ctypes.CDLL(None).syscall(create_ruleset, None, ctypes.c_size_t(0), 1)
    if version < 1:
        return []
    files = 0x1FF2 | (0x4000 if version >= 3 else 0)  # write, remove, make anything; truncate
    handled = [
        files,
        *([0x3] if version >= 4 else []),
        *([0x3] if version >= 6 else []),
    ]  # bind, connect; sockets, signals
    attributes = (ctypes.c_uint64 * len(handled))(*handled)
    ruleset = ctypes.CDLL(None).syscall(create_ruleset, attributes, ctypes.c_size_t(8 * len(handled)), 0)
    if ruleset < 0:
        return []
    place = os.open(folder, os.O_PATH)
    rule = files.to_bytes(8, sys.byteorder) + place.to_bytes(4, sys.byteorder)
    _libc("prctl", 38, 1, 0, 0, 0)  # no new privileges: what lets a process confine itself
    done = _libc("syscall", add_rule, ruleset, 1, rule, 0) == 0 and _libc("syscall", restrict_self, ruleset, 0) == 0
    os.close(place)
    os.close(ruleset)
    if not done:
        return []
    return ["writes confined", "no TCP"] if version >= 4 else ["writes confined"]


def limit(job):
    seconds = int(job["seconds"]) + 1
    for name, value in (
        (resource.RLIMIT_CPU, seconds),
        (resource.RLIMIT_AS, job["memory_bytes"]),
        (resource.RLIMIT_FSIZE, job["file_bytes"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, 0),
    ):
        hard = resource.getrlimit(name)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(name, (value, value))
    return ["limits"]


def guard(folder):
    """Refuse by audit hook what an answer has no use for. It cannot be removed, only outwitted."""
    refused = (
        "ctypes.", "fcntl.", "ftplib.", "gc.get_", "http.", "imaplib.", "os.chflags", "os.chmod",
        "os.chown", "os.exec", "os.fork", "os.kill", "os.link", "os.lockf", "os.mkdir", "os.posix_spawn",
        "os.remove", "os.rename", "os.rmdir", "os.setxattr", "os.spawn", "os.symlink", "os.system",
        "os.truncate", "os.utime", "poplib.", "pty.", "resource.", "shutil.", "signal.", "smtplib.", "socket.",
        "sqlite3.", "subprocess.", "syslog.", "urllib.", "webbrowser.",
    )  # fmt: skip
    modules = ("_ctypes", "ctypes", "_dbm", "_gdbm", "_multiprocessing", "_posixshmem", "_posixsubprocess", "readline")
    writing = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
    inside, realpath, fspath = os.path.realpath(folder) + os.sep, os.path.realpath, os.fspath

    def hook(event, args):
        if event == "open" and not isinstance(args[0], int) and args[0] is not None:
            path = fspath(args[0])
            path = realpath(path.decode(errors="replace") if isinstance(path, bytes) else path)
            if path.startswith("/proc/") or (args[2] & writing and not path.startswith(inside)):
                raise PermissionError(f"open {path}: refused here")
        elif event.startswith(refused) or (event == "import" and args[0] in modules):
            raise PermissionError(f"{event}: refused here")

    for name in ("mkfifo", "mknod", "chroot", "setsid", "setpgid", "nice"):
        for module in (os, sys.modules["posix"]):
            if hasattr(module, name):
                delattr(module, name)
    sys.dont_write_bytecode = True
    sys.addaudithook(hook)


if __name__ == "__main__":
    judge()
