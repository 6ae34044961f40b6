"""Models: how they were loaded, and what was done to them before they train."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

from tuner.program.standins.configs import as_now
from tuner.program.standins.record import call, called, described, plain, told
from tuner.program.standins.unknown import ORACLE, Name, Note, Thing, Unknown, put, thing, where

# Calls that matter to memory, or that return the model: recorded, and answered by the model.
RECORDED = set(
    """gradient_checkpointing_enable gradient_checkpointing_disable enable_input_require_grads
    resize_token_embeddings merge_and_unload unload merge_adapter to cuda cpu half bfloat16 float
    double requires_grad_ train eval print_trainable_parameters tie_weights compile set_adapter
    register_forward_hook register_forward_pre_hook register_full_backward_hook freeze unfreeze
    enable_adapters disable_adapters freeze_feature_encoder freeze_base_model apply quantize
    disable_input_require_grads set_attn_implementation for_training for_inference load_adapter
    add_weighted_adapter delete_adapter fuse_lora enable_gradient_checkpointing enable_adapter
    enable_xformers_memory_efficient_attention use_gradient_checkpointing
    register_post_accumulate_grad_hook save_pretrained_merged""".split()
)
_LINEAR = """self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj
mlp.up_proj mlp.down_proj""".split()
_NORMS = ["input_layernorm", "post_attention_layernorm"]
LAYERS = 40
LAST_CALLED: list[Any] = []


def _is_a(model: Any, path: str) -> bool:
    if path.startswith("peft."):
        return model._note.extra.get("adapted") is not None
    if path in ("torch.nn.Module", "transformers.PreTrainedModel"):
        return True
    return path.startswith("transformers.") and ORACLE.truth(f"isinstance({model._what}, {path})")


class Model(Thing):
    """A pretrained model."""

    __slots__ = ()
    _path = "Thing"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in RECORDED:
            return lambda *args, **kwargs: self._recorded(name, args, kwargs)
        if name in ("base_model", "model", "module", "_orig_mod"):
            return self
        if name in ("get_base_model", "get_model"):
            return lambda: self
        if name == "device":
            return Name("torch.device", type="cuda", index=0)
        if name == "peft_config":
            return {"default": self._note.extra.get("adapted")}
        made = Config(self) if name == "config" else Part(self, name)
        put(self, name, made)
        return made

    def _recorded(self, name: str, args: Any, kwargs: Any, of: str = "") -> Any:
        note, extra = call(name, args, kwargs), self._note.extra
        if of:
            note.given["of"] = of
        self._note.calls.append(note)
        if name in ("gradient_checkpointing_enable", "enable_gradient_checkpointing"):
            extra["enabled"] = note
        elif name == "gradient_checkpointing_disable":
            extra["enabled"] = None
        elif name in ("merge_and_unload", "unload"):
            extra["adapted"] = None
        elif name == "compile":
            extra["compiled"] = note
        if name in ("merge_and_unload", "save_pretrained_merged"):
            for training in extra.get("trainings", ()):  # that are over
                training["calls"].append(called(note))
        return None if name == "print_trainable_parameters" else self

    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        note = call("add_adapter", args, kwargs)
        given = [v for k, v in note.given.items() if k != "adapter_name" and type(v) is not str]
        self._note.extra["adapted"] = given[0] if given else None
        self._note.calls.append(note)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        LAST_CALLED[:] = [self]
        return Unknown(f"{self._what}(...)")

    def _structure(self) -> Iterator[tuple[str, str]]:
        yield "model.embed_tokens", "Embedding"
        for layer in range(LAYERS):
            yield from ((f"model.layers.{layer}.{name}", "Linear") for name in _LINEAR)
            yield from ((f"model.layers.{layer}.{name}", "RMSNorm") for name in _NORMS)
        yield "model.norm", "RMSNorm"
        yield "lm_head", "Linear"

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        nn: Any = importlib.import_module("torch.nn")
        given = self._note.given
        config, linear = given.get("quantization_config"), nn.Linear
        for name, cls in (("load_in_4bit", "Linear4bit"), ("load_in_8bit", "Linear8bitLt")):
            if given.get(name) is True or getattr(config, name, None) is True:
                linear = getattr(importlib.import_module("bitsandbytes.nn"), cls)
        made = {k: getattr(nn, k)() for k in ("Linear", "Embedding", "RMSNorm")}
        inner: dict[str, Any] = {**made, "Linear": linear()}
        for name, kind in self._structure():
            yield name, (made if name == "lm_head" else inner)[kind]

    def modules(self) -> Any:
        return (module for _, module in self.named_modules())

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, _ in self._structure():
            yield f"{name}.weight", Part(self, f"{name}.weight")
        if self._note.extra.get("adapted") is not None:
            for name in ("lora_A.default.weight", "lora_B.default.weight"):
                full = f"base_model.model.model.layers.0.self_attn.q_proj.{name}"
                yield full, Part(self, full)

    def parameters(self, *args: Any, **kwargs: Any) -> Any:
        return Part(self, "parameters()")

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        return dict(self.named_parameters())

    def _told(self, stubs: frozenset[int] = frozenset()) -> dict[str, Any]:
        extra, made = self._note.extra, told(self, stubs)
        made["made"] = extra.get("made", "")
        for name in ("prepared", "enabled"):
            made[name] = called(extra[name]) if extra.get(name) is not None else None
        made["adapted"] = described(extra.get("adapted"))
        made["quantization"] = described(self._note.given.get("quantization_config"))
        return made


class Config(Thing):
    """`model.config`: what is set on it is recorded of the model."""

    __slots__ = ()
    _path = "transformers.PretrainedConfig"

    def __init__(self, model: Any) -> None:
        put(self, "_what", f"{model._what}.config")
        put(self, "_model", model)

    def __setattr__(self, name: str, value: Any) -> None:
        put(self, name, value)
        self._model._note.assign(f"config.{name}", value)


class Part(Unknown):
    """A part of a model, by its name: what is frozen, converted or hooked is recorded."""

    __slots__ = ()

    def __init__(self, model: Any, name: str) -> None:
        super().__init__(f"model.{name}")
        put(self, "_model", model)
        put(self, "_name", name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in RECORDED - {"requires_grad_"}:
            return lambda *args, **kwargs: self._model._recorded(name, args, kwargs, self._name)
        if name in ("parameters", "modules", "children"):
            return lambda *args, **kwargs: Part(self._model, f"{self._name}.*")
        if name in ("named_parameters", "named_modules", "named_children"):
            part = f"{self._name}.*"
            return lambda *args, **kwargs: iter([(part, Part(self._model, part))])
        if name in ("shape", "dtype", "numel", "size", "device", "ndim", "grad", "sum"):
            return Unknown(f"{self._what}.{name}")
        if name == "requires_grad":
            return Unknown(f"{self._what}.requires_grad")
        return Part(self._model, f"{self._name}.{name}")

    def __getitem__(self, key: Any) -> Any:
        return Part(self._model, f"{self._name}[{key!r}]"[:120])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return Part(self._model, f"{self._name}()")

    def __len__(self) -> int:
        return (2, 12, 24, 32, 48, 80)[ORACLE.number(f"number of {self._what}") % 6]

    def __iter__(self) -> Iterator[Any]:
        if self._name == "parameters()":
            return (part for _, part in self._model.named_parameters())
        if self._name.endswith(".*"):
            return iter([self])
        return (self[index] for index in range(len(self)))

    def __next__(self) -> Any:
        return self

    def __setattr__(self, name: str, value: Any) -> None:
        put(self, name, value)
        if name not in ("requires_grad", "data"):
            self._model._note.assign(f"{self._name}.{name}", value)
            return
        at, calls, path = where(), self._model._note.calls, f"parameter.{name}"
        last = calls[-1] if calls else None
        same = last is not None and last.path == path and last.where == at
        if last is not None and same and plain(last.given["value"]) == plain(value):
            last.given["names"].append(self._name)
        else:
            calls.append(Note(path, at, (), {"value": value, "names": [self._name]}))

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.requires_grad = requires_grad
        return self


def _made(cls: Any, how: str, kwargs: Any) -> Any:
    model = Unknown.__new__(cls)
    kwargs = {name: as_now(value) for name, value in kwargs.items()}
    note = Note(f"{cls._path}.{how}", where(), (), kwargs)
    note.extra["made"] = how
    put(model, "_what", cls._path)
    put(model, "_note", note)
    return model


def _loaded(how: str) -> Any:
    first = "config" if "config" in how else "pretrained_model_name_or_path"

    def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = _made(cls, how, {**dict(zip((first,), args)), **kwargs})
        note = model._note
        if "_path" not in vars(cls) and "__init__" in vars(cls):  # the user's own class
            cls.__init__(model, Unknown(f"{cls.__name__}.config"))
            put(model, "_note", note)
        return model

    return classmethod(load)


def _fast(cls: Any, *args: Any, **kwargs: Any) -> Any:
    from tuner.program.standins.data import Tokenizer

    names = ("model_name", "max_seq_length", "dtype", "load_in_4bit")
    model = _made(cls, "from_pretrained", {**dict(zip(names, args)), **kwargs})
    return model if "Sentence" in cls.__name__ else (model, Tokenizer())


def _fast_peft(cls: Any, model: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(model, Model):
        made = call(f"{cls._path}.get_peft_model", (model, *args), kwargs)
        del made.given["model" if "model" in made.given else "0"]
        model._note.extra["adapted"] = made
    return model


def passes(first: Any = None, *args: Any, **kwargs: Any) -> Any:
    """A wrapper that returns what it gets."""
    return next(iter(kwargs.values()), None) if first is None else first


def wraps(path: str, *more: Any) -> Any:
    """A call that returns the model or trainer that it gets, and is recorded of it."""

    def wrap(*args: Any, **kwargs: Any) -> Any:
        held = [*args, *kwargs.values()]
        first: Any = next((v for v in held if isinstance(v, Thing)), held[0] if held else None)
        if isinstance(getattr(first, "_note", None), Note):
            note = call(path, [v for v in args if v is not first], {})
            note.given.update({k: v for k, v in kwargs.items() if v is not first})
            first._note.calls.append(note)
        return (first, *more) if more else first

    return wrap


def model_class(path: str) -> Any:
    body = {name: _loaded(name) for name in ("from_pretrained", "from_config", "_from_config")}
    if path.rpartition(".")[2].startswith("Fast"):
        body["from_pretrained"] = classmethod(_fast)
        body["get_peft_model"] = classmethod(_fast_peft)
        for name in ("for_training", "for_inference", "patch_peft_model"):
            body[name] = staticmethod(passes)
    return thing(path, Model, _is_a=_is_a, **body)


def peft_class(path: str) -> Any:
    """`PeftModel(model, config)` and `PeftModel.from_pretrained(model, folder)` are the model."""

    def new(cls: Any, model: Any = None, peft_config: Any = None, *args: Any, **kw: Any) -> Any:
        return get_peft_model(model, peft_config)

    def load(cls: Any, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, Model):
            model._note.extra["adapted"] = call(f"{path}.from_pretrained", args, kwargs)
        return model

    return thing(path, Thing, __new__=new, from_pretrained=classmethod(load))


def get_peft_model(model: Any = None, peft_config: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(getattr(model, "_note", None), Note):
        model._note.extra["adapted"] = as_now(peft_config)
    return model


def prepare_model_for_kbit_training(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    note = call("peft.prepare_model_for_kbit_training", (model, *args), kwargs)
    note.given.pop("model", None)
    if isinstance(getattr(model, "_note", None), Note):
        model._note.extra["prepared"] = note
    return model


def compile_model(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`torch.compile`, also as a decorator."""
    if isinstance(getattr(model, "_note", None), Note):
        model._note.extra["compiled"] = call("torch.compile", args, kwargs)
    return passes if model is None else model
