"""The shape of a model for planning: its units, their parameters, and the order of their forwards."""

from __future__ import annotations

import json
import pkgutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import shorten
from typing import Any, Literal

import torch
from torch import nn

from flatshard.engine.weights.formats import chosen
from flatshard.policy import MixedPrecisionPolicy
from flatshard.tools.presets import NAMED, check_source, config_file
from flatshard.wrapping import unit_modules


@dataclass(frozen=True)
class ParamShape:
    """A parameter. ``after``: the number of inner units of its unit that run before it.

    ``used``: the fraction that each token is multiplied with; for stacked experts, that of the chosen experts.
    ``encoded``: it is sent encoded if all-gathers or reduces have a format.
    ``is_expert``: it is a stack of experts. ``queries``: the output width, if it is the weight of a query projection.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32
    trainable: bool = True
    after: int = 0
    used: float = 1.0
    encoded: bool = False
    is_expert: bool = False
    queries: int = 0


@dataclass(frozen=True)
class UnitShape:
    """A unit. ``is_embedding``: it has only embeddings, whose backward does not read their weights.

    ``is_block``: it is not an embedding, a head or the root; it can be recomputed.
    """

    name: str
    tensors: tuple[ParamShape, ...]
    is_embedding: bool = False
    is_block: bool = False

    @property
    def numel(self) -> int:
        return sum(torch.Size(tensor.shape).numel() for tensor in self.tensors)


@dataclass(frozen=True)
class ModuleCall:
    """A forward of a module of unit number ``unit``, and the calls inside it. ``is_table``: it is an embedding."""

    unit: int
    inner: tuple[ModuleCall, ...] = ()
    is_table: bool = False


@dataclass(frozen=True)
class ModelShape:
    """The units of a model, and the forward of its root, which is assumed to run modules in the order of registration.

    ``experts``: import paths of the classes of modules that hold only experts.
    """

    units: tuple[UnitShape, ...]
    root: ModuleCall
    experts: tuple[str, ...] = ()

    @property
    def numel(self) -> int:
        return sum(unit.numel for unit in self.units)

    @property
    def width(self) -> int:
        """The hidden size, from the first embedding; 0 if there is none."""
        widths = (tensor.shape[-1] for unit in self.units if unit.is_embedding for tensor in unit.tensors)
        return next(widths, 0)

    @property
    def expert_counts(self) -> set[int]:
        """The numbers of experts per layer; more than one if layers differ."""
        return {tensor.shape[0] for unit in self.units for tensor in unit.tensors if tensor.is_expert}


def model_of(
    model: nn.Module,
    units: Literal["auto"] | Sequence[type[nn.Module] | str] = "auto",
    experts_per_token: int | None = None,
) -> ModelShape:
    """The shape of ``model`` with the units of `flatshard.shard_model`. The model may be on the meta device.

    A module counts as experts if its class name ends with "Experts" and its parameters all have the same size of dim 0.
    ``experts_per_token``: the number of experts that each token is sent to; None: all.
    """
    made = unit_modules(model, units)
    stacks = _expert_modules(model)
    number = {module: index for index, modules in enumerate(made) for module in modules}
    names = {module: name for name, module in model.named_modules()}
    known: set[nn.Parameter] = set()
    shapes = []
    for modules in made:
        shapes_of: dict[nn.Parameter, ParamShape] = {}
        passed = 0
        seen: set[nn.Module] = set()
        waiting = list(reversed(modules))
        while waiting:
            module = waiting.pop()
            if module in seen:
                continue
            seen.add(module)
            if module in number and module not in modules:
                passed += 1
                continue
            path = "" if module in modules else names[module].rpartition(".")[2] + "."
            owner = type(modules[0]).__name__
            for key, parameter in module._parameters.items():
                if parameter is not None and parameter not in known:
                    shape = tuple(parameter.shape)
                    chooses = module in stacks and experts_per_token is not None
                    shapes_of[parameter] = ParamShape(
                        shape,
                        parameter.dtype,
                        parameter.requires_grad,
                        after=passed,
                        used=min(1.0, (experts_per_token or 0) / shape[0]) if chooses else 1.0,
                        encoded=chosen(path + key, parameter, [module], MixedPrecisionPolicy(), owner),
                        is_expert=module in stacks,
                        queries=shape[0] if key == "weight" and path[:-1] in _QUERIES else 0,
                    )
            known.update(shapes_of)
            waiting += reversed(list(module.children()))
        embedding = all(type(module) is nn.Embedding for module in modules)
        block = modules[0] is not model and not isinstance(modules[0], (nn.Embedding, nn.Linear))
        shapes.append(UnitShape(names[modules[0]] or "(root)", tuple(shapes_of.values()), embedding, block))
    (root,) = _module_calls(model, number, set())
    return ModelShape(tuple(shapes), root, tuple(dict.fromkeys(_import_path(type(module)) for module in stacks)))


def _import_path(kind: type) -> str:
    return "your_model.Experts" if kind is _Experts else f"{kind.__module__}.{kind.__qualname__}"


_QUERIES = {"q", "q_proj", "wq", "query"}  # usual names of query projections


def _expert_modules(model: nn.Module) -> dict[nn.Module, None]:
    """The modules that hold only stacked experts, in order."""

    def is_stack(module: nn.Module) -> bool:
        shapes = [parameter.shape for parameter in module.parameters()]
        alike = len({shape[:1] for shape in shapes}) == 1 and all(len(shape) > 1 for shape in shapes)
        inner = any(True for child in module.children() for _ in child.parameters())  # activation functions are allowed
        return type(module).__name__.endswith("Experts") and alike and not inner

    return dict.fromkeys(module for module in model.modules() if is_stack(module))


def _module_calls(module: nn.Module, number: Mapping[nn.Module, int], seen: set[nn.Module]) -> tuple[ModuleCall, ...]:
    if module in seen:
        return ()
    seen.add(module)
    inner = tuple(call for child in module.children() for call in _module_calls(child, number, seen))
    return (ModuleCall(number[module], inner, type(module) is nn.Embedding),) if module in number else inner


# Sources of models

# For each model type of Hugging Face: whether q, k and v have biases, whether o has one, whether q and k have norms.
_TYPES: dict[str, tuple[bool | str, bool | str, bool]] = {
    "llama": ("attention_bias", "attention_bias", False),
    "mistral": (False, False, False),
    "qwen2": (True, False, False),
    "qwen3": ("attention_bias", "attention_bias", True),
    "mixtral": (False, False, False),
    "qwen3_moe": ("attention_bias", "attention_bias", True),
}
# For models with experts, the name of the expert width. The number of experts has two names, by version.
_MIXTURES = {"mixtral": "intermediate_size", "qwen3_moe": "moe_intermediate_size"}


def load_model(
    source: str, units: Literal["auto"] | Sequence[str] = "auto", experts_per_token: int | None = None
) -> ModelShape:
    """The shape of a model. ``source``: a name, a ``config.json`` (or its folder), or ``module:callable``.

    The callable must return a module. It is called without arguments on the meta device, so parameters take no memory.
    ``experts_per_token``: the number of experts that each token is sent to, if the configuration does not have it.
    """
    check_source(source)
    config = _config(source)
    if config is None:
        return model_of(_import_model(source), units, experts_per_token)
    if config.get("model_type") in _TYPES:
        return model_of(skeleton(config), units, config.get("num_experts_per_tok"))
    model = _from_transformers(source, config)
    chosen = getattr(model.config.get_text_config(), "num_experts_per_tok", None)  # type: ignore[union-attr,operator]
    return model_of(model, units, chosen if experts_per_token is None else experts_per_token)


def load_runnable(source: str) -> tuple[nn.Module, list[nn.Module]]:
    """The model as a module that runs on the meta device, and its blocks."""
    config = _config(source)
    model = _import_model(source) if config is None else _from_transformers(source, config)
    blocks = {module for modules in unit_modules(model, "auto") for module in modules if module is not model}
    outside = (nn.Embedding, nn.Linear)
    return model, [module for module in model.modules() if module in blocks and not isinstance(module, outside)]


def _config(source: str) -> dict[str, Any] | None:
    """The configuration of ``source``, or None if it is module:callable."""
    if source in NAMED:
        return NAMED[source]
    path = config_file(source)
    if path.suffix != ".json":
        return None
    try:
        config = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"model {source!r}: cannot be read as JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"model {source!r}: must hold one JSON object, the configuration of a Hugging Face model")
    return config


def _from_transformers(source: str, config: Mapping[str, Any]) -> nn.Module:
    """The model of a configuration, built by Transformers on the meta device. ValueError if this is not possible."""
    kind = config.get("model_type")
    try:
        import transformers
    except ImportError as error:
        known = ", ".join(_TYPES)
        raise ValueError(
            f"model_type {kind!r}: needs transformers (without it, {known} are known): pip install 'flatshard[hf]'"
        ) from error
    configs = transformers.AutoConfig
    try:
        made = configs.for_model(**config) if source in NAMED else configs.from_pretrained(source)
        named = next((name for name in made.architectures or () if hasattr(transformers, name)), None)
        # For an encoder-decoder, AutoModelForCausalLM would build only the decoder.
        auto = transformers.AutoModelForSeq2SeqLM if made.is_encoder_decoder else transformers.AutoModelForCausalLM
        with torch.device("meta"):
            try:
                model: nn.Module = auto.from_config(made) if named is None else getattr(transformers, named)(made)
            except ValueError:  # not a language model
                model = transformers.AutoModel.from_config(made)
            if getattr(made, "tie_word_embeddings", False):
                model.tie_weights()  # type: ignore[operator]
        return model
    except Exception as error:  # of any type: models check their configurations, and may need other packages
        raise ValueError(
            f"model_type {kind!r}: transformers cannot build it: {shorten(str(error), 300)}; give module:callable"
        ) from error


def _import_model(source: str) -> nn.Module:
    if "" not in sys.path:
        sys.path.insert(0, "")  # allows modules in the current folder, as `python -m` does
    try:
        make = pkgutil.resolve_name(source)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(f"model {source!r}: cannot be imported: {error}") from error
    if not callable(make):
        raise ValueError(f"model {source!r}: is not callable; give a function that returns a torch.nn.Module")
    try:
        with torch.device("meta"):
            made = make()
    except Exception as error:
        raise ValueError(f"model {source!r}: calling it raised {type(error).__name__}: {error}") from error
    if not isinstance(made, nn.Module):
        raise ValueError(f"model {source!r}: returned {type(made).__name__}, not a torch.nn.Module")
    if not any(parameter.requires_grad for parameter in made.parameters()):
        raise ValueError(f"model {source!r}: no parameter requires gradients, so there is no training step to plan")
    return made


class _Experts(nn.Module):
    def __init__(self, width: int, ffn: int, experts: int) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.empty(experts, 2 * ffn, width))
        self.down = nn.Parameter(torch.empty(experts, width, ffn))


def skeleton(config: Mapping[str, Any]) -> nn.Module:
    """A module with the parameters of a configuration of one of `_TYPES`, on the meta device. It cannot be run."""
    kind = config["model_type"]
    width, ffn, layers, heads, vocab = (
        _positive_int(config, name)
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
    )
    kv_heads = _positive_int(config, "num_key_value_heads", heads)
    if config.get("head_dim") is None and width % heads:
        raise ValueError(f"hidden_size {width}: must be a multiple of num_attention_heads, {heads}")
    head_dim = _positive_int(config, "head_dim", width // heads)
    biases = [bool(config.get(given, False)) if isinstance(given, str) else given for given in _TYPES[kind]]
    mlp_bias = bool(config.get("mlp_bias", False))
    query, key = (width, heads * head_dim, biases[0]), (width, kv_heads * head_dim, biases[0])
    projections = {"q": query, "k": key, "v": key, "o": (heads * head_dim, width, biases[1])}
    dense = {"gate": (width, ffn, mlp_bias), "up": (width, ffn, mlp_bias), "down": (ffn, width, mlp_bias)}
    step, without = _positive_int(config, "decoder_sparse_step", 1), config.get("mlp_only_layers") or ()
    with torch.device("meta"):
        blocks = nn.ModuleList()
        for number in range(layers):
            attention = _linears(projections)
            if biases[2]:
                attention.update({name: nn.RMSNorm(head_dim) for name in ("q_norm", "k_norm")})
            has_experts = kind in _MIXTURES and number not in without and (number + 1) % step == 0
            parts = {"attention": attention, "ffn": _mixture(config, width) if has_experts else _linears(dense)}
            norms = {name: nn.RMSNorm(width) for name in ("attention_norm", "ffn_norm")}
            blocks.append(nn.ModuleDict({**parts, **norms}))
        embed, head = nn.Embedding(vocab, width), nn.Linear(width, vocab, bias=False)
        if config.get("tie_word_embeddings", False):
            head.weight = embed.weight
        return nn.ModuleDict({"embed": embed, "blocks": blocks, "norm": nn.RMSNorm(width), "head": head})


def _linears(shapes: Mapping[str, tuple[int, int, bool]]) -> nn.ModuleDict:
    """Linear layers by name. ``shapes``: (inputs, outputs, whether there is a bias)."""
    return nn.ModuleDict({name: nn.Linear(*shape) for name, shape in shapes.items()})


def _mixture(config: Mapping[str, Any], width: int) -> nn.Module:
    experts = _positive_int(config, "num_local_experts" if config.get("num_experts") is None else "num_experts")
    ffn = _positive_int(config, _MIXTURES[config["model_type"]])
    _positive_int(config, "num_experts_per_tok")  # `load_model` reads it
    router = nn.Linear(width, experts, bias=False)
    return nn.ModuleDict({"router": router, "experts": _Experts(width, ffn, experts)})


def _positive_int(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name} is {value!r} in the configuration; it must be a positive integer")
    return value
