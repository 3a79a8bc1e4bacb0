"""The two ends of the sandbox, as programs that import nothing of rlx: `launch` outside it, `inside` within.

`rlx.environments.sandbox` starts this file with its settings as JSON. It prints STARTED before the program begins, and without it
why the system refuses an isolation.

Note [two kinds of isolation]. Root starts bubblewrap as it is and gives its rights up inside, as a user that no other sandbox has: so
the system counts the processes of each sandbox apart, and Python may lie in root's own folder. Anybody else makes a namespace of users
first. In both a new namespace of mounts gets the scratch folder, because bubblewrap cannot limit the number of files in memory.
"""

import ctypes
import json
import os
import resource
import struct
import sys
import traceback

STARTED = b"\0isolated\0"  # comes first, so the program cannot feign that it was not isolated
NAME_SPACES = {"mount": 0x20000, "user": 0x10000000}  # CLONE_NEWNS, CLONE_NEWUSER
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 0x40000
MOST_FILES = 10_000
FIRST_USER, USERS = 0x70000000, 2**22  # as many as there can be processes
CAPABILITY_VERSION_3 = 0x20080522  # linux/capability.h
DEVICES = ("null", "zero", "full", "random", "urandom")
PR_CAPBSET_DROP, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 24, 47, 4  # linux/prctl.h


def checked(result: int) -> int:
    """Return the result of a system call, or raise OSError if it has failed."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))
    return result


def launch(settings: "dict[str, object]", bubblewrap: str, paths: "list[str]", own: "list[str]") -> None:
    """Become bubblewrap, which runs the command `own` inside, where `paths` can be read. Raises OSError if the system refuses."""
    libc = ctypes.CDLL(None, use_errno=True)
    is_root = os.geteuid() == 0 and may_become_others()
    user, group = os.geteuid(), os.getegid()
    checked(libc.unshare(NAME_SPACES["mount"] | (0 if is_root else NAME_SPACES["user"])))
    if not is_root:
        for file, text in (("setgroups", "deny"), ("uid_map", f"0 {user} 1"), ("gid_map", f"0 {group} 1")):
            with open(f"/proc/self/{file}", "w") as setting:
                setting.write(text)
    checked(libc.mount(None, b"/", None, MS_REC | MS_PRIVATE, None))
    scratch = os.fsencode(settings["scratch"])
    options = f"size={settings['file_bytes']},nr_inodes={MOST_FILES},mode=1777".encode()
    checked(libc.mount(b"none", scratch, b"tmpfs", MS_NOSUID | MS_NODEV, options))
    for folder in ("tmp", "shm"):  # in one memory, so that the limits hold for their sum
        os.mkdir(f"{settings['scratch']}/{folder}")
        os.chmod(f"{settings['scratch']}/{folder}", 0o1777)
    filtered, program = os.memfd_create("filter", 0), bytes.fromhex(str(settings["filter"]))
    os.write(filtered, program)
    os.lseek(filtered, 0, os.SEEK_SET)
    command = [bubblewrap, "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts", "--unshare-cgroup-try"]
    command += ["--die-with-parent", "--new-session", "--clearenv", "--cap-drop", "ALL", "--hostname", "sandbox"]
    if is_root:
        command += ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    else:
        command += ["--unshare-user", "--uid", "65534", "--gid", "65534"]
        # Containers have these settings read-only. There the filter alone closes namespaces of users.
        if not os.statvfs("/proc/sys/user/max_user_namespaces").f_flag & os.ST_RDONLY:
            command += ["--disable-userns"]
    for name, value in os.environ.items():
        command += ["--setenv", name, value]
    command += ["--dir", "/dev", "--bind", f"{settings['scratch']}/tmp", "/tmp", "--chdir", "/tmp"]
    command += ["--bind", f"{settings['scratch']}/shm", "/dev/shm"]
    for device in DEVICES:
        command += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for folder in settings["folders"]:
        command += ["--perms", "0755", "--dir", folder]
    for path in paths:
        command += ["--symlink", os.readlink(path), path] if os.path.islink(path) else ["--ro-bind", path, path]
    command += ["--remount-ro", "/", "--seccomp", str(filtered), "--", *own]
    os.set_inheritable(filtered, True)
    os.execv(bubblewrap, command)


def may_become_others() -> bool:
    """Whether root here is root of enough users for a user of each sandbox's own."""
    with open("/proc/self/uid_map") as ranges:
        return any(
            int(first) <= FIRST_USER and int(first) + int(count) >= FIRST_USER + USERS
            for first, _, count in map(str.split, ranges)
        )


def give_up_rights(user: int) -> None:
    """Become this user (0: remain the same one), without any of root's rights."""
    libc = ctypes.CDLL(None, use_errno=True)
    for right in range(64):
        libc.prctl(PR_CAPBSET_DROP, right, 0, 0, 0)  # fails without CAP_SETPCAP, and beyond the last right
    libc.prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    if user:
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
    header, none = struct.pack("=Ii", CAPABILITY_VERSION_3, 0), bytes(24)
    checked(libc.capset(header, none))


def limit(settings: "dict[str, object]") -> None:
    """Limit this process and those that it starts."""
    values = {
        resource.RLIMIT_CPU: int(settings["time_s"]) + 1,
        resource.RLIMIT_AS: settings["memory_bytes"],
        resource.RLIMIT_FSIZE: settings["file_bytes"],
        resource.RLIMIT_NPROC: settings["processes"],
        resource.RLIMIT_NOFILE: 64,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
        resource.RLIMIT_SIGPENDING: 1000,
    }
    for what, value in values.items():
        _, most = resource.getrlimit(what)
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(what, (value, value))


def main() -> None:
    """Run with settings as JSON: the limits, the filter, the scratch folder, `stage`, and what `launch` takes."""
    settings = json.loads(sys.argv[1])
    source = settings.pop("source")
    if settings["stage"] == "launch":
        try:
            own = [*settings["python"], source, json.dumps({**settings, "stage": "inside", "source": ""})]
            launch(settings, settings["bubblewrap"], settings["paths"], own)
        except (OSError, AttributeError) as fault:  # AttributeError: no Linux
            print(fault, end="", flush=True)
            os._exit(1)
    sys.path += [path for path in settings["paths"] if path.endswith("-packages")]
    code = sys.stdin.read()
    os.closerange(3, 64)
    give_up_rights(FIRST_USER + int(settings["number"]) if os.geteuid() == 0 else 0)
    limit(settings)
    os.write(1, STARTED)
    sys.argv, launcher = ["-c"], sys.modules["__main__"]
    # Where pickle looks for the program's functions and classes
    program = sys.modules["__main__"] = type(launcher)("__main__")
    try:
        exec(compile(code, "<code>", "exec"), vars(program))
    except Exception as fault:
        trace = fault.__traceback__
        traceback.print_exception(fault.with_traceback(trace.tb_next if trace else None))  # without this frame
        sys.exit(1)


if __name__ == "__main__":
    main()
