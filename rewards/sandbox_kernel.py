"""The kernel layers around a process that runs model-written code, by ctypes; Linux on x86_64 and aarch64.

Three layers, in the order in which they are applied. *Namespaces* give a process its own view of the system.
*Landlock* permanently takes away its right to open files outside of a list of folders. *seccomp* gives the kernel a
small program that judges each later system call of the process by its number and arguments.
None needs root. Each may be missing: Docker and Ubuntu forbid namespaces, old kernels have no Landlock.
"""

import ctypes
import errno
import os
import resource
import signal
import struct
import sys

MEMORY = 512 << 20  # bytes of address space per job
DISK = 16 << 20  # bytes per file, and in the job's whole folder if that is in memory
JOB_FOLDER = "/job"  # under the private root

# Python's own files, and the dynamic libraries that its modules load. Not the folder with this package, although it is
# in the module path during import: runs/ in it holds tests, and a job needs nothing from it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
READABLE = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", os.path.join(sys.base_prefix, "lib")]
READABLE += [path for path in sys.path if os.path.abspath(path) != ROOT]

# The system calls that a job may make: name, number on x86_64, number on aarch64. All others are refused with
# "operation not permitted": bugs in calls that nobody can make do not matter.
ALLOWED = """
read 0 63  write 1 64  readv 19 65  writev 20 66  pread64 17 67  pwrite64 18 68  lseek 8 62  close 3 57  stat 4 -
fstat 5 80  lstat 6 -  newfstatat 262 79  statx 332 291  access 21 -  faccessat 269 48  faccessat2 439 439
readlink 89 -  readlinkat 267 78  getdents64 217 61  getcwd 79 17  chdir 80 49  fchdir 81 50  umask 95 166  dup 32 23
dup2 33 -  dup3 292 24  poll 7 -  ppoll 271 73  select 23 -  pselect6 270 72  ftruncate 77 46  fsync 74 82
fdatasync 75 83  rename 82 -  renameat 264 38  unlink 87 -  unlinkat 263 35  munmap 11 215  mprotect 10 226
mremap 25 216  msync 26 227  madvise 28 233  brk 12 214  getsockname 51 204
set_robust_list 273 99  rseq 334 293  gettid 186 178  sched_yield 24 124  sched_getaffinity 204 123  getpid 39 172
getppid 110 173  getuid 102 174  geteuid 107 175  getgid 104 176  getegid 108 177  uname 63 160
getrlimit 97 163  getrusage 98 165  times 100 153  getrandom 318 278  exit 60 93  exit_group 231 94
rt_sigaction 13 134  rt_sigprocmask 14 135  rt_sigpending 127 136  rt_sigtimedwait 128 137  rt_sigsuspend 130 133
rt_sigreturn 15 139  sigaltstack 131 132  restart_syscall 219 128  pause 34 -  alarm 37 -  setitimer 38 103
getitimer 36 102  nanosleep 35 101
gettimeofday 96 169  time 201 -
"""
# Calls that succeed without doing anything. Locks: a job is alone with its files, and the kernel would keep as many
# locks as it asks for. Modes and times: other jobs could read what one sets on Python's files. Extended attributes:
# shutil.copy2() should work, which asks for them; there are none.
GRANTED = """
flock 73 32  chmod 90 -  fchmod 91 52  fchmodat 268 53  utime 132 -  utimes 235 -  futimesat 261 -  utimensat 280 88
listxattr 194 11  llistxattr 195 12  flistxattr 196 13
"""

# What the filter can answer.
ALLOW, KILL, DONE = 0x7FFF0000, 0x80000000, 0x50000  # done: success without doing anything
REFUSE, AGAIN, UNKNOWN = [DONE + error for error in (errno.EPERM, errno.EAGAIN, errno.ENOSYS)]
# Calls that are judged by one argument: number on x86_64, on aarch64 (-1: none), place of the argument, the bits of it
# that count, answers to single values of these bits, and the answer to all other values.
ALL = 0xFFFFFFFF
JUDGED = {
    # By how a file is opened. Access mode 3 neither reads nor writes and so needs no Landlock right; O_TRUNC without
    # write access is what Landlock cannot forbid before Linux 6.2.
    "open": (2, -1, 1, 0x203, dict.fromkeys([3, 0x200, 0x203], REFUSE), ALLOW),
    "openat": (257, 56, 2, 0x203, dict.fromkeys([3, 0x200, 0x203], REFUSE), ALLOW),
    # By flags: urgent data, for one, takes another path through the kernel.
    "sendto": (44, 206, 3, ALL, {0: ALLOW}, REFUSE),
    "recvfrom": (45, 207, 3, ALL, {0: ALLOW}, REFUSE),
    # By command: of fcntl duplicate, flags, and locks (granted, like flock); of ioctl whether it is a terminal, bytes
    # waiting, blocking, close on exec. Others could make a descriptor send signals to any process of the user, or
    # leave marks on a descriptor or file that other jobs can read.
    "fcntl": (72, 25, 1, ALL, dict.fromkeys([0, 1, 2, 3, 4, 5, 1030], ALLOW) | {6: DONE, 7: DONE}, REFUSE),
    "ioctl": (16, 29, 1, ALL, dict.fromkeys([0x5401, 0x541B, 0x5421, 0x5450, 0x5451], ALLOW), REFUSE),
    # By option: kind, error, protocol, family. Others would tell the socket's number, which counts on from job to job,
    # or the process that made it.
    "getsockopt": (55, 209, 2, ALL, dict.fromkeys([3, 4, 38, 39], ALLOW), REFUSE),
    # By clock. Negative ones are the processor times of other visible processes.
    "clock_gettime": (228, 113, 0, 1 << 31, {0: ALLOW}, REFUSE),
    "clock_nanosleep": (230, 115, 0, 1 << 31, {0: ALLOW}, REFUSE),
    "clock_getres": (229, 114, 0, 1 << 31, {0: ALLOW}, REFUSE),
    # Shared anonymous memory stays allocated as a whole while one page of it is mapped, but only that page counts.
    "mmap": (9, 222, 3, 0x21, {0x21: REFUSE}, ALLOW),
    # How threads wait for each other. A futex without the private bit is shared by all who map its file, such as one
    # of Python's, so jobs could communicate through it: nobody may wait for such a futex or wake it. The call returns
    # "try again", which pthread_join then does.
    "futex": (202, 98, 1, 0x80, {0x80: ALLOW}, AGAIN),
    # The full flags of a thread in glibc and in musl: a thread that shared less could have its own limits.
    "clone": (56, 220, 0, ALL, {0x3D0F00: ALLOW, 0x7D0F00: ALLOW}, REFUSE),
    "prlimit64": (302, 261, 0, ALL, {0: ALLOW}, REFUSE),  # of which process: itself
}
MACHINES = ["x86_64", "aarch64"]
MACHINE = os.uname().machine
COLUMN = MACHINES.index(MACHINE) if MACHINE in MACHINES else 0
AUDIT_ARCH = [0xC000003E, 0xC00000B7][COLUMN]  # how seccomp names the machine
PIVOT_ROOT, CAPSET = (155, 41), (126, 91)
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # from 424 on, numbers are the same

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 1 << 14, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_SET_THP_DISABLE = 1, 4, 22, 38, 41

libc = ctypes.CDLL(None, use_errno=True)


def call(function, *arguments):
    """Calls a C function with 64-bit integers (ctypes defaults to 32 bits); raises OSError if it returns -1."""
    result = function(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def hide_memory():
    """From now on, no other process of this user can read this one's memory or environment (HF_TOKEN)."""
    if sys.platform == "linux":
        call(libc.prctl, PR_SET_DUMPABLE, 0, 0, 0, 0)


def die_first():
    """If memory runs out, the kernel kills this process and its children before the trainer."""
    if sys.platform == "linux":
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


def probe():
    """Which layers work here, each tried in a process of its own."""
    if sys.platform != "linux" or MACHINE not in MACHINES:
        return {"namespaces": False, "Landlock": False, "seccomp": False}

    def private_job():
        enter_namespaces()
        if not (pid := clone(True)):
            mount_folder()
            os._exit(0)
        return os.waitpid(pid, 0)[1] == 0

    def no_files():
        restrict_files([])
        return refuses(os.listdir, "/")

    def no_calls():
        restrict_calls()
        return refuses(os.fork)

    return {"namespaces": _holds(private_job), "Landlock": _holds(no_files), "seccomp": _holds(no_calls)}


def refuses(function, *arguments):
    try:
        function(*arguments)
    except PermissionError:
        return True
    return False


def _holds(layer):
    pid = os.fork()
    if pid:
        return os.waitpid(pid, 0)[1] == 0
    held = False
    try:
        held = layer()
    finally:  # also on an error, and never back into the caller
        os._exit(0 if held else 1)


def enter_namespaces():
    """Permanently limits what this process sees: no network, and only the files in READABLE, read-only."""
    user, group = os.getuid(), os.getgid()
    call(libc.unshare, CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)
    for name, text in ("setgroups", "deny"), ("uid_map", f"65534 {user} 1"), ("gid_map", f"65534 {group} 1"):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    call(libc.mount, None, b"/", None, MS_REC | MS_PRIVATE, None)  # our mounts stay private
    with open("/proc/self/mountinfo", "rb") as file:  # there, a space in a path is \040
        mounts = [os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")) for line in file]
    root = "/proc"  # cover it with an empty folder in memory, fill that, make it the root, drop the old root
    call(libc.mount, b"tmpfs", root.encode(), b"tmpfs", 0, b"size=64k")
    seen = []
    for path in sorted(p for p in READABLE if os.path.isdir(p)):
        if any(path == s or path.startswith(s + "/") for s in seen):
            continue
        seen.append(path)
        os.makedirs(root + path)
        call(libc.mount, path.encode(), (root + path).encode(), None, MS_BIND | MS_REC, None)
        real = os.path.realpath(path)
        below = [m.removeprefix(real) for m in mounts if m.startswith(real + "/") and os.path.exists(m)]
        for mount in ["", *below]:  # each mount needs its own flag
            make_read_only(root + path + mount)
    os.mkdir(root + "/dev")
    with open(root + os.devnull, "w"):
        pass
    call(libc.mount, os.devnull.encode(), (root + os.devnull).encode(), None, MS_BIND, None)
    make_read_only(root + os.devnull)  # protects its mode; it can still be written to
    os.mkdir(root + JOB_FOLDER)
    call(libc.mount, None, root.encode(), None, MS_REMOUNT | MS_BIND | MS_RDONLY, None)
    os.chdir(root)
    call(libc.syscall, PIVOT_ROOT[COLUMN], b".", b".")
    call(libc.umount2, b".", MNT_DETACH)
    os.chdir("/")


def make_read_only(mount):
    keep = os.statvfs(mount).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)  # flags that we may not clear
    call(libc.mount, None, mount.encode(), None, MS_REMOUNT | MS_BIND | MS_RDONLY | keep, None)


def clone(namespaces):
    """os.fork, with `namespaces` into new ones: no process, mount or shared memory outlives the job."""
    if not namespaces:
        return os.fork()
    flags = CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | signal.SIGCHLD
    return call(libc.syscall, JUDGED["clone"][COLUMN], flags, 0, 0, 0, 0)


def mount_folder():
    call(libc.mount, b"tmpfs", JOB_FOLDER.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"nr_inodes=1k,size=%d" % DISK)


def confine(layers, folder, seconds):
    """Applies all layers to this process, which may then write only in its folder. `seconds`: of processor time."""
    os.setsid()
    if layers["namespaces"]:
        mount_folder()
    os.chdir(folder)
    # The kernel counts threads per user and user namespace: without one, the trainer's and all jobs' count together.
    threads = 64 if layers["namespaces"] else 4096
    limits = {"CPU": seconds, "FSIZE": DISK, "NOFILE": 64, "NPROC": threads, "CORE": 0}
    if sys.platform == "linux":  # macOS refuses AS and lacks SIGPENDING, of which each timer takes one
        limits |= {"AS": MEMORY, "SIGPENDING": 64}
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if sys.platform == "linux" and MACHINE in MACHINES:
        call(libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # die with the template
        call(libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        # if the kernel knows this: a huge page stays allocated while any part of it is mapped
        libc.prctl(PR_SET_THP_DISABLE, 1, 0, 0, 0)
        call(libc.syscall, CAPSET[COLUMN], struct.pack("Ii", 0x20080522, 0), bytes(24))  # drop root's privileges
    if layers["Landlock"]:
        restrict_files([folder])
    if layers["seccomp"]:
        restrict_calls()


def restrict_files(writable):
    """Landlock: from now on READABLE can be read, `writable` also written, and nothing else opened."""
    version = call(libc.syscall, LANDLOCK_CREATE_RULESET, None, 0, 1)
    call(libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)  # rights that the kernel knows, one bit each
    ruleset = call(libc.syscall, LANDLOCK_CREATE_RULESET, struct.pack("Q", (1 << rights) - 1), 8, 0)
    read = 1 << 2 | 1 << 3  # files, folders
    change = 1 << 1 | (1 << 14 if version >= 3 else 0)  # write, truncate
    write = change | 1 << 5 | 1 << 8  # remove and make, files only
    rules = [(p, read) for p in READABLE if os.path.isdir(p)] + [(p, read | write) for p in writable]
    for path, right in [*rules, (os.devnull, 1 << 2 | change)]:
        place = os.open(path, os.O_PATH | os.O_CLOEXEC)
        call(libc.syscall, LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", right, place), 0)
        os.close(place)
    call(libc.syscall, LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def restrict_calls():
    """seccomp: from now on only the system calls of ALLOWED, GRANTED and JUDGED work."""
    load = lambda offset: (0x20, 0, 0, offset)  # to the accumulator; at 0 the number, 4 machine, from 16 arguments
    keep = lambda bits: (0x54, 0, 0, bits)  # of the accumulator
    unless = lambda test, value, skip: (test, 0, skip, value)  # skips instructions unless the test holds
    equal, at_least = 0x15, 0x35
    answer = lambda verdict: (6, 0, 0, verdict)
    program = [load(4), (equal, 1, 0, AUDIT_ARCH), answer(KILL)]
    program += [load(0), unless(at_least, 0x40000000, 1), answer(KILL)]
    for table, verdict in (ALLOWED, ALLOW), (GRANTED, DONE):
        for number in table.split()[1 + COLUMN :: 3]:
            program += [unless(equal, int(number), 1), answer(verdict)] if number != "-" else []
    for *numbers, place, bits, verdicts, otherwise in JUDGED.values():
        steps = [load(16 + 8 * place), keep(bits)]
        for value, verdict in verdicts.items():
            steps += [unless(equal, value, 1), answer(verdict)]
        steps.append(answer(otherwise))
        program += [unless(equal, numbers[COLUMN], len(steps)), *steps] if numbers[COLUMN] >= 0 else []
    # From 424 on, calls have the same number on both machines. They are "unknown": so the C library starts threads by
    # clone, not by clone3, whose flags are in memory that a filter cannot read.
    program += [unless(at_least, 424, 1), answer(UNKNOWN), answer(REFUSE)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    call(libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    filter_ = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    call(libc.prctl, PR_SET_SECCOMP, 2, ctypes.c_char_p(filter_), 0, 0)
