"""Our adapters as a type of PEFT's: ``PeftModel.from_pretrained(base, adapter)`` after ``import retrofit``.

PEFT has no public way to add a type from outside: this file extends its enum by hand and overrides private methods of
its tuner class; all of that is in here. Where other tuners wrap layers of the base, ours patches the whole base as
:func:`retrofit.load_adapter` does, on the same storage; the base that was passed stays what it is.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from peft import PeftConfig, PeftType
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from peft.utils import register_peft_method
from torch import Tensor, nn

from patches.errors import RetrofitError

from .adapter import OF_THE_BASE, PEFT_TYPE, PREFIX, patch_as, refuse_other_base
from .fingerprint import fingerprint
from .untrusted import check_shapes


def _extend_enum(name: str) -> None:
    member = str.__new__(PeftType, name)
    member._name_ = member._value_ = name
    type.__setattr__(PeftType, name, member)  # where Python 3.12 and later look; before, _member_map_ is asked
    PeftType._member_names_.append(name)
    PeftType._member_map_[name] = member
    PeftType._value2member_map_[name] = member


if not hasattr(BaseTuner, "_remap_adapter_state_dict_for_load"):  # before 0.21 saving and loading asked no tuner
    raise ImportError("PEFT 0.21 is needed")
_extend_enum(PEFT_TYPE)


@dataclass
class RetrofitConfig(PeftConfig):
    """``adapter_config.json`` as PEFT reads and writes it.

    Attributes:
        memory: kind, window, sinks, layers, others, by_layer and options of the memory.
        fingerprint: of the base the memory was fitted to; taken from the base where there is none.
    """

    memory: dict[str, Any] | None = None
    fingerprint: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.peft_type = PeftType(PEFT_TYPE)


class MemorySwitch(nn.Module, BaseTunerLayer):
    """The one adapter layer that PEFT finds when it asks whether adapters are on: it stands for all memories."""

    _disable_adapters: bool = False

    def __init__(self, adapter_name: str):
        super().__init__()
        self._active_adapter = adapter_name

    def _get_available_adapters(self) -> set[str]:
        return {self._active_adapter}


class RetrofitTuner(BaseTuner):
    """The patched base in PEFT's clothes: one memory, on or off."""

    prefix = f"{PEFT_TYPE.lower()}_"
    uses_shared_state = True  # what adds adapters in place, without a PeftModel, is refused by PEFT itself

    def inject_adapter(self, model: nn.Module, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        """Put the patched model in the base's place.

        Raises:
            RetrofitError: a second memory, another base than the adapter's, or PEFT's ``low_cpu_mem_usage``.
        """
        if len(self.peft_config) > 1:
            raise RetrofitError("a model has one memory: load the second adapter on another copy of the base")
        config = self.peft_config[adapter_name]
        if config.memory is None:
            raise RetrofitError("RetrofitConfig needs memory={'kind': ..., 'window': ..., 'sinks': ...}")
        self.model = patch_as(model, config.memory, saved=config.fingerprint is not None)
        self.switch = MemorySwitch(adapter_name)
        if any(parameter.is_meta for parameter in self.model.parameters()):
            raise RetrofitError(
                "low_cpu_mem_usage leaves the model without its weights: load the adapter without that argument"
            )
        if config.fingerprint is None:
            config.fingerprint = fingerprint(self.model)
        refuse_other_base(config.fingerprint, self.model, "this adapter", config.base_model_name_or_path)
        for _, parameter in self.model.memory_parameters():
            parameter.requires_grad_(not config.inference_mode)

    def enable_adapter_layers(self) -> None:
        """Memory on."""
        self._turn(on=True)

    def disable_adapter_layers(self) -> None:
        """Memory off: the base, bit for bit."""
        self._turn(on=False)

    def _turn(self, on: bool) -> None:
        self.model.model.memory_enabled, self.switch._disable_adapters = on, not on

    def _unload_and_optionally_merge(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RetrofitError("a memory cannot be merged into the base's weights: export both with `retrofit merge`")

    def _create_and_replace(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError("inject_adapter does it all")  # abstract in the base class

    @classmethod
    def _get_adapter_state_dict(cls, *, model: Any, state_dict: dict[str, Tensor], **_: Any) -> dict[str, Tensor]:
        tuner = model.base_model
        # the last window is saved, as in save_adapter
        memory = {key: value for key, value in tuner.model.config.memory.items() if key not in OF_THE_BASE}
        tuner.peft_config[tuner.active_adapter].memory = memory
        return {name: state_dict[name].float() for name in _parameters(model)}

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        return key  # ours hold none: there is one memory

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, *, model: Any, state_dict: dict[str, Tensor], **_: Any
    ) -> dict[str, Tensor]:
        found = {name: tensor.shape for name, tensor in state_dict.items()}
        check_shapes("the adapter", found, {name: tensor.shape for name, tensor in _parameters(model).items()})
        return state_dict


def _parameters(model: Any) -> Mapping[str, nn.Parameter]:
    """The memory's parameters by the names they have in a file and in a PeftModel."""
    return {PREFIX + name: parameter for name, parameter in model.base_model.model.memory_parameters()}


register_peft_method(name=PEFT_TYPE.lower(), config_cls=RetrofitConfig, model_cls=RetrofitTuner)
