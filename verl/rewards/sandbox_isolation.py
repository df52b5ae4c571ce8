"""What takes everything from a process that model-written code may not have; part of :mod:`verl.rewards.sandbox_child`.

Linux only, standard library only: it runs in an interpreter of its own, before any of the program does.
"""

from __future__ import annotations

import ctypes
import errno
import os
import struct
import sys
from collections.abc import Callable

NAMESPACES = {
    "mount namespace": 0x00020000,
    "PID namespace": 0x20000000,
    "network namespace": 0x40000000,
    "IPC namespace": 0x08000000,
    "UTS namespace": 0x04000000,
}
NEWUSER = 0x10000000
ANY_NAMESPACE = 0x7E020080
FIRST_UID, UIDS = 61184, 4335  # no account has these ids; systemd gives them to passing services too

libc = ctypes.CDLL(None, use_errno=True)


def call(function: str, *arguments: object) -> int:
    result = getattr(libc, function)(*arguments)
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def prctl(option: int, *values: object) -> int:
    padded = [v if isinstance(v, bytes | ctypes.Structure) else ctypes.c_ulong(v) for v in values]  # type: ignore[arg-type]
    return call("prctl", option, *padded, *[ctypes.c_ulong(0)] * (4 - len(padded)))


def framed(*fields: bytes) -> bytes:
    """What the two sides say to each other: number of fields, length of each (uint32, network order), the fields."""
    return struct.pack(f"!I{len(fields)}I", len(fields), *map(len, fields)) + b"".join(fields)


def unframed(read: Callable[[int], bytes]) -> list[bytes]:
    """The fields of the next message. ``read`` gives at most so many bytes; raises EOFError where it gives none."""

    def exactly(length: int) -> bytes:
        data = bytearray()
        while len(data) < length:
            part = read(min(length - len(data), 2**20))
            if not part:
                raise EOFError("its process ended")
            data += part
        return bytes(data)

    (count,) = struct.unpack("!I", exactly(4))
    return [exactly(length) for length in struct.unpack(f"!{count}I", exactly(4 * count))]


class Isolation:
    """Puts this process where the program may run, one feature after the other."""

    def __init__(self, file_limit: int, folder: str) -> None:
        self.missing: list[str] = []  # features that the platform does not have, each with the reason
        self.pid_namespace = False
        self.can_end_all = False  # whatever the program starts, by that namespace or a user of its own
        self._proc = os.open("/proc/self", os.O_RDONLY | os.O_DIRECTORY)
        self.oom = os.open("/proc/self/oom_score_adj", os.O_WRONLY)
        root = os.geteuid() == 0
        # Root makes the namespaces with its own rights, since it may read a Python in /root, and is dropped after that.
        if not (root and self._try("mount namespace", call, "unshare", NAMESPACES["mount namespace"])):
            self.missing.clear()
            self._try("user namespace", self._user_namespace)
            self._try("mount namespace", call, "unshare", NAMESPACES["mount namespace"])
        for name, flag in list(NAMESPACES.items())[1:]:
            made = self._try(name, call, "unshare", flag)
            self.pid_namespace |= made and name == "PID namespace"
        if self.lacks("mount namespace") or not self._try("file system of its own", self._new_root, file_limit):
            os.chdir(folder)
            if root:
                os.chown(folder, FIRST_UID + os.getpid() % UIDS, -1)
        if root and self._try("user of its own", self._drop_user):
            self._try("user namespace", self._user_namespace)
            self._try("a standard library that other users may read", lambda: os.close(os.open(os.__file__, 0)))
            self.can_end_all = True
        self.can_end_all |= self.pid_namespace
        prctl(38, 1)  # PR_SET_NO_NEW_PRIVS
        prctl(4, 0)  # PR_SET_DUMPABLE: nothing of the same user may look into this process
        call("capset", struct.pack("Ii", 0x20080522, 0), bytes(24))
        self._try("system call filter", syscall_filter)
        self._try("pidfd_open", lambda: os.close(os.pidfd_open(os.getpid())))
        os.close(self._proc)

    def lacks(self, feature: str) -> bool:
        return any(reason.startswith(feature) for reason in self.missing)

    def _try(self, name: str, step: Callable[..., object], *arguments: object) -> bool:
        try:
            step(*arguments)
        except OSError as error:
            self.missing.append(f"{name} ({error.strerror})")
            return False
        return True

    def _write(self, name: str, text: str) -> None:
        handle = os.open(name, os.O_WRONLY, dir_fd=self._proc)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)

    def _user_namespace(self) -> None:
        uid, gid = os.geteuid(), os.getegid()
        call("unshare", NEWUSER)
        self._write("setgroups", "deny")
        self._write("uid_map", f"{uid} {uid} 1")
        self._write("gid_map", f"{gid} {gid} 1")

    def _drop_user(self) -> None:
        # An id of its own for each sandbox: process limits are counted by it, and root has none.
        uid = FIRST_UID + os.getpid() % UIDS
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
        prctl(4, 1)  # still this process's own /proc entry

    def _new_root(self, file_limit: int) -> None:
        """A file tree in memory: Python's library and the system's read-only, four devices, and a small ``/tmp``."""
        bind, recursive, private, nosuid, nodev, noexec, detach = 0x1000, 0x4000, 0x40000, 2, 4, 8, 2
        call("mount", None, b"/", None, recursive | private, None)
        base = "/sys"  # only a place to mount on: nothing under it is needed
        call("mount", b"tmpfs", base.encode(), b"tmpfs", nosuid | nodev, b"size=1m,mode=755")
        for path in visible():
            target = base + path
            os.makedirs(os.path.dirname(target), exist_ok=True)
            if os.path.islink(path) and path in SYSTEM_LIBRARIES:
                os.symlink(os.readlink(path), target)
                continue
            if os.path.isdir(path):
                os.mkdir(target)
            else:
                os.close(os.open(target, os.O_CREAT | os.O_WRONLY))
            call("mount", path.encode(), target.encode(), None, bind | recursive, None)
        os.mkdir(base + "/tmp")
        os.chdir(base)
        call("pivot_root", b".", b".")
        call("umount2", b".", detach)
        os.chdir("/")
        read_only = struct.pack("QQQQ", 1 | nosuid, 0, 0, 0)
        number, here, whole_tree = ctypes.c_long(MOUNT_SETATTR), ctypes.c_long(-100), ctypes.c_long(0x8000)
        call("syscall", number, here, b"/", whole_tree, read_only, ctypes.c_long(len(read_only)))
        options = f"size={file_limit},nr_inodes=4096,mode=1777".encode()
        call("mount", b"tmpfs", b"/tmp", b"tmpfs", nosuid | nodev | noexec, options)
        os.chdir("/tmp")


SYSTEM_LIBRARIES = ("/usr/lib", "/usr/lib32", "/usr/lib64", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache")
DEVICES = ("/dev/null", "/dev/zero", "/dev/random", "/dev/urandom")


def visible() -> list[str]:
    """What a program sees of the machine's files; no path lies in another."""
    own = [os.path.dirname(os.path.dirname(os.__file__)), *(p for p in sys.path if os.path.isdir(p))]
    found: list[str] = []
    for path in sorted(filter(os.path.exists, {*SYSTEM_LIBRARIES, *DEVICES, *own})):
        if not any(path.startswith(above + "/") for above in found):
            found.append(path)
    return found


# Numbers of system calls: x86_64, aarch64. From 424 on they are the same everywhere.
MOUNT_SETATTR = 442
REFUSED = {
    # memory that no limit counts; other processes; keys, which have no namespace; mounts; more namespaces; and what
    # has the longest record of holes in the kernel
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271),
    "kcmp": (312, 272), "pidfd_getfd": (438, 438), "add_key": (248, 217), "request_key": (249, 218),
    "keyctl": (250, 219), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsmount": (432, 432),
    "mount_setattr": (442, 442), "open_by_handle_at": (304, 265), "unshare": (272, 97), "setns": (308, 268),
    "bpf": (321, 280), "perf_event_open": (298, 241), "userfaultfd": (323, 282), "io_uring_setup": (425, 425),
}  # fmt: skip
SOCKET, CLONE, PRLIMIT = (41, 198), (56, 220), (302, 261)
CLONE3 = 435
ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}


def syscall_filter() -> bytes:
    """The filter's program (seccomp BPF). Raises OSError: no system call numbers for this kind of machine."""
    machine = os.uname().machine
    if machine not in ARCHITECTURES or sys.maxsize < 2**32:
        raise OSError(errno.ENOSYS, f"not known for {machine}")
    column, architecture = ARCHITECTURES[machine]
    load, equal, at_least, any_bit, give = 0x20, 0x15, 0x35, 0x45, 0x06
    allow, refuse, unknown = 0x7FFF0000, 0x00050000 | errno.EPERM, 0x00050000 | errno.ENOSYS
    number, arch, argument = 0, 4, 16  # where they stand in what the filter is shown

    program = [(load, 0, 0, arch), (equal, 1, 0, architecture), (give, 0, 0, refuse), (load, 0, 0, number)]
    program += [(at_least, 0, 1, 0x40000000), (give, 0, 0, refuse)]  # x86_64's second table of numbers
    for numbers in REFUSED.values():
        program += [(equal, 0, 1, numbers[column]), (give, 0, 0, refuse)]
    program += [(equal, 0, 1, CLONE3), (give, 0, 0, unknown)]  # its flags cannot be seen; the C library falls back
    for numbers, test in (
        (SOCKET, (equal, 0, 1, 1)),  # AF_UNIX: the only family that a network namespace is sure to hold
        (PRLIMIT, (equal, 0, 1, 0)),  # of the caller itself
        (CLONE, (any_bit, 1, 0, ANY_NAMESPACE)),
    ):
        program += [(equal, 0, 4, numbers[column]), (load, 0, 0, argument), test]
        program += [(give, 0, 0, allow), (give, 0, 0, refuse)]
    program.append((give, 0, 0, allow))
    return b"".join(struct.pack("HBBI", *instruction) for instruction in program)
