"""System calls that a program has no business with, and a filter of them as bytes, for bubblewrap.

Other processes' memory, keys, mounts, memory that no limit counts; and what is left to the owner of a file where it cannot be
opened for writing: its mode, owner, times and attributes.

Denied calls fail with EPERM; making another process fails with EAGAIN, as if a limit had been reached, unless processes are
allowed; clone3 does not exist (ENOSYS), so that the C library falls back to clone, whose flags can be read. A call of another
architecture's numbers ends the process.
"""

from __future__ import annotations

import errno
import platform
import struct

ARCHITECTURES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
NUMBERS: dict[str, tuple[int | None, int | None]] = {  # name: (x86_64, aarch64); None where it does not exist
    "fork": (57, None), "vfork": (58, None), "clone": (56, 220), "clone3": (435, 435), "socket": (41, 198),
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "pidfd_open": (434, 434), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427), "userfaultfd": (323, 282), "bpf": (321, 280), "perf_event_open": (298, 241),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "unshare": (272, 97), "setns": (308, 268),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "move_mount": (429, 429),
    "open_tree": (428, 428), "fsopen": (430, 430), "fsmount": (432, 432), "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265), "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "mlock": (149, 228), "mlockall": (151, 230), "mlock2": (325, 284), "kexec_load": (246, 104), "init_module": (175, 105),
    "finit_module": (313, 273), "swapon": (167, 224), "quotactl": (179, 60), "fanotify_init": (300, 262),
    "inotify_init1": (294, 26), "personality": (135, 92), "pidfd_getfd": (438, 438), "kcmp": (312, 272), "listen": (50, 201),
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None),
    "lchown": (94, None), "fchown": (93, 55), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None),
    "futimesat": (261, None), "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7),
    "setxattrat": (463, 463), "removexattr": (197, 14), "lremovexattr": (198, 15), "fremovexattr": (199, 16),
    "removexattrat": (466, 466), "file_setattr": (469, 469),
}  # fmt: skip
MAKE_A_PROCESS = ("fork", "vfork", "clone")

LOAD, EQUAL, ANY_BIT, RETURN = 0x20, 0x15, 0x45, 0x06
ALLOW, FAIL, KILL = 0x7FFF0000, 0x00050000, 0x80000000
NUMBER, ARCHITECTURE, FLAGS = 0, 4, 16  # offsets in struct seccomp_data; FLAGS is the low half of the first argument
CLONE_THREAD, X32 = 0x00010000, 0x40000000


def _step(code: int, value: int, true: int = 0, false: int = 0) -> bytes:
    return struct.pack("HBBI", code, true, false, value)


def supported() -> bool:
    return platform.machine() in ARCHITECTURES


def denied() -> dict[str, int]:
    """The calls that exist on this machine, by name."""
    column = list(ARCHITECTURES).index(platform.machine()) if supported() else 0
    return {name: number for name, numbers in NUMBERS.items() if (number := numbers[column]) is not None}


def program(allow_processes: bool) -> bytes:
    """The filter for this machine, as the kernel's struct sock_filter[].

    >>> len(program(allow_processes=False)) % 8
    0
    """
    machine = platform.machine()
    steps = [
        _step(LOAD, ARCHITECTURE),
        _step(EQUAL, ARCHITECTURES[machine], true=1),
        _step(RETURN, KILL),
        _step(LOAD, NUMBER),
    ]
    if machine == "x86_64":
        steps += [_step(ANY_BIT, X32, false=1), _step(RETURN, KILL)]
    for name, number in denied().items():
        if allow_processes and name in MAKE_A_PROCESS:
            continue
        if name == "clone":
            steps += [
                _step(EQUAL, number, false=4),
                _step(LOAD, FLAGS),
                _step(ANY_BIT, CLONE_THREAD, true=1),
                _step(RETURN, FAIL | errno.EAGAIN),
                _step(RETURN, ALLOW),
            ]
            continue
        failure = errno.ENOSYS if name == "clone3" else errno.EAGAIN if name in MAKE_A_PROCESS else errno.EPERM
        steps += [_step(EQUAL, number, false=1), _step(RETURN, FAIL | failure)]
    return b"".join([*steps, _step(RETURN, ALLOW)])
