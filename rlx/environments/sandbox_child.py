"""The inside of the sandbox: runs the Python code from its standard input. A program of its own that imports nothing of rlx.

`rlx.environments.sandbox` starts it with its limits as JSON. It exits with NOT_ISOLATED if the system refuses an isolation.
"""

import ctypes
import json
import os
import resource
import signal
import sys
import traceback

NOT_ISOLATED = 96
NOBODY = 65534
CLONE_NEWNS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET = (
    0x20000,
    0x8000000,
    0x10000000,
    0x20000000,
    0x40000000,
)
PR_SET_PDEATHSIG, PR_SET_NO_NEW_PRIVS = 1, 38  # linux/prctl.h
MOUNT_SETATTR, AT_FDCWD, AT_RECURSIVE, MOUNT_ATTR_RDONLY = 442, -100, 0x8000, 1  # linux/mount.h
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 0x40000


def checked(result: int) -> None:
    """Raise OSError if a system call has failed."""
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def isolate(scratch: str, scratch_bytes: int) -> None:
    """Leave the machine's network, processes and files behind; the code may write in `scratch` alone, which is empty.

    Raises OSError if the system refuses. Afterwards only children of this process are inside.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if os.geteuid() == 0 and readable_by_all(os.__file__):
        os.setgroups([])
        os.setgid(NOBODY)
        os.setuid(NOBODY)
    user, group = os.getuid(), os.getgid()
    checked(libc.unshare(CLONE_NEWUSER | CLONE_NEWNET | CLONE_NEWIPC | CLONE_NEWPID | CLONE_NEWNS))
    # Files have owners inside, too: this user and group alone.
    for file, text in (("uid_map", f"{user} {user} 1"), ("setgroups", "deny"), ("gid_map", f"{group} {group} 1")):
        with open(f"/proc/self/{file}", "w") as setting:
            setting.write(text)
    checked(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    attributes = (ctypes.c_uint64 * 4)(MOUNT_ATTR_RDONLY, 0, 0, 0)
    checked(libc.syscall(MOUNT_SETATTR, AT_FDCWD, b"/", AT_RECURSIVE, attributes, 32))
    # No /proc: it shows the environment variables of other processes of this user, with keys in them.
    for folder, size in (("/proc", 4096), (scratch, scratch_bytes)):
        options = f"size={size},mode=1777".encode()
        checked(libc.mount(b"none", folder.encode(), b"tmpfs", MS_NOSUID | MS_NODEV, options))


def readable_by_all(path: str) -> bool:
    """Whether a user without rights can read this file."""
    folders = [path]
    while os.path.dirname(folders[-1]) != folders[-1]:
        folders.append(os.path.dirname(folders[-1]))
    return bool(os.stat(path).st_mode & 0o004) and all(os.stat(folder).st_mode & 0o001 for folder in folders[1:])


def limit(limits: "dict[str, int]") -> None:
    """Limit this process and those that it starts."""
    values = {
        resource.RLIMIT_CPU: limits["cpu_s"],
        resource.RLIMIT_AS: limits["memory_bytes"],
        resource.RLIMIT_FSIZE: limits["file_bytes"],
        resource.RLIMIT_NPROC: limits["processes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
    }
    for what, value in values.items():
        _, most = resource.getrlimit(what)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(what, (value, value))


def main() -> None:
    """Run with the limits as the argument."""
    limits = json.loads(sys.argv[1])
    code = sys.stdin.read()
    libc, parent = ctypes.CDLL(None), os.getppid()
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    # Python itself may live in a folder of /tmp.
    own = [os.path.abspath(folder) for folder in (sys.prefix, *sys.path) if os.path.isdir(folder)]
    scratch = next(
        each for each in ("/tmp", "/var/tmp", "/dev/shm") if not any(f"{path}/".startswith(f"{each}/") for path in own)
    )
    try:
        isolate(scratch, limits["file_bytes"])
    except (OSError, AttributeError) as fault:  # AttributeError: no Linux
        if limits["require_isolation"]:
            print(fault, end="")
            sys.stdout.flush()
            os._exit(NOT_ISOLATED)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)  # another user, as `isolate` makes it, has lost it
    if os.getppid() != parent:
        os._exit(1)
    # The first process of the name space takes all others with it. It does not run the code, which could leave its group.
    for _ in range(2):
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            exited = os.waitstatus_to_exitcode(status)
            os._exit(exited if exited >= 0 else 128 - exited)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    limit(limits)
    os.chdir(scratch)
    sys.argv = ["-c"]
    try:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
    except Exception as fault:
        trace = fault.__traceback__
        traceback.print_exception(fault.with_traceback(trace.tb_next if trace else None))  # without this frame
        sys.exit(1)


if __name__ == "__main__":
    main()
