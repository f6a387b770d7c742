# SPDX-License-Identifier: Apache-2.0
"""The inside of the sandbox: gives up what a program must not have, then runs it. Started by `sandbox.run` as a script
of its own, with the standard library only.

A seccomp filter allows the system calls that computing in Python needs and refuses every other one with EPERM: no
network, no file opened for writing, nothing made, renamed or removed, no new process, no signal to another one. It
needs no privilege, and holds for root as for anybody else.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import types
from typing import Any

__all__ = ["filter_program", "main"]

# system call -> its number on x86_64 and on aarch64; None = that machine has no such call
_ALLOWED: dict[str, tuple[int, int | None]] = {
    "access": (21, None), "arch_prctl": (158, None), "brk": (12, 214), "clock_getres": (229, 114),
    "clock_gettime": (228, 113), "clock_nanosleep": (230, 115), "close": (3, 57), "dup": (32, 23),
    "epoll_create1": (291, 20), "epoll_ctl": (233, 21), "epoll_pwait": (281, 22), "epoll_wait": (232, None),
    "eventfd2": (290, 19), "exit": (60, 93), "exit_group": (231, 94), "faccessat": (269, 48),
    "faccessat2": (439, 439), "fstat": (5, 80), "futex": (202, 98), "getcpu": (309, 168),
    "getcwd": (79, 17), "getdents64": (217, 61), "getegid": (108, 177), "geteuid": (107, 175), "getgid": (104, 176),
    "getpid": (39, 172), "getppid": (110, 173), "getrandom": (318, 278), "getrlimit": (97, 163),
    "getrusage": (98, 165), "gettid": (186, 178), "gettimeofday": (96, 169), "getuid": (102, 174),
    "lseek": (8, 62), "lstat": (6, None), "madvise": (28, 233), "membarrier": (324, 283), "mmap": (9, 222),
    "mprotect": (10, 226), "mremap": (25, 216), "munmap": (11, 215), "nanosleep": (35, 101),
    "newfstatat": (262, 79), "pipe2": (293, 59), "poll": (7, None), "ppoll": (271, 73), "pread64": (17, 67),
    "pselect6": (270, 72), "read": (0, 63), "readlink": (89, None), "readlinkat": (267, 78), "readv": (19, 65),
    "restart_syscall": (219, 128), "rseq": (334, 293), "rt_sigaction": (13, 134), "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139), "sched_getaffinity": (204, 123), "sched_yield": (24, 124), "select": (23, None),
    "set_robust_list": (273, 99), "set_tid_address": (218, 96), "setitimer": (38, 103), "sigaltstack": (131, 132),
    "stat": (4, None), "statx": (332, 291), "sysinfo": (99, 179), "time": (201, None), "times": (100, 153),
    "uname": (63, 160), "write": (1, 64), "writev": (20, 66),
}  # fmt: skip
# system call -> the numbers, the argument that is looked at, a mask, and what it must be under the mask
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_CLONE_THREAD = 0x10000
_TCGETS = 0x5401  # what `open` asks to know whether a file is a terminal
_OWNER = 0x8  # a bit of the fcntl commands that have another process signalled, and of none that Python needs
_CONDITIONAL: dict[str, tuple[tuple[int, int | None], int, int, int]] = {
    "open": ((2, None), 1, _WRITING, 0),
    "openat": ((257, 56), 2, _WRITING, 0),
    "clone": ((56, 220), 0, _CLONE_THREAD, _CLONE_THREAD),
    "ioctl": ((16, 29), 1, 0xFFFFFFFF, _TCGETS),
    "fcntl": ((72, 25), 1, _OWNER, 0),
}
_TGKILL = (234, 131)
_CLONE3 = (435, 435)
_MACHINES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}  # -> column of the numbers, audit's number

_LOAD, _EQUAL, _AND, _RETURN = 0x20, 0x15, 0x54, 0x06  # BPF: load a word, jump if equal, and, return
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_AT_NUMBER, _AT_ARCH, _AT_ARGUMENTS = 0, 4, 16  # in struct seccomp_data

_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 1, 22, 38, 2
_MOST_OUTPUT = 65_536  # bytes of the verdict's file
_LONGEST_DETAIL = 500  # characters


def filter_program(machine: str, pid: int) -> bytes:
    """The filter as struct sock_filter's, for a process `pid` on that machine. Raises OSError on another machine."""
    if machine not in _MACHINES:
        raise OSError(f"the sandbox knows the system calls of {' and '.join(_MACHINES)}; this machine is {machine}")
    column, arch = _MACHINES[machine]
    program = [(_LOAD, 0, 0, _AT_ARCH), (_EQUAL, 1, 0, arch), (_RETURN, 0, 0, _KILL), (_LOAD, 0, 0, _AT_NUMBER)]
    conditional = {**_CONDITIONAL, "tgkill": (_TGKILL, 0, 0xFFFFFFFF, pid)}  # abort() signals the process itself
    for numbers in _ALLOWED.values():
        if (number := numbers[column]) is not None:
            program += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, _ALLOW)]
    for numbers, argument, mask, wanted in conditional.values():
        if (number := numbers[column]) is not None:
            # the kernel takes the lower half of each of these arguments, so only that is looked at
            program += [
                (_EQUAL, 0, 5, number),
                (_LOAD, 0, 0, _AT_ARGUMENTS + 8 * argument),
                (_AND, 0, 0, mask),
                (_EQUAL, 0, 1, wanted),
                (_RETURN, 0, 0, _ALLOW),
                (_RETURN, 0, 0, _ERRNO | _EPERM),
            ]
    # glibc falls back to `clone`, whose flags can be looked at
    program += [(_EQUAL, 0, 1, _CLONE3[column]), (_RETURN, 0, 0, _ERRNO | _ENOSYS), (_RETURN, 0, 0, _ERRNO | _EPERM)]
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _confine(memory_bytes: int, cpu_s: int) -> None:
    """Gives it all up, for good. Raises OSError where the kernel can't."""
    limits = {
        "RLIMIT_AS": (memory_bytes, memory_bytes),
        "RLIMIT_CORE": (0, 0),
        "RLIMIT_CPU": (cpu_s, cpu_s + 1),
        "RLIMIT_FSIZE": (_MOST_OUTPUT, _MOST_OUTPUT),
        "RLIMIT_NOFILE": (64, 64),
    }
    for name, values in limits.items():
        try:
            resource.setrlimit(getattr(resource, name), values)
        except ValueError as error:  # above what this user may have, for one
            raise OSError(f"{name}: can't be set to {values}: {error}") from error
    libc = ctypes.CDLL(None, use_errno=True)
    code = filter_program(platform.machine(), os.getpid())
    instructions = ctypes.create_string_buffer(code)
    program = struct.pack("@HP", len(code) // 8, ctypes.addressof(instructions))  # struct sock_fprog
    calls: list[tuple[Any, ...]] = [
        (_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0),
        (_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0),
        (_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.c_char_p(program), 0, 0),
    ]
    for call in calls:
        if libc.prctl(*call):
            raise OSError(ctypes.get_errno(), f"prctl {call[0]}: {os.strerror(ctypes.get_errno())}")


def _run(program: str) -> tuple[str, str]:
    """The verdict on a program that has been given everything up, and what is to be said of it."""
    module = types.ModuleType("program")
    sys.modules["program"] = module  # dataclasses and typing look a class's module up
    try:
        exec(compile(program, "program", "exec"), module.__dict__)
    except AssertionError as error:
        return "failed", f"AssertionError: {error}"
    except MemoryError:
        return "memory", "MemoryError"
    except SystemExit:
        return "error", "SystemExit: it ended itself"
    except BaseException as error:
        return "error", f"{type(error).__name__}: {error}"
    return "passed", ""


def main() -> None:
    """Reads the program from stdin, its limits from the arguments; writes [verdict, detail] to what was stdout."""
    memory_bytes, cpu_s = map(int, sys.argv[1:])
    program = sys.stdin.buffer.read().decode()
    answer_to = os.dup(1)
    nothing = os.open(os.devnull, os.O_RDWR)
    for stream in (0, 1, 2):
        os.dup2(nothing, stream)
    sys.stdin = os.fdopen(0)  # the old one has met its end
    del sys.path[0]  # this file's folder
    try:
        _confine(memory_bytes, cpu_s)
    except OSError as error:
        verdict, detail = "unconfined", str(error)
    else:
        verdict, detail = _run(program)
    os.write(answer_to, json.dumps([verdict, detail[:_LONGEST_DETAIL]]).encode())
    os._exit(0)  # a thread that the program has left doesn't hold it up


if __name__ == "__main__":
    main()
