"""Models: how they were loaded, and what was done to them before they train."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tuner.program.standins.record import call, called, plain, told
from tuner.program.standins.unknown import ORACLE, Name, Note, Thing, Unknown, put, thing, where

# Calls that matter to memory, or that return the model: recorded, and answered by the model.
RECORDED = set(
    """gradient_checkpointing_enable gradient_checkpointing_disable enable_input_require_grads
    resize_token_embeddings merge_and_unload unload merge_adapter to cuda cpu half bfloat16 float
    double requires_grad_ train eval print_trainable_parameters tie_weights compile set_adapter
    register_forward_hook register_forward_pre_hook register_full_backward_hook freeze
    enable_adapters disable_adapters freeze_feature_encoder freeze_base_model unfreeze apply
    disable_input_require_grads set_attn_implementation quantize for_training
    for_inference load_adapter add_weighted_adapter delete_adapter fuse_lora""".split()
)
_MODULES = "self_attn.q_proj self_attn.k_proj self_attn.v_proj self_attn.o_proj mlp.gate_proj mlp.up_proj mlp.down_proj".split()  # noqa: E501
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
        if name in ("base_model", "model", "module", "_orig_mod", "get_base_model"):
            return self if name != "get_base_model" else lambda: self
        if name == "config":
            put(self, "config", _ModelConfig(self))
            return self.config
        if name == "device":
            return Name("torch.device", type="cuda", index=0)
        return super().__getattr__(name)

    def _recorded(self, name: str, args: Any, kwargs: Any) -> Any:
        note = call(name, args, kwargs)
        self._note.calls.append(note)
        extra = self._note.extra
        if name == "gradient_checkpointing_enable":
            extra["enabled"] = note
        elif name == "gradient_checkpointing_disable":
            extra["enabled"] = None
        elif name in ("merge_and_unload", "unload"):
            extra["adapted"] = None
        elif name == "print_trainable_parameters":
            return None
        return self

    def add_adapter(self, *args: Any, **kwargs: Any) -> None:
        note = call("add_adapter", args, kwargs)
        first = note.given.get("adapter_config", note.given.get("peft_config"))
        self._note.extra["adapted"] = args[1] if isinstance(first, str) and args[1:] else first
        self._note.calls.append(note)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        LAST_CALLED[:] = [self]
        return Unknown(f"{self._what}(...)")

    def _structure(self) -> Iterator[tuple[str, str]]:
        for layer in range(2):
            for name in _MODULES:
                yield f"model.layers.{layer}.{name}", "Linear"
            for name in ("input_layernorm", "post_attention_layernorm"):
                yield f"model.layers.{layer}.{name}", "RMSNorm"
        yield "model.embed_tokens", "Embedding"
        yield "lm_head", "Linear"

    def named_modules(self, *args: Any, **kwargs: Any) -> Any:
        given = self._note.given
        config = given.get("quantization_config")
        four, eight = (
            given.get(name) is True or getattr(config, name, None) is True
            for name in ("load_in_4bit", "load_in_8bit")
        )
        import bitsandbytes
        import torch

        linear = (
            bitsandbytes.nn.Linear4bit
            if four
            else bitsandbytes.nn.Linear8bitLt
            if eight
            else torch.nn.Linear
        )
        for name, kind in self._structure():
            cls = torch.nn.Linear if name == "lm_head" else linear
            yield name, (cls if kind == "Linear" else getattr(torch.nn, kind))()

    def modules(self) -> Any:
        return (module for _, module in self.named_modules())

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, _ in self._structure():
            yield f"{name}.weight", Parameter(self, f"{name}.weight")
        if self._note.extra.get("adapted") is not None:
            for name in ("lora_A.default.weight", "lora_B.default.weight"):
                full = f"base_model.model.model.layers.0.self_attn.q_proj.{name}"
                yield full, Parameter(self, full)

    def parameters(self, *args: Any, **kwargs: Any) -> Any:
        return Parameters(self)

    def _told(self, stubs: frozenset[int] = frozenset()) -> dict[str, Any]:
        extra = self._note.extra
        quantization = self._note.given.get("quantization_config")
        made = told(self, stubs)
        made["made"] = extra.get("made", "")
        for name in ("prepared", "enabled"):
            made[name] = called(extra[name]) if extra.get(name) is not None else None
        adapted = extra.get("adapted")
        made["adapted"] = described(adapted)
        made["quantization"] = described(quantization)
        return made


def described(value: Any) -> Any:
    """O of a configuration, or of the call that took its place; else V."""
    if isinstance(value, Note):
        return called(value)
    return told(value) if isinstance(getattr(value, "_note", None), Note) else plain(value)


class _ModelConfig(Thing):
    """`model.config`: what is set on it is recorded of the model."""

    __slots__ = ()
    _path = "transformers.PretrainedConfig"

    def __init__(self, model: Any) -> None:
        put(self, "_what", "model.config")
        put(self, "_model", model)

    def __setattr__(self, name: str, value: Any) -> None:
        put(self, name, value)
        self._model._note.assign(f"config.{name}", value)


class Parameters(Unknown):
    """`model.parameters()`: goes through the names, and is one thing for an optimizer."""

    __slots__ = ()

    def __init__(self, model: Any) -> None:
        super().__init__("model.parameters()")
        put(self, "_model", model)

    def __iter__(self) -> Iterator[Any]:
        return (parameter for _, parameter in self._model.named_parameters())

    def __next__(self) -> Any:
        return Parameter(self._model, "weight")


class Parameter(Unknown):
    """One parameter: `requires_grad = False` is recorded, with those beside it as one call."""

    __slots__ = ()

    def __init__(self, model: Any, name: str) -> None:
        super().__init__("parameter")
        put(self, "_model", model)
        put(self, "_name", name)

    def __setattr__(self, name: str, value: Any) -> None:
        put(self, name, value)
        if name not in ("requires_grad", "data"):
            return
        at, calls = where(), self._model._note.calls
        path = f"parameter.{name}"
        last = calls[-1] if calls else None
        same = last is not None and last.path == path and last.where == at
        if last is not None and same and plain(last.given["value"]) == plain(value):
            last.given["names"].append(self._name)
            return
        calls.append(Note(path, at, (), {"value": value, "names": [self._name]}))

    def requires_grad_(self, requires_grad: bool = True) -> Any:
        self.requires_grad = requires_grad
        return self


def _loaded(how: str) -> Any:
    def load(cls: Any, *args: Any, **kwargs: Any) -> Any:
        model = Unknown.__new__(cls)
        note = Note(f"{cls._path}.{how}", where(), args, kwargs)
        note.extra["made"] = how
        put(model, "_what", cls._path)
        put(model, "_note", note)
        if not isinstance(cls.__dict__.get("_path"), str) and "__init__" in cls.__dict__:
            cls.__init__(model, Unknown(f"{cls.__name__}.config"))
            put(model, "_note", note)
        return model

    return classmethod(load)


def _fast(cls: Any, *args: Any, **kwargs: Any) -> Any:
    if args:
        kwargs = {
            "model_name": args[0],
            **dict(zip(("max_seq_length", "dtype"), args[1:])),
            **kwargs,
        }
    return Model_fast(cls, kwargs), Unknown("tokenizer")


def Model_fast(cls: Any, kwargs: Any) -> Any:
    model = Unknown.__new__(cls)
    put(model, "_what", cls._path)
    put(model, "_note", Note(cls._path, where(), (), kwargs))
    model._note.extra["made"] = "from_pretrained"
    return model


def _fast_peft(cls: Any, model: Any, *args: Any, **kwargs: Any) -> Any:
    note = call(f"{cls._path}.get_peft_model", args, kwargs)
    if isinstance(model, Model):
        model._note.extra["adapted"] = note
    return model


def _itself(cls: Any, model: Any = None, *args: Any, **kwargs: Any) -> Any:
    return model


def model_class(path: str) -> Any:
    body: dict[str, Any] = {
        name: _loaded(name) for name in ("from_pretrained", "from_config", "_from_config")
    }
    if path.startswith("unsloth.") or path.rpartition(".")[2].startswith("Fast"):
        body["from_pretrained"] = classmethod(_fast)
        body["get_peft_model"] = classmethod(_fast_peft)
        body["for_training"] = body["for_inference"] = classmethod(_itself)
        body["patch_peft_model"] = classmethod(_itself)
    return thing(path, Model, _is_a=_is_a, **body)


def peft_class(path: str) -> Any:
    """`PeftModel(model, config)` and `PeftModel.from_pretrained(model, folder)` are the model."""

    def new(cls: Any, model: Any = None, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        return get_peft_model(model, config, *args, **kwargs)

    def load(cls: Any, model: Any = None, *args: Any, **kwargs: Any) -> Any:
        if isinstance(model, Model):
            model._note.extra["adapted"] = call(f"{path}.from_pretrained", args, kwargs)
        return model

    return thing(path, Thing, __new__=new, from_pretrained=classmethod(load))


def get_peft_model(model: Any = None, peft_config: Any = None, *args: Any, **kwargs: Any) -> Any:
    if isinstance(getattr(model, "_note", None), Note):
        model._note.extra["adapted"] = peft_config
    return model


def prepare_model_for_kbit_training(model: Any, *args: Any, **kwargs: Any) -> Any:
    note = call("peft.prepare_model_for_kbit_training", (model, *args), kwargs)
    note.given.pop("model", None)
    if isinstance(getattr(model, "_note", None), Note):
        model._note.extra["prepared"] = note
    return model


def compile_model(model: Any = None, *args: Any, **kwargs: Any) -> Any:
    """`torch.compile`, also as a decorator."""
    if isinstance(getattr(model, "_note", None), Note):
        model._note.extra["compiled"] = call("torch.compile", (), kwargs)
    return (lambda function: function) if model is None else model
