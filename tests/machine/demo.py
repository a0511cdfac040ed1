"""The interpreted service of the tests: what it answers stands in CONF, which a release replaces.

As demo.rs, but with the few switches that an interpreter makes different:
    version V     its version
    reports TEXT  answers TEXT instead
    exit CODE     exits at once
    cwd no        works in /, so that nothing but its answer shows which release it is
"""

import http.server
import json
import os
import signal
import sys

CONF = """version 0"""

conf = dict(line.split(" ", 1) for line in CONF.splitlines() if " " in line)
port = int(sys.argv[sys.argv.index("--port") + 1])

if "exit" in conf:
    sys.exit(int(conf["exit"]))
os.chdir("/" if conf.get("cwd") == "no" else os.path.dirname(os.path.realpath(__file__)))


class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_GET(self):
        answer = {"version": conf.get("reports", conf["version"]), "pid": os.getpid()}
        body = json.dumps(answer).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
