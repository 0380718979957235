"""The command ``flatshard``."""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, NoReturn

from flatshard import __version__
from flatshard.tools.plan_command import add_network, add_plan, check_writable, plan


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand and return its exit status. ``arguments``: default ``sys.argv[1:]``."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _main(given)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of a pipe, such as `| head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


def parser() -> argparse.ArgumentParser:
    """The parser of all commands except ``train``, which has its own parser."""
    parser = _Parser(prog="flatshard", description="Fully sharded data parallelism for PyTorch.")
    parser.add_argument("--version", action="version", version=f"flatshard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="train a language model", add_help=False)
    for name, command in _COMMANDS.items():
        its_parser = commands.add_parser(name, help=command.help, description=command.add_arguments.__doc__)
        command.add_arguments(its_parser)
        its_parser.set_defaults(parser=its_parser)
    return parser


def _main(arguments: list[str]) -> int:
    commands = parser()
    if arguments[:1] == ["train"]:
        from flatshard.train.command import train

        return train(arguments[1:])
    options, unknown = commands.parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    command = _COMMANDS[options.command]
    try:
        return command.run(options)
    except command.mistakes as mistake:
        if isinstance(mistake, BrokenPipeError):
            raise
        print(f"{options.parser.prog}: {mistake}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line; ``--help`` lists the options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _add_script(parser: argparse.ArgumentParser) -> None:
    """Run SCRIPT unchanged, with flatshard in place of torch.distributed.fsdp. With several processes: torchrun
    --nproc-per-node N -m flatshard run SCRIPT ..."""
    add = parser.add_argument
    add("-m", dest="is_module", action="store_true", help="SCRIPT is the name of a module, not a file")
    add("script", metavar="SCRIPT", help="a Python file; with -m, a module")
    add("arguments", nargs=argparse.REMAINDER, metavar="...", help="arguments for SCRIPT")


def _run(options: argparse.Namespace) -> int:
    _check_script(options)
    from flatshard.installing import install
    from flatshard.rehearsal.run import run_script

    install()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"flatshard run: {options.script} uses flatshard for torch.distributed.fsdp", file=sys.stderr)
    run_script(options.script, options.arguments, options.is_module)
    return 0


def _add_blame(parser: argparse.ArgumentParser) -> None:
    """Compare the flight records of all ranks. Print which rank stopped in which collective, and what the other ranks
    waited for."""
    add, where = parser.add_argument, "folder of the flight records: see the error, or FLATSHARD_RECORD"
    add("folder", type=Path, metavar="FOLDER", help=where)
    add("--last", type=int, default=0, metavar="N", help="also print the last N collectives of every rank")


def _blame(options: argparse.Namespace) -> int:
    from flatshard.trust.blame import blame, last_launches, read_records

    records = read_records(options.folder)
    if any(record.entries or "error" in record.header for record in records.values()):
        print(blame(records))
    else:
        print(f"{len(records)} records, all empty: these ranks have launched no collective and raised no error.")
    if options.last > 0:
        print("\n".join(last_launches(records, options.last)))
    return 0


def _add_report(parser: argparse.ArgumentParser) -> None:
    """Draw a step that `flatshard rehearse --record FILE` or `flatshard train --record FILE` has recorded as one HTML
    file that needs no network: lanes over time, exposed waits, memory, layout, loss curves. Two recordings are drawn
    side by side, with their differences."""
    add = parser.add_argument
    add("record", type=Path, nargs="+", metavar="RECORD", help="one recording, or two to compare")
    add("-o", "--output", type=Path, default=Path("report.html"), metavar="HTML", help="page (default report.html)")
    logs = "loss logs, one per recording (from flatshard train --losses)"
    add("--losses", type=Path, nargs="+", default=[], metavar="FILE", help=logs)
    add("--trace", type=Path, metavar="JSON", help="also write the (first) recording as a trace for Perfetto")
    add("--peak-tflops", type=float, metavar="N", help="peak TFLOP/s of the device, to show MFU")


def _report(options: argparse.Namespace) -> int:
    from flatshard.tools.report import Record, html

    if len(options.record) > 2 or len(options.losses) > len(options.record):
        given = f"{len(options.record)} recordings and {len(options.losses)} logs"
        raise ValueError(f"{given} were given; give one or two recordings, and at most one --losses file for each")
    _check_positive(options, "peak_tflops")
    logs = [*options.losses, None, None]
    peak = None if options.peak_tflops is None else 1e12 * options.peak_tflops
    records = [Record.read(path, log, peak) for path, log in zip(options.record, logs)]
    options.output.write_text(html(records), encoding="utf-8")
    if options.trace:
        options.trace.write_text(records[0].trace())
    print(f"{options.output}: open it in a browser")
    if options.trace:
        print(f"{options.trace}: open it in https://ui.perfetto.dev")
    return 0


def _check_positive(options: argparse.Namespace, *names: str) -> None:
    """ValueError if a number that was given is not positive and finite."""
    for name in names:
        value = getattr(options, name)
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"--{name.replace('_', '-')} {value:g}: must be more than 0, and finite")


class _NoScript(ValueError):
    """SCRIPT does not exist."""


def _check_script(options: argparse.Namespace) -> None:
    script = options.script
    if not options.is_module:
        if not Path(script).exists():
            raise _NoScript(f"script {script} does not exist")
        return
    try:
        spec = importlib.util.find_spec(script)
    except (ImportError, ValueError) as error:
        raise _NoScript(f"module {script} cannot be found: {error}") from error
    if spec is None:
        raise _NoScript(f"module {script} cannot be found")


def _add_rehearse(parser: argparse.ArgumentParser) -> None:
    """Run SCRIPT unchanged as one rank of W, with all communication over a modelled network, and report step time, wire
    time, exposed communication and memory. A step ends when optimizer.step() returns, or when the script calls
    flatshard.rehearsal.current().mark_step()."""
    add = parser.add_argument
    add("--world", type=int, required=True, metavar="W", help="number of ranks")
    add("--rank", type=int, default=0, help="the rank that this process runs as (default 0)")
    add_network(parser)
    for level in ("inside", "between"):
        add(f"--{level}-bandwidth", type=float, metavar="GB/S", help=f"bandwidth per rank {level} nodes")
        add(f"--{level}-latency", type=float, metavar="US", help=f"latency per launch {level} nodes")
    add("--segment-cost", type=float, metavar="US", help="time for each further tensor in a launch")
    add("--sms", type=int, help="streaming multiprocessors that a collective occupies (default: one)")
    add("--warmup", type=int, default=2, metavar="STEPS", help="first steps that are not measured (default 2)")
    add("--tokens", type=float, help="tokens per step and rank, to report tokens/s")
    add("--flops", type=float, help="model FLOPs per step and rank, to report FLOP/s")
    add("--json", type=Path, metavar="PATH", help="also write the report to this file")
    add("--record", type=Path, metavar="PATH", help="record a step to this file for `flatshard report`")
    add("--no-baseline", action="store_true", help="skip the second run, in which communication takes no time")
    _add_script(parser)


def _rehearse(options: argparse.Namespace) -> int:
    # torch takes seconds to import, so the arguments are checked first
    from flatshard.rehearsal.network import get_network, with_fields

    if options.world < 1 or not 0 <= options.rank < options.world:
        raise ValueError(f"--world {options.world} --rank {options.rank}: must be at least 1, and 0 <= rank < world")
    if options.warmup < 1:
        raise ValueError(f"--warmup {options.warmup}: must be at least 1, because the first step has no start time")
    _check_positive(options, "tokens", "flops")
    check_writable("json", options.json)
    check_writable("record", options.record)
    network = get_network(options.network, options.ranks_per_node, options.ranks_per_pod, options.algorithm)
    _check_script(options)

    def given(name: str, scale: float) -> float | None:
        number = getattr(options, name)
        return None if number is None else number * scale

    links = {}
    for level in ("inside", "between"):
        bandwidth, latency = given(f"{level}_bandwidth", 1e9), given(f"{level}_latency", 1e-6)
        links[level] = with_fields(getattr(network, level), bandwidth=bandwidth, latency=latency)
    own = with_fields(network, **links, segment=given("segment_cost", 1e-6), sms=options.sms)
    if own != network:
        network = replace(own, name=f"{network.name} with own numbers")
    from flatshard.rehearsal.run import ScriptFailed, ScriptRun, rehearse_script

    names = ("world", "script", "is_module", "rank", "warmup", "tokens", "flops")
    record = None if options.record is None else str(options.record.absolute())
    as_given = {name: getattr(options, name) for name in names}
    run = ScriptRun(network=network, arguments=tuple(options.arguments), record=record, **as_given)
    try:
        report = rehearse_script(run, baseline=not options.no_baseline)
    except ScriptFailed as failure:
        print(f"flatshard rehearse: {failure}", file=sys.stderr)
        return failure.code if failure.code > 0 else 1
    print(report.table())
    if options.json:
        options.json.write_text(report.to_json())
    return 0


def _add_convert(parser: argparse.ArgumentParser) -> None:
    """Write the checkpoint SRC to DST in another format: a folder of flatshard, a folder of
    torch.distributed.checkpoint (as FSDP2 and Megatron-FSDP write it), safetensors, or a file of torch.save. This needs
    memory for one tensor, and no process group."""
    add = parser.add_argument
    add("source", metavar="SRC", help="a file or a folder in any of these formats")
    add("target", metavar="DST", help="the file or folder to write; it must not exist")
    add("--to", choices=("flatshard", "dcp", "safetensors", "torch"), help="format (default: by suffix, or flatshard)")
    rename = "rename tensors: a regular expression and its replacement; may be repeated"
    add("--rename", action="append", default=[], metavar="PATTERN=NEW", help=rename)
    add("--names", metavar="JSON", help="rename tensors: a file that maps old names to new ones")
    add("--model-only", action="store_true", help="convert the weights only, not the optimizer state")


def _convert(options: argparse.Namespace) -> int:
    wrong = next((each for each in options.rename if "=" not in each), None)
    if wrong is not None:
        raise ValueError(f"--rename {wrong!r}: must be PATTERN=NEW, a regular expression and its replacement")
    rename = [(pattern, new) for pattern, _, new in (each.partition("=") for each in options.rename)]
    if options.names is None and not Path(options.source).exists():
        raise ValueError(f"{options.source} does not exist, so there is no checkpoint to convert")
    from flatshard.checkpoint.convert import convert, names_from

    names, model_only = None if options.names is None else names_from(options.names), options.model_only
    form = convert(options.source, options.target, to=options.to, rename=rename, names=names, model_only=model_only)
    print(f"{options.target}: {form}")
    return 0


class _Command(NamedTuple):
    """``add_arguments``: its docstring is the command's description.

    ``mistakes``: the exceptions that mean a mistake of the user; their text is printed in one line.
    """

    help: str
    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]
    mistakes: tuple[type[Exception], ...] = (OSError, ValueError)


_PLANS = "estimate memory, traffic and step time of every sharding strategy for a model"
_COMMANDS = {
    "rehearse": _Command("run a training script as one rank of W on one device", _add_rehearse, _rehearse),
    # Errors of the script itself keep their tracebacks.
    "run": _Command("run a script that uses PyTorch's fully_shard on flatshard", _add_script, _run, (_NoScript,)),
    "plan": _Command(_PLANS, add_plan, plan, (OSError, TypeError, ValueError)),
    "convert": _Command("convert a checkpoint to another format", _add_convert, _convert),
    "blame": _Command("find the rank that stopped a job in the flight records", _add_blame, _blame),
    "report": _Command("draw a recorded step as an HTML page", _add_report, _report),
}


if __name__ == "__main__":
    sys.exit(main())
