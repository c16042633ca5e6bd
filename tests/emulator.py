"""Google Cloud Storage on this machine for tests: an emulator, and a way to it that breaks off.

    python tests/emulator.py

runs the emulator with the empty bucket gs://bkt until Ctrl-C, and prints what to set in another terminal to use it.
"""

import contextlib
import http.server
import os
import socket
import socketserver
import threading
import urllib.parse
from unittest import mock

BUCKET = "gs://bkt"


def environment(port: int) -> dict[str, str]:
    """What a process needs to talk to the emulator in place of the real service."""
    address = f"http://127.0.0.1:{port}"
    return {
        "STORAGE_EMULATOR_HOST": address,
        "TENSORSTORE_GCS_HTTP_URL": address,
        "GOOGLE_CLOUD_PROJECT": "test",
        "GCE_METADATA_ROOT": "127.0.0.1:1",
        "NO_GCE_CHECK": "true",
        "FSSPEC_GCS_TOKEN": "anon",
        "GOOGLE_AUTH_TOKEN_FOR_TESTING": "x",
    }


@contextlib.contextmanager
def running():
    """An emulator with the bucket `bkt`, in threads of this process; gives its port.

    Two things that TensorStore relies on are added to it: the generation of an object that is read, and writes that are
    refused where the object is not of the generation they name.
    """
    from gcp_storage_emulator import server
    from gcp_storage_emulator.handlers import objects

    download = objects.download

    def with_generation(request, response, storage, *args, **kwargs):
        download(request, response, storage, *args, **kwargs)
        found = _generation(storage, request.params["bucket_name"], request.params["object_id"])
        if found != "0":
            response["x-goog-generation"] = found

    class Handler(server.RequestHandler):
        def do_POST(self):  # noqa: N802
            address = urllib.parse.urlsplit(self.path)
            query = {name: values[0] for name, values in urllib.parse.parse_qs(address.query).items()}
            bucket = address.path.split("/b/", 1)[-1].split("/")[0]
            wanted = query.get("ifGenerationMatch")
            if wanted is None or wanted == _generation(self.storage, bucket, query.get("name", "")):
                return super().do_POST()
            self.rfile.read(int(self.headers.get("Content-Length", 0)))
            self.send_response(412)
            self.send_header("Content-Length", "0")
            self.end_headers()

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    with mock.patch.multiple(server, RequestHandler=Handler), mock.patch.object(objects, "download", with_generation):
        # One request at a time is answered; the others wait here, where too short a queue has them wait for seconds.
        with mock.patch.object(http.server.HTTPServer, "request_queue_size", 256):
            made = server.create_server("127.0.0.1", port, in_memory=True, default_bucket="bkt")
            made.start()
        try:
            yield port
        finally:
            made.stop()


def _generation(storage, bucket: str, name: str) -> str:
    from gcp_storage_emulator.exceptions import NotFound

    try:
        return storage.get_file_obj(bucket, name)["generation"]
    except NotFound:
        return "0"


class Way(socketserver.ThreadingTCPServer):
    """A way to the emulator of which the next connections are refused with 503, or cut off after some bytes.

    Attributes:
      refuse: so many requests are answered with 503.
      cut: so many connections are broken off once `after` bytes have gone to the emulator.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, port: int):
        self.to, self.refuse, self.cut, self.after, self.faults = port, 0, 0, 0, 0
        self.lock = threading.Lock()
        super().__init__(("127.0.0.1", 0), _Handler)
        threading.Thread(target=self.serve_forever, args=(0.05,), daemon=True).start()

    def take(self, name: str) -> bool:
        with self.lock:
            left = getattr(self, name)
            setattr(self, name, max(left - 1, 0))
            self.faults += left > 0
            return left > 0


class _Handler(socketserver.BaseRequestHandler):
    def handle(self):
        if self.server.take("refuse"):
            self.request.recv(1 << 16)
            self.request.sendall(b"HTTP/1.1 503 Busy\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            return
        left = self.server.after if self.server.take("cut") else None
        with socket.create_connection(("127.0.0.1", self.server.to)) as there:
            threading.Thread(target=_pass_on, args=(there, self.request), daemon=True).start()
            with contextlib.suppress(OSError):
                while content := self.request.recv(1 << 14):
                    if left is not None and (left := left - len(content)) <= 0:
                        break
                    there.sendall(content)
            with contextlib.suppress(OSError):
                there.shutdown(socket.SHUT_RDWR)


def _pass_on(source, target):
    with contextlib.suppress(OSError):
        while content := source.recv(1 << 16):
            target.sendall(content)
        target.shutdown(socket.SHUT_RDWR)


def put(patch, port: int, cache: os.PathLike) -> None:
    """Have this process use the emulator, and keep its copies in the folder `cache`."""
    from fsspec.config import conf

    for name, value in environment(port).items():
        patch.setenv(name, value)
    patch.setitem(conf, "gcs", {**conf.get("gcs", {}), "token": "anon"})
    patch.setenv("XDG_CACHE_HOME", str(cache))


if __name__ == "__main__":
    with running() as started:
        print("\n".join(f"export {name}={value}" for name, value in environment(started).items()), flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            threading.Event().wait()
