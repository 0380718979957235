"""The command ``flatshard``."""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from flatshard import __version__

if TYPE_CHECKING:
    import torch

    from flatshard.rehearsal.network import Link


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one subcommand; returns the exit status."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    try:
        status = _main(given)
        sys.stdout.flush()
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    return status


def parser() -> argparse.ArgumentParser:
    """The parser of all commands but ``train``, which has its own."""
    parser = _Parser(prog="flatshard", description="Fully sharded data parallelism for PyTorch.")
    parser.add_argument("--version", action="version", version=f"flatshard {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("train", help="train a language model", add_help=False)
    _add_rehearse(commands.add_parser("rehearse", help="run a training script as one rank of W on one device"))
    _add_run(commands.add_parser("run", help="run a script that uses PyTorch's fully_shard on flatshard"))
    _add_plan(commands.add_parser("plan", help="memory, traffic and fit of every sharding strategy for a model"))
    _add_convert(commands.add_parser("convert", help="convert a checkpoint to another format"))
    _add_blame(commands.add_parser("blame", help="say which rank stopped a job, from the ranks' flight records"))
    _add_report(commands.add_parser("report", help="show a recorded step as an HTML page"))
    return parser


def _main(arguments: list[str]) -> int:
    commands = parser()
    if arguments[:1] == ["train"]:
        from flatshard.train.command import train

        return train(arguments[1:])
    options, unknown = commands.parse_known_args(arguments)
    if unknown:
        options.parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    status: int = options.run(options)
    return status


class _Parser(argparse.ArgumentParser):
    """Reports an error in one line; ``--help`` lists the options."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def _add_run(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run SCRIPT unchanged: what it imports from torch.distributed.fsdp is flatshard's. Under torchrun: "
        "torchrun --nproc-per-node N -m flatshard run SCRIPT ..."
    )
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="passed to SCRIPT")
    parser.set_defaults(run=_run, parser=parser)


def _run(options: argparse.Namespace) -> int:
    import runpy

    missing = _missing_script(options.script, options.is_module)
    if missing is not None:
        print(f"flatshard run: {missing}", file=sys.stderr)
        return 2
    from flatshard.installing import install

    install()
    if os.environ.get("LOCAL_RANK", "0") == "0":
        print(f"flatshard run: {options.script} uses flatshard for torch.distributed.fsdp", file=sys.stderr)
    sys.argv = [options.script, *options.arguments]
    if options.is_module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, str(Path(options.script).resolve().parent))
        runpy.run_path(options.script, run_name="__main__")
    return 0


def _add_blame(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Say in one paragraph which rank stopped where, and what the others waited for. FOLDER has the flight "
        "records of the ranks: FLATSHARD_RECORD, or the folder that the error names."
    )
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.add_argument(
        "--last", type=int, default=0, metavar="N", help="also print the last N collectives of every rank"
    )
    parser.set_defaults(run=_blame, parser=parser)


def _blame(options: argparse.Namespace) -> int:
    from flatshard.trust.blame import blame, last_launches, read_records

    try:
        records = read_records(options.folder)
    except (ValueError, OSError) as error:
        print(f"flatshard blame: {error}", file=sys.stderr)
        return 2
    if any(record.entries or "error" in record.header for record in records.values()):
        print(blame(records))
    else:
        print(f"{len(records)} records, all empty: these ranks have launched no collective, and raised no error.")
    if options.last > 0:
        print("\n".join(last_launches(records, options.last)))
    return 0


def _add_report(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Show what `flatshard rehearse --record FILE` or `flatshard train --record FILE` has recorded as one HTML "
        "file that needs no network: lanes over time, exposed waits, memory, layout, loss curves. Two recordings are "
        "shown side by side, with their differences."
    )
    parser.add_argument("record", type=Path, nargs="+", metavar="RECORD", help="one recording, or two to compare")
    parser.add_argument("-o", "--output", type=Path, default=Path("report.html"), metavar="HTML")
    parser.add_argument(
        "--losses",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE",
        help="loss logs of the runs (flatshard train --losses)",
    )
    parser.add_argument(
        "--trace", type=Path, metavar="JSON", help="also write the (first) recording as a trace for Perfetto"
    )
    parser.add_argument("--peak-tflops", type=float, metavar="N", help="peak TFLOP/s of a device, for MFU")
    parser.set_defaults(run=_report, parser=parser)


def _report(options: argparse.Namespace) -> int:
    from flatshard.tools.report import Record, html

    try:
        if len(options.record) > 2 or len(options.losses) > len(options.record):
            raise ValueError("give one or two recordings, and at most one log for each")
        logs = [*options.losses, None, None]
        peak = None if options.peak_tflops is None else 1e12 * options.peak_tflops
        records = [Record.read(path, log, peak) for path, log in zip(options.record, logs)]
        options.output.write_text(html(records), encoding="utf-8")
        if options.trace:
            options.trace.write_text(records[0].trace())
    except (OSError, ValueError) as error:
        print(f"flatshard report: {error}", file=sys.stderr)
        return 2
    print(f"{options.output}: open it in a browser")
    if options.trace:
        print(f"{options.trace}: open it in https://ui.perfetto.dev")
    return 0


def _missing_script(script: str, is_module: bool) -> str | None:
    """What is wrong with the name of a script, or None."""
    if not is_module:
        return None if Path(script).exists() else f"there is no script {script}"
    import importlib.util

    try:
        found = importlib.util.find_spec(script)
    except (ImportError, ValueError) as error:
        return f"there is no module {script}: {error}"
    return None if found is not None else f"there is no module {script}"


def _add_rehearse(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Run SCRIPT unchanged as one rank of W, with all communication over a modelled network, and report step time, "
        "wire time, exposed communication and memory. Steps end where the optimizer's step ends, or where the script "
        "calls flatshard.rehearsal.current().mark_step()."
    )
    parser.add_argument("--world", type=int, required=True, metavar="W", help="number of ranks")
    parser.add_argument("--rank", type=int, default=0, help="which rank to be (default 0)")
    parser.add_argument("--network", default="h100-nvlink", help="a preset; unknown names list them")
    parser.add_argument("--ranks-per-node", type=int, help="how many consecutive ranks share a node (default 8)")
    for level in ("inside", "between"):
        parser.add_argument(
            f"--{level}-bandwidth", type=float, metavar="GB/S", help=f"bandwidth per rank {level} nodes"
        )
        parser.add_argument(f"--{level}-latency", type=float, metavar="US", help=f"latency per launch {level} nodes")
    parser.add_argument("--segment-cost", type=float, metavar="US", help="cost of each further tensor of one launch")
    parser.add_argument("--sms", type=int, help="multiprocessors that a collective occupies (default 0)")
    parser.add_argument("--warmup", type=int, default=2, metavar="STEPS", help="first steps, not measured (default 2)")
    parser.add_argument("--tokens", type=float, help="tokens per step and rank, for tokens/s")
    parser.add_argument("--flops", type=float, help="model FLOPs per step and rank, for FLOP/s")
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the report here too")
    parser.add_argument("--record", type=Path, metavar="PATH", help="record a step here, for `flatshard report`")
    parser.add_argument("--no-baseline", action="store_true", help="skip the second run, on a network that is free")
    parser.add_argument("-m", dest="is_module", action="store_true", help="SCRIPT is a module's name")
    parser.add_argument("script", metavar="SCRIPT")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, metavar="...", help="passed to SCRIPT")
    parser.set_defaults(run=_rehearse, parser=parser)


def _rehearse(options: argparse.Namespace) -> int:
    # torch takes seconds to import: not before the arguments are known to be good
    from flatshard.rehearsal.network import get_network

    try:
        if options.world < 1 or not 0 <= options.rank < options.world:
            raise ValueError(
                f"--world {options.world} --rank {options.rank}: the rank must be from 0 to below the world"
            )
        if options.warmup < 1:
            raise ValueError(f"--warmup {options.warmup}: must be at least 1, since the first step has no beginning")
        _check_writable("json", options.json)
        _check_writable("record", options.record)
        network = get_network(options.network, options.ranks_per_node)
        missing = _missing_script(options.script, options.is_module)
        if missing is not None:
            raise ValueError(missing)
        own = replace(
            network,
            inside=_link(network.inside, options.inside_bandwidth, options.inside_latency),
            between=_link(network.between, options.between_bandwidth, options.between_latency),
            segment=network.segment if options.segment_cost is None else options.segment_cost * 1e-6,
            sms=network.sms if options.sms is None else options.sms,
        )
        if own != network:
            network = replace(own, name=f"{network.name} with own numbers")
    except ValueError as error:
        print(f"flatshard rehearse: {error}", file=sys.stderr)
        return 2
    from flatshard.rehearsal.run import ScriptFailed, ScriptRun, rehearse_script

    try:
        run = ScriptRun(
            world=options.world,
            network=network,
            script=options.script,
            arguments=tuple(options.arguments),
            is_module=options.is_module,
            rank=options.rank,
            warmup=options.warmup,
            tokens=options.tokens,
            flops=options.flops,
            record=None if options.record is None else str(options.record.absolute()),
        )
        report = rehearse_script(run, baseline=not options.no_baseline)
    except ValueError as error:
        print(f"flatshard rehearse: {error}", file=sys.stderr)
        return 2
    except ScriptFailed as failure:
        print(f"flatshard rehearse: {failure}", file=sys.stderr)
        return failure.code if failure.code > 0 else 1
    print(report.table())
    if options.json:
        options.json.write_text(report.to_json())
    return 0


def _link(link: Link, bandwidth: float | None, latency: float | None) -> Link:
    """``link`` with the numbers that were given, in GB/s and microseconds."""
    return replace(
        link,
        bandwidth=link.bandwidth if bandwidth is None else bandwidth * 1e9,
        latency=link.latency if latency is None else latency * 1e-6,
    )


def _add_plan(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Print the memory and traffic of every sharding strategy for MODEL, whether it fits, and which one to take. "
        "MODEL is a named shape (llama-8b, mixtral-8x7b, ...; an unknown name lists them), a Hugging Face config.json "
        "(or its folder), or module:callable that returns a module. No GPU is needed."
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument("--devices", type=int, required=True, metavar="W", help="number of devices, one rank each")
    parser.add_argument("--memory", required=True, help="memory of one device, in GB, or with a unit: 80GB, 80GiB")
    parser.add_argument("--network", default="h100-nvlink", help="a preset; unknown names list them")
    parser.add_argument("--ranks-per-node", type=int, help="how many consecutive ranks share a node (default 8)")
    parser.add_argument(
        "--optimizer", default="adamw", help="for the size of its state (default adamw); unknown names list them"
    )
    parser.add_argument("--main-dtype", default="float32", help="dtype of main weights and state (default float32)")
    parser.add_argument("--param-dtype", default="bfloat16", help="dtype of compute (default bfloat16)")
    parser.add_argument("--reduce-dtype", help="dtype of reduce-scatters (default: that of compute)")
    parser.add_argument("--grad-dtype", help="dtype of reduced gradients (default: that of main)")
    parser.add_argument("--gather-format", choices=("int8", "float8"), help="format of all-gathers (docs/formats.md)")
    parser.add_argument(
        "--reduce-format",
        nargs="+",
        choices=("int8", "bf16_fp32"),
        help="format of reduce-scatters; two: outer, inner axis",
    )
    parser.add_argument("--layout", default="tensor", choices=("tensor", "flat", "auto"), help="layout of buffers")
    parser.add_argument("--units", nargs="+", metavar="CLASS", help="import paths of unit classes (default: automatic)")
    parser.add_argument("--microbatches", type=int, default=1, metavar="N", help="micro-batches per step (default 1)")
    parser.add_argument("--activations", metavar="SIZE", help="activations of one rank, if you know them")
    parser.add_argument("--batch", type=int, metavar="ROWS", help="rows per micro-batch and rank; for activations")
    parser.add_argument("--length", type=int, metavar="TOKENS", help="tokens per row; for activations and attention")
    parser.add_argument("--recompute", action="store_true", help="blocks recompute their activations in backward")
    parser.add_argument(
        "--ep", type=int, metavar="N", help="expert parallelism among N neighbouring ranks (default: tried)"
    )
    parser.add_argument("--experts-per-token", type=int, metavar="N", help="if the model's configuration does not say")
    parser.add_argument("--picture", action="store_true", help="also draw what fits on which number of devices")
    parser.add_argument("--spare", type=float, default=0.1, help="part of the memory to leave free (default 0.1)")
    parser.add_argument(
        "--tokens", type=float, help="tokens per micro-batch and rank, for the step time (default: batch x length)"
    )
    parser.add_argument(
        "--tflops", metavar="N", help="TFLOP/s that matrix products reach, for the step time; or 'measured', here"
    )
    parser.add_argument(
        "--memory-bandwidth",
        type=float,
        default=3.35,
        metavar="TB/S",
        help="memory bandwidth of a device (default 3.35)",
    )
    parser.add_argument(
        "--host-ms", type=float, default=2.7, help="host time per unit and micro-batch (default 2.7); 0: captured"
    )
    parser.add_argument(
        "--peak-tflops", type=float, default=989.0, metavar="N", help="peak TFLOP/s of a device, for MFU (default 989)"
    )
    parser.add_argument("--json", type=Path, metavar="PATH", help="write the figures here too")
    parser.set_defaults(run=_plan, parser=parser)


def _plan(options: argparse.Namespace) -> int:
    from flatshard.rehearsal.network import get_network
    from flatshard.tools.presets import OPTIMIZERS, check_source

    try:
        if options.optimizer not in OPTIMIZERS:
            raise ValueError(f"optimizer {options.optimizer!r} is not known; choose one of {', '.join(OPTIMIZERS)}")
        if (options.batch is not None and options.length is None) or min(options.batch or 1, options.length or 1) < 1:
            raise ValueError("activations are estimated from both --batch and --length, at least 1")
        if options.tokens is None and options.batch is not None and options.tflops is not None:
            options.tokens = float(options.batch * options.length)
        if (options.tokens is None) != (options.tflops is None):
            raise ValueError("a step time needs both --tokens, or --batch and --length, and --tflops")
        tflops = _tflops(options.tflops)
        if any(given is not None and given < 1 for given in (options.ep, options.experts_per_token)):
            raise ValueError("--ep and --experts-per-token are at least 1")
        network = get_network(options.network, options.ranks_per_node)
        memory = _size("memory", options.memory)
        activations = None if options.activations is None else _size("activations", options.activations)
        recomputed: float | None = None
        if options.devices < 1:
            raise ValueError(f"--devices {options.devices}: devices are at least 1")
        check_source(options.model)
        _check_writable("json", options.json)

        from flatshard.policy import MixedPrecisionPolicy
        from flatshard.tools.model_shapes import load_model
        from flatshard.tools.plan import Machine, Training, compare_strategies, picture
        from flatshard.tools.timing import Speed, measured_flops

        param_dtype = _dtype("param", options.param_dtype)
        model = load_model(options.model, options.units or "auto", options.experts_per_token)
        if options.batch is not None:
            saved, recomputed = (size + (activations or 0) for size in _activations(options))
            activations, recomputed = (recomputed, None) if options.recompute else (saved, recomputed)
        if tflops == "measured":
            tflops = measured_flops(model, options.tokens, param_dtype) / 1e12
            print(f"measured here: {tflops:,.1f} TFLOP/s\n")
        machine = Machine(options.devices, memory, network, options.spare)
        training = Training(
            precision=MixedPrecisionPolicy(
                param_dtype=param_dtype,
                reduce_dtype=_dtype("reduce", options.reduce_dtype),
                main_dtype=_dtype("main", options.main_dtype),
                grad_dtype=_dtype("grad", options.grad_dtype),
                gather_format=options.gather_format,
                reduce_format=_pair(options.reduce_format),
            ),
            layout=options.layout,
            state=OPTIMIZERS[options.optimizer],
            microbatches=options.microbatches,
            activations=activations,
            recomputed=recomputed,
            recompute=options.recompute,
            speed=None
            if tflops is None
            else Speed(
                1e12 * tflops,
                options.tokens,
                options.length,
                options.recompute,
                1e12 * options.memory_bandwidth,
                1e-3 * options.host_ms,
                1e12 * options.peak_tflops,
            ),
            expert_parts=options.ep,
        )
        found = compare_strategies(model, machine, training)
        drawn = picture(model, machine, training) if options.picture else None
        if options.json:
            options.json.write_text(found.to_json())
    except (OSError, TypeError, ValueError) as error:
        print(f"flatshard plan: {error}", file=sys.stderr)
        return 2
    print(found.table())
    if drawn is not None:
        print(f"\n{drawn}")
    return 0


def _pair(given: list[Any] | None) -> Any:
    """One value as it is, several as a tuple."""
    return given[0] if given is not None and len(given) == 1 else given and tuple(given)


def _tflops(given: str | None) -> Any:
    """A number, "measured", or None."""
    if given is None or given == "measured":
        return given
    try:
        return float(given)
    except ValueError:
        raise ValueError(f"--tflops {given!r}: must be a number of TFLOP/s, or 'measured'") from None


def _activations(options: argparse.Namespace) -> tuple[int, int]:
    """Bytes that a micro-batch leaves for its backward: without recompute, and with it."""
    from flatshard.tools.activations import activations_of
    from flatshard.tools.model_shapes import load_runnable

    dtype = _dtype("param", options.param_dtype)
    found = activations_of(*load_runnable(options.model), options.batch, options.length, dtype)
    return found.saved, found.recomputed


def _add_convert(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write the checkpoint SRC to DST in another format: flatshard's own folder, a folder of "
        "torch.distributed.checkpoint (as FSDP2 and Megatron-FSDP write it), safetensors, or a file of torch.save. "
        "It takes the memory of one tensor, and no process group."
    )
    parser.add_argument("source", metavar="SRC")
    parser.add_argument("target", metavar="DST", help="must not exist; .pt, .pth, .bin and .safetensors say the format")
    parser.add_argument(
        "--to", choices=("flatshard", "dcp", "safetensors", "torch"), help="the format (default: by the name of DST)"
    )
    parser.add_argument(
        "--rename",
        action="append",
        default=[],
        metavar="PATTERN=NEW",
        help="rename tensors: a regular expression and its replacement; may be repeated",
    )
    parser.add_argument("--names", metavar="JSON", help="rename tensors: a file that maps old names to new ones")
    parser.add_argument("--model-only", action="store_true", help="convert the weights only, not the optimizer state")
    parser.set_defaults(run=_convert, parser=parser)


def _convert(options: argparse.Namespace) -> int:
    try:
        wrong = next((each for each in options.rename if "=" not in each), None)
        if wrong is not None:
            raise ValueError(f"--rename {wrong!r}: must be PATTERN=NEW")
        rename = [(pattern, new) for pattern, _, new in (each.partition("=") for each in options.rename)]
        if options.names is None and not Path(options.source).exists():
            raise ValueError(f"{options.source}: no checkpoint found")
        from flatshard.checkpoint.convert import convert, names_from

        names = None if options.names is None else names_from(options.names)
        form = convert(
            options.source, options.target, to=options.to, rename=rename, names=names, model_only=options.model_only
        )
    except (OSError, ValueError) as error:
        print(f"flatshard convert: {error}", file=sys.stderr)
        return 2
    print(f"{options.target}: {form}")
    return 0


def _check_writable(name: str, path: Path | None) -> None:
    """ValueError if a file cannot be written, before any work is done."""
    if path is None:
        return
    try:
        with path.open("a"):
            pass
    except OSError as error:
        raise ValueError(f"--{name} {path}: {error.strerror}") from error


def _size(name: str, given: str) -> float:
    """Bytes: a number of GB, or one with its unit."""
    units = {"GiB": 2**30, "MiB": 2**20, "TB": 1e12, "GB": 1e9, "MB": 1e6}
    unit = next((unit for unit in units if given.endswith(unit)), "")
    try:
        size = float(given.removesuffix(unit)) * units.get(unit, 1e9)
    except ValueError:
        size = -1.0
    if not 0 <= size < float("inf"):
        raise ValueError(f"--{name} {given!r}: must be a number of GB, or one with its unit ({', '.join(units)})")
    return size


def _dtype(name: str, given: str | None) -> torch.dtype | None:
    import torch

    found = None if given is None else getattr(torch, given, None)
    if given is not None and not isinstance(found, torch.dtype):
        raise ValueError(f"--{name}-dtype {given!r} is no dtype of torch; for example bfloat16 or float32")
    return found


if __name__ == "__main__":
    sys.exit(main())
