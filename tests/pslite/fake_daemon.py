"""A small HTTP server in the place of the daemon, for tests of the job API's clients."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from pslite_jobs import command, environment

BUSY = {"error": "asked too often"}


class Daemon:
    """Answers heartbeats; starts the tasks it wants as processes."""

    def __init__(self):
        self.beats: list[dict] = []
        #: how many were answered with an error
        self.refused = 0
        self.registrations: list[dict] = []
        self.targets: list[str] = []
        #: whether jobs are told to end, and why, if they have failed
        self.stop, self.reason = False, ""
        self.status = 200
        self.refuse_register = ""
        #: how many registrations are answered as by a daemon that cannot reach the resource manager, and that is busy
        self.unavailable = 0
        self.busy = 0
        self.static = False
        self.token = secrets.token_hex(32)
        self.credential = secrets.token_hex(32)
        self.changed = threading.Condition()
        daemon = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                code, answer = daemon.answer(self.path, self.headers.get("Authorization"), body)
                data = json.dumps(answer).encode()
                self.send_response(code)
                self.send_header("Content-Length", str(len(data)))
                if answer == BUSY:
                    self.send_header("Retry-After", "1")
                self.end_headers()
                self.wfile.write(data)

            def log_message(self, *args):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, args=(0.05,))
        self.thread.start()
        self.processes: dict[str, subprocess.Popen] = {}

    def answer(self, path, authorization, body):
        with self.changed:
            if path == "/v1/register":
                self.registrations.append(body)
                self.changed.notify_all()
                if self.unavailable:
                    self.unavailable -= 1
                    return 503, {"error": "starting"}
                if self.busy:
                    self.busy -= 1
                    return 503, BUSY
                if self.refuse_register:
                    return 400, {"error": self.refuse_register}
                return 200, {
                    "job": "job-7",
                    "credential": self.credential,
                    "token": self.token,
                    "heartbeat_seconds": 0.2,
                    "static": self.static,
                    "remarks": ["its licences are its own"],
                }
            assert path == "/v1/jobs/job-7/heartbeat"
            if authorization != f"Bearer {self.credential}":
                return 401, {"error": "wrong credential"}
            if self.status != 200:
                self.refused += 1
                self.changed.notify_all()
                return self.status, {"error": "not now"}
            self.beats.append(body)
            self.changed.notify_all()
            why = {"reason": self.reason} if self.reason else {}
            return 200, {"members": self.targets, "stop": self.stop, "heartbeat_seconds": 0.2, **why}

    def want(self, *tasks, options=(), **environ):
        with self.changed:
            self.changed.wait_for(lambda: self.beats, 60)
            self.targets = list(tasks)
            address = self.beats[-1]["address"]
        for task in tasks:
            if task not in self.processes:
                self.launch(
                    task,
                    command(*options),
                    DL2_ROLE="server" if task.startswith("ps") else "worker",
                    DL2_TASK=task,
                    DL2_COORDINATOR=address,
                    DL2_TOKEN=self.token,
                    **environ,
                )

    def launch(self, name, arguments, **environ):
        self.processes[name] = subprocess.Popen(
            [sys.executable, "-m", "pslite.run", *arguments],
            env=environment(**environ),
            start_new_session=True,
            stderr=subprocess.PIPE,
            text=True,
        )
        return self.processes[name]

    def wait(self, condition, seconds=120):
        with self.changed:
            assert self.changed.wait_for(lambda: self.beats and condition(self.beats[-1]), seconds), self.beats[-1:]
            return self.beats[-1]

    def close(self):
        for process in self.processes.values():
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stderr.close()
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()
