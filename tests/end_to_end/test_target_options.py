"""What can be said about a TARGET on the command line, against boxes that write down what they see."""

import json
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace

import numpy as np
import pytest

import keyhole
from keyhole.cli.main import main
from keyhole.models.export import export
from keyhole.models.files import save_model
from keyhole.models.random import attention
from keyhole.oracles.http.tensors import HEADER_LENGTH
from keyhole.oracles.open import open_oracle
from keyhole.serving.inference import Inference, Limits

WIDTH = 6
HEAD, TAIL = (attention(np.random.default_rng(seed), WIDTH) for seed in (5, 6))
MINE = f"""
import numpy as np
from keyhole.models.random import attention
head = attention(np.random.default_rng(5), {WIDTH})
def bounded(tokens):
    assert np.abs(tokens).max() <= 0.5
    return head(tokens)
bounded.width = {WIDTH}
sizes = []
def sized(tokens):
    sizes.append(len(tokens))
    return head(tokens)
sized.width = {WIDTH}
"""


class Recording(ThreadingHTTPServer):
    """Two models of the protocol, and one with a JSON of its own at /score."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        boxes = {"head": HEAD, "tail": TAIL}
        self.models = {k: Inference(open_oracle(m), k, Limits()) for k, m in boxes.items()}
        self.lock, self.pause = threading.Lock(), 0.0
        self.sizes, self.tokens = [], set()
        self.now = self.most = 0  # requests under way
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_):
        pass

    def reply(self, body, headers=()):
        self.send_response(200)
        for name, value in (*headers, ("Content-Length", str(len(body)))):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        model = self.server.models[self.path.split("/")[3]] if "models" in self.path else None
        self.reply(json.dumps({} if model is None else model.metadata()).encode())

    def do_POST(self):
        server, body = self.server, self.rfile.read(int(self.headers["Content-Length"]))
        if self.path.endswith("index"):
            return self.reply(json.dumps([{"name": name} for name in server.models]).encode())
        with server.lock:
            server.now += 1
            server.most = max(server.most, server.now)
            server.tokens.add(self.headers.get("Authorization"))
        time.sleep(server.pause)
        message = json.loads(body)
        if self.path == "/score":
            tokens = np.array(message["x"]["tokens"])
            answer, headers = json.dumps({"y": [{"scores": HEAD(tokens).tolist()}]}).encode(), ()
        else:
            tokens = np.zeros(message["inputs"][0]["shape"][:1])
            reply = server.models[self.path.split("/")[3]].infer(
                body, self.headers.get(HEADER_LENGTH)
            )
            answer, headers = reply.body, reply.headers
        with server.lock:
            server.now -= 1
            server.sizes.append(len(tokens))
        return self.reply(answer, headers)


@pytest.fixture
def served():
    server = Recording()
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def keyhole_command(tmp_path, monkeypatch, capsys):
    """The command in this process: gives its exit code, what it printed, and the sentence."""
    (tmp_path / "mine.py").write_text(MINE)
    save_model(HEAD, tmp_path / "head.safetensors")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "mine", raising=False)

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["keyhole", *map(str, arguments)])
        with pytest.raises(SystemExit) as left:
            main()
        printed = capsys.readouterr()
        return left.value.code or 0, printed.out, " ".join(printed.err.split())

    yield command
    sys.modules.pop("mine", None)


def recovered(command, *arguments, secret=HEAD):
    code, printed, error = command(
        "recover", *arguments, "--learner", "single-head", "--json", "--out", "run"
    )
    assert code == 0, printed + error
    assert keyhole.distance(keyhole.load("run").model, secret) < 1e-12
    return json.loads(printed)["ledger"]["paid"]


def test_one_model_of_several_and_its_ports(keyhole_command, served):
    assert "has the models head, tail" in keyhole_command("check", served.url)[2]
    recovered(keyhole_command, served.url, "--model", "tail", secret=TAIL)
    recovered(keyhole_command, served.url, "--model", "head", "--input", "tokens")
    code, _, error = keyhole_command("check", served.url, "--model", "head", "--output", "none")
    assert code == 2
    assert "has the outputs answers, not none" in error


def test_parts_connections_and_rate(keyhole_command, served, monkeypatch):
    url = f"{served.url}/v2/models/head"
    paid = recovered(keyhole_command, url, "--batch", "7")
    assert max(served.sizes) == 7
    assert sum(served.sizes) == paid
    assert served.most == 1
    served.pause = 0.02
    recovered(keyhole_command, url, "--batch", "4", "--concurrency", "3")
    assert 1 < served.most <= 3
    served.pause, now = 0.0, 0.0

    def pause(seconds, stop):
        nonlocal now
        now += seconds

    monkeypatch.setattr("keyhole.oracles.http.client.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr("keyhole.oracles.http.client.pause", pause)
    assert recovered(keyhole_command, url, "--rate", "60", "--timeout", "20") == paid
    # all but the last second's worth of queries has waited for its turn
    assert (paid - 60) / 60 <= now < paid / 60


def test_a_timeout_is_kept(keyhole_command, served, monkeypatch):
    monkeypatch.setattr("keyhole.oracles.http.retry.pause", lambda *_: None)
    served.pause = 0.5
    code, printed, _ = keyhole_command(
        "recover", f"{served.url}/v2/models/head", "--timeout", "0.05", "--json"
    )
    assert code == 3
    assert "did not answer within 0.05 seconds" in json.loads(printed)["reason"]


def test_the_token_comes_from_the_variable_that_is_named(keyhole_command, served, monkeypatch):
    monkeypatch.setenv("OTHER_TOKEN", "s3cret")
    url = f"{served.url}/v2/models/head"
    for command in (["check", url], ["verify", "head.safetensors", url]):
        code, printed, error = keyhole_command(*command, "--token-env", "OTHER_TOKEN")
        assert code == 0
        assert "s3cret" not in printed + error
    assert served.tokens == {"Bearer s3cret"}
    code, _, error = keyhole_command("check", "http://192.0.2.1", "--token-env", "OTHER_TOKEN")
    assert code == 2
    assert "--plain-token" in error


def test_replicas_share_the_queries(keyhole_command, served):
    other = Recording()
    threading.Thread(target=other.serve_forever, args=(0.02,), daemon=True).start()
    served.pause = other.pause = 0.01
    urls = [f"{server.url}/v2/models/head" for server in (served, other)]
    first = recovered(keyhole_command, "--target", urls[0], "--target", urls[1], "--batch", "4")
    again = recovered(keyhole_command, urls[0], "--target", urls[1], "--batch", "4")
    assert first + again == sum(served.sizes) + sum(other.sizes)
    assert min(sum(served.sizes), sum(other.sizes)) > first // 4
    other.shutdown()
    other.server_close()


@pytest.mark.parametrize("from_file", [False, True])
def test_a_json_of_its_own(keyhole_command, served, tmp_path, from_file):
    request = '{"x": {"tokens": "$tokens"}, "trace": false}'
    if from_file:
        (tmp_path / "request.json").write_text(request)
        request = "@request.json"
    asked = [f"{served.url}/score", "--width", WIDTH, "--request", request]
    paid = recovered(keyhole_command, *asked, "--answer", "y.0.scores", "--batch", "9")
    assert sum(served.sizes) == paid
    assert max(served.sizes) == 9


def test_ports_of_an_onnx_file(keyhole_command):
    pytest.importorskip("onnxruntime")
    export(HEAD, "head.onnx")
    recovered(keyhole_command, "head.onnx", "--input", "tokens", "--output", "answers")
    code, _, error = keyhole_command("check", "head.onnx", "--input", "words")
    assert code == 2
    assert "head.onnx has the inputs tokens; choose one" in error


def test_weights_for_a_torch_module(keyhole_command, tmp_path):
    pytest.importorskip("torch")
    export(TAIL, "tail.pt")
    text = "\nfrom keyhole.models.export import to_torch\nmodule = to_torch(head)\n"
    (tmp_path / "mine.py").write_text(MINE + text)
    recovered(keyhole_command, "mine:module", "--weights", "tail.pt", secret=TAIL)


def test_what_the_box_accepts(keyhole_command, tmp_path):
    code, printed, error = keyhole_command(
        "check", "mine:bounded", "--low", "-0.5", "--high", "0.5", "--json"
    )
    assert code == 0, error
    np.save(tmp_path / "words.npy", np.random.default_rng(0).uniform(-0.5, 0.5, (60, WIDTH)))
    code, printed, error = keyhole_command(
        "recover", "mine:bounded", "--vocabulary", "words.npy", "--json"
    )
    assert code == 0, printed + error
    (tmp_path / "words.npy").write_text("one two three")
    assert (
        "not a .npy file" in keyhole_command("check", "mine:head", "--vocabulary", "words.npy")[2]
    )


def test_batches_of_a_function(keyhole_command):
    recovered(keyhole_command, "mine:sized", "--batch", "5")
    assert max(sys.modules["mine"].sizes) == 5


@pytest.mark.filterwarnings("ignore")  # Dask's own, when threads come and go
def test_a_cluster(keyhole_command):
    distributed = pytest.importorskip("distributed")
    with distributed.LocalCluster(
        n_workers=1, processes=False, dashboard_address=None, silence_logs=50, protocol="tcp"
    ) as cluster:
        recovered(keyhole_command, "head.safetensors", "--scheduler", cluster.scheduler_address)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check"], "name the box: TARGET, or --target"),
        (["check", "mine:head", "--rate", "5"], "a keyhole model has no option rate"),
        (["check", "mine:head", "--scheduler", "nowhere"], "the cluster cannot be used"),
        (["check", "http://127.0.0.1:9", "--rate", "0"], "rate must be a number above 0"),
        (["check", "http://127.0.0.1:9", "--timeout", "-1"], "timeout must be a number above 0"),
        (["check", "http://127.0.0.1:9", "--answer", "y"], "say with request= (--request)"),
        (["check", "http://127.0.0.1:9", "--request", "{"], "request is not JSON"),
        (["check", "http://127.0.0.1:9", "--request", "{}"], 'either "$tokens" or "$sequence"'),
        (["check", "http://127.0.0.1:9", "--request", "@none.json"], "none.json"),
        (["check", "http://127.0.0.1:9", "--weights", "w.pt"], "has no option weights; it has"),
        (["check", "mine:head", "--target", "none.onnx"], "none.onnx does not exist"),
        (["check", "http://127.0.0.1:9", "--vocabulary", "none.npy"], "none.npy"),
    ],
)
def test_misuse_is_a_sentence(keyhole_command, arguments, words):
    code, _, error = keyhole_command(*arguments)
    assert code in (2, 3)
    assert words in error
    assert "Traceback" not in error


def test_help_shows_every_option_and_examples(keyhole_command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for command in ("recover", "verify", "check"):
        _, printed, _ = keyhole_command(command, "--help")
        for option in (
            "target", "rate", "concurrency", "batch", "timeout", "token-env", "model", "input",
            "output", "request", "answer", "scheduler", "weights", "vocabulary", "low", "high",
        ):  # fmt: skip
            assert f"--{option} " in printed
        assert "Examples:" in printed
