"""A relay that counts: bytes pass through it as they are, in both directions."""

import socket
import threading
from contextlib import suppress
from typing import Self

CHUNK = 1 << 16


class Relay:
    """Listens on a port of this machine, and relays every connection to another; `up` are the bytes sent there."""

    def __init__(self, target: int) -> None:
        self.target = target
        self.up = self.down = self.connections = 0
        self._lock = threading.Lock()
        self._open: list[socket.socket] = []
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        with self._lock:
            for one in (self._listener, *self._open):
                _shut(one)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.close()

    def _accept(self) -> None:
        with suppress(OSError):  # closed
            while True:
                near, _ = self._listener.accept()
                try:
                    far = socket.create_connection(("127.0.0.1", self.target))
                except OSError:  # nobody there, as the one who connects will see
                    near.close()
                    continue
                with self._lock:
                    self.connections += 1
                    self._open += [near, far]
                for source, sink, upwards in (near, far, True), (far, near, False):
                    threading.Thread(target=self._pump, args=(source, sink, upwards), daemon=True).start()

    def _pump(self, source: socket.socket, sink: socket.socket, upwards: bool) -> None:
        with suppress(OSError):
            while data := source.recv(CHUNK):
                with self._lock:  # before it is passed on, so that who has it finds it counted
                    self.up += len(data) if upwards else 0
                    self.down += 0 if upwards else len(data)
                sink.sendall(data)
        _shut(source)
        _shut(sink)


def _shut(one: socket.socket) -> None:
    with suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()
