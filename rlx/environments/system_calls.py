"""The system calls that a model's program may not make, as a filter of the kernel (seccomp): Linux on x86-64 and 64-bit Arm."""

import errno
import platform
import struct

# Numbers of <asm/unistd_64.h> of x86-64, and of <asm-generic/unistd.h> for Arm; None: the machine has no such call.
DENIED: dict[str, tuple[int | None, int | None]] = {
    # Mounts and roots.
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "mount_setattr": (442, 442),
    "open_tree_attr": (467, 467),
    "statmount": (457, 457),
    "listmount": (458, 458),
    "open_by_handle_at": (304, 265),
    "name_to_handle_at": (303, 264),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    # Name spaces, other processes and their memory.
    "unshare": (272, 97),
    "setns": (308, 268),
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "process_madvise": (440, 440),
    "process_mrelease": (448, 448),
    "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424),
    "kcmp": (312, 272),
    "move_pages": (279, 239),
    "migrate_pages": (256, 238),
    # Keys, and memory that no limit counts.
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "shmat": (30, 196),
    "shmctl": (31, 195),
    "shmdt": (67, 197),
    "msgget": (68, 186),
    "msgsnd": (69, 189),
    "msgrcv": (70, 188),
    "msgctl": (71, 187),
    "semget": (64, 190),
    "semop": (65, 193),
    "semctl": (66, 191),
    "semtimedop": (220, 192),
    "mq_open": (240, 180),
    "mq_unlink": (241, 181),
    "remap_file_pages": (216, 234),
    # Sockets of any kind: some, such as vsock, belong to no namespace. `socketpair` remains.
    "socket": (41, 198),
    "connect": (42, 203),
    "bind": (49, 200),
    "listen": (50, 201),
    "accept": (43, 202),
    "accept4": (288, 242),
    # Parts of the kernel with a long record of faults.
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "fanotify_init": (300, 262),
    "fanotify_mark": (301, 263),
    "vmsplice": (278, 75),
    "modify_ldt": (154, None),
    "uselib": (134, None),
    "personality": (135, 92),
    "lookup_dcookie": (212, 18),
    # The machine.
    "reboot": (169, 142),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "syslog": (103, 116),
    "acct": (163, 89),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "iopl": (172, None),
    "ioperm": (173, None),
    "vhangup": (153, 58),
    "nfsservctl": (180, 42),
}
CLONE, CLONE3, IOCTL, SOCKETPAIR = (56, 220), (435, 435), (16, 29), (53, 199)
AF_UNIX = 1
NEW_NAME_SPACES = 0x7E020000 | 0x80  # the flags CLONE_NEW* of <linux/sched.h>
TERMINAL_INPUT = (0x5412, 0x541C)  # TIOCSTI and TIOCLINUX type into the terminal

# The place in a number's pair, the audit architecture, and whether numbers from 2^30 on are calls of a second table (x32).
MACHINES = {"x86_64": (0, 0xC000003E, True), "aarch64": (1, 0xC00000B7, False)}

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # <linux/bpf_common.h>
ALLOW, KILL, FAIL = 0x7FFF0000, 0x80000000, 0x00050000  # <linux/seccomp.h>
NUMBER_AT, ARCHITECTURE_AT, ARGUMENTS_AT = 0, 4, 16  # in struct seccomp_data


def filter_program() -> bytes:
    """Return the filter as an array of `struct sock_filter`. Raises OSError if the numbers of this machine's calls are not known."""
    if platform.machine() not in MACHINES:
        raise OSError(
            errno.ENOSYS, f"no filter of system calls for {platform.machine()}, only for {', '.join(MACHINES)}"
        )
    place, architecture, has_second_table = MACHINES[platform.machine()]
    refused = FAIL | errno.EPERM
    lines = [
        (LOAD, 0, 0, ARCHITECTURE_AT),
        *((EQUAL, 1, 0, architecture), (RETURN, 0, 0, KILL)),
        (LOAD, 0, 0, NUMBER_AT),
    ]
    if has_second_table:
        lines += [(AT_LEAST, 0, 1, 1 << 30), (RETURN, 0, 0, refused)]
    for numbers in DENIED.values():
        if (number := numbers[place]) is not None:
            lines += [(EQUAL, 0, 1, number), (RETURN, 0, 0, refused)]
    # clone3 has its flags in memory, which a filter cannot read. Without it the C library takes clone.
    lines += [(EQUAL, 0, 1, CLONE3[place]), (RETURN, 0, 0, FAIL | errno.ENOSYS)]
    # Calls that one argument decides: its place, the test, its value, and whether the call is refused if the test holds or if not.
    tests = [(CLONE, 0, ANY_BIT, NEW_NAME_SPACES, True), (SOCKETPAIR, 0, EQUAL, AF_UNIX, False)]
    tests += [(IOCTL, 1, EQUAL, value, True) for value in TERMINAL_INPUT]
    for numbers, argument, operation, value, if_true in tests:
        lines += [(EQUAL, 0, 4, numbers[place]), (LOAD, 0, 0, ARGUMENTS_AT + 8 * argument)]
        lines += [(operation, *((0, 1) if if_true else (1, 0)), value), (RETURN, 0, 0, refused)]
        lines += [(LOAD, 0, 0, NUMBER_AT)]
    lines += [(RETURN, 0, 0, ALLOW)]
    return b"".join(struct.pack("=HBBI", *line) for line in lines)
