"""Attacks on the sandbox, each a process that says whether it got out; run as a script, it runs them all and prints what each said.

python sandbox_attacks.py FOLDER PORT PID      # a folder with files and sockets to reach, a TCP port, a process
"""

import asyncio
import json
import sys

from rlx.environments.sandbox import SandboxLimits, run_python

LIMITS = SandboxLimits(time_s=60.0, processes=8, file_bytes=10**6, output_bytes=10**5, memory_bytes=5 * 10**8)

# What an attack may use. It has won where its last expression is true, and is held where that is false or the system says no.
PREAMBLE = """
import array, ctypes, errno, fcntl, mmap, os, resource, signal, socket, struct, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
FOLDER, PORT, PID = {folder!r}, {port}, {pid}
ARM = os.uname().machine == "aarch64"
def call(x86, arm, *values):
    return libc.syscall(arm if ARM else x86, *values) >= 0
def fails(function, *values):
    try:
        function(*values)
    except OSError:
        return True
    return False
def count(start, most=100):
    made = 0
    try:
        while made < most:
            start()
            made += 1
    except (OSError, RuntimeError):
        pass
    return made
def child():
    if os.fork() == 0:
        time.sleep(30)
        os._exit(0)
{attacks}
for name, attack in {names}:
    attacker = os.fork()
    if attacker == 0:
        try:
            won = attack()
        except (OSError, MemoryError, ImportError, ValueError):
            won = False
        print(name, "ESCAPED" if won else "held", sep="\\t", flush=True)
        os._exit(0)
    if status := os.waitpid(attacker, 0)[1]:
        print(name, f"ended with {{status}}", sep="\\t")
"""

ATTACKS = {
    # Mounts.
    "remounts the root writable": "libc.mount(None, b'/', None, 32 | 4096, None)\nreturn not fails(open, '/written', 'w')",
    "remounts Python's library writable": "path = os.path.dirname(os.__file__)\n"
    "libc.mount(None, path.encode(), None, 32 | 4096, None)\nreturn not fails(open, path + '/written', 'w')",
    "mounts proc": "return libc.mount(b'none', b'/tmp', b'proc', 0, None) == 0",
    "mounts a tmpfs": "return libc.mount(b'none', b'/tmp', b'tmpfs', 0, None) == 0",
    "unmounts the scratch": "return libc.umount2(b'/tmp', 2) == 0",
    "unmounts the root": "return libc.umount2(b'/', 2) == 0",
    "opens the tree of mounts": "return call(428, 428, -100, b'/', 0)",
    "changes its root": "return libc.chroot(b'/tmp') == 0",
    "makes a device": "os.mknod('disk', 0o60600, os.makedev(8, 0))\nreturn True",
    # Name spaces and rights.
    "leaves by a namespace of users": "return libc.unshare(0x10000000) == 0",
    "leaves by a namespace of mounts": "return libc.unshare(0x20000) == 0",
    "clones into a namespace of users": "return call(56, 220, 0x10000000 | 17, 0, 0, 0, 0)",
    "clones with flags that no filter reads": "return call(435, 435, struct.pack('8Q', 0x10000000, *[0] * 7), 64)",
    "enters another namespace": "return call(308, 268, os.open('/dev/null', os.O_RDONLY), 0) or not fails(open, '/proc/1/ns/user')",
    "becomes root": "os.setuid(0)\nreturn True",
    "becomes root's group": "os.setgroups([0])\nreturn True",
    "holds rights": "data = (ctypes.c_uint32 * 6)()\nlibc.capget(struct.pack('Ii', 0x20080522, 0), data)\nreturn any(data)",
    "may gain rights by a program": "return libc.prctl(39, 0, 0, 0, 0) != 1",
    # Files.
    "reads a file outside": "return bool(open(FOLDER + '/secret').read())",
    "writes a file outside": "open(FOLDER + '/written', 'w')\nreturn True",
    "reads by a link": "os.symlink(FOLDER + '/secret', 'link')\nreturn bool(open('link').read())",
    "links a library's file into its folder": "os.link(os.__file__, 'os.py')\nreturn True",
    "reads the list of users": "return bool(open('/etc/passwd').read())",
    "reads the machine's processes": "return bool(os.listdir('/proc'))",
    "reads its own environment of the start": "return bool(open('/proc/self/environ').read())",
    "reads the machine's settings": "return bool(os.listdir('/sys'))",
    "finds a home": "return any(not fails(open, f'/root/{name}') for name in ('.bashrc', '.profile', '.bash_history'))",
    "finds another's shared memory": "return bool(os.listdir('/dev/shm'))",
    "finds a variable of the run": "return 'SECRET_OF_THE_RUN' in os.environ",
    "finds an open descriptor": "return any(not fails(os.fstat, number) for number in range(3, 4096))",
    # Other processes, the network and the terminal.
    "signals a process": "os.kill(PID, 0)\nreturn True",
    "reads a process's memory": "place = ctypes.create_string_buffer(8)\n"
    "vector = struct.pack('PN', ctypes.addressof(place), 8)\nreturn call(310, 270, PID, vector, 1, vector, 1, 0)",
    "connects by TCP": "socket.create_connection(('127.0.0.1', PORT), 2)\nreturn True",
    "asks for a name": "return bool(socket.getaddrinfo('localhost', 80))",
    "sends UDP": "socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', PORT))\nreturn True",
    "connects to a socket on the disk": "socket.socket(socket.AF_UNIX).connect(FOLDER + '/socket')\nreturn True",
    "connects to an abstract socket": "socket.socket(socket.AF_UNIX).connect('\\0' + FOLDER)\nreturn True",
    "opens a vsock": "socket.socket(40, socket.SOCK_STREAM)\nreturn True",
    "opens a netlink socket": "socket.socket(16, socket.SOCK_RAW, 0)\nreturn True",
    "opens the kernel's ciphers": "socket.socket(38, socket.SOCK_SEQPACKET)\nreturn True",
    "types into the terminal": "return any(fcntl.ioctl(n, 0x5412, b'x') == 0 for n in (0, 1, 2))",
    "opens the terminal": "os.open('/dev/tty', os.O_RDWR)\nreturn True",
    "opens a new terminal": "os.open('/dev/ptmx', os.O_RDWR)\nreturn True",
    # The kernel. Calls that the filter denies whatever their arguments are tried in test_sandbox.py.
    "reads the kernel's log": "return libc.klogctl(3, bytes(100), 100) >= 0",
    "sets the clock": "time.clock_settime(time.CLOCK_REALTIME, 1e9)\nreturn True",
    "names the machine": "socket.sethostname('mine')\nreturn True",
    "calls by the second table": "return not ARM and call(0x40000000 + 165, 0, 0, 0, 0, 0, 0)",
    "changes its personality": "return call(135, 92, 0x0040000)",
    # Limits.
    "starts more processes": "return count(child) > 8",
    "starts more threads": "return count(lambda: threading.Thread(target=time.sleep, args=(20,), daemon=True).start()) > 8",
    "writes more than its folder holds": "return count(lambda: open(str(time.monotonic_ns()), 'wb').write(bytes(10**5))) > 10",
    "keeps more in shared memory than its folder holds": "open('x', 'wb').write(bytes(6 * 10**5))\n"
    "return count(lambda: open(f'/dev/shm/{time.monotonic_ns()}', 'wb').write(bytes(10**5))) > 4",
    "makes more files than its folder holds": "return count(lambda: open(str(time.monotonic_ns()), 'w').close(), 20_000) > 10_000",
    "makes folders in the root": "os.mkdir('/mine')\nreturn True",
    "takes more memory": "return len(mmap.mmap(-1, 10**9)) > 0",
    "raises a limit": "resource.setrlimit(resource.RLIMIT_AS, (2**40, 2**40))\nreturn True",
    "raises the limit of processes": "resource.setrlimit(resource.RLIMIT_NPROC, (10**4, 10**4))\nreturn True",
    "keeps a file without a name in memory": "os.memfd_create('x')\nreturn True",
    "keeps a POSIX queue": "return libc.mq_open(b'/x', os.O_CREAT | os.O_RDWR, 0o600, None) >= 0",
    "leaves a core": "return resource.getrlimit(resource.RLIMIT_CORE)[0] != 0",
    "locks memory": "return libc.mlockall(3) == 0",
    "runs with more priority": "os.nice(-5)\nreturn True",
}


EXHAUSTING = {
    *("starts more processes", "starts more threads", "writes more than its folder holds"),
    *("keeps more in shared memory than its folder holds", "makes more files than its folder holds"),
}
"""These use up what the others need, so each has a sandbox of its own."""


def outcomes(folder: str, port: int, pid: int) -> dict[str, str]:
    """`held`, or what else each attack said."""
    said = {}
    for names in ([name for name in ATTACKS if name not in EXHAUSTING], *([name] for name in EXHAUSTING)):
        attacks, pairs = "", ""
        for place, name in enumerate(names):
            body = "\n".join(f"    {line}" for line in ATTACKS[name].split("\n"))
            attacks += f"def attack_{place}():\n{body}\n"
            pairs += f"({name!r}, attack_{place}), "
        code = PREAMBLE.format(folder=folder, port=port, pid=pid, attacks=attacks, names=f"({pairs})")
        output, fault = asyncio.run(run_python(code, LIMITS))
        told = dict(line.partition("\t")[::2] for line in output.splitlines())
        said |= {name: told.get(name, f"nothing: {output[-300:]} {fault}") for name in names}
    return said


if __name__ == "__main__":
    print(json.dumps(outcomes(sys.argv[1], *map(int, sys.argv[2:]))))
