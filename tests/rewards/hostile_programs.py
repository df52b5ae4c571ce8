"""Programs that try to do harm, to look around, or to win a reward that they have not earned.

Each is a body run after ``PRELUDE``. ``attempt`` prints BREACH where something succeeds that must not; ``{name}`` in a
program is filled in by the test (files, ports and processes outside of the sandbox).
"""

PRELUDE = """
import ctypes, os, signal, socket, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def attempt(step, *arguments):
    try:
        result = step(*arguments)
    except BaseException:
        return
    print("BREACH", step, arguments, result, flush=True)
def syscall(*numbers):
    result = libc.syscall(*map(ctypes.c_long, numbers))
    if result < 0:
        raise OSError(ctypes.get_errno())
    return result
def fails(result):
    if result < 0:
        raise OSError(ctypes.get_errno())
    return result
"""

PROGRAMS = {
    # processes
    "fork bomb": "while True:\n    try: os.fork()\n    except OSError: pass",
    "fork and wait": "for _ in range(100):\n    try: os.fork()\n    except OSError: time.sleep(0.01)",
    "many processes": "forked = 0\ntry:\n    while os.fork(): forked += 1\n    time.sleep(9)\nexcept OSError: pass\n"
    "if forked >= {most}: print('BREACH', forked)",
    "thread bomb": "def f(): time.sleep(60)\nwhile True:\n    try: threading.Thread(target=f).start()\n"
    "    except RuntimeError: pass",
    "daemon": "if os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        time.sleep(600)\n    os._exit(0)",
    "daemon ignores signals": "for s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nif os.fork() == 0:\n    os.setsid()\n    while True: pass",
    "ignores signals": "for s in range(1, 65):\n    try: signal.signal(s, signal.SIG_IGN)\n"
    "    except (OSError, ValueError): pass\nwhile True: pass",
    "kills pid 1": "for s in range(1, 65): attempt(lambda: os.kill(1, s) or os.kill(1, 0) and 1 / 0 or 1 / 0)",
    "kills its group": "os.kill(0, signal.SIGKILL)",
    "kills all": "os.kill(-1, signal.SIGKILL)",
    "kills its parent": "os.kill(os.getppid(), signal.SIGKILL)",
    "kills the tests": "attempt(os.kill, {pid}, signal.SIGKILL)",
    "signals every process": "for p in range(2, 40000):\n    try: p == os.getpid() or os.kill(p, signal.SIGKILL)\n"
    "    except OSError: pass",
    "stops itself": "os.kill(os.getpid(), signal.SIGSTOP)",
    "traces pid 1": "attempt(lambda: fails(libc.ptrace(16, 1, 0, 0)))",
    "reads memory of pid 1": "attempt(syscall, 310 if os.uname().machine == 'x86_64' else 270, 1, 0, 0, 0, 0, 0)",
    "limits of pid 1": "import resource\nattempt(resource.prlimit, 1, resource.RLIMIT_CPU)",
    "raises its limits": "import resource\nfor r in (resource.RLIMIT_AS, resource.RLIMIT_NPROC, resource.RLIMIT_CPU):\n"
    "    attempt(resource.setrlimit, r, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))",
    "becomes root": "attempt(os.setuid, 0)\nattempt(os.setgroups, [0])",
    "namespace of its own": "attempt(lambda: fails(libc.unshare(0x10000000)))\n"
    "attempt(lambda: fails(libc.unshare(0x20000)))",
    "clone into a namespace": "attempt(syscall, 56 if os.uname().machine == 'x86_64' else 220, 0x10000011, 0, 0, 0, 0)",
    "keys": "attempt(syscall, 250 if os.uname().machine == 'x86_64' else 219, 0, -4, 1)",
    "io_uring": "attempt(syscall, 425, 4, 0)",
    "runs a shell": "attempt(os.execv, '/bin/sh', ['sh', '-c', 'echo BREACH'])\n"
    "attempt(os.execv, sys.executable, ['python', '-c', 'print(\"BREACH\")'])",
    "runs what it wrote": "open('x', 'w').write('#!/bin/sh\\necho BREACH')\nos.chmod('x', 0o755)\n"
    "attempt(os.execv, 'x', ['x'])",
    "runs before all others": "attempt(os.sched_setscheduler, 0, os.SCHED_FIFO, os.sched_param(50))\n"
    "attempt(os.nice, -10)",
    # memory and time
    "memory in a list": "x = []\nwhile True: x.append(bytearray(10**7))",
    "memory at once": "x = [0] * 10**11",
    "memory of children": "for _ in range(4): os.fork()\nx = []\nwhile True: x.append(bytearray(10**7))",
    "shared memory": "import mmap\nattempt(mmap.mmap, -1, 2**40)",
    "System V memory": "attempt(lambda: fails(libc.shmget(0, 4096, 0o1600)))",
    "memory files": "attempt(os.memfd_create, 'x')",
    "buffers of sockets": "x = []\nwhile True:\n    x.append(socket.socketpair())\n    x[-1][0].setblocking(False)\n"
    "    try:\n        while True: x[-1][0].send(bytes(2**16))\n    except BlockingIOError: pass",
    "buffers of pipes": "import fcntl\nx = []\nwhile True:\n"
    "    x.append(os.pipe())\n    os.set_blocking(x[-1][1], False)\n"
    "    try: fcntl.fcntl(x[-1][1], 1031, 2**20)\n    except OSError: pass\n"
    "    try:\n        while True: os.write(x[-1][1], bytes(2**16))\n    except BlockingIOError: pass",
    "a number's digits": "sys.set_int_max_str_digits(0)\nprint(len(str(10**10**7)))",
    "power": "print(len(str(9**9**9)))",
    "loop": "while True: pass",
    "sleep": "time.sleep(600)",
    "deep recursion": "sys.setrecursionlimit(10**9)\ndef f(n): return f(n + 1) + 1\nf(0)",
    "deep C recursion": "sys.setrecursionlimit(10**9)\nx = []\nfor _ in range(10**6): x = [x]\nrepr(x)",
    "compiler bomb": "eval('(' * 10**6 + ')' * 10**6)",
    "regular expression": "import re\nre.match('(a+)+$', 'a' * 60 + 'b')",
    "zip bomb": "import zlib\nd = zlib.compress(bytes(2**28))\nx = [zlib.decompress(d) for _ in range(100)]",
    "crash": "ctypes.string_at(0)",
    "abort": "os.abort()",
    "loop at exit": "import atexit\nos.write(1, b'42')\natexit.register(lambda: [None for _ in iter(int, 1)])",
    "thread that stays": "threading.Thread(target=time.sleep, args=(600,)).start()",
    "never stops": "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    # files and devices
    "fills the disk": "f = open('big', 'wb')\nwhile True: f.write(bytes(10**6))",
    "fills the disk with files": "n = 0\nwhile True:\n    open(str(n), 'wb').write(bytes(2**20))\n    n += 1",
    "many files": "for n in range(10**7): open(str(n), 'w').close()",
    "deep folders": "while True:\n    os.mkdir('d')\n    os.chdir('d')",
    "open files": "x = []\nwhile True: x.append(open('/dev/zero'))",
    "reads secrets": "for p in ('{secret}', '{file}', '/etc/passwd', '/etc/shadow', '/root/.bashrc', '/var', '/opt',"
    " '/run', '/mnt', '/etc/hostname'):\n    attempt(open, p)\n    attempt(os.listdir, p)",
    "follows a link": "os.symlink('{secret}', 'x')\nattempt(open, 'x')\nattempt(os.link, '{secret}', 'y')",
    "looks above": "for n in range(9): attempt(open, '../' * n + '{secret}')\n"
    "attempt(lambda: open(os.open('/', os.O_DIRECTORY), '..{secret}'))",
    "reads /proc": "for p in ('/proc', '/proc/self/environ', '/proc/1/environ', '/proc/{pid}/environ', '/sys'):\n"
    "    attempt(open, p)\n    attempt(os.listdir, p)",
    "mounts /proc": "os.mkdir('p')\nattempt(lambda: fails(libc.mount(b'proc', b'p', b'proc', 0, None)))",
    "escapes its root": "os.mkdir('r')\nfd = os.open('/', os.O_RDONLY)\nattempt(os.chroot, 'r')",
    "writes outside": "for p in ('/x', '{folder}/x', '/dev/x', '/dev/shm/x', '/usr/lib/x', '/root/x', '/work/x', "
    "os.__file__, os.path.dirname(os.__file__) + '/x'): attempt(open, p, 'w')\n"
    "attempt(os.chmod, os.__file__, 0o777)\nattempt(os.remove, os.__file__)\nattempt(os.rename, '/tmp', '/tmp2')",
    "devices": "import stat\nattempt(os.mknod, 'd', 0o600 | stat.S_IFBLK, os.makedev(254, 0))\n"
    "for d in ('mem', 'kmsg', 'vda', 'sda', 'tty', 'ptmx', 'fuse', 'kvm', 'net/tun'): attempt(open, '/dev/' + d)",
    "other descriptors": "for n in range(4, 1024):\n    attempt(os.fstat, n)",
    "environment": "if os.environ: print('BREACH', os.environ)\nlibc.getenv.restype = ctypes.c_char_p\n"
    "for n in (b'HOME', b'PATH', b'USER', b'SECRET_OF_THE_TESTS'):\n    if libc.getenv(n): print('BREACH', n)",
    # network
    "internet socket": "attempt(socket.socket)\nattempt(socket.socket, socket.AF_INET6)",
    "connects here": "attempt(socket.create_connection, ('127.0.0.1', {port}), 1)",
    "abstract socket": "s = socket.socket(socket.AF_UNIX)\nattempt(s.connect, '\\0{abstract}')",
    "host of the machine": "attempt(socket.socket, 40, socket.SOCK_STREAM)",
    "raw sockets": "attempt(socket.socket, socket.AF_PACKET, socket.SOCK_RAW)\nattempt(socket.socket, 16, 3, 0)",
    "host name": "attempt(socket.sethostname, 'x')",
    # output and descriptors
    "endless output": "while True: print('x' * 10**5)",
    "endless output of a child": "if os.fork() == 0:\n    while True: os.write(1, b'x' * 10**5)",
    "endless errors": "while True: sys.stderr.write('x' * 10**5)",
    "endless values": "while True: os.write(3, b'x' * 10**5)",
    "closes everything": "os.closerange(0, 1024)\nwhile True: pass",
    "closes its output": "sys.stdout.close()\nos.close(1)",
    "reads its input for ever": "while True: sys.stdin.read()",
    "grows its input": "while True: os.write(0, bytes(10**6))",
    # rewards that are not earned
    "exits": "sys.exit(0)",
    "exits at once": "os._exit(0)",
    "interrupts": "raise KeyboardInterrupt",
    "prints success": "print('PASSED')\nprint('OK', file=sys.stderr)\nos.write(3, b'true\\n')\nos._exit(0)",
    "patches": "import builtins, json\njson.dumps = lambda *a, **k: 'true'\nbuiltins.AssertionError = SystemExit\n"
    "sys.modules['__main__'].__dict__.clear()",
    "patches the runner": "m = sys.modules['sandbox_child']\nm.encode = lambda *a: 'true'\n"
    "m.send(b'exit 0', b'42', b'', b'')",
}  # fmt: skip


def filled(body: str, **values: object) -> str:
    """A whole program."""
    for name, value in values.items():
        body = body.replace("{" + name + "}", str(value))
    return PRELUDE + body
