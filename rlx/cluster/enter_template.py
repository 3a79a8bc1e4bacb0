"""Ray's command for a worker: `python -IS enter_template.py SOCKET default_worker.py ...`. It imports nothing of rlx.

It asks the process behind the socket, `rlx.cluster.template`, to fork the worker, and becomes the worker itself if none answers.
"""

import json
import os
import socket
import sys

PATIENCE_S = 30.0
"""Ray gives a worker 60 s to report."""

if __name__ == "__main__":
    template, *arguments = sys.argv[1:]
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(PATIENCE_S)
        try:
            connection.connect(template)
            order = json.dumps([arguments, dict(os.environ), os.getcwd()]).encode()
            socket.send_fds(connection, [len(order).to_bytes(8)], [0, 1, 2])
            connection.sendall(order)
            answered = connection.recv(1)
        except TimeoutError:  # from now on the template cannot answer; a fork that has answered is the worker
            connection.shutdown(socket.SHUT_RDWR)
            answered = connection.recv(1)
        except OSError:
            answered = b""
    if not answered:
        os.execv(sys.executable, [sys.executable, *arguments])
