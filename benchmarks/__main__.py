"""``python -m benchmarks``: what this project claims, measured, beside its peers in one run."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

app = typer.Typer(
    name="benchmarks",
    help="Measure kernels, losses, host time and training steps beside other packages, and hold them against targets.",
    no_args_is_help=True,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)

Out = Annotated[Path, typer.Option(metavar="DIR", help="Where the results go.")]
Where = Annotated[str, typer.Option("--device", metavar="DEVICE", help="cuda, cuda:1 or cpu; the GPU if there is one.")]
Scale = Annotated[str, typer.Option("--scale", metavar="SCALE", help="full, or tiny for a CPU.")]
OUT = Path("bench-results")


def _place(device: str) -> Any:
    import torch

    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if place.type == "cuda":
        place = torch.device("cuda", place.index or 0)
        torch.cuda.set_device(place)
    return place


def _listed(words: Sequence[str] | None) -> tuple[str, ...]:
    """Options that may be repeated, or separated by commas."""
    return tuple(part for word in words or () for part in word.split(",") if part)


def _told(run: Callable[[], Any]) -> Any:
    """Run; what cannot be meant ends with its message and exit code 2, what the package refuses with 1."""
    from liger_registry.errors import RegistryError

    try:
        return run()
    except (RegistryError, ValueError) as error:
        typer.echo(str(error), err=True)
        raise typer.Exit(1 if isinstance(error, RegistryError) else 2) from None


@app.command("kernels")
def kernels_command(
    only: Annotated[list[str] | None, typer.Option(metavar="OP", help="Operations, or parts of rows' names.")] = None,
    out: Out = OUT,
    peer: Annotated[list[str] | None, typer.Option("--peer", metavar="PEER", help="These candidates alone.")] = None,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile too; it takes minutes.")] = False,
    other: Annotated[str, typer.Option(metavar="DEVICE", help="The GPU whose choices are tried here.")] = "a100",
    models: Annotated[bool, typer.Option(help="The sizes of models too.")] = True,
    rounds: Annotated[int | None, typer.Option(min=1, help="Samples of each candidate.")] = None,
    budget_s: Annotated[float, typer.Option("--budget-s", metavar="SECONDS", help="Begin nothing after.")] = math.inf,
    device: Where = "",
    scale: Scale = "full",
) -> None:
    """Time every kernel that has a target, and the sizes of models, beside the peers."""
    from benchmarks import kernels
    from benchmarks.peers import MODULES, ours

    ours.OTHER[0] = other
    names = _listed(peer) or tuple(MODULES if compiled else kernels.USUAL)
    options: dict[str, Any] = {"only": _listed(only), "scale": scale, "models": models, "rounds": rounds}
    _told(lambda: kernels.run(_place(device), out, names=names, budget_s=budget_s, **options))


@app.command("warm")
def warm_command(
    only: Annotated[list[str] | None, typer.Option(metavar="OP", help="Operations, or parts of rows' names.")] = None,
    models: Annotated[bool, typer.Option(help="The sizes of models too.")] = True,
    budget_s: Annotated[
        float | None, typer.Option("--budget-s", metavar="SECONDS", help="Begin nothing after.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Measure anew what is known.")] = False,
    device: Where = "",
    scale: Scale = "full",
) -> None:
    """Tune what `kernels` measures, so that ours answers from tables."""
    from benchmarks import warm

    cases = _told(lambda: warm.cases(_listed(only), models, scale == "tiny"))
    typer.echo(warm.told(_told(lambda: warm.run(_place(device), cases, budget_s=budget_s, force=force))))


@app.command("host")
def host_command(
    out: Out = OUT,
    rows: Annotated[int, typer.Option(min=1)] = 16,
    width: Annotated[int, typer.Option(min=1)] = 4096,
    compiled: Annotated[bool, typer.Option("--compile", help="torch.compile too.")] = False,
    device: Where = "",
    scale: Scale = "full",
) -> None:
    """Time what the host pays for one call of rms_norm, the dispatch alone, and importing the package."""
    from benchmarks import host

    names = host.PEERS if compiled else host.PEERS[:2]
    _told(lambda: host.run(_place(device), out, rows=rows, width=width, names=names, scale=scale))


@app.command("preference")
def preference_command(
    loss: Annotated[list[str] | None, typer.Option("--loss", metavar="LOSS", help="These losses alone.")] = None,
    ignored: Annotated[list[float] | None, typer.Option(help="Parts of the tokens that do not count.")] = None,
    out: Out = OUT,
    rounds: Annotated[int, typer.Option(min=1, help="Samples of each candidate.")] = 10,
    first: Annotated[bool, typer.Option(help="First calls too, in processes of their own.")] = True,
    device: Where = "",
    scale: Scale = "full",
) -> None:
    """Time preference, policy and distillation losses over an output head."""
    from benchmarks import preference

    losses, parts = _listed(loss) or preference.LOSSES, ignored or preference.IGNORED
    options: dict[str, Any] = {"losses": losses, "ignored": parts, "scale": scale, "rounds": rounds, "first": first}
    _told(lambda: preference.run(_place(device), out, **options))


@app.command("train")
def train_command(
    model: Annotated[list[str] | None, typer.Option("--model", metavar="MODEL", help="These models alone.")] = None,
    mode: Annotated[
        list[str] | None, typer.Option("--mode", metavar="MODE", help="hf, liger, ours, compile ...")
    ] = None,
    every: Annotated[bool, typer.Option("--all", help="All modes, those that compile a patched model too.")] = False,
    out: Out = OUT,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed.")] = 6,
    device: Where = "",
    scale: Scale = "full",
) -> None:
    """Time whole training steps, each mode in a process of its own."""
    from benchmarks import train

    modes = _listed(mode) or (train.MODES if every else train.USUAL)
    options: dict[str, Any] = {
        "models": _listed(model) or tuple(train.MODELS),
        "modes": modes,
        "scale": scale,
        "steps": steps,
    }
    _told(lambda: train.run(_place(device), out, **options))


@app.command("scale")
def scale_command(
    gpus: Annotated[int | None, typer.Option(min=1, help="All, or two processes on a CPU.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Of the model; all 32.")] = None,
    length: Annotated[
        list[int] | None, typer.Option("--length", min=1, metavar="TOKENS", help="Of a sequence; 2K to 32K.")
    ] = None,
    mode: Annotated[
        list[str] | None, typer.Option("--mode", metavar="MODE", help="hf, liger, ours or ours-low.")
    ] = None,
    batch: Annotated[int | None, typer.Option(min=1, help="Sequences a GPU; 8.")] = None,
    cap_gib: Annotated[
        list[float] | None, typer.Option("--cap-gib", min=0, metavar="GIB", help="Memory a GPU; 0: all. 0 and 80.")
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Steps that are timed, at most.")] = 4,
    out: Out = OUT,
    device: Where = "",
    scale: Scale = "full",
) -> None:
    """Train Llama-3-8B on all GPUs at longer and longer sequences.

    Exit code 1 if ours does not train as the plain model does; nothing is measured then.
    """
    from rich.console import Console

    from benchmarks import scale as suite

    options: dict[str, Any] = {"gpus": gpus, "layers": layers, "lengths": length or (), "batch": batch, "steps": steps}
    options |= {"modes": _listed(mode) or suite.MODES, "caps": suite.CAPS if cap_gib is None else cap_gib}
    document = _told(lambda: suite.run(_place(device), out, scale=scale, **options))
    for table in suite.tables(document):
        Console().print(table)
    if any(check["wrong"] for check in document["checks"].values()):
        raise typer.Exit(1)


@app.command("report")
def report_command(
    source: Annotated[Path, typer.Argument(metavar="DIR", help="Where the other commands wrote.")],
    out: Annotated[Path | None, typer.Option(metavar="DIR", help="benchmarks/results by default.")] = None,
    plots: Annotated[bool, typer.Option(help="Plots too; they need matplotlib.")] = True,
) -> None:
    """Write the results of a directory as markdown and plots."""
    from benchmarks import report

    for path in _told(lambda: report.run(source, out or report.RESULTS, plots)):
        typer.echo(path)


@app.command("agreement")
def agreement_command(
    one: Annotated[Path, typer.Argument(metavar="TABLE")], two: Annotated[Path, typer.Argument(metavar="TABLE")]
) -> None:
    """Compare the tables of two warmups; exit code 1 if fewer than 95 % agree."""
    from benchmarks import agreement

    if not _told(lambda: agreement.run(one, two, typer.echo)):
        raise typer.Exit(1)


if __name__ == "__main__":
    app(prog_name="python -m benchmarks")
