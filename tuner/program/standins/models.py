"""Models: how they were loaded, and what was done to them before they train."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from tuner.program.standins import NAMES
from tuner.program.standins.configs import as_now
from tuner.program.standins.datasets import Holder, Tokenizer, named
from tuner.program.standins.record import call, called, described, plain, told
from tuner.program.standins.unknown import ORACLE, Note, Thing, Unknown, put, thing, where

# Calls that matter to memory, or that return the model: recorded, and answered by the model.
RECORDED = set(NAMES["recorded"])
_LAYERS = [f"model.layers.{layer}.{name}" for layer in range(40) for name in NAMES["layer"]]
_MODULES = ["model.embed_tokens", *_LAYERS, "model.norm", "lm_head"]  # of any model
_ADAPTER = [f"base_model.model.{_LAYERS[0]}.lora_{name}.default" for name in "AB"]
_FAST = "for_training for_inference patch_peft_model"
_ANY = ("torch.nn.Module", "transformers.PreTrainedModel")
_LIGER = "rope rms_norm swiglu geglu cross_entropy fused_linear_cross_entropy layer_norm".split()
LAST_CALLED: list[Any] = []
CONFIGS: dict[str, dict[str, Any]] = {}  # of the request, by the models' names
NAMED: dict[str, None] = {}  # models whose configurations were asked for


def _configured(model: Any, name: str) -> Any:
    """A setting of the configuration of a model by its name; None if it isn't known."""
    if type(model) is not str:
        return None
    NAMED[model] = None
    found, parts = CONFIGS.get(model, {}), ("text_config", "vision_config", "audio_config")
    if found and name in parts and name not in found:
        raise AttributeError(name)
    value = None if "dtype" in name else found.get(name)  # of the call that loads it
    return None if isinstance(value, dict) else value


def _is_a(model: Any, path: str) -> bool:
    if path.startswith("peft."):
        return bool(model.wraps_adapters())
    asks = path.startswith("transformers.") and path != "transformers.PreTrainedModel"
    return ORACLE.truth(f"isinstance({model._what}, {path})") if asks else path in _ANY


class Model(Thing):
    _path = "Thing"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in RECORDED:
            return lambda *args, **kwargs: self._recorded(name, args, kwargs)
        if name in ("base_model", "model", "module", "_orig_mod"):
            return self
        if name == "get_base_model":
            return lambda: self
        made = Config(self, name) if name == "config" else Part(self, name)
        put(self, name, made)
        return made

    def _recorded(self, name: str, args: Any, kwargs: Any, **of: str) -> Any:
        note, extra, calls = call(name, args, kwargs), self._note.extra, self._note.calls
        note.given.update(of)
        # A line that goes through all modules is told once.
        if not (of and calls and (calls[-1].path, calls[-1].where) == (name, note.where)):
            calls.append(note)
        if "checkpointing" in name:
            extra["enabled"] = None if "disable" in name else note
        elif name in ("merge_and_unload", "unload"):
            extra["adapted"] = None
        elif name == "compile":
            extra["compiled"] = note
        elif name == "add_adapter":
            given = [value for value in note.given.values() if type(value) is not str]
            several = extra.get("adapted") is not None  # of which one is active
            one = given[0] if given else None
            extra["adapted"] = Unknown("add_adapter(...)") if several else one
        if name in ("merge_and_unload", "save_pretrained_merged"):
            for training in extra.get("trainings", ()):  # that are over
                training["calls"].append(called(note))
        return None if name == "print_trainable_parameters" else self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        LAST_CALLED[:] = [self]
        return Unknown(f"{self._what}(...)")

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        nn: Any = importlib.import_module("torch.nn")
        given, made = self._note.given, {"embed": nn.Embedding(), "norm": nn.RMSNorm()}
        made |= {"lm_head": nn.Linear(), "proj": nn.Linear()}
        for name, cls in (("load_in_4bit", "Linear4bit"), ("load_in_8bit", "Linear8bitLt")):
            if True in (given.get(name), getattr(given.get("quantization_config"), name, None)):
                made["proj"] = getattr(importlib.import_module("bitsandbytes.nn"), cls)()
        self._note.extra["listed"] = True
        found = {name: next(v for k, v in made.items() if k in name) for name in _MODULES}
        return ((name, _listed(module, self, name)) for name, module in found.items())

    def modules(self) -> Any:
        return (module for _, module in self.named_modules())

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        adapted = self._note.extra.get("adapted") is not None
        names = (f"{name}.weight" for name in (*_MODULES, *(_ADAPTER if adapted else ())))
        return ((name, Part(self, name)) for name in names)

    def parameters(self, *args: Any, **kwargs: Any) -> Any:
        return Part(self, "parameters()")

    def wraps_adapters(self) -> bool:
        """True for PEFT's model, and not for the one that it wraps."""
        return "_is_peft" in vars(self) and self._note.extra.get("adapted") is not None

    def adapted(self) -> Any:
        """PEFT's model around this one; what is done to either is done to both."""
        made: Any = Thing.__new__(type(self))
        vars(made).update(vars(self), _is_peft=True)
        put(made, "_note", self._note)
        return made

    def _told(self, stubs: frozenset[int] = frozenset()) -> dict[str, Any]:
        held = {"quantization": self._note.given.get("quantization_config"), **self._note.extra}
        kinds = ("prepared", "enabled", "quantization")
        of = {kind: described(held.get(kind)) for kind in kinds}
        kept = {name: held.get(name, "") for name in ("made", "listed")}
        return {**told(self, stubs), **of, **kept}

    def __deepcopy__(self, memo: Any = None) -> Any:
        made, note = Thing.__new__(type(self)), self._note
        copied = Note(note.path, note.where, (), note.given)
        copied.assigned, copied.calls = dict(note.assigned), list(note.calls)
        copied.extra = {k: v for k, v in note.extra.items() if k != "trainings"}
        put(made, "_note", copied)
        return made

    __copy__ = __deepcopy__


def _listed(module: Any, model: Model, name: str) -> Any:
    """A module as a model lists it, of its class; what is done to it is recorded of the model."""
    one, part = Thing.__new__(type(module)), Part(model, name)
    for method in ("to", "half", "bfloat16", "float", "requires_grad_", "cuda", "cpu"):
        put(one, method, getattr(part, method))
    put(one, "weight", Part(model, f"{name}.weight"))
    return one


class Part(Unknown):
    """A part of a model, by its name: what is frozen, converted or hooked is recorded."""

    def __init__(self, model: Any, name: str) -> None:
        super().__init__(f"model.{name}")
        put(self, "_model", model)
        put(self, "_name", name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in RECORDED:
            return lambda *args, **kw: self._model._recorded(name, args, kw, of=self._name)
        if name == "requires_grad":
            return self._is_trained()
        if name in ("ndim", "dim") and self._name.endswith(".weight"):
            number = 1 if "norm" in self._name else 2
            return number if name == "ndim" else lambda: number
        if name.removeprefix("named_") in ("parameters", "modules", "children"):
            several = Part(self._model, f"{self._name}.*")
            found = iter([(several._name, several)]) if name[:6] == "named_" else several
            return lambda *args, **kwargs: found
        return Part(self._model, f"{self._name}.{name}")

    def __getitem__(self, key: Any) -> Any:
        return Part(self._model, f"{self._name}[{key!r}]"[:120])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Part(self._model, f"{self._name}()")

    def __delitem__(self, key: Any) -> None:
        self._model._note.assign(f"{self._name}[...]", Unknown(f"del {self._what}[{key!r}]"))

    def __len__(self) -> int:
        return (2, 12, 24, 32, 48, 80)[ORACLE.number(f"number of {self._what}") % 6]

    def __iter__(self) -> Iterator[Any]:
        if self._name == "parameters()":
            return (part for _, part in self._model.named_parameters())
        several = self._name.endswith(".*")
        return iter([self]) if several else map(self.__getitem__, range(len(self)))

    def __setattr__(self, name: str, value: Any) -> None:
        put(self, name, value)
        if name not in ("requires_grad", "data"):
            self._model._note.assign(f"{self._name}.{name}", value)
            return
        made = Note(f"parameter.{name}", where(), (), {"value": value, "names": [self._name]})
        calls = self._model._note.calls
        last = calls[-1] if calls else made
        same = last is not made and (last.path, last.where) == (made.path, made.where)
        if same and plain(last.given["value"]) == plain(value):
            last.given["names"].append(self._name)
        else:
            calls.append(made)

    def _is_trained(self) -> Any:
        """True if it is trained: as it was last set, alone or with all; else as PEFT sets it."""
        for each in reversed(self._model._note.calls):
            if each.path == "parameter.requires_grad" and self._name in each.given["names"]:
                return each.given["value"]
            if each.path == "requires_grad_" and "of" not in each.given:
                return each.given.get("requires_grad", True)
        return self._model._note.extra.get("adapted") is None or "lora_" in self._name

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.requires_grad = requires_grad
        return self


class Config(Part):
    def __getattr__(self, name: str) -> Any:
        return AutoConfig.__getattr__(self, name, self._model._note.given)


class AutoConfig(Holder):
    """A configuration of a model: made of a checkpoint's name, or of numbers."""

    _path = "transformers.AutoConfig"

    def __getattr__(self: Any, name: str, given: Any = None) -> Any:
        given = vars(self) if given is None else given
        found = _configured(given.get("pretrained_model_name_or_path", given.get("0")), name)
        return Unknown.__getattr__(self, name) if found is None else found


def passes(first: Any = None, *args: Any, **kwargs: Any) -> Any:
    return next(iter(kwargs.values()), None) if first is None else first


def wraps(path: str, *more: Any, into: str = "") -> Any:
    """A call that returns the model or trainer that it gets, and is recorded of it."""

    def wrap(*args: Any, **kwargs: Any) -> Any:
        held = [*args, *kwargs.values()]
        first: Any = next((v for v in held if isinstance(v, Thing)), held[0] if held else None)
        if isinstance(note := getattr(first, "_note", None), Note):
            made = call(path, args, kwargs)
            made.given = {k: v for k, v in made.given.items() if v is not first}
            if into:
                note.extra[into] = made
            else:
                note.calls.append(made)
        if into == "adapted" and isinstance(first, Model):
            first = first.adapted()
        return (first, *more) if more else first

    return wrap


def _loader(how: str, names: str, *more: Any) -> Any:
    def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
        given = named(names, args, kwargs)
        if ".Auto" in vars(cls).get("_path", ""):
            task = cls._path.rpartition("AutoModel")[2]
            of = given.get("pretrained_model_name_or_path")

            def named_as() -> str:
                known = (_configured(of, "architectures") or [""])[0]
                return known if task and known.endswith(task) else str(Unknown(f"class of {of}"))

            cls = type(cls)("", (cls,), {**vars(cls), "_named": named_as})
        model = Thing.__new__(cls)
        given = {name: as_now(value) for name, value in given.items()}
        note = Note(f"{cls._path}.{how}", where(), () if names else args, given)
        if cls._path.startswith("liger_kernel."):
            named_ones = {name: note.given.pop(name) for name in _LIGER if name in note.given}
            note.calls.append(Note("apply_liger_kernel_to_auto", note.where, (), named_ones))
        note.extra["made"] = how
        if "_path" not in vars(cls) and "__init__" in vars(cls):  # the user's own class
            cls.__init__(model, Unknown(f"{cls.__name__}.config"))
            note.assigned = model._note.assigned
        put(model, "_note", note)
        return (model, *(each() for each in more)) if more else model

    return classmethod(load)


def model_class(path: str) -> Any:
    last = path.rpartition(".")[2]
    body = {how: _loader(how, "config") for how in ("from_config", "_from_config")}
    body["from_pretrained"] = _loader("from_pretrained", "pretrained_model_name_or_path")
    if last.startswith("Fast"):
        tokenizer = () if "Sentence" in last else (Tokenizer,)
        body["from_pretrained"] = _loader("from_pretrained", "", *tokenizer)
        body["get_peft_model"] = staticmethod(wraps(f"{path}.get_peft_model", into="adapted"))
        body |= dict.fromkeys(_FAST.split(), staticmethod(passes))
    return thing(path, Model, _is_a=_is_a, **body)


def get_peft_model(model: Any = None, peft_config: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(getattr(model, "_note", None), Note):
        model._note.extra["adapted"] = as_now(peft_config)
        model._note.calls += [call("get_peft_model", args, kwargs)] if kwargs else []
    return model.adapted() if isinstance(model, Model) else model


def peft_class(path: str) -> Any:
    """`PeftModel(model, config)` and `PeftModel.from_pretrained(model, folder)` are the model."""
    new = staticmethod(lambda cls, *args, **kwargs: get_peft_model(*args, **kwargs))
    load = staticmethod(wraps(f"{path}.from_pretrained", into="adapted"))
    return thing(path, Thing, __new__=new, from_pretrained=load)


def compile_model(model: Any = None, **kwargs: Any) -> Any:
    """`torch.compile`, also as a decorator."""
    return passes if model is None else wraps("torch.compile", into="compiled")(model, **kwargs)
