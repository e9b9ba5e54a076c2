"""The child's side of the sandbox, run as a script: confines itself, then runs the code on standard input.

It knows the standard library alone and reports through the file descriptor that its first argument numbers.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import random
import resource
import signal
import struct
import sys
import types
from typing import Any

NEW_NAMESPACES = (
    0x20000 | 0x8000000 | 0x10000000 | 0x20000000 | 0x40000000
)  # mounts, IPC, user, PIDs, network
MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_READ_ONLY, MS_REC, MS_PRIVATE = 2, 4, 8, 1, 1 << 14, 1 << 18
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE = 442, -100, 0x8000
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 24, 38

# By machine: the audit architecture, and the numbers of the calls that seccomp refuses: new processes and
# programs (clone, fork, execve), sockets and io_uring, sessions and groups, namespaces and mounts, other
# processes (kill, ptrace, limits, pidfd), the kernel (modules, keys, perf, bpf, userfaultfd).
REFUSED = {
    "x86_64": (
        0xC000003E,
        (
            *(56, 57, 58, 59, 322, 435),
            *(41, 53, 425),
            *(109, 112),
            *(155, 161, 165, 166, 272, 308, 428, 429, 430, 431, 432, 442),
            *(62, 101, 129, 200, 234, 297, 302, 310, 311, 424, 434, 438),
            *(175, 246, 248, 249, 250, 298, 313, 321, 323),
        ),
    ),
    "aarch64": (
        0xC00000B7,
        (
            *(220, 221, 281, 435),
            *(198, 199, 425),
            *(154, 157),
            *(39, 40, 41, 51, 97, 268, 428, 429, 430, 431, 432, 442),
            *(117, 129, 130, 131, 138, 240, 261, 270, 271, 424, 434, 438),
            *(104, 105, 217, 218, 219, 241, 273, 280, 282),
        ),
    ),
}

libc = ctypes.CDLL(None, use_errno=True)


def main() -> None:
    report = int(sys.argv[1])
    request = json.loads(read_all(0))
    empty, end = os.pipe()
    os.close(end)
    os.dup2(empty, 0)  # input() finds the end at once
    try:
        if "namespaces" in request["layers"]:
            enter_namespaces(request["disk"])
        if "seccomp" in request["layers"] and platform.machine() not in REFUSED:
            raise OSError(f"seccomp is not known here for {platform.machine()}")
    except OSError as error:
        os.write(report, f"cannot: {error}\n".encode())
        return
    os.write(report, b"ready\n")
    program = os.fork()
    if program == 0:
        execute(request, report)
    if "namespaces" not in request["layers"]:
        pass_on_end(program)
    os.close(1)
    os.close(2)
    watch(program, report)


def pass_on_end(child: int) -> None:
    """Kill the child at SIGTERM, by which the sandbox ends a run; this process still waits for its end."""
    signal.signal(signal.SIGTERM, lambda *_: os.kill(child, signal.SIGKILL))


def watch(program: int, report: int) -> None:
    """Wait for the program, reaping all that ends: the first process of a namespace inherits its orphans."""
    while True:
        pid, status = os.wait()
        if pid == program:
            if os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGXCPU:
                os.write(report, b"timeout\n")
            os._exit(0)


def execute(request: dict[str, Any], report: int) -> None:
    """Confine this process, run the code to its end, report the secret or what was raised. Never returns."""
    said = b""
    try:
        limit(request)
        if "seccomp" in request["layers"]:
            refuse_calls()
        code, secret = request.pop("code"), request.pop("secret")
        del sys.path[0], sys.argv[1:]  # this script's folder is no place for the program to import from
        random.seed(0)  # tests that draw their cases draw the same ones every time
        module = types.ModuleType("program")
        sys.modules["program"] = module
        # Not under this file's own future imports: annotations are evaluated, as everywhere.
        exec(compile(code, "<program>", "exec", dont_inherit=True), module.__dict__)
        said = secret.encode()
    except BaseException as error:  # noqa: BLE001 - SystemExit is the program's failure too
        words = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
        said = f"raised {words[:500]}".encode("utf-8", "replace")
    os.write(report, said + b"\n")
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError, AttributeError):
            continue
    os._exit(0)


def enter_namespaces(disk: int) -> None:
    """Leave this process behind, waiting, and go on as the first one of new namespaces.

    All that was mounted becomes read-only and without devices; the current folder is covered by a file system
    in memory of `disk` bytes. Raises OSError where the kernel refuses.
    """
    uid, gid, folder = os.getuid(), os.getgid(), os.getcwd()
    check(libc.unshare(NEW_NAMESPACES), "a namespace is refused")
    for name, line in (("setgroups", "deny"), ("uid_map", f"{uid} {uid} 1"), ("gid_map", f"{gid} {gid} 1")):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(line)
    first = os.fork()
    if first:
        os.close(1)  # the pipes end with the program, not with its keeper
        os.close(2)
        pass_on_end(first)
        os.waitpid(first, 0)  # the kernel lets the first process end when all others of its namespace have
        os._exit(0)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)  # no attaching from below
    mount(None, "/", None, MS_REC | MS_PRIVATE)
    try:
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    except OSError:  # containers that mask parts of /proc allow no new one: then there is none
        mount("tmpfs", "/proc", "tmpfs", MS_NOSUID | MS_NODEV | MS_NOEXEC, "size=4k")
    flags = struct.pack("QQQQ", MS_READ_ONLY | MS_NOSUID | MS_NODEV, 0, 0, 0)
    where = (ctypes.c_int(AT_FDCWD), b"/", ctypes.c_uint(AT_RECURSIVE))
    set_up = libc.syscall(ctypes.c_long(MOUNT_SETATTR), *where, flags, ctypes.c_size_t(len(flags)))
    check(set_up, "a read-only file system is refused")
    mount("tmpfs", folder, "tmpfs", MS_NOSUID | MS_NODEV, f"size={disk},nr_inodes=1024,mode=700")
    os.chdir(folder)


def mount(source: str | None, where: str, kind: str | None, flags: int, data: str = "") -> None:
    texts = [text and text.encode() for text in (source, where, kind)]
    check(libc.mount(*texts, ctypes.c_ulong(flags), data.encode()), f"mounting {where} is refused")


def check(result: int, what: str) -> None:
    if result < 0:
        raise OSError(f"{what} ({os.strerror(ctypes.get_errno())})")


def limit(request: dict[str, Any]) -> None:
    """Set resource limits and drop all privileges for good."""
    for kind, least in (
        (resource.RLIMIT_AS, request["memory"]),
        (resource.RLIMIT_FSIZE, request["file_size"]),
        (resource.RLIMIT_NOFILE, 64),
        (resource.RLIMIT_NPROC, 0),  # binds every user but root
        (resource.RLIMIT_CORE, 0),
    ):
        _, most = resource.getrlimit(kind)
        least = least if most == resource.RLIM_INFINITY else min(least, most)
        resource.setrlimit(kind, (least, least))
    # SIGXCPU at the first says so to the watcher; a program that catches it is killed a second later.
    resource.setrlimit(resource.RLIMIT_CPU, (request["cpu"], request["cpu"] + 1))
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    for capability in range(64):
        libc.prctl(PR_CAPBSET_DROP, capability, 0, 0, 0)
    libc.capset(struct.pack("Ii", 0x20080522, 0), bytes(24))


def refuse_calls() -> None:
    """Install a seccomp filter that answers EPERM to the calls of REFUSED and any foreign architecture."""
    architecture, calls = REFUSED[platform.machine()]
    numbers = sorted(calls)
    refuse, allow = 0x00050001, 0x7FFF0000
    load, equal, at_least, answer = 0x20, 0x15, 0x35, 0x06
    # (code, jump if true, jump if false, value); jumps are counted from the next line; the last two answer.
    lines = [(load, 0, 0, 4), (equal, 0, len(numbers) + 3, architecture), (load, 0, 0, 0)]
    lines.append((at_least, len(numbers) + 1, 0, 0x40000000))  # x32's numbers
    lines += [(equal, len(numbers) - place, 0, number) for place, number in enumerate(numbers)]
    lines += [(answer, 0, 0, allow), (answer, 0, 0, refuse)]
    program = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    header = struct.pack("HxxxxxxP", len(lines), ctypes.addressof(program))
    check(libc.prctl(PR_SET_SECCOMP, 2, header, 0, 0), "seccomp is refused")


def read_all(descriptor: int) -> bytes:
    parts = []
    while part := os.read(descriptor, 1 << 16):
        parts.append(part)
    return b"".join(parts)


if __name__ == "__main__":
    main()
