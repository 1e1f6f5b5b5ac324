"""Answer OpenAI's clients: docs/serve.md says what they may send."""

import argparse
import gc
import os
import signal
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from specdec import ops
from specdec.cli.parser import read_flags
from specdec.contracts import Drafter
from specdec.engine.engine import Engine
from specdec.engine.recorder import Recorder, describe
from specdec.engine.report import Reads
from specdec.engine.trace_files import check_trace_folder, write_trace
from specdec.model.language_model import LanguageModel
from specdec.model.names import called
from specdec.model_settings import ModelSettings
from specdec.threads import Call, Made
from specdec.trees import Tree
from specdec.trees.spec import TreeSettings
from specdec.tuning.engines import CHAIN, POLICY, Workload, adaptive_engine, prepare
from specdec.tuning.survival import Survival
from specdec.verify import VerifierSettings

if TYPE_CHECKING:  # they import the extra `serve`, which `main` has looked for
    from specdec.serve.scheduler import Scheduler
    from specdec.serve.service import Service

ROOM = 4096  # default number of tokens of a text, if the target's context is larger
KEY = "SPECDEC_API_KEY"
IDLE = 20.0  # seconds


def run(args: argparse.Namespace) -> None:
    """Run `specdec serve`: load the models, and answer requests until a signal."""
    from specdec.serve.app import make_app

    if args.trace is not None:
        check_trace_folder(args.trace)
    key = args.api_key if args.api_key is not None else os.environ.get(KEY)
    if key is not None and not (key := key.strip()):
        raise ValueError(f"the API key is empty: give --api-key KEY, or unset ${KEY} to serve without one")
    listener = listen(args.host, args.port)  # before models, which take a while
    with listener:
        service, recorder = apart(make_models, args)
        app = make_app(service, key, hosts_of(args), names_in(args.cors_origins or ""))
        host, port = listener.getsockname()[:2]
        try:
            listener.listen()  # before the address is printed, so that a client that reads it can connect
        except OSError as error:  # another process listens there since the models were loaded
            raise ValueError(f"cannot listen at {args.host} port {port}: {error.strerror}") from None
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        print(f"{service.model} at {url}/v1", f"chat in a browser at {url}/", sep="\n", flush=True)
        serve(app, listener, service.scheduler, args.grace)
        if recorder is not None:
            write_trace(recorder.trace, args.trace)
    sys.stdout.flush()
    os._exit(0)  # neither a prompt that is still tokenized nor seconds of the interpreter's clean-up delay the end


def hosts_of(args: argparse.Namespace) -> list[str]:
    """Return the names in the `Host` header that are answered.

    On a loopback address, an unknown name means that a web page resolved its own name to this machine (DNS rebinding).
    """
    local = ["localhost", "127.0.0.1", "::1", "[::1]"]
    if args.allowed_hosts:
        return names_in(args.allowed_hosts)
    return local if args.host in local else ["*"]


def names_in(listed: str) -> list[str]:
    """Return the names that commas separate as browsers send them: in lower case, without a slash at the end."""
    return [name.strip().rstrip("/").lower() for name in listed.split(",")]


def apart(make: Callable[..., Made], *args) -> Made:
    """`make(*args)` in a thread that then ends, and with it its OpenMP workers.

    As soon as all threads have more workers than there are cores, libgomp lets them sleep between two operators, which
    makes a round of a small target twice as long. So the engine's thread must be the only one that has any.
    """
    call = Call(make, *args)
    made = call.future.result()
    call.join()
    return made


def listen(host: str, port: int) -> socket.socket:
    """A socket bound to the address. ValueError, one sentence, if it cannot be had."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        bound = socket.socket(family, kind, protocol)
    except OSError as error:
        raise ValueError(f"cannot listen at {host}: {error.strerror or error}") from None
    try:
        bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        bound.bind(address)
    except OSError as error:
        bound.close()
        raise ValueError(f"cannot listen at {host} port {port}: {error.strerror}") from None
    return bound


def make_engine(args: argparse.Namespace) -> Engine:
    """Return the engine that the flags ask for. Settings are checked before models are loaded, which takes a while."""
    models = read_flags(ModelSettings, args)
    verifier = read_flags(VerifierSettings, args).make()
    tree: Any = None if args.no_draft else tree_of(args)
    target = models.load_target()
    drafter: Any = None if args.no_draft else models.load_drafter(target)
    if args.compile and target.device.type == "cuda":
        ops.use("torch")  # as for `specdec generate`
    how: dict[str, Any] = {"graphs": False if args.no_graphs else None, "compile": args.compile and "aside"}
    how |= {"children": args.children, "prefixes": args.prefix_cache << 20}
    reads = Reads.TOKENS if args.trace is None else Recorder.reads
    parts, workload = (target, drafter, tree, verifier), Workload(args.batch_size, room_of(args, target), reads)
    if drafter is not None and (adaptive := policy_of(args, drafter)) is not None:
        return adaptive_engine(adaptive, workload, *parts, **how)
    engine = Engine(*parts, **how)
    prepare(engine, workload)
    return engine


def tree_of(args: argparse.Namespace) -> Tree:
    """Return the tree that the flags ask for, by default a chain on a CPU, where each further node costs time.

    The policy `survival` instead chooses among all nodes of a tree.
    """
    chooses = (args.adaptive or "").startswith(Survival.name)
    return CHAIN if left_to_cpu(args) and not chooses else read_flags(TreeSettings, args).make()


def policy_of(args: argparse.Namespace, drafter: Drafter) -> str | None:
    """Return the adaptive policy of the flags; on a CPU `POLICY` by default, unless the drafter abstains by itself."""
    return args.adaptive or (POLICY if left_to_cpu(args) and not drafter.abstains else None)


def left_to_cpu(args: argparse.Namespace) -> bool:
    """The flags ask for no tree, and this is a CPU."""
    return read_flags(TreeSettings, args).automatic and args.device.startswith("cpu")


def room_of(args: argparse.Namespace, target: LanguageModel) -> int:
    """Tokens of the longest text."""
    return args.room or min(target.config.context, ROOM)


def make_models(args: argparse.Namespace) -> "tuple[Service, Recorder | None]":
    """Return the service that the flags ask for, and the recorder of its trace, if any."""
    from specdec.serve.scheduler import Scheduler
    from specdec.serve.service import Service, Speculation

    engine, recorder, name = make_engine(args), None, args.served_model_name or name_of(args)
    if args.trace is not None:
        flags = {name: str(value) if isinstance(value, Path) else value for name, value in vars(args).items()}
        del flags["api_key"]
        pieces = engine.target, engine.drafter, engine.policy, engine.verifier
        recorder = Recorder({"flags": flags} | describe(*pieces))  # keeps all rounds in memory until the server ends
    scheduler = Scheduler(
        engine,
        rows=args.batch_size,
        room=room_of(args, engine.target),
        queue=args.queue,
        prefill_chunk=args.prefill_chunk,
        max_seconds=args.max_seconds,
        model=name,
        observer=recorder,
    )
    service = Service(
        engine.target,
        scheduler,
        name,
        args.max_body,
        min(args.max_n, args.batch_size + args.queue),
        stream_interval=args.stream_interval,
        acceptance=args.per_request_spec_decode_metrics,
        prompt_details=args.enable_prompt_tokens_details,
        speculation=Speculation.of(engine, called(read_flags(ModelSettings, args).drafter), str(tree_of(args))),
    )
    return service, recorder


def name_of(args: argparse.Namespace) -> str:
    """A hub name as it is, of a folder its last part, and 'demo' for what is bundled."""
    if args.target is None:
        return "demo"
    return Path(args.target).resolve().name if Path(args.target).is_dir() else args.target


def closing_protocol() -> Any:
    """Return uvicorn's HTTP protocol, which here closes a connection that owes (part of) a request for `IDLE` s."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    class Protocol(AutoHTTPProtocol):  # type: ignore[valid-type, misc]  # chosen when uvicorn is imported
        def connection_made(self, transport) -> None:
            super().connection_made(transport)
            self._wait()

        def data_received(self, data: bytes) -> None:
            super().data_received(data)  # cancels the timer
            incomplete = self.cycle is None or self.cycle.more_body or self.cycle.response_complete
            if incomplete and not getattr(self, "pipeline", None):  # else uvicorn does not read meanwhile
                self._wait()

        def _wait(self) -> None:
            # The timer is uvicorn's own of connections between two requests.
            self.timeout_keep_alive_task = self.loop.call_later(IDLE, self.transport.close)

    return Protocol


def serve(app, listener: socket.socket, scheduler: "Scheduler", grace: float) -> None:
    """Serve until SIGINT or SIGTERM. Running requests then have `grace` seconds to finish; the rest end with an error.

    A second signal ends these at once.
    """
    import uvicorn

    how: dict[str, Any] = {"log_level": "warning", "access_log": False, "timeout_graceful_shutdown": grace + 1}
    config = uvicorn.Config(app, http=closing_protocol(), **how)

    class Server(uvicorn.Server):
        def handle_exit(self, number: int, frame) -> None:
            first = not self.should_exit
            scheduler.close(grace if first else 0.0)
            if first:
                print(f"{signal.Signals(number).name}: finishing what runs", file=sys.stderr, flush=True)
            self.should_exit = True

    gc.collect()
    gc.freeze()  # a collection would walk through the objects of all modules, and hold up the engine
    Server(config).run(sockets=[listener])
