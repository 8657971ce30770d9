"""The kernel layers around a process that runs model-written code, by ctypes; Linux on x86_64 and aarch64.

Three layers, in the order in which they are put on. *Namespaces* give a process its own view of the system.
*Landlock* takes from a process, for good, the right to open files outside of a list of folders. *seccomp* gives the
kernel a small program that judges each later system call of the process by its number and arguments.
None needs root. Each may be missing: Docker and Ubuntu forbid namespaces, old kernels know no Landlock.
"""

import ctypes
import errno
import os
import resource
import signal
import struct
import sys

MEMORY = 512 << 20  # bytes of address space of a job
DISK = 16 << 20  # bytes of one file, and of the job's whole folder where that is in memory
JOB_FOLDER = "/job"  # under the private root

# The dynamic libraries that Python's own modules load, and Python's own files. Not the folder that holds this package,
# which is in the module path while it is imported: runs/ in it holds tests, and a job needs nothing of it.
ROOT = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
READABLE = ["/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", os.path.join(sys.base_prefix, "lib")]
READABLE += [path for path in sys.path if os.path.abspath(path) != ROOT]

# Names and numbers on x86_64 and aarch64 of what no job needs. Refused with "operation not permitted".
REFUSED = """
socket 41 198  socketpair 53 199  connect 42 203  bind 49 200  listen 50 201  accept 43 202  accept4 288 242
fork 57 -  vfork 58 -  execve 59 221  execveat 322 281  ptrace 101 117  kcmp 312 272  personality 135 92
kill 62 129  tkill 200 130  tgkill 234 131  rt_sigqueueinfo 129 138  rt_tgsigqueueinfo 297 240
process_vm_readv 310 270  process_vm_writev 311 271  move_pages 279 239  migrate_pages 256 238
prctl 157 167  seccomp 317 277  bpf 321 280  perf_event_open 298 241  userfaultfd 323 282  modify_ldt 154 -
sched_setaffinity 203 122  sched_setscheduler 144 119  sched_setparam 142 118  sched_setattr 314 274
setpriority 141 140  ioprio_set 251 30  setpgid 109 154  setsid 112 157  capset 126 91  unshare 272 97  setns 308 268
setuid 105 146  setgid 106 144  setreuid 113 145  setregid 114 143  setresuid 117 147  setresgid 119 149
setgroups 116 159  setfsuid 122 151  setfsgid 123 152  add_key 248 217  request_key 249 218  keyctl 250 219
mount 165 40  umount2 166 39  pivot_root 155 41  chroot 161 51  swapon 167 224  swapoff 168 225  acct 163 89
quotactl 179 60  fanotify_init 300 262  name_to_handle_at 303 264  open_by_handle_at 304 265
truncate 76 45  chmod 90 -  fchmod 91 52  fchmodat 268 53  chown 92 -  fchown 93 55  lchown 94 -  fchownat 260 54
utime 132 -  utimes 235 -  futimesat 261 -  utimensat 280 88  mknod 133 -  mknodat 259 33  memfd_create 319 279
setxattr 188 5  lsetxattr 189 6  fsetxattr 190 7  removexattr 197 14  lremovexattr 198 15  fremovexattr 199 16
shmget 29 194  shmat 30 196  shmctl 31 195  semget 64 190  semctl 66 191  semop 65 193  semtimedop 220 192
msgget 68 186  msgsnd 69 189  msgrcv 70 188  msgctl 71 187  mq_open 240 180  mq_unlink 241 181
reboot 169 142  sethostname 170 161  setdomainname 171 162  iopl 172 -  ioperm 173 -  syslog 103 116
init_module 175 105  finit_module 313 273  delete_module 176 106  kexec_load 246 104  kexec_file_load 320 294
settimeofday 164 170  clock_settime 227 112  adjtimex 159 171  clock_adjtime 305 266  io_setup 206 0
vmsplice 278 75  fadvise64 221 223  readahead 187 213  mincore 27 232  preadv2 327 286
sync 162 81  syncfs 306 267  inotify_init 253 -  inotify_init1 294 26  timer_create 222 107
"""
# Calls whose second argument is a command, and the commands that a job needs. With others a descriptor sends signals
# to any process of the user, or is marked, or its file is, for whoever else has it.
FCNTL = [0, 1, 2, 3, 4, 5, 6, 7, 1030]  # duplicate, flags, locks
# No lock is taken, and each call for one succeeds: a job is alone with its files, and the kernel would keep as many
# locks as it asks for, on Python's files where other jobs see them.
LOCKS = [6, 7]  # commands of fcntl
FLOCK = (73, 32)
IOCTL = [0x5401, 0x541B, 0x5421, 0x5450, 0x5451]  # is it a terminal, bytes that wait, blocking, close on exec
COMMANDS = {"fcntl": (72, 25, FCNTL), "ioctl": (16, 29, IOCTL)}
MACHINES = ["x86_64", "aarch64"]
MACHINE = os.uname().machine
COLUMN = MACHINES.index(MACHINE) if MACHINE in MACHINES else 0
AUDIT_ARCH = [0xC000003E, 0xC00000B7][COLUMN]  # how seccomp names the machine
CLONE, PIVOT_ROOT, CAPSET, PRLIMIT64 = [(56, 220), (155, 41), (126, 91), (302, 261)]
LANDLOCK_CREATE_RULESET, LANDLOCK_ADD_RULE, LANDLOCK_RESTRICT_SELF = 444, 445, 446  # from 424 on one number for both
FACCESSAT2, EPOLL_PWAIT2 = 439, 441

# What a thread is started with by glibc and by musl, in full: one that shares not all would have limits of its own.
THREADS = [0x3D0F00, 0x7D0F00]
CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x20000, 0x4000000, 0x8000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = 0x10000000, 0x20000000, 0x40000000
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = 32, 4096, 1 << 14, 1 << 18
MNT_DETACH = 2
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38

libc = ctypes.CDLL(None, use_errno=True)


def call(function, *arguments):
    """A C function whose result of -1 means errno; plain ctypes would pass integers as 32 bits. Raises OSError."""
    result = function(*[ctypes.c_long(a) if isinstance(a, int) else a for a in arguments])
    if result == -1:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result


def hide_memory():
    """No other process of this user can read this one's memory or environment (HF_TOKEN) from now on."""
    if sys.platform == "linux":
        call(libc.prctl, PR_SET_DUMPABLE, 0, 0, 0, 0)


def die_first():
    """When memory is short, the kernel kills this process and its children before the trainer."""
    if sys.platform == "linux":
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")


def probe():
    """Which layers hold here, each tried in a process of its own."""
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
    """Gives this process, for good, a view of the system with no network and no files but READABLE, read-only."""
    user, group = os.getuid(), os.getgid()
    call(libc.unshare, CLONE_NEWUSER | CLONE_NEWNS | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWUTS)
    for name, text in ("setgroups", "deny"), ("uid_map", f"65534 {user} 1"), ("gid_map", f"65534 {group} 1"):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)
    call(libc.mount, None, b"/", None, MS_REC | MS_PRIVATE, None)  # what we mount stays ours
    with open("/proc/self/mountinfo", "rb") as file:  # a space in a path is \040 there
        mounts = [os.fsdecode(line.split()[4].decode("unicode_escape").encode("latin-1")) for line in file]
    root = "/proc"  # an empty folder in memory is put over it, filled, and made the root; the old root goes
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
        for mount in ["", *below]:  # each is read-only by itself
            make_read_only(root + path + mount)
    os.mkdir(root + "/dev")
    with open(root + os.devnull, "w"):
        pass
    call(libc.mount, os.devnull.encode(), (root + os.devnull).encode(), None, MS_BIND, None)
    make_read_only(root + os.devnull)  # its mode; what is written still goes nowhere
    os.mkdir(root + JOB_FOLDER)
    call(libc.mount, None, root.encode(), None, MS_REMOUNT | MS_BIND | MS_RDONLY, None)
    os.chdir(root)
    call(libc.syscall, PIVOT_ROOT[COLUMN], b".", b".")
    call(libc.umount2, b".", MNT_DETACH)
    os.chdir("/")


def make_read_only(mount):
    keep = os.statvfs(mount).f_flag & (MS_NOSUID | MS_NODEV | MS_NOEXEC)  # flags that we may not take away
    call(libc.mount, None, mount.encode(), None, MS_REMOUNT | MS_BIND | MS_RDONLY | keep, None)


def clone(namespaces):
    """os.fork, into namespaces of its own: nothing of a job's processes, mounts and shared memory outlives it."""
    if not namespaces:
        return os.fork()
    return call(libc.syscall, CLONE[COLUMN], CLONE_NEWPID | CLONE_NEWNS | CLONE_NEWIPC | signal.SIGCHLD, 0, 0, 0, 0)


def mount_folder():
    call(libc.mount, b"tmpfs", JOB_FOLDER.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, b"nr_inodes=1k,size=%d" % DISK)


def confine(layers, folder, seconds):
    """Puts all layers on this process, which may then write in its folder only. `seconds`: of processor time."""
    os.setsid()
    if layers["namespaces"]:
        mount_folder()
    os.chdir(folder)
    # The kernel counts threads by user and user namespace: without one, the trainer's and all jobs' together.
    threads = 64 if layers["namespaces"] else 4096
    limits = {"CPU": seconds, "FSIZE": DISK, "NOFILE": 64, "NPROC": threads, "CORE": 0}
    if sys.platform == "linux":  # macOS refuses the one and has not the other, of which each timer takes one
        limits |= {"AS": MEMORY, "SIGPENDING": 64}
    for name, value in limits.items():
        kind = getattr(resource, f"RLIMIT_{name}")
        hard = resource.getrlimit(kind)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    if sys.platform == "linux" and MACHINE in MACHINES:
        call(libc.prctl, PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)  # die with the template
        call(libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        call(libc.syscall, CAPSET[COLUMN], struct.pack("Ii", 0x20080522, 0), bytes(24))  # root's privileges
    if layers["Landlock"]:
        restrict_files([folder])
    if layers["seccomp"]:
        restrict_calls()


def restrict_files(writable):
    """Landlock: from now on READABLE can be read, `writable` also written, and nothing else be opened."""
    version = call(libc.syscall, LANDLOCK_CREATE_RULESET, None, 0, 1)
    call(libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    rights = 13 + (version >= 2) + (version >= 3) + (version >= 5)  # that the kernel knows: a bit for each
    ruleset = call(libc.syscall, LANDLOCK_CREATE_RULESET, struct.pack("Q", (1 << rights) - 1), 8, 0)
    read = 1 << 2 | 1 << 3  # files, folders
    write = 1 << 1 | 1 << 5 | 1 << 8 | (1 << 14 if version >= 3 else 0)  # write, remove, make, truncate; files only
    for path, right in [(p, read) for p in READABLE] + [(p, read | write) for p in writable]:
        if os.path.isdir(path):
            folder = os.open(path, os.O_PATH | os.O_CLOEXEC)
            call(libc.syscall, LANDLOCK_ADD_RULE, ruleset, 1, struct.pack("=Qi", right, folder), 0)
            os.close(folder)
    call(libc.syscall, LANDLOCK_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def restrict_calls():
    """seccomp: from now on the system calls of REFUSED fail, and those that are newer than this list."""
    load = lambda offset: (0x20, 0, 0, offset)  # into the accumulator: 0 number, 4 machine, 16 and 24 the arguments
    equal, at_least = 0x15, 0x35
    unless = lambda test, value, skip: (test, 0, skip, value)  # skip so many instructions unless the test holds
    allow, kill, done, refuse, unknown = [
        (6, 0, 0, v) for v in (0x7FFF0000, 0x80000000, 0x50000, 0x50000 + errno.EPERM, 0x50000 + errno.ENOSYS)
    ]
    program = [load(4), (equal, 1, 0, AUDIT_ARCH), kill, load(0), unless(at_least, 0x40000000, 1), kill]
    for number in FACCESSAT2, EPOLL_PWAIT2:
        program += [unless(equal, number, 1), allow]
    # The first new call is 424 on both machines. "Unknown" for clone3, whose flags lie where a filter cannot look,
    # makes the C library start threads by clone.
    program += [unless(at_least, 424, 1), unknown]
    for number in (int(n) for n in REFUSED.split()[1 + COLUMN :: 3] if n != "-"):
        program += [unless(equal, number, 1), refuse]
    for *numbers, commands in COMMANDS.values():
        program += [unless(equal, numbers[COLUMN], 2 * len(commands) + 2), load(24)]
        for command in commands:
            program += [unless(equal, command, 1), done if command in LOCKS else allow]
        program.append(refuse)
    program += [unless(equal, FLOCK[COLUMN], 1), done, unless(equal, CLONE[COLUMN], 6), load(16)]
    program += [step for flags in THREADS for step in (unless(equal, flags, 1), allow)] + [refuse]
    program += [unless(equal, PRLIMIT64[COLUMN], 4), load(16), unless(equal, 0, 1), allow, refuse]  # of others
    program.append(allow)
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *step) for step in program))
    call(libc.prctl, PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    filter_ = struct.pack("HxxxxxxP", len(program), ctypes.addressof(code))
    call(libc.prctl, PR_SET_SECCOMP, 2, ctypes.c_char_p(filter_), 0, 0)
