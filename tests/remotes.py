"""A small server with OpenAI's interface, for tests of its clients: right, or wrong on purpose."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import torch

from specdec import Engine, Sampling


class SmallServer(ThreadingHTTPServer):
    """Answers /v1/completions by an engine, one request at a time. `asked` holds the bodies that came."""

    daemon_threads = True

    def __init__(
        self,
        engine: Engine,
        *,
        ids: bool = True,
        fail: Callable[[int], int | None] = lambda number: None,
        change: Callable[[dict], object] = lambda answer: answer,
    ):
        """
        Args:
            ids: It knows `return_token_ids`.
            fail: Number of a request -> the status that it gets instead of an answer; 0 breaks the connection off.
            change: What it makes of its answer to a completion.
        """
        super().__init__(("127.0.0.1", 0), Handler)
        self.engine, self.ids, self.fail, self.change = engine, ids, fail, change
        self.asked: list[dict] = []
        self.lock = threading.Lock()
        self.version = "0.1 of the tests"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/v1"

    @torch.inference_mode()
    def complete(self, body: dict) -> dict:
        target, prompt = self.engine.target, body["prompt"]
        sampling = Sampling(body["temperature"])
        how = {"max_new_tokens": body["max_tokens"], "sampling": sampling, "seed": [body.get("seed", 0)]}
        row = self.engine.generate([prompt], **how).rows[0]
        choice = {"index": 0, "text": text_of(target, row.tokens), "finish_reason": row.finish}
        if body.get("return_token_ids"):
            choice["token_ids"] = row.tokens
        if body.get("logprobs") is not None:
            logits = target(torch.tensor([prompt + row.tokens]), None)[0][0, len(prompt) - 1 : -1]
            logp = logits.log_softmax(-1)
            tops = [zip(*(x.tolist() for x in line.topk(body["logprobs"])), strict=True) for line in logp]
            choice["logprobs"] = {
                "tokens": [f"t{token}" for token in row.tokens],
                "token_logprobs": [line[token].item() for line, token in zip(logp, row.tokens, strict=True)],
                "top_logprobs": [{f"t{token}": value for value, token in top} for top in tops],
            }
        return {"object": "text_completion", "choices": [choice]}


def text_of(target, tokens: list[int]) -> str:
    if target.tokenizer is None:
        return " ".join(map(str, tokens))
    return target.tokenizer.decode(tokens, skip_special_tokens=True)


class Handler(BaseHTTPRequestHandler):
    server: SmallServer

    def log_message(self, *args) -> None:
        pass

    def do_GET(self) -> None:
        found = {"/version": {"version": self.server.version}, "/v1/models": {"data": [{"id": "small"}]}}
        self.answer(200 if self.path in found else 404, found.get(self.path, {}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        with self.server.lock:
            number = len(self.server.asked)
            self.server.asked.append(body)
            status = self.server.fail(number)
            if status == 0:
                self.close_connection = True
                self.connection.close()
            elif status is not None:
                self.answer(status, {"error": {"message": "not now"}})
            elif "return_token_ids" in body and not self.server.ids:
                self.answer(400, {"error": {"message": "there is no parameter return_token_ids"}})
            else:
                self.answer(200, self.server.change(self.server.complete(body)))

    def answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def small_server(engine: Engine, **how) -> Iterator[SmallServer]:
    server = SmallServer(engine, **how)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
