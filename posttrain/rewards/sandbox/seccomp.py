"""The system calls that a program may make, as a filter for the kernel. Any other call fails: deny by default.

A program computes, reads files and talks to the grader through pipes. So no allowed call makes a socket, another process or
another program, none names another process (its limits, priority, processors, signals, memory), and none changes a file system.
If a call is needed but some of its arguments are not, the filter compares the arguments:

- `socketpair` makes only unnamed stream pairs (asyncio wakes itself through one), and `sendto` takes no address;
- `prlimit64` applies to the caller (pid 0), `kill` and `tgkill` to the caller's own pid;
- `prctl` sets names only, so that the signal that ends a program with its grader cannot be switched off;
- `fcntl` and `ioctl` are for plain descriptors: no owner that receives signals, no lease, no lock, no terminal;
- `futex` is for plain locks: one with priority inheritance names the thread that holds it, of any process,
  and changes its priority;
- `open` is for reading or writing: Landlock allows a call that asks for neither (access mode 3), which can create a file; its
  first versions allow truncating a file that is opened for reading;
- `clone` makes threads, and neither it nor `close_range` makes a second table of open files, which would have its own limit.

A program with its own file system may also make, change and remove files and links there (`PRIVATE`). Without one, nothing is
writable and reading a link fails (EINVAL, as for a file that is not a link): Landlock would show which files the user's other
processes have open. A denied call fails with EPERM; making a process fails with EAGAIN, as if a limit had been reached; clone3
and newer calls do not exist (ENOSYS), so that the C library falls back to the listed ones. A call of another architecture
(32-bit x86) ends the process; numbers of x32 are too large to be listed.
"""

from __future__ import annotations

import errno
import platform
import struct
from functools import lru_cache

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
Numbers = dict[str, tuple[int | None, int | None]]


def _calls(text: str) -> Numbers:
    """Read a table of system calls: `name:x86_64:aarch64`, with - if an architecture does not have the call."""
    rows = (entry.split(":") for entry in text.split())
    return {name: tuple(None if n == "-" else int(n) for n in own) for name, *own in rows}  # type: ignore[misc]


ALLOWED = _calls(
    # descriptors and files; the mechanism decides which files
    "read:0:63 write:1:64 readv:19:65 writev:20:66 pread64:17:67 pwrite64:18:68 close:3:57 lseek:8:62 dup:32:23 dup2:33:- "
    "dup3:292:24 pipe:22:- pipe2:293:59 access:21:- faccessat:269:48 faccessat2:439:439 stat:4:- lstat:6:- fstat:5:80 "
    "newfstatat:262:79 statx:332:291 getdents64:217:61 getcwd:79:17 chdir:80:49 fchdir:81:50 umask:95:166 getsockname:51:204 "
    # waiting
    "poll:7:- ppoll:271:73 select:23:- pselect6:270:72 epoll_create:213:- epoll_create1:291:20 epoll_ctl:233:21 "
    "epoll_wait:232:- epoll_pwait:281:22 epoll_pwait2:441:441 eventfd2:290:19 nanosleep:35:101 clock_nanosleep:230:115 "
    "pause:34:- alarm:37:- setitimer:38:103 getitimer:36:102 restart_syscall:219:128 "
    # its own memory and threads
    "brk:12:214 mmap:9:222 munmap:11:215 mprotect:10:226 mremap:25:216 madvise:28:233 msync:26:227 mseal:462:462 "
    "set_robust_list:273:99 set_tid_address:218:96 rseq:334:293 membarrier:324:283 arch_prctl:158:- sched_yield:24:124 "
    "exit:60:93 exit_group:231:94 "
    # its own signal handlers
    "rt_sigaction:13:134 rt_sigprocmask:14:135 rt_sigreturn:15:139 rt_sigpending:127:136 rt_sigtimedwait:128:137 "
    "rt_sigsuspend:130:133 sigaltstack:131:132 "
    # queries; in those that take a pid the C library asks about its own threads
    "clock_gettime:228:113 clock_getres:229:114 gettimeofday:96:169 time:201:- times:100:153 getrusage:98:165 sysinfo:99:179 "
    "uname:63:160 getcpu:309:168 getpid:39:172 getppid:110:173 gettid:186:178 getuid:102:174 geteuid:107:175 getgid:104:176 "
    "getegid:108:177 getresuid:118:148 getresgid:120:150 getgroups:115:158 getpgrp:111:- getrlimit:97:163 getrandom:318:278 "
    "sched_getaffinity:204:123 sched_getparam:143:121 sched_getscheduler:145:120 sched_get_priority_max:146:125 "
    "sched_get_priority_min:147:126 "
)
PRIVATE = _calls(
    "unlink:87:- unlinkat:263:35 mkdir:83:- mkdirat:258:34 rmdir:84:- rename:82:- renameat:264:38 renameat2:316:276 truncate:76:45 "
    "ftruncate:77:46 fsync:74:82 fdatasync:75:83 fallocate:285:47 symlink:88:- symlinkat:266:36 link:86:- linkat:265:37 chmod:90:- "
    "fchmod:91:52 fchmodat:268:53 utime:132:- utimes:235:- utimensat:280:88 listxattr:194:11 llistxattr:195:12 getxattr:191:8 "
    "lgetxattr:192:9 statfs:137:43 fstatfs:138:44 readlink:89:- readlinkat:267:78 "
)
COMPARED = _calls(
    "socketpair:53:199 sendto:44:206 recvfrom:45:207 prlimit64:302:261 kill:62:129 tgkill:234:131 prctl:157:167 fcntl:72:25 "
    "ioctl:16:29 futex:202:98 close_range:436:436 "
)
OPEN = _calls("open:2:-")
OPENAT = _calls("openat:257:56")
LINKS = {name: PRIVATE[name] for name in ("readlink", "readlinkat")}
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
PROCESSES = _calls("fork:57:- vfork:58:-")
CLONE = _calls("clone:56:220")
CLONE3 = _calls("clone3:435:435")
NEWEST = 450  # a current C library uses calls above this number only if they exist

LOAD, EQUAL, ABOVE, ANY_BIT, RETURN = 0x20, 0x15, 0x25, 0x45, 0x06
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
TRUNCATE = 0o1000
NUMBER, ARCHITECTURE = 0, 4  # offsets in struct seccomp_data
# namespaces, and flags about parents, tracers and pidfds
CLONE_THREAD, CLONE_FILES, CLONE_OTHER = (0x00010000, 0x400, 0x7E02F000)
# a placeholder: the process that sets the filter writes its own pid here
OWN_PID = 0x7FA1FA17

# For each compared call: (offset of 32 bits in struct seccomp_data, accepted values) of its arguments. All must match.
_FIRST, _SECOND, _THIRD, _FLAGS, _ADDRESS = 16, 24, 32, 40, 48
_PRIVATE, _REALTIME = 0x80, 0x100
_PLAIN = (0, 1, 9, 9 | _REALTIME, 10, 3, 4, 5)
_FUTEX = (*(_PRIVATE | operation for operation in _PLAIN), *_PLAIN)
Compared = tuple[tuple[int, tuple[int, ...]], ...]
ARGUMENTS: dict[str, Compared] = {
    # AF_UNIX; SOCK_STREAM, _NONBLOCK, _CLOEXEC
    "socketpair": ((_FIRST, (1,)), (_SECOND, (1, 0x801, 0x80001, 0x80801))),
    # MSG_DONTWAIT, MSG_NOSIGNAL
    "sendto": ((_FLAGS, (0, 0x40, 0x4000, 0x4040)), (_ADDRESS, (0,)), (_ADDRESS + 4, (0,))),
    "recvfrom": ((_FLAGS, (0, 0x2, 0x40, 0x100)),),  # MSG_PEEK, MSG_DONTWAIT, MSG_WAITALL
    "prlimit64": ((_FIRST, (0,)),),
    "kill": ((_FIRST, (OWN_PID,)),),
    "tgkill": ((_FIRST, (OWN_PID,)),),
    "prctl": ((_FIRST, (15, 16, 0x53564D41)),),  # PR_SET_NAME, PR_GET_NAME, PR_SET_VMA
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC
    "fcntl": ((_SECOND, (0, 1, 2, 3, 4, 1030)),),
    # TCGETS TIOCGWINSZ FIONREAD FIONBIO FIO(N)CLEX
    "ioctl": ((_SECOND, (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)),),
    # FUTEX_WAIT, WAKE, WAIT_BITSET, WAKE_BITSET, REQUEUE, CMP_REQUEUE, WAKE_OP
    "futex": ((_SECOND, _FUTEX),),
    "close_range": ((_THIRD, (0, 4)),),  # CLOSE_RANGE_CLOEXEC
}


def _step(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("HBBI", code, true, false, value)


def supported() -> bool:
    return platform.machine() in ARCHITECTURES


def _compare(arguments: Compared) -> list[bytes]:
    """Allow the call if each argument has one of its accepted values, else EPERM."""
    steps: list[bytes] = []
    for offset, values in arguments:
        steps.append(_step(LOAD, offset))
        steps += [_step(EQUAL, value, true=len(values) - i) for i, value in enumerate(values)]
        steps.append(_step(RETURN, FAIL | errno.EPERM))
    return [*steps, _step(RETURN, ALLOW)]


def _opening(flags: int) -> list[bytes]:
    """Allow the call except with access mode 3, which has both of the lowest bits, or O_TRUNC with mode 0, which has
    neither."""
    steps = [_step(LOAD, flags), _step(ANY_BIT, 1, false=1), _step(ANY_BIT, 2, true=3, false=2)]
    steps += [_step(ANY_BIT, 2, true=1), _step(ANY_BIT, TRUNCATE, true=1)]
    return [*steps, _step(RETURN, ALLOW), _step(RETURN, FAIL | errno.EPERM)]


def program(private: bool = False) -> bytes:
    """Return the filter for this machine, as the kernel's struct sock_filter[]; `private`: the program has its own file system.

    >>> len(program()) % 8
    0
    """
    return _program(platform.machine(), private)


@lru_cache
def _program(machine: str, private: bool) -> bytes:
    column = list(ARCHITECTURES).index(machine)
    known = [_step(LOAD, ARCHITECTURE), _step(EQUAL, ARCHITECTURES[machine], true=1)]
    steps = [*known, _step(RETURN, KILL), _step(LOAD, NUMBER)]
    missing, denied = _step(RETURN, FAIL | errno.ENOSYS), _step(RETURN, FAIL | errno.EPERM)
    again = _step(RETURN, FAIL | errno.EAGAIN)

    def add(calls: Numbers, actions: list[bytes]) -> None:
        for numbers in calls.values():
            if (number := numbers[column]) is not None:
                steps.extend([_step(EQUAL, number, false=len(actions)), *actions])

    add(ALLOWED, [_step(RETURN, ALLOW)])
    for name, numbers in COMPARED.items():
        add({name: numbers}, _compare(ARGUMENTS[name]))
    add(OPEN, _opening(_SECOND))
    add(OPENAT, _opening(_THIRD))
    if private:
        add(PRIVATE, [_step(RETURN, ALLOW)])
    else:
        add(LINKS, [_step(RETURN, FAIL | errno.EINVAL)])
    thread = [
        _step(LOAD, _FIRST),
        _step(ANY_BIT, CLONE_OTHER, true=3),
        _step(ANY_BIT, CLONE_THREAD, false=2),
        _step(ANY_BIT, CLONE_FILES, false=1),
        _step(RETURN, ALLOW),
    ]
    add(CLONE, [*thread, again])
    add(PROCESSES, [again])
    add(CLONE3, [missing])
    return b"".join([*steps, _step(ABOVE, NEWEST, false=1), missing, denied])
