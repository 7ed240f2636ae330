"""Tests checkpoints on S3 with a server that checks signatures, through a proxy that injects faults: `make interop`
runs this.

    tools/python.sh --with s3 tests/interop/s3_test.py build/release/tests/interop/interop_program \
      build/release/tools/tessera/tessera
"""

import http.client
import http.server
import json
import os
import pathlib
import random
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import unittest

import boto3
from botocore.config import Config

PROGRAM = COMMAND = ""
SAME_PAGE = b"<ListBucketResult><NextContinuationToken>next</NextContinuationToken></ListBucketResult>"
SLOW_DOWN = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


class Faults(http.server.BaseHTTPRequestHandler):
    """Forwards each request to the server, unless the server object's `choose` names a fault for it."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_):
        pass

    def reset(self):
        self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close_connection = True
        self.connection.close()

    def handle_one_request(self):
        try:
            super().handle_one_request()
        except (ConnectionError, OSError, ValueError):  # the client, or a fault, closed it
            self.close_connection = True

    def answer(self):
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        fault = self.server.choose(self.command, self.path)
        if fault:
            self.server.told[fault] = self.server.told.get(fault, 0) + 1
        if fault == "reset":
            return self.reset()
        if fault in ("503", "429", "endless"):
            content = SAME_PAGE if fault == "endless" else SLOW_DOWN
            self.send_response(200 if fault == "endless" else int(fault))
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)
            return None
        if fault == "hang":
            time.sleep(3)  # longer than the client's timeout
            return self.reset()
        upstream = http.client.HTTPConnection("127.0.0.1", self.server.upstream_port)
        upstream.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
        for name, value in self.headers.items():
            if name.lower() != "expect":
                upstream.putheader(name, value)
        upstream.endheaders(body)
        response = upstream.getresponse()
        content = response.read()
        if fault == "lost":  # completed, but without an answer
            return self.reset()
        if fault == "page":  # as of a web server, or the service's console
            content = b"<html>Welcome</html>"
        self.send_response(response.status)
        for name, value in response.getheaders():
            if name.lower() == "content-range" and fault == "no size":
                value = value.split("/")[0] + "/*"
            if name.lower() == "content-range" and fault == "other range":
                value = "bytes 1-2/3"
            if name.lower() not in ("connection", "server", "date", "transfer-encoding", "content-length"):
                self.send_header(name, value)
        length = response.getheader("Content-Length") if self.command == "HEAD" else len(content)
        self.send_header("Content-Length", str(length))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if fault == "truncate" and len(content) > 1:
            self.wfile.write(content[: len(content) // 2])
            return self.reset()
        if fault == "slow":
            for i in range(0, len(content), max(1, len(content) // 4)):
                self.wfile.write(content[i : i + max(1, len(content) // 4)])
                time.sleep(0.1)
            return None
        self.wfile.write(content)
        return None

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = answer


class S3(unittest.TestCase):
    uninterrupted = []

    @classmethod
    def setUpClass(cls):
        cls.port = free_port()
        # The first requests, which create the user, need no permission.
        environment = {**os.environ, "INITIAL_NO_AUTH_ACTION_COUNT": "4"}
        cls.log = tempfile.TemporaryFile()
        cls.server = subprocess.Popen([sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(cls.port)],
                                      env=environment, stdout=cls.log, stderr=cls.log)
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", cls.port)) == 0:
                    break
            if cls.server.poll() is not None:
                raise RuntimeError("the server has ended")
            time.sleep(0.1)
        cls.endpoint = f"http://127.0.0.1:{cls.port}"
        common = {"endpoint_url": cls.endpoint, "region_name": "eu-west-1",
                  "config": Config(retries={"max_attempts": 0})}
        anybody = {**common, "aws_access_key_id": "x", "aws_secret_access_key": "x"}
        iam = boto3.client("iam", **anybody)
        iam.create_user(UserName="trainer")
        key = iam.create_access_key(UserName="trainer")["AccessKey"]
        everything = {"Version": "2012-10-17", "Statement": [{"Effect": "Allow", "Action": "*", "Resource": "*"}]}
        iam.put_user_policy(UserName="trainer", PolicyName="all", PolicyDocument=json.dumps(everything))
        boto3.client("s3", **anybody).create_bucket(Bucket="bucket",
                                                    CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
        cls.keys = {"AWS_ACCESS_KEY_ID": key["AccessKeyId"], "AWS_SECRET_ACCESS_KEY": key["SecretAccessKey"],
                    "AWS_REGION": "eu-west-1"}
        cls.client = boto3.client("s3", aws_access_key_id=key["AccessKeyId"],
                                  aws_secret_access_key=key["SecretAccessKey"], **common)

    @classmethod
    def tearDownClass(cls):
        cls.server.send_signal(signal.SIGTERM)
        cls.server.wait()
        cls.log.close()

    def run_words(self, *words, endpoint=None, code=0, **environment):
        own = {name: value for name, value in os.environ.items() if not name.startswith("AWS_")}
        own.update(self.keys, AWS_ENDPOINT_URL=endpoint or self.endpoint, TESSERA_S3_STALL_SECONDS="1",
                   no_proxy="127.0.0.1", **environment)
        ran = subprocess.run(list(map(str, words)), env={k: v for k, v in own.items() if v != ""},
                             capture_output=True, text=True)
        self.assertEqual(ran.returncode, code, ran.stdout + ran.stderr)
        return ran.stdout + ran.stderr

    def train(self, folder, ranks, steps, **options):
        return self.run_words(PROGRAM, "train", folder, ranks, steps, **options)

    def losses(self, folder, ranks, steps, **options):
        told = self.train(folder, ranks, steps, **options)
        self.assertTrue(all(line.startswith("step ") for line in told.splitlines()), told)
        return [float(line.rsplit(" ", 1)[1]) for line in told.splitlines()]

    def expected(self):
        """The losses of an uninterrupted run."""
        if not self.uninterrupted:
            with tempfile.TemporaryDirectory() as folder:
                self.uninterrupted.extend(self.losses(folder, 2, 5))
        return self.uninterrupted

    def keys_of(self, prefix):
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket="bucket", Prefix=prefix)
        return [entry["Key"] for page in pages for entry in page.get("Contents", [])]

    def proxy(self, choose):
        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Faults)
        server.daemon_threads = True
        server.upstream_port, server.choose, server.told = self.port, choose, {}
        threading.Thread(target=server.serve_forever, daemon=True).start()
        self.addCleanup(server.server_close)
        self.addCleanup(server.shutdown)
        return server, f"http://127.0.0.1:{server.server_address[1]}"

    def test_goes_on_as_from_a_local_folder(self):
        self.assertEqual(self.losses("s3://bucket/runs/a b", 2, 4), self.expected()[:4])
        self.assertEqual(self.losses("s3://bucket/runs/a b", 2, 2), self.expected()[3:5])
        # keep_last = 2; the newest of the first run, and of the second
        self.assertEqual({key.split("/")[2] for key in self.keys_of("runs/a b/")}, {"step-3", "step-4"})
        self.assertAlmostEqual(self.losses("s3://bucket/runs/a b", 3, 1)[0], self.expected()[4], places=5)

    def test_the_command_reads_buckets_as_folders(self):
        self.train("s3://bucket/command", 2, 3)
        told = self.run_words(COMMAND, "inspect", "s3://bucket/command")
        self.assertIn("taking the newest, step-2", told)
        self.assertIn('extra {"step":2}', told)
        self.run_words(COMMAND, "verify", "s3://bucket/command/step-1")
        self.run_words(COMMAND, "reshard", "s3://bucket/command/step-2", "s3://bucket/other/three", "--ranks", "3")
        self.run_words(COMMAND, "diff", "s3://bucket/command/step-2", "s3://bucket/other/three")
        self.run_words(COMMAND, "diff", "s3://bucket/command/step-1", "s3://bucket/other/three", code=1)
        with tempfile.TemporaryDirectory() as folder:
            file = pathlib.Path(folder) / "model.safetensors"
            self.run_words(COMMAND, "consolidate", "s3://bucket/other/three", file)
            self.run_words(COMMAND, "diff", file, "s3://bucket/command/step-2", "--parameters")
            self.client.upload_file(str(file), "bucket", "full/model.safetensors")
            self.run_words(COMMAND, "diff", file, "s3://bucket/full/model.safetensors")
        key = next(key for key in self.keys_of("other/three/") if "rank-00001" in key)
        body = bytearray(self.client.get_object(Bucket="bucket", Key=key)["Body"].read())
        body[-5] ^= 1
        self.client.put_object(Bucket="bucket", Key=key, Body=bytes(body))
        self.assertIn("are damaged", self.run_words(COMMAND, "verify", "s3://bucket/other/three", code=1))

    def test_faults_that_pass_are_not_noticed(self):
        generator = random.Random(3)
        kinds = ["reset", "503", "429", "truncate", "slow", "lost", "hang"]
        weights = [4, 4, 2, 4, 3, 4, 1]
        choose = lambda *_: generator.choices(kinds, weights)[0] if generator.random() < 0.35 else None
        server, endpoint = self.proxy(choose)
        self.assertEqual(self.losses("s3://bucket/faults", 2, 3, endpoint=endpoint), self.expected()[:3])
        self.assertEqual(self.losses("s3://bucket/faults", 2, 1, endpoint=endpoint), self.expected()[2:3])
        self.run_words(COMMAND, "verify", "s3://bucket/faults")
        self.assertEqual(set(server.told), set(kinds), server.told)

    def test_without_its_manifest_it_is_no_checkpoint(self):
        self.train("s3://bucket/commit", 2, 2)
        _, endpoint = self.proxy(lambda method, path: "503" if method == "PUT" and "step-2/tessera.json" in path else None)
        told = self.train("s3://bucket/commit", 2, 3, endpoint=endpoint, code=1, AWS_MAX_ATTEMPTS="3")
        self.assertIn("s3://bucket/commit/step-2/tessera.json: 503 SlowDown", told.replace("\n", " "))
        self.assertIn("after 3 attempts", told)
        self.assertIn("rank 0", told)
        self.assertTrue(self.keys_of("commit/step-2/"))
        self.assertIn("has no tessera.json", self.run_words(COMMAND, "verify", "s3://bucket/commit/step-2", code=2))
        self.assertIn("step 2: loss", self.train("s3://bucket/commit", 2, 2))  # from step 1; saves step 2
        self.run_words(COMMAND, "verify", "s3://bucket/commit/step-2")
        # the killed one was removed
        self.assertEqual(len({key.split("/")[2] for key in self.keys_of("commit/step-2/")}), 2)

    def test_no_older_checkpoint_is_taken_for_one_that_does_not_answer(self):
        self.train("s3://bucket/silent", 2, 3)
        for hidden in ("step-2/tessera.json", "step-2/"):
            # Its first bytes show the time of the save; the rest is not sent.
            def choose(method, path, hidden=hidden):
                is_hidden = hidden in path and path.endswith(".json") == hidden.endswith(".json")
                return "503" if method == "GET" and is_hidden else None
            _, endpoint = self.proxy(choose)
            told = self.train("s3://bucket/silent", 2, 3, endpoint=endpoint, code=1, AWS_MAX_ATTEMPTS="2")
            self.assertIn("after 2 attempts", told)
            self.assertIn("503 SlowDown", told)
            self.assertNotIn("loss", told)
        self.assertIn("step 3: loss", self.train("s3://bucket/silent", 2, 1))

    def test_a_manifest_whose_answer_is_lost_is_there(self):
        lost = []
        def choose(method, path):
            if method != "PUT" or "tessera.json" not in path:
                return None
            lost.append(path)
            return "lost"
        _, endpoint = self.proxy(choose)
        self.train("s3://bucket/lost", 2, 2, endpoint=endpoint, AWS_MAX_ATTEMPTS="2")
        self.assertGreaterEqual(len(lost), 2)  # curl itself repeats requests lost on a reused connection
        self.run_words(COMMAND, "verify", "s3://bucket/lost")

    def test_ranges_that_were_not_requested_are_refused(self):
        self.train("s3://bucket/ranges", 1, 2)
        for fault in ("no size", "other range"):
            _, endpoint = self.proxy(lambda method, path, fault=fault: fault if method == "GET" and "rank-" in path else None)
            told = self.run_words(COMMAND, "verify", "s3://bucket/ranges/step-1", endpoint=endpoint, code=1)
            self.assertIn("gave the Content-Range 'bytes ", told)
            self.assertIn("expected 'bytes 0-<last byte>/<size>'", told)

    def test_a_page_is_not_a_folder_without_checkpoints(self):
        self.train("s3://bucket/page", 1, 2)
        _, endpoint = self.proxy(lambda method, path: "page" if method == "GET" and "list-type" in path else None)
        told = self.train("s3://bucket/page", 1, 1, endpoint=endpoint, code=1)
        self.assertIn("gave no list of objects: <html>Welcome</html>", told)
        self.assertNotIn("loss", told)

    def test_a_list_without_end_is_refused(self):
        _, endpoint = self.proxy(lambda method, path: "endless" if method == "GET" and "list-type" in path else None)
        told = self.train("s3://bucket/endless", 1, 1, endpoint=endpoint, code=1)
        self.assertIn("gave the continuation token 'next' twice", told)

    def test_mistakes_are_told(self):
        verify = lambda uri, **environment: self.run_words(COMMAND, "verify", uri, code=2, **environment)
        self.assertIn("AWS_SECRET_ACCESS_KEY, which is not set", verify("s3://bucket/a", AWS_SECRET_ACCESS_KEY=""))
        began = time.monotonic()
        self.assertIn("403", verify("s3://bucket/a", AWS_SECRET_ACCESS_KEY="wrong"))
        self.assertLess(time.monotonic() - began, 5, "not tried again")
        self.assertIn("there is nothing", verify("s3://bucket/none"))
        self.assertIn("there is no bucket 'nowhere'", verify("s3://nowhere/a"))
        self.assertIn("NoSuchBucket", self.train("s3://nowhere/a", 1, 2, code=1).replace("there is no bucket", "NoSuchBucket"))
        dead = f"http://127.0.0.1:{free_port()}"
        self.assertIn("after 2 attempts", verify("s3://bucket/a", endpoint=dead, AWS_MAX_ATTEMPTS="2"))
        for number in ("many", "3x", "1e3", "0", "99999999999"):
            self.assertIn(f"AWS_MAX_ATTEMPTS is '{number}'", verify("s3://bucket/a", AWS_MAX_ATTEMPTS=number))


if __name__ == "__main__":
    COMMAND = str(pathlib.Path(sys.argv.pop(2)).resolve())
    PROGRAM = str(pathlib.Path(sys.argv.pop(1)).resolve())
    unittest.main(verbosity=2)
