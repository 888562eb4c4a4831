"""The command `baton`.

Slow imports happen inside the command that needs them. Ray is only imported after its environment variables are set.
"""

from __future__ import annotations

import importlib.metadata
import io
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from cluster.client_cli import clients, recorded_requests, reported_calibration
from cluster.commands.exits import EXIT_BAD_INPUT, EXIT_FAILURE, fail, output_failed
from cluster.commands.flags import (
    AdminKey,
    Command,
    Model,
    Names,
    NewKeys,
    hide_keys,
    variables_used,
)
from cluster.commands.keys import with_api_keys
from cluster.commands.signals import Stopped, holding_signals, leave, stop_on_signals
from cluster.config.config import BatonConfig
from cluster.config.config_file import ConfigFileError, load_config
from cluster.plan.preflight import PreflightError
from cluster.serve.process_start import loading
from engine.contract.config import DeviceName, DTypeName, ModelImplName
from engine.contract.errors import CheckpointError, ConfigError

app = typer.Typer(
    name="baton",
    help="Serve a language model with prefill and decode on separate pools of workers.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
keys = typer.Typer(help="Create keys for the API.", no_args_is_help=True, add_completion=False, rich_markup_mode=None)
app.add_typer(keys, name="keys")
app.add_typer(clients)


def main() -> None:
    """Run a command; what the user can mend is one line on standard error and exit code 2."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # do not fail on characters that the terminal cannot show
            stream.reconfigure(errors="backslashreplace")
    hide_keys(("serve", "deploy"))
    try:
        try:
            app()
        finally:
            if sys.stdout is not None:
                sys.stdout.flush()
    except (ConfigFileError, CheckpointError, ConfigError, PreflightError) as error:
        sys.exit(fail(str(error), EXIT_BAD_INPUT))
    except OSError as error:
        sys.exit(output_failed(error))
    except Stopped as stopped:
        leave(stopped.exit_code)


def print_version(wanted: bool) -> None:
    """Handle --version before any command is looked for."""
    if wanted:
        print(f"baton {importlib.metadata.version('baton-serve')}")
        raise typer.Exit


@app.callback()
def baton(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version and exit.", callback=print_version, is_eager=True)
    ] = False,
) -> None:
    """Serve a language model with prefill and decode on separate pools of workers."""


@app.command(cls=Command)
def serve(
    context: typer.Context,
    model: Model = None,
    served_model_name: Names = None,
    config: Annotated[Path | None, typer.Option(help="YAML file with settings; flags override it.")] = None,
    prefill_replicas: Annotated[int | None, typer.Option(help="Number of prefill workers.  [default: 1]")] = None,
    decode_replicas: Annotated[int | None, typer.Option(help="Number of decode workers.  [default: 1]")] = None,
    router_replicas: Annotated[int | None, typer.Option(help="Number of router processes.  [default: 1]")] = None,
    roles: Annotated[str | None, typer.Option(help="elastic or fixed roles of workers.  [default: elastic]")] = None,
    port: Annotated[int | None, typer.Option(help="Port of the HTTP API.  [default: 8000]")] = None,
    host: Annotated[str | None, typer.Option(help="Address of the HTTP API.  [default: 127.0.0.1]")] = None,
    device: Annotated[str | None, typer.Option(help="Device: auto, cpu or cuda.  [default: auto]")] = None,
    dtype: Annotated[
        str | None, typer.Option(help="Precision: auto, float32, bfloat16, float16.  [default: auto]")
    ] = None,
    model_impl: Annotated[
        str | None, typer.Option(help="Model code: auto, native, transformers.  [default: auto]")
    ] = None,
    max_model_len: Annotated[int | None, typer.Option(help="Most tokens of prompt and answer together.")] = None,
    address: Annotated[str | None, typer.Option(help="Ray cluster to deploy to. Without it, a private Ray.")] = None,
    api_key: NewKeys = None,
) -> None:
    """Start a cluster and serve until Ctrl-C.

    All other settings are keys of a YAML file (--config), listed in docs/configuration.md.
    """
    flags = {
        "model": model,
        "served_model_name": served_model_name or None,
        "prefill_replicas": prefill_replicas,
        "decode_replicas": decode_replicas,
        "router_replicas": router_replicas,
        "roles": roles,
        "port": port,
        "host": host,
        "device": device,
        "dtype": dtype,
        "model_impl": model_impl,
        "max_model_len": max_model_len,
        "address": address,
    }
    stop_on_signals()
    settings = load_config(config, flags, variables=variables_used(context))
    raise typer.Exit(run_serve(with_api_keys(settings, api_key or ())))


def run_serve(config: BatonConfig) -> int:
    """Check everything that can be checked before the start, then start; returns the exit code."""
    from cluster.plan.preflight import preflight

    console = Console(stderr=True)
    model = preflight(config)

    from cluster.deploy.address_hold import holding_address
    from cluster.deploy.fork_server.fork_server import fork_server
    from cluster.deploy.serve_env import prepare_environment, session_folder

    with ExitStack() as while_it_runs:
        while_it_runs.enter_context(holding_address(config))
        with holding_signals():  # one that came before the folder's removal is arranged would leave it
            folder = while_it_runs.enter_context(session_folder(config))
        prepare_environment(config, folder)
        forks = while_it_runs.enter_context(fork_server(config, folder))

        with holding_signals(), loading():
            from cluster.commands.serve import serve as serve_cluster
            from cluster.deploy.deployment import RefusedStartError, StartError
            from cluster.deploy.ray_home import RayUnavailableError, home_of

        try:
            return serve_cluster(config, model, home_of(config, folder, forks), console)
        except (RefusedStartError, RayUnavailableError) as error:
            return fail(str(error), EXIT_BAD_INPUT)
        except StartError as error:
            return fail(str(error), EXIT_FAILURE)


@app.command(cls=Command)
def deploy(
    context: typer.Context,
    config: Annotated[Path, typer.Option(help="YAML file that describes the cluster.")],
    address: Annotated[
        str | None, typer.Option(help="Ray to deploy to: HOST:PORT or auto.  [default: auto, the Ray of this machine]")
    ] = None,
    served_model_name: Names = None,
    api_key: NewKeys = None,
) -> None:
    """Start or update a cluster on a running Ray, wait until it serves, and return."""
    stop_on_signals()
    flags = {"address": address, "served_model_name": served_model_name or None}
    settings = load_config(config, flags, defaults={"address": "auto"}, variables=variables_used(context))
    raise typer.Exit(run_deploy(with_api_keys(settings, api_key or ())))


def run_deploy(config: BatonConfig) -> int:
    """Check everything that can be checked, then deploy; returns the exit code."""
    from cluster.deploy.serve_env import prepare_environment
    from cluster.plan.preflight import preflight

    assert config.address is not None
    model = preflight(config)
    prepare_environment(config, None)
    with holding_signals(), loading():
        from cluster.commands.deploy import deploy as deploy_cluster
        from cluster.deploy.deployment import RefusedStartError, StartError
        from cluster.deploy.ray_home import RayUnavailableError
    try:
        deploy_cluster(config, model, config.address, Console(stderr=True))
    except (RefusedStartError, RayUnavailableError) as error:
        return fail(str(error), EXIT_BAD_INPUT)
    except StartError as error:
        return fail(str(error), EXIT_FAILURE)
    return 0


@app.command(cls=Command)
def shutdown(
    address: Annotated[str, typer.Option(help="Ray that the cluster runs on: HOST:PORT or auto.")] = "auto",
) -> None:
    """Stop the cluster that `baton deploy` started. Ray keeps running."""
    from cluster.deploy.serve_env import prepare_environment
    from cluster.plan.preflight import check_ray_address

    stop_on_signals()
    check_ray_address(address)
    prepare_environment(BatonConfig(address=address), None)
    with holding_signals(), loading():
        from cluster.commands.deploy import shutdown as shut_down
        from cluster.deploy.ray_home import RayUnavailableError
    try:
        shut_down(address, Console(stderr=True))
    except RayUnavailableError as error:
        raise typer.Exit(fail(str(error), EXIT_BAD_INPUT)) from error


@app.command(cls=Command)
def plan(
    context: typer.Context,
    config: Annotated[Path | None, typer.Option(help="YAML file that describes the cluster.")] = None,
    nodes: Annotated[Path | None, typer.Option(help="YAML file that lists machines. Without it, this machine.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Hugging Face directory of the model. Without it, the file's.")
    ] = None,
    served_model_name: Names = None,
) -> None:
    """Show which worker would run on which machine, and how its memory adds up. Starts nothing."""
    from cluster.commands.plan import plan as print_plan
    from cluster.config.served_model import served_model
    from cluster.plan.preflight import check_checkpoint, check_draft_model, check_model_len

    flags = {"model": model, "served_model_name": served_model_name or None}
    settings = load_config(config, flags, variables=variables_used(context))
    served = served_model(settings)
    check_checkpoint(served.path, settings.model_code)
    check_model_len(settings.max_model_len, served.path, settings.model_code)
    check_draft_model(settings, served.path)
    if not print_plan(settings, served, nodes, Console()):
        raise typer.Exit(fail("the configuration does not fit these machines", EXIT_BAD_INPUT))


@app.command(cls=Command)
def whatif(
    context: typer.Context,
    trace: Annotated[Path | None, typer.Option(help="File of recorded arrivals, one JSON object per line.")] = None,
    recorded: Annotated[
        str | None, typer.Option(metavar="URL", help="Use the last requests of the running cluster at URL instead.")
    ] = None,
    api_key: AdminKey = "",
    start_s: Annotated[float, typer.Option(min=0.0, help="Second of the trace to begin at.")] = 0.0,
    seconds: Annotated[
        float | None, typer.Option(help="Length of the trace or load to simulate.  [default: all, or 60]")
    ] = None,
    speed: Annotated[float, typer.Option(help="Replay the trace this many times as fast as recorded.")] = 1.0,
    scale: Annotated[int, typer.Option(min=1, help="Divide recorded lengths by this; a power of 2 up to 512.")] = 1,
    mix: Annotated[
        str | None, typer.Option(help="Generated load instead of a trace: prompt_heavy, balanced or decode_heavy.")
    ] = None,
    rate: Annotated[float | None, typer.Option(help="With --mix: requests per second.")] = None,
    shape: Annotated[str, typer.Option(help="With --mix: steady, bursts or step.")] = "steady",
    layouts: Annotated[
        str | None, typer.Option(help="Layouts to simulate, such as apart:2+6,apart:2+5+1,unified:8,elastic:8.")
    ] = None,
    search: Annotated[
        bool, typer.Option("--search", help="Search for the cheapest layout that keeps the promise.")
    ] = False,
    max_workers: Annotated[int, typer.Option(help="Largest number of workers that --search tries.")] = 16,
    attainment: Annotated[float, typer.Option(help="Share of the requests for which the promise must be kept.")] = 0.95,
    ttft_ms: Annotated[float | None, typer.Option(help="Promised time to first token in ms.")] = None,
    itl_ms: Annotated[float | None, typer.Option(help="Promised inter-token latency in ms.")] = None,
    price: Annotated[float, typer.Option(help="Price of one worker per hour.")] = 1.0,
    calibration: Annotated[
        str,
        typer.Option(
            help="Speed of the workers: the URL of a running cluster, the name of a machine (cpu_host, gpu, h200, "
            "h200_pair, ...), or a file with measurements."
        ),
    ] = "cpu_host",
    load_seed: Annotated[int, typer.Option(min=0, help="Seed: the same seed gives the same load and result.")] = 0,
    processes: Annotated[int, typer.Option(min=1, help="Number of layouts simulated in parallel.")] = 1,
    json_file: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the result to FILE as JSON.")] = None,
    plots: Annotated[Path | None, typer.Option(metavar="DIR", help="Write SVG plots to DIR; needs matplotlib.")] = None,
) -> None:
    """Predict how layouts of workers would serve a load, by simulating them. Starts nothing."""
    from cluster.commands.whatif import WhatIfError, WhatIfOptions
    from cluster.commands.whatif import whatif as run

    stop_on_signals()
    requests = None if recorded is None else recorded_requests(context, recorded, api_key)
    is_url = calibration.startswith(("http://", "https://"))
    workers = reported_calibration(context, calibration, api_key) if is_url else calibration
    options = WhatIfOptions(
        trace=trace, recorded=requests, start_s=start_s, seconds=seconds, speed=speed, scale=scale, mix=mix, rate=rate,
        shape=shape, layouts=layouts, is_search=search, max_workers=max_workers, attainment=attainment, ttft_ms=ttft_ms,
        itl_ms=itl_ms, price=price, calibration=workers, seed=load_seed, processes=processes, json_file=json_file,
        plots=plots,
    )  # fmt: skip
    try:
        found = run(options, Console(), Console(stderr=True))
    except WhatIfError as error:
        raise typer.Exit(fail(str(error), EXIT_BAD_INPUT)) from error
    raise typer.Exit(0 if found else EXIT_FAILURE)


@app.command(cls=Command)
def models() -> None:
    """List the supported model architectures and the devices that they run on."""
    from cluster.commands.models import print_models

    print_models(sys.stdout)


@app.command(cls=Command)
def generate(
    prompt: Annotated[str, typer.Option(help="Text to continue, or with --chat to answer.")],
    chat: Annotated[bool, typer.Option("--chat/--no-chat", help="Answer, using the model's chat template.")] = False,
    model: Model = None,
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens to generate.  [default: 128]")] = None,
    temperature: Annotated[
        float,
        typer.Option(min=0.0, help="0 always takes the most likely token. generation_config.json is ignored."),
    ] = 0.0,
    seed: Annotated[int, typer.Option(help="Random seed: the same seed gives the same text.")] = 0,
    device: Annotated[DeviceName, typer.Option(help="Device that the model runs on.")] = "auto",
    dtype: Annotated[DTypeName, typer.Option(help="Precision; auto takes the checkpoint's.")] = "auto",
    model_impl: Annotated[ModelImplName, typer.Option(help="Implementation of the model.")] = "auto",
) -> None:
    """Continue a text or answer it, with a single engine in this process and without Ray."""
    from engine.device.torch_environment import prepare_torch

    prepare_torch(None)
    from cluster.commands.generate import GenerateOptions
    from cluster.commands.generate import generate as run

    stop_on_signals()
    options = GenerateOptions(
        model=model,
        prompt=prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        seed=seed,
        device=device,
        dtype=dtype,
        model_impl=model_impl,
        is_chat=chat,
    )
    run(options, sys.stdout)


@keys.command("new", cls=Command)
def new_key() -> None:
    """Create a key, and print it with its hash."""
    from cluster.commands.keys import print_new_key

    print_new_key(sys.stdout, sys.stderr)


@keys.command("hash", cls=Command)
def hash_key() -> None:
    """Read a key from standard input, and print its hash."""
    from cluster.commands.keys import print_hash

    print_hash(sys.stdin, sys.stdout)
